"""The loads of Q, K and V by TMA, by the warpgroup that multiplies as well."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, rem
from pallas_fa2.backends.common.decode.arrays import Cta, page_rows
from pallas_fa2.backends.common.decode.cursor import BlockLine, KvCursor, select
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import rematerialize, when


class KvLoader:
    """The loads of one CTA, in the order of its share."""

    def __init__(self, cta: Cta[SharedStorage], share: Share):
        self.cta, self.line = cta, BlockLine(cta, share.num_entries)
        self.page_rows = page_rows(cta.spec, cta.config.block_kv)

    def load_q(self, tile_index: Scalar, first_query: Scalar, head: Scalar) -> None:
        """Load Q of the CTA's tile number `tile_index`. Rows that pad a group are zeros."""
        spec, memory, q = self.cta.spec, self.cta.memory, self.cta.inputs.q
        slot, group = rem(tile_index, 2), spec.padded_group
        for t in range(spec.q_len):
            # an entry with fewer queries loads those of others as well, of which no result is stored
            token = jnp.minimum(first_query + t, spec.num_tokens - 1)
            source = group_rows(q, token * spec.kv_heads + head, group)
            target = memory.q.at[slot, pl.ds(t * group, group)]
            source.load(target, memory.q_full.array, slot)

    def load_block(self, slot: Scalar, cursor: KvCursor) -> None:
        """Load a block of K and of V to a slot of the ring."""
        inputs, memory = self.cta.inputs, self.cta.memory
        for name, array, buffer in (("k", inputs.k, memory.k), ("v", inputs.v, memory.v)):
            barrier = memory.kv_full.offset(name) + slot
            for i, row in enumerate(self.line.copied_rows):
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
        first_key = self.line.first_key(cursor)
        head = self.cta.spec.key_head(cursor.tile.head)
        if page_size is None:
            return HeadRows(array, cursor.blocks.request, pl.ds(first_key, block_kv), head)
        row = rem(first_key + i * self.page_rows, page_size)
        page = self.line.existing_pages(cursor)[i]
        return HeadRows(array, page, pl.ds(row, self.page_rows), head)

    def fill_ring(self, cursor: KvCursor, num_steps: Scalar) -> KvCursor:
        """Load the first blocks of a CTA that has `num_steps` of them, as many as the ring holds, and return the next
        cursor."""
        # What says where blocks lie, lengths and pages, is read for all of them before the first copy, so that it is
        # waited for once (docs/decisions/0089-first-copies-and-wide-splits.md).
        cursors = [cursor]
        for _ in range(self.cta.config.stages):
            cursors.append(self.line.advance(cursors[-1]))
        for slot, of_slot in enumerate(cursors[:-1]):
            when(slot < num_steps)(functools.partial(self.load_block, I32(slot), of_slot))
        return cursors[-1]

    def refill(self, step: Scalar, num_steps: Scalar, cursor: KvCursor) -> KvCursor:
        """Load the block that takes the slot of the one before `step`, which all warps have read, and return the next
        cursor.

        The CTA's first step has none before.
        """
        stages = self.cta.config.stages
        following = step - 1 + stages
        slot = lax.rem(following, I32(stages))
        is_loaded = (step > 0) & (following < num_steps)
        when(is_loaded)(functools.partial(self.load_block, slot, cursor))
        return select(step > 0, self.line.advance(cursor), cursor)


def group_rows(array: Ref, index: Scalar, padded_group: int) -> HeadRows:
    """Return the rows of a group in `[tokens * K, G, 1, H]`, with those that pad it: they do not exist."""
    # If it were known when traced, Pallas would see that not all rows exist.
    first = rematerialize(I32(0))
    return HeadRows(array, index, pl.ds(first, padded_group), I32(0), in_row_groups=True)
