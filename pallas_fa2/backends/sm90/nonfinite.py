"""Arrays without NaN and infinity, where a mask may hide some tokens from all others.

A probability of 0 times NaN is NaN: tokens that attend to nothing must be finite. They nearly always are, and
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
from pallas_fa2.backends.common.primitives import layouts, swizzle, thread_ops, votes
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROWS_PER_WARPGROUP
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar, Scratch, Slice
from pallas_fa2.backends.sm90.primitives.tma import AlternateSource, HeadRows
from pallas_fa2.control_flow import when


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "sanitized", "is_nonfinite_block"],
    meta_fields=["block"],
)
@dataclasses.dataclass(frozen=True)
class SanitizedArray:
    """An array `[B, T, N, H]`, and the array that has its blocks in which something is not finite."""

    array: Any
    sanitized: Any  # of the same shape; nothing but those blocks is written
    is_nonfinite_block: Any  # int32 [B, N, blocks]: 1 for those blocks
    block: int  # tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the array's shape."""
        return self.array.shape

    @property
    def dtype(self) -> Any:
        """Return the array's dtype."""
        return self.array.dtype


def sanitized_rows(
    source: SanitizedArray | Ref, batch: Scalar, rows: Slice, head: Scalar, **options: Any
) -> HeadRows:
    """Return rows of one block, some or all of them, of an array that may be sanitized."""
    if not isinstance(source, SanitizedArray):
        return HeadRows(source, batch, rows, head, **options)

    def is_nonfinite() -> Scalar:
        return source.is_nonfinite_block[batch, head, arithmetic.div(rows.start, source.block)]

    # By row groups, of a length that needs it, or both copies would be there twice: ptxas spills.
    alternate = AlternateSource(source.sanitized, is_nonfinite)
    options |= {"alternate": alternate, "in_row_groups": True}
    return HeadRows(source.array, batch, rows, head, **options)


class ArrayToSanitize(NamedTuple):
    """An array of those whose blocks are sanitized together."""

    array: jax.Array  # [B, T, N, H]
    dim: int  # of the kernel that will read it
    value: float  # for rows in which something is not finite

    def buffer(self, rows: int) -> Scratch:
        """Allocate shared memory for rows of it."""
        panel = swizzle.panel_width(self.dim, self.array.shape[3], self.array.dtype)
        return swizzle.swizzled_smem(rows, self.dim, dtype=self.array.dtype, panel=panel)


@dataclasses.dataclass(frozen=True)
class SanitizePass:
    """A kernel that writes the blocks in which something is not finite: a CTA for each block of rows of a head."""

    arrays: Sequence[ArrayToSanitize]
    block: int  # rows
    multiple: int = 1  # of rows: the kernel that reads them reads blocks up to there

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return the numbers of batch entries, heads and blocks."""
        batch, length, heads, _ = self.arrays[0].array.shape
        return batch, heads, -(-arithmetic.round_up(length, self.multiple) // self.block)

    @property
    def fragments(self) -> list[Slice]:
        """Return slices of a block, 64 rows each. The last may reach past the block."""
        return [pl.ds(x, ROWS_PER_WARPGROUP) for x in range(0, self.block, ROWS_PER_WARPGROUP)]

    @property
    def buffers(self) -> list[Scratch]:
        """Allocate shared memory for a block of each array."""
        return [x.buffer(len(self.fragments) * ROWS_PER_WARPGROUP) for x in self.arrays]

    @property
    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of the sanitized arrays, and of a flag for each block."""
        copies = (jax.ShapeDtypeStruct(x.array.shape, x.array.dtype) for x in self.arrays)
        return [*copies, jax.ShapeDtypeStruct((math.prod(self.grid),), I32)]

    def rows_of(self, array: Ref, cta: Scalar, tile: Ref) -> HeadRows:
        """Return the rows of a CTA, as many as the tile has."""
        batch, head, block = arithmetic.unravel(cta, self.grid)
        return HeadRows(array, batch, pl.ds(block * self.block, tile.shape[0]), head)

    def find(self, tiles: Sequence[Ref]) -> list[jax.Array]:
        """Return the sum of the tiles' `row_nonfiniteness`, of each fragment."""
        return [
            functools.reduce(jnp.add, (row_nonfiniteness(tile.at[x]) for tile in tiles))
            for x in self.fragments
        ]

    def record(self, outputs: Sequence[Ref], cta: Scalar, nonfinite: Scalar) -> None:
        """Store the flag of a CTA's block."""
        thread = thread_ops.thread_indices()
        index = jnp.where(thread == 0, cta, math.prod(self.grid))
        thread_ops.scatter(outputs[-1], index, 0 * thread + nonfinite)

    def write(
        self,
        outputs: Sequence[Ref],
        cta: Scalar,
        tiles: Sequence[Ref],
        nonfiniteness: Sequence[jax.Array],
    ) -> None:
        """Overwrite what is not finite in a CTA's tiles, by the result of `find`, and store them."""
        for tile, array in zip(tiles, self.arrays, strict=True):
            for fragment, rows in zip(self.fragments, nonfiniteness, strict=True):
                overwrite_rows(tile.at[fragment], rows, array.value)
        plgpu.commit_smem()
        for target, tile in zip(outputs[:-1], tiles, strict=True):
            block = tile.at[pl.ds(0, self.block)]
            self.rows_of(target, cta, block).store(block)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sanitized_arrays(self, outputs: Sequence[jax.Array]) -> list[SanitizedArray]:
        """Return the arrays with what the kernel has written."""
        *copies, flags = outputs
        flags = flags.reshape(self.grid)
        pairs = zip(self.arrays, copies, strict=True)
        return [SanitizedArray(x.array, copy, flags, self.block) for x, copy in pairs]

    def sanitize_with_first(
        self,
        arrays: Sequence[Ref],
        outputs: Sequence[Ref],
        cta: Scalar,
        tiles: Sequence[Ref],
        arrived: Barrier,
    ) -> None:
        """Sanitize a CTA's block of two arrays where the first one is not finite. The second is read there alone."""

        def load(i: int) -> None:
            self.rows_of(arrays[i], cta, tiles[i]).load(tiles[i], arrived, I32(0))
            plgpu.barrier_wait(arrived.at[0])

        load(0)
        nonfiniteness = self.find(tiles[:1])
        nonfinite = any_row_nonfinite(nonfiniteness)
        self.record(outputs, cta, nonfinite)

        @when(nonfinite != 0)
        def _() -> None:
            load(1)
            self.write(outputs, cta, tiles, nonfiniteness)


def any_row_nonfinite(rows: Sequence[jax.Array]) -> jax.Array:
    """Return 1 if a value of several vectors of 64 rows is NaN or infinite, else 0. All of the warpgroup, a CTA's only
    one, must call it."""
    return votes.warpgroup_any_nonfinite(functools.reduce(jnp.add, rows), I32(0))


def row_nonfiniteness(tile: Ref) -> jax.Array:
    """Return 0 for each of 64 rows in shared memory, or NaN where something in the row is not finite."""
    return layouts.sum_rows(lambda x: x - x, tile)


def overwrite_rows(tile: Ref, nonfiniteness: jax.Array, value: float) -> None:
    """Store the value in rows where `nonfiniteness` is not 0."""
    for panel in swizzle.panels(tile):
        x = plgpu.load(panel, layout=ACC_LAYOUT)
        replaced = layouts.broadcast_rows(nonfiniteness, x.shape) != 0
        panel[...] = jnp.where(replaced, jnp.asarray(value, x.dtype), x)
