"""A CTA's split of a tile: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, with S, P and O transposed.

S^T = K Q^T and O^T = V^T P^T: the M of mma.sync, 16 for each of four warps, is keys or columns of V, and the few
queries of a tile are its N. Line numbers are the paper's. docs/design/decode.md explains the whole.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, rem
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.merge import TileVisit
from pallas_fa2.backends.common.decode.scores import ScoreTile
from pallas_fa2.backends.common.decode.softmax import OnlineSoftmax
from pallas_fa2.backends.common.primitives import layouts, thread_values
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm80.decode.loader import KvLoader, Loads
from pallas_fa2.backends.sm80.decode.memory import SharedStorage
from pallas_fa2.backends.sm80.primitives import async_copy, mma


class LoopState(NamedTuple):
    """What the loop over blocks carries."""

    softmax: OnlineSoftmax
    loads: Loads


@dataclasses.dataclass(frozen=True)
class Split:
    """The blocks of a tile that one CTA visits, which are consecutive, and the loads of that CTA."""

    visit: TileVisit[SharedStorage]
    loader: KvLoader
    q_slot: Scalar

    @property
    def cta(self) -> Cta[SharedStorage]:
        return self.visit.cta

    def attend(self, loads: Loads) -> LoopState:
        """Return O and the softmax of these blocks: lines 5 to 11."""
        softmax = OnlineSoftmax.start(self.cta.config.value_dim, self.cta.spec.columns)
        state = LoopState(softmax, loads)
        return lax.fori_loop(I32(0), self.visit.num_blocks, self.visit_block, state)

    def visit_block(self, i: Scalar, state: LoopState) -> LoopState:
        """Return the state after the split's i-th block: lines 7 to 10."""
        memory, config = self.cta.memory, self.cta.config
        step, stages = self.visit.step + i, config.stages
        slot = rem(step, stages)
        first_key = self.loader.line.load_first_key(self.visit.entry, self.visit.first_index + i)
        self.loader.wait()  # for K_j and Q; all warps have left the block before
        self.loader.load_values(step + (stages - 1), state.loads.values)
        tile = ScoreTile(self.cta, self.visit.entry, self.visit.tile.head, first_key)
        s = tile.mask(self.multiply_s(slot))
        attended = tile.attended_keys(s)
        p, softmax = state.softmax.update(s)
        memory.p.transpose((1, 0))[...] = plgpu.layout_cast(
            p.astype(memory.p.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        self.loader.wait()  # for V_j; P is there, and all warps have read K_j
        loads = self.loader.load_keys(step + stages, state.loads)

        def keep(kept: jax.Array) -> None:
            async_copy.zero_rows(memory.v.at[slot], kept)
            async_copy.sync_cta(1)

        tile.zero_missing_values(attended, keep)
        acc = self.multiply_pv(softmax.acc, slot)
        return LoopState(softmax._replace(acc=acc), loads)

    def multiply_s(self, slot: Scalar) -> jax.Array:
        """Return S^T = K Q^T of a block, float32 [64, columns]: line 8."""
        q, k = self.cta.memory.q.at[self.q_slot], self.cta.memory.k.at[slot]
        s = thread_values.zero_accumulator((64, self.cta.spec.columns))
        for columns in mma.panel_slices(k):
            right = mma.load_right(q.at[:, columns], transposed=True)
            s = plgpu.mma(s, mma.load_left(k.at[:, columns]), right)
        return s

    def multiply_pv(self, acc: jax.Array, slot: Scalar) -> jax.Array:
        """Return O^T + V^T P^T, float32 [Hv, columns]: line 10."""
        v, right = self.cta.memory.v.at[slot], mma.load_right(self.cta.memory.p, transposed=True)
        tiles = [
            plgpu.mma(
                acc[columns.start : columns.start + columns.size],
                mma.load_left(v.at[:, columns], transposed=True),
                right,
            )
            for columns in layouts.slices(acc.shape[0], 64)
        ]
        return lax.concatenate(tiles, 0)
