"""Which CTA reads which blocks of keys: a plan that XLA makes on the device from the lengths.

A tile is an entry and a key head. The 64-key blocks of all tiles form one line, one key head after another, and each
CTA has an equal share of it (stream-K, arXiv:2301.03598): how often a tile is split depends on the lengths, the number
of CTAs does not. Neighboring CTAs then read neighboring heads of the same tokens at about the same time, and those lie
side by side in device memory. Where all tiles are equally long, and come out nearly even, no tile is split.

With fixed splits (`DecodeSpec.split_blocks`) entries are split at multiples of so many keys, each split is a row of the line
of its own, and CTAs have whole rows: which sums are rounded then depends on nothing but the sequence itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.types import Ref, Scalar


class KeyBlocks(NamedTuple):
    """The blocks of keys that an entry visits, each an int32 scalar or an array of all entries."""

    num_blocks: Any  # at least 1
    first_block: Any
    request: Any

    @classmethod
    def load(cls, table: Ref, row: Scalar, column: int = 0) -> "KeyBlocks":
        """Load those of a row of a table of the plan, from a column on."""
        return cls(*(table[row, column + i] for i in range(len(cls._fields))))


class Entry(NamedTuple):
    """Up to `q_len` consecutive queries of one request. The first fields are those of `KeyBlocks`."""

    num_blocks: Any
    first_block: Any
    request: Any
    kv_len: Any  # keys from here on exist for none of its queries
    first_position: Any  # of its first query in the sequence; negative if the sequence has fewer tokens than queries
    first_query: Any  # the row of its first query in Q
    num_queries: Any

    @classmethod
    def load(cls, table: Ref, row: Scalar, column: int = 0) -> "Entry":
        return cls(*(table[row, column + i] for i in range(len(cls._fields))))


class FixedSplits(NamedTuple):
    """The rows of an entry with fixed splits; behind the `Entry` of each of these rows."""

    first_row: Any
    num_rows: Any

    @classmethod
    def load(cls, table: Ref, row: Scalar) -> "FixedSplits":
        return cls(*(table[row, len(Entry._fields) + i] for i in range(len(cls._fields))))


class Share(NamedTuple):
    """The blocks of one CTA, and the tile that it begins with."""

    begin: Any  # its first block in the line
    head: Any  # of the tile
    entry: Any  # the tile's, as an index
    tile_begin: Any  # the tile's first block in the line
    first_cta: Any  # that has blocks of the tile
    last_cta: Any
    num_entries: Any  # that there are
    # The splits of the tile that begins in this CTA which are stored so far: 0 before and after each launch
    # (`merge.TileSplits.arrive`).
    arrivals: Any

    @classmethod
    def load(cls, table: Ref, cta: Scalar) -> "Share":
        return cls(*(table[cta, i] for i in range(len(cls._fields))))


FIRST_ENTRY_COLUMN = len(Share._fields)
ARRIVALS_COLUMN = Share._fields.index("arrivals")


class DecodePlan(NamedTuple):
    """Who reads what. One plan serves all layers of a step, whose lengths are the same."""

    # int32 [CTAs + 1, 15]: `Share`, and the `Entry` of its tile, so that a CTA waits for one load before its first copy
    shares: jax.Array
    # int32 [entries, 7]: `Entry`; with fixed splits [rows, 9], `FixedSplits` too
    entries: jax.Array
    # int32 [K, rows], with fixed splits: of an entry's first row, the splits that are stored so far, as `Share.arrivals`
    arrivals: jax.Array | None = None


def plan_decode(
    spec: DecodeSpec, config: DecodeConfig, lengths: jax.Array, starts: jax.Array | None = None
) -> DecodePlan:
    """Return the plan of requests of these lengths, int32 `[B]`; those beyond the capacity are cut off.

    Without `starts` each request has as many queries as any other; otherwise request r has those from `starts[r]` to
    `starts[r + 1]`, int32 `[B + 1]`, which are the last tokens of its sequence.
    """
    lengths = jnp.clip(lengths.astype(I32), 0, spec.kv_len)
    if starts is None:
        entries, num_entries = _step_entries(spec, lengths), I32(spec.max_entries)
    else:
        entries, num_entries = _packed_entries(spec, lengths, starts.astype(I32))
    if spec.distances.most is not None:
        last = entries.first_position + entries.num_queries - 1
        kv_len = jnp.minimum(entries.kv_len, last + (spec.distances.most + 1))
        entries = entries._replace(kv_len=jnp.maximum(kv_len, 0))
    count, first = _visited_blocks(spec, config.block_kv, entries)
    exists = jnp.arange(spec.max_entries, dtype=I32) < num_entries
    entries = entries._replace(num_blocks=jnp.where(exists, count, 0), first_block=first)
    columns, arrivals = list(entries), None
    if spec.split_blocks is not None:
        entries, splits, num_entries = _split_entries(spec, spec.split_blocks, entries)
        columns = [*entries, *splits]
        arrivals = jnp.zeros((spec.kv_heads, spec.max_rows), I32)
    shares = _deal_shares(spec, config, entries.num_blocks, num_entries)
    table = jnp.stack(columns, 1)
    first_entries = table[shares.entry, : len(Entry._fields)]
    return DecodePlan(jnp.concatenate([jnp.stack(shares, 1), first_entries], 1), table, arrivals)


def _split_entries(
    spec: DecodeSpec, split_blocks: int, entries: Entry
) -> tuple[Entry, FixedSplits, jax.Array]:
    """Split entries at multiples of `split_blocks` blocks; return their rows, whose they are, and how many there are."""
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
    rows = Entry(*(jnp.broadcast_to(x, ends.shape)[owner] for x in entries))
    begin = jnp.maximum(rows.first_block, multiple)
    size = jnp.minimum(end[owner], multiple + split_blocks) - begin
    rows = rows._replace(num_blocks=jnp.where(row < ends[-1], size, 0), first_block=begin)
    return rows, splits, ends[-1]


def _step_entries(spec: DecodeSpec, lengths: jax.Array) -> Entry:
    """Return the entries of each request, as many as its queries need, without their blocks."""
    count, queries = spec.entries_per_request, spec.queries_of_request
    index = jnp.arange(spec.max_entries, dtype=I32)
    request, before = lax.div(index, I32(count)), lax.rem(index, I32(count)) * spec.q_len
    lengths, num_queries = jnp.repeat(lengths, count), jnp.minimum(queries - before, spec.q_len)
    first_query = request * queries + before
    return Entry(0, 0, request, lengths, lengths - queries + before, first_query, num_queries)


def _packed_entries(
    spec: DecodeSpec, lengths: jax.Array, starts: jax.Array
) -> tuple[Entry, jax.Array]:
    """Return the entries of packed queries, without their blocks, and how many there are."""
    requests, q_len = lengths.shape[0], spec.q_len
    # one request of no keys before all, and one after
    bounds = jnp.concatenate([jnp.array([0]), starts, jnp.array([spec.num_tokens])]).astype(I32)
    lengths = jnp.pad(lengths, 1)
    num_entries = lax.div(bounds[1:] - bounds[:-1] + (q_len - 1), I32(q_len))
    ends = jnp.cumsum(num_entries, dtype=I32)
    index = jnp.arange(spec.max_entries, dtype=I32)
    owner = jnp.minimum((ends[None] <= index[:, None]).sum(1, dtype=I32), requests + 1)
    before = (index - (ends - num_entries)[owner]) * q_len  # queries of the request
    first_query, length = bounds[owner] + before, lengths[owner]
    num_queries = jnp.clip(bounds[owner + 1] - first_query, 0, q_len)
    first_position = length - (bounds[owner + 1] - bounds[owner]) + before
    request = jnp.clip(owner - 1, 0, requests - 1)
    entries = Entry(0, 0, request, length, first_position, first_query, num_queries)
    return entries, ends[-1]


def _visited_blocks(spec: DecodeSpec, block_kv: int, entries: Entry) -> tuple[Any, Any]:
    """Return how many blocks each entry visits, and the first: one at least, which may have no key that exists."""
    end = lax.div(entries.kv_len + (block_kv - 1), I32(block_kv))
    first = jnp.zeros_like(end)
    if spec.distances.least is not None:
        oldest = jnp.maximum(entries.first_position + spec.distances.least, 0)
        first = jnp.minimum(lax.div(oldest, I32(block_kv)), jnp.maximum(end - 1, 0))
    return jnp.maximum(end - first, 1), first


def _deal_shares(
    spec: DecodeSpec, config: DecodeConfig, counts: jax.Array, num_entries: jax.Array
) -> Share:
    """Return the share of each CTA, and one that begins where the last one ends.

    `counts`, int32 `[entries]`, are the blocks of each entry, 0 for those that do not exist.
    """
    num_ctas = config.num_ctas
    starts = jnp.cumsum(counts, dtype=I32) - counts  # of entries, in the line of one head
    of_head = counts.sum(dtype=I32)
    total = of_head * spec.kv_heads
    cta = jnp.arange(num_ctas + 1, dtype=I32)
    least, rest = lax.div(total, I32(num_ctas)), lax.rem(total, I32(num_ctas))
    begin = cta * least + jnp.minimum(cta, rest)
    num_tiles = num_entries * spec.kv_heads
    whole_tiles = counts.max() * lax.div(num_tiles + (num_ctas - 1), I32(num_ctas))
    has_whole_tiles = (counts.max() * num_entries == of_head) & (
        (whole_tiles * num_ctas).astype(jnp.float32) <= MAX_IMBALANCE * total.astype(jnp.float32)
    )
    fixed_share = jnp.where(has_whole_tiles, whole_tiles, config.min_share)
    is_fixed = has_whole_tiles | (least < config.min_share)
    begin = jnp.where(is_fixed, jnp.minimum(cta * fixed_share, total), begin)

    def locate(begin: jax.Array) -> tuple[jax.Array, ...]:
        head, in_head = lax.div(begin, of_head), lax.rem(begin, of_head)
        entry = jnp.minimum((starts[None] <= in_head[:, None]).sum(1, dtype=I32), num_entries) - 1
        return head, entry, head * of_head + starts[entry]

    head, entry, tile_begin = locate(begin)
    if spec.split_blocks is not None:  # the CTA before has a row that begins before its share ends
        begin = jnp.where(begin > tile_begin, tile_begin + counts[entry], begin)
        head, entry, tile_begin = locate(begin)
    tile_end = tile_begin + counts[entry]

    # Solved for the CTA: to count those that begin before a block takes XLA two kernels more.
    def cta_of(block: jax.Array) -> jax.Array:
        in_larger = rest * (least + 1)  # the first shares have a block more
        smaller = rest + lax.div(block - in_larger, jnp.maximum(least, 1))
        equal = jnp.where(block < in_larger, lax.div(block, least + 1), smaller)
        return jnp.where(is_fixed, lax.div(block, jnp.maximum(fixed_share, 1)), equal)

    first_cta, last_cta = cta_of(tile_begin), cta_of(tile_end - 1)
    used, zeros = jnp.broadcast_to(num_entries, cta.shape), jnp.zeros_like(cta)
    return Share(begin, head, entry, tile_begin, first_cta, last_cta, used, zeros)
