"""Register layouts of WGMMA accumulators, and operations on tiles in them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives import swizzle

ACC_LAYOUT = plgpu.Layout.WGMMA  # a (64, n) accumulator over the 128 threads of a warpgroup
ROW_LAYOUT = ACC_LAYOUT.reduce(1)  # one value a row
COL_LAYOUT = ACC_LAYOUT.reduce(0)  # one value a column

ROWS_PER_WARPGROUP = 64  # the M of every WGMMA instruction


def index(shape: tuple[int, ...], axis: int, start: Any) -> jax.Array:
    """Row or column numbers of a tile, as a vector: a whole tile of them would hold 64 registers."""
    layout = ROW_LAYOUT if axis == 0 else COL_LAYOUT
    return plgpu.broadcasted_iota(I32, (shape[axis],), 0, layout=layout) + start


def load_row(axis: int, row: Any, dtype: Any) -> jax.Array:
    """One number for each row of a tile, or for each column, from 32 bits each."""
    bits = plgpu.load(row, layout=(ROW_LAYOUT, COL_LAYOUT)[axis], optimized=False)
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def broadcast_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value a row, broadcast over the columns of a tile."""
    return broadcast_axis(x, 0, shape)


def broadcast_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return broadcast_axis(x, 1, shape)


def broadcast_axis(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), ACC_LAYOUT)


def materialize_int(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An integer over these axes of a tile, in registers of its own where it is one number.

    Where a truth that varies selects one number, Mosaic (jax 0.11.2) takes the result for unsigned, as truths
    are: -5 would compare as a large number.
    """
    layouts = {(0,): ROW_LAYOUT, (1,): COL_LAYOUT, (0, 1): ACC_LAYOUT}
    return plgpu.layout_cast(x, layouts[axes]) if axes else x


def index_broadcast(array: Any, batch: Any, head: Any, *rest: Any) -> Any:
    """Of an array that all batch entries or heads share, or not."""
    return array.at[(batch if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0, *rest)]


def splat_constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def slices(length: int, size: int) -> list[Any]:
    """So many at a time."""
    return [pl.ds(start, size) for start in range(0, length, size)]


def slice_columns(tile: jax.Array, columns: Any) -> jax.Array:
    return tile[:, columns.start : columns.start + columns.size]


def fold_octets(combine: Callable, tile: jax.Array) -> jax.Array:
    """A tile's groups of eight columns combined: `[64, 8]`, of which each thread holds two columns.

    No thread needs another's values for it, unlike a reduction to one value a row.
    """
    parts = [tile[:, i : i + 8] for i in range(0, tile.shape[1], 8)]
    return functools.reduce(combine, parts)


def sum_rows(term: Callable, *tiles: Any) -> jax.Array:
    """Of 64 rows in shared memory, sums of term(*elements) in float32."""

    def of_panel(*panels: Any) -> jax.Array:
        loaded = (plgpu.load(x, layout=ACC_LAYOUT).astype(jnp.float32) for x in panels)
        return fold_octets(jnp.add, term(*loaded))

    total = functools.reduce(jnp.add, map(of_panel, *map(swizzle.panels, tiles)))
    return plgpu.layout_cast(jnp.sum(total, 1), ROW_LAYOUT)
