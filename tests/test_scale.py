"""Sizes at which 16- and 32-bit numbers end. On a CPU the same checks run at a small size.

A large problem repeats a small one along an axis, by pieces of 5, 10 or 85, of which no power of two is
a multiple: all of the result is known, and an address that has lost its high bits meets other data.
The largest needs 23 GB of device memory (by XLA's analysis).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.sm90.backward import config
from pallas_fa2.backends.sm90.support import MAX_COUNT
from tests.contract import suite
from tests.contract.cases import Case
from tests.contract.dense import Truth
from tests.contract.rule import FACTOR, FLOOR
from tests.contract.rule import error as error_of
from tests.support.hopper import H200

# The repeated axis of q, k, v, dout and dlse, and that of out, lse, dq, dk and dv.
ARGUMENTS = {
    "batch": (0, 0, 0, 0, 0),
    "heads": (2, 2, 2, 2, 1),
    "queries": (1, None, None, 1, 2),
    "keys": (None, 1, 1, None, None),
}
RESULTS = {
    "batch": (0, 0, 0, 0, 0),
    "heads": (2, 1, 2, 2, 2),
    "queries": (1, 2, 1, None, None),
    "keys": (None, None, None, 1, 1),
}


class Large(NamedTuple):
    """A case, so many times along an axis."""

    case: Case
    along: str
    times: int

    def repeat(self, *arrays: Any) -> list[Any]:
        def along(x: Any, axis: int | None) -> Any:
            return jnp.tile(x, [self.times if i == axis else 1 for i in range(x.ndim)])

        return [along(*pair) for pair in zip(arrays, ARGUMENTS[self.along], strict=True)]

    def expected(self, small: Truth) -> Truth:
        """Return the expected results of each repetition."""
        n = self.times
        if self.along == "queries":
            return small._replace(dk=n * small.dk, dv=n * small.dv)
        if self.along == "keys":
            return small._replace(lse=small.lse + math.log(n), dk=small.dk / n, dv=small.dv / n)
        return small

    def apart(self, x: Any, axis: int | None) -> Any:
        """Repetitions first."""
        if axis is None:
            return x[None]
        shape = (*x.shape[:axis], self.times, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    @property
    def rounded(self) -> float:
        """The error bound of a sum over repeated tokens: tensor cores add 16 products at a time, and truncate."""
        case = self.case
        length = {"queries": case.q_len, "keys": case.kv_len}.get(self.along, 0) * self.times
        return length / 16 * 2.0**-23


def check(large: Large, implementation: str | None) -> None:
    inputs = large.case.inputs()
    goal, unfused = suite.expected(large.case, inputs)
    limits = [
        max(0.0 if name == "lse" else FACTOR * error_of(x, y), FLOOR[str(x.dtype)]) + large.rounded
        for name, x, y in zip(Truth._fields, unfused, goal, strict=True)
    ]
    goal = [np.asarray(x, np.float32) for x in large.expected(goal)]
    run = suite.value_and_gradients(large.case, implementation)

    @jax.jit
    def errors(inputs: list, goal: list) -> list:
        """Only numbers leave the device."""
        # Or XLA would never have the arrays as a whole.
        results = jax.lax.optimization_barrier(
            run(*jax.lax.optimization_barrier(large.repeat(*inputs)))
        )
        each = map(large.apart, results, RESULTS[large.along])
        return [
            jnp.max(jnp.abs(x.astype(jnp.float32) - y[None])) / jnp.max(jnp.abs(y))
            for x, y in zip(each, goal, strict=True)
        ]

    for name, actual, limit in zip(Truth._fields, errors(inputs, goal), limits, strict=True):
        assert actual <= limit, f"{name} of {large}: error {actual:.3g} > {limit:.3g}"


ELEMENTS = Large(Case("elements", 5, 128, 128, 16, 1, 128), "batch", 1640)  # 23 GB
WORKSPACE = Large(Case("workspace", 5, 65, 65, 16, 1, 64), "batch", 3280)  # 16 GB, half of it dQ
GRID = [
    Large(Case("entries", 5, 8, 8, 1, 1, 64), "batch", 14_000),
    Large(Case("heads", 1, 8, 8, 5, 5, 64), "heads", MAX_COUNT // 5),
    Large(Case("grouped_heads", 1, 8, 8, 10, 5, 128), "heads", MAX_COUNT // 10),
    # as many blocks of 64 as there may be
    Large(Case("blocks_of_queries", 1, 85, 64, 1, 1, 64), "queries", 64 * MAX_COUNT // 85),
    Large(Case("blocks_of_keys", 1, 64, 85, 1, 1, 64), "keys", 64 * MAX_COUNT // 85),
]


def name(large: Large) -> str:
    return large.case.name


@pytest.mark.gpu
@pytest.mark.parametrize("large", [ELEMENTS, WORKSPACE, *GRID], ids=name)
def test_large_calls_on_hopper(large: Large) -> None:
    check(large, "hopper")


@pytest.mark.gpu
def test_more_heads_than_hopper_takes() -> None:
    large = GRID[1]._replace(times=MAX_COUNT // 5 + 1)
    q, k, v, *_ = jax.eval_shape(large.repeat, *large.case.inputs())
    chosen = fa.explain(q, k, v)
    assert chosen.implementation == "ampere" and "65535 heads at most" in str(chosen)
    check(large, None)


def test_the_large_cases_are_as_large_as_documented() -> None:
    def size(large: Large, length: int) -> int:
        case = large.case
        return case.batch * large.times * length * case.q_heads * case.head_dim

    assert size(ELEMENTS, ELEMENTS.case.q_len) > 2**31
    head_dim = WORKSPACE.case.head_dim
    block = config.BackwardConfig(head_dim, head_dim).block_q
    assert size(WORKSPACE, WORKSPACE.case.q_len) < 2**31 < size(WORKSPACE, block)
    assert GRID[0].times * GRID[0].case.batch > MAX_COUNT


@pytest.mark.parametrize("along", ARGUMENTS)
def test_the_same_at_a_small_size(along: str) -> None:
    large = Large(Case("small", 2, 7, 5, 6, 3, 16), along, 3)
    check(large, "blockwise")


def test_a_wrong_large_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last repetition alone is."""
    large = Large(Case("small", 3, 8, 8, 1, 1, 16), "batch", 3)
    right = suite.value_and_gradients

    def wrong(*args: Any) -> Any:
        def run(*arrays: Any) -> tuple:
            out, *rest = right(*args)(*arrays)
            return out.at[-1].set(out[0]), *rest

        return run

    monkeypatch.setattr(suite, "value_and_gradients", wrong)
    with pytest.raises(AssertionError, match="out of Large"):
        check(large, "blockwise")


def test_a_larger_batch_entry_is_an_error() -> None:
    x = jax.ShapeDtypeStruct((1, 1 << 16, 512, 64), jnp.bfloat16)
    results = fa.explain(x, x, x, device=H200)
    assert results.implementation == "blockwise"
    assert "a batch entry has fewer than 2^31 elements, and here are 2147483648" in str(results)


def attend(implementation: str, mask: Any, q: Any, k: Any, v: Any) -> tuple:
    return fa.flash_attention(q, k, v, mask=mask, return_lse=True, implementation=implementation)


def in_halves(implementation: str, q: Any, k: Any, v: Any) -> tuple:
    """Causal attention by three calls; where there are two for a query, merged by their logsumexp."""
    half = q.shape[1] // 2
    causal = functools.partial(attend, implementation, fa.Causal())
    early, late = (tuple(x[:, rows] for x in (q, k, v)) for rows in np.s_[:half, half:])
    before = causal(*early)
    pair = attend(implementation, None, late[0], *early[1:]), causal(*late)
    lse = jnp.logaddexp(pair[0][1], pair[1][1])
    weights = (jnp.moveaxis(jnp.exp(part - lse), 1, 2)[..., None] for _, part in pair)
    out = sum(x.astype(jnp.float32) * w for (x, _), w in zip(pair, weights, strict=True))
    out = jnp.concatenate([before[0], out.astype(q.dtype)], 1)
    return out, jnp.concatenate([before[1], lse], 2)


PARTS = 16  # of the tokens: the first have by far the largest outputs and gradients


def deviations(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the relative errors in the Frobenius norm."""

    def norms(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x.astype(jnp.float32).reshape(PARTS, -1), axis=1)

    return norms(x.astype(jnp.float32) - y.astype(jnp.float32)) / norms(y)


@pytest.mark.parametrize(
    "length, implementation",
    [(192, "blockwise"), pytest.param(1_000_000, "hopper", marks=pytest.mark.gpu)],  # 6 GB
)
def test_a_long_call_equals_its_merged_halves(length: int, implementation: str) -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((1, length, n, 128) for n in (2, 1, 1, 2))
    q, k, v, dout = (
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    )
    dlse = jax.random.normal(keys[4], (1, 2, length))

    def run(call: Any) -> Any:
        def values_and_gradients(q: Any, k: Any, v: Any, *cotangents: Any) -> tuple:
            results, pull = jax.vjp(call, q, k, v)
            return results, pull(cotangents)

        return jax.jit(values_and_gradients)(q, k, v, dout, dlse)

    (out, lse), gradients = run(functools.partial(attend, implementation, fa.Causal()))
    (merged, merged_lse), of_halves = run(functools.partial(in_halves, implementation))
    assert jnp.max(jnp.abs(lse - merged_lse)) < 1e-4
    for x, y in zip((out, *gradients), (merged, *of_halves), strict=True):
        assert jnp.max(deviations(x, y)) < 0.02, deviations(x, y)
