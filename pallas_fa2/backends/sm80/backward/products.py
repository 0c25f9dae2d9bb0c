"""The products of the backward by which tiles in registers, P and dS, are left operands: Algorithm 2, lines 12, 15
and 16.

Where inputs are float32, these operands are split in registers (`split_float32`). Each token of q, k and dO has a power
of two, by which the sum of its terms is multiplied, and a product contracts over such tokens: queries in dV = P^T dO
and dK = dS^T Q, keys in dQ = dS K. So what is split is P or dS times the power of the token that it meets: what one
pair adds to the gradient.

float16 has few exponents. A row of that operand is therefore split in relation to its largest element in a piece, the
queries (of the kernel of dQ alone: keys) whose scores are formed at once (`round_rows`), and the power of two of this
element multiplies the product of the piece. dS of dQ is read transposed, by other warps: it has one such power for the
16 keys of a warp (`split_warp_rows`), of what remains after the power of each query's dO was divided out, which
multiplies the sum at the end.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common import split_float32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import layouts, thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.types import Ref, Registers
from pallas_fa2.backends.sm80.backward.memory import StoredTile
from pallas_fa2.backends.sm80.primitives import mma


class RowOperand(NamedTuple):
    """A tile of 64 rows, P or dS, as a left operand."""

    terms: list[jax.Array]  # of 16 bits
    power: jax.Array | None = None  # float32 [64], of each row of a split operand

    def as_left(self) -> "RowOperand":
        """Return the operand of tiles in registers as `mma.load_left` loads it."""
        return self._replace(terms=list(map(mma.as_left, self.terms)))


def load_left(tiles: list[Ref], columns: Any, terms: int) -> list[list[jax.Array]]:
    """Load the terms of some columns of tiles of rows in shared memory as left operands."""
    return [
        [mma.load_left(tile.at[:, x]) for x in mma.term_slices(tile, columns, terms)]
        for tile in tiles
    ]


def load_left_panels(tiles: list[Ref], terms: int, panel: int) -> Iterator[list[list[jax.Array]]]:
    """Load tiles of rows as left operands, a panel of columns at a time, lazily."""
    for columns in mma.panel_slices(tiles[0], terms, panel):
        yield load_left(tiles, columns, terms)


def multiply_scores(
    count: int, lefts: Iterable[list[list[jax.Array]]], right: Ref, terms: int, panel: int
) -> list[jax.Array]:
    """Return tile @ right^T of each of `count` tiles of rows: S or dP.

    `lefts` are the tiles (`load_left_panels`), in registers or loaded as they are multiplied.
    """
    accs = [thread_values.zero_accumulator((64, right.shape[0])) for _ in range(count)]
    for columns, left in zip(mma.panel_slices(right, terms, panel), lefts, strict=True):
        slices = mma.term_slices(right, columns, terms)
        rights = [mma.load_right(right.at[:, x], transposed=True) for x in slices]
        accs = mma.add_terms(accs, left, rights)
    return accs


def scale(tiles: list[jax.Array], rows: list[Any], columns: jax.Array | None) -> list[jax.Array]:
    """Return products of split operands times the powers of two of each tile's rows and of its columns."""
    if columns is None:
        return tiles
    return [x * layouts.outer_product(row, columns) for x, row in zip(tiles, rows, strict=True)]


def round_rows(tile: jax.Array, dtype: DTypeLike, weights: jax.Array | None) -> RowOperand:
    """Return a float32 tile in 16 bits; if there are `weights`, times one for each column, and split."""
    if weights is None:
        return RowOperand([tile.astype(dtype)], None)
    tile *= layouts.broadcast_columns(weights, tile.shape)
    highest = layouts.fold_octets(jnp.maximum, abs(tile)).max(axis=1)
    return _split_rows(tile, dtype, plgpu.layout_cast(highest, ROW_LAYOUT))


def split_warp_rows(
    tile: jax.Array, dtype: DTypeLike, rows: jax.Array, columns: jax.Array
) -> RowOperand:
    """Return a float32 tile times a power of two for each row and over one for each column, split.

    A warp's 16 rows are split in relation to their largest element, of all of them.
    """
    inverse = split_float32.inverse_power(columns)
    # One after the other: the product of both factors may be infinite.
    tile *= layouts.broadcast_columns(inverse, tile.shape)
    tile *= layouts.broadcast_rows(rows, tile.shape)
    return _split_rows(tile, dtype, warp_largest(tile))


def _split_rows(tile: jax.Array, dtype: DTypeLike, highest: jax.Array) -> RowOperand:
    """Split a float32 tile in relation to the largest magnitude of each row, or of several, `[64]`."""
    power, inverse = split_float32.row_powers(highest)
    tile *= layouts.broadcast_rows(inverse, tile.shape)
    return RowOperand(mma.split_tile(tile, dtype, split_float32.TERMS), power)


def warp_largest(tile: jax.Array) -> jax.Array:
    """Return the largest absolute value of each warp's 16 rows, to all of them, `[64]`; NaN counts for nothing."""

    @inline_op(
        "warp_largest", ACC_LAYOUT, result=plgpu.ShapeDtypeStruct((64,), jnp.float32, ROW_LAYOUT)
    )
    def largest(_, tile: Registers) -> Registers:
        first, *others = thread_values.scalars(tile)
        kind, layout = first.type, ROW_LAYOUT.to_mgpu()
        value = asm("abs.f32 $0, $1;", "=f,f", first, result=kind, side_effects=False)
        code = "{ .reg .f32 a; abs.f32 a, $2; max.f32 $0, $1, a; }"
        for other in others:
            value = asm(code, "=f,f,f", value, other, result=kind, side_effects=False)
        # max.f32 leaves NaN out, and numbers that are not negative are ordered as their bits.
        code = "{ .reg .b32 a; max.f32 $0, $1, 0f00000000; mov.b32 a, $0; redux.sync.max.u32 a, a, -1; mov.b32 $0, a; }"
        value = asm(code, "=f,f", value, result=kind)
        return thread_values.repeat(value, (64,), layout)

    return largest(tile)


def add_rows(
    accs: list[jax.Array], operands: list[RowOperand], right: Ref, columns: Any, panel: int
) -> list[jax.Array]:
    """Return acc + operand @ some columns of right of each tile of rows, which share the fragments of `right`.

    `right` is in shared memory, `[k, n]` for each term. Of split operands a panel of columns is multiplied at a time.
    """
    terms = len(operands[0].terms)
    if terms == 1:
        return mma.multiply_rows(accs, [x.terms[0] for x in operands], right.at[:, columns])
    # A split product starts from zero and is added by units that round to nearest
    # (docs/decisions/0075-split-float32.md).
    sums = []
    for own in layouts.slices(columns.size, min(mma.panel_width(columns.size), panel)):
        size = own.size
        assert isinstance(size, int)
        products = [thread_values.zero_accumulator((64, size)) for _ in operands]
        slices = mma.term_slices(right, pl.ds(columns.start + own.start, own.size), terms)
        for start in range(0, right.shape[0], mma.K_STEP):
            rights = [mma.load_right(right.at[pl.ds(start, mma.K_STEP), x]) for x in slices]
            lefts = [[x[:, start : start + mma.K_STEP] for x in y.terms] for y in operands]
            products = mma.add_terms(products, lefts, rights)
        tiles = zip(accs, products, operands, strict=True)
        sums.append([_add_scaled(layouts.slice_columns(x, own), y, z) for x, y, z in tiles])
    return [x[0] if len(x) == 1 else lax.concatenate(x, 1) for x in zip(*sums, strict=True)]


def _add_scaled(acc: jax.Array, product: jax.Array, operand: RowOperand) -> jax.Array:
    assert operand.power is not None
    return acc + product * layouts.broadcast_rows(operand.power, product.shape)


def store_rows(
    buffer: StoredTile, tile_rows: list[Any], columns: Any, piece: Any, tiles: list[RowOperand]
) -> None:
    """Store tiles of rows to some columns of a buffer, which are its `piece`; `tile_rows` are the buffer's rows of
    each."""
    for rows, tile in zip(tile_rows, tiles, strict=True):
        slices = mma.term_slices(buffer.tile, columns, len(tile.terms))
        for x, term in zip(slices, tile.terms, strict=True):
            buffer.tile.at[rows, x][...] = term
        if tile.power is not None:
            buffer.power.at[piece].at[rows][...] = tile.power


def multiply_transposed(left: Ref, power: Ref | None, right: Ref, columns: Any, terms: int) -> Any:
    """Return left^T @ some columns of right, of tiles in shared memory, `[64, columns]`: dQ of dS^T and K.

    `left` is `[k, 64]` and `right` `[k, n]` for each term. Of a split `left`, `power`, `[pieces, k]`, multiplies what
    each piece of its columns gives; 16 rows, the k of one product of `mma.sync`, have the same.
    """
    shape = left.shape[1] // terms, columns.size
    total = thread_values.zero_accumulator(shape)
    all_rows, right_columns = pl.ds(0, shape[0]), mma.term_slices(right, columns, terms)
    left_columns = mma.term_slices(left, all_rows, terms)
    for start in range(0, left.shape[0], mma.K_STEP):
        rows = pl.ds(start, mma.K_STEP)
        lefts = [mma.load_left(left.at[rows, x], transposed=True) for x in left_columns]
        rights = [mma.load_right(right.at[rows, x]) for x in right_columns]
        if power is None:
            (total,) = mma.add_terms([total], [lefts], rights)
            continue
        (product,) = mma.add_terms([thread_values.zero_accumulator(shape)], [lefts], rights)
        total += product * layouts.broadcast_rows(_select_piece(power, start), shape)
    return total


def _select_piece(power: Ref, row: int) -> jax.Array:
    """Return power[piece, row] for each of 64 columns, which are divided into pieces."""
    pieces = power.shape[0]
    index = layouts.index((64,), 0, 0)
    selected = layouts.splat_constant(1.0, (64,), ROW_LAYOUT) * power[0, row]
    for piece in range(1, pieces):
        selected = jnp.where(index >= piece * (64 // pieces), power[piece, row], selected)
    return selected
