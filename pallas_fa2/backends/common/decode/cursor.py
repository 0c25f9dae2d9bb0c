"""The order in which a CTA reads blocks of keys: those of its share of the line, a tile after another."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import I32, div
from pallas_fa2.backends.common.decode.arrays import Cta, page_rows
from pallas_fa2.backends.common.decode.entries import Entry, KeyBlocks
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.control_flow import as_carry


class Tile(NamedTuple):
    """An entry and a key head."""

    entry: Scalar
    head: Scalar


def select[T](condition: Any, true: T, false: T) -> T:
    """Return one of two pytrees of scalars."""
    return jax.tree.map(functools.partial(jnp.where, condition), true, false)


class KvCursor(NamedTuple):
    """The block that is loaded next, and what is known of those after it.

    The copy of a block must not wait for what says where it lies. So its tile's `KeyBlocks` are read when the tile
    before begins, its number in a list two blocks before, and its pages one block before. (The lengths that a
    `StepPlan` computes `KeyBlocks` from are in L1 since the CTA has computed its share.)
    """

    tile: Tile
    block_index: Scalar  # of the block, among those that the tile visits
    blocks: KeyBlocks  # of the tile
    next_blocks: KeyBlocks  # of the next tile
    pages: tuple[Scalar, ...]  # of the block, if the cache is paged, as the table has them
    # the numbers of the block and of the one after it, if a list says which they are
    listed: tuple[Scalar, ...]


@dataclasses.dataclass(frozen=True)
class BlockLine:
    """The line of blocks, and how a CTA goes along it."""

    cta: Cta[Any]
    num_entries: Scalar  # that there are

    def next_tile(self, tile: Tile) -> Tile:
        """Compute the tile after this one in the line."""
        entry, head = tile
        is_last = entry + 1 >= self.num_entries
        return select(is_last, Tile(I32(0), head + 1), Tile(entry + 1, head))

    def start(self, tile: Tile, index: Scalar, blocks: KeyBlocks) -> KvCursor:
        """Return the cursor of a CTA's first block."""
        next_blocks, listed = self._load_blocks(self.next_tile(tile)), ()
        if self.block_list is not None:
            first = self.block_list[blocks.first_block + index]
            listed = first, self._load_following(tile, index, blocks)
        pages = self._load_pages(blocks, index, listed)
        return as_carry(KvCursor(tile, index, blocks, next_blocks, pages, listed))

    def advance(self, cursor: KvCursor) -> KvCursor:
        """Return the cursor of the next block."""
        tile, index, blocks, next_blocks, _, listed = cursor
        is_last = index + 1 >= blocks.num_blocks
        tile = select(is_last, self.next_tile(tile), tile)
        index = jnp.where(is_last, 0, index + 1)
        blocks = select(is_last, next_blocks, blocks)
        following = self._load_blocks(self.next_tile(tile))
        if self.block_list is not None:
            listed = listed[1], self._load_following(tile, index, blocks)
        pages = self._load_pages(blocks, index, listed)
        return as_carry(KvCursor(tile, index, blocks, following, pages, listed))

    @property
    def block_list(self) -> Ref | None:
        """The blocks of the line of one head, or None if a tile visits consecutive blocks of the cache."""
        return self.cta.inputs.plan.blocks

    @property
    def copied_rows(self) -> range:
        """The rows of a block at which copies begin."""
        block_kv = self.cta.config.block_kv
        return range(0, block_kv, page_rows(self.cta.spec, block_kv))

    def existing_pages(self, cursor: KvCursor) -> tuple[Scalar, ...]:
        """Return the pages of a block. Whatever the table has, they are pages that exist."""
        last_page = self.cta.inputs.k.shape[0] - 1
        return tuple(jnp.clip(page, 0, last_page) for page in cursor.pages)

    def first_key(self, cursor: KvCursor) -> Scalar:
        """Compute the index of a block's first key."""
        block = self._block(cursor.blocks, cursor.block_index, cursor.listed)
        return block * self.cta.config.block_kv

    def load_first_key(self, entry: Entry, index: Scalar) -> Scalar:
        """Return the index of the first key of a block of an entry, by the list if there is one."""
        block = entry.first_block + index
        if self.block_list is not None:
            block = self.block_list[block]
        return block * self.cta.config.block_kv

    def _block(self, blocks: KeyBlocks, index: Scalar, listed: tuple[Scalar, ...]) -> Scalar:
        """Return the number in the cache of a tile's block."""
        return listed[0] if listed else blocks.first_block + index

    def _load_following(self, tile: Tile, index: Scalar, blocks: KeyBlocks) -> Scalar:
        """Load the number of the block after one in the list, and compute nothing with it, which would wait for it.

        After the last block of a head comes the first one of the next head, and the list is that of every head.
        """
        assert self.block_list is not None
        is_last = (index + 1 >= blocks.num_blocks) & (tile.entry + 1 >= self.num_entries)
        return self.block_list[jnp.where(is_last, 0, blocks.first_block + index + 1)]

    def _load_blocks(self, tile: Tile) -> KeyBlocks:
        """Load which blocks a tile visits. The tile after the last one has the first entry, and a head that is not
        used."""
        return self.cta.load_entry(tile.entry).key_blocks

    def _load_pages(
        self, blocks: KeyBlocks, index: Scalar, listed: tuple[Scalar, ...]
    ) -> tuple[Scalar, ...]:
        """Load the pages of a block, and compute nothing with them, which would wait for them."""
        page_size, table = self.cta.spec.page_size, self.cta.inputs.table
        if page_size is None:
            return ()
        first_key = self._block(blocks, index, listed) * self.cta.config.block_kv
        last_entry = table.shape[1] - 1

        def load_page(key: Scalar) -> Scalar:
            return table[blocks.request, jnp.minimum(div(key, page_size), last_entry)]

        return tuple(load_page(first_key + row) for row in self.copied_rows)
