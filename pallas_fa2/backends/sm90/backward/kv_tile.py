"""A tile of the backward, a block of keys, and its steps, one for each query block that sees it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.block_mask import unpack_counts
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.control_flow import rematerialize


@dataclasses.dataclass(frozen=True)
class KvTile:
    """A block of keys of one head, and the query blocks that it visits.

    Methods `compute_...` emit instructions at each call: what they return, kept through the loops, would hold
    registers (docs/decisions/0064-register-rules.md).
    """

    schedule: BackwardSchedule
    k: Scalar  # the index of the tile among those of its CTA
    first_step: Scalar  # steps count through all tiles of a CTA
    tile_id: Scalar
    counts: Scalar | None = None  # under a mask: `block_mask.unpack_counts`
    block_mask: Any = None  # under a mask: the schedule's, in device memory

    def compute_coordinates(self) -> tuple[Scalar, Scalar, Scalar]:
        """Compute the batch entry, the head and the key block."""
        return self.schedule.coordinates(self.tile_id)

    def compute_kv_head(self) -> Scalar:
        return arithmetic.div(self.compute_coordinates()[1], self.schedule.group_splits)

    def compute_first_key(self) -> Scalar:
        return self.compute_coordinates()[2] * self.schedule.config.block_kv

    def compute_next_step(self) -> Scalar:
        """Compute the first step of the next tile."""
        if self.counts is None:
            kv_tile = self.compute_coordinates()[2]
            return self.first_step + self.schedule.count_steps(kv_tile)
        return self.first_step + unpack_counts(self.counts)[0]

    def compute_first_partial(self) -> Scalar:
        """Compute the first of the steps with partial blocks, which a mask lists last."""
        return self.compute_next_step() - unpack_counts(self.counts)[1]

    def compute_dq_block(self, group_head: int, q_block: Scalar) -> Scalar:
        """Compute the index among all query blocks of a block of one of the tile's query heads."""
        batch, head, _ = self.compute_coordinates()
        head = batch * self.schedule.spec.q_heads + head * self.schedule.group + group_head
        return head * self.schedule.q_blocks + q_block

    def load_list_entry(self, t: Scalar) -> Scalar:
        """Load the entry of step t in the tile's list; after the last step, whatever follows there."""
        index = arithmetic.minimum(t - self.first_step, self.block_mask.block_indices.shape[-1] - 1)
        lists = self.block_mask.block_indices
        return layouts.index_broadcast(lists, *self.compute_coordinates())[index]

    def load_dq_block(self, t: Scalar) -> Scalar:
        """Load the index among all query blocks of the block of step t."""
        return self.compute_dq_block(0, self.schedule.decode_q_block(self.load_list_entry(t)))

    def compute_first_dq_block(self) -> Scalar:
        if self.block_mask is not None:
            return self.load_dq_block(self.first_step)
        kv_tile = self.compute_coordinates()[2]
        return self.compute_dq_block(0, self.schedule.first_q_block(kv_tile))

    def compute_last_dq_block(self) -> Scalar:
        if self.block_mask is not None:
            return self.load_dq_block(self.compute_next_step() - 1)
        return self.compute_dq_block(self.schedule.group, -1)

    def compute_next_dq_block(self, t: Scalar, dq_block: Scalar) -> Scalar:
        """Compute the query block of step t + 1 from that of step t."""
        blocks = self.schedule.q_blocks
        if self.block_mask is not None:
            return self.load_dq_block(t + 1)
        if self.schedule.group == 1 or not self.schedule.spec.causal:
            return dq_block + 1
        skipped = self.schedule.first_q_block(self.compute_coordinates()[2])  # of the next head
        at_end = arithmetic.rem(dq_block, blocks) == blocks - 1
        return dq_block + 1 + jnp.where(at_end, skipped, 0)

    def each_step(self, body: Callable, carry: Any = None, by_class: bool = False) -> Any:
        """Return the carry after body(step, carry) -> carry for each query block, one head after another.

        With `by_class`, full blocks run in a loop of their own, without the mask's code.
        """
        state = self.compute_first_dq_block(), carry
        full, partial = (functools.partial(self.run_step, body, masked) for masked in (False, True))
        if by_class and self.block_mask is not None:
            state = lax.fori_loop(self.first_step, self.compute_first_partial(), full, state)
            begin, end = self.compute_first_partial(), self.compute_next_step()
            return lax.fori_loop(begin, end, partial, state)[1]
        if by_class and self.schedule.separate_partial_loop:
            counts = self.schedule.count_head_steps(self.compute_coordinates()[2])
            run_head = functools.partial(self._run_head, partial, full, *counts)
            if self.schedule.group == 1:
                return run_head(0, state)[1]
            return lax.fori_loop(0, self.schedule.group, run_head, state)[1]
        run = partial if self.schedule.has_partial else full
        return lax.fori_loop(self.first_step, self.compute_next_step(), run, state)[1]

    def _run_head(
        self,
        partial: Callable,
        full: Callable,
        num_steps: Scalar,
        num_partial: Scalar,
        group_head: Scalar,
        state: tuple,
    ) -> tuple:
        """Run the steps of one query head: partial blocks, which come first under a causal mask, and then full ones."""
        first = self.first_step + group_head * num_steps
        state = lax.fori_loop(first, first + num_partial, partial, state)
        return lax.fori_loop(first + num_partial, first + num_steps, full, state)

    def run_step(self, body: Callable, masked: bool, t: Scalar, state: tuple) -> tuple:
        """Return the query block of step t + 1, and the carry after step t."""
        dq_block, carry = state
        return self.compute_next_dq_block(t, dq_block), body(Step(self, t, dq_block, masked), carry)


class Step(NamedTuple):
    """A step of a tile: one block of queries against its block of keys."""

    tile: KvTile
    global_step: Scalar
    dq_block: Scalar  # the index of the query block among all of them, and so its row of dQ
    masked: bool  # whether the block is partial

    def is_first(self) -> bool | jax.Array:
        """Compute whether this is the first step of its tile."""
        return self.global_step == self.tile.first_step

    def is_last(self) -> bool | jax.Array:
        """Compute whether this is the last step of its tile."""
        return self.global_step == self.tile.compute_next_step() - 1

    def compute_next(self) -> "Step":
        """Compute the step after this one, of the same tile."""
        return self._replace(
            global_step=self.global_step + 1,
            dq_block=self.tile.compute_next_dq_block(self.global_step, self.dq_block),
        )

    def compute_head(self) -> tuple[Scalar, Scalar]:
        """Compute the batch entry and the query head."""
        schedule = self.tile.schedule
        head, heads = arithmetic.div(self.dq_block, schedule.q_blocks), schedule.spec.q_heads
        return arithmetic.div(head, heads), arithmetic.rem(head, heads)

    def compute_first_query(self) -> Scalar:
        schedule, tile = self.tile.schedule, self.tile
        if schedule.group == 1 and tile.block_mask is None:
            # no division, which would hold registers
            step = self.global_step - tile.first_step
            block = step + schedule.first_q_block(tile.compute_coordinates()[2])
        else:
            block = arithmetic.rem(rematerialize(self.dq_block), schedule.q_blocks)
        return rematerialize(block) * schedule.config.block_q
