"""Makes Q in shared memory the operand of WGMMA beside keys of 8 bits: float16, in their order of columns
(`eight_bits.py`).

Rows are divided by powers of two, because float16 has fewer exponents than bfloat16.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.common.primitives.swizzle import (
    SWIZZLE_BYTES,
    SWIZZLE_ROWS,
    as_operand,
)
from pallas_fa2.backends.common.primitives.thread_values import (
    address,
    shuffle_xor,
    sum_i32,
    thread_field,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref

# Rows are divided so that their largest element is 2^14 or more, and below 2^15, which float16 has; less where it is
# below 2^-112. Elements down to 2^-28 of it are no subnormal numbers then, and products and sums are far from those
# that float32 lacks.
QUERY_EXPONENT = 14
LANES_OF_ROW, MAX_PANELS = 16, 4  # 16 columns a lane


def order_queries(buffer: Ref, scale: Ref, dtype: DTypeLike) -> None:
    """Make Q `[columns, H]`, whose buffer has bits of `dtype`, an operand in place, and store the powers of two that
    its rows were divided by in `scale`, float32 `[columns]`. Both are in shared memory.

    Nothing waits for other warps: neither may be read before `commit_smem`.
    """
    name = jnp.dtype(dtype).name

    @inline_op("order_queries", as_operand(buffer), plgpu.RefType(), dtype=name)
    def order(_, buffer: Ref, scale: Ref) -> None:
        row_groups, panels, _, _ = ir.MemRefType(buffer.type).shape
        assert panels <= MAX_PANELS
        # A lane has 16 columns of a row, two chunks of 16 bytes. Where H is less than 256, all lanes beyond the last
        # panel do what those of the last panel do. None stores before all lanes of the warp have loaded: a store
        # depends on the exchanges.
        panel = arith.minui(thread_field(2, 2, 1), i32(panels - 1))
        panel = arith.muli(panel, i32(SWIZZLE_ROWS * SWIZZLE_BYTES))
        chunk = arith.xori(thread_field(0, 2, 32), thread_field(4, 3, 16))
        first = sum_i32(address(buffer, 32), panel, thread_field(4, 3, SWIZZLE_BYTES), chunk)
        # All rows are loaded first, so that their exchanges are under way together.
        chunks, rows = [], []
        for group in range(row_groups):
            at = arith.addi(first, i32(group * panels * SWIZZLE_ROWS * SWIZZLE_BYTES))
            chunks.append((at, arith.xori(at, i32(16))))
            words = [word for start in chunks[-1] for word in _load_chunk(start)]
            rows.append([x for word in words for x in _WIDEN[name](word)])
        of_row = sum_i32(address(scale, 32), thread_field(4, 3, 4))
        for group, largest in enumerate(_largest_of_rows(rows)):
            exponent = _exponent(largest)
            _store_word(arith.addi(of_row, i32(4 * SWIZZLE_ROWS * group)), _power(exponent))
            inverse = _as_float(_power(arith.subi(i32(254), exponent)))
            scaled = [arith.mulf(x, inverse) for x in rows[group]]
            words = [_narrow(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
            for half, start in enumerate(chunks[group]):
                _store_chunk(start, words[half::2])

    order(buffer, scale)


def _exponent(largest: MlirValue) -> MlirValue:
    """Emit the biased exponent of the power of two that a row is divided by, of the bits of its largest magnitude."""
    exponent = arith.shrui(largest, i32(23))
    # Rows of zeros and of subnormal numbers, which become zeros, have 2^0, and so have those with infinity or NaN,
    # which stay.
    less_one = arith.subi(exponent, i32(1))
    is_normal = arith.cmpi(arith.CmpIPredicate.ult, less_one, i32(254))
    lowered = arith.maxsi(arith.subi(exponent, i32(QUERY_EXPONENT)), i32(1))
    return arith.select(is_normal, lowered, i32(127))


def _power(exponent: MlirValue) -> MlirValue:
    """Emit the bits of the power of two with a biased exponent."""
    return arith.shli(exponent, i32(23))


def _magnitude(number: MlirValue) -> MlirValue:
    """Emit the bits of a float32 without its sign: integers that have the order of magnitudes, NaN the largest."""
    return arith.andi(arith.bitcast(ir.IntegerType.get_signless(32), number), i32(0x7FFFFFFF))


def _as_float(bits: MlirValue) -> MlirValue:
    return arith.bitcast(ir.F32Type.get(), bits)


def _largest_of_rows(rows: list[list[MlirValue]]) -> list[MlirValue]:
    """Emit the bits of the largest magnitude of each row, of which 16 lanes have numbers."""
    largest = [functools.reduce(arith.maxui, map(_magnitude, numbers)) for numbers in rows]
    step = LANES_OF_ROW // 2
    while step:
        received = [shuffle_xor(x, step, "r") for x in largest]
        largest = [arith.maxui(x, y) for x, y in zip(largest, received, strict=True)]
        step //= 2
    return largest


def _load_chunk(at: MlirValue) -> list[MlirValue]:
    code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    return asm_words(4, code, "r", at, side_effects=True)


def _store_chunk(at: MlirValue, words: list[MlirValue]) -> None:
    asm("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", at, *words)


def _store_word(at: MlirValue, word: MlirValue) -> None:
    asm("st.shared.b32 [$0], $1;", "r,r", at, word)


def _widen_bfloat16(word: MlirValue) -> list[MlirValue]:
    halves = arith.shli(word, i32(16)), arith.andi(word, i32(-0x10000))
    return [_as_float(x) for x in halves]


def _widen_float16(word: MlirValue) -> list[MlirValue]:
    code = (
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; .reg .f32 x; cvt.f32.f16 x, a; mov.b32 $0, x; "
        "cvt.f32.f16 x, b; mov.b32 $1, x; }"
    )
    return [_as_float(x) for x in asm_words(2, code, "r", word)]


def _narrow(low: MlirValue, high: MlirValue) -> MlirValue:
    """Emit the word of two numbers as float16."""
    code = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return asm(code, "=r,f,f", low, high, result=ir.IntegerType.get_signless(32))


_WIDEN: dict[str, Callable[[MlirValue], list[MlirValue]]] = {
    "bfloat16": _widen_bfloat16,
    "float16": _widen_float16,
}
