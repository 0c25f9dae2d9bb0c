"""`merge` of attention on parts of the keys is attention on all of them, gradients included."""

import functools
import itertools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.support import interpreter

KEYS = jax.random.split(jax.random.key(0), 4)
Q = jax.random.normal(KEYS[0], (2, 5, 4, 8))
K, V = jax.random.normal(KEYS[1], (2, 2, 12, 2, 8))
MASK = jax.random.bernoulli(KEYS[2], 0.4, (2, 4, 5, 12)).at[:, :, 0].set(False)
ENDS = (0, 1, 4, 12)  # of three parts


def whole(q: Any, k: Any, v: Any) -> Any:
    return fa.flash_attention(q, k, v, mask=MASK, return_lse=True, implementation="reference")


def merged(q: Any, k: Any, v: Any) -> Any:
    parts = []
    for a, b in itertools.pairwise(ENDS):
        part = fa.flash_attention(
            q, k[:, a:b], v[:, a:b], mask=MASK[..., a:b], return_lse=True,
            implementation="reference",
        )  # fmt: skip
        parts.append(part)
    return fa.merge(*parts)


def test_parts_make_the_whole() -> None:
    chex.assert_trees_all_close(merged(Q, K, V), whole(Q, K, V), atol=1e-6)
    assert bool((merged(Q, K, V)[1][:, :, 0] == -jnp.inf).all())  # a query without keys


def test_gradients_are_those_of_the_whole() -> None:
    weight = jax.random.normal(KEYS[3], Q.shape)

    def loss(attend: Any, *args: Any) -> Any:
        out, lse = attend(*args)
        return jnp.sum(out * weight) + jnp.sum(jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)))

    actual, expected = (
        interpreter.run(jax.grad(functools.partial(loss, f), argnums=(0, 1, 2)), Q, K, V)
        for f in (merged, whole)
    )
    chex.assert_trees_all_close(actual, expected, atol=2e-6)


def test_one_part_and_weightless_parts_change_nothing() -> None:
    part = whole(Q, K, V)
    chex.assert_trees_all_close(fa.merge(part), part, atol=0, rtol=1e-6)
    nothing = jnp.full_like(part[0], jnp.nan), jnp.full_like(part[1], -jnp.inf)
    chex.assert_trees_all_close(fa.merge(nothing, part, nothing), part, atol=0, rtol=1e-6)
    out, lse = fa.merge(nothing, nothing)
    assert not out.any() and bool((lse == -jnp.inf).all())


def test_large_logsumexps_do_not_overflow() -> None:
    out = jnp.ones((1, 2, 1, 4), jnp.bfloat16)
    lse = jnp.array([[[1000.0, -1000.0]]])
    result, total = fa.merge((out, lse), (2 * out, lse))
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result.astype(jnp.float32), np.full((1, 2, 1, 4), 1.5, "f"))
    np.testing.assert_allclose(total, lse + np.log(2))


def test_a_prefix_that_sequences_share() -> None:
    """Attention on the prefix once, as one batch entry, and on each sequence's own tokens."""
    prefix = fa.flash_attention(
        Q.reshape(1, 10, 4, 8), K[:1, :6], V[:1, :6], return_lse=True, implementation="reference"
    )
    out = prefix[0].reshape(2, 5, 4, 8)
    lse = prefix[1].reshape(4, 2, 5).swapaxes(0, 1)
    cache = fa.Cache(K[:, 6:], V[:, 6:], jnp.array([6, 5]))
    own = fa.cached_attention(Q, cache, return_lse=True, implementation="reference")
    keys, values = (jnp.concatenate([jnp.repeat(x[:1, :6], 2, 0), x[:, 6:]], 1) for x in (K, V))
    both = fa.Cache(keys, values, jnp.array([12, 11]))
    expected = fa.cached_attention(Q, both, return_lse=True, implementation="reference")
    chex.assert_trees_all_close(fa.merge((out, lse), own), expected, atol=1e-6)


@pytest.mark.parametrize(
    "message, parts",
    [
        ("one or more pairs", ()),
        ("one or more pairs", (Q,)),
        ("one or more pairs", ([(Q, Q), (Q, Q)],)),
        ("every out must be floats of one shape", ((Q, jnp.zeros((2, 4, 5))), (Q[:, 1:], jnp.zeros((2, 4, 5))))),
        ("every out must be floats of one shape and dtype", ((Q, jnp.zeros((2, 4, 5))), (Q.astype(jnp.bfloat16), jnp.zeros((2, 4, 5))))),
        (r"lse must have shape \[\*B, N, T\]", ((Q, jnp.zeros((2, 5, 4))),)),
    ],
)  # fmt: skip
def test_errors(message: str, parts: tuple) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fa.merge(*parts)
