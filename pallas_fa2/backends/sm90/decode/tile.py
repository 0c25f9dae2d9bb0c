"""A CTA's split of a tile: FlashAttention-2 (arXiv:2307.08691), Algorithm 1, with S, P and O transposed.

S^T = K Q^T and O^T = V^T P^T: the M of WGMMA, 64, is keys or columns of V, and the few queries of a tile are its N. Line
numbers are the paper's. docs/design/decode.md explains the whole.
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
from pallas_fa2.backends.common.decode.columns import QueryColumns
from pallas_fa2.backends.common.decode.cursor import KvCursor
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.scores import ScoreTile
from pallas_fa2.backends.common.decode.softmax import OnlineSoftmax, ValueScales
from pallas_fa2.backends.common.primitives import gather_scatter, layouts
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, broadcast_rows
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.decode import eight_bits, scales
from pallas_fa2.backends.sm90.decode.loader import KvLoader
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.backends.sm90.primitives import pipeline


class LoopState(NamedTuple):
    """What the loop over blocks carries."""

    softmax: OnlineSoftmax
    cursor: KvCursor


@dataclasses.dataclass(frozen=True)
class Split:
    """Consecutive blocks of a tile, which one CTA visits."""

    cta: Cta[SharedStorage]
    loader: KvLoader
    entry: Entry
    head: Scalar  # of keys
    first_index: Scalar  # of its first block, among those that the tile visits
    first_step: Scalar  # how many blocks the CTA has visited before
    num_steps: Scalar  # how many it visits in all
    num_blocks: Scalar  # of the split
    q_slot: Scalar

    def attend(self, cursor: KvCursor) -> LoopState:
        """Return O and the softmax of these blocks: lines 5 to 11."""
        spec, config = self.cta.spec, self.cta.config
        softmax = OnlineSoftmax.start(config.value_dim, spec.columns, spec.quantized is not None)
        state = LoopState(softmax, cursor)
        visit = functools.partial(self.visit_block, q_scale=self.load_q_scale())
        return lax.fori_loop(I32(0), self.num_blocks, visit, state)

    def load_q_scale(self) -> jax.Array | None:
        """Load what the queries of the tile were divided by, where K has 8 bits, [columns]."""
        spec, largest = self.cta.spec, self.cta.inputs.q_largest
        if largest is None:
            return None
        index = QueryColumns.compute(spec).compute_index(spec, self.entry, self.head)
        bits = gather_scatter.gather_elements(largest, index, (1,))
        return eight_bits.query_scale(bits)

    def visit_block(
        self, i: Scalar, state: LoopState, *, q_scale: jax.Array | None = None
    ) -> LoopState:
        """Return the state after the split's i-th block: lines 7 to 10."""
        spec, memory, config = self.cta.spec, self.cta.memory, self.cta.config
        step = self.first_step + i
        slot = lax.rem(step, I32(config.stages))
        first_key = self.loader.line.load_first_key(self.entry, self.first_index + i)
        plgpu.barrier_wait(memory.kv_full.at("k", slot))
        tile, value_scales = ScoreTile(self.cta, self.entry, self.head, first_key), None
        s = tile.mask(self.multiply_s(slot, q_scale))
        attended = tile.attended_keys(s)
        if spec.quantized is not None:
            plgpu.barrier_wait(memory.kv_full.at("v", slot))
            value_scales = self.load_value_scales(slot, tile, attended)
        p, softmax = state.softmax.update(s, value_scales)
        memory.p.transpose((1, 0))[...] = plgpu.layout_cast(
            p.astype(memory.p.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()  # all warps meet here, and so have left the block before
        cursor = self.loader.refill(step, self.num_steps, state.cursor)
        if spec.quantized is None:
            plgpu.barrier_wait(memory.kv_full.at("v", slot))
        tile.zero_missing_values(attended, functools.partial(self.zero_values, slot))
        return LoopState(softmax._replace(acc=self.multiply_pv(softmax.acc, slot)), cursor)

    def multiply_s(self, slot: Scalar, q_scale: jax.Array | None) -> jax.Array:
        """Return S^T = K Q^T of a block, float32 [64, columns]: line 8."""
        memory, k_scale = self.cta.memory, None
        if q_scale is not None:
            # before the product, which it arrives beside
            k_scale = scales.load(memory.k_scale.at[slot])

        def multiply(acc: Ref) -> jax.Array:
            k = memory.k.at[slot]
            k = k if q_scale is None else eight_bits.load_keys(k)
            plgpu.wgmma(acc, k, memory.q.at[self.q_slot].transpose((1, 0)))
            return acc[...]

        s = pl.run_scoped(multiply, pipeline.accumulator(64, self.cta.spec.columns))
        if k_scale is None or q_scale is None:
            return s
        return s * layouts.outer_product(k_scale, q_scale)

    def multiply_pv(self, acc: jax.Array, slot: Scalar) -> jax.Array:
        """Return O^T + V^T P^T, float32 [Hv, columns]: line 10."""
        memory = self.cta.memory

        def multiply(out: Ref) -> jax.Array:
            out[...] = acc
            v = memory.v.at[slot]
            is_plain = self.cta.spec.quantized is None
            v = v.transpose((1, 0)) if is_plain else eight_bits.load_values(v)
            plgpu.wgmma(out, v, memory.p.transpose((1, 0)))
            return out[...]

        return pl.run_scoped(multiply, pipeline.accumulator(*acc.shape))

    def load_value_scales(
        self, slot: Scalar, tile: ScoreTile, attended: jax.Array | None
    ) -> ValueScales:
        """Load the scales of V of a block. Those of keys that no query attends to may be anything, and become 0."""
        v_scale, (first, end) = self.cta.memory.v_scale.at[slot], tile.key_range()
        if attended is None:
            key = layouts.index((64, 64), 0, tile.first_key)
            kept = (key >= first) & (key < end)
        else:
            kept = attended > -jnp.inf
        weights = jnp.where(kept, scales.load(v_scale), 0.0)
        exponent = scales.largest_exponent(v_scale, first - tile.first_key, end - tile.first_key)
        return ValueScales(weights, exponent)

    def zero_values(self, slot: Scalar, kept: jax.Array) -> None:
        """Set V of a block to 0 where a key is not kept, [64]."""
        if self.cta.spec.quantized is not None:
            eight_bits.zero_rows(self.cta.memory.v.at[slot], jnp.where(kept, I32(1), I32(0)))
            plgpu.commit_smem()
            return
        for columns in layouts.slices(self.cta.config.value_dim, 64):
            panel = self.cta.memory.v.at[slot, :, columns]
            v = plgpu.load(panel, layout=ACC_LAYOUT, optimized=False)
            panel[...] = jnp.where(broadcast_rows(kept, v.shape), v, jnp.zeros_like(v))
        plgpu.commit_smem()
