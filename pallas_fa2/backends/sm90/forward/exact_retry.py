"""The forward of 64 rows once more, with true maxima and without values that are not finite.

It seldom runs: for scores that rise by 120 or more in base 2 within a block, and where V has infinities or NaN
(docs/decisions/0004-lagging-reference.md, 0060-nonfinite-forward.md).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.swizzle import swizzle_columns
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.backends.sm90 import nonfinite
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.forward.memory import KeysOrValues
from pallas_fa2.backends.sm90.forward.rows import WarpgroupRows
from pallas_fa2.backends.sm90.forward.score_mask import ScoreMask, load_mask_bits
from pallas_fa2.backends.sm90.forward.softmax import exponentials, no_key_threshold
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import cond


def recompute_exact(rows: WarpgroupRows, columns: Slice) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return some columns of O, unnormalized, and the references and sums of 64 rows, `[64]` each.

    Algorithm 1 step by step, with one buffer for K and V, which is that of the output. Values that are not finite
    become 0 and their keys NaN: scores of such a pair are, and with them the output, unless the mask hides them.
    """
    config, memory = rows.config, rows.memory
    steps_per_block = config.block_kv // config.retry_block_kv
    num_rows = layouts.ROWS_PER_WARPGROUP

    def step(t: Scalar, state: tuple) -> tuple:
        acc, reference, row_sum = state
        t_block = arithmetic.div(t, steps_per_block)
        fragment = arithmetic.rem(t, steps_per_block)
        block = rows.load_kv_block_index(t_block)
        first_key = block * config.block_kv + fragment * config.retry_block_kv
        accumulator = pipeline.accumulator(num_rows, config.retry_block_kv)
        nonfinite_keys = _find_nonfinite_keys(rows, first_key)
        s = pl.run_scoped(
            lambda s_acc: _scores(rows, s_acc, first_key, nonfinite_keys), accumulator
        )
        score_mask = ScoreMask.load_for_retry(rows, t_block, first_key)
        s, scale = score_mask.apply_score(s)

        def mask() -> jax.Array:
            return score_mask.apply_mask(s, load_mask_bits(rows, block, [fragment]))

        if rows.spec.uses_mask_bits:  # a full block has none
            s = cond(rows.tile.is_partial(t_block), mask, lambda: s)
        elif rows.schedule.has_partial_blocks:
            s = mask()
        maximum = jnp.maximum(reference, s.max(axis=1) * scale)  # line 9
        factor, p = jnp.exp2(reference - maximum), exponentials(s, scale, maximum)
        p_sum = p.sum(axis=1)
        p = score_mask.apply_dropout(p, pl.ds(0, config.retry_block_kv))
        v = _load_sanitized(rows, "v", first_key, columns, nonfinite_keys, 0.0)

        def update(o_acc: Ref) -> jax.Array:
            o_acc[...] = acc * layouts.broadcast_rows(factor, acc.shape)
            plgpu.wgmma(o_acc, p.astype(rows.q.dtype), v)  # line 10
            return o_acc[...]

        acc = pl.run_scoped(update, pipeline.accumulator(*acc.shape))
        return acc, maximum, row_sum * factor + p_sum

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output stored before has left the buffer
    state = (
        layouts.splat_constant(0.0, (num_rows, config.out_columns), ACC_LAYOUT),
        layouts.splat_constant(no_key_threshold(rows.spec), (num_rows,), ROW_LAYOUT),
        layouts.splat_constant(0.0, (num_rows,), ROW_LAYOUT),
    )
    num_steps = rows.tile.compute_num_kv_blocks() * steps_per_block
    state = lax.fori_loop(I32(0), num_steps, step, state)
    pipeline.arrive_and_wait(memory.full.at("retry_sync", rows.compute_warpgroup()))
    return state


def _scores(rows: WarpgroupRows, s_acc: Ref, first_key: Scalar, nonfinite_keys: Any) -> jax.Array:
    """Return S of some keys (line 8); NaN for those of which values are not finite."""
    k, config = rows.arrays.inputs.k, rows.config
    for columns in HeadRows.existing_columns(k, config.retry_k_tiles):
        tile = _load_sanitized(rows, "k", first_key, columns, nonfinite_keys, math.nan)
        q = rows.compute_q()
        q = q if columns.size == config.head_dim else q.at[:, columns]
        plgpu.wgmma(s_acc, q, tile.transpose((1, 0)))
        plgpu.wgmma_wait(0)
    return s_acc[...]


def _load(rows: WarpgroupRows, name: KeysOrValues, first_key: Scalar, columns: Slice) -> Ref:
    """Load 64 rows of K or V into the buffer of the output, once all of the warpgroup have left it."""
    memory = rows.memory
    batch, kv_head = rows.arrays.load_batch(rows.tile), rows.tile.compute_kv_head()
    buffer = memory.out.at[rows.compute_warpgroup()]
    loaded = memory.full.offset("retry_loaded") + rows.compute_warpgroup()
    pipeline.arrive_and_wait(memory.full.at("retry_sync", rows.compute_warpgroup()))
    keys = pl.ds(first_key, buffer.shape[0])
    source = rows.arrays.kv_rows(name, rows.tile, batch, keys, kv_head, columns)
    if isinstance(source, EightBitRows):
        source.fetch(swizzle_columns(buffer)).store(buffer)
        plgpu.commit_smem()  # all warps of the warpgroup meet here
        return buffer
    source.load(buffer, memory.full.array, loaded)
    plgpu.barrier_wait(memory.full.array.at[loaded])
    return buffer


def _load_sanitized(
    rows: WarpgroupRows,
    name: KeysOrValues,
    first_key: Scalar,
    columns: Slice,
    nonfinite_keys: jax.Array | None,
    value: float,
) -> Ref:
    """Load the keys of one step, with another value in the rows of `nonfinite_keys`."""
    buffer = _load(rows, name, first_key, columns)
    if nonfinite_keys is not None:
        nonfinite.overwrite_rows(buffer, nonfinite_keys, value)
        plgpu.commit_smem()
    return buffer.at[pl.ds(0, rows.config.retry_block_kv)]


def _find_nonfinite_keys(rows: WarpgroupRows, first_key: Scalar) -> jax.Array | None:
    """Return NaN for those of 64 keys of which values are not finite and 0 for the rest, or None if no guard is
    needed."""
    if not rows.spec.guards_nonfinite:
        return None
    tiles = HeadRows.existing_columns(rows.arrays.inputs.v, rows.config.epilogue_tiles)
    flags = (nonfinite.row_nonfiniteness(_load(rows, "v", first_key, columns)) for columns in tiles)
    return functools.reduce(jnp.add, flags)
