"""What the warpgroups of the Hopper backward share: their loads, scores and stores."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90 import mask_bits
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, QUERY_PANEL, BackwardConfig
from pallas_fa2.backends.sm90.backward.memory import Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule, KvTile, Step
from pallas_fa2.backends.sm90.backward.transposed_tile import TransposedTile, concat_columns
from pallas_fa2.backends.sm90.primitives import layouts, pipeline, thread_values
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.primitives.tile_ops import TILE_OPS
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.backends.sm90.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.control_flow import cond, when
from pallas_fa2.ir.tile_functions import AxisInputs


@dataclasses.dataclass(frozen=True)
class WarpgroupRole:
    """What a warpgroup does."""

    schedule: BackwardSchedule
    scheduler: StaticTileScheduler | DynamicTileScheduler
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage
    warpgroup: Any  # the warpgroup, known when traced unless its code serves another as well

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    def first_row(self, tile: KvTile) -> Any:
        """Of the block's keys, the CTA's first."""
        return tile.first_key + (64 * lax.axis_index(CLUSTER_AXIS) if self.config.two_cta else 0)

    def open(self) -> None:
        """Before the first tile."""

    def start(self, row: Any) -> Any:
        """What the first tile's `visit` gets, where `row` is that of no gradient."""
        return row

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> tuple[Any, Any]:
        """A tile. `dq_row` is where dQ of the step before goes; returns it for the last step, and
        look()."""
        raise NotImplementedError

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """After the last tile."""


class TransposedConsumer(WarpgroupRole):
    """One warpgroup's part of a block of keys, against all the queries that see the block.

    Its tiles are transposed: 64 keys (rows) by `block_q` queries (columns).
    """

    @property
    def shape(self) -> tuple[int, int]:
        return 64, self.config.block_q

    @property
    def keys(self) -> Any:
        """Of the CTA's keys, those whose scores this warpgroup forms or whose gradient it owns."""
        return pl.ds(0 if self.config.two_cta else self.warpgroup * 64, 64)

    @property
    def scale(self) -> float:
        return self.schedule.spec.scale

    def scaled(self, dv: jax.Array) -> jax.Array:
        """As if each probability had been, that dropout has left."""
        scale = self.schedule.spec.dropout_scale
        return dv if scale == 1.0 else dv * scale

    def accumulator(self, columns: int) -> Any:
        return pipeline.accumulator(64, columns)

    def open(self) -> None:
        for ring in self.memory.pipelines:
            ring.consumer_prime()

    def wait_for_keys(self, tile: KvTile) -> None:
        self.memory.k_pipeline.consumer_wait(tile.k)
        self.memory.v_pipeline.consumer_wait(tile.k)

    def keys_of(self, k: Any) -> Any:
        return self.memory.k.at[lax.optimization_barrier(self.memory.k_pipeline.stage(k))]

    @property
    def panels(self) -> list[Any]:
        """The queries of a block, so many at a time that their probabilities take 32 registers."""
        return layouts.slices(self.config.block_q, QUERY_PANEL)

    def multiply_scores(self, s_acc: Any, q: Any, k: Any) -> None:
        """S^T."""
        s_acc[...] = thread_values.zero_accumulator(self.shape)
        plgpu.wgmma(s_acc, self.keys_of(k).at[self.keys], q.transpose((1, 0)))

    def multiply_dp(self, dp_acc: Any, dout: Any) -> None:
        """dP^T."""
        dp_acc[...] = thread_values.zero_accumulator(self.shape)
        v = self.memory.v.at[lax.optimization_barrier(I32(0))]
        plgpu.wgmma(dp_acc, v.at[self.keys], dout.transpose((1, 0)))

    def transposed_tile(self, step: Step, lse: Any, delta: Any) -> TransposedTile:
        """The queries of a step. What is read of the keys is to be loaded a while before it is needed."""
        first_key = self.first_row(step.tile) + self.keys.start
        problem, keys, numbers = self.schedule.spec, AxisInputs(0), {}
        sources, indexed = (
            problem.token_inputs("k", step.masked),
            problem.reads_index("k", step.masked),
        )
        if sources or indexed:
            first = lax.optimization_barrier(first_key)
            data = self.inputs.aux.k.at[step.head[0], :, pl.ds(first, 64)]
            index = layouts.index((64, QUERY_PANEL), 0, first) if indexed else None
            keys = load_axis_inputs(TILE_OPS, 0, index, data, sources)
        if found := problem.head_inputs(step.masked):
            numbers = self.inputs.aux.head_scalars.load(*step.head, found)
        of_all = self.schedule, self.inputs.aux, self.outputs.scores
        rings, me, answers = (
            self.memory.pairwise_pipelines,
            self.warpgroup,
            self.load_mask_bits(step),
        )
        return TransposedTile(
            *of_all, step, first_key, keys, numbers, lse, delta, rings, me, answers
        )

    def load_mask_bits(self, step: Step) -> list[jax.Array]:
        """Of a mask that has been asked, of each panel of queries."""
        if not (step.masked and self.schedule.spec.uses_mask_bits):
            return []
        batch, _, row = step.tile.coordinates
        block = arithmetic.div(step.first_query, self.config.block_q)
        half = lax.axis_index(CLUSTER_AXIS) if self.config.two_cta else self.warpgroup
        return mask_bits.load_bits(self.inputs.mask_bits, batch, row, block, half)

    def p_and_ds(self, step: Step) -> list[tuple[jax.Array, jax.Array]]:
        """P^T and dS^T of a step, panel by panel, in the input dtype."""
        block = self.transposed_tile(
            step, *(ring.buffers_at(step.global_step)[1] for ring in self.memory.pipelines[:2])
        )
        q, _ = self.memory.q_pipeline.consumer_wait(step.global_step)
        dout, _ = self.memory.dout_pipeline.consumer_wait(step.global_step)

        def products(s_acc: Any, dp_acc: Any) -> list:
            self.multiply_scores(s_acc, q, step.tile.k)
            self.multiply_dp(dp_acc, dout)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            def of(panel: Any) -> tuple[jax.Array, jax.Array]:
                all_p, all_ds, gathered = [], [], []
                for piece in block.column_pieces(panel):
                    scores, piece = piece.slice(s), piece.with_pairwise()
                    p = piece.probabilities(scores)
                    piece.release_pairwise(p)
                    p = piece.apply_dropout(p)
                    ds, for_data = piece.ds(p, scores, piece.slice(dp_acc[...]))
                    all_p.append(piece.undropped(p).astype(dout.dtype))
                    all_ds.append(ds.astype(dout.dtype))
                    gathered.append(for_data)
                block.accumulate_aux_grads(gathered)
                return concat_columns(all_p), concat_columns(all_ds)

            return lax.optimization_barrier([of(panel) for panel in self.panels])

        square = self.accumulator(self.config.block_q)
        return pl.run_scoped(products, square, square)

    @property
    def own_rows(self) -> Pipeline:
        """Through whose last buffer of a tile this warpgroup stores: that of Q, or of dO."""
        return self.memory.row_pipelines[self.warpgroup]

    def release_rows(self, which: Any, t: Any) -> None:
        """Q's of a step, or dO's."""
        self.memory.row_pipeline_to_release(which).consumer_release(t)

    def release_own_rows(self, step: Step) -> None:
        """Of a tile's last step, `store` does, when it has used them."""
        when(jnp.logical_not(step.last))(
            lambda: self.release_rows(self.warpgroup, step.global_step)
        )

    def store(self, tile: KvTile, *gradients: tuple[list[Any], jax.Array]) -> None:
        """(dK or dV, of this warpgroup's keys), at the end of a tile: through the buffers of its last Q
        and dO, one a warpgroup."""
        batch, head, _ = tile.coordinates
        last_step = tile.next_step - 1
        rows = pl.ds(self.first_row(tile) + self.keys.start, 64)
        pipeline.arrive_and_wait(self.memory.tile_barrier)  # nobody reads Q and dO any more
        store = functools.partial(self._store, last_step, (batch, rows, head), gradients)
        if isinstance(self.warpgroup, int):
            store(self.own_rows)
        else:
            cond(
                self.warpgroup == 0,
                *(functools.partial(store, ring) for ring in self.memory.row_pipelines),
            )
        self.release_rows(self.warpgroup, last_step)

    def _store(self, last_step: Any, place_of: tuple, gradients: tuple, through: Pipeline) -> None:
        batch, rows, head = place_of
        buffer, _ = through.buffers_at(last_step)
        places = self.config.block_q // 64
        numbers = [x for targets, gradient in gradients for x in _numbers(targets, gradient)]
        for i, (target, number) in enumerate(numbers):
            place = buffer.at[pl.ds(64 * (i % places), 64)]
            if i and i % places == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # By panels, as dS: their addresses differ by constants, and hold fewer registers.
            for start in range(0, place.shape[1], QUERY_PANEL):
                panel = number(start)
                place.at[:, pl.ds(start, panel.shape[1])][...] = panel
            plgpu.commit_smem()
            HeadRows(target, batch, rows, head, in_row_groups=True).store(place)
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _numbers(targets: list[Any], gradient: jax.Array) -> list[tuple[Any, Callable]]:
    """For each target, its panel of columns from a start on: the gradient as rounded, and the rest."""

    def rounded(start: int) -> jax.Array:
        return gradient[:, start : start + QUERY_PANEL].astype(targets[0].dtype)

    def rest(start: int) -> jax.Array:
        # rounded once more: LLVM would keep what was rounded before in registers
        panel = lax.optimization_barrier(gradient[:, start : start + QUERY_PANEL])
        return (panel - panel.astype(targets[0].dtype).astype(jnp.float32)).astype(targets[0].dtype)

    return list(zip(targets, (rounded, rest), strict=False))
