"""Arrays of booleans in device memory, packed to bits on their way into the registers of a tile of scores."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, builtin, llvm

from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.common.primitives.thread_values import sum_i32, thread_field
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers


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
    offset = sum_i32(arith.muli(row, i32(stride)), first)
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
    row = sum_i32(thread_field(5, 2, 16), thread_field(2, 3, 1))
    own = _two_rows(ref, (row, sum_i32(row, i32(8))), thread_field(0, 2, 16))
    return [_from_lane(own, i32(t), within=4) for t in range(4)]


def _transposed_bits(ref: Ref) -> list[MlirValue]:
    """Emit the same words where rows are keys. A warp has 16 of them, and each of its lanes loads two queries."""
    lane = thread_field(0, 5, 1)
    word = _two_rows(ref, (lane, sum_i32(lane, i32(32))), thread_field(5, 2, 16))
    for step in (16, 8, 4, 2, 1):
        word = _transpose_step(word, lane, step)
    # Now lane k has key k of queries 0 to 31, and lane 16 + k of the others.
    key, words = thread_field(2, 3, 1), []
    for first in (0, 16):
        low, high = (_from_lane(word, sum_i32(key, i32(first + half))) for half in (0, 8))
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
