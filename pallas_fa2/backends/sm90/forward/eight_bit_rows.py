"""Keys and values of 8 bits that the threads of a warpgroup load, and store in shared memory in 16 bits.

Tiles have K and V as operands of WGMMA from shared memory, in the type of Q and P. A thread has pieces of 16 columns of a row,
which wait in registers while it stores others. docs/decisions/0093-tiles-of-8-bits.md says why.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.arithmetic import div, rem
from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.common.primitives import thread_ops
from pallas_fa2.backends.common.primitives.layouts import THREADS
from pallas_fa2.backends.common.primitives.swizzle import (
    SWIZZLE_ROWS,
    as_operand,
    swizzle_columns,
)
from pallas_fa2.backends.common.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    address,
    from_thread_values,
    sum_i32,
    thread_field,
    thread_value,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar, Slice
from pallas_fa2.backends.sm90.primitives.widen import widen

COLUMNS = 16  # of a piece: the most that one instruction loads
VALUES = COLUMNS // 4 + 1  # what a thread has of a piece
EIGHT = 8  # threads, whose stores of 16 bytes use all banks of shared memory once


class Band(NamedTuple):
    """Columns of which a row has a power of two of pieces, whole panels of shared memory, and which threads have which.

    The threads have `rows` whole rows at a time. Eight neighbors have pieces of one panel and of several rows, which lie in different
    banks of shared memory; then come the panels of these rows, then other rows.
    """

    start: int
    size: int
    panel: int  # columns of a panel

    @property
    def piece_bits(self) -> int:
        """How many bits number the pieces of a row."""
        return (self.size // COLUMNS).bit_length() - 1

    @property
    def panel_bits(self) -> int:
        """How many of them number the pieces of a panel."""
        return (self.panel // COLUMNS).bit_length() - 1

    @property
    def rows(self) -> int:
        return THREADS >> self.piece_bits

    def own_row_and_piece(self, thread: Any) -> tuple[Any, Any]:
        """Return which of `rows` rows a thread has, and which piece of it."""
        in_panel, neighbors = self.panel_bits, EIGHT.bit_length() - 1

        def field(first: int, count: int) -> Any:
            return rem(div(thread, 1 << first), 1 << count)

        panels = self.piece_bits - in_panel
        row = field(in_panel, neighbors - in_panel)
        row += field(neighbors + panels, 7 - neighbors - panels) * (EIGHT >> in_panel)
        return row, field(0, in_panel) + field(neighbors, panels) * (1 << in_panel)


def bands(columns: int, panel: int) -> Iterator[Band]:
    """Divide columns, which are whole panels, into bands, the widest first."""
    assert columns % panel == 0 and panel in (32, 64), (columns, panel)
    start = 0
    while start < columns:
        size = 1 << ((columns - start).bit_length() - 1)
        yield Band(start, size, panel)
        start += size


class Pieces(NamedTuple):
    """What each thread has of some rows: a piece of each band, for each `Band.rows` of them."""

    dtype: str
    # int32 of each thread, of each piece four words of numbers and the scale, a bfloat16 twice
    values: list[jax.Array]

    def store(self, buffer: Ref) -> None:
        """Store numbers times their scales in a buffer `[rows, columns]` of bfloat16 in shared memory."""
        (rows, columns), panel = buffer.shape, swizzle_columns(buffer)
        multiply, types = _MULTIPLY[self.dtype], [PER_THREAD] * len(self.values)

        @inline_op("store_pieces", as_operand(buffer), *types, dtype=self.dtype, panel=panel)
        def store(_, buffer: Ref, *values: Registers) -> None:
            own, prefix = iter(map(thread_value, values)), _unknown_prefix()
            _, panels, _, width = ir.MemRefType(buffer.type).shape
            for band in bands(columns, panel):
                first = _first_address(buffer, band)
                halves = first, arith.xori(first, i32(16))
                for row in range(0, rows, band.rows):
                    *words, scale = (next(own) for _ in range(VALUES))
                    pairs = [pair for word in words for pair in multiply(word, scale, prefix)]
                    offset = 2 * row * panels * width
                    for place, half in zip(halves, (pairs[:4], pairs[4:]), strict=True):
                        code = f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
                        asm(code, "r,r,r,r,r", place, *half)

        store(buffer, *self.values)


class EightBitRows(NamedTuple):
    """Rows of one head of an array of 8 bits in device memory, `[B, S, K, H]` or pages `[P, page size, K, H]`.

    Those from `end` on do not exist, and are loaded as zeros.
    """

    array: Ref
    scales: Ref  # bfloat16 [B, K, S] or [P, K, page size]
    pages: Ref | None  # int32, those of a sequence
    batch: Scalar  # of contiguous rows
    rows: Slice  # it starts at a multiple of its size
    end: Scalar
    head: Scalar
    columns: Slice | None = None  # all if None

    def fetch(self, panel: int) -> Pieces:
        """Begin to load what each thread has of the rows, for a buffer with panels of so many columns."""
        _, length, heads, dim = self.array.shape
        assert math.prod(self.array.shape) // COLUMNS <= 1 << 32, "indices of pieces have 32 bits"
        of_row, thread = dim // COLUMNS, thread_ops.thread_indices()
        first, count = (0, dim) if self.columns is None else (self.columns.start, self.columns.size)
        assert isinstance(count, int)
        values: list[jax.Array] = []
        for band in bands(count, panel):
            own_row, own_piece = band.own_row_and_piece(thread)
            for place in self._places(band, own_row):
                row = (place.entry * length + place.slot) * heads + self.head
                piece = row * of_row + (first + band.start) // COLUMNS
                piece += place.own_row * (heads * of_row) + own_piece
                scale = (place.entry * heads + self.head) * length + place.slot + place.own_row
                values += _load_piece(self.array, self.scales, piece, scale, own_row, place.end)
        return Pieces(jnp.dtype(self.array.dtype).name, values)

    def _places(self, band: Band, own_row: jax.Array) -> Iterator["_Place"]:
        """Yield where the rows lie, so many at a time as the threads have of a band."""
        entry, slot, page_size = self.batch, self.rows.start, self.array.shape[1]
        for row in range(0, self.rows.size, band.rows):
            key = self.rows.start + row
            if self.pages is None:
                yield _Place(entry, slot + row, own_row, self.end - key)
            elif page_size % band.rows:  # rows of several pages
                page, slot = self._locate(key + own_row)
                yield _Place(page, slot, 0, self.end - key)
            else:
                in_page = row % math.gcd(page_size, self.rows.size)
                if in_page == 0:
                    entry, slot = self._locate(key)
                yield _Place(entry, slot + in_page, own_row, self.end - key)

    def _locate(self, key: Any) -> tuple[Any, Any]:
        """Return the page of a key, or of one of each thread, and its row there. Whatever the table has, it is a page that exists."""
        assert self.pages is not None
        count, page_size = self.array.shape[:2]
        listed = jnp.minimum(div(key, page_size), self.pages.shape[0] - 1)
        page = thread_ops.gather(self.pages, listed) if listed.shape else self.pages[listed]
        return jnp.clip(page, 0, count - 1), rem(key, page_size)


class _Place(NamedTuple):
    """Where the rows of the threads lie: row `slot + own_row` of a batch entry or page."""

    entry: Any
    slot: Any
    own_row: Any
    end: Scalar  # of the threads' rows, the first that does not exist


@inline_op(
    "load_piece",
    *(plgpu.RefType(), plgpu.RefType()),
    *(PER_THREAD, PER_THREAD, PER_THREAD, plgpu.Layout.WG_SPLAT),
    result=(PER_THREAD_I32,) * VALUES,
)
def _load_piece(
    _, array: Ref, scales: Ref, piece: Registers, scale: Registers, row: Registers, end: Registers
) -> tuple[Registers, ...]:
    """Begin to load 16 bytes of an array, and 16 bits of its scales twice, at indices of each thread, if its row is before `end`;
    else zeros. No thread writes the arrays, of which the first has 64 GiB at most."""
    code = (
        "{ .reg .pred p; .reg .b64 a, b; .reg .b16 h; setp.lt.s32 p, $9, $10; "
        "mad.wide.u32 a, $7, 16, $5; mad.wide.u32 b, $8, 2, $6; mov.b16 h, 0; "
        "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
        "@p ld.global.v4.b32 {$0, $1, $2, $3}, [a]; @p ld.global.b16 h, [b]; mov.b32 $4, {h, h}; }"
    )
    operands = *map(address, (array, scales)), *map(thread_value, (piece, scale, row))
    # With side effects LLVM leaves it where it is, before what is waited for; ptxas would move ld.global.nc behind it.
    words = asm_words(VALUES, code, "l,l,r,r,r,r", *operands, end.registers[()], side_effects=True)
    return tuple(map(from_thread_values, words))


def _first_address(buffer: Ref, band: Band) -> MlirValue:
    """Emit where the thread's first piece of a band begins in a swizzled buffer `[row groups, panels, 8, width]` of 16 bits. Its second
    half is at the address whose bit 4 differs, and its next piece `Band.rows` rows, whole row groups, behind it."""
    _, panels, _, width = ir.MemRefType(buffer.type).shape
    line, bits, in_panel = 2 * width, band.piece_bits, band.panel_bits
    # The fields of `Band.own_row_and_piece`; a piece has two chunks of 16 bytes.
    panel = thread_field(3, bits - in_panel, SWIZZLE_ROWS * line)
    group = thread_field(3 + bits, 4 - bits, SWIZZLE_ROWS * line)
    in_group = sum_i32(
        thread_field(0, in_panel, 32),
        thread_field(in_panel, 3 - in_panel, line),
        thread_field(3 + bits - in_panel, in_panel, line << (3 - in_panel)),
    )
    # Chunks are permuted by the bits of their line's address from 128 on.
    swizzle = arith.andi(arith.shrui(in_group, i32(3)), i32(line - 16))
    return sum_i32(
        address(buffer, 32),
        i32(band.start // width * SWIZZLE_ROWS * line),
        panel,
        arith.muli(group, i32(panels)),
        arith.xori(in_group, swizzle),
    )


def _unknown_prefix() -> MlirValue:
    """Emit 0x43 four times, of which ptxas does not know it: with a constant it would move each permutation to a register. There are
    fewer than 2^16 multiprocessors."""
    code = "{ .reg .b32 a; mov.u32 a, %smid; shr.u32 a, a, 16; or.b32 $0, a, 0x43434343; }"
    return asm(code, "=r", result=ir.IntegerType.get_signless(32))


def _multiply_int8(word: MlirValue, scale: MlirValue, prefix: MlirValue) -> list[MlirValue]:
    """Emit four integers times a bfloat16, given twice in a word, as two pairs of bfloat16.

    With 0x43 before them the lower 7 bits u of a byte are 128 + u, and its sign alone is 128 or 256: the integer is the difference.
    """
    code = (
        "{ .reg .b32 u, s, a, b, c, d; and.b32 u, $2, 0x7f7f7f7f; and.b32 s, $2, 0x80808080; "
        "prmt.b32 a, u, $4, 0x4140; prmt.b32 b, s, $4, 0x4140; sub.rn.bf16x2 a, a, b; "
        "prmt.b32 c, u, $4, 0x4342; prmt.b32 d, s, $4, 0x4342; sub.rn.bf16x2 c, c, d; "
        # A result may have the register of an operand: it is written when all are read.
        "mul.rn.bf16x2 a, a, $3; mul.rn.bf16x2 c, c, $3; mov.b32 $0, a; mov.b32 $1, c; }"
    )
    return asm_words(2, code, "r,r,r", word, scale, prefix)


def _multiply_float8(word: MlirValue, scale: MlirValue, _: MlirValue) -> list[MlirValue]:
    """Emit four e4m3 numbers times a bfloat16, given twice in a word, as two pairs of bfloat16."""
    code = (
        "{ .reg .b16 a, b; .reg .f32 x, y, s; and.b32 s, $2, 0xffff0000; mov.b32 {a, b}, $1; "
        "cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, s; mul.rn.f32 y, y, s; "
        "cvt.rn.bf16x2.f32 $0, y, x; }"
    )
    i32_type, pairs = ir.IntegerType.get_signless(32), widen("float8_e4m3fn")(word)
    return [asm(code, "=r,r,r", x, scale, result=i32_type, side_effects=False) for x in pairs]


_MULTIPLY = {"int8": _multiply_int8, "float8_e4m3fn": _multiply_float8}
