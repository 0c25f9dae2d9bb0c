"""Keys and values of 8 bits as operands of WGMMA: float16 in registers, in which float8_e4m3fn and int8 are exact.

Both are the left operand, whose fragments a warp loads with ldmatrix: of 16 bits that are two numbers, so that two that
lie side by side come to one thread, where a fragment has other ones. Therefore operands have their columns (of K) or
rows (of the transposed V) in another order within each 16:

- K has column 4c + 2h + j at 8h + 2c + j (c < 4, h and j < 2), and so has Q (`query_operand.py`);
- V^T has row 2g + h at 8h + g (g < 8, h < 2), and so has O^T until `order_output`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.swizzle import (
    SWIZZLE_BYTES,
    SWIZZLE_ROWS,
    as_operand,
)
from pallas_fa2.backends.common.primitives.thread_values import (
    address,
    elements,
    scalars,
    sum_i32,
    thread_field,
    vector,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers
from pallas_fa2.backends.sm90.primitives.widen import widen

OPERAND_DTYPE = jnp.float16


def panel_width(dim: int) -> int:
    """Return the columns of a swizzled panel of 8-bit numbers."""
    return SWIZZLE_BYTES if dim % SWIZZLE_BYTES == 0 else SWIZZLE_BYTES // 2


def load_keys(buffer: Ref) -> jax.Array:
    """Load K `[64, H]` of 8 bits from shared memory as a left operand, float16 in registers."""
    rows, dim = buffer.shape
    to_pairs = widen(buffer.dtype)

    def load(lines: "_Lines", result: np.ndarray) -> None:
        # Matrices of 8 rows and 16 bytes: rows r and r + 8 of a warp's 16, and the same of the next 16 bytes.
        row_group = sum_i32(thread_field(5, 2, 2), thread_field(3, 1, 1))
        start = lines.start(row_group, chunk=thread_field(4, 1, 1))
        for n in range(dim // 32):
            words = _ldmatrix(lines.at(start, 0, 2 * n), "")
            for i, word in enumerate(words):
                low, high = to_pairs(word)
                eight = 2 * (2 * n + i // 2)
                result[0, eight, i % 2], result[0, eight + 1, i % 2] = low, high

    return _load_operand("load_keys", buffer, (rows, dim), load)


def load_values(buffer: Ref) -> jax.Array:
    """Load V `[64, Hv]` of 8 bits from shared memory as a left operand V^T, float16 `[Hv, 64]` in registers."""
    rows, dim = buffer.shape
    to_pairs = widen(buffer.dtype)

    def load(lines: "_Lines", result: np.ndarray) -> None:
        # Matrices of 8 keys each; a warp has 16 bytes of each 64 of V, its rows of V^T.
        start = lines.start(thread_field(3, 2, 1), chunk=thread_field(5, 2, 1))
        for tile in range(dim // 64):
            for half in range(2):
                words = _ldmatrix(lines.at(start, 4 * half, 4 * tile), ".trans")
                for i, word in enumerate(words):
                    pairs = to_pairs(word, (0, 2, 1, 3))
                    for h in range(2):
                        result[tile, 4 * half + i, h] = pairs[h]

    return _load_operand("load_values", buffer, (dim, rows), load)


def _load_operand(
    name: str, buffer: Ref, shape: tuple[int, int], load: Callable[["_Lines", np.ndarray], None]
) -> jax.Array:
    """Return a left operand whose pairs of numbers, by tile, eight of columns and half of the rows, `load` fills in."""
    result = plgpu.ShapeDtypeStruct(shape, OPERAND_DTYPE, ACC_LAYOUT)

    @inline_op(name, as_operand(buffer), result=result)
    def run(_, buffer: Ref) -> Registers:
        layout, pair = ACC_LAYOUT.to_mgpu(), ir.VectorType.get((2,), ir.F16Type.get())
        words = np.empty((-(-shape[0] // 64), shape[1] // 8, 2), object)
        load(_Lines(buffer), words)
        registers = np.empty(layout.registers_shape(shape), object)
        for at in np.ndindex(*registers.shape):
            registers[at] = llvm.bitcast(pair, words[at[0], at[1], sum(at[2:])])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(buffer)


class _Lines:
    """Where the lines of a swizzled buffer `[row groups, panels, 8, width]` of bytes are, in chunks of 16 bytes."""

    def __init__(self, buffer: Ref):
        self.buffer = buffer
        _, self.panels, _, self.width = ir.MemRefType(buffer.type).shape

    def start(self, row_group: MlirValue, chunk: MlirValue) -> MlirValue:
        """Emit the address of a chunk in the first panel, of the row of a group that is the thread's index modulo 8."""
        row = thread_field(0, 3, self.width)
        # Chunks of 16 bytes are permuted by the bits of their line's address from 128 on.
        narrow = SWIZZLE_BYTES // self.width // 2  # 1 if a line has 64 bytes
        swizzle = thread_field(narrow, 3 - narrow, 16)
        group = arith.muli(row_group, i32(SWIZZLE_ROWS * self.panels * self.width))
        chunk = arith.xori(arith.shli(chunk, i32(4)), swizzle)
        return sum_i32(address(self.buffer, 32), group, row, chunk)

    def at(self, start: MlirValue, row_group: int, chunk: int) -> MlirValue:
        """Emit the address `row_group` groups of 8 rows and `chunk` chunks behind `start`.

        Chunks are counted by an exclusive or, as they are permuted: `start`'s one has none of the bits of `chunk`.
        """
        panel, chunk = divmod(chunk, self.width // 16)
        offset = SWIZZLE_ROWS * self.width * (row_group * self.panels + panel)
        moved = arith.xori(start, i32(16 * chunk)) if chunk else start
        return arith.addi(moved, i32(offset)) if offset else moved


def _ldmatrix(at: MlirValue, transposed: str) -> list[MlirValue]:
    code = f"ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return asm_words(4, code, "r", at, side_effects=True)


def order_output(acc: jax.Array) -> jax.Array:
    """Return O^T, float32 `[Hv, columns]`, with its rows in the order of the columns of V."""
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, ACC_LAYOUT)

    @inline_op("order_output", ACC_LAYOUT, result=result)
    def order(_, acc: Registers) -> Registers:
        # Row 8a + g of a warp's 16, in the group g of four lanes, comes from group 4a + g / 2, the half g % 2.
        source = arith.ori(thread_field(0, 2, 1), thread_field(3, 2, 4))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, thread_field(2, 1, 1), i32(0))
        halves: dict[tuple, list[tuple]] = {}
        for at in np.ndindex(*acc.registers.shape):
            halves.setdefault(at[:2], []).append(at)
        registers = np.empty_like(acc.registers)
        for places in halves.values():
            own = [elements(acc.registers[at]) for at in places]
            for half, at in enumerate(places):
                lane = arith.addi(source, i32(16 * half))
                pairs = [[_shuffle(x, lane) for x in register] for register in own]
                chosen = [arith.select(is_odd, odd, even) for even, odd in zip(*pairs, strict=True)]
                registers[at] = vector(chosen)
        return mgpu.FragmentedArray(_registers=registers, _layout=acc.layout, _is_signed=None)

    return order(acc)


def _shuffle(value: MlirValue, lane: MlirValue) -> MlirValue:
    code = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return asm(code, "=f,f,r", value, lane, result=value.type)


def zero_rows(buffer: Ref, kept: jax.Array) -> None:
    """Set rows of V of 8 bits in shared memory to 0 where `kept`, int32 `[64]`, is 0."""

    @inline_op("zero_byte_rows", as_operand(buffer), ROW_LAYOUT)
    def zero(_, buffer: Ref, kept: Registers) -> None:
        # Four lanes have rows r and r + 8 of a warp's 16, and a quarter of each line of both.
        _, panels, _, width = ir.MemRefType(buffer.type).shape
        group = arith.muli(thread_field(5, 2, 2), i32(SWIZZLE_ROWS * panels * width))
        row, quarter = thread_field(2, 3, width), thread_field(0, 2, width // 4)
        start = sum_i32(address(buffer, 32), group, row, quarter)
        for half, value in enumerate(scalars(kept)):
            for panel in range(panels):
                line = SWIZZLE_ROWS * width * (half * panels + panel)
                for chunk in range(0, width // 4, 16):
                    code = (
                        "{ .reg .pred p; setp.eq.s32 p, $1, 0; "
                        f"@p st.shared.v4.b32 [$0 + {line + chunk}], {{$2, $2, $2, $2}}; }}"
                    )
                    asm(code, "r,r,r", start, value, i32(0))

    zero(buffer, kept)
