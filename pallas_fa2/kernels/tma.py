"""Rows of a head between device memory and shared memory by TMA, for sequences of any length.

Shared memory lies in tiles of 8 rows, as WGMMA reads it, and TMA fills them by a view of device memory
in which a sequence is groups of 8 rows. TMA stops at a view's end, and that can only be the end of a
group. Where a length is no multiple of 8, that view has the whole groups alone. Another has the rows as
a dimension of its own and stops anywhere; it can fill what lies in one piece, which are 8 rows, or any
number where a row is one swizzled line (H = 64). So what contains a sequence's end is copied by pieces.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import launch_context
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

GROUP = 8  # rows of a tile
THREADS = 128  # of a warpgroup


def tiles(columns: int, dtype: Any) -> tuple[Any, ...]:
    """Tiles of 8 rows swizzled over 128 bytes, or 64 where rows are no multiple of 128 (H = 96)."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = 128 if columns * itemsize % 128 == 0 else 64
    return (
        plgpu.TilingTransform((GROUP, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of one head of an array `[B, T, N, H]` in device memory.

    Those from T on do not exist: they are loaded as zeros and not stored.
    """

    array: Any
    batch: Any
    rows: Any  # a slice; it starts at a multiple of 8 and has a multiple of 8
    head: Any
    columns: Any = None  # a slice; all of them if None
    # Whether they are always copied by pieces where the length needs it: less code, and registers.
    by_pieces: bool = False

    @property
    def ref(self) -> Any:
        place = self.batch, self.rows, self.head
        return self.array.at[place if self.columns is None else (*place, self.columns)]

    @property
    def ragged(self) -> bool:
        """Whether Pallas cannot say it. A sequence shorter than a group is a group of its own."""
        length = self.array.shape[1]
        return length > GROUP and length % GROUP != 0

    def load(self, buffer: Any, barriers: Any, i: Any) -> None:
        """Fills shared memory; arrives once at barrier i of an array when it is there."""
        if self.ragged:
            self._copy(buffer, Barriers.of(barriers), i)
            plgpu.barrier_arrive(barriers.at[i])
        else:
            plgpu.copy_gmem_to_smem(self.ref, buffer, barriers.at[i])

    def store(self, buffer: Any) -> None:
        """Empties shared memory, in the caller's commit group."""
        if self.ragged:
            self._copy(buffer, None, 0)
        else:
            plgpu.copy_smem_to_gmem(buffer, self.ref, commit_group=False)

    def _copy(self, buffer: Any, barriers: "Barriers | None", i: Any) -> None:
        column = 0 if self.columns is None else self.columns.start
        place = self.batch, self.rows.start, self.head, column
        scalars = [jnp.asarray(x, jnp.int32) for x in (*place, i)]
        refs = plgpu.RefType(), plgpu.RefType(tiles(buffer.shape[-1], buffer.dtype))
        types = *refs, *[plgpu.Layout.WG_SPLAT] * len(scalars)

        def copy(whole: bool) -> None:
            def inline(ctx: Any, array: Any, buffer: Any, *scalars: Any) -> None:
                *place, i = (x.registers[()] for x in scalars)
                _issue(ctx, array, buffer, place, whole, barriers and barriers.find(ctx.module, i))

            # The interpreter in the tests knows it by this name.
            inline.__name__ = f"{'load' if barriers else 'store'} {'whole' if whole else 'pieces'}"
            plgpu.inline_mgpu(arg_types=types)(inline)(self.array, buffer, *scalars)

        if self.by_pieces or _is_one_line(buffer):
            return copy(False)
        inside = self.rows.start + self.rows.size <= self.array.shape[1]
        lax.cond(inside, lambda: copy(True), lambda: copy(False))


def _is_one_line(buffer: Any) -> bool:
    """Whether a row of shared memory is one swizzled line."""
    tiling, _ = tiles(buffer.shape[-1], buffer.dtype)
    return tiling.tiling[-1] == buffer.shape[-1]


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


def _issue(ctx: Any, array: Any, buffer: Any, place: list[Any], whole: bool, barrier: Any) -> None:
    """A load, if there is a barrier, or a store; `buffer` is [groups, panels, 8, columns]."""
    i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    kind = ir.MemRefType(buffer.type)
    groups, panels, _, width = kind.shape
    itemsize = mgpu.bitwidth(kind.element_type) // 8
    batch, first, head, column = (arith.index_cast(index, x) for x in place)

    def copy(buffer: Any, row: Any, rows: int, *view: Any) -> None:
        source, target = (buffer, array) if barrier is None else (array, buffer)
        ctx.async_copy(
            src_ref=source,
            dst_ref=target,
            gmem_slice=(batch, mgpu.ds(row, rows), head, mgpu.ds(column, panels * width)),
            gmem_transform=view,
            barrier=barrier,
            swizzle=width * itemsize,
            arrive=False,
        )

    if barrier is not None:
        share = math.prod(kind.shape) * itemsize // THREADS  # a thread's; each will arrive once
        expect = f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], {share};"
        _assembly(None, expect, "r", barrier.get_ptr())
    if whole:
        view = mgpu.TileTransform((GROUP, width), launch_context.Rounding.DOWN)
        return copy(buffer, first, GROUP * groups, view)

    view = mgpu.TileTransform((width,)), mgpu.TransposeTransform((1, 0, 2))
    if panels == 1:
        rows = mgpu.memref_fold(mgpu.memref_transpose(buffer, (1, 0, 2, 3)), 1, 2)
        return copy(rows, first, GROUP * groups, *view)

    def copy_group(group: Any, nothing: list) -> list:
        _assembly(None, '.pragma "nounroll";', "")
        row = arith.addi(first, arith.muli(group, arith.constant(index, GROUP)))
        copy(mgpu.memref_slice(buffer, group), row, GROUP, *view)
        return nothing

    # A number that the compiler does not know: it would unroll the loop, and spill.
    count = _assembly(i32, "mov.b32 $0, $1;", "=r,r", arith.constant(i32, groups))
    mgpu.fori(arith.index_cast(index, count), [])(copy_group)


def _assembly(result: Any, code: str, constraints: str, *operands: Any) -> Any:
    result = ir.Type.parse("!llvm.void") if result is None else result
    return llvm.inline_asm(result, operands, code, constraints, has_side_effects=True)
