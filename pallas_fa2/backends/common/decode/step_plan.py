"""Which blocks of keys a CTA reads, computed by itself: of decode steps, whose requests have as many queries each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry, request_of, step_entry
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import thread_ops
from pallas_fa2.backends.common.primitives.layouts import LANES
from pallas_fa2.backends.common.primitives.types import Scalar

# A lane loads the lengths of its entries at once, 16 words. Each CTA reads all lengths: of more entries than these the
# attention takes so long (25 us for a block of each) that a plan made before it, by XLA, costs less than it seems.
MAX_ENTRIES = 16 * LANES


class StepPlan(NamedTuple):
    """The lengths, from which each CTA computes its share, and a tile its entry."""

    lengths: Any  # int32 [B]

    def load_entry(self, spec: DecodeSpec, index: Scalar) -> Entry:
        """Compute an entry from the length of its request."""
        return step_entry(spec, index, self.lengths[request_of(spec, index)])

    def load_share(self, spec: DecodeSpec, config: DecodeConfig, cta: Scalar) -> Share:
        """Compute the share of a CTA from all lengths. All warps do the same, so that none waits for another."""
        lane = thread_ops.thread_indices() & (LANES - 1)
        per_lane = -(-spec.max_entries // LANES)
        counts = [self._count_blocks(spec, lane * per_lane + i) for i in range(per_lane)]
        of_lane = functools.reduce(jnp.add, counts)
        of_head = thread_ops.uniform(thread_ops.warp_sum(of_lane))
        longest = functools.reduce(jnp.maximum, counts)
        longest = thread_ops.uniform(thread_ops.warp_max(longest))
        num_entries = I32(spec.max_entries)
        deal = Deal.compute(config, spec.kv_heads, num_entries, of_head, longest)
        begin = deal.first_block(cta)
        head, in_head = lax.div(begin, of_head), lax.rem(begin, of_head)
        entry, start = _find(of_lane, in_head)
        if per_lane > 1:
            first = entry * per_lane
            of_entry = self._count_blocks(spec, first + lane)
            of_entry = jnp.where(lane < per_lane, of_entry, 0)
            index, offset = _find(of_entry, in_head - start)
            entry, start = first + index, start + offset
        tile_begin = head * of_head + start
        first_entry = self.load_entry(spec, entry)
        end = deal.first_block(cta + 1)
        return Share(begin, end, head, entry, tile_begin, num_entries, first_entry, deal)

    def _count_blocks(self, spec: DecodeSpec, index: jax.Array) -> jax.Array:
        """Return the blocks of the entry of each thread's index, or 0 if there is none."""
        length = thread_ops.gather_in_order(self.lengths, request_of(spec, index))
        count = step_entry(spec, index, length).num_blocks
        return jnp.where(index < spec.max_entries, count, 0)


def _find(counts: jax.Array, block: Scalar) -> tuple[jax.Array, jax.Array]:
    """Return the lane that has a block, and the blocks of the lanes before it. Each lane has a count of blocks."""
    before = thread_ops.warp_exclusive_sum(counts)
    begins = before <= block
    lane = thread_ops.warp_sum(jnp.where(begins, 1, 0)) - 1
    start = thread_ops.warp_max(jnp.where(begins, before, 0))
    return thread_ops.uniform(lane), thread_ops.uniform(start)
