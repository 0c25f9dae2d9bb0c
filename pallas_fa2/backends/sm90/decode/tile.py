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

from pallas_fa2.arithmetic import I32, LOG2E, div, rem
from pallas_fa2.backends.common.primitives import gather_scatter, layouts, masking, votes
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, broadcast_rows
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.common.tile_mods import by_columns
from pallas_fa2.backends.sm90.decode import eight_bits, scales
from pallas_fa2.backends.sm90.decode.loader import KvCursor, KvLoader
from pallas_fa2.backends.sm90.decode.memory import Cta
from pallas_fa2.backends.sm90.decode.schedule import Entry
from pallas_fa2.backends.sm90.decode.softmax import OnlineSoftmax, ValueScales
from pallas_fa2.backends.sm90.decode.tile_inputs import TileMods
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.control_flow import when


class LoopState(NamedTuple):
    """What the loop over blocks carries."""

    softmax: OnlineSoftmax
    cursor: KvCursor


@dataclasses.dataclass(frozen=True)
class Split:
    """Consecutive blocks of a tile, which one CTA visits."""

    cta: Cta
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
        column = layouts.index((64, spec.columns), 1, 0)
        token, member = div(column, spec.padded_group), rem(column, spec.padded_group)
        row = (self.entry.first_query + token) * spec.kv_heads + self.head
        bits = gather_scatter.gather_elements(largest, row * spec.group + member, (1,))
        return eight_bits.query_scale(bits)

    def visit_block(
        self, i: Scalar, state: LoopState, *, q_scale: jax.Array | None = None
    ) -> LoopState:
        """Return the state after the split's i-th block: lines 7 to 10."""
        spec, memory, config = self.cta.spec, self.cta.memory, self.cta.config
        step = self.first_step + i
        slot = lax.rem(step, I32(config.stages))
        first_key = (self.entry.first_block + self.first_index + i) * config.block_kv
        plgpu.barrier_wait(memory.kv_full.at("k", slot))
        s, value_scales = self.multiply_s(slot, q_scale), None
        s = self.mask(s, first_key)
        attended = self.attended_keys(s)
        if spec.quantized is not None:
            plgpu.barrier_wait(memory.kv_full.at("v", slot))
            value_scales = self.load_value_scales(slot, first_key, attended)
        p, softmax = state.softmax.update(s, value_scales)
        memory.p.transpose((1, 0))[...] = plgpu.layout_cast(
            p.astype(memory.p.dtype), plgpu.Layout.WGMMA_TRANSPOSED
        )
        plgpu.commit_smem()  # all warps meet here, and so have left the block before
        cursor = self.loader.refill(step, self.num_steps, state.cursor)
        if spec.quantized is None:
            plgpu.barrier_wait(memory.kv_full.at("v", slot))
        self.zero_missing_values(slot, first_key, attended)
        return LoopState(softmax._replace(acc=self.multiply_pv(softmax.acc, slot)), cursor)

    def multiply_s(self, slot: Scalar, q_scale: jax.Array | None) -> jax.Array:
        """Return S^T = K Q^T of a block, float32 [64, columns]: line 8."""
        memory, k_scale = self.cta.memory, None
        if q_scale is not None:
            k_scale = scales.load(
                memory.k_scale.at[slot]
            )  # before the product, which it arrives beside

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

    def apply_mods(self, s: jax.Array, first_key: Scalar) -> jax.Array:
        """Return the scores of a block in base 2, by the score functions and under the mask that are code."""
        spec, arrays = self.cta.spec, self.cta.inputs.mods
        if spec.mods is None:
            return s * (spec.scale * LOG2E)
        tile = TileMods(spec, spec.mods, arrays, self.entry, self.head, first_key)
        if spec.mods.score is None:
            s = s * (spec.scale * LOG2E)
        else:
            score = functools.partial(spec.mods.score.evaluate, scale=spec.scale)
            s = by_columns(lambda piece, inputs: score(piece, inputs=inputs), s, tile.inputs_at)
        return s if spec.mods.mask is None else spec.mods.mask.apply(s, tile.inputs_at)

    def mask(self, s: jax.Array, first_key: Scalar) -> jax.Array:
        """Return the scores of a block in base 2, -inf where a query does not attend to a key."""
        spec, entry = self.cta.spec, self.entry
        s = self.apply_mods(s, first_key)
        key = layouts.index(s.shape, 0, first_key)
        # Bounds on the columns of each key: those on the keys of each column would hold more registers.
        distance = key - entry.first_position  # from the first query

        def first_column(token: jax.Array) -> jax.Array:
            return jnp.clip(token, 0, spec.q_len) * spec.padded_group

        first, (least, most) = I32(0), spec.distances
        if most is not None:
            first = first_column(distance - most)
        if spec.attends_past_its_own:
            first = jnp.where(key < entry.kv_len, first, spec.columns)
        s = masking.mask_before(s, first)
        if least is None:
            return s
        return masking.mask_after(s, first_column(distance - least + 1) - 1)

    def attended_keys(self, s: jax.Array) -> jax.Array | None:
        """Return the largest score of each key, [64], which is -inf if no query attends to it; None where bounds say so."""
        spec = self.cta.spec
        if spec.mods is None or spec.mods.mask is None:
            return None
        if spec.pads_columns:  # they are masked as some other query is
            column = layouts.index(s.shape, 1, 0)
            token, member = div(column, spec.padded_group), rem(column, spec.padded_group)
            is_query = (token < self.entry.num_queries) & (member < spec.group)
            is_query = layouts.broadcast_columns(jnp.where(is_query, 1, 0), s.shape) != 0
            s = jnp.where(is_query, s, -jnp.inf)
        return layouts.fold_octets(jnp.maximum, s).max(axis=1)

    def zero_missing_values(
        self, slot: Scalar, first_key: Scalar, attended: jax.Array | None
    ) -> None:
        """Set V to 0 where no query of the tile attends to a key: there may be NaN, and 0 times that is no 0."""
        config = self.cta.config
        if attended is not None:
            missing = votes.warpgroup_any_nonfinite(-attended, I32(0)) != 0
            when(missing)(lambda: self.zero_values(slot, attended > -jnp.inf))
            return
        first, end = self.key_range()
        key = layouts.index((64, 64), 0, first_key)
        is_partial = (first_key < first) | (first_key + config.block_kv > end)
        when(is_partial)(lambda: self.zero_values(slot, (key >= first) & (key < end)))

    def key_range(self) -> tuple[Scalar, Scalar]:
        """Return the first key that a query of the tile may attend to, and the end of those that exist."""
        first, least = I32(0), self.cta.spec.distances.least
        if least is not None:
            first = self.entry.first_position + least
        return first, self.entry.kv_len

    def load_value_scales(
        self, slot: Scalar, first_key: Scalar, attended: jax.Array | None
    ) -> ValueScales:
        """Load the scales of V of a block. Those of keys that no query attends to may be anything, and become 0."""
        v_scale, (first, end) = self.cta.memory.v_scale.at[slot], self.key_range()
        if attended is None:
            key = layouts.index((64, 64), 0, first_key)
            kept = (key >= first) & (key < end)
        else:
            kept = attended > -jnp.inf
        weights = jnp.where(kept, scales.load(v_scale), 0.0)
        exponent = scales.largest_exponent(v_scale, first - first_key, end - first_key)
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
