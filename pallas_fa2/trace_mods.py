"""Traces masks and scores (FlexAttention's mods), once for each code and kind of data."""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from pallas_fa2.ir.arrays import NUM_LEADING_AXES, CallShape
from pallas_fa2.ir.trace import TracedFn, trace
from pallas_fa2.masks import Mask
from pallas_fa2.scores import Score

INDEX = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.int32)


def trace_mask(mask: Mask, data: Any, dims: CallShape, first_position: int) -> TracedFn:
    """Trace a mask as a boolean function of the query's row, the key's index and the data.

    The position of a query is its row plus `first_position`.
    """
    key = jax.tree.structure(mask), _avals(mask), _avals(data), dims, first_position
    return _cached(_cached_mask, mask.fingerprint(), *key)


def trace_score(
    score: Score, data: Any, dims: CallShape, first_position: int, dtype: np.dtype
) -> TracedFn:
    """Trace a score as a function of a score in `dtype`, the query's row, the key's index and the data."""
    key = jax.tree.structure(score), _avals(score), _avals(data), dims, first_position, dtype
    return _cached(_cached_score, score.fingerprint(), *key)


def _cached(trace_fn: Any, fingerprint: Hashable | None, *key: Any) -> TracedFn:
    """Use the cache where the fingerprint tells what the code reads; otherwise trace again."""
    if fingerprint is None:
        return trace_fn.__wrapped__(None, *key)
    return trace_fn((fingerprint, jax.config.jax_enable_x64), *key)  # pyright: ignore


class _Avals(NamedTuple):
    """The structure of a pytree and the shapes and dtypes of its leaves, hashable."""

    tree: Any
    leaves: tuple

    def unflatten(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)


def _avals(tree: Any) -> _Avals:
    leaves, structure = jax.tree.flatten(tree)
    return _Avals(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=512)
def _cached_mask(
    fingerprint: Hashable,
    tree: Any,
    fields: _Avals,
    data: _Avals,
    dims: CallShape,
    first_position: int,
) -> TracedFn:
    mask = fields.unflatten()

    def visible(row: Any, k_index: Any, data: Any) -> Any:
        return jnp.asarray(mask.evaluate(_position(row, first_position), k_index, data, dims))

    code = trace(f"mask {mask!r}", visible, INDEX, INDEX, data.unflatten())
    _check_result(code, "a boolean", np.dtype(bool))
    return dataclasses.replace(code, name=repr(mask))


@functools.lru_cache(maxsize=512)
def _cached_score(
    fingerprint: Hashable,
    tree: Any,
    fields: _Avals,
    data: _Avals,
    dims: CallShape,
    first_position: int,
    dtype: np.dtype,
) -> TracedFn:
    score = fields.unflatten()

    def apply(s: Any, row: Any, k_index: Any, data: Any) -> Any:
        return jnp.asarray(score.evaluate(s, _position(row, first_position), k_index, data, dims))

    s = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, dtype)
    code = trace(f"score {score!r}", apply, s, INDEX, INDEX, data.unflatten())
    _check_result(code, f"one {dtype.name}", dtype)
    return dataclasses.replace(code, name=repr(score))


def _position(row: Any, first_position: int) -> Any:
    # Explicit positions take the place of rows, and `first_position` is then 0.
    return row + np.int32(first_position) if first_position else row


def _check_result(code: TracedFn, what: str, dtype: np.dtype) -> None:
    (out,) = cast(list[ShapedArray], code.jaxpr.out_avals)
    if out.shape != () or out.dtype != dtype:
        raise TypeError(
            f"{code.name} must return {what} for one pair of tokens, but it returns "
            f"{out.dtype}[{','.join(map(str, out.shape))}]; compare or cast its result"
        )
