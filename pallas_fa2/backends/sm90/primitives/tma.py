"""Rows of a head between device memory and shared memory by TMA, for any length and head dim."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives.swizzle import (
    SWIZZLE_ROWS,
    has_partial_panel,
    swizzle_columns,
)
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar, Slice
from pallas_fa2.backends.sm90.primitives.tma_copy import BarrierArray, TmaView, copy_rows
from pallas_fa2.control_flow import cond


class AlternateSource(NamedTuple):
    """Another array, and whether rows are loaded from it: 0 or 1."""

    array: Ref
    # Called as late as can be: a warpgroup that loads has few registers.
    taken: Callable[[], Scalar]


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """Some rows of one head of an array `[B, T, N, H]` in device memory.

    Those from T on do not exist, nor do columns from H on: they are loaded as zeros and not stored.
    """

    array: Ref
    batch: Scalar
    rows: Slice  # it starts at a multiple of 8, unless `at_any_row`, and has a multiple of 8
    head: Scalar
    columns: Slice | None = None  # at a multiple of its size; as many as the buffer has if None
    # Whether they are always copied by row groups where the length needs it: less code, and registers.
    in_row_groups: bool = False
    alternate: AlternateSource | None = None
    at_any_row: bool = False

    @staticmethod
    def existing_columns(array: Ref, columns: Sequence[Slice]) -> list[Slice]:
        """Return the slices of columns that exist. (Mosaic gives TMA no dimension of one panel:
        the second would be stored as the first.)"""
        return [x for x in columns if x.start < array.shape[3]]

    @property
    def ref(self) -> Ref:
        """Return the view of the array that Pallas's own copies take."""
        indices = self.batch, self.rows, self.head
        return self.array.at[indices if self.columns is None else (*indices, self.columns)]

    @property
    def has_ragged_length(self) -> bool:
        """Return whether the sequence ends within a group of 8 rows. A sequence shorter than that is a group of its
        own."""
        length = self.array.shape[1]
        return length > SWIZZLE_ROWS and length % SWIZZLE_ROWS != 0

    def has_partial_panel(self, buffer: Ref) -> bool:
        """Return whether the last panel of a row has fewer columns in device memory than in the buffer."""
        return has_partial_panel(self.array.shape[3], swizzle_columns(buffer))

    def has_missing_columns(self, buffer: Ref) -> bool:
        """Return whether the buffer may have columns that do not exist in device memory."""
        dim = self.array.shape[3]
        columns = pl.ds(0, buffer.shape[-1]) if self.columns is None else self.columns
        if isinstance(columns.start, int):
            return columns.start + columns.size > dim
        return dim % columns.size != 0

    def needs_custom_copy(self, buffer: Ref) -> bool:
        """Return whether Pallas has no copy for these rows."""
        return (
            self.has_ragged_length
            or self.has_missing_columns(buffer)
            or self.has_partial_panel(buffer)
            or self.alternate is not None
            or self.at_any_row
        )

    def load(self, buffer: Ref, barriers: Barrier, i: Scalar) -> None:
        """Load the rows to shared memory, and arrive once at barrier i of an array when the rows are there."""
        if self.needs_custom_copy(buffer):
            self.copy(buffer, BarrierArray.of(barriers), i)
            plgpu.barrier_arrive(barriers.at[i])
        else:
            plgpu.copy_gmem_to_smem(self.ref, buffer, barriers.at[i])

    def store(self, buffer: Ref) -> None:
        """Store shared memory to these rows, in the caller's commit group."""
        if self.needs_custom_copy(buffer):
            self.copy(buffer, None, 0)
        else:
            plgpu.copy_smem_to_gmem(buffer, self.ref, commit_group=False)

    def copy(self, buffer: Ref, barriers: BarrierArray | None, i: Scalar) -> None:
        """Copy by `copy_rows`: a load, which is expected at barrier i but does not arrive there, or a store."""
        column = 0 if self.columns is None else self.columns.start
        scalars = [i, self.batch, self.rows.start, self.head, column]
        arrays = [self.array]
        if self.alternate is not None:
            scalars, arrays = [*scalars, self.alternate.taken()], [*arrays, self.alternate.array]

        def copy(view: TmaView) -> None:
            copy_rows(view, buffer, arrays, scalars, barriers)

        if self.has_partial_panel(buffer):
            return copy("panels")
        if self.at_any_row:
            return copy("row_groups")
        if not self.has_ragged_length:
            return copy("whole")
        if self.in_row_groups or swizzle_columns(buffer) == buffer.shape[-1]:
            return copy("row_groups")
        beyond = self.rows.start + self.rows.size > self.array.shape[1]
        cond(beyond, lambda: copy("row_groups"), lambda: copy("whole"))


@dataclasses.dataclass(frozen=True)
class RowPieces:
    """Rows that lie in several pages, in equal parts."""

    pieces: tuple[HeadRows, ...]

    def load(self, buffer: Ref, barriers: Barrier, i: Scalar) -> None:
        """Load the rows to shared memory, and arrive once at barrier i of an array when all are there."""
        if len(self.pieces) == 1:
            return self.pieces[0].load(buffer, barriers, i)
        for n, piece in enumerate(self.pieces):
            size = piece.rows.size
            piece.copy(buffer.at[pl.ds(n * size, size)], BarrierArray.of(barriers), i)
        plgpu.barrier_arrive(barriers.at[i])
