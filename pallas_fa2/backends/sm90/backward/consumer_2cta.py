"""The Hopper backward for H > 128: two CTAs share a block of keys and send each other dS."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import register_io, thread_values
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, DQ_TILE
from pallas_fa2.backends.sm90.backward.dq.ordered import (
    DeterministicSchedule,
    give_dq_turn,
    take_dq_turn,
)
from pallas_fa2.backends.sm90.backward.producer import Producer
from pallas_fa2.backends.sm90.backward.roles import TransposedConsumer
from pallas_fa2.backends.sm90.backward.schedule import KvTile, Step
from pallas_fa2.backends.sm90.backward.transposed_tile import concat_columns
from pallas_fa2.backends.sm90.nonfinite import sanitized_rows
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.control_flow import cond, when


class ScoreWarpgroup(TransposedConsumer, Producer):
    """P and dS of 64 keys, for the warpgroups that own the gradients.

    It also loads: the next Q behind P, the next dO behind dS. What it has read is released by those who
    wait for its P and dS.
    """

    def open(self) -> None:
        """It releases nothing."""
        when(lax.axis_index(CLUSTER_AXIS) == 0)(self.scheduler.prime)

    def claim_next(self, step: Step) -> None:
        """By one CTA for both."""
        in_time = step.last & (lax.axis_index(CLUSTER_AXIS) == 0)
        self.scheduler.request_next(step.tile.k + 1, in_time)

    def load_keys(self, tile: KvTile) -> None:
        """The CTA's, and those columns of the other's that meet its half of dQ."""
        batch, kv_head = tile.coordinates[0], tile.kv_head
        rank, columns = lax.axis_index(CLUSTER_AXIS), self.config.head_dim // 2
        mine, others = (pl.ds(tile.first_key + 64 * i, 64) for i in (rank, 1 - rank))
        rows = functools.partial(
            sanitized_rows, self.inputs.k, batch, head=kv_head, in_row_groups=True
        )
        half = pl.ds(columns * rank, columns)
        self.memory.k_pipeline.tma_load(tile.k, rows(rows=mine), rows(rows=others, columns=half))

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        first = Step(tile, tile.first_step, tile.first_row, masked=False)
        self.load_queries(first)
        self.load_keys(tile)
        self.load_values(tile)
        self.load_douts(first)
        self.wait_for_keys(tile)
        tile.each_step(self.step, apart=True)
        return dq_row, look()

    def step(self, step: Step, _: Any) -> None:
        self.claim_next(step)
        memory, t, square = self.memory, step.global_step, self.accumulator(self.config.block_q)
        (p_smem,), (ds_smem,) = memory.p_pipeline.buffers_at(t), memory.ds_pipeline.buffers_at(t)
        block = self.transposed_tile(
            step, *(ring.buffers_at(t)[1] for ring in memory.pipelines[:2])
        )
        pieces = block.column_pieces(self.panels[0])
        q, _ = memory.q_pipeline.consumer_wait(t)

        def load_next(load: Callable) -> None:
            when(jnp.logical_not(step.last))(lambda: load(step.next))

        def form_p(s_acc: Any) -> list[tuple[jax.Array, jax.Array]]:
            self.multiply_scores(s_acc, q, step.tile.k)
            scores = [piece.slice(s_acc[...]) for piece in pieces]
            return [
                (s, x.apply_dropout(x.probabilities(s)))
                for s, x in zip(scores, pieces, strict=True)
            ]

        found = pl.run_scoped(form_p, square)
        memory.p_pipeline.producer_acquire(t)
        memory.peer_copy.expect_tx(t)
        p_smem.at[0][...] = block.undropped(concat_columns([p for _, p in found])).astype(
            p_smem.dtype
        )
        load_next(self.load_queries)
        dout, _ = memory.dout_pipeline.consumer_wait(t)
        memory.p_pipeline.producer_commit(t)  # and with P, dO

        def form_ds(dp_acc: Any) -> jax.Array:
            self.multiply_dp(dp_acc, dout)
            each = zip(found, pieces, strict=True)
            parts = [piece.ds(p, s, piece.slice(dp_acc[...])) for (s, p), piece in each]
            block.accumulate_aux_grads([gathered for _, gathered in parts])
            return concat_columns([ds for ds, _ in parts])

        ds_smem.at[0][...] = pl.run_scoped(form_ds, square).astype(ds_smem.dtype)
        memory.ds_pipeline.producer_commit(t)
        memory.peer_copy.send(t, ds_smem.at[0], 1 - lax.axis_index(CLUSTER_AXIS))
        load_next(self.load_douts)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        Producer.close(self, steps, tiles, dq_row)
        self.memory.p_pipeline.producer_tail()


class GradientWarpgroup(TransposedConsumer):
    """A gradient of 64 keys, and some of the columns of dQ."""

    @property
    def columns_owned(self) -> int:
        raise NotImplementedError

    @property
    def left(self) -> Pipeline:
        """P^T or dS^T, that multiplies this warpgroup's own rows."""
        raise NotImplementedError

    def open(self) -> None:
        if self.warpgroup == 0:
            self.memory.peer_copy.init()
        for ring in (
            self.own_rows,
            self.memory.k_pipeline,
            self.memory.v_pipeline,
            self.memory.p_pipeline,
        ):
            ring.consumer_prime()

    def gradient(self, tile: KvTile) -> jax.Array:
        def accumulate(acc: Any) -> jax.Array:
            tile.each_step(functools.partial(self.step, acc), tile.first_row)
            return acc[...]

        self.wait_for_keys(tile)
        gradient = pl.run_scoped(accumulate, self.accumulator(self.columns_owned))
        self.add_dq(tile, tile.next_step - 1, tile.last_row)
        self.memory.k_pipeline.consumer_release(tile.k)
        self.memory.v_pipeline.consumer_release(tile.k)
        return gradient

    def step(self, acc: Any, step: Step, row_before: Any) -> Any:
        """The gradient of a step, and dQ of the step before: by then the other CTA's dS is there."""
        (left,), (right, _) = (
            self.left.consumer_wait(step.global_step),
            self.own_rows.buffers_at(step.global_step),
        )
        plgpu.wgmma(acc, left.at[0], right)

        def release(in_flight: int) -> None:
            plgpu.wgmma_wait(in_flight)
            self.release_own_rows(step)

        cond(
            step.first,
            lambda: release(0),
            lambda: self.add_dq(step.tile, step.global_step - 1, row_before, release),
        )
        return step.dq_block

    def add_dq(self, tile: KvTile, t: Any, row: Any, then: Any = None) -> None:
        """This warpgroup's part of dQ of step t: two products, and `then` while they are in flight."""
        rank = lax.axis_index(CLUSTER_AXIS)
        part, columns = 2 * rank + self.warpgroup, self.config.dq_half(rank, self.warpgroup)
        self.take_turn(Step(tile, t, row, masked=False), part)
        (ds,) = (
            self.memory.ds_pipeline.buffers_at(t)
            if self.warpgroup == 0
            else self.memory.ds_pipeline.consumer_wait(t)
        )
        ds_of_other = self.memory.peer_copy.wait(t)

        def products(dq_acc: Any) -> jax.Array:
            dq_acc[...] = thread_values.zero_accumulator((DQ_TILE, columns.size))
            k = self.keys_of(tile.k).at[:, columns]
            k_of_other = self.memory.peer_k.at[0, :, self.config.dq_half(0, self.warpgroup)]
            plgpu.wgmma(dq_acc, ds.at[0].transpose((1, 0)), k)
            plgpu.wgmma(dq_acc, ds_of_other.transpose((1, 0)), k_of_other)
            if then is not None:
                then(2)
            return dq_acc[...]

        dq = pl.run_scoped(products, self.accumulator(columns.size))
        plgpu.commit_smem()  # all warps are done with P and dS: one arrives for all
        self.memory.p_pipeline.consumer_release(t)
        numbers = self.config.dq_part_range(pl.ds(0, DQ_TILE), columns)
        register_io.add_fragments(self.outputs.dq.at[row, numbers], dq)
        self.give_turn(row, part)

    def take_turn(self, step: Step, part: Any) -> None:
        """Before a part of a step's dQ is added: it may be in any order."""

    def give_turn(self, row: Any, part: Any) -> None:
        """After it has been."""


class DkWarpgroup(GradientWarpgroup):
    @property
    def columns_owned(self) -> int:
        return self.config.head_dim

    @property
    def left(self) -> Pipeline:
        return self.memory.ds_pipeline

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        gradient, seen = self.gradient(tile), look()
        self.store(tile, (self.outputs.dk, gradient * self.scale))
        return dq_row, seen


class DvWarpgroup(GradientWarpgroup):
    @property
    def columns_owned(self) -> int:
        return self.config.value_dim

    @property
    def left(self) -> Pipeline:
        return self.memory.p_pipeline

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        gradient, seen = self.gradient(tile), look()
        self.store(tile, (self.outputs.dv, self.scaled(gradient)))
        return dq_row, seen


class InTurn(GradientWarpgroup):
    """Adds its part of dQ in one order.

    All warpgroups multiply here. But those of gradients wait for scores longer than a turn takes, and the
    parts of dQ are apart: each has turns of its own, which the warps that add it pass on themselves.
    """

    def take_turn(self, step: Step, part: Any) -> None:
        assert isinstance(self.schedule, DeterministicSchedule)
        take_dq_turn(self.outputs.turns.at[step.dq_block, part], self.schedule.dq_rank(step))

    def give_turn(self, row: Any, part: Any) -> None:
        give_dq_turn(self.outputs.turns.at[row, part])


class DeterministicDkWarpgroup(InTurn, DkWarpgroup):
    pass


class DeterministicDvWarpgroup(InTurn, DvWarpgroup):
    pass
