"""A consumer warpgroup of the backward, up to H = 128: Algorithm 2 of FlashAttention-2 (arXiv:2307.08691).

The products are transposed, so that P^T and dS^T, keys x queries, are register operands of dV and dK. dS^T also passes
through shared memory, for dQ. Line numbers are those of Algorithm 2; docs/design/backward.md explains the whole.
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

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Scratch
from pallas_fa2.backends.sm90.backward.config import DQ_TILE, QUERY_PANEL
from pallas_fa2.backends.sm90.backward.dq.strategy import DqConsumer
from pallas_fa2.backends.sm90.backward.epilogue import Gradient, scaled, store_gradients
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.transposed_consumer import TransposedConsumer
from pallas_fa2.control_flow import when


class PendingDq(NamedTuple):
    """dQ of the step before, which is still to be formed."""

    t: Scalar  # that step, and so its stage of dS
    k: Scalar  # the tile of the CTA that it belongs to, and so its stage of K
    destination: Any  # that of `DqConsumer`


@dataclasses.dataclass(frozen=True)
class Consumer(TransposedConsumer):
    """A warpgroup that owns dK and dV of 64 keys, and forms half of each step's dQ.

    dQ lags by one step: that of step t is formed in step t + 1, beside dV and dK, also where that one is of the next
    tile. By then dS of the other warpgroup is there. Loops carry the destination of the pending dQ.

    Nothing is in flight when P and dS become operands, as ptxas serializes all products if registers that one reads
    change while another is in flight.
    """

    dq: DqConsumer

    def open(self) -> Any:
        self.dq.init()
        for pipeline in self.memory.pipelines:
            pipeline.consumer_prime()
        plgpu.barrier_arrive(self.memory.ds_ready)  # as if there were a step before the first
        return self.dq.open()

    def visit(self, tile: KvTile, state: Any, prefetch: Callable) -> tuple[Any, Any]:
        """Run lines 6 to 18 for a tile. The state is the destination of the pending dQ."""

        def accumulate(dk_acc: Ref, dv_acc: Ref) -> tuple[jax.Array, jax.Array, Any]:
            step = functools.partial(self.step, dk_acc, dv_acc)
            pending = tile.each_step(step, state, by_class=True)  # lines 8 to 17
            return dk_acc[...], dv_acc[...], pending

        self.wait_for_kv(tile)  # line 6
        dims = self.config.head_dim, self.config.value_dim
        dk, dv, state = pl.run_scoped(accumulate, *(self.accumulator(dim) for dim in dims))
        self.memory.v_pipeline.consumer_release(tile.k)
        entry = prefetch()
        spec, outputs = self.cta.schedule.spec, self.cta.outputs
        dv = Gradient(outputs.dv, scaled(dv, spec.dropout_scale))
        store_gradients(self, tile, dv, Gradient(outputs.dk, dk * spec.scale))  # line 18
        return state, entry

    def step(self, dk_acc: Ref, dv_acc: Ref, step: Step, destination: Any) -> Any:
        """Run lines 9 to 16 for a query block, of which line 15, dQ, for the step before.

        `destination` is that of the step before. Return this step's.
        """
        memory, t, k = self.memory, step.global_step, step.tile.k
        begun = self.dq.begin(step)
        panels = list(zip(self.config.panels, self.compute_p_and_ds(step), strict=True))
        (q, _), (dout, _) = memory.q_pipeline.buffers_at(t), memory.dout_pipeline.buffers_at(t)
        plgpu.barrier_wait(memory.ds_ready)  # of step t - 1
        for i, (_, (_, ds)) in enumerate(panels):
            self.compute_ds_stage(t).at[i, self.keys][...] = ds

        def multiply(dq_acc: Ref) -> None:
            pending = PendingDq(t - 1, jnp.where(step.is_first(), k - 1, k), destination)
            self.multiply_dq(dq_acc, pending)  # line 15 of step t - 1
            for queries, (p, ds) in panels:
                plgpu.wgmma(dv_acc, p, dout.at[queries])  # line 12
                plgpu.wgmma(dk_acc, ds, q.at[queries])  # line 16
            plgpu.commit_smem()
            self.dq.publish(t, begun)
            plgpu.barrier_arrive(memory.ds_ready)  # of step t
            self.add_dq(dq_acc, pending, in_flight=2 * len(panels))
            plgpu.wgmma_wait(0)

        pl.run_scoped(multiply, self.dq_accumulator())
        when(step.is_first() & (t > 0))(lambda: memory.k_pipeline.consumer_release(k - 1))
        self.release_rows(1 - self.warpgroup, t)
        self.release_own_rows(step)
        return self.dq.compute_destination(step)

    def compute_p_and_ds(self, step: Step) -> list[tuple[jax.Array, jax.Array]]:
        """Return P^T and dS^T of a step, `[64, 64]` in the input dtype of each panel of queries: lines 9 to 14."""
        tile = self.load_tile(step)
        q, _ = self.memory.q_pipeline.consumer_wait(step.global_step)
        dout, _ = self.memory.dout_pipeline.consumer_wait(step.global_step)

        def multiply(s_acc: Ref, dp_acc: Ref) -> list[tuple[jax.Array, jax.Array]]:
            self.multiply_s(s_acc, q, step.tile)  # line 10
            self.multiply_dp(dp_acc, dout)  # line 13
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            # lines 11 and 14
            panels = [tile.compute_p_and_ds(x, s, dp_acc, dout.dtype) for x in self.config.panels]
            return lax.optimization_barrier(panels)

        scores = self.accumulator(self.config.block_q)
        return pl.run_scoped(multiply, scores, scores)

    def close(self, steps: Scalar, tiles: Scalar, state: Any) -> None:
        """Run line 15 for the last step."""
        plgpu.barrier_wait(self.memory.ds_ready)

        def multiply(dq_acc: Ref) -> None:
            pending = PendingDq(steps - 1, tiles - 1, state)
            self.multiply_dq(dq_acc, pending)
            self.add_dq(dq_acc, pending, in_flight=0)

        pl.run_scoped(multiply, self.dq_accumulator())
        when(tiles > 0)(lambda: self.memory.k_pipeline.consumer_release(tiles - 1))

    def compute_ds_stage(self, t: Scalar) -> Ref:
        """Compute where dS of step t is; there is one before the first, whose dQ is no gradient."""
        stages = self.config.ds_stages
        return self.memory.ds.at[lax.rem(t + stages, I32(stages))]

    def dq_accumulator(self) -> Scratch:
        return self.accumulator(self.dq.compute_tile().num_columns)

    def multiply_dq(self, dq_acc: Ref, pending: PendingDq) -> None:
        """Issue this warpgroup's tile of dQ = dS K, line 15."""
        tile = self.dq.compute_tile()
        ds = self.compute_ds_stage(pending.t).at[tile.rows.start // QUERY_PANEL]
        dq_acc[...] = thread_values.zero_accumulator((DQ_TILE, tile.num_columns))
        k = self.compute_k(jnp.maximum(pending.k, 0)).at[:, tile.columns]
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), k)

    def add_dq(self, dq_acc: Ref, pending: PendingDq, in_flight: int) -> None:
        """Add the tile of dQ, once its product is done but so many behind it may be in flight."""
        load = functools.partial(plgpu.wgmma_accumulator_load, dq_acc, wait_n=in_flight)
        self.dq.add(pending.t, pending.destination, load)
