"""A CTA's split of a tile whose keys and values have 8 bits: the lines of `tile.py`, with operands that take
instructions.

What can be is done while a product runs: V becomes an operand beside S^T = K Q^T, and a load begins beside O^T = V^T
P^T. docs/decisions/0081-caches-of-8-bits.md says why.
"""

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
from pallas_fa2.backends.common.decode.softmax import OnlineSoftmax, ValueScales
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.sm90.decode import eight_bits, scales
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.backends.sm90.decode.query_operand import order_queries
from pallas_fa2.backends.sm90.decode.tile import Block, LoopState, Split
from pallas_fa2.backends.sm90.primitives import pipeline

# H + Hv up to which V becomes an operand while K is one: both hold a register for each four. With 512 (128 registers)
# a thread spills 16 bytes (ptxas 13.0, for an H200).
MAX_DIMS_OF_BOTH = 320


class Values(NamedTuple):
    """V of a block."""

    operand: jax.Array  # V^T, float16 [Hv, 64]
    scales: ValueScales


def attend(split: Split, cursor: KvCursor) -> LoopState:
    """Return O and the softmax of a split's blocks: lines 5 to 11."""
    spec, config = split.cta.spec, split.cta.config
    softmax = OnlineSoftmax.start(config.value_dim, spec.columns, has_scales=True)
    visit = functools.partial(visit_block, split, prepare_q(split))
    return lax.fori_loop(I32(0), split.visit.num_blocks, visit, LoopState(softmax, cursor))


def prepare_q(split: Split) -> jax.Array:
    """Make Q of the tile an operand, and return what its rows were divided by, [columns]."""
    memory = split.cta.memory
    dtype = memory.out.dtype  # that of queries, whose bits are in `memory.q`
    order_queries(memory.q.at[split.q_slot], memory.q_scale, dtype)
    plgpu.commit_smem()
    return plgpu.load(memory.q_scale, layout=layouts.COL_LAYOUT, optimized=False)


def visit_block(split: Split, q_scale: jax.Array, i: Scalar, state: LoopState) -> LoopState:
    """Return the state after the split's i-th block: lines 7 to 10."""
    memory, block = split.cta.memory, split.locate(i)
    plgpu.barrier_wait(memory.kv_full.at("k", block.slot))
    k_scale = scales.load(memory.k_scale.at[block.slot])

    def multiply_s(acc: Ref) -> tuple[jax.Array, Values | None]:
        k, q = eight_bits.load_keys(memory.k.at[block.slot]), memory.q.at[split.q_slot]
        plgpu.wgmma(acc, k, q.transpose((1, 0)))
        values = load_values(split.cta, block, None) if _loads_values_early(split.cta) else None
        return acc[...], values

    s, values = pl.run_scoped(multiply_s, pipeline.accumulator(64, split.cta.spec.columns))
    s = block.tile.mask(s * layouts.outer_product(k_scale, q_scale))
    if values is None:
        values = load_values(split.cta, block, block.tile.attended_keys(s))
    p, softmax = state.softmax.update(s, values.scales)
    split.commit_p(p)  # all warps meet here, and so have read K and V

    def multiply_pv(out: Ref) -> tuple[jax.Array, KvCursor]:
        out[...] = softmax.acc
        plgpu.wgmma(out, values.operand, memory.p.transpose((1, 0)))
        cursor = split.loader.refill(block.step + 1, split.num_steps, state.cursor)
        return out[...], cursor

    acc, cursor = pl.run_scoped(multiply_pv, pipeline.accumulator(*softmax.acc.shape))
    return LoopState(softmax._replace(acc=acc), cursor)


def _loads_values_early(cta: Cta[SharedStorage]) -> bool:
    """Return whether V is loaded before S^T is known: not if a mask of code says which keys are attended to."""
    spec, config = cta.spec, cta.config
    has_code = spec.mods is not None and spec.mods.mask is not None
    return not has_code and config.head_dim + config.value_dim <= MAX_DIMS_OF_BOTH


def load_values(cta: Cta[SharedStorage], block: Block, attended: jax.Array | None) -> Values:
    """Load V of a block, when it has arrived, with zeros for the keys that no query attends to."""
    memory, slot = cta.memory, block.slot
    plgpu.barrier_wait(memory.kv_full.at("v", slot))

    def keep(kept: jax.Array) -> None:
        eight_bits.zero_rows(memory.v.at[slot], jnp.where(kept, I32(1), I32(0)))
        plgpu.commit_smem()

    block.tile.zero_missing_values(attended, keep)
    operand = eight_bits.load_values(memory.v.at[slot])
    return Values(operand, load_value_scales(cta, block, attended))


def load_value_scales(
    cta: Cta[SharedStorage], block: Block, attended: jax.Array | None
) -> ValueScales:
    """Load the scales of V of a block. Those of keys that no query attends to may be anything, and become 0."""
    v_scale, tile = cta.memory.v_scale.at[block.slot], block.tile
    first, end = tile.key_range()
    if attended is None:
        key = layouts.index((64, 64), 0, tile.first_key)
        kept = (key >= first) & (key < end)
    else:
        kept = attended > -jnp.inf
    weights = jnp.where(kept, scales.load(v_scale), 0.0)
    exponent = scales.largest_exponent(v_scale, first - tile.first_key, end - tile.first_key)
    return ValueScales(weights, exponent)
