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


def trace_mod(
    mod: Mask | Score, data: Any, dims: CallShape, first_position: int, dtype: Any = None
) -> TracedFn:
    """Trace a mask as a boolean function of a query's row, a key's index and the data.

    The position of a query is its row plus `first_position`. A score has a score in `dtype` as first argument and as
    result. The cache is used where the fingerprint tells what the code reads.
    """
    fingerprint = mod.fingerprint()
    key = _avals(mod), _avals(data), dims, first_position, dtype
    if fingerprint is None:
        return _trace.__wrapped__(None, *key)
    return _trace((fingerprint, jax.config.jax_enable_x64), *key)  # pyright: ignore


class _Avals(NamedTuple):
    """The structure of a pytree and the shapes and dtypes of its leaves, hashable."""

    tree: Any
    leaves: tuple

    def unflatten(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)


def _avals(tree: Any) -> _Avals:
    leaves, structure = jax.tree.flatten(tree)
    return _Avals(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=1024)
def _trace(
    fingerprint: Hashable,
    fields: _Avals,
    data: _Avals,
    dims: CallShape,
    first_position: int,
    dtype: np.dtype | None,
) -> TracedFn:
    mod = fields.unflatten()

    def evaluate(*args: Any) -> Any:
        *s, row, k_index, data = args
        # Explicit positions take the place of rows, and `first_position` is then 0.
        q_index = row + np.int32(first_position) if first_position else row
        return jnp.asarray(mod.evaluate(*s, q_index, k_index, data, dims))

    shape = (1,) * NUM_LEADING_AXES
    args = [jax.ShapeDtypeStruct(shape, jnp.int32)] * 2
    kind, result, result_dtype = "mask", "a boolean", np.dtype(bool)
    if dtype is not None:
        args = [jax.ShapeDtypeStruct(shape, dtype), *args]
        kind, result, result_dtype = "score", f"one {dtype.name}", dtype
    code = trace(f"{kind} {mod!r}", evaluate, *args, data.unflatten())
    (out,) = cast(list[ShapedArray], code.jaxpr.out_avals)
    if out.shape != () or out.dtype != result_dtype:
        raise TypeError(
            f"{code.name} must return {result} for one pair of tokens, but it returns "
            f"{out.dtype}[{','.join(map(str, out.shape))}]; compare or cast its result"
        )
    return dataclasses.replace(code, name=repr(mod))
