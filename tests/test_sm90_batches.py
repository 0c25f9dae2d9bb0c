"""The batch of a call on the Hopper kernels: what `vmap` adds to it, and how launches divide it."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import batching
from pallas_fa2.backends.sm90 import support
from pallas_fa2.parse_call import parse_call
from tests.support import interpreter
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow


@pytest.mark.parametrize("in_axes", [slow((0, None, None)), (None, 0, 1), slow((1, 0, 0))])
def test_vmap_joins_the_batch(in_axes: tuple) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((1, 40, 2, 64), (1, 40, 1, 64), (1, 40, 1, 64))
    args = []
    for key, shape, axis in zip(keys, shapes, in_axes, strict=True):
        full = list(shape)
        if axis is not None:
            full.insert(axis, 2)
        args.append(jax.random.normal(key, full, jnp.bfloat16))

    def loss(implementation: str) -> Any:
        def one(q: Any, k: Any, v: Any) -> Any:
            out = fa.flash_attention(q, k, v, mask=fa.Causal(), implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.vmap(jax.grad(one, (0, 1, 2)), in_axes)

    with planned_for_h200():
        got = interpreter.run(loss("hopper"), *args)
    chex.assert_trees_all_close(got, interpreter.run(loss("reference"), *args), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("limit", [5, 12])
@pytest.mark.parametrize("mapped", [None, 0])
def test_what_a_batch_shares_reaches_every_launch(mapped: int | None, limit: int) -> None:
    def kernel(x: jax.Array, y: jax.Array, empty: jax.Array) -> jax.Array:
        assert y.shape[0] in (1, x.shape[0])
        return x + y

    x, y = jnp.arange(24.0).reshape(3, 4, 2), jnp.arange(6.0).reshape(3, 1, 2)
    launches, empty = batching.batched(kernel, limit), jnp.zeros((1, 0, 2))

    def call(x: jax.Array, y: jax.Array) -> jax.Array:
        return launches(x, y, empty)

    chex.assert_trees_all_equal(call(x.reshape(12, 2), y[1]), x.reshape(12, 2) + y[1])
    shared = y if mapped == 0 else y[1]
    expected = x + jnp.broadcast_to(shared, x.shape)
    chex.assert_trees_all_equal(jax.vmap(call, (0, mapped))(x, shared), expected)


def test_what_a_batch_shares_is_not_copied_for_launches() -> None:
    """Nor is its gradient."""

    def kernel(x: jax.Array, shared: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert len(x) in (5, 2) and len(shared) == 1
        return x + shared, (x * shared).sum(0, keepdims=True)

    x, shared = jnp.arange(24.0).reshape(12, 2), jnp.array([[2.0, 3.0]])
    expected = x + shared, (x * shared).sum(0, keepdims=True)
    chex.assert_trees_all_equal(batching.batched(kernel, limit=5)(x, shared), expected)


@pytest.mark.parametrize("vmapped", [False, True])
def test_a_large_batch_takes_several_launches(vmapped: bool) -> None:
    launched = []

    def kernel(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        launched.append(x.shape[0])
        return x + y, x * y

    x, y = (jnp.arange(24.0).reshape(3, 4, 2) + i for i in range(2))
    call = batching.batched(kernel, limit=5)
    got = jax.vmap(call)(x, y) if vmapped else call(x.reshape(12, 2), y.reshape(12, 2))
    assert launched[-3:] == [5, 5, 2]
    expected = jax.tree.map(lambda z: z if vmapped else z.reshape(12, 2), (x + y, x * y))
    chex.assert_trees_all_equal(got, expected)


@pytest.mark.parametrize(
    "shape, entries",
    [
        ((1, 16, 16, 128), 65_535 // 16),  # entries times heads
        ((1, 1 << 19, 16, 128), 1),  # two had 2^31 elements
        ((0, 8, 1, 64), 65_535),
    ],
)
def test_the_batch_of_a_launch(shape: tuple, entries: int) -> None:
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    spec, _ = parse_call(x, x, x)
    assert support.batch_limit(spec) == entries


def test_vmap_over_data_of_a_mask() -> None:
    """One q, k and v, two packings."""
    q, k = (jax.random.normal(jax.random.key(i), (2, 90, 2, 64), jnp.bfloat16) for i in range(2))
    ids = jnp.sort(jax.random.randint(jax.random.key(2), (2, 2, 90), 0, 4), -1)

    def loss(implementation: str) -> Any:
        def one(q: Any, ids: Any) -> Any:
            mask = fa.Causal() & fa.Segments(ids)
            out = fa.flash_attention(q, k, k, mask=mask, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.vmap(jax.grad(one), (None, 0))

    with planned_for_h200(cores=3):
        got = interpreter.run(loss("hopper"), q, ids)
    chex.assert_trees_all_close(
        got, interpreter.run(loss("reference"), q, ids), rtol=0.1, atol=0.05
    )
