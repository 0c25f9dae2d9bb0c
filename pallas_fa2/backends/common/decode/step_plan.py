"""Which blocks of keys a CTA reads, computed by itself: of decode steps, whose requests have as many queries each."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.block_lists import BlockList, VisibleBlocks
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry, request_of, step_entries, step_entry
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import thread_ops
from pallas_fa2.backends.common.primitives.layouts import LANES
from pallas_fa2.backends.common.primitives.types import Scalar

# A lane loads the lengths of its entries at once, 16 words. Each CTA reads all lengths. One block of each of more
# entries than these is 134 MB with K = 8 and H = 128, 28 us of device memory, beside which XLA's tables take 14 us at
# most (docs/decisions/0084-decode-plan-in-the-kernel.md).
MAX_ENTRIES = 16 * LANES


class StepPlan(NamedTuple):
    """The lengths, from which each CTA computes its share, and a tile its entry."""

    lengths: Any  # int32 [B]
    # Where a mask hides blocks: int32 [entries + 1], how many blocks of the line of a head come before an entry's, and
    # int32 [entries * blocks of a full cache], these blocks. An entry's `first_block` is then the index of its first
    # one there.
    blocks_before: Any = None
    blocks: Any = None

    @classmethod
    def make(
        cls, spec: DecodeSpec, lengths: jax.Array, visible_blocks: VisibleBlocks | None
    ) -> "StepPlan":
        """Return the plan of requests of these lengths, int32 `[B]`. With `visible_blocks` XLA lists them."""
        if visible_blocks is None:
            return cls(lengths)
        entries = step_entries(spec, lengths)
        listed = BlockList.make(entries, visible_blocks)
        located = listed.locate(jnp.arange(spec.max_entries, dtype=I32), entries)
        end = located.first_block[-1:] + located.num_blocks[-1:]
        return cls(lengths, jnp.concatenate([located.first_block, end]), listed.blocks)

    def load_entry(self, spec: DecodeSpec, index: Scalar) -> Entry:
        """Compute an entry from the length of its request."""
        entry = step_entry(spec, index, self.lengths[request_of(spec, index)])
        if self.blocks is None:
            return entry
        first = self.blocks_before[index]
        return entry._replace(first_block=first, num_blocks=self.blocks_before[index + 1] - first)

    def load_share(self, spec: DecodeSpec, config: DecodeConfig, cta: Scalar) -> Share:
        """Compute the share of a CTA from all lengths. All warps do the same, so that none waits for another."""
        lane = thread_ops.thread_indices() & (LANES - 1)
        per_lane = -(-spec.max_entries // LANES)
        counts = [self._count_blocks(spec, lane * per_lane + i) for i in range(per_lane)]
        lane_blocks = functools.reduce(jnp.add, counts)
        head_blocks = thread_ops.uniform(thread_ops.warp_sum(lane_blocks))
        longest_of_lane = functools.reduce(jnp.maximum, counts)
        longest = thread_ops.uniform(thread_ops.warp_max(longest_of_lane))
        num_entries = I32(spec.max_entries)
        deal, begin, end = Deal.compute(
            config, spec.kv_heads, num_entries, head_blocks, longest, cta
        )
        head, in_head = lax.div(begin, head_blocks), lax.rem(begin, head_blocks)
        entry, start = _find(lane_blocks, in_head)
        if per_lane > 1:
            first = entry * per_lane
            entry_blocks = self._count_blocks(spec, first + lane)
            entry_blocks = jnp.where(lane < per_lane, entry_blocks, 0)
            index, offset = _find(entry_blocks, in_head - start)
            entry, start = first + index, start + offset
        tile_begin = head * head_blocks + start
        first_entry = self.load_entry(spec, entry)
        return Share(begin, end, head, entry, tile_begin, num_entries, first_entry, deal)

    def _count_blocks(self, spec: DecodeSpec, index: jax.Array) -> jax.Array:
        """Return the blocks of the entry of each thread's index, or 0 if there is none."""
        if self.blocks is None:
            length = thread_ops.gather_after_barriers(self.lengths, request_of(spec, index))
            count = step_entry(spec, index, length).num_blocks
        else:
            before = self.blocks_before
            begin, end = (thread_ops.gather_after_barriers(before, index + i) for i in range(2))
            count = end - begin
        return jnp.where(index < spec.max_entries, count, 0)


def _find(counts: jax.Array, block: Scalar) -> tuple[jax.Array, jax.Array]:
    """Return the lane that has a block, and the blocks of the lanes before it. Each lane has a count of blocks."""
    before = thread_ops.warp_exclusive_sum(counts)
    begins = before <= block
    lane = thread_ops.warp_sum(jnp.where(begins, 1, 0)) - 1
    start = thread_ops.warp_max(jnp.where(begins, before, 0))
    return thread_ops.uniform(lane), thread_ops.uniform(start)
