"""Pairwise arrays, from memory into the registers of a tile of scores."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.backends.common.inline import i32, inline_op
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.common.primitives.thread_values import sum_i32, thread_field
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers

LINE_BYTES = swizzle.SWIZZLE_BYTES  # of a row of a panel, whose 16-byte chunks swizzling permutes
PANEL_BYTES = swizzle.SWIZZLE_ROWS * LINE_BYTES

# (row, column) -> the offset in bytes of a thread's own value, which at (0, 0) is its first one: thread
# 32 w + 4 g + t has rows 16 w + g and columns 2 t (PTX ISA, wgmma's D fragment).
type Offsets = Callable[[int, int], MlirValue]


@dataclasses.dataclass(frozen=True)
class PairwiseTile:
    """A `[queries, keys]` tile of a pairwise array, for a tile of scores or for its transpose."""

    ref: Ref
    is_swizzled: bool = True  # as TMA fills shared memory (`swizzle.tiles`); or as any array
    transposed: bool = False  # whether rows of the tile of scores are keys

    def load(self, start: int, count: int, dtype: str) -> jax.Array:
        """Return some of the tile's columns. Floats of 16 bits become float32; booleans lie as 0 and 1, in 16 bits
        or as bytes."""
        memory, (queries, keys) = jnp.dtype(self.ref.dtype), self.ref.shape
        shape = keys if self.transposed else queries, count
        loaded = jnp.dtype({1: "int32", 2: "float32"}.get(memory.itemsize, dtype))
        operand = swizzle.as_operand(self.ref) if self.is_swizzled else plgpu.RefType()

        @inline_op(
            "load_pairwise",
            operand,
            result=plgpu.ShapeDtypeStruct(shape, loaded, ACC_LAYOUT),
            shape=(queries, keys),
            transposed=self.transposed,
            columns=slice(start, start + count),
            dtype=loaded,
        )
        def load(_, ref: Ref) -> Registers:
            registers = self._registers(ref, shape, start)
            signed = loaded == jnp.int32 if loaded.kind in "iu" else None
            return mgpu.FragmentedArray(
                _registers=registers, _layout=ACC_LAYOUT.to_mgpu(), _is_signed=signed
            )

        tile = load(self.ref)
        return tile != 0 if dtype == "bool" else tile

    def _registers(self, ref: Ref, shape: tuple[int, int], start: int) -> np.ndarray:
        i8, kind = ir.IntegerType.get_signless(8), ir.MemRefType(ref.type).element_type
        pair, base = ir.VectorType.get((2,), kind), mgpu.utils.memref_ptr(ref)
        offset = self._offsets(ref)

        def load(what: ir.Type, row: int, column: int) -> MlirValue:
            return llvm.load(what, mgpu.utils.getelementptr(base, [offset(row, column)], i8))

        registers = np.empty(ACC_LAYOUT.to_mgpu().registers_shape(shape), object)
        for at in np.ndindex(*registers.shape):
            row, column = 8 * sum(at[2:]), start + 8 * at[1]
            if self.transposed:
                register = llvm.mlir_undef(pair)
                for e in range(2):
                    register = llvm.insertelement(register, load(kind, row, column + e), i32(e))
            else:
                register = load(pair, row, column)
            if mgpu.utils.bitwidth(kind) == 16:
                register = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), register)
            if mgpu.utils.bitwidth(kind) == 8:
                word = ir.IntegerType.get_signless(32)
                register = arith.extui(ir.VectorType.get((2,), word), register)
            registers[at] = register
        return registers

    def _offsets(self, ref: Ref) -> Offsets:
        size = jnp.dtype(self.ref.dtype).itemsize
        if not self.is_swizzled:
            (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
            return _row_major_offsets(stride * size, size, self.transposed)
        swizzled = _transposed_offsets if self.transposed else _straight_offsets
        return swizzled(self.ref.shape[1], size)


def _xor(*terms: MlirValue) -> MlirValue:
    return functools.reduce(arith.xori, terms)


def _row_major_offsets(query_stride: int, key_stride: int, keys_are_rows: bool) -> Offsets:
    """Return offsets of an array in memory, by its strides in bytes."""
    strides = (key_stride, query_stride) if keys_are_rows else (query_stride, key_stride)
    row_stride, column_stride = strides
    row, column = sum_i32(thread_field(5, 2, 16), thread_field(2, 3, 1)), thread_field(0, 2, 2)
    first = sum_i32(arith.muli(row, i32(row_stride)), arith.muli(column, i32(column_stride)))
    return lambda row, column: sum_i32(first, i32(row * row_stride + column * column_stride))


def _straight_offsets(keys: int, size: int) -> Offsets:
    """Return offsets where rows are queries: g is a row's index in its panel, which its chunks are permuted by."""
    across = keys * size // LINE_BYTES  # panels side by side
    line = sum_i32(
        arith.muli(thread_field(5, 2, 2), i32(across * PANEL_BYTES)),
        thread_field(2, 3, LINE_BYTES),
    )
    chunk = _xor(thread_field(0, 2, 2 * size), thread_field(2, 3, 16))

    def offset(row: int, column: int) -> MlirValue:
        panel, byte = divmod(column * size, LINE_BYTES)
        start = i32((row // 8 * across + panel) * PANEL_BYTES)
        return sum_i32(line, start, _xor(chunk, i32(byte)))

    return offset


def _transposed_offsets(keys: int, size: int) -> Offsets:
    """Return offsets where rows are keys, 64 of them: 2 t is a query's index in its panel, or the one before it."""
    across = keys * size // LINE_BYTES  # one panel, or two of two warps' keys each
    line = thread_field(0, 2, 2 * LINE_BYTES)
    if across == 2:
        line = sum_i32(line, thread_field(6, 1, PANEL_BYTES))
    warps = thread_field(5, 2 // across, 16 * size)
    chunk = _xor(warps, thread_field(2, 3, size), thread_field(0, 2, 32))

    def offset(row: int, column: int) -> MlirValue:
        group, query = divmod(column, 8)
        odd = query % 2
        start = i32(group * across * PANEL_BYTES + odd * LINE_BYTES)
        return sum_i32(line, start, _xor(chunk, i32(row * size ^ 16 * odd)))

    return offset
