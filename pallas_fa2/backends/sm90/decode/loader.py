"""The loads of Q, K and V by TMA, by the warpgroup that multiplies as well."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.decode.config import page_rows
from pallas_fa2.backends.sm90.decode.memory import Cta
from pallas_fa2.backends.sm90.decode.schedule import KeyBlocks, Share
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import rematerialize, when


class Tile(NamedTuple):
    """An entry and a key head."""

    entry: Scalar
    head: Scalar


def select[T](condition: Any, true: T, false: T) -> T:
    """Return one of two pytrees of scalars."""
    return jax.tree.map(functools.partial(jnp.where, condition), true, false)


class KvCursor(NamedTuple):
    """The next block that is loaded.

    What it takes from device memory is read a block before it is needed: the tile's blocks when the tile before
    begins, the pages of a block when the block before is loaded.
    """

    tile: Tile
    block_index: Scalar  # of the block, among those that the tile visits
    blocks: KeyBlocks  # of the tile
    next_blocks: KeyBlocks  # of the next tile
    pages: tuple[Scalar, ...]  # of the block, if the cache is paged


class KvLoader:
    """The loads of one CTA, in the order of its share."""

    def __init__(self, cta: Cta, share: Share):
        self.cta, self.num_entries = cta, share.num_entries
        self.page_rows = page_rows(cta.spec)

    def next_tile(self, tile: Tile) -> Tile:
        """Compute the tile after this one in the line."""
        entry, head = tile
        is_last = entry + 1 >= self.num_entries
        return select(is_last, Tile(I32(0), head + 1), Tile(entry + 1, head))

    def load_q(self, tile_index: Scalar, first_query: Scalar, head: Scalar) -> None:
        """Load Q of a tile of which its CTA has so many before. Rows that pad a group are zeros."""
        spec, memory, q = self.cta.spec, self.cta.memory, self.cta.inputs.q
        slot, group = rem(tile_index, 2), spec.padded_group
        for t in range(spec.q_len):
            # an entry with fewer queries has those of others as well, of which no result is stored
            token = jnp.minimum(first_query + t, spec.num_tokens - 1)
            source = group_rows(q, token * spec.kv_heads + head, group)
            target = memory.q.at[slot, pl.ds(t * group, group)]
            source.load(target, memory.q_full.array, slot)

    def start(self, tile: Tile, index: Scalar, blocks: KeyBlocks) -> KvCursor:
        """Return the cursor of a CTA's first block."""
        next_blocks = self._load_blocks(self.next_tile(tile))
        return KvCursor(tile, index, blocks, next_blocks, self._load_pages(blocks, index))

    def advance(self, cursor: KvCursor) -> KvCursor:
        """Return the cursor of the next block."""
        tile, index, blocks, next_blocks, _ = cursor
        is_last = index + 1 >= blocks.num_blocks
        tile = select(is_last, self.next_tile(tile), tile)
        index = jnp.where(is_last, 0, index + 1)
        blocks = select(is_last, next_blocks, blocks)
        following = self._load_blocks(self.next_tile(tile))
        return KvCursor(tile, index, blocks, following, self._load_pages(blocks, index))

    def _load_blocks(self, tile: Tile) -> KeyBlocks:
        # nothing is loaded of a tile after the last one
        return KeyBlocks.load(self.cta.inputs.plan.entries, tile.entry)

    def _load_pages(self, blocks: KeyBlocks, index: Scalar) -> tuple[Scalar, ...]:
        """Load the pages of a block. Whatever the table has, they are pages that exist."""
        page_size, table = self.cta.spec.page_size, self.cta.inputs.table
        if page_size is None:
            return ()
        first_key = (blocks.first_block + index) * self.cta.config.block_kv
        last_page, last_entry = self.cta.inputs.k.shape[0] - 1, table.shape[1] - 1

        def load_page(key: Scalar) -> Scalar:
            entry = jnp.minimum(div(key, page_size), last_entry)
            return jnp.clip(table[blocks.request, entry], 0, last_page)

        return tuple(load_page(first_key + row) for row in self._copied_rows)

    @property
    def _copied_rows(self) -> range:
        """The rows of a block at which copies begin."""
        return range(0, self.cta.config.block_kv, self.page_rows)

    def load_block(self, slot: Scalar, cursor: KvCursor) -> None:
        """Load a block of K and of V to a slot of the ring."""
        inputs, memory = self.cta.inputs, self.cta.memory
        for name, array, buffer in (("k", inputs.k, memory.k), ("v", inputs.v, memory.v)):
            barrier = memory.kv_full.offset(name) + slot
            for i, row in enumerate(self._copied_rows):
                target = buffer.at[slot, pl.ds(row, self.page_rows)]
                source = self._source(array, cursor, i)
                source.load(target, memory.kv_full.array, barrier)
        if inputs.scales is None:
            return
        pairs = zip(inputs.scales, (memory.k_scale, memory.v_scale), strict=True)
        for name, (array, lines) in zip("kv", pairs, strict=True):
            barrier = memory.kv_full.at(name, slot)
            for i in range(lines.shape[1]):
                source = self._source(array, cursor, i)
                heads = pl.ds(source.head, lines.shape[2])
                rows = pl.ds(source.rows.start, self.page_rows)
                scales = array.at[source.batch, heads, rows]
                plgpu.copy_gmem_to_smem(scales, lines.at[slot, i], barrier)

    def _source(self, array: Ref, cursor: KvCursor, i: int) -> HeadRows:
        """Return where the i-th copy of a block comes from."""
        page_size, block_kv = self.cta.spec.page_size, self.cta.config.block_kv
        first_key = (cursor.blocks.first_block + cursor.block_index) * block_kv
        head = cursor.tile.head
        if page_size is None:
            return HeadRows(array, cursor.blocks.request, pl.ds(first_key, block_kv), head)
        row = rem(first_key + i * self.page_rows, page_size)
        return HeadRows(array, cursor.pages[i], pl.ds(row, self.page_rows), head)

    def fill_ring(self, cursor: KvCursor, num_steps: Scalar) -> KvCursor:
        """Load the first blocks of a CTA, of which it has so many."""
        for slot in range(self.cta.config.stages):
            when(slot < num_steps)(functools.partial(self.load_block, I32(slot), cursor))
            cursor = self.advance(cursor)
        return cursor

    def refill(self, step: Scalar, num_steps: Scalar, cursor: KvCursor) -> KvCursor:
        """Load the block that takes the slot of the one before `step`, which all warps have left."""
        stages = self.cta.config.stages
        following = step - 1 + stages
        slot = lax.rem(following, I32(stages))
        is_loaded = (step > 0) & (following < num_steps)
        when(is_loaded)(functools.partial(self.load_block, slot, cursor))
        return select(step > 0, self.advance(cursor), cursor)


def group_rows(array: Ref, index: Scalar, padded_group: int) -> HeadRows:
    """Return the rows of a group in `[tokens * K, G, 1, H]`, with those that pad it: they do not exist."""
    first = rematerialize(
        I32(0)
    )  # if it were known when traced, Pallas would see that not all rows exist
    return HeadRows(array, index, pl.ds(first, padded_group), I32(0), in_row_groups=True)
