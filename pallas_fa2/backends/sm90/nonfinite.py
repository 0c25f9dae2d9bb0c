"""Arrays without NaN and infinity, where a mask may hide some tokens from all others.

A probability of 0 times NaN is NaN: what takes part in nothing must be finite. It nearly always is, and
then a copy of the whole array would be the only cost. So a kernel that reads the array writes those blocks
alone in which something is not finite; attention takes these in their place.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives import layouts, pipeline, swizzle, thread_ops, votes
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROWS_PER_WARPGROUP
from pallas_fa2.backends.sm90.primitives.tma import AlternateSource, HeadRows
from pallas_fa2.control_flow import when


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "sanitized", "is_nonfinite_block"],
    meta_fields=["block"],
)
@dataclasses.dataclass(frozen=True)
class SanitizedArray:
    """An array `[B, T, N, H]`, and what takes the place of some of its blocks."""

    array: Any
    sanitized: Any  # of the same shape; nothing but those blocks
    is_nonfinite_block: (
        Any  # int32 [B, N, blocks of so many tokens]: whether a block is one of them
    )
    block: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype


def sanitized_rows(source: Any, batch: Any, rows: Any, head: Any, **options: Any) -> HeadRows:
    """Of an array or a `Tamed`: of one block, some rows or all."""
    if not isinstance(source, SanitizedArray):
        return HeadRows(source, batch, rows, head, **options)

    def is_wild() -> Any:
        return source.is_nonfinite_block[batch, head, arithmetic.div(rows.start, source.block)]

    # By pieces, of a length that needs it, or both copies would be there twice: ptxas spills.
    options |= {"alternate": AlternateSource(source.sanitized, is_wild), "in_row_groups": True}
    return HeadRows(source.array, batch, rows, head, **options)


class ArrayToSanitize(NamedTuple):
    """An array, of those whose blocks are copied together."""

    array: jax.Array  # [B, T, N, H]
    dim: int  # of the kernel that will read it
    value: float  # for rows in which something is not finite

    def buffer(self, rows: int) -> Any:
        panel = swizzle.panel_width(self.dim, self.array.shape[3], self.array.dtype)
        return pipeline.swizzled_smem(rows, self.dim, dtype=self.array.dtype, panel=panel)


@dataclasses.dataclass(frozen=True)
class SanitizePass:
    """What a kernel, a CTA for each block of rows of a head, writes of those with something not finite."""

    arrays: Sequence[ArrayToSanitize]
    block: int
    multiple: int = 1  # of rows: who reads them asks for blocks up to there

    @property
    def grid(self) -> tuple[int, int, int]:
        entries, length, heads, _ = self.arrays[0].array.shape
        return entries, heads, -(-arithmetic.round_up(length, self.multiple) // self.block)

    @property
    def fragments(self) -> list[Any]:
        """64 rows each. The last may reach past the block."""
        return [pl.ds(x, ROWS_PER_WARPGROUP) for x in range(0, self.block, ROWS_PER_WARPGROUP)]

    @property
    def buffers(self) -> list[Any]:
        return [part.buffer(len(self.fragments) * ROWS_PER_WARPGROUP) for part in self.arrays]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        copies = (jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in self.arrays)
        return [*copies, jax.ShapeDtypeStruct((math.prod(self.grid),), I32)]

    def rows_of(self, array: Any, cta: Any, tile: Any) -> HeadRows:
        """A CTA's, as many rows as the tile has."""
        batch, head, number = arithmetic.unravel(cta, self.grid)
        return HeadRows(array, batch, pl.ds(number * self.block, tile.shape[0]), head)

    def find(self, tiles: Sequence[Any]) -> list[jax.Array]:
        """`nothing` of each square of all tiles together."""
        return [
            functools.reduce(jnp.add, (row_nonfiniteness(tile.at[x]) for tile in tiles))
            for x in self.fragments
        ]

    def record(self, outputs: Sequence[Any], cta: Any, wild: Any) -> None:
        thread = thread_ops.thread_numbers()
        place = jnp.where(thread == 0, cta, math.prod(self.grid))
        thread_ops.scatter(outputs[-1], place, 0 * thread + wild)

    def write(self, outputs: Sequence[Any], cta: Any, tiles: Sequence[Any], found: Any) -> None:
        for tile, part in zip(tiles, self.arrays, strict=True):
            for square, of_square in zip(self.fragments, found, strict=True):
                overwrite_rows(tile.at[square], of_square, part.value)
        plgpu.commit_smem()
        for target, tile in zip(outputs[:-1], tiles, strict=True):
            block = tile.at[pl.ds(0, self.block)]
            self.rows_of(target, cta, block).store(block)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sanitized_arrays(self, outputs: Sequence[jax.Array]) -> list[SanitizedArray]:
        *copies, wild = outputs
        wild = wild.reshape(self.grid)
        arrays = (part.array for part in self.arrays)
        return [SanitizedArray(x, y, wild, self.block) for x, y in zip(arrays, copies, strict=True)]

    def sanitize_with_first(
        self,
        arrays: Sequence[Any],
        outputs: Sequence[Any],
        cta: Any,
        tiles: Sequence[Any],
        arrived: Any,
    ) -> None:
        """Where the first array is not finite, which alone is read elsewhere."""

        def load(i: int) -> None:
            self.rows_of(arrays[i], cta, tiles[i]).load(tiles[i], arrived, I32(0))
            plgpu.barrier_wait(arrived.at[0])

        load(0)
        found = self.find(tiles[:1])
        wild = any_row_nonfinite(found)
        self.record(outputs, cta, wild)

        @when(wild != 0)
        def _() -> None:
            load(1)
            self.write(outputs, cta, tiles, found)


def any_row_nonfinite(rows: Sequence[jax.Array]) -> jax.Array:
    """1 if a value of 64 rows, or of some, is NaN or infinity; all of the warpgroup, a CTA's only one, must ask."""
    return votes.warpgroup_any_nonfinite(functools.reduce(jnp.add, rows), I32(0))


def row_nonfiniteness(tile: Any) -> jax.Array:
    """Of 64 rows in shared memory: 0, or NaN where something is not finite."""
    return layouts.sum_rows(lambda x: x - x, tile)


def overwrite_rows(tile: Any, wild: jax.Array, value: float) -> None:
    """Gives another value to rows where `wild` is not 0."""
    for panel in swizzle.panels(tile):
        x = plgpu.load(panel, layout=ACC_LAYOUT)
        replaced = layouts.broadcast_rows(wild, x.shape) != 0
        panel[...] = jnp.where(replaced, jnp.asarray(value, x.dtype), x)
