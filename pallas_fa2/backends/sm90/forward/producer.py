"""The producer warpgroup of the forward: it loads Q, K, V and aux inputs by TMA."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Scalar, Slice
from pallas_fa2.backends.common.scheduler import for_each_tile
from pallas_fa2.backends.sm90.forward.memory import Arrays, KeysOrValues, SharedStorage
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, PipelinePosition, QueryTile
from pallas_fa2.backends.sm90.primitives import roles
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import when

# Key blocks before a tile's end at which the next tile is claimed: a claim is answered in about as many (2500
# clocks), where a block takes 600 or more.
CLAIM_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class TileLoads:
    """The loads of one query tile."""

    tile: QueryTile
    arrays: Arrays
    memory: SharedStorage
    batch: Scalar
    kv_batch: Scalar
    head: Scalar
    position: PipelinePosition

    @classmethod
    def of(
        cls, tile: QueryTile, arrays: Arrays, memory: SharedStorage, position: PipelinePosition
    ) -> "TileLoads":
        batch, head, _ = tile.compute_coordinates()
        kv_batch = arrays.load_batch(tile) if tile.schedule.spec.in_cache else batch
        return cls(tile, arrays, memory, batch, kv_batch, head, position)

    def q(self, n: Scalar) -> None:
        """Load Q of the CTA's n-th tile."""
        spec, inputs = self.tile.schedule.spec, self.arrays.inputs
        for g in range(self.tile.schedule.config.warpgroups):
            first = self.arrays.load_first_row(self.tile) + g * layouts.ROWS_PER_WARPGROUP
            row_range = pl.ds(first, layouts.ROWS_PER_WARPGROUP)
            rows = HeadRows(inputs.q, self.batch, row_range, self.head, at_any_row=spec.in_cache)
            self.memory.q_pipeline(g).tma_load(n, rows)

    def k(self, t: Scalar) -> None:
        """Load K of the t-th block."""
        rows = self.kv_rows("k", self.key_range(t))
        self.memory.k_pipeline.tma_load(self.position.kv_step + t, rows)

    def v(self, t: Scalar) -> None:
        rows = self.kv_rows("v", self.key_range(t))
        self.memory.v_pipeline.tma_load(self.position.kv_step + t, rows)

    def key_aux(self, t: Scalar) -> None:
        """Load the keys' aux inputs of the t-th block, if some come with it."""
        if self.memory.key_aux is None:
            return
        source = self.arrays.inputs.aux.k.at[self.batch, :, self.key_range(t)]
        step = self.position.aux_step + self.tile.compute_aux_index(t)
        when(self.tile.has_aux(t))(lambda: self.memory.key_aux_pipeline.tma_load(step, source))

    def pairwise(self, t: Scalar) -> None:
        """Load the pairwise inputs of the t-th block, if some come with it."""
        if not self.memory.pairwise:
            return

        def load() -> None:
            sources = self.tile.schedule.spec.pairwise_inputs()
            for g in range(self.tile.schedule.config.warpgroups):
                for pipeline, source in zip(
                    self.memory.pairwise_pipelines(g), sources, strict=True
                ):
                    array = self.arrays.inputs.aux.pairwise[source.position]
                    ranges = self._row_range(g), self.key_range(t)
                    step = self.position.aux_step + self.tile.compute_aux_index(t)
                    rows = layouts.index_broadcast(array, self.batch, self.head, *ranges)
                    pipeline.tma_load(step, rows)

        when(self.tile.has_aux(t))(load)

    def claim_next(self, n: Scalar, t: Scalar) -> None:
        """Claim the tile after the CTA's n-th, if the t-th block is the one before which it is time."""
        in_time = t == jnp.maximum(self.tile.compute_num_kv_blocks() - CLAIM_AHEAD, 0)
        self.arrays.scheduler.request_next(n + 1, in_time)

    def _row_range(self, warpgroup: int) -> Slice:
        size = layouts.ROWS_PER_WARPGROUP
        return pl.ds(self.tile.compute_first_row() + warpgroup * size, size)

    def key_range(self, t: Scalar) -> Slice:
        block_kv = self.tile.schedule.config.block_kv
        return pl.ds(self.arrays.load_kv_block_index(self.tile, t) * block_kv, block_kv)

    def kv_rows(self, name: KeysOrValues, keys: Slice) -> Any:
        """Return where K or V of these keys lies: `HeadRows`, `RowPieces` or `EightBitRows`."""
        head = self.tile.compute_kv_head()
        return self.arrays.kv_rows(name, self.tile, self.kv_batch, keys, head)


def run_producer(
    schedule: ForwardSchedule,
    arrays: Arrays,
    memory: SharedStorage,
    load_tile: Callable[[Scalar, TileLoads, Callable], Any],
    pipelines: Sequence[Pipeline],
    exit_branch: int = 1,
    claims: bool = True,
) -> None:
    """Run load_tile(n, loads, prefetch) -> prefetch() for each tile, the CTA's n-th, by a producer warpgroup; then wait
    until consumers have read its pipelines. One of several producers claims tiles."""
    roles.set_max_registers(schedule.config.registers_per_warpgroup, -1)
    if claims:
        arrays.scheduler.prime()

    def produce_tile(
        n: Scalar, work: Sequence[Scalar], position: PipelinePosition, prefetch: Callable
    ) -> tuple[PipelinePosition, Any]:
        """Return the pipelines' position after a tile, and what is known of the next one."""
        loads = TileLoads.of(QueryTile(schedule, *work), arrays, memory, position)
        next_work = load_tile(n, loads, prefetch)
        return loads.tile.advance(position), next_work

    for_each_tile(arrays.scheduler, produce_tile, PipelinePosition(I32(0), I32(0)), early=True)
    for pipeline in pipelines:
        pipeline.producer_tail()
    roles.sync_before_exit(memory.exit_barriers, exit_branch)


def produce(schedule: ForwardSchedule, arrays: Arrays, memory: SharedStorage) -> None:
    """Run the producer warpgroup: the loads of one tile after another."""

    def load_tile(n: Scalar, load: TileLoads, prefetch: Callable) -> Any:
        def load_block(t: Scalar, _: Any) -> None:
            load.claim_next(n, t)
            load.k(t)
            load.key_aux(t)
            load.v(t - 1)
            load.pairwise(t)  # of which there are fewer buffers: V does not wait for them

        load.claim_next(n, I32(0))
        load.k(I32(0))
        load.q(n)
        load.key_aux(I32(0))
        load.pairwise(I32(0))
        lax.fori_loop(I32(1), load.tile.compute_num_kv_blocks(), load_block, None)
        next_work = prefetch()  # the next tile's first keys wait for it
        load.v(load.tile.compute_num_kv_blocks() - 1)
        return next_work

    pipelines = [*memory.kv_pipelines]
    for g in range(schedule.config.warpgroups):
        pipelines += [memory.q_pipeline(g), *memory.pairwise_pipelines(g)]
    run_producer(schedule, arrays, memory, load_tile, pipelines)
