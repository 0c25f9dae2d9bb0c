"""What the consumer warpgroups of the backward share: a warpgroup owns 64 keys of a tile."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Scratch, Slice
from pallas_fa2.backends.sm90.backward.cta import WarpgroupRole
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.transposed_tile import TransposedTile
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.control_flow import rematerialize, when


class TransposedConsumer(WarpgroupRole):
    """A warpgroup whose tiles are transposed: 64 keys (rows) against the queries of a step (columns)."""

    @property
    def keys(self) -> Slice:
        """Return the keys of the CTA whose scores this warpgroup forms, or whose gradient it owns."""
        return pl.ds(0 if self.config.two_cta else self.warpgroup * 64, 64)

    def accumulator(self, columns: int) -> Scratch:
        return pipeline.accumulator(64, columns)

    def wait_for_kv(self, tile: KvTile) -> None:
        self.memory.k_pipeline.consumer_wait(tile.k)
        self.memory.v_pipeline.consumer_wait(tile.k)

    def compute_k(self, k: Scalar) -> Ref:
        """Compute where K of the CTA's k-th tile is."""
        return self.memory.k.at[rematerialize(self.memory.k_pipeline.stage(k))]

    def multiply_s(self, s_acc: Ref, q: Ref, tile: KvTile) -> None:
        """Issue S^T = K Q^T, line 10."""
        s_acc[...] = thread_values.zero_accumulator((64, self.config.block_q))
        plgpu.wgmma(s_acc, self.compute_k(tile.k).at[self.keys], q.transpose((1, 0)))

    def multiply_dp(self, dp_acc: Ref, dout: Ref) -> None:
        """Issue dP^T = V dO^T, line 13."""
        dp_acc[...] = thread_values.zero_accumulator((64, self.config.block_q))
        v = self.memory.v.at[rematerialize(I32(0))]
        plgpu.wgmma(dp_acc, v.at[self.keys], dout.transpose((1, 0)))

    def load_tile(self, step: Step) -> TransposedTile:
        """Load what scores and masks read of this warpgroup's keys."""
        return TransposedTile.load(self.cta, self.warpgroup, self.keys.start, step)

    def release_rows(self, index: Scalar, t: Scalar) -> None:
        """Release Q of a step, index 0, or dO."""
        self.memory.row_pipeline_to_release(index).consumer_release(t)

    def release_own_rows(self, step: Step) -> None:
        """Release Q, or dO, through whose last buffer of a tile this warpgroup stores: that one `store_gradients`
        releases."""
        when(jnp.logical_not(step.is_last()))(
            lambda: self.release_rows(self.warpgroup, step.global_step)
        )
