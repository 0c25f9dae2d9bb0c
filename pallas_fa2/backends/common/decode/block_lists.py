"""The blocks of keys that an entry visits under a mask that is code: those to which some query of it may attend.

The mask's code runs on intervals (`ir/intervals.py`), once for each query and block of 64 keys, as it does for the
tiles of other kernels. What heads differ in makes no lists of their own: an entry visits the blocks that some head may
attend to. The line of blocks is then the same for each key head, and so is its deal; of blocks that are another head's
alone, a head computes that it attends to none of their keys.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import compile_mods
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.mods import K_POSITIONS, ModArrays, needs_mask_code
from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES
from pallas_fa2.ir.block_classes import eval_at_trace_time, tile_minmax, tile_positions
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.intervals import Interval, evaluate
from pallas_fa2.ir.tile_functions import ArgSource
from pallas_fa2.ir.trace import TracedFn

# Of all entries, bool [entries, blocks of a full cache].
type VisibleBlocks = Callable[[Entry], jax.Array]

# Of all entries together: the list and what it is made of take 14 bytes each, 0.9 GB.
MAX_LISTED_BLOCKS = 1 << 26
# The positions of queries for which a mask that reads no data is classified when it is traced. Against all blocks of a
# million keys these are a million intervals, and take the host less than its compiler does.
SAMPLED_QUERIES = 64


def lists_blocks(cached: CachedSpec, spec: DecodeSpec, config: DecodeConfig) -> bool:
    """Return whether a launch lists the blocks that it visits; others visit all blocks up to a sequence's length.

    It does under a mask that is code and may hide whole blocks. Where even full caches leave a CTA no more than
    `config.min_share` blocks, a list would save nothing.
    """
    if not needs_mask_code(cached):
        return False
    blocks = spec.max_entries * spec.max_blocks
    if blocks * spec.kv_heads <= config.num_ctas * config.min_share or blocks > MAX_LISTED_BLOCKS:
        return False
    assert cached.call.mask is not None
    return may_hide_blocks(cached.call.mask, spec.kv_len, cached.has_given_positions)


@functools.lru_cache(maxsize=512)
def may_hide_blocks(mask: TracedFn, kv_len: int, has_given_positions: bool) -> bool:
    """Return whether interval arithmetic may find blocks without a visible key. Under a mask of data it always may.

    Of other masks some positions of queries are tried. Those that are not given are the last of a sequence, which has
    no keys after them.
    """
    if len(mask.jaxpr.in_avals) > 2:
        return True
    query = np.unique(np.linspace(0, kv_len - 1, SAMPLED_QUERIES, dtype=np.int32))[:, None]
    block = np.arange(-(-kv_len // BLOCK_KV), dtype=np.int32)

    def visible() -> jax.Array:
        q = jnp.asarray(query.reshape(-1, 1, 1, 1, 1))
        (out,) = evaluate(
            mask.jaxpr.jaxpr,
            mask.jaxpr.consts,
            [Interval(q, q), tile_positions(kv_len, K_AXIS, BLOCK_KV)],
        )
        return jnp.broadcast_to(out.hi.any((1, 2, 3)), (query.size, block.size))

    exists = np.full((1, 1), True) if has_given_positions else block * BLOCK_KV <= query
    return bool((exists & ~eval_at_trace_time(visible)).any())


class BlockList(NamedTuple):
    """The blocks that entries visit, one entry after another: the line of a head."""

    # int32 [entries, blocks of a full cache]: how many blocks of the line come before each.
    before: Any
    # int32 [entries * blocks of a full cache]: the line, as long as it is.
    blocks: Any

    @classmethod
    def make(
        cls, entries: Entry, visible_blocks: VisibleBlocks, split_blocks: int | None = None
    ) -> "BlockList":
        """List those blocks of each entry that are visible, of all up to a sequence's length; entries that do not
        exist, with 0 blocks, have none.

        An entry visits one block at least, and so does each of its fixed splits of `split_blocks`: how these are merged
        must not depend on other queries of the entry. The last block is always taken, because it has as a rule a
        query's own key, and to find out whether any other is visible costs more.
        """
        visible = visible_blocks(entries)
        block = jnp.arange(visible.shape[1], dtype=I32)[None]
        num_blocks = entries.num_blocks[:, None]
        visits = visible | (block == num_blocks - 1)
        if split_blocks is not None:
            visits |= lax.rem(block, I32(split_blocks)) == split_blocks - 1
        # Otherwise XLA evaluates the mask in the loops of the cumulative sum, again for each of its windows.
        visits = lax.optimization_barrier(visits & (block < num_blocks)).reshape(-1)
        before = jnp.cumsum(visits, dtype=I32) - visits.astype(I32)
        number = jnp.broadcast_to(block, visible.shape).reshape(-1)
        # All indices differ, so that XLA needs no atomic operations; those of blocks that are not visited are past the
        # end.
        index = jnp.where(visits, before, visits.size + jnp.arange(visits.size, dtype=I32))
        line = jnp.zeros_like(number).at[index].set(number, mode="drop", unique_indices=True)
        return cls(before.reshape(visible.shape), line)

    def locate(self, owner: jax.Array, rows: Entry) -> Entry:
        """Return rows of the entries `owner` with the index of their first block in the list, and how many they have
        there."""
        exists, last = rows.num_blocks > 0, rows.first_block + rows.num_blocks - 1
        first = self.before[owner, rows.first_block]
        count = self.before[owner, jnp.maximum(last, 0)] + 1 - first  # the last one is visited
        return rows._replace(first_block=first, num_blocks=jnp.where(exists, count, 0))


def visible_blocks(
    cached: CachedSpec, spec: DecodeSpec, mods: ModArrays, entries: Entry
) -> jax.Array:
    """Return whether some query of an entry may attend to a key of a block: bool `[entries, blocks]`.

    `mods` are in rows (`ModArrays.in_rows`). Keys from a sequence's length on are seen as if they were there.
    """
    mask, ranges = cached.call.mask, _Ranges(cached, spec, mods, entries)
    assert mask is not None
    sources = compile_mods.argument_sources(cached.call)
    args = [ranges.of(source) for source in (sources.q, sources.k, *sources.mask)]
    (out,) = evaluate(mask.jaxpr.jaxpr, mask.jaxpr.consts, args)
    return jnp.broadcast_to(out.hi.any((1, 2, 3)), (spec.max_entries, spec.max_blocks))


class _Ranges:
    """The ranges of what a mask reads of each query of an entry and each block,
    `[entries | 1, K | 1, G | 1, queries of an entry | 1, blocks | 1]`."""

    def __init__(self, cached: CachedSpec, spec: DecodeSpec, mods: ModArrays, entries: Entry):
        self.spec, self.mods, self.request = spec, mods, entries.request
        self.heads = slice(None) if cached.call.mask_varies_by_head else slice(1)
        # An entry that has fewer queries has its last one more than once.
        query = jnp.arange(spec.q_len, dtype=I32)[None]
        query = jnp.clip(query, 0, jnp.maximum(entries.num_queries - 1, 0)[:, None])
        self.row = jnp.clip(entries.first_query[:, None] + query, 0, spec.num_tokens - 1)
        of_request = 0 if cached.is_packed else entries.request[:, None] * spec.queries_of_request
        self.query = self.row - of_request  # the index in arrays of pairs

    def of(self, source: ArgSource) -> Interval:
        """Return the range of an argument of the mask."""
        if source == K_POSITIONS:
            return tile_positions(self.spec.kv_len, K_AXIS, BLOCK_KV)
        assert source.position is not None
        if source.side == "k":
            rows = _decode(self.mods.k[:, source.position - 1], source.dtype)
            of_block = _blocks(rows[:, None, None, None])
            return Interval(*(self._of_requests(x) for x in of_block))
        if source.side == "pair":
            pairs = self.mods.pairwise[source.position]
            of_block = _blocks(pairs != 0 if source.dtype == "bool" else pairs)
            return Interval(*(self._of_pairs(x) for x in of_block))
        x = self._of_queries(source) if source.side == "q" else self._of_heads(source)
        return Interval(x, x)

    def _of_queries(self, source: ArgSource) -> jax.Array:
        row = _decode(self.mods.q[source.position], source.dtype)
        return row[self.row][:, None, None, :, None]

    def _of_heads(self, source: ArgSource) -> jax.Array:
        fields = self.mods.floats if source.side == "real" else self.mods.integers
        x = fields[:, self.heads, self.heads, source.position]
        return self._of_requests(_decode(x, source.dtype))[..., None, None]

    def _of_requests(self, x: jax.Array) -> jax.Array:
        """Return each entry's part of an array that has one for each request, or one that all share."""
        return x if x.shape[0] == 1 else x[self.request]

    def _of_pairs(self, x: jax.Array) -> jax.Array:
        batch, query = (n > 1 for n in (x.shape[0], x.shape[3]))
        if not query:
            return self._of_requests(x)
        by_query = x[self.request[:, None] if batch else 0, :, :, self.query]
        return jnp.moveaxis(by_query, 1, 3)  # indexed axes come first


def _blocks(x: jax.Array) -> Interval:
    """Return the range of each block of keys, the last of the five axes."""
    assert x.ndim == NUM_LEADING_AXES
    return Interval(*(tile_minmax(x, K_AXIS, BLOCK_KV, pick) for pick in ("min", "max")))


def _decode(bits: Any, dtype: str) -> jax.Array:
    """Return what words of 32 bits stand for (`ModArrays`)."""
    if dtype == "bool":
        return bits != 0
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)
