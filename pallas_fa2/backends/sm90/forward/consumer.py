"""A consumer warpgroup of the forward: Algorithm 1 of FlashAttention-2 (arXiv:2307.08691).

Pipelined as Algorithm 2 of FlashAttention-3 (arXiv:2407.08608): S of a block and P V of the block before are
multiplied together, and the softmax runs while the latter is in flight; warpgroups take turns at the tensor cores
(`WarpgroupTurns`). Line numbers are FlashAttention-2's. docs/design/forward.md explains the whole.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, slice_columns
from pallas_fa2.backends.common.primitives.named_barriers import WarpgroupTurns
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.common.scheduler import for_each_tile
from pallas_fa2.backends.sm90.forward.epilogue import epilogue
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.rows import WarpgroupRows
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, PipelinePosition, QueryTile
from pallas_fa2.backends.sm90.forward.score_mask import (
    ScoreMask,
    load_mask_bits,
    masked_accumulator,
)
from pallas_fa2.backends.sm90.forward.softmax import SoftmaxState
from pallas_fa2.backends.sm90.primitives import pipeline, roles


class LoopState(NamedTuple):
    """What the main loop carries from one key block to the next."""

    acc: jax.Array  # O of the blocks before the last one, unnormalized, float32 [64, Hv]
    softmax: SoftmaxState
    p: list[jax.Array]  # P of the last block, in the inputs' dtype: [64, keys] of each chunk


def mainloop(rows: WarpgroupRows) -> tuple[jax.Array, SoftmaxState]:
    """Return O, unnormalized, and the softmax of 64 rows against all their key blocks: lines 5 to 11."""
    state, next_bits = first_kv_block(rows)
    begin: Scalar = I32(1)
    for masked, end in rows.tile.compute_loop_ends():  # full blocks run none of the mask's code
        if masked and not rows.schedule.has_partial_blocks:
            continue
        bits = next_bits if masked else []
        last = jnp.maximum(end - 1, 0) if bits else 0  # 0 where there are none
        body = functools.partial(kv_block, rows, masked, last)
        state, _ = lax.fori_loop(begin, end, body, (state, bits))
        begin = jnp.maximum(end, 1)
        if masked and rows.tile.reverse_kv:
            state = state._replace(softmax=state.softmax.close_references(rows.spec))
    return final_pv(rows, state), state.softmax


def first_kv_block(rows: WarpgroupRows) -> tuple[LoopState, list[jax.Array]]:
    """Return the state after the first block, lines 6 to 9, and mask bits of the next partial block.

    There is no O to update yet. The maxima of this block are the references of all that follow.
    """
    config, k_pipeline, kv_step = rows.config, rows.memory.k_pipeline, rows.position.kv_step
    score_mask = ScoreMask.load(rows, 0, masked=rows.schedule.has_partial_blocks)
    bits = load_mask_bits(rows, rows.load_kv_block_index(0))  # without meaning if the block is full
    next_block = rows.load_kv_block_index(rows.tile.compute_next_partial())
    (k,) = k_pipeline.consumer_wait(kv_step)
    rows.compute_turns().sync()

    def multiply(s_acc: Ref) -> tuple[jax.Array, list[jax.Array]]:
        plgpu.wgmma(s_acc, rows.compute_q(), k.transpose((1, 0)))  # line 8
        rows.compute_turns().arrive()
        next_bits = load_mask_bits(rows, next_block)
        return s_acc[...], next_bits

    s, next_bits = pl.run_scoped(multiply, pipeline.accumulator(*rows.score_shape))
    k_pipeline.consumer_release(kv_step)
    if config.q_in_registers:
        rows.memory.q_pipeline(rows.compute_warpgroup()).consumer_release(rows.q_slot)
    loaded = score_mask.wait_for_aux(masked=False)
    s, scale = loaded.apply_score(s)
    s = loaded.apply_mask_if_partial(s, bits)
    p, softmax = SoftmaxState.start(rows.spec, s, scale, lambda: rows.tile.is_partial(0))  # line 9
    chunks = [loaded.apply_dropout(slice_columns(p, keys), keys) for keys in config.pv_chunks]
    score_mask.release_first_aux(softmax)
    acc = layouts.splat_constant(0.0, (rows.score_shape[0], config.value_dim), ACC_LAYOUT)
    return LoopState(acc, softmax, [x.astype(rows.q.dtype) for x in chunks]), next_bits


def kv_block(
    rows: WarpgroupRows,
    masked: bool,
    last: Scalar,
    t: Scalar,
    carry: tuple[LoopState, list[jax.Array]],
) -> tuple[LoopState, list[jax.Array]]:
    """Return the state after block t, lines 6 to 10 with line 10 for block t - 1, and mask bits of block t + 1.

    `carry` has the state after block t - 1 and the mask bits of block t, if there are any; `last` is the last block
    of the loop.
    """
    state, bits = carry
    next_block = rows.load_kv_block_index(jnp.minimum(t + 1, last)) if bits else 0
    k_pipeline, v_pipeline = rows.memory.k_pipeline, rows.memory.v_pipeline
    kv_step, chunks = rows.position.kv_step + t, rows.config.pv_chunks
    score_mask = ScoreMask.load(rows, t, masked)
    s_init = masked_accumulator(rows, bits)  # while K and the tensor cores are waited for
    (k,) = k_pipeline.consumer_wait(kv_step)
    rows.compute_turns().sync()

    def load_next_bits() -> list[jax.Array]:
        return load_mask_bits(rows, next_block) if bits else []

    # S's accumulator is allocated just before its first product and O's after it: so ptxas starts S from zero in
    # the instruction itself and not by 64 moves.
    def multiply(s_acc: Ref) -> tuple:
        if s_init is not None:
            s_acc[...] = s_init
        plgpu.wgmma(s_acc, rows.compute_q(), k.transpose((1, 0)))  # line 8
        (v,) = v_pipeline.consumer_wait(kv_step - 1)

        def update(o_acc: Ref) -> tuple:
            o_acc[...] = state.acc
            plgpu.wgmma(o_acc, state.p[0], v.at[chunks[0]])  # line 10 of block t - 1
            rows.compute_turns().arrive()
            next_bits = load_next_bits() if s_init is not None else []
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
            k_pipeline.consumer_release(kv_step)
            loaded = score_mask.wait_for_aux(masked)
            s, scale = loaded.apply_score(s)
            softmax = state.softmax
            if masked:
                s = loaded.apply_mask(s, bits) if s_init is None else s
                softmax = softmax.init_missing_references(rows.spec, s, scale)
            p = []
            for i, keys in enumerate(chunks):
                if i > 0:
                    plgpu.wgmma(o_acc, state.p[i], v.at[keys])
                chunk, softmax = softmax.exponentiate(slice_columns(s, keys), scale)  # line 9
                p.append(loaded.apply_dropout(chunk, keys))
            return o_acc[...], softmax, p, next_bits

        return pl.run_scoped(update, pipeline.accumulator(*state.acc.shape))

    acc, softmax, p, next_bits = pl.run_scoped(multiply, pipeline.accumulator(*rows.score_shape))
    v_pipeline.consumer_release(kv_step - 1)
    if rows.spec.loads_kv_aux(masked):
        score_mask.release_aux(softmax)
    acc, softmax, p = softmax.rescale(acc, p)
    # P's conversion comes last: until here its registers were being read by P V.
    state = LoopState(acc, softmax, [x.astype(rows.q.dtype) for x in p])
    return state, next_bits if s_init is not None else load_next_bits()


def final_pv(rows: WarpgroupRows, state: LoopState) -> jax.Array:
    """Return O after the last block: line 10, for which no scores are left to be multiplied beside."""
    v_pipeline = rows.memory.v_pipeline
    kv_step = rows.position.kv_step + (rows.tile.compute_num_kv_blocks() - 1)
    (v,) = v_pipeline.consumer_wait(kv_step)
    rows.compute_turns().sync()

    def update(o_acc: Ref) -> jax.Array:
        o_acc[...] = state.acc
        for p, keys in zip(state.p, rows.config.pv_chunks, strict=True):
            plgpu.wgmma(o_acc, p, v.at[keys])
        rows.compute_turns().arrive()
        return o_acc[...]

    acc = pl.run_scoped(update, pipeline.accumulator(*state.acc.shape))
    v_pipeline.consumer_release(kv_step)
    return acc


def consume(
    schedule: ForwardSchedule, arrays: Arrays, memory: SharedStorage, warpgroup: Scalar
) -> None:
    """Run a consumer warpgroup: 64 rows of one tile after another."""
    config = schedule.config
    roles.set_max_registers(config.registers_per_warpgroup, 0)
    q_pipeline, turns = (
        memory.q_pipeline(warpgroup),
        WarpgroupTurns(warpgroup, config.warpgroups),
    )

    def consume_tile(
        n: Scalar, work: Sequence[Scalar], position: PipelinePosition, prefetch: Callable
    ) -> tuple[PipelinePosition, Any]:
        """Work on the CTA's n-th tile; return the pipelines' position after it, and what is known of the next."""
        (q,) = q_pipeline.consumer_wait(n)
        if config.q_in_registers:
            q = plgpu.load(q, layout=ACC_LAYOUT, optimized=False)
        q_slot = warpgroup
        if config.q_stages > 1:
            slot = warpgroup * config.q_stages + q_pipeline.stage(n)
            q_slot = lax.optimization_barrier(slot)
        tile = QueryTile(schedule, *work)
        rows = WarpgroupRows(tile, arrays, memory, q, q_slot, position)
        acc, softmax = mainloop(rows)
        next_work = prefetch()

        def release_q() -> None:
            if not config.q_in_registers:  # else it was when the first scores were there
                q_pipeline.consumer_release(n)

        return epilogue(rows, warpgroup, acc, softmax, release_q), next_work

    for kv_pipeline in memory.kv_pipelines:
        kv_pipeline.consumer_prime()
    for own_pipeline in (q_pipeline, *memory.pairwise_pipelines(warpgroup)):
        own_pipeline.consumer_prime()
    turns.prime()
    for_each_tile(arrays.scheduler, consume_tile, PipelinePosition(I32(0), I32(0)), early=True)
    turns.finish()
    plgpu.wait_smem_to_gmem(0)
    roles.sync_before_exit(memory.exit_barriers, 0)
