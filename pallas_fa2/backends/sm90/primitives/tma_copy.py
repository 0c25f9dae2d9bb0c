"""TMA copies of rows that Pallas has no copy for, in inline code.

Shared memory lies in groups of 8 rows and panels of some columns, as WGMMA reads it, and TMA fills them by a view of
device memory in which a sequence is groups of 8 rows and a row is panels of columns. TMA stops at a view's
end, and that can only be the end of a group and of a panel. Where a length is no multiple of 8, that view
has the whole groups alone. Another has the rows as a dimension of its own and stops anywhere; it can fill
what is contiguous in shared memory, which are 8 rows, or any number where a row is one swizzled line (H = 64). So
what contains a sequence's end is copied by groups of rows. Where the last panel of a row is partial, by 8 rows and
one panel.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm

from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import THREADS, WARPS
from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS, as_operand, swizzle_columns
from pallas_fa2.backends.common.primitives.types import Barrier, MlirValue, Ref, Scalar

type TmaView = Literal["whole", "row_groups", "panels"]


@dataclasses.dataclass(frozen=True)
class BarrierArray:
    """An array of mbarriers, as inline code can find it: it cannot be given one.

    Mosaic initializes the arrays where the kernel begins; their sizes and arrivals tell them apart.
    """

    count: int
    arrivals: int  # of threads, at each

    @classmethod
    def of(cls, ref: Barrier) -> "BarrierArray":
        """Describe the array of a reference."""
        kind = jax.typeof(ref)
        return cls(kind.shape[0], kind.dtype.num_arrivals * THREADS)

    def find(self, module: ir.Module, i: MlirValue) -> mgpu.utils.BarrierRef:
        """Return barrier i of the only array of this size and these arrivals in the module."""
        arrivals: dict[ir.Value, list[int]] = {}  # of the barriers of each array, by its address

        def visit(op: Any) -> Any:
            if op.name == "nvvm.mbarrier.init":
                address, count = op.operands[0].owner, op.operands[1].owner
                arrivals.setdefault(address.operands[0], []).append(
                    ir.IntegerAttr(count.attributes["value"]).value
                )
            return ir.WalkResult.ADVANCE

        module.operation.walk(visit)
        arrays = [x for x, counts in arrivals.items() if counts == self.count * [self.arrivals]]
        if len(arrays) != 1:
            raise ValueError(f"{len(arrays)} arrays of barriers look like {self}")
        no_phases: Any = None  # they are for those who wait
        return mgpu.utils.BarrierRef(arrays[0], i, no_phases, 1)


def copy_rows(
    view: TmaView,
    buffer: Ref,
    arrays: Sequence[Ref],
    scalars: Sequence[Scalar],
    barriers: BarrierArray | None,
) -> None:
    """Load rows to a buffer, if there are barriers, or store them.

    `scalars` are the index of the barrier, the batch entry, the first row, the head and the first column, and which of
    two arrays it is. The copy of the other is not taken: two branches would need more registers than a warpgroup that
    loads has.
    """
    types = as_operand(buffer), *[plgpu.RefType()] * len(arrays)
    types = *types, *[plgpu.Layout.WG_SPLAT] * len(scalars)
    params = {"direction": "load" if barriers else "store", "view": view}

    @inline_op("copy_rows", *types, **params, panel=swizzle_columns(buffer))
    def copy(context: Any, buffer: Ref, *operands: Any) -> None:
        i, *indices = (x.registers[()] for x in operands[len(arrays) :])
        barrier = barriers and barriers.find(context.module, i)
        _TmaCopy.of(context, operands[: len(arrays)], indices, barrier).issue(view, buffer)
        # Else ptxas may have the one thread that copies meet the others much later, behind loops and
        # waits that it takes to be the same for all: with their numbers in registers that a warp has
        # once, and that one changes for the others. So no branch is left, only predicates.
        asm("bar.warp.sync -1;", "")

    copy(buffer, *arrays, *(jnp.asarray(x, jnp.int32) for x in scalars))


@dataclasses.dataclass(frozen=True)
class _TmaCopy:
    """A copy in inline code between one of one or two arrays `[B, T, N, H]` and a buffer `[groups, panels, 8, columns]`
    of shared memory."""

    context: Any
    arrays: Sequence[Ref]
    barrier: mgpu.utils.BarrierRef | None  # of a load
    batch: MlirValue
    row: MlirValue
    head: MlirValue
    column: MlirValue
    which: Sequence[MlirValue]  # of two arrays

    @classmethod
    def of(
        cls, context: Any, arrays: Sequence[Ref], indices: Sequence[MlirValue], barrier: Any
    ) -> "_TmaCopy":
        index = ir.IndexType.get()
        batch, row, head, column = (arith.index_cast(index, x) for x in indices[:4])
        return cls(context, arrays, barrier, batch, row, head, column, which=indices[4:])

    def issue(self, view: TmaView, buffer: Ref) -> None:
        """Emit the copies."""
        kind = ir.MemRefType(buffer.type)
        groups, panels, _, width = kind.shape
        if self.barrier is not None:
            itemsize = mgpu.bitwidth(kind.element_type) // 8
            share = math.prod(kind.shape) * itemsize // THREADS  # a thread's; each will arrive once
            expect = f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], {share};"
            asm(expect, "r", self.barrier.get_ptr())
        rows = mgpu.ds(self.row, SWIZZLE_ROWS * groups)
        columns = mgpu.ds(self.column, panels * width)
        if view == "whole":
            tiled = mgpu.TileTransform((SWIZZLE_ROWS, width), launch_context.Rounding.DOWN)
            return self._copy(buffer, rows, columns, tiled)
        if panels == 1 and view == "row_groups":  # of all rows: a line each
            lines = mgpu.memref_fold(mgpu.memref_transpose(buffer, (1, 0, 2, 3)), 1, 2)
            return self._copy(lines, rows, columns, *_in_panels(width))
        self._copy_in_loop(view, buffer)

    def _copy_in_loop(self, view: TmaView, buffer: Ref) -> None:
        """Emit a loop of copies of 8 rows, or of 8 rows and one panel."""
        groups, panels, _, width = ir.MemRefType(buffer.type).shape
        index, word = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        # A copy takes the thread that issues it some 40 clocks. There are many of partial panels, and each
        # warp issues some of them; of whole ones, those of a sequence's end alone: fewer registers instead.
        across, warps = (panels, WARPS) if view == "panels" else (1, 1)
        assert groups % warps == 0, (groups, warps)
        warp = arith.index_cast(index, _warp_index() if warps > 1 else i32(0))

        def copy_next(step: MlirValue, nothing: list) -> list:
            asm('.pragma "nounroll";', "")
            n = arith.addi(arith.muli(step, arith.constant(index, warps)), warp)
            group = arith.divui(n, arith.constant(index, across))
            row = arith.addi(self.row, arith.muli(group, arith.constant(index, SWIZZLE_ROWS)))
            rows, target = mgpu.ds(row, SWIZZLE_ROWS), mgpu.memref_slice(buffer, group)
            if view == "row_groups":
                columns = mgpu.ds(self.column, panels * width)
                self._copy(target, rows, columns, *_in_panels(width))
                return nothing
            panel = arith.remui(n, arith.constant(index, across))
            start = arith.addi(self.column, arith.muli(panel, arith.constant(index, width)))
            target = mgpu.memref_slice(target, panel)
            self._copy(target, rows, mgpu.ds(start, width), warps=warps)
            return nothing

        # A number that the compiler does not know: it would unroll the loop, and spill.
        count = asm("mov.b32 $0, $1;", "=r,r", i32(groups * across // warps), result=word)
        mgpu.fori(arith.index_cast(index, count), [])(copy_next)

    def _copy(self, buffer: Ref, rows: Any, columns: Any, *transforms: Any, warps: int = 1) -> None:
        """Emit a copy from or to each array, of which one is taken."""
        kind = ir.MemRefType(buffer.type)
        elected = _elect_thread(warps)
        for n, array in enumerate(self.arrays):
            source, target = (buffer, array) if self.barrier is None else (array, buffer)
            predicate = elected
            for which in self.which:
                taken = arith.cmpi(arith.CmpIPredicate.eq, which, i32(n))
                predicate = arith.andi(elected, taken)
            self.context.async_copy(
                src_ref=source,
                dst_ref=target,
                gmem_slice=(self.batch, rows, self.head, columns),
                gmem_transform=transforms,
                barrier=self.barrier,
                swizzle=kind.shape[-1] * mgpu.bitwidth(kind.element_type) // 8,
                arrive=False,
                predicate=predicate,
            )


def _in_panels(width: int) -> tuple[mgpu.TileTransform, mgpu.TransposeTransform]:
    return mgpu.TileTransform((width,)), mgpu.TransposeTransform((1, 0, 2))


def _elect_thread(warps: int) -> MlirValue:
    """Emit a predicate that is true in one thread of the first warp of a warpgroup, or in one of each warp.

    Mosaic's own choice reads the thread's index, and asks a warp's first lane for it, at each copy: 600
    clocks, as both wait behind what other warpgroups ask of shared memory.
    """
    elected = nvvm.elect_sync()
    if warps == WARPS:
        return elected
    return arith.andi(elected, arith.cmpi(arith.CmpIPredicate.eq, _warp_index(), i32(0)))


def _warp_index() -> MlirValue:
    """Emit the index of a warp in its warpgroup."""
    warp = arith.shrui(mgpu.utils.thread_idx(), i32(5))
    return arith.andi(warp, i32(WARPS - 1))
