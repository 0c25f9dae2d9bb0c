"""The merge of a tile's splits by the last CTA that has one, so that no kernel follows.

O = sum_i 2^(lse_i - lse) O_i with lse = log2 sum_i 2^lse_i (Flash-Decoding, and FlashInfer's `merge_states`). The
splits are read in the order of their keys, the CTA's own one as well, so that the result does not depend on who is the
last.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode import arrivals
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.cursor import Tile
from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.plan_tables import FixedSplits, PlanTables
from pallas_fa2.backends.common.decode.share import load_deal
from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
from pallas_fa2.backends.common.primitives import (
    gather_scatter,
    layouts,
    register_io,
)
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    COL_LAYOUT,
    THREADS,
    broadcast_columns,
)
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Scratch
from pallas_fa2.control_flow import cond, when

# So many splits are loaded together, or as many as have O^T and lse, with those of the sum, in so many registers of a
# thread. 17: where 8 heads share 264 CTAs, a tile has 33 splits, which are two turns; at Hv = 128 with 8 columns a
# split takes 10 registers. 200: 4 splits of 32 columns, which take 1 % less of a step with one key head than 3 do. With
# 5 kernels of 16 and of 32 columns spill 120 to 224 bytes (ptxas 13.0, for an H200).
MAX_LOADS, MAX_REGISTERS = 17, 200
FLAGS, DEAL = 2, 3  # rows of notes


class TileVisit[Memory](NamedTuple):
    """The visit of a CTA to a tile, of which it has all blocks or some: its split."""

    cta: Cta[Memory]
    tile: Tile
    entry: Entry
    first_index: Scalar  # of the tile's blocks, the first that the CTA visits
    step: Scalar  # how many blocks the CTA has visited before
    num_blocks: Scalar

    @classmethod
    def of(
        cls,
        cta: Cta[Memory],
        tile: Tile,
        entry: Entry,
        first_index: Scalar,
        step: Scalar,
        num_steps: Scalar,
    ) -> "TileVisit[Memory]":
        """Compute how many blocks of a tile a CTA visits, from its `step`-th on, of `num_steps` in all."""
        num_blocks = jnp.minimum(entry.num_blocks - first_index, num_steps - step)
        return cls(cta, tile, entry, first_index, step, num_blocks)

    def prepare_word(self) -> None:
        """Prepare the word that counts the splits of the tile, if it is split: of a CTA's first tile, before the ring
        is filled, behind whose copies it would wait."""
        if self.cta.spec.split_blocks is None:
            is_split = ~self._is_whole() & (self.num_blocks > 0)
            when(is_split)(lambda: arrivals.prepare(_word_of(self.cta, self.tile)))

    def note(self) -> None:
        """Note for `merge_splits` that this CTA has a split of the tile, if it is split. All threads store the same.

        To call when the visit begins, while the CTA waits for keys: what is noted needs no registers then until the
        share ends, and no divisions when nothing else is left to do.
        """
        if self.cta.spec.split_blocks is not None:
            return

        @when(~self._is_whole())
        def note_split() -> None:
            cta: Cta[Any] = self.cta
            begins_tile = jnp.where(self.first_index == 0, 1, 0)
            first_step = self.step - self.first_index
            ctas = _ctas_of_tile(cta, first_step, self.entry.num_blocks)
            for i, x in enumerate((*self.tile, *ctas)):
                cta.memory.notes[begins_tile, i] = x

    def store(
        self, result: tuple[jax.Array, jax.Array], store: Callable[[jax.Array, jax.Array], None]
    ) -> None:
        """Store the tile's O^T and lse in base 2 by `store`, or this CTA's split of it, which `merge_splits` merges.

        Fixed splits, of which a CTA may have many, are merged here by the CTA that stores the last one.
        """

        def store_split() -> None:
            if self.cta.spec.split_blocks is None:
                index = _split_index(lax.axis_index("cta"), self.first_index == 0)
                _store_split(self.cta, index, *result)
                return
            _store_split(self.cta, _row_index(self.cta, self.tile), *result)
            splits = TileSplits.of_rows(self.cta, self.tile)
            when(_arrive_at(splits) != 0)(lambda: store(*splits.merge()))

        cond(self._is_whole(), lambda: store(*result), store_split)

    def _is_whole(self) -> jax.Array:
        if self.cta.spec.split_blocks is None:
            return self.num_blocks == self.entry.num_blocks
        return load_fixed_splits(self.cta, self.tile.entry).num_rows == 1


def allocate_notes() -> Scratch:
    """Allocate shared memory for the tiles of which a CTA has a split: one that it does not begin, and one that it
    begins. Of each are noted entry, key head, and the first and the last CTA that have a split. Two rows more are for
    `arrivals.arrive` and for the CTA's share (`share.load_deal`): each array takes 1 KiB, however small."""
    return plgpu.SMEM((DEAL + 1, 1 + len(Deal._fields)), jnp.int32)


def note_no_splits(cta: Cta[Any]) -> None:
    """Note that this CTA has no splits: two tiles whose last CTA is before the first one. All threads store the
    same."""
    for i in range(2):
        for j, x in enumerate((0, 0, 0, -1)):
            cta.memory.notes[i, j] = I32(x)


def merge_splits(
    cta: Cta[Any], output: Callable[[Entry, Scalar], Callable[[jax.Array, jax.Array], None]]
) -> None:
    """Merge the tiles of which this CTA has stored a split, if it is the last one to come here. `output` of an entry
    and a key head returns what stores a tile.

    A CTA arrives when it has stored all, since that waits until device memory has what was stored, behind the copies
    that are on their way: 5 us amid a share (docs/decisions/0088-arrivals-at-the-end.md).
    """
    if cta.spec.split_blocks is not None:
        return

    def noted(i: Scalar) -> tuple[Tile, TileSplits]:
        entry, head, first, last = (cta.memory.notes[i, j] for j in range(4))
        tile = Tile(entry, head)
        return tile, TileSplits(cta, _word_of(cta, tile), first, last)

    are_stored = _arrive_at(*(noted(I32(i))[1] for i in range(2)))

    def merge(i: Scalar, _: None) -> None:
        @when(((are_stored >> i) & 1) != 0)
        def merge_tile() -> None:
            tile, splits = noted(i)
            output(cta.load_entry(tile.entry), tile.head)(*splits.merge())

    lax.fori_loop(I32(0), I32(2), merge, None)


def load_fixed_splits(cta: Cta[Any], row: Scalar) -> FixedSplits:
    """Load the rows of the entry whose fixed split a row of the plan is."""
    plan = cta.inputs.plan
    assert isinstance(plan, PlanTables), "fixed splits have tables"
    return plan.load_fixed_splits(row)


def _store_split(cta: Cta[Any], index: Scalar, acc: jax.Array, lse: jax.Array) -> None:
    """Store a split to its place in the workspace: O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`."""
    for i, rows in enumerate(layouts.slices(acc.shape[0], 64)):
        tile = acc[rows.start : rows.start + rows.size]
        register_io.store_fragments(cta.outputs.split_out.at[index, i], tile)
    gather_scatter.store_columns(cta.outputs.split_lse.at[index], lse)


class TileSplits(NamedTuple):
    """The splits of a tile: `first` to `last` are the CTAs that have them, or the rows of fixed splits."""

    cta: Cta[Any]
    word: Ref  # that counts arrivals
    first: Scalar
    last: Scalar  # before `first` if there are none

    @classmethod
    def of_rows(cls, cta: Cta[Any], tile: Tile) -> "TileSplits":
        """Load the rows of the tile whose fixed split a row of the plan, the tile's entry, is."""
        row, count = load_fixed_splits(cta, tile.entry)
        first_row = Tile(row, tile.head)
        first = _row_index(cta, first_row)
        return cls(cta, _word_of(cta, first_row), first, first + count - 1)

    def merge(self) -> tuple[jax.Array, jax.Array]:
        """Return O^T and lse in base 2 of the tile, of which all splits are stored: an online softmax over splits."""
        columns = self.cta.spec.columns
        shape = self.cta.config.value_dim, columns
        registers = math.prod(shape) // THREADS + columns // 4  # of O^T and of lse
        unroll = max(1, min(MAX_LOADS, (MAX_REGISTERS - registers) // registers))

        def add(i: Scalar, state: Any) -> Any:
            acc, maximum, total = state
            numbers = [self.first + i * unroll + u for u in range(unroll)]
            splits = [(self._load_out(x), self._load_lse(x)) for x in numbers]
            new = functools.reduce(jnp.maximum, (lse for _, lse in splits), maximum)
            factor = jnp.exp2(maximum - new)
            acc, total = acc * broadcast_columns(factor, shape), total * factor
            for out, lse in splits:
                weight = jnp.exp2(lse - new)
                acc, total = acc + out * broadcast_columns(weight, shape), total + weight
            return acc, new, total

        zeros = layouts.splat_constant(0.0, shape, ACC_LAYOUT)
        no_sum = layouts.splat_constant(0.0, (columns,), COL_LAYOUT)
        maximum = layouts.splat_constant(NO_MAXIMUM, (columns,), COL_LAYOUT)
        if self.cta.spec.split_blocks is not None:
            # Where turns begin, and how many splits registers leave room for, follows from an entry's other queries.
            # With the maximum of all splits from the beginning nothing is scaled, and so rounded, between turns.
            maximum = lax.fori_loop(
                self.first, self.last + 1, lambda i, m: jnp.maximum(m, self._load_lse(i)), maximum
            )
        turns = lax.div(self.last - self.first + unroll, I32(unroll))
        acc, maximum, total = lax.fori_loop(I32(0), turns, add, (zeros, maximum, no_sum))
        # Where no split has a key, each weighs 1, and O is 0.
        lse = jnp.where(maximum <= NO_MAXIMUM, NO_MAXIMUM, maximum + jnp.log2(total))
        return acc * broadcast_columns(1 / total, shape), lse

    def _load_out(self, number: Scalar) -> jax.Array:
        """Load O^T of a split, or zeros if it comes after the last."""
        split_out, columns = self.cta.outputs.split_out, self.cta.spec.columns
        index, exists = self._index(number), jnp.asarray(number <= self.last)
        tiles = [
            register_io.take_fragments(split_out.at[index, i], columns, exists)
            for i in range(split_out.shape[1])
        ]
        return lax.concatenate(tiles, 0)

    def _load_lse(self, number: Scalar) -> jax.Array:
        """Load lse of a split, or -inf if it comes after the last."""
        lse = self.cta.outputs.split_lse.at[self._index(number)]
        lse = plgpu.load(lse, layout=COL_LAYOUT, optimized=False)
        return lse + jnp.where(number <= self.last, 0.0, -jnp.inf)

    def _index(self, number: Scalar) -> Scalar:
        """Compute the index of a split in the workspace, or of the last one's."""
        index = jnp.minimum(number, self.last)
        fixed = self.cta.spec.split_blocks is not None
        return index if fixed else _split_index(index, number == self.first)


def _split_index(cta: Scalar, begins_tile: Any) -> Scalar:
    """Compute the index of a CTA's split: a CTA has at most two, and begins the tile of one of them."""
    return 2 * cta + jnp.where(begins_tile, 1, 0)


def _ctas_of_tile(cta: Cta[Any], first_step: Scalar, num_blocks: Scalar) -> tuple[Scalar, Scalar]:
    """Compute the first and the last CTA that visits a tile of `num_blocks`, whose first block is the `first_step`-th
    from this CTA's first one on; negative if an earlier CTA begins the tile."""
    begin, deal = load_deal(cta.memory.notes.at[DEAL])
    tile_begin = begin + first_step
    return deal.cta_of(tile_begin), deal.cta_of(tile_begin + num_blocks - 1)


def _row_index(cta: Cta[Any], tile: Tile) -> Scalar:
    """Compute the index of a tile, or of a fixed split, whose entry is a row of the plan."""
    return tile.head * cta.spec.max_rows + tile.entry


def _word_of(cta: Cta[Any], tile: Tile) -> Ref:
    """Return the word that counts the splits of a tile; that of the first one, if they are fixed."""
    return cta.outputs.arrivals.at[_row_index(cta, tile)]


def _arrive_at(splits: TileSplits, others: TileSplits | None = None) -> jax.Array:
    """Arrive at a tile's splits, if there are any, and at those of another tile; return an int32 whose bit 0 is set if
    all of the first ones have arrived, and bit 1 for the others."""
    others = splits._replace(last=splits.first - 1) if others is None else others
    counts = (x.last - x.first for x in (splits, others))
    flags = splits.cta.memory.notes.at[FLAGS]
    return arrivals.arrive(splits.word, others.word, flags, *counts)
