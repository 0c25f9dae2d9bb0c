"""The loads of Q, K and V by cp.async, by the warps that multiply as well."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32, rem
from pallas_fa2.backends.common.decode.arrays import Cta, page_rows
from pallas_fa2.backends.common.decode.cursor import BlockLine, KvCursor, Tile
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.primitives import copy_groups
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm80.decode.memory import SharedStorage
from pallas_fa2.backends.sm80.primitives import async_copy
from pallas_fa2.control_flow import when


class KvBlock(NamedTuple):
    """Where a block of keys, and of values, is in device memory."""

    request: Scalar
    head: Scalar
    first_key: Scalar
    pages: tuple[Scalar, ...]  # if the cache is paged


class Loads(NamedTuple):
    """What is loaded next: K of a block, and V of the block before it."""

    cursor: KvCursor  # of K
    values: KvBlock  # of V: the block before
    num_tiles: Scalar  # of which Q has been loaded


class KvLoader:
    """The loads of one CTA, in the order of its share: K_0 V_0 K_1 V_1 ..., a group each. Q of a tile comes with its
    first block of K."""

    def __init__(self, cta: Cta[SharedStorage], share: Share, num_steps: Scalar):
        self.cta, self.line = cta, BlockLine(cta, share.num_entries)
        self.num_steps = num_steps  # blocks of the CTA

    @property
    def pending(self) -> int:
        """The groups that may still be on their way when K_j, or V_j, must be there: those of the other slots."""
        return 2 * (self.cta.config.stages - 1)

    def wait(self) -> None:
        """Wait until the next group has landed, and for all threads."""
        copy_groups.wait_groups(self.pending)
        async_copy.sync_cta(1)

    def fill_ring(self, cursor: KvCursor) -> Loads:
        """Begin to load K to all slots of the ring, and V to all but the last one."""
        loads = Loads(cursor, self._block(cursor), I32(0))
        for step in range(self.cta.config.stages):
            if step:
                self.load_values(I32(step - 1), loads.values)
            loads = self.load_keys(I32(step), loads, is_first=step == 0)
        return loads

    def load_keys(self, step: Scalar, loads: Loads, is_first: bool = False) -> Loads:
        """Begin to load K of the CTA's block `step`, if there is one, and Q where it begins a tile, or is the CTA's
        first."""
        cursor, stages = loads.cursor, self.cta.config.stages
        slot, block = rem(step, stages), self._block(cursor)
        begins_tile = cursor.block_index == 0
        if is_first:
            begins_tile = begins_tile | True
        exists = step < self.num_steps

        @when(exists & begins_tile)
        def load_q() -> None:
            self._load_q(rem(loads.num_tiles, stages), cursor.tile)

        when(exists)(lambda: self._load_block(self.cta.inputs.k, self.cta.memory.k.at[slot], block))
        copy_groups.commit_group()
        num_tiles = loads.num_tiles + jnp.where(begins_tile, 1, 0)
        return Loads(self.line.advance(cursor), block, num_tiles)

    def load_values(self, step: Scalar, block: KvBlock) -> None:
        """Begin to load V of the CTA's block `step`, if there is one."""
        buffer = self.cta.memory.v.at[rem(step, self.cta.config.stages)]
        load = functools.partial(self._load_block, self.cta.inputs.v, buffer, block)
        when(step < self.num_steps)(load)
        copy_groups.commit_group()

    def _load_q(self, slot: Scalar, tile: Tile) -> None:
        """Load Q of a tile. Rows that pad a group are zeros."""
        spec, q = self.cta.spec, self.cta.inputs.q
        first_query = self.cta.load_entry(tile.entry).first_query
        limit = spec.group if spec.padded_group > spec.group else None
        for t in range(spec.q_len):
            # an entry with fewer queries loads those of others as well, of which no result is stored
            token = jnp.minimum(first_query + t, spec.num_tokens - 1)
            rows = pl.ds(t * spec.padded_group, spec.padded_group)
            source = q.at[token * spec.kv_heads + tile.head]
            async_copy.load_rows(source, self.cta.memory.q.at[slot, rows], 1, limit)

    def _block(self, cursor: KvCursor) -> KvBlock:
        first_key = self.line.first_key(cursor)
        pages = self.line.existing_pages(cursor)
        head = self.cta.spec.key_head(cursor.tile.head)
        return KvBlock(cursor.blocks.request, head, first_key, pages)

    def _load_block(self, array: Ref, buffer: Ref, block: KvBlock) -> None:
        spec, block_kv = self.cta.spec, self.cta.config.block_kv
        if spec.page_size is None:
            limit = None if spec.kv_len % block_kv == 0 else spec.kv_len - block.first_key
            source = array.at[block.request, pl.ds(block.first_key, block_kv), block.head]
            async_copy.load_rows(source, buffer, 1, limit)
            return
        size = page_rows(spec, block_kv)
        for page, row in zip(block.pages, self.line.copied_rows, strict=True):
            rows = pl.ds(rem(block.first_key + row, spec.page_size), size)
            source = array.at[page, rows, block.head]
            async_copy.load_rows(source, buffer.at[pl.ds(row, size)], 1)
