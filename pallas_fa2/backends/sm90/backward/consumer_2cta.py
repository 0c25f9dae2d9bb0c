"""The warpgroups of the backward for H > 128: two CTAs share a block of keys, and send each other dS.

dK and dV of 64 keys alone take up to half of the register file. So a warpgroup owns one gradient each, and a third one,
which also loads, forms the scores for both. Line numbers are those of Algorithm 2 of FlashAttention-2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.backward import epilogue
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, DQ_TILE
from pallas_fa2.backends.sm90.backward.cta import Cta
from pallas_fa2.backends.sm90.backward.dq.strategy import DqConsumer
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.loader import Loader
from pallas_fa2.backends.sm90.backward.transposed_consumer import TransposedConsumer
from pallas_fa2.backends.sm90.backward.transposed_tile import concat_columns
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.control_flow import cond, when


class ScoreWarpgroup(TransposedConsumer):
    """The warpgroup that loads, and forms P and dS of 64 keys for the owners of gradients.

    The next Q is loaded behind P, the next dO behind dS. What it has read is released by those who wait for its P and
    dS.
    """

    @property
    def loader(self) -> Loader:
        return Loader(self.cta)

    def open(self) -> None:
        when(lax.axis_index(CLUSTER_AXIS) == 0)(self.cta.scheduler.prime)

    def visit(self, tile: KvTile, state: None, prefetch: Callable) -> tuple[None, Any]:
        first = Step(tile, tile.first_step, tile.compute_first_dq_block(), masked=False)
        self.loader.load_q(first)
        self.loader.load_k_2cta(tile)
        self.loader.load_v(tile)
        self.loader.load_dout(first)
        self.wait_for_kv(tile)
        tile.each_step(self.step, by_class=True)
        return None, prefetch()

    def step(self, step: Step, _: None) -> None:
        """Run lines 9 to 14 for a query block."""
        # One CTA claims the next tile for both.
        in_time = step.is_last() & (lax.axis_index(CLUSTER_AXIS) == 0)
        self.cta.scheduler.request_next(step.tile.k + 1, in_time)
        memory, t, scores = self.memory, step.global_step, self.accumulator(self.config.block_q)
        (p_smem,), (ds_smem,) = memory.p_pipeline.buffers_at(t), memory.ds_pipeline.buffers_at(t)
        tile = self.load_tile(step)
        pieces = tile.split_panel(self.config.panels[0])
        q, _ = memory.q_pipeline.consumer_wait(t)

        def load_next(load: Callable) -> None:
            when(jnp.logical_not(step.is_last()))(lambda: load(step.compute_next()))

        def form_p(s_acc: Ref) -> list[tuple[jax.Array, jax.Array]]:
            self.multiply_s(s_acc, q, step.tile)  # line 10
            s = [piece.slice(s_acc[...]) for piece in pieces]
            each = zip(s, pieces, strict=True)
            return [(x, piece.apply_dropout(piece.compute_p(x))) for x, piece in each]  # line 11

        s_and_p = pl.run_scoped(form_p, scores)
        memory.p_pipeline.producer_acquire(t)
        memory.peer_copy.expect_tx(t)
        p = tile.zero_dropped(concat_columns([p for _, p in s_and_p]))
        p_smem.at[0][...] = p.astype(p_smem.dtype)
        load_next(self.loader.load_q)
        dout, _ = memory.dout_pipeline.consumer_wait(t)
        memory.p_pipeline.producer_commit(t)  # and with P, dO

        def form_ds(dp_acc: Ref) -> jax.Array:
            self.multiply_dp(dp_acc, dout)  # line 13
            each = zip(s_and_p, pieces, strict=True)
            tiles = [piece.compute_ds(p, s, piece.slice(dp_acc[...])) for (s, p), piece in each]
            tile.aux_grads.add_row_sums([row_sums for _, row_sums in tiles])
            return concat_columns([ds for ds, _ in tiles])  # line 14

        ds_smem.at[0][...] = pl.run_scoped(form_ds, scores).astype(ds_smem.dtype)
        memory.ds_pipeline.producer_commit(t)
        memory.peer_copy.send(t, ds_smem.at[0], 1 - lax.axis_index(CLUSTER_AXIS))
        load_next(self.loader.load_dout)

    def close(self, steps: Scalar, tiles: Scalar, state: None) -> None:
        for pipeline in (*self.memory.pipelines, self.memory.p_pipeline):
            pipeline.producer_tail()


class OwnedGradient(NamedTuple):
    """A gradient, dK = dS^T Q or dV = P^T dO, by its factors and the arrays of its terms."""

    targets: list[Ref]
    columns: int
    scale: float
    left: Pipeline  # of dS^T or P^T
    right: Pipeline  # of Q or dO
    multiplies_ds: bool

    @classmethod
    def dk(cls, cta: Cta) -> "OwnedGradient":
        memory, scale = cta.memory, cta.schedule.spec.scale
        factors = memory.ds_pipeline, memory.q_pipeline
        return cls(cta.outputs.dk, cta.config.head_dim, scale, *factors, multiplies_ds=True)

    @classmethod
    def dv(cls, cta: Cta) -> "OwnedGradient":
        memory, scale = cta.memory, cta.schedule.spec.dropout_scale
        factors = memory.p_pipeline, memory.dout_pipeline
        return cls(cta.outputs.dv, cta.config.value_dim, scale, *factors, multiplies_ds=False)


@dataclasses.dataclass(frozen=True)
class GradientWarpgroup(TransposedConsumer):
    """A warpgroup that owns dK or dV of 64 keys, and forms some columns of dQ over the keys of both CTAs.

    dQ lags by one step, within a tile: by then the other CTA's dS is there.
    """

    gradient: OwnedGradient
    dq: DqConsumer

    def open(self) -> Any:
        memory = self.memory
        if self.warpgroup == 0:
            memory.peer_copy.init()
        kv_pipelines = memory.k_pipeline, memory.v_pipeline
        for pipeline in (self.gradient.right, *kv_pipelines, memory.p_pipeline):
            pipeline.consumer_prime()
        return self.dq.open()

    def visit(self, tile: KvTile, state: Any, prefetch: Callable) -> tuple[Any, Any]:
        """Run lines 12 or 16, 15 and 18 for a tile."""

        def accumulate(acc: Ref) -> jax.Array:
            tile.each_step(functools.partial(self.step, acc), tile.compute_first_dq_block())
            return acc[...]

        self.wait_for_kv(tile)
        value = pl.run_scoped(accumulate, self.accumulator(self.gradient.columns))
        self.add_dq(tile, tile.compute_next_step() - 1, tile.compute_last_dq_block())
        self.memory.k_pipeline.consumer_release(tile.k)
        self.memory.v_pipeline.consumer_release(tile.k)
        entry = prefetch()
        value = epilogue.scaled(value, self.gradient.scale)
        epilogue.store_gradients(self, tile, epilogue.Gradient(self.gradient.targets, value))
        return state, entry

    def step(self, acc: Ref, step: Step, dq_block_before: Scalar) -> Scalar:
        """Run line 12 or 16 for a query block, and line 15 for the step before."""
        t = step.global_step
        (left,), (right, _) = (
            self.gradient.left.consumer_wait(t),
            self.gradient.right.buffers_at(t),
        )
        plgpu.wgmma(acc, left.at[0], right)

        def release(in_flight: int) -> None:
            plgpu.wgmma_wait(in_flight)
            self.release_own_rows(step)

        cond(
            step.is_first(),
            lambda: release(0),
            lambda: self.add_dq(step.tile, t - 1, dq_block_before, release),
        )
        return step.dq_block

    def add_dq(
        self, tile: KvTile, t: Scalar, dq_block: Scalar, during: Callable[[int], None] | None = None
    ) -> None:
        """Add this warpgroup's columns of dQ = dS K of step t, line 15: two products, and `during` while they are in
        flight."""
        memory, dq_tile = self.memory, self.dq.compute_tile()
        assert memory.two_cta is not None and isinstance(self.warpgroup, int)
        peer_k = memory.two_cta.peer_k.at[0, :, self.config.dq_tile_2cta(0, self.warpgroup).columns]
        self.dq.begin(Step(tile, t, dq_block, masked=False))
        # The owner of dK has waited for dS already.
        ds_pipeline, waited = memory.ds_pipeline, self.gradient.multiplies_ds
        (ds,) = ds_pipeline.buffers_at(t) if waited else ds_pipeline.consumer_wait(t)
        peer_ds = memory.peer_copy.wait(t)

        def multiply(dq_acc: Ref) -> jax.Array:
            dq_acc[...] = thread_values.zero_accumulator((DQ_TILE, dq_tile.num_columns))
            k = self.compute_k(tile.k).at[:, dq_tile.columns]
            plgpu.wgmma(dq_acc, ds.at[0].transpose((1, 0)), k)
            plgpu.wgmma(dq_acc, peer_ds.transpose((1, 0)), peer_k)
            if during is not None:
                during(2)
            return dq_acc[...]

        dq = pl.run_scoped(multiply, self.accumulator(dq_tile.num_columns))
        plgpu.commit_smem()  # all warps are done with P and dS: one arrives for all
        memory.p_pipeline.consumer_release(t)
        self.dq.add(t, dq_block, lambda: dq)
