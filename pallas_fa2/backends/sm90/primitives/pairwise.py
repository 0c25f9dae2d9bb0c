"""Pairwise arrays, from memory into the registers of a tile of scores."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, llvm

from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.sm90.primitives import swizzle, thread_values
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.sm90.primitives.types import MlirValue, Ref, Registers

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


@dataclasses.dataclass(frozen=True)
class BoolTile:
    """64 queries and 64 keys of an array of booleans in device memory, with the interface of `PairwiseTile`.

    A pair's byte is a bit as soon as it is loaded. So a thread reads 16 at a time, and threads exchange bits
    instead of reading lines of memory by 2 bytes: 8 times as many instructions.
    """

    tile: jax.Array  # int32 [64, 64], which is not 0 for True

    @classmethod
    def load_packed(cls, ref: Ref, keys_are_rows: bool) -> "BoolTile":
        """Load the tile, or its transpose where its rows are keys."""
        result = plgpu.ShapeDtypeStruct(ref.shape, jnp.int32, ACC_LAYOUT)

        @inline_op("load_packed_bools", plgpu.RefType(), result=result, transposed=keys_are_rows)
        def load(_, ref: Ref) -> Registers:
            words = (_transposed_bits if keys_are_rows else _straight_bits)(ref)
            first = thread_values.first_column()
            words = [arith.shrui(word, first) for word in words]
            pair = ir.VectorType.get((2,), first.type)
            registers = np.empty(ACC_LAYOUT.to_mgpu().registers_shape(ref.type.shape), object)
            for at in np.ndindex(*registers.shape):
                word, eight = divmod(at[1], 2)
                bits = (16 * sum(at[2:]) + 8 * eight + e for e in range(2))
                register = llvm.mlir_undef(pair)
                for e, bit in enumerate(bits):
                    value = arith.andi(words[word], i32(_signed(1 << bit)))
                    register = llvm.insertelement(register, value, i32(e))
                registers[at] = register
            return mgpu.FragmentedArray(
                _registers=registers, _layout=ACC_LAYOUT.to_mgpu(), _is_signed=True
            )

        return cls(load(ref))

    def load(self, start: int, count: int, _: DTypeLike) -> jax.Array:
        """Return some of the tile's columns, as booleans."""
        return self.tile[:, start : start + count] != 0


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _bits(ref: Ref, row: MlirValue, first: MlirValue) -> MlirValue:
    """Emit 16 booleans of a row, from `first` on, as the lower half of a word."""
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    offset = _sum(arith.muli(row, i32(stride)), first)
    i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
    pointer = mgpu.utils.getelementptr(_first_byte(ref), [offset], i8)
    load = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    a, b, c, d = asm_words(4, load, "l", llvm.ptrtoint(i64, pointer))

    def eight(a: MlirValue, b: MlirValue) -> MlirValue:
        """Emit the sum of eight bytes times powers of two."""
        code = (
            "{ .reg .b32 x; dp4a.u32.u32 x, $1, 0x08040201, 0; "
            "dp4a.u32.u32 $0, $2, 0x80402010, x; }"
        )
        return asm(code, "=r,r,r", a, b, result=a.type, side_effects=False)

    return arith.ori(eight(a, b), arith.shli(eight(c, d), i32(8)))


def _first_byte(ref: Ref) -> MlirValue:
    """Emit the pointer to booleans. `mgpu.utils.memref_ptr` takes eight for a byte."""
    kind = ir.MemRefType(ref.type)
    pointer = llvm.PointerType.get(mgpu.utils.get_memref_llvm_address_space(kind))
    i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
    sizes = [llvm.ArrayType.get(i64, len(kind.shape))] * 2
    struct = llvm.StructType.get_literal([pointer, pointer, i64, *sizes])
    fields = builtin.unrealized_conversion_cast([struct], [ref])
    base, offset = (llvm.extractvalue(t, fields, [i]) for t, i in ((pointer, 1), (i64, 2)))
    return mgpu.utils.getelementptr(base, [offset], i8)


def _two_rows(ref: Ref, rows: Sequence[MlirValue], first: MlirValue) -> MlirValue:
    low, high = (_bits(ref, row, first) for row in rows)
    return arith.ori(low, arith.shli(high, i32(16)))


def _straight_bits(ref: Ref) -> list[MlirValue]:
    """Emit a word for each 16 columns where rows are queries: of row 16 w + g in its lower half, and of the 8th row
    after it in the upper one. Those of columns from 16 t on are what the thread loads itself."""
    row = _sum(_thread_field(5, 2, 16), _thread_field(2, 3, 1))
    own = _two_rows(ref, (row, _sum(row, i32(8))), _thread_field(0, 2, 16))
    return [_from_lane(own, i32(t), within=4) for t in range(4)]


def _transposed_bits(ref: Ref) -> list[MlirValue]:
    """Emit the same words where rows are keys. A warp has 16 of them, and each of its lanes loads two queries."""
    lane = _thread_field(0, 5, 1)
    word = _two_rows(ref, (lane, _sum(lane, i32(32))), _thread_field(5, 2, 16))
    for step in (16, 8, 4, 2, 1):
        word = _transpose_step(word, lane, step)
    # Now lane k has key k of queries 0 to 31, and lane 16 + k of the others.
    key, words = _thread_field(2, 3, 1), []
    for first in (0, 16):
        low, high = (_from_lane(word, _sum(key, i32(first + half))) for half in (0, 8))
        lower, upper = i32(0xFFFF), i32(_signed(0xFFFF0000))
        words.append(arith.ori(arith.andi(low, lower), arith.shli(high, i32(16))))
        words.append(arith.ori(arith.shrui(low, i32(16)), arith.andi(high, upper)))
    return words


def _transpose_step(word: MlirValue, lane: MlirValue, step: int) -> MlirValue:
    """Emit a step of the transposition of a warp's 32 words as rows of bits: blocks of `step` across the diagonal."""
    low = sum(1 << bit for bit in range(32) if not bit & step)
    received = _shuffled("bfly", word, i32(step), 32)
    is_low = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, i32(step)), i32(0))
    kept = arith.select(is_low, i32(_signed(low)), i32(_signed(low ^ 0xFFFFFFFF)))
    moved = arith.select(is_low, arith.shli(received, i32(step)), arith.shrui(received, i32(step)))
    return arith.ori(arith.andi(word, kept), arith.andi(moved, arith.xori(kept, i32(-1))))


def _from_lane(word: MlirValue, lane: MlirValue, within: int = 32) -> MlirValue:
    """Emit the word of another lane, by its index among `within` lanes that follow each other."""
    return _shuffled("idx", word, lane, within)


def _shuffled(mode: str, word: MlirValue, lane: MlirValue, within: int) -> MlirValue:
    clamp = (32 - within) << 8 | 31
    code = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, -1;"
    return asm(code, "=r,r,r", word, lane, result=word.type)


def _thread_field(first: int, count: int, weight: int) -> MlirValue:
    """Emit some bits of the thread's index, as an integer times the weight, a power of two."""
    bits = arith.andi(thread_values.thread_index(), i32(((1 << count) - 1) << first))
    shift = weight.bit_length() - 1 - first
    return arith.shli(bits, i32(shift)) if shift >= 0 else arith.shrui(bits, i32(-shift))


def _sum(*terms: MlirValue) -> MlirValue:
    return functools.reduce(arith.addi, terms)


def _xor(*terms: MlirValue) -> MlirValue:
    return functools.reduce(arith.xori, terms)


def _row_major_offsets(query_stride: int, key_stride: int, keys_are_rows: bool) -> Offsets:
    """Return offsets of an array in memory, by its strides in bytes."""
    strides = (key_stride, query_stride) if keys_are_rows else (query_stride, key_stride)
    row_stride, column_stride = strides
    row, column = _sum(_thread_field(5, 2, 16), _thread_field(2, 3, 1)), _thread_field(0, 2, 2)
    first = _sum(arith.muli(row, i32(row_stride)), arith.muli(column, i32(column_stride)))
    return lambda row, column: _sum(first, i32(row * row_stride + column * column_stride))


def _straight_offsets(keys: int, size: int) -> Offsets:
    """Return offsets where rows are queries: g is a row's index in its panel, which its chunks are permuted by."""
    across = keys * size // LINE_BYTES  # panels side by side
    line = _sum(
        arith.muli(_thread_field(5, 2, 2), i32(across * PANEL_BYTES)),
        _thread_field(2, 3, LINE_BYTES),
    )
    chunk = _xor(_thread_field(0, 2, 2 * size), _thread_field(2, 3, 16))

    def offset(row: int, column: int) -> MlirValue:
        panel, byte = divmod(column * size, LINE_BYTES)
        start = i32((row // 8 * across + panel) * PANEL_BYTES)
        return _sum(line, start, _xor(chunk, i32(byte)))

    return offset


def _transposed_offsets(keys: int, size: int) -> Offsets:
    """Return offsets where rows are keys, 64 of them: 2 t is a query's index in its panel, or the one before it."""
    across = keys * size // LINE_BYTES  # one panel, or two of two warps' keys each
    line = _thread_field(0, 2, 2 * LINE_BYTES)
    if across == 2:
        line = _sum(line, _thread_field(6, 1, PANEL_BYTES))
    warps = _thread_field(5, 2 // across, 16 * size)
    chunk = _xor(warps, _thread_field(2, 3, size), _thread_field(0, 2, 32))

    def offset(row: int, column: int) -> MlirValue:
        group, query = divmod(column, 8)
        odd = query % 2
        start = i32(group * across * PANEL_BYTES + odd * LINE_BYTES)
        return _sum(line, start, _xor(chunk, i32(row * size ^ 16 * odd)))

    return offset
