"""Loads of the backward by TMA: K and V of a tile, Q and dO of a step with lse and delta, and pairwise inputs."""

from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Ref
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS
from pallas_fa2.backends.sm90.backward.cta import Cta
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray, sanitized_rows
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS


class Loader(NamedTuple):
    """The loads that fill the pipelines of a CTA."""

    cta: Cta

    def load_q(self, step: Step) -> None:
        """Load Q and lse of a step."""
        inputs = self.cta.inputs
        self._load_rows(self.cta.memory.q_pipeline, step, inputs.q, inputs.lse)

    def load_dout(self, step: Step) -> None:
        """Load dO and delta of a step."""
        inputs = self.cta.inputs
        self._load_rows(self.cta.memory.dout_pipeline, step, inputs.dout, inputs.delta)

    def load_k(self, tile: KvTile) -> None:
        """Load K of a tile."""
        self._load_halves(self.cta.memory.k_pipeline, tile, self.cta.inputs.k)

    def load_v(self, tile: KvTile) -> None:
        """Load V of a tile."""
        self._load_halves(self.cta.memory.v_pipeline, tile, self.cta.inputs.v)

    def load_k_2cta(self, tile: KvTile) -> None:
        """Load the CTA's K of a tile, and those columns of the other CTA's K that meet this one's half of dQ."""
        batch, kv_head = tile.compute_coordinates()[0], tile.compute_kv_head()
        rank, columns = lax.axis_index(CLUSTER_AXIS), self.cta.config.head_dim // 2
        own, peer = (pl.ds(tile.compute_first_key() + 64 * i, 64) for i in (rank, 1 - rank))
        half, k = pl.ds(columns * rank, columns), self.cta.inputs.k
        self.cta.memory.k_pipeline.tma_load(
            tile.k,
            sanitized_rows(k, batch, own, kv_head, in_row_groups=True),
            sanitized_rows(k, batch, peer, kv_head, in_row_groups=True, columns=half),
        )

    def load_pairwise(self, step: Step) -> None:
        """Load the pairwise inputs of a step, a piece of its queries after another."""
        config, memory = self.cta.config, self.cta.memory
        (batch, head), first_key = step.compute_head(), self.cta.compute_first_key(step.tile)
        halves = [pl.ds(first_key + i * 64, 64) for i in range(2)]
        sources = self.cta.schedule.spec.pairwise_inputs()
        for piece in range(config.column_pieces if memory.pairwise else 0):
            queries = pl.ds(step.compute_first_query() + piece * PIECE_COLUMNS, PIECE_COLUMNS)
            for pipeline, source in zip(memory.pairwise_pipelines, sources, strict=True):
                array = self.cta.inputs.aux.pairwise[source.position]
                tiles = [
                    layouts.index_broadcast(array, batch, head, queries, keys) for keys in halves
                ]
                pipeline.tma_load(step.global_step * config.column_pieces + piece, *tiles)

    def _load_rows(
        self, pipeline: Pipeline, step: Step, source: SanitizedArray | Ref, row_data: Ref
    ) -> None:
        (batch, head), first = step.compute_head(), step.compute_first_query()
        rows = pl.ds(first, self.cta.config.block_q)
        fields = [slice(None)] * (len(row_data.shape) - 3)
        pipeline.tma_load(
            step.global_step,
            sanitized_rows(source, batch, rows, head),
            row_data.at[(batch, head, *fields, rows)],
        )

    def _load_halves(self, pipeline: Pipeline, tile: KvTile, source: SanitizedArray | Ref) -> None:
        batch, kv_head = tile.compute_coordinates()[0], tile.compute_kv_head()
        half = self.cta.config.kv_rows // 2
        rows = [pl.ds(self.cta.compute_first_key(tile) + i * half, half) for i in range(2)]
        pipeline.tma_load(
            tile.k, *(sanitized_rows(source, batch, x, kv_head, in_row_groups=True) for x in rows)
        )
