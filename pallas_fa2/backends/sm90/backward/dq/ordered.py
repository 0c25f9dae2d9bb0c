"""dQ that is added in one order, the same in every run (docs/decisions/0031-deterministic-dq.md).

A tile adds to a row of dQ (a query block) when every tile of later keys that visits the row has. Tiles visit rows from
the first to the last, and start from the last keys: under a causal mask a tile begins at its diagonal, so that the tile
before it in this order is some steps ahead wherever they meet, and nobody waits. For other masks the order is as good
as any.

There is no deadlock: CTAs claim tiles in one global order, each the next one when it is free, and a tile waits for
earlier ones alone. So the earliest tile that is not done can always go on, whatever the number of CTAs, and however few
of them a GPU has room for at a time.

A turn is passed on through device memory, which takes about as long as a step. So no consumer warpgroup takes part up
to H = 128: of the producer, one warp waits for the turn of a step, and another passes it on to the next tile. Consumers
see barriers in shared memory alone.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.dq import turns
from pallas_fa2.backends.sm90.backward.dq.atomic import AtomicConsumer
from pallas_fa2.backends.sm90.backward.dq.ordered_schedule import OrderedSchedule, OrderedTile
from pallas_fa2.backends.sm90.backward.dq.strategy import (
    DqConsumer,
    DqProducer,
    DqRequest,
    DqStrategy,
)
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers


class OrderedDq(DqStrategy):
    """The strategy in which one tile after another adds to a row."""

    summary = "float32 dQ, additions in one order"
    schedule_type = OrderedSchedule
    tile_type = OrderedTile

    @classmethod
    def suits(cls, request: DqRequest) -> bool:
        """Return whether the call wants deterministic gradients."""
        return request.config.deterministic

    @property
    def barriers(self) -> Mapping[str, int]:
        return {} if self.schedule.config.two_cta else {"dq_granted": 2, "dq_added": 2}

    def consumer(self, cta: Cta, warpgroup: WarpgroupIndex) -> DqConsumer:
        two_cta = self.schedule.config.two_cta
        return (OrderedConsumer2Cta if two_cta else OrderedConsumer)(cta, warpgroup)

    def producer(self, cta: Cta) -> DqProducer:
        return OrderedProducer(cta)

    def allocate(
        self, q: jax.Array | SanitizedArray, zeros: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return dQ, and a word of turns for each row; with two CTAs one for each tile of a row."""
        assert zeros is not None
        rows, config = self.schedule.dq_shape[0], self.schedule.config
        shape = (rows, config.num_dq_tiles) if config.two_cta else (rows,)
        return zeros, jnp.zeros(shape, I32)


class DqSemaphore(NamedTuple):
    """The barriers through which the producer grants steps to the consumers of its CTA: two of each, for two steps."""

    barriers: Barriers

    def granted(self, t: Scalar) -> Barrier:
        """Return the barrier that completes when dQ of step t may be added, by two arrivals of the producer."""
        return self.barriers.at("dq_granted", t & I32(1))

    def added(self, t: Scalar) -> Barrier:
        """Return the barrier that completes when both consumers have added dQ of step t."""
        return self.barriers.at("dq_added", t & I32(1))


class OrderedConsumer(AtomicConsumer):
    """A consumer that adds its tiles of dQ when the producer grants it."""

    @property
    def semaphore(self) -> DqSemaphore:
        return DqSemaphore(self.cta.memory.full)

    def open(self) -> Scalar:
        # as if there were a step before the one before the first
        plgpu.barrier_arrive(self.semaphore.added(I32(0)))
        return super().open()

    def add(self, t: Scalar, destination: Scalar, dq: Callable[[], jax.Array]) -> None:
        value = dq()
        plgpu.barrier_wait(self.semaphore.granted(t))
        super().add(t, destination, lambda: value)
        plgpu.barrier_arrive(self.semaphore.added(t))


class OrderedConsumer2Cta(AtomicConsumer):
    """A consumer that adds its tiles of dQ in turns of its own.

    All warpgroups multiply here. But the owners of gradients wait for scores longer than a turn takes, and tiles of dQ
    are disjoint: each has a turn of its own, which the warps that add it pass on themselves.
    """

    def _compute_word(self, dq_block: Scalar) -> Ref:
        index = 2 * lax.axis_index(CLUSTER_AXIS) + self.warpgroup
        return self.cta.outputs.dq_workspace.at[dq_block, index]

    def begin(self, step: Step) -> None:
        schedule = cast(OrderedSchedule, self.cta.schedule)
        turns.take_dq_turn(self._compute_word(step.dq_block), schedule.compute_dq_rank(step))

    def add(self, t: Scalar, destination: Scalar, dq: Callable[[], jax.Array]) -> None:
        super().add(t, destination, dq)
        turns.give_dq_turn(self._compute_word(destination))


class _Turns(NamedTuple):
    """The turns of the two steps before the next one."""

    dq_block: Scalar  # of the step before
    rank: Scalar  # of the step before
    dq_block_before: Scalar  # of the step before that


class OrderedProducer(DqProducer):
    """A producer that, one step behind its loads, waits until dQ may be added, and two behind passes the turn on.

    The four warps run unsynchronized: while one polls and another's signal becomes visible, the first one loads. But
    the consumers wait for arrivals of all four, which follow their waits for the next step's buffers. So none of them
    is ever two phases of a barrier behind, and takes one for the other.
    """

    def open(self) -> _Turns:
        return _Turns(self.cta.no_dq_block(), I32(0), self.cta.no_dq_block())

    def step(self, step: Step, state: _Turns) -> _Turns:
        self._pass_turns(step.global_step, state)
        if self.cta.memory.pairwise:
            # Their pipelines make several steps in one, for which the bound above does not hold.
            turns.sync_producer_warps()
        rank = cast(OrderedSchedule, self.cta.schedule).compute_dq_rank(step)
        return _Turns(step.dq_block, rank, state.dq_block)

    def close(self, steps: Scalar, state: _Turns) -> None:
        self._pass_turns(steps, state)
        self._end_turn(steps - 1, state.dq_block)

    def _pass_turns(self, t: Scalar, state: _Turns) -> None:
        """Wait for the turn of step t - 1, and pass on that of step t - 2."""
        turns.wait_dq_turn(self.cta.outputs.dq_workspace.at[state.dq_block], state.rank)
        for _ in range(2):
            plgpu.barrier_arrive(DqSemaphore(self.cta.memory.full).granted(t - 1))
        self._end_turn(t - 2, state.dq_block_before)

    def _end_turn(self, t: Scalar, dq_block: Scalar) -> None:
        """Pass the turn of step t on, once its dQ is added."""
        plgpu.barrier_wait(DqSemaphore(self.cta.memory.full).added(t))
        turns.end_dq_turn(self.cta.outputs.dq_workspace.at[dq_block])
