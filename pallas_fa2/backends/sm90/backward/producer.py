"""The producer warpgroup of the backward."""

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl

from pallas_fa2.backends.sm90.backward.roles import WarpgroupRole
from pallas_fa2.backends.sm90.backward.schedule import KvTile, Step
from pallas_fa2.backends.sm90.nonfinite import sanitized_rows
from pallas_fa2.backends.sm90.primitives import layouts
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.control_flow import when
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS


class Producer(WarpgroupRole):
    """Keys and values of one tile after another, and the queries that they meet."""

    def open(self) -> None:
        self.scheduler.prime()

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        tile.each_step(lambda step, _: self.load(step))
        return dq_row, look()

    def load(self, step: Step) -> None:
        self.claim_next(step)
        when(step.first)(lambda: self.load_keys(step.tile))
        self.load_queries(step)
        when(step.first)(lambda: self.load_values(step.tile))
        self.load_douts(step)
        self.load_pairs(step)

    def claim_next(self, step: Step) -> None:
        """The next tile, in the last step of one: not sooner, as another CTA may be free before."""
        self.scheduler.request_next(step.tile.k + 1, step.last)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        for ring in self.memory.pipelines:
            ring.producer_tail()

    def load_queries(self, step: Step) -> None:
        self._load_rows(self.memory.q_pipeline, step, self.inputs.q, self.inputs.lse)

    def load_douts(self, step: Step) -> None:
        self._load_rows(self.memory.dout_pipeline, step, self.inputs.dout, self.inputs.delta)

    def load_pairs(self, step: Step) -> None:
        (batch, head), first_key = step.head, self.first_row(step.tile)
        halves = [pl.ds(first_key + i * 64, 64) for i in range(2)]
        for piece in range(self.config.column_pieces if self.memory.pairwise else 0):
            queries = pl.ds(step.first_query + piece * PIECE_COLUMNS, PIECE_COLUMNS)
            for ring, source in zip(
                self.memory.pairwise_pipelines, self.schedule.spec.pairwise_inputs(), strict=True
            ):
                array = self.inputs.aux.pairwise[source.position]
                parts = [
                    layouts.index_broadcast(array, batch, head, queries, keys) for keys in halves
                ]
                ring.tma_load(step.global_step * self.config.column_pieces + piece, *parts)

    def load_keys(self, tile: KvTile) -> None:
        self._load_halves(self.memory.k_pipeline, tile, self.inputs.k)

    def load_values(self, tile: KvTile) -> None:
        self._load_halves(self.memory.v_pipeline, tile, self.inputs.v)

    def _load_rows(self, ring: Pipeline, step: Step, source: Any, row_data: Any) -> None:
        (batch, head), rows = step.head, pl.ds(step.first_query, self.config.block_q)
        every = [slice(None)] * (len(row_data.shape) - 3)
        ring.tma_load(
            step.global_step,
            sanitized_rows(source, batch, rows, head),
            row_data.at[(batch, head, *every, rows)],
        )

    def _load_halves(self, ring: Pipeline, tile: KvTile, source: Any) -> None:
        batch, kv_head = tile.coordinates[0], tile.kv_head
        half = self.config.kv_rows // 2
        parts = [pl.ds(self.first_row(tile) + i * half, half) for i in range(2)]
        ring.tma_load(
            tile.k, *(sanitized_rows(source, batch, x, kv_head, in_row_groups=True) for x in parts)
        )
