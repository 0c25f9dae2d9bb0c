"""What code on a tile computes with."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class TileValue(NamedTuple):
    """One number for a tile, one for each of its rows or columns, or one for each element."""

    array: Any
    axes: tuple[int, ...] = ()  # of the tile, that it varies over
    factor: float = 1.0  # of it all: multiplications by constants are put off, and done at once
    max_abs: float = math.inf  # that the size of an integer can be
    nonnegative: bool = False  # an integer that is known to be 0 or more
    # An integer as a float: rows and columns are converted, rather than all elements.
    as_float: "TileValue | None" = None
    # An integer, or a truth, in a form that takes fewer instructions where it is compared or joined.
    affine: "RowPlusColumn | None" = None
    abs_of: "TileValue | None" = None  # the sum of which it is the absolute value
    bounds: "tuple[ColumnBound, ...]" = ()

    @classmethod
    def of_index(cls, array: Any, axis: int) -> "TileValue":
        """Of tokens; no launch has 2^23 of them."""
        real = cls(array.astype(jnp.float32), (axis,))
        return cls(array, (axis,), as_float=real, max_abs=2.0**23, nonnegative=True)


class RowPlusColumn(NamedTuple):
    """A number of each row, or of the tile, and plus or minus one of each column."""

    row: TileValue
    column: TileValue
    sign: int


class ColumnBound(NamedTuple):
    """column >= number, or column <= number: one number for the tile or for each row."""

    column: TileValue
    kind: Literal["low", "high"]
    bound: TileValue


class TargetOps(NamedTuple):
    """A target's operations on tiles in registers, by which code is evaluated. (Masks, scores and dropout are applied
    by those of `backends.common.tile_mods.TileOps`.)"""

    reciprocal: Callable = jnp.reciprocal  # of a whole tile
    # A value of each row or column (axis 0 or 1) as a tile of that shape.
    broadcast: Callable = lambda array, axis, shape: lax.broadcast_in_dim(array, shape, [axis])
    # Whether some |x| of a tile is 2 or more; None where a branch on it does not pay off.
    any_abs_ge_2: Callable | None = lambda tile: jnp.any(~(jnp.abs(tile) < 2))
    # A maximum or minimum of integers over some axes, before it meets another one.
    defeat_minmax_fusion: Callable = lambda array, axes: array
    # An integer that a boolean over some axes may select.
    materialize_int: Callable = lambda array, axes: array


DEFAULT_OPS = TargetOps()


def broadcast_to_tile(
    x: TileValue, axes: tuple[int, ...], shape: tuple[int, ...], functions: TargetOps = DEFAULT_OPS
) -> Any:
    """As an array over these axes of the tile."""
    if not isinstance(x.array, jax.Array) and x.array.dtype == bool:  # Mosaic has no such constants
        return (
            broadcast_to_tile(x._replace(array=x.array.astype(np.int32)), axes, shape, functions)
            != 0
        )
    array = x.array if isinstance(x.array, jax.Array) else jnp.asarray(x.array)
    if x.factor != 1.0:
        array = array * x.factor
    if x.axes == axes:
        return array
    if len(x.axes) == 1:
        return functions.broadcast(array, x.axes[0], shape)
    sizes = tuple(shape[axis] for axis in axes)
    return lax.broadcast_in_dim(array, sizes, ())


def bind(
    primitive: Any,
    values: Sequence[TileValue],
    shape: tuple[int, ...],
    functions: TargetOps,
    **params: Any,
) -> TileValue:
    """The primitive over all the axes that a value varies over."""
    axes = tuple(sorted({axis for x in values for axis in x.axes}))
    arrays = [broadcast_to_tile(x, axes, shape, functions) for x in values]
    if primitive is lax.select_n_p and arrays[1].dtype == jnp.int32:
        truth, *cases = arrays
        arrays = [truth, *(functions.materialize_int(x, axes) for x in cases)]
    array = primitive.bind(*arrays, **params)
    if primitive in (lax.max_p, lax.min_p) and array.dtype == jnp.int32:
        array = functions.defeat_minmax_fusion(array, axes)
    return TileValue(array, axes)
