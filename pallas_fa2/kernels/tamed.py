"""Arrays without NaN and infinity, where a mask may hide some tokens from all others.

A probability of 0 times NaN is NaN: what takes part in nothing must be finite. It nearly always is, and
then a copy of the whole array would be the only cost. So a kernel reads the arrays, and writes those blocks
alone in which something is not finite; attention takes these in their place.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import listing, mosaic, ptx, tma
from pallas_fa2.kernels.mosaic import I32, ROWS_PER_WARPGROUP, TILE
from pallas_fa2.kernels.tma import Instead, Rows


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "instead", "wild"],
    meta_fields=["block"],
)
@dataclasses.dataclass(frozen=True)
class Tamed:
    """An array `[B, T, N, H]`, and what takes the place of some of its blocks."""

    array: Any
    instead: Any  # of the same shape; nothing but those blocks
    wild: Any  # int32 [B, N, blocks of so many tokens]: whether a block is one of them
    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def rows_of(source: Any, batch: Any, rows: Any, head: Any, **options: Any) -> Rows:
    """Of an array or a `Tamed`: of one block, some rows or all."""
    if not isinstance(source, Tamed):
        return Rows(source, batch, rows, head, **options)

    def is_wild() -> Any:
        return source.wild[batch, head, mosaic.div(rows.start, source.block)]

    # By pieces, of a length that needs it, or both copies would be there twice: ptxas spills.
    options |= {"instead": Instead(source.instead, is_wild), "by_pieces": True}
    return Rows(source.array, batch, rows, head, **options)


class Part(NamedTuple):
    """Of what is tamed together."""

    array: jax.Array  # [B, T, N, H]
    dim: int  # of the kernel that will read it
    value: float  # for rows in which something is not finite


def tame(block: int, checked: Sequence[Part], others: Sequence[Part] = ()) -> list[Tamed]:
    """Those where rows that are not finite in all of `checked` have other values, each a `Tamed`."""
    parts = [*checked, *others]
    entries, length, heads, _ = parts[0].array.shape
    grid = entries, heads, -(-length // block)
    # They may reach past the block.
    squares = [pl.ds(x, ROWS_PER_WARPGROUP) for x in range(0, block, ROWS_PER_WARPGROUP)]
    count = len(squares) * ROWS_PER_WARPGROUP

    def run(refs: tuple, memory: list[Any]) -> None:
        arrays, targets, wild = refs[: len(parts)], refs[len(parts) : -1], refs[-1]
        *tiles, arrived = memory
        cta = lax.axis_index("cta")
        batch, head, number = mosaic.unravel(cta, grid)

        def rows(array: Any, size: int) -> Rows:
            return Rows(array, batch, pl.ds(number * block, size), head)

        def load(first: int, end: int) -> None:
            for i in range(first, end):
                rows(arrays[i], count).load(tiles[i], arrived, jnp.int32(i))
            for i in range(first, end):
                plgpu.barrier_wait(arrived.at[i])

        load(0, len(checked))
        nothing = [
            functools.reduce(jnp.add, (_nothing(tile.at[x]) for tile in tiles[: len(checked)]))
            for x in squares
        ]
        found = ptx.any_infinite(functools.reduce(jnp.add, nothing), I32(0))
        thread = listing.thread_numbers()
        listing.scatter(wild, jnp.where(thread == 0, cta, math.prod(grid)), 0 * thread + found)

        @pl.when(found != 0)
        def _() -> None:
            load(len(checked), len(parts))
            for tile, part in zip(tiles, parts, strict=True):
                for x, zeros in zip(squares, nothing, strict=True):
                    _replace(tile.at[x], zeros, part.value)
            plgpu.commit_smem()
            for target, tile in zip(targets, tiles, strict=True):
                rows(target, block).store(tile.at[pl.ds(0, block)])
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def buffer(part: Part) -> Any:
        panel = tma.panel_width(part.dim, part.array.shape[3], part.array.dtype)
        return mosaic.operand(count, part.dim, dtype=part.array.dtype, panel=panel)

    kernel = mosaic.launch(
        "tame",
        run,
        [*map(buffer, parts), mosaic.barriers(len(parts))],
        [
            *(jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in parts),
            jax.ShapeDtypeStruct((math.prod(grid),), I32),
        ],
        {"cta": math.prod(grid)},
        1,
    )
    *instead, wild = kernel(*(part.array for part in parts))
    wild = wild.reshape(grid)
    return [Tamed(x.array, y, wild, block) for x, y in zip(parts, instead, strict=True)]


def _nothing(tile: Any) -> jax.Array:
    """Of 64 rows in shared memory: 0, or NaN where something is not finite."""
    return mosaic.sum_rows(lambda x: x - x, tile)


def _replace(tile: Any, nothing: jax.Array, value: float) -> None:
    """Gives other values to rows where `nothing` is not 0."""
    for panel in tma.panels(tile):
        x = plgpu.load(panel, layout=TILE)
        wild = mosaic.over_rows(nothing, x.shape) != 0
        panel[...] = jnp.where(wild, jnp.asarray(value, x.dtype), x)
