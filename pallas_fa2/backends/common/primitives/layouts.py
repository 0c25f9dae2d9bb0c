"""Register layouts of WGMMA accumulators, and operations on tiles in them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, RegisterLayout, Scalar, Slice

THREADS, WARPS, LANES = 128, 4, 32  # of a warpgroup, of a warpgroup, of a warp

ACC_LAYOUT = plgpu.Layout.WGMMA  # a (64, n) accumulator over the threads of a warpgroup
ROW_LAYOUT = ACC_LAYOUT.reduce(1)  # one value a row
COL_LAYOUT = ACC_LAYOUT.reduce(0)  # one value a column

ROWS_PER_WARPGROUP = 64  # the M of every WGMMA instruction


def index(shape: tuple[int, ...], axis: int, start: Scalar) -> jax.Array:
    """Return start, start + 1, ... along an axis of a tile, as a vector: a whole tile of indices would hold 64
    registers."""
    layout = ROW_LAYOUT if axis == 0 else COL_LAYOUT
    return plgpu.broadcasted_iota(I32, (shape[axis],), 0, layout=layout) + start


def load_row(axis: int, row: Ref, dtype: DTypeLike) -> jax.Array:
    """Load a vector along an axis of a tile from 32 bits for each element, which hold this dtype."""
    bits = plgpu.load(row, layout=(ROW_LAYOUT, COL_LAYOUT)[axis], optimized=False)
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def broadcast_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value for each row over the columns of a tile."""
    return broadcast_axis(x, 0, shape)


def broadcast_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a value for each column over the rows of a tile."""
    return broadcast_axis(x, 1, shape)


def broadcast_axis(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast a vector along this axis to a tile."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), ACC_LAYOUT)


def outer_product(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Return the tile rows_i columns_j of a value for each row and one for each column."""
    shape = *rows.shape, *columns.shape
    return broadcast_rows(rows, shape) * broadcast_columns(columns, shape)


def materialize_int(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return an integer that varies over these axes of a tile in registers of its own, where it is a scalar.

    Where a boolean that varies selects a scalar, Mosaic (jax 0.11.2) takes the result for unsigned, as booleans
    are: -5 would compare as a large number.
    """
    layouts = {(0,): ROW_LAYOUT, (1,): COL_LAYOUT, (0, 1): ACC_LAYOUT}
    return plgpu.layout_cast(x, layouts[axes]) if axes else x


def index_broadcast(array: Ref, batch: Scalar, head: Scalar, *rest: Scalar | Slice) -> Ref:
    """Return array[batch, head, *rest] of an array that all batch entries or heads may share."""
    return array.at[(batch if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0, *rest)]


def splat_constant(value: float, shape: tuple[int, ...], layout: RegisterLayout) -> jax.Array:
    """Return a float32 array of one value in this layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def slices(length: int, size: int) -> list[Slice]:
    """Divide an axis into slices of one size."""
    return [pl.ds(start, size) for start in range(0, length, size)]


def slice_columns(tile: jax.Array, columns: Slice) -> jax.Array:
    """Return some columns of a tile."""
    return tile[:, columns.start : columns.start + columns.size]


def fold_octets(combine: Callable, tile: jax.Array) -> jax.Array:
    """Combine a tile's groups of eight columns to one: `[64, 8]`, of which each thread holds two columns.

    No thread needs another's values for it, unlike a reduction to one value a row.
    """
    octets = [tile[:, i : i + 8] for i in range(0, tile.shape[1], 8)]
    return functools.reduce(combine, octets)


def sum_rows(term: Callable, *tiles: Ref) -> jax.Array:
    """Return sums over the rows, `[64]` float32, of term(*elements) of tiles in swizzled shared memory."""

    def panel_sums(*panels: Ref) -> jax.Array:
        loaded = (plgpu.load(x, layout=ACC_LAYOUT).astype(jnp.float32) for x in panels)
        return fold_octets(jnp.add, term(*loaded))

    total = functools.reduce(jnp.add, map(panel_sums, *map(swizzle.panels, tiles)))
    return plgpu.layout_cast(jnp.sum(total, 1), ROW_LAYOUT)
