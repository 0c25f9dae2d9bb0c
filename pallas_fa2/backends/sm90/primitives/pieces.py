"""Pieces of rows of 8 bits: which thread has which, and their stores in 16 bits, times scales, where WGMMA reads
them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.arithmetic import div, rem
from pallas_fa2.backends.common.inline import asm, asm_words, i32
from pallas_fa2.backends.common.primitives.layouts import THREADS
from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS, swizzle_columns
from pallas_fa2.backends.common.primitives.thread_values import address, sum_i32, thread_field
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref
from pallas_fa2.backends.sm90.primitives.widen import widen

COLUMNS = 16  # of a piece: the most that one instruction loads
WORDS = COLUMNS // 4  # of a piece
BYTES = COLUMNS * THREADS  # of pieces of all threads
EIGHT = 8  # threads, whose stores of 16 bytes use all banks of shared memory once


class Band(NamedTuple):
    """Columns that fill panels of shared memory, with a power of two of pieces in a row; and which thread has which.

    The threads have `rows` rows at a time. Eight neighbors have pieces of one panel and of several rows, which lie in
    different banks of shared memory; then come the panels of these rows, then more rows.
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
    """Divide the columns of panels into bands, the widest first."""
    assert columns % panel == 0 and panel in (32, 64), (columns, panel)
    start = 0
    while start < columns:
        size = 1 << ((columns - start).bit_length() - 1)
        yield Band(start, size, panel)
        start += size


def own_row(band: Band, weight: int) -> MlirValue:
    """Emit the row that `Band.own_row_and_piece` gives a thread, times a power of two."""
    in_panel, panels = band.panel_bits, band.piece_bits - band.panel_bits
    return sum_i32(
        thread_field(in_panel, 3 - in_panel, weight),
        thread_field(3 + panels, 4 - panels, weight << (3 - in_panel)),
    )


class Destination(NamedTuple):
    """The rows of a buffer, from this one on, and the columns of a band in which the threads store a piece."""

    band: Band
    row: int


def destinations(buffer: Ref) -> Iterator[Destination]:
    """Yield the destinations of all pieces of a buffer `[rows, columns]`, in the order of `EightBitRows`."""
    rows, columns = buffer.shape
    for band in bands(columns, swizzle_columns(buffer)):
        for row in range(0, rows, band.rows):
            yield Destination(band, row)


def store_piece(
    buffer: Ref, destination: Destination, dtype: str, words: list[MlirValue], scale: MlirValue
) -> None:
    """Emit the stores of a piece, times its scale, in a swizzled buffer `[rows, columns]` of bfloat16."""
    _, panels, _, width = ir.MemRefType(buffer.type).shape
    first = _first_address(buffer, destination.band)
    # 0x43 four times, from an address, so that ptxas does not know it: beside a constant operand it would move the
    # selector of each permutation to a register.
    prefix = arith.ori(arith.shrui(first, i32(24)), i32(0x43434343))  # addresses have 18 bits
    pairs = [pair for word in words for pair in _MULTIPLY[dtype](word, scale, prefix)]
    offset = 2 * destination.row * panels * width
    halves = first, arith.xori(first, i32(16))
    for half, own in zip(halves, (pairs[:4], pairs[4:]), strict=True):
        code = f"st.shared.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};"
        asm(code, "r,r,r,r,r", half, *own)


def _first_address(buffer: Ref, band: Band) -> MlirValue:
    """Emit where the thread's first piece of a band begins in a swizzled buffer `[row groups, panels, 8, width]` of
    16 bits. Its second half is at the address whose bit 4 differs, and its next piece `Band.rows` rows, a multiple of
    8, behind it."""
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


def _multiply_int8(word: MlirValue, scale: MlirValue, prefix: MlirValue) -> list[MlirValue]:
    """Emit four integers times a bfloat16, given twice in a word, as two pairs of bfloat16.

    With 0x43 before them the lower 7 bits u of a byte are 128 + u, and its sign alone is 128 or 256: the integer is the
    difference.
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
