"""Rows of a head between device memory and shared memory by TMA, for any length and head dim.

Shared memory lies in tiles of 8 rows and some columns, as WGMMA reads it, and TMA fills them by a view of
device memory in which a sequence is groups of 8 rows and a row is panels of columns. TMA stops at a view's
end, and that can only be the end of a group and of a panel. Where a length is no multiple of 8, that view
has the whole groups alone. Another has the rows as a dimension of its own and stops anywhere; it can fill
what lies in one piece, which are 8 rows, or any number where a row is one swizzled line (H = 64). So what
contains a sequence's end is copied by pieces. Where a panel is cut, pieces are of 8 rows and one panel.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_fa2.backends.sm90.primitives.swizzle import (
    SWIZZLE_ROWS,
    as_operand,
    has_partial_panel,
    swizzle_columns,
)
from pallas_fa2.control_flow import cond

THREADS, WARPS = 128, 4  # of a warpgroup


class AlternateSource(NamedTuple):
    """Another array, and whether rows are loaded from there: 0 or 1."""

    array: Any
    # Asked as late as can be: a warpgroup that loads has few registers.
    taken: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class HeadRows:
    """Some rows of one head of an array `[B, T, N, H]` in device memory.

    Those from T on do not exist, nor do columns from H on: they are loaded as zeros and not stored.
    """

    array: Any
    batch: Any
    rows: Any  # a slice; it starts at a multiple of 8 and has a multiple of 32
    head: Any
    columns: Any = None  # a slice, at a multiple of its size; as many as the buffer has if None
    # Whether they are always copied by pieces where the length needs it: less code, and registers.
    in_row_groups: bool = False
    alternate: "AlternateSource | None" = None

    @staticmethod
    def existing_columns(array: Any, pieces: Sequence[Any]) -> list[Any]:
        """Slices of columns, without those that do not exist. (Mosaic gives TMA no dimension of one panel:
        the second would be stored as the first.)"""
        return [piece for piece in pieces if piece.start < array.shape[3]]

    @property
    def ref(self) -> Any:
        place = self.batch, self.rows, self.head
        return self.array.at[place if self.columns is None else (*place, self.columns)]

    @property
    def has_ragged_length(self) -> bool:
        """Whether the rows end within a group. A sequence shorter than that is a group of its own."""
        length = self.array.shape[1]
        return length > SWIZZLE_ROWS and length % SWIZZLE_ROWS != 0

    def has_partial_panel(self, buffer: Any) -> bool:
        """Whether a panel is, and copied by itself."""
        return has_partial_panel(self.array.shape[3], swizzle_columns(buffer))

    def has_missing_columns(self, buffer: Any) -> bool:
        """Whether there may be columns that do not exist."""
        dim = self.array.shape[3]
        columns = pl.ds(0, buffer.shape[-1]) if self.columns is None else self.columns
        if isinstance(columns.start, int):
            return columns.start + columns.size > dim
        return dim % columns.size != 0

    def needs_custom_copy(self, buffer: Any) -> bool:
        """Whether Pallas has no copy for it."""
        return (
            self.has_ragged_length
            or self.has_missing_columns(buffer)
            or self.has_partial_panel(buffer)
            or self.alternate is not None
        )

    def load(self, buffer: Any, barriers: Any, i: Any) -> None:
        """Fills shared memory; arrives once at barrier i of an array when it is there."""
        if self.needs_custom_copy(buffer):
            self.copy(buffer, Barriers.of(barriers), i)
            plgpu.barrier_arrive(barriers.at[i])
        else:
            plgpu.copy_gmem_to_smem(self.ref, buffer, barriers.at[i])

    def store(self, buffer: Any) -> None:
        """Empties shared memory, in the caller's commit group."""
        if self.needs_custom_copy(buffer):
            self.copy(buffer, None, 0)
        else:
            plgpu.copy_smem_to_gmem(buffer, self.ref, commit_group=False)

    def copy(self, buffer: Any, barriers: "Barriers | None", i: Any) -> None:
        """By own code: a load, which is expected at barrier i but does not arrive there, or a store."""
        column = 0 if self.columns is None else self.columns.start
        scalars = [i, self.batch, self.rows.start, self.head, column]
        arrays, width = [self.array], swizzle_columns(buffer)
        if self.alternate is not None:
            scalars, arrays = [*scalars, self.alternate.taken()], [*arrays, self.alternate.array]
        types = as_operand(buffer), *[plgpu.RefType()] * len(arrays)
        types = *types, *[plgpu.Layout.WG_SPLAT] * len(scalars)

        def copy(view: str) -> None:
            def inline(ctx: Any, buffer: Any, *operands: Any) -> None:
                i, *place = (x.registers[()] for x in operands[len(arrays) :])
                barrier = barriers and barriers.find(ctx.module, i)
                _issue(ctx, operands[: len(arrays)], buffer, place, view, barrier)
                # Else ptxas may have the one thread that copies meet the others much later, behind loops and
                # waits that it takes to be the same for all: with their numbers in registers that a warp has
                # once, and that one changes for the others. So no branch is left, only predicates.
                _assembly(None, "bar.warp.sync -1;", "")

            # The interpreter in the tests knows it by this name.
            inline.__name__ = f"{'load' if barriers else 'store'} {view} {width}"
            numbers = (jnp.asarray(x, jnp.int32) for x in scalars)
            plgpu.inline_mgpu(arg_types=types)(inline)(buffer, *arrays, *numbers)

        if self.has_partial_panel(buffer):
            return copy("panels")
        if not self.has_ragged_length:
            return copy("whole")
        if self.in_row_groups or width == buffer.shape[-1]:
            return copy("pieces")
        beyond = self.rows.start + self.rows.size > self.array.shape[1]
        cond(beyond, lambda: copy("pieces"), lambda: copy("whole"))


@dataclasses.dataclass(frozen=True)
class Barriers:
    """An array of barriers, as inline code can find it: it cannot be given one.

    Mosaic initializes the arrays where the kernel begins; their sizes and arrivals tell them apart.
    """

    count: int
    arrivals: int  # of threads, at each

    @classmethod
    def of(cls, ref: Any) -> "Barriers":
        kind = jax.typeof(ref)
        return cls(kind.shape[0], kind.dtype.num_arrivals * THREADS)

    def find(self, module: Any, i: Any) -> Any:
        """The i-th."""
        arrivals: dict[ir.Value, list[int]] = {}  # of the barriers of each array, by its address

        def visit(op: Any) -> Any:
            if op.name == "nvvm.mbarrier.init":
                address, count = op.operands[0].owner, op.operands[1].owner
                number = ir.IntegerAttr(count.attributes["value"]).value
                arrivals.setdefault(address.operands[0], []).append(number)
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        found = [at for at, counts in arrivals.items() if counts == self.count * [self.arrivals]]
        if len(found) != 1:
            raise ValueError(f"{len(found)} arrays of barriers look like {self}")
        no_phases: Any = None  # they are for those who wait
        return mgpu.utils.BarrierRef(found[0], i, no_phases, 1)


def _issue(
    ctx: Any, arrays: Sequence[Any], buffer: Any, place: list[Any], view: str, barrier: Any
) -> None:
    """A load, if there is a barrier, or a store; `buffer` is [groups, panels, 8, columns].

    `place` ends with which of two arrays it is. The copy of the other is not taken: two branches would need
    more registers than a warpgroup that loads has.
    """
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    kind = ir.MemRefType(buffer.type)
    groups, panels, _, width = kind.shape
    itemsize = mgpu.bitwidth(kind.element_type) // 8
    batch, first, head, column = (arith.index_cast(index, x) for x in place[:4])

    def copy(buffer: Any, rows: Any, columns: Any, *transforms: Any, warps: int = 1) -> None:
        thread = _one_thread(warps)
        for number, array in enumerate(arrays):
            source, target = (buffer, array) if barrier is None else (array, buffer)
            taken = thread
            if len(arrays) > 1:
                this = arith.constant(i32, number)
                taken = arith.andi(thread, arith.cmpi(arith.CmpIPredicate.eq, place[4], this))
            ctx.async_copy(
                src_ref=source,
                dst_ref=target,
                gmem_slice=(batch, rows, head, columns),
                gmem_transform=transforms,
                barrier=barrier,
                swizzle=width * itemsize,
                arrive=False,
                predicate=taken,
            )

    if barrier is not None:
        share = math.prod(kind.shape) * itemsize // THREADS  # a thread's; each will arrive once
        expect = f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], {share};"
        _assembly(None, expect, "r", barrier.get_ptr())
    all_rows, all_columns = mgpu.ds(first, SWIZZLE_ROWS * groups), mgpu.ds(column, panels * width)
    if view == "whole":
        tiled = mgpu.TileTransform((SWIZZLE_ROWS, width), launch_context.Rounding.DOWN)
        return copy(buffer, all_rows, all_columns, tiled)

    in_panels = mgpu.TileTransform((width,)), mgpu.TransposeTransform((1, 0, 2))
    if panels == 1 and view == "pieces":  # of all rows: a line each
        rows = mgpu.memref_fold(mgpu.memref_transpose(buffer, (1, 0, 2, 3)), 1, 2)
        return copy(rows, all_rows, all_columns, *in_panels)

    # A copy takes the thread that asks for it some 40 clocks. There are many of panels that are cut, and each
    # warp has a part of them; of whole ones, those of a sequence's end alone: fewer registers instead.
    across, warps = (panels, WARPS) if view == "panels" else (1, 1)
    assert groups % warps == 0, (groups, warps)
    warp = arith.index_cast(index, _warp() if warps > 1 else arith.constant(i32, 0))

    def copy_piece(step: Any, nothing: list) -> list:
        """8 rows, all of them or one panel."""
        _assembly(None, '.pragma "nounroll";', "")
        piece = arith.addi(arith.muli(step, arith.constant(index, warps)), warp)
        group = arith.divui(piece, arith.constant(index, across))
        row = arith.addi(first, arith.muli(group, arith.constant(index, SWIZZLE_ROWS)))
        rows, target = mgpu.ds(row, SWIZZLE_ROWS), mgpu.memref_slice(buffer, group)
        if view == "pieces":
            copy(target, rows, all_columns, *in_panels)
            return nothing
        panel = arith.remui(piece, arith.constant(index, across))
        start = arith.addi(column, arith.muli(panel, arith.constant(index, width)))
        copy(mgpu.memref_slice(target, panel), rows, mgpu.ds(start, width), warps=warps)
        return nothing

    # A number that the compiler does not know: it would unroll the loop, and spill.
    steps = arith.constant(i32, groups * across // warps)
    count = _assembly(i32, "mov.b32 $0, $1;", "=r,r", steps)
    mgpu.fori(arith.index_cast(index, count), [])(copy_piece)


def _one_thread(warps: int) -> Any:
    """One of the first warp of a warpgroup, or one of each.

    Mosaic's own choice reads the thread's number, and asks a warp's first lane for it, at each copy: 600
    clocks, as both wait behind what other warpgroups ask of shared memory.
    """
    elected = nvvm.elect_sync()
    if warps == WARPS:
        return elected
    zero = arith.constant(ir.IntegerType.get_signless(32), 0)
    return arith.andi(elected, arith.cmpi(arith.CmpIPredicate.eq, _warp(), zero))


def _warp() -> Any:
    """A warp's number in its warpgroup."""
    i32 = ir.IntegerType.get_signless(32)
    warp = arith.shrui(mgpu.utils.thread_idx(), arith.constant(i32, 5))
    return arith.andi(warp, arith.constant(i32, WARPS - 1))


def _assembly(result: Any, code: str, constraints: str, *operands: Any) -> Any:
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, operands, code, constraints, has_side_effects=True)
