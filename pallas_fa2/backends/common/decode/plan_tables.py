"""Tables that say which CTA reads which blocks of keys, which XLA makes on the device: of packed queries, of fixed
splits, and of many decode steps.

With fixed splits (`DecodeSpec.split_blocks`) entries are split at multiples of so many keys, each split is a row of the
line of its own, and CTAs have whole rows: which sums are rounded then depends on nothing but the sequence itself.

Where a mask hides blocks, a list says which blocks are in the line of a head: those that an entry visits are
consecutive in it, and no longer in the cache.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.block_lists import BlockList, VisibleBlocks
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry, packed_entries, step_entries
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.types import Scalar


class FixedSplits(NamedTuple):
    """The rows of an entry with fixed splits, which are stored after the columns of `Entry` in each of these rows."""

    first_row: Any
    num_rows: Any


class ShareRow(NamedTuple):
    """The share of one CTA, or what begins where the last one ends: the first columns of a row of
    `PlanTables.shares`."""

    begin: Any
    head: Any
    entry: Any
    tile_begin: Any
    num_entries: Any
    least: Any  # of the `Deal`
    rest: Any
    run_blocks: Any
    run_ctas: Any


class PlanTables(NamedTuple):
    """Who reads what. One plan serves all layers of a step, whose lengths are the same."""

    # int32 [CTAs + 1, 16]: `ShareRow`, and the `Entry` of its tile, so that a CTA waits for one load before its first
    # copy
    shares: Any
    # int32 [entries, 7]: `Entry`; with fixed splits [rows, 9], `FixedSplits` too
    entries: Any
    # int32 [entries * blocks of a full cache]: the blocks of the line of one head, if a mask hides some. An entry's
    # `first_block` is then the index of its first one in this list.
    blocks: Any = None

    def load_share(self, spec: DecodeSpec, config: DecodeConfig, cta: Scalar) -> Share:
        """Load the share of a CTA."""
        row = ShareRow(*(self.shares[cta, i] for i in range(len(ShareRow._fields))))
        first_entry = _load_entry(self.shares, cta, len(ShareRow._fields))
        end = self.shares[cta + 1, ShareRow._fields.index("begin")]
        deal = Deal(*row[-len(Deal._fields) :])
        return Share(
            row.begin, end, row.head, row.entry, row.tile_begin, row.num_entries, first_entry, deal
        )

    def load_entry(self, spec: DecodeSpec, index: Scalar) -> Entry:
        """Load an entry, or a row of fixed splits."""
        return _load_entry(self.entries, index, 0)

    def load_fixed_splits(self, row: Scalar) -> FixedSplits:
        """Load the rows of the entry whose fixed split a row is."""
        return FixedSplits(*(self.entries[row, len(Entry._fields) + i] for i in range(2)))


def _load_entry(table: Any, row: Scalar, column: int) -> Entry:
    return Entry(*(table[row, column + i] for i in range(len(Entry._fields))))


def make_tables(
    spec: DecodeSpec,
    config: DecodeConfig,
    lengths: jax.Array,
    starts: jax.Array | None,
    visible_blocks: VisibleBlocks | None = None,
) -> PlanTables:
    """Return the tables of a plan (`schedule.plan_decode`)."""
    index = jnp.arange(spec.max_entries, dtype=I32)
    if starts is None:
        entries, num_entries = step_entries(spec, lengths), I32(spec.max_entries)
    else:
        entries, num_entries = packed_entries(spec, lengths, starts.astype(I32))
    count = jnp.where(index < num_entries, entries.num_blocks, 0)
    entries = Entry(*(jnp.broadcast_to(x, index.shape) for x in entries))
    entries, owner, splits, listed = entries._replace(num_blocks=count), index, (), None
    if visible_blocks is not None:
        listed = BlockList.make(entries, visible_blocks, spec.split_blocks)
    if spec.split_blocks is not None:
        entries, owner, splits, num_entries = _split_entries(spec, spec.split_blocks, entries)
    if listed is not None:
        entries = listed.locate(owner, entries)
    columns = [*entries, *splits]
    shares = _deal_shares(spec, config, entries.num_blocks, num_entries)
    table = jnp.stack(columns, 1)
    first_entries = table[shares.entry, : len(Entry._fields)]
    return PlanTables(
        jnp.concatenate([jnp.stack(shares, 1), first_entries], 1), table, listed and listed.blocks
    )


def _split_entries(
    spec: DecodeSpec, split_blocks: int, entries: Entry
) -> tuple[Entry, jax.Array, FixedSplits, jax.Array]:
    """Split entries at multiples of `split_blocks` blocks; return their rows, whose they are, the rows of each one's
    entry, and how many there are."""
    first_split = lax.div(entries.first_block, I32(split_blocks))
    end = entries.first_block + entries.num_blocks
    count = lax.div(end + (split_blocks - 1), I32(split_blocks)) - first_split
    count = jnp.where(entries.num_blocks > 0, count, 0)
    ends = jnp.cumsum(count, dtype=I32)
    row = jnp.arange(spec.max_rows, dtype=I32)
    owner = (ends[None] <= row[:, None]).sum(1, dtype=I32)
    owner = jnp.minimum(owner, spec.max_entries - 1)
    splits = FixedSplits((ends - count)[owner], count[owner])
    multiple = (first_split[owner] + row - splits.first_row) * split_blocks
    rows = Entry(*(x[owner] for x in entries))
    begin = jnp.maximum(rows.first_block, multiple)
    size = jnp.minimum(end[owner], multiple + split_blocks) - begin
    rows = rows._replace(num_blocks=jnp.where(row < ends[-1], size, 0), first_block=begin)
    return rows, owner, splits, ends[-1]


def _deal_shares(
    spec: DecodeSpec, config: DecodeConfig, counts: jax.Array, num_entries: jax.Array
) -> ShareRow:
    """Return the share of each CTA, and one that begins where the last one ends.

    `counts`, int32 `[entries]`, are the blocks of each entry, 0 for those that do not exist.
    """
    starts = jnp.cumsum(counts, dtype=I32) - counts  # of entries, in the line of one head
    head_blocks = counts.sum(dtype=I32)
    cta = jnp.arange(config.num_ctas + 1, dtype=I32)
    longest = counts.max()
    deal, begin, _ = Deal.compute(config, spec.kv_heads, num_entries, head_blocks, longest, cta)

    def locate(begin: jax.Array) -> tuple[jax.Array, ...]:
        blocks = jnp.maximum(head_blocks, 1)  # a launch of some requests may have none
        head, in_head = lax.div(begin, blocks), lax.rem(begin, blocks)
        entry = jnp.minimum((starts[None] <= in_head[:, None]).sum(1, dtype=I32), num_entries) - 1
        entry = jnp.maximum(entry, 0)
        return head, entry, head * head_blocks + starts[entry]

    head, entry, tile_begin = locate(begin)
    if spec.split_blocks is not None:  # the CTA before has a row that begins before its share ends
        begin = jnp.where(begin > tile_begin, tile_begin + counts[entry], begin)
        head, entry, tile_begin = locate(begin)
    same = (jnp.broadcast_to(x, cta.shape) for x in (num_entries, *deal))
    return ShareRow(begin, head, entry, tile_begin, *same)
