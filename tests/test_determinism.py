"""The same call, many times: out, lse, dK and dV are bitwise the same, dQ up to the order of its sum, or
as well where that is asked for.

What differs once in hundreds of runs is a race that no interpreter has seen.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa

CALLS: dict[str, Callable] = {
    "causal": lambda ids: {"mask": fa.Causal()},
    "window": lambda ids: {"mask": fa.Causal() & fa.Window(100)},
    "packed": lambda ids: {"mask": fa.Causal() & fa.Segments(ids)},
    "capped": lambda ids: {"mask": fa.Causal(), "score": fa.soft_cap(5.0)},
}


class Sizes(NamedTuple):
    batch: int
    length: int
    head_dim: int
    repeats: int


def bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def beyond_rounding(x: jax.Array, y: jax.Array) -> jax.Array:
    """Whether sums of the same numbers in float32, rounded to bfloat16, differ more than they may."""
    x, y = (z.astype(jnp.float32) for z in (x, y))
    allowed = 2.0**-7 * jnp.abs(y) + 1e-5 * jnp.max(jnp.abs(y))
    return jnp.any(~(jnp.abs(x - y) <= allowed))


def differ_in_bits(*pair: Any) -> jax.Array:
    """Of arrays, or tuples of them: one number for each array."""
    arrays = zip(*map(jax.tree.leaves, pair), strict=True)
    return jnp.stack([jnp.any(bits(x) != bits(y)) for x, y in arrays])


@jax.jit
def compare(first: tuple, found: tuple) -> jax.Array:
    """1 where out, lse, dk, dv or dq differ."""
    *same, dq = zip(first, found, strict=True)
    differ = [jnp.any(differ_in_bits(*pair)) for pair in same]
    return jnp.stack([*differ, beyond_rounding(*dq)]).astype(jnp.int32)


def differences(
    name: str,
    sizes: Sizes,
    implementation: str,
    deterministic: bool = False,
    in_bits: bool = False,
) -> jax.Array:
    """How many of the repeats differ from the first run, `in_bits` in dq too; nothing but the numbers leaves the
    device."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, dout = (
        jax.random.normal(key, (sizes.batch, sizes.length, heads, sizes.head_dim), jnp.bfloat16)
        for key, heads in zip(keys, (4, 2, 2, 4), strict=False)
    )
    dlse = jax.random.normal(keys[4], (sizes.batch, 4, sizes.length))
    ids = jnp.sort(jax.random.randint(keys[5], (sizes.batch, sizes.length), 0, 8), 1)

    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any, ids: Any) -> tuple:
        def attend(q: Any, k: Any, v: Any) -> Any:
            options = CALLS[name](ids)
            options |= {"implementation": implementation, "deterministic_gradients": deterministic}
            return fa.flash_attention(q, k, v, return_lse=True, **options)

        found, pull = jax.vjp(attend, q, k, v)
        dq, dk, dv = pull((dout, dlse))
        return (*found, dk, (dv, dq) if in_bits else dv, dq)

    args = q, k, v, dout, dlse, ids
    first, counts = run(*args), jnp.zeros(5, jnp.int32)
    for _ in range(sizes.repeats):
        counts += compare(first, run(*args))
    return counts


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["hopper", "ampere"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_runs_are_the_same(name: str, head_dim: int, implementation: str) -> None:
    """About 5 s after the compilation."""
    found = differences(name, Sizes(60, 1000, head_dim, 1000), implementation)
    assert not found.any(), dict(zip(("out", "lse", "dk", "dv", "dq"), found.tolist(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("batch, length, repeats", [(60, 1000, 1000), (1, 8200, 300)])
@pytest.mark.parametrize("implementation", ["hopper", "ampere"])
def test_dq_is_the_same_where_it_is_asked_for(
    implementation: str, batch: int, length: int, repeats: int, name: str, head_dim: int
) -> None:
    sizes = Sizes(batch, length, head_dim, repeats)
    found = differences(name, sizes, implementation, deterministic=True, in_bits=True)
    assert not found.any(), found.tolist()


def test_the_same_is_done_without_a_gpu() -> None:
    """Of what the tests above run on one. (That a program for a CPU gives other bits is hard to imagine.)"""
    found = differences(
        "packed", Sizes(2, 20, 16, 2), "blockwise", deterministic=True, in_bits=True
    )
    assert found.shape == (5,) and not found.any()


def test_a_difference_is_seen() -> None:
    x = jnp.ones((2, 4, 2, 8), jnp.bfloat16)
    first = (x, jnp.ones((2, 2, 4)), x, x, x)
    one_bit = first[0].at[1, 2, 0, 3].set(1 + 2.0**-7)
    assert compare(first, first).tolist() == [0, 0, 0, 0, 0]
    assert compare(first, (-x, first[1] + 1e-6, one_bit, -x, one_bit)).tolist() == [1, 1, 1, 1, 0]
    for dq in (x.at[0, 0, 0, 0].set(1.1), x.at[0, 0, 0, 0].set(jnp.nan)):
        assert compare(first, (*first[:4], dq)).tolist() == [0, 0, 0, 0, 1]
