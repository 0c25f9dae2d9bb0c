"""A CTA's split of a tile: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, with S, P and O transposed.

S^T = K Q^T and O^T = V^T P^T: the M of WGMMA, 64, is keys or columns of V, and the few queries of a tile are its N.
Line numbers are the paper's. docs/design/decode.md explains the whole.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.cursor import KvCursor
from pallas_fa2.backends.common.decode.merge import TileVisit
from pallas_fa2.backends.common.decode.scores import ScoreTile
from pallas_fa2.backends.common.decode.softmax import OnlineSoftmax
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, broadcast_rows
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.decode.loader import KvLoader
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.backends.sm90.primitives import pipeline


class LoopState(NamedTuple):
    """What the loop over blocks carries."""

    softmax: OnlineSoftmax
    cursor: KvCursor


class Block(NamedTuple):
    """A block that a split visits."""

    step: Scalar  # how many its CTA has visited before
    slot: Scalar  # of the ring
    tile: ScoreTile


@dataclasses.dataclass(frozen=True)
class Split:
    """The blocks of a tile that one CTA visits, which are consecutive, and the loads of that CTA."""

    visit: TileVisit[SharedStorage]
    loader: KvLoader
    num_steps: Scalar  # how many blocks the CTA visits in all
    q_slot: Scalar

    @property
    def cta(self) -> Cta[SharedStorage]:
        return self.visit.cta

    def attend(self, cursor: KvCursor) -> LoopState:
        """Return O and the softmax of these blocks: lines 5 to 11."""
        softmax = OnlineSoftmax.start(self.cta.config.value_dim, self.cta.spec.columns)
        state = LoopState(softmax, cursor)
        return lax.fori_loop(I32(0), self.visit.num_blocks, self.visit_block, state)

    def locate(self, i: Scalar) -> Block:
        """Return the split's i-th block."""
        step = self.visit.step + i
        slot = lax.rem(step, I32(self.cta.config.stages))
        visit = self.visit
        first_key = self.loader.line.load_first_key(visit.entry, visit.first_index + i)
        return Block(step, slot, ScoreTile(self.cta, visit.entry, visit.tile.head, first_key))

    def visit_block(self, i: Scalar, state: LoopState) -> LoopState:
        """Return the state after the split's i-th block: lines 7 to 10."""
        memory, (step, slot, tile) = self.cta.memory, self.locate(i)
        plgpu.barrier_wait(memory.kv_full.at("k", slot))
        s = tile.mask(self.multiply_s(slot))
        attended = tile.attended_keys(s)
        p, softmax = state.softmax.update(s)
        self.commit_p(p)  # all warps meet here, and so have left the block before
        cursor = self.loader.refill(step, self.num_steps, state.cursor)
        plgpu.barrier_wait(memory.kv_full.at("v", slot))
        tile.zero_missing_values(attended, functools.partial(self.zero_values, slot))
        return LoopState(softmax._replace(acc=self.multiply_pv(softmax.acc, slot)), cursor)

    def multiply_s(self, slot: Scalar) -> jax.Array:
        """Return S^T = K Q^T of a block, float32 [64, columns]: line 8."""
        memory = self.cta.memory

        def multiply(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, memory.k.at[slot], memory.q.at[self.q_slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, pipeline.accumulator(64, self.cta.spec.columns))

    def commit_p(self, p: jax.Array) -> None:
        """Store P^T to shared memory, where products read it when all warps have."""
        target = self.cta.memory.p
        target.transpose((1, 0))[...] = plgpu.layout_cast(
            p.astype(target.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()

    def multiply_pv(self, acc: jax.Array, slot: Scalar) -> jax.Array:
        """Return O^T + V^T P^T, float32 [Hv, columns]: line 10."""
        memory = self.cta.memory

        def multiply(out: Ref) -> jax.Array:
            out[...] = acc
            plgpu.wgmma(out, memory.v.at[slot].transpose((1, 0)), memory.p.transpose((1, 0)))
            return out[...]

        return pl.run_scoped(multiply, pipeline.accumulator(*acc.shape))

    def zero_values(self, slot: Scalar, kept: jax.Array) -> None:
        """Set V of a block to 0 where a key is not kept, [64]."""
        for columns in layouts.slices(self.cta.config.value_dim, 64):
            panel = self.cta.memory.v.at[slot, :, columns]
            v = plgpu.load(panel, layout=ACC_LAYOUT, optimized=False)
            panel[...] = jnp.where(broadcast_rows(kept, v.shape), v, jnp.zeros_like(v))
        plgpu.commit_smem()
