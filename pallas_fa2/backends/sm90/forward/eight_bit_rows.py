"""Rows of keys and values of 8 bits in device memory, contiguous or in pages, of which each thread loads pieces.

Tiles have K and V as operands of WGMMA from shared memory, in the type of Q and P.
docs/decisions/0093-tiles-of-8-bits.md says how
they get there.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import div, rem
from pallas_fa2.backends.common.inline import asm, asm_words, inline_op
from pallas_fa2.backends.common.primitives import copy_groups, thread_ops
from pallas_fa2.backends.common.primitives.swizzle import as_operand
from pallas_fa2.backends.common.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    address,
    from_thread_values,
    thread_value,
)
from pallas_fa2.backends.common.primitives.types import Ref, Registers, Scalar, Slice
from pallas_fa2.backends.sm90.forward.staging import Staging, own_bytes
from pallas_fa2.backends.sm90.primitives.pieces import (
    COLUMNS,
    WORDS,
    bands,
    destinations,
    store_piece,
)

# Of an array: its pieces have indices of 32 bits.
MAX_ELEMENTS = COLUMNS << 32


class Pieces(NamedTuple):
    """What each thread has of some rows: a piece of each band, for each `Band.rows` of them."""

    dtype: str
    # int32 of each thread, of each piece four words of numbers and the scale's bits
    values: list[jax.Array]

    def store(self, buffer: Ref) -> None:
        """Store numbers times their scales in a buffer `[rows, columns]` of bfloat16 in shared memory."""
        targets, types = list(destinations(buffer)), [PER_THREAD] * len(self.values)

        @inline_op("store_pieces", as_operand(buffer), *types, dtype=self.dtype, targets=targets)
        def store(_, buffer: Ref, *values: Registers) -> None:
            own = iter(map(thread_value, values))
            for target in targets:
                *words, half = (next(own) for _ in range(WORDS + 1))
                scale = asm("prmt.b32 $0, $1, 0, 0x1010;", "=r,r", half, result=half.type)
                store_piece(buffer, target, self.dtype, words, scale)

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
        values: list[jax.Array] = []
        for piece, location in self._pieces(panel):
            values += _load_piece(self.array, piece)
            values.append(self._load_scale(location, piece.row, piece.end))
        return Pieces(jnp.dtype(self.array.dtype).name, values)

    def copy_async(self, staging: Staging, subtile: int, panel: int) -> None:
        """Begin to copy the rows, which are this subtile of a block, to their stage, as a group of copies."""
        for i, (piece, _) in enumerate(self._pieces(panel)):
            _copy_piece(staging.stage(subtile).at[i], self.array, piece)
        copy_groups.commit_group()

    def load_scales(self) -> jax.Array:
        """Begin to load the scale of a row for each thread."""
        thread, count = thread_ops.thread_indices(), self.rows.size
        assert isinstance(count, int)
        location = self._location(0, count, thread, {})
        return self._load_scale(location, thread, jnp.minimum(self.end - self.rows.start, count))

    def _load_scale(self, location: "_Location", row: jax.Array, end: Scalar) -> jax.Array:
        length, heads = self.array.shape[1:3]
        index = (location.entry * heads + self.head) * length + location.slot + location.own_row
        return _load_scale(self.scales, index + location.offset, row, end)

    def _pieces(self, panel: int) -> Iterator[tuple["_Piece", "_Location"]]:
        """Yield where the pieces of the threads lie, for a buffer with panels of so many columns."""
        _, length, heads, dim = self.array.shape
        of_row, thread = dim // COLUMNS, thread_ops.thread_indices()
        first, count = (0, dim) if self.columns is None else (self.columns.start, self.columns.size)
        assert isinstance(count, int)
        located: dict[int, tuple[Any, Any]] = {}
        for band in bands(count, panel):
            own_row, own_piece = band.own_row_and_piece(thread)
            for row in range(0, self.rows.size, band.rows):
                location = self._location(row, band.rows, own_row, located)
                index = (location.entry * length + location.slot) * heads + self.head
                index = index * of_row + (first + band.start) // COLUMNS
                index += location.own_row * (heads * of_row) + own_piece
                end = self.end - self.rows.start - row
                yield _Piece(index, location.offset * heads * dim, own_row, end), location

    def _location(
        self, row: int, count: int, own_row: jax.Array, located: dict[int, tuple[Any, Any]]
    ) -> "_Location":
        """Return where so many rows lie, from this one of the rows on, or one of each thread if they are in several
        pages. `located` are rows that begin a page or all, and where they lie, as far as that is known."""
        key, page_size = self.rows.start, self.array.shape[1]
        if self.pages is None:
            return _Location(self.batch, key, own_row, row)
        if page_size % count:
            return _Location(*self._locate(key + row + own_row), 0, 0)
        in_page = row % math.gcd(page_size, self.rows.size)
        if in_page == 0 and row not in located:
            located[row] = self._locate(key + row)
        return _Location(*located[row - in_page], own_row, in_page)

    def _locate(self, key: Any) -> tuple[Any, Any]:
        """Return the page of a key, or of one of each thread, and its row there. Whatever the table has, it is a page
        that exists."""
        assert self.pages is not None
        count, page_size = self.array.shape[:2]
        listed = jnp.minimum(div(key, page_size), self.pages.shape[0] - 1)
        page = thread_ops.gather(self.pages, listed) if listed.shape else self.pages[listed]
        return jnp.clip(page, 0, count - 1), rem(key, page_size)


class _Location(NamedTuple):
    """Where the rows of the threads lie: row `slot + own_row + offset` of a batch entry or page.

    `own_row` is one of each thread; so are `entry` and `slot` where rows are in several pages, and `own_row` is 0.
    """

    entry: Any
    slot: Any
    own_row: Any
    offset: int


class _Piece(NamedTuple):
    """Where a piece of each thread lies in device memory: so many bytes behind a piece whose number is known."""

    number: jax.Array  # in pieces, from the array's first one
    offset: int
    row: jax.Array  # of the threads' rows
    end: Scalar  # the first of these that does not exist


OF_THREADS = PER_THREAD, PER_THREAD, plgpu.Layout.WG_SPLAT  # an index, a row, and where rows end


def _load_piece(array: Ref, piece: _Piece) -> tuple[jax.Array, ...]:
    """Begin to load 16 bytes of an array for each thread if its row exists; else zeros. No thread writes the array."""
    results = (PER_THREAD_I32,) * (WORDS)

    @inline_op("load_piece", plgpu.RefType(), *OF_THREADS, result=results, offset=piece.offset)
    def load(_, array: Ref, index: Registers, row: Registers, end: Registers) -> Any:
        code = (
            "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, $6, $7; mad.wide.u32 a, $5, 16, $4; "
            "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            f"@p ld.global.v4.b32 {{$0, $1, $2, $3}}, [a + {piece.offset}]; }}"
        )
        own = *map(thread_value, (index, row)), end.registers[()]
        words = asm_words(4, code, "l,r,r,r", address(array), *own, side_effects=True)
        return tuple(map(from_thread_values, words))

    return load(array, piece.number, piece.row, piece.end)


def _copy_piece(target: Ref, array: Ref, piece: _Piece) -> None:
    """Begin to copy what `_load_piece` loads to shared memory."""
    types = plgpu.RefType(), plgpu.RefType(), *OF_THREADS

    @inline_op("copy_piece", *types, offset=piece.offset)
    def copy(_, target: Ref, array: Ref, index: Registers, row: Registers, end: Registers) -> None:
        code = (
            "{ .reg .pred p; .reg .b64 a; .reg .b32 n; setp.lt.s32 p, $3, $4; selp.b32 n, 16, 0, p; "
            f"mad.wide.u32 a, $2, 16, $1; cp.async.cg.shared.global [$0], [a + {piece.offset}], 16, n; }}"
        )
        own = *map(thread_value, (index, row)), end.registers[()]
        asm(code, "r,l,r,r,r", own_bytes(target), address(array), *own)

    copy(target, array, piece.number, piece.row, piece.end)


@inline_op("load_scale", plgpu.RefType(), *OF_THREADS, result=PER_THREAD_I32)
def _load_scale(_, scales: Ref, index: Registers, row: Registers, end: Registers) -> Registers:
    """Begin to load the bits of a bfloat16 for each thread if its row exists; else zeros."""
    code = (
        "{ .reg .pred p; .reg .b64 a; setp.lt.s32 p, $3, $4; mad.wide.u32 a, $2, 2, $1; "
        "mov.b32 $0, 0; @p ld.global.u16 $0, [a]; }"
    )
    own = *map(thread_value, (index, row)), end.registers[()]
    (word,) = asm_words(1, code, "l,r,r,r", address(scales), *own, side_effects=True)
    return from_thread_values(word)
