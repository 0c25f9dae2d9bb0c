"""Rows of a head between device memory and swizzled shared memory, by cp.async (PTX ISA).

The instruction copies 16 bytes for each thread and fills what does not exist with zeros, so that any length and any
head dim that is a multiple of 8 needs no padded copy in device memory. Copies are ordered by groups: a thread waits for
its own (`copy_groups.wait_groups`), then all threads of the CTA meet (`sync_cta`), and then everyone's copies are
there.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.layouts import ROW_LAYOUT, THREADS
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.thread_values import (
    address,
    scalars,
    thread_index,
    warpgroup_thread_index,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar

CHUNK_BYTES = 16  # that a thread copies at once
_SCALAR = plgpu.Layout.WG_SPLAT


class _Pass(NamedTuple):
    """A step in which all threads of a CTA copy 16 bytes each, in Python numbers."""

    row: int  # distance of the row from the thread's first
    smem_offset: int  # bytes from the thread's first chunk
    gmem_offset: int
    first_column: int  # of the chunks that are copied
    last_column: int  # of the array's columns that the step can reach, one after


class _ThreadChunks:
    """Where a thread's chunks of a `[rows, columns]` buffer lie, in shared and in device memory.

    Shared memory has tiles of 8 rows and 128 or 64 bytes of columns, `swizzle.tiles`: chunk c of row r of a tile lies
    at chunk c ^ (r % 8) of 8, or at c ^ (r % 8 // 2) of 4.
    """

    def __init__(self, buffer: Ref, array: Ref, warpgroups: int):
        buffer_type, array_type = ir.MemRefType(buffer.type), ir.MemRefType(array.type)
        (_, self.dim), ((stride, _), _) = array_type.shape, array_type.get_strides_and_offset()
        row_groups, panels, group_rows, width = buffer_type.shape
        size = mgpu.utils.bitwidth(array_type.element_type) // 8
        panel_bytes = width * size
        row_bytes, group_bytes = panels * panel_bytes, panels * panel_bytes * group_rows
        self.columns_per_chunk = CHUNK_BYTES // size
        chunks = 8 if row_bytes % 128 == 0 else 4  # that neighboring threads copy, of a row
        threads = THREADS * warpgroups
        rows_per_pass = threads // chunks
        thread = arith.andi(thread_index(), i32(threads - 1))
        self.row = arith.shrui(thread, i32(chunks.bit_length() - 1))
        self.chunk = arith.andi(thread, i32(chunks - 1))
        low = arith.andi(self.row, i32(group_rows - 1))
        place = arith.addi(
            arith.muli(arith.shrui(self.row, i32(3)), i32(group_bytes)),
            arith.muli(low, i32(panel_bytes)),
        )
        if panel_bytes == 128:
            place = arith.addi(place, arith.shli(arith.xori(self.chunk, low), i32(4)))
        else:
            inner = arith.xori(arith.andi(self.chunk, i32(3)), arith.shrui(low, i32(1)))
            panel = arith.shli(arith.shrui(self.chunk, i32(2)), i32(9))
            place = arith.addi(place, arith.addi(arith.shli(inner, i32(4)), panel))
        self.smem = arith.addi(place, address(buffer, 32))
        offset = arith.addi(
            arith.muli(self.row, i32(stride * size)), arith.shli(self.chunk, i32(4))
        )
        i64 = ir.IntegerType.get_signless(64)
        self.gmem = arith.addi(address(array), arith.extui(i64, offset))
        self._grid = [
            (i * rows_per_pass, j)
            for i in range(-(-row_groups * group_rows // rows_per_pass))
            for j in range(row_bytes // CHUNK_BYTES // chunks)
        ]
        self._rows = row_groups * group_rows
        self._steps = rows_per_pass // 8 * group_bytes, chunks * 8 * CHUNK_BYTES, stride * size
        self._chunks, self._rows_per_pass = chunks, rows_per_pass

    def passes(self) -> Iterator[_Pass]:
        row_step, column_step, gmem_stride = self._steps
        for row, j in self._grid:
            smem = row // self._rows_per_pass * row_step + j * column_step
            gmem = row * gmem_stride + j * self._chunks * CHUNK_BYTES
            first = j * self._chunks * self.columns_per_chunk
            yield _Pass(row, smem, gmem, first, first + self._chunks * self.columns_per_chunk)

    def has_row(self, step: _Pass) -> MlirValue | None:
        """Return whether the thread's row is one of the buffer's; None if all are."""
        left = self._rows - step.row
        if left >= self._rows_per_pass:
            return None
        return arith.cmpi(arith.CmpIPredicate.slt, self.row, i32(left))

    def exists(self, step: _Pass, limit: MlirValue | None) -> MlirValue | None:
        """Return whether the thread's chunk is one of the array's; None if all are."""
        conditions = []
        if limit is not None:
            row = arith.addi(self.row, i32(step.row))
            conditions.append(arith.cmpi(arith.CmpIPredicate.slt, row, limit))
        if step.last_column > self.dim:
            left = max(self.dim - step.first_column, 0) // self.columns_per_chunk
            conditions.append(arith.cmpi(arith.CmpIPredicate.slt, self.chunk, i32(left)))
        if not conditions:
            return None
        return conditions[0] if len(conditions) == 1 else arith.andi(*conditions)


def load_rows(array: Ref, buffer: Ref, warpgroups: int, limit: Scalar | None = None) -> None:
    """Copy `[rows, dim]` of device memory into a swizzled `[rows, columns]` buffer, columns >= dim.

    Rows from `limit` on (if it is given) and columns from dim on do not exist and become zeros. All threads of the CTA
    take part.
    """
    limits = () if limit is None else (I32(limit),)

    @inline_op("load_rows", plgpu.RefType(), swizzle.as_operand(buffer), *[_SCALAR] * len(limits))
    def load(_, array: Ref, buffer: Ref, *limits: Registers) -> None:
        chunks = _ThreadChunks(buffer, array, warpgroups)
        bound = limits[0].registers[()] if limits else None
        for step in chunks.passes():
            operands = [chunks.smem, chunks.gmem]
            constraints, predicate = ["r", "l"], ""
            code = f"[$0 + {step.smem_offset}], [$1 + {step.gmem_offset}], {CHUNK_BYTES}"
            if (exists := chunks.exists(step, bound)) is not None:
                operands.append(arith.select(exists, i32(CHUNK_BYTES), i32(0)))
                constraints.append("r")
                code += ", $2"
            if (has_row := chunks.has_row(step)) is not None:
                operands.append(has_row)
                constraints.append("b")
                predicate = f"@${len(operands) - 1} "
            code = f"{predicate}cp.async.cg.shared.global.L2::128B {code};"
            asm(code, ",".join(constraints), *operands)

    load(array, buffer, *limits)


def zero_rows(buffer: Ref, kept: jax.Array) -> None:
    """Set to 0 the rows of a swizzled `[64, columns]` buffer, columns a multiple of 64, that are not kept, booleans
    `[64]`. All threads of a warpgroup take part."""

    @inline_op("zero_rows", swizzle.as_operand(buffer), ROW_LAYOUT)
    def zero(_, buffer: Ref, kept: Registers) -> None:
        # A thread has rows r and r + 8 of its warp's 16, as three neighbors have; each has every fourth chunk of these.
        # All chunks of a row become zeros, so that their order does not matter.
        _, panels, group_rows, width = ir.MemRefType(buffer.type).shape
        assert width * 2 == swizzle.SWIZZLE_BYTES and group_rows == swizzle.SWIZZLE_ROWS
        panel_bytes = swizzle.SWIZZLE_BYTES * swizzle.SWIZZLE_ROWS
        lane, warp = (arith.andi(thread_index(), i32(mask)) for mask in (31, 96))
        row, first = arith.shrui(lane, i32(2)), arith.andi(lane, i32(3))
        groups = arith.shrui(warp, i32(4))  # of 8 rows, before the warp's
        start = arith.addi(address(buffer, 32), arith.muli(groups, i32(panels * panel_bytes)))
        start = arith.addi(start, arith.muli(row, i32(swizzle.SWIZZLE_BYTES)))
        for half, keeps in enumerate(scalars(kept)):
            for chunk in range(0, 8, 4):
                place = arith.addi(start, arith.shli(arith.addi(first, i32(chunk)), i32(4)))
                for panel in range(panels):
                    offset = (half * panels + panel) * panel_bytes
                    code = (
                        "{ .reg .pred p; setp.eq.s32 p, $1, 0; "
                        f"@p st.shared.v4.b32 [$0 + {offset}], {{$2, $2, $2, $2}}; }}"
                    )
                    asm(code, "r,r,r", place, keeps, i32(0))

    zero(buffer, jnp.where(kept, 1, 0))


def store_rows(buffer: Ref, array: Ref, warpgroups: int, limit: Scalar) -> None:
    """Store the rows before `limit` of a swizzled buffer to `[rows, dim]` of device memory, 16 bytes a thread at a
    time.

    All threads of the CTA take part.
    """

    @inline_op("store_smem_rows", swizzle.as_operand(buffer), plgpu.RefType(), _SCALAR)
    def store(_, buffer: Ref, array: Ref, limit: Registers) -> None:
        chunks = _ThreadChunks(buffer, array, warpgroups)
        for step in chunks.passes():
            if step.first_column >= chunks.dim:
                continue
            exists = chunks.exists(step, limit.registers[()])
            assert exists is not None and chunks.has_row(step) is None
            code = (
                "{ .reg .b32 a, b, c, d; "
                f"ld.shared.v4.b32 {{a, b, c, d}}, [$0 + {step.smem_offset}]; "
                f"@$2 st.global.v4.b32 [$1 + {step.gmem_offset}], {{a, b, c, d}}; }}"
            )
            asm(code, "r,l,b", chunks.smem, chunks.gmem, exists)

    store(buffer, array, I32(limit))


@inline_op("load_vector", plgpu.RefType(), plgpu.RefType())
def load_vector(_, vector: Ref, buffer: Ref) -> None:
    """Copy float32 `[n]`, n a multiple of 4 up to 512, by the first threads of each warpgroup."""
    (count,) = ir.MemRefType(vector.type).shape
    thread = warpgroup_thread_index()
    offset = arith.shli(thread, i32(4))
    i64 = ir.IntegerType.get_signless(64)
    smem = arith.addi(address(buffer, 32), offset)
    gmem = arith.addi(address(vector), arith.extui(i64, offset))
    code = (
        f"{{ .reg .pred p; setp.lt.s32 p, $2, {count // 4}; "
        "@p cp.async.cg.shared.global [$0], [$1], 16; }"
    )
    asm(code, "r,l,r", smem, gmem, thread)


def sync_cta(warpgroups: int) -> None:
    """Let all threads of the CTA wait for each other; what each has done in shared memory, all see then."""

    @inline_op("sync_cta")
    def sync(_) -> None:
        asm(f"bar.sync {NamedBarrier.CTA}, {THREADS * warpgroups};", "")

    sync()
