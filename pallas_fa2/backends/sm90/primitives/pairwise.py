"""Data of pairs of tokens, from memory into the registers of a tile of scores."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, llvm

from pallas_fa2.backends.sm90.primitives import swizzle, thread_values
from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.sm90.primitives.thread_values import i32

LINE = 128  # bytes of a row of a panel, of whose 16-byte chunks swizzling permutes the order
PANEL_BYTES = swizzle.SWIZZLE_ROWS * LINE


@dataclasses.dataclass(frozen=True)
class PairwiseTile:
    """A `[queries, keys]` part of an array of pairs, for a tile of scores or its transpose."""

    ref: Any
    is_swizzled: bool = True  # as TMA fills shared memory (`tma.tiles`); or as any array
    transposed: bool = False  # of the tile

    def load(self, start: int, count: int, dtype: str) -> jax.Array:
        """Some of the tile's columns. Floats of 16 bits become float32; booleans lie as 0 and 1, in 16 bits
        or as bytes."""
        memory, (queries, keys) = jnp.dtype(self.ref.dtype), self.ref.shape
        shape = keys if self.transposed else queries, count
        loaded = jnp.dtype({1: "int32", 2: "float32"}.get(memory.itemsize, dtype))

        def load(_: Any, ref: Any) -> Any:
            registers = self._registers(ref, shape, start)
            signed = loaded == jnp.int32 if loaded.kind in "iu" else None
            return mgpu.FragmentedArray(
                _registers=registers, _layout=ACC_LAYOUT.to_mgpu(), _is_signed=signed
            )

        orientation = "transposed" if self.transposed else "straight"
        name = f"load_pairs {orientation} {queries} {keys} {start} {count} {loaded.name}"
        kind = swizzle.as_operand(self.ref) if self.is_swizzled else plgpu.RefType()
        found = inline_op(name, load, plgpu.ShapeDtypeStruct(shape, loaded, ACC_LAYOUT), kind)(
            self.ref
        )
        return found != 0 if dtype == "bool" else found

    def _registers(self, ref: Any, shape: tuple[int, int], start: int) -> np.ndarray:
        i8, kind = ir.IntegerType.get_signless(8), ir.MemRefType(ref.type).element_type
        pairs, base, place = (
            ir.VectorType.get((2,), kind),
            mgpu.utils.memref_ptr(ref),
            self._place(ref),
        )

        def value(what: Any, row: int, column: int) -> Any:
            return llvm.load(what, mgpu.utils.getelementptr(base, [place(row, column)], i8))

        registers = np.empty(ACC_LAYOUT.to_mgpu().registers_shape(shape), object)
        for at in np.ndindex(*registers.shape):
            row, column = 8 * sum(at[2:]), start + 8 * at[1]
            if self.transposed:
                found = llvm.mlir_undef(pairs)
                for e in range(2):
                    found = llvm.insertelement(found, value(kind, row, column + e), i32(e))
            else:
                found = value(pairs, row, column)
            if mgpu.utils.bitwidth(kind) == 16:
                found = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), found)
            if mgpu.utils.bitwidth(kind) == 8:
                word = ir.IntegerType.get_signless(32)
                found = arith.extui(ir.VectorType.get((2,), word), found)
            registers[at] = found
        return registers

    def _place(self, ref: Any) -> Callable[[int, int], Any]:
        """(row, column) -> where a thread's own value lies, in bytes, which at (0, 0) is the first that it
        has: thread 32 w + 4 g + t has rows 16 w + g and columns 2 t (PTX ISA, wgmma's D fragment)."""
        size = jnp.dtype(self.ref.dtype).itemsize
        if not self.is_swizzled:
            (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
            return _in_order(stride * size, size, self.transposed)
        return (_transposed if self.transposed else _straight)(self.ref.shape[1], size)


@dataclasses.dataclass(frozen=True)
class BoolTile:
    """64 queries and 64 keys of an array of booleans in device memory, as a `PairTile` has them.

    A pair's byte is a bit as soon as it is there. So a thread reads 16 at a time, and threads exchange bits
    instead of reading lines of memory by 2 bytes: 8 times as many instructions.
    """

    tile: jax.Array  # int32 [64, 64]: whether it is 0

    @classmethod
    def load_packed(cls, ref: Any, keys_are_rows: bool) -> "BoolTile":
        def load(_: Any, ref: Any) -> Any:
            words = (_transposed_bits if keys_are_rows else _straight_bits)(ref)
            first = thread_values.first_column()
            words = [arith.shrui(word, first) for word in words]
            pairs = ir.VectorType.get((2,), first.type)
            registers = np.empty(ACC_LAYOUT.to_mgpu().registers_shape(ref.type.shape), object)
            for at in np.ndindex(*registers.shape):
                word, eight = divmod(at[1], 2)
                bits = (16 * sum(at[2:]) + 8 * eight + e for e in range(2))
                found = llvm.mlir_undef(pairs)
                for e, bit in enumerate(bits):
                    value = arith.andi(words[word], i32(_signed(1 << bit)))
                    found = llvm.insertelement(found, value, i32(e))
                registers[at] = found
            return mgpu.FragmentedArray(
                _registers=registers, _layout=ACC_LAYOUT.to_mgpu(), _is_signed=True
            )

        name = f"load_booleans {'transposed' if keys_are_rows else 'straight'}"
        result = plgpu.ShapeDtypeStruct(ref.shape, jnp.int32, ACC_LAYOUT)
        return cls(inline_op(name, load, result, plgpu.RefType())(ref))

    def load(self, start: int, count: int, _: str) -> jax.Array:
        return self.tile[:, start : start + count] != 0


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _bits(ref: Any, row: Any, first: Any) -> Any:
    """Of 16 booleans of a row, from `first` on, in the lower half of a word."""
    (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    place = _sum(arith.muli(row, i32(stride)), first)
    i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
    pointer = mgpu.utils.getelementptr(_first_byte(ref), [place], i8)
    load = "ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];"
    a, b, c, d = thread_values.asm_words(4, load, "l", llvm.ptrtoint(i64, pointer))

    def eight(a: Any, b: Any) -> Any:
        """Sums of bytes times powers of two."""
        code = (
            "{ .reg .b32 x; dp4a.u32.u32 x, $1, 0x08040201, 0; "
            "dp4a.u32.u32 $0, $2, 0x80402010, x; }"
        )
        return llvm.inline_asm(a.type, [a, b], code, "=r,r,r")

    return arith.ori(eight(a, b), arith.shli(eight(c, d), i32(8)))


def _first_byte(ref: Any) -> Any:
    """Where booleans begin. `mgpu.utils.memref_ptr` takes eight for a byte."""
    kind = ir.MemRefType(ref.type)
    pointer = llvm.PointerType.get(mgpu.utils.get_memref_llvm_address_space(kind))
    i8, i64 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(64)
    sizes = [llvm.ArrayType.get(i64, len(kind.shape))] * 2
    struct = llvm.StructType.get_literal([pointer, pointer, i64, *sizes])
    fields = builtin.unrealized_conversion_cast([struct], [ref])
    base, offset = (llvm.extractvalue(t, fields, [i]) for t, i in ((pointer, 1), (i64, 2)))
    return mgpu.utils.getelementptr(base, [offset], i8)


def _two_lines(ref: Any, rows: Sequence[Any], first: Any) -> Any:
    low, high = (_bits(ref, row, first) for row in rows)
    return arith.ori(low, arith.shli(high, i32(16)))


def _straight_bits(ref: Any) -> list[Any]:
    """Rows are queries. Of each 16 columns a word, of row 16 w + g in its lower half and of the 8th row after it
    in the upper one. A thread's own are those of columns from 16 t on."""
    row = _sum(_field(5, 2, 16), _field(2, 3, 1))
    own = _two_lines(ref, (row, _sum(row, i32(8))), _field(0, 2, 16))
    return [_of_lane(own, i32(t), within=4) for t in range(4)]


def _transposed_bits(ref: Any) -> list[Any]:
    """The same where rows are keys. A warp has 16 of them, and each of its lanes reads two queries."""
    lane = _field(0, 5, 1)
    word = _two_lines(ref, (lane, _sum(lane, i32(32))), _field(5, 2, 16))
    for step in (16, 8, 4, 2, 1):
        word = _exchanged(word, lane, step)
    # Now lane k has key k of queries 0 to 31, and lane 16 + k of the others.
    key, words = _field(2, 3, 1), []
    for first in (0, 16):
        low, high = (_of_lane(word, _sum(key, i32(first + half))) for half in (0, 8))
        lower, upper = i32(0xFFFF), i32(_signed(0xFFFF0000))
        words.append(arith.ori(arith.andi(low, lower), arith.shli(high, i32(16))))
        words.append(arith.ori(arith.shrui(low, i32(16)), arith.andi(high, upper)))
    return words


def _exchanged(word: Any, lane: Any, step: int) -> Any:
    """A step of the transposition of a warp's 32 words as rows of bits: blocks of `step` across the diagonal."""
    low = sum(1 << bit for bit in range(32) if not bit & step)
    other = _shuffled("bfly", word, i32(step), 32)
    is_low = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, i32(step)), i32(0))
    kept = arith.select(is_low, i32(_signed(low)), i32(_signed(low ^ 0xFFFFFFFF)))
    moved = arith.select(is_low, arith.shli(other, i32(step)), arith.shrui(other, i32(step)))
    return arith.ori(arith.andi(word, kept), arith.andi(moved, arith.xori(kept, i32(-1))))


def _of_lane(word: Any, lane: Any, within: int = 32) -> Any:
    """Another lane's, of so many that follow each other."""
    return _shuffled("idx", word, lane, within)


def _shuffled(mode: str, word: Any, lane: Any, within: int) -> Any:
    clamp = (32 - within) << 8 | 31
    code = f"shfl.sync.{mode}.b32 $0, $1, $2, {clamp}, -1;"
    return llvm.inline_asm(word.type, [word, lane], code, "=r,r,r", has_side_effects=True)


def _field(first: int, count: int, weight: int) -> Any:
    """Some bits of the thread's number, as an integer times the weight, a power of two."""
    bits = arith.andi(thread_values.thread_number(), i32(((1 << count) - 1) << first))
    shift = weight.bit_length() - 1 - first
    return arith.shli(bits, i32(shift)) if shift >= 0 else arith.shrui(bits, i32(-shift))


def _sum(*terms: Any) -> Any:
    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total


def _xor(*terms: Any) -> Any:
    total, *rest = terms
    for term in rest:
        total = arith.xori(total, term)
    return total


def _in_order(of_query: int, of_key: int, keys_are_rows: bool) -> Callable[[int, int], Any]:
    of_row, of_column = (of_key, of_query) if keys_are_rows else (of_query, of_key)
    row, column = _sum(_field(5, 2, 16), _field(2, 3, 1)), _field(0, 2, 2)
    first = _sum(arith.muli(row, i32(of_row)), arith.muli(column, i32(of_column)))
    return lambda row, column: _sum(first, i32(row * of_row + column * of_column))


def _straight(keys: int, size: int) -> Callable[[int, int], Any]:
    """Rows are queries: g is a row's place in its panel, which its chunks are permuted by."""
    across = keys * size // LINE  # panels side by side
    line = _sum(arith.muli(_field(5, 2, 2), i32(across * PANEL_BYTES)), _field(2, 3, LINE))
    chunk = _xor(_field(0, 2, 2 * size), _field(2, 3, 16))

    def place(row: int, column: int) -> Any:
        panel, byte = divmod(column * size, LINE)
        start = i32((row // 8 * across + panel) * PANEL_BYTES)
        return _sum(line, start, _xor(chunk, i32(byte)))

    return place


def _transposed(keys: int, size: int) -> Callable[[int, int], Any]:
    """Rows are keys, 64 of them: 2 t is a query's place in its panel, or the one before it."""
    across = keys * size // LINE  # one panel, or two of two warps' keys each
    line = _field(0, 2, 2 * LINE)
    if across == 2:
        line = _sum(line, _field(6, 1, PANEL_BYTES))
    warps = _field(5, 2 // across, 16 * size)
    chunk = _xor(warps, _field(2, 3, size), _field(0, 2, 32))

    def place(row: int, column: int) -> Any:
        group, query = divmod(column, 8)
        odd = query % 2
        start = i32(group * across * PANEL_BYTES + odd * LINE)
        return _sum(line, start, _xor(chunk, i32(row * size ^ 16 * odd)))

    return place
