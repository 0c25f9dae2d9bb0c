"""64 query rows of the Hopper forward, against all the keys that they see."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.sm90 import nonfinite
from pallas_fa2.backends.sm90.forward.row_scores import RowScores, SoftmaxState
from pallas_fa2.backends.sm90.primitives import layouts, masking, pipeline, thread_values, votes
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import cond, when
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD

# Below any score, but finite: a row that has seen no key yet gives p = 0 rather than NaN.
NO_MAXIMUM = -1e30

# References rise when a thread's part of a row's sum exceeds this: probabilities stay within float16
# (65504), and rows of 100,000 keys with like scores raise nothing.
RESCALE_ABOVE = 2.0**14

# Above this, a sum may have overflowed and a reciprocal may underflow: the row becomes NaN, and its
# tile is repeated.
OVERFLOW_ABOVE = 2.0**120


class RowBlock(RowScores):
    """64 query rows against all the key blocks that they see, by one warpgroup."""

    @property
    def advance(self) -> tuple[Any, Any]:
        """With which the next tile begins, in the rings."""
        return self.tile.advance((self.kv_step0, self.aux_step0))

    def rematerialized(self, zero: Any) -> "RowBlock":
        """The same: `zero` is 0 wherever this is used, which ptxas does not know. What only the end
        of a tile needs is computed there, not before the loops, where it would hold 25 registers."""
        names = ("q_slot", "kv_step0", "aux_step0")
        numbers = {name: getattr(self, name) + zero for name in names}
        return dataclasses.replace(self, tile=self.tile.rematerialized(zero), **numbers)

    @property
    def dtype(self) -> Any:
        return self.q.dtype

    @property
    def no_key_threshold(self) -> float:
        """A row whose scores in base 2 are below it sees none of their keys."""
        return NO_MAXIMUM if self.schedule.spec.score is None else MASKED_SCORE_THRESHOLD * LOG2E

    @property
    def queries(self) -> Any:
        if self.schedule.config.q_in_registers:
            return self.q
        # Descriptors of Q are computed where they are used: 32 registers less outside the loops.
        buffers = self.schedule.config.q_stages
        place = lax.optimization_barrier(self.q_slot)
        return self.memory.q.at[arithmetic.div(place, buffers), arithmetic.rem(place, buffers)]

    def mainloop(self) -> tuple[jax.Array, SoftmaxState]:
        """The unnormalized output and the statistics."""
        (state, answers), begin = self.first_kv_block(), I32(1)

        for masked, end in self.tile.loops:
            if masked and not self.masked:
                continue
            state = self.kv_blocks(begin, end, masked, state, answers)
            begin = jnp.maximum(end, 1)
            if masked and self.tile.reverse_kv:
                state = self.close_references(*state)
        acc, statistics, p = state
        return self.final_pv(self.tile.num_kv_blocks - 1, acc, p), statistics

    def first_kv_block(
        self,
    ) -> tuple[tuple[jax.Array, SoftmaxState, list[jax.Array]], list[jax.Array]]:
        """Scores and softmax of the first block; there is no output to update yet. And answers about the first one
        after it that is cut, which come meanwhile.

        Its maximum is a reference for all that follow. (Without a mask every row sees its first key.)
        """
        rows, keys, queries = (
            self.shape[0],
            self.memory.k_pipeline,
            self.row_inputs(masked=self.masked),
        )
        problem, first_key = self.schedule.spec, self.first_key(0)
        # of no meaning unless it is cut
        answers = self.load_mask_bits(self.kv_block_index(0), self.masked)
        following = self.kv_block_index(self.tile.next_partial)
        (k,) = keys.consumer_wait(self.kv_step0)
        self.turns.sync()

        def multiply(s_acc: Any) -> Any:
            plgpu.wgmma(s_acc, self.queries, k.transpose((1, 0)))
            self.turns.arrive()
            ahead = self.load_mask_bits(following, self.masked)
            return s_acc[...], ahead

        s, ahead = pl.run_scoped(multiply, pipeline.accumulator(*self.shape))
        keys.consumer_release(self.kv_step0)
        if self.schedule.config.q_in_registers:
            self.memory.q_pipeline(self.warpgroup).consumer_release(self.q_slot)
        data = self.wait_for_aux(0, masked=False)
        s, scale = self.apply_score(s, first_key, queries, data)
        if problem.mask is not None:

            def hide() -> jax.Array:
                found = self.wait_for_aux(0, masked=True) if data is None else data
                return self.apply_mask(s, first_key, queries, found, answers)

            s = cond(self.tile.is_partial(0), hide, lambda: s)
        elif self.masked:
            s = self.apply_mask(s, first_key, queries, data, [])
        reference = _highest(s) * scale
        if not problem.has_no_mods:
            # A later block that is cut finds it, but no full one does.
            lowest = jnp.where(self.tile.is_partial(0), jnp.inf, self.no_key_threshold)
            reference = jnp.where(reference < self.no_key_threshold, lowest, reference)
        p = _exponentials(s, scale, reference)
        statistics = SoftmaxState(reference, layouts.fold_octets(jnp.add, p))
        parts = [
            self.apply_dropout(layouts.slice_columns(p, some), some, first_key, queries, data)
            for some in self.schedule.config.pv_pieces
        ]
        if data is not None:
            self.release_aux(0, statistics)
        elif problem.loads_kv_aux():
            when(self.tile.is_partial(0))(lambda: self.release_aux(0, statistics))
        acc = layouts.splat_constant(0.0, (rows, self.schedule.config.value_dim), ACC_LAYOUT)
        return (acc, statistics, self.to_input_dtype(parts)), ahead

    def kv_blocks(
        self, begin: Any, end: Any, masked: bool, state: tuple, answers: list[jax.Array]
    ) -> tuple:
        """Those from `begin` to `end`. Answers about a block come while the one before is multiplied; those about
        the first of them are at hand."""
        if not (masked and self.schedule.spec.uses_mask_bits):
            return lax.fori_loop(
                begin, end, lambda t, state: self.kv_block(t, masked, state)[0], state
            )

        last = jnp.maximum(end - 1, 0)  # 0 where there are none

        def step(t: Any, carry: tuple) -> tuple:
            (state, answers), following = carry, self.kv_block_index(jnp.minimum(t + 1, last))
            look = functools.partial(self.load_mask_bits, following, masked)
            return self.kv_block(t, masked, state, answers, look)

        return lax.fori_loop(begin, end, step, (state, answers))[0]

    def kv_block(
        self,
        t: Any,
        masked: bool,
        state: tuple[jax.Array, SoftmaxState, list[jax.Array]],
        answers: Sequence[jax.Array] = (),
        look: Callable[[], Any] = list,
    ) -> tuple[tuple[jax.Array, SoftmaxState, list[jax.Array]], Any]:
        """Scores of block t and output of block t - 1, multiplied together; softmax of block t.

        Also look(), once `answers` are no longer needed.
        """
        keys, values, step = self.memory.k_pipeline, self.memory.v_pipeline, self.kv_step0 + t
        (acc, before, p), queries = state, self.row_inputs(masked)
        first_key, parts = self.first_key(t), self.schedule.config.pv_pieces
        start = None
        if answers and self.schedule.spec.score is None:  # scales are positive: -inf remains so
            # while keys and the tensor cores are waited for
            start = masking.apply_bits(layouts.splat_constant(0.0, self.shape, ACC_LAYOUT), answers)
        (k,) = keys.consumer_wait(step)
        self.turns.sync()

        # The scores' accumulator is allocated just before its first product, so that ptxas starts
        # it from zero in the instruction itself and not by 64 moves.
        def multiply(s_acc: Any) -> tuple:
            if start is not None:
                s_acc[...] = start
            plgpu.wgmma(s_acc, self.queries, k.transpose((1, 0)))
            (v,) = values.consumer_wait(step - 1)

            def update(o_acc: Any) -> tuple:
                o_acc[...] = acc
                plgpu.wgmma(o_acc, p[0], v.at[parts[0]])
                self.turns.arrive()
                seen = look() if start is not None else None
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                keys.consumer_release(step)
                reference = before.reference
                data = self.wait_for_aux(t, masked)
                s, scale = self.apply_score(s, first_key, queries, data)
                if masked:
                    if start is None:
                        s = self.apply_mask(s, first_key, queries, data, answers)
                    reference = self.init_missing_reference(s, scale, reference)
                p_next, total = [], before.row_sum
                for i, some in enumerate(parts):
                    if i > 0:
                        plgpu.wgmma(o_acc, p[i], v.at[some])
                    found = _exponentials(layouts.slice_columns(s, some), scale, reference)
                    total = total + layouts.fold_octets(jnp.add, found)
                    thread_values.fence_before_wgmma_wait(total)
                    p_next.append(self.apply_dropout(found, some, first_key, queries, data))
                return o_acc[...], SoftmaxState(reference, total), p_next, seen

            return pl.run_scoped(update, pipeline.accumulator(*acc.shape))

        out, statistics, p, seen = pl.run_scoped(multiply, pipeline.accumulator(*self.shape))
        values.consumer_release(step - 1)
        if self.schedule.spec.loads_kv_aux(masked):
            self.release_aux(t, statistics)
        out, statistics, p = self.rescale(out, statistics, p)
        # P's conversion comes last: until here its registers were being read by P V.
        state = out, statistics, self.to_input_dtype(p)
        return state, look() if start is None else seen

    def to_input_dtype(self, p: list[jax.Array]) -> list[jax.Array]:
        return [x.astype(self.dtype) for x in p]

    def rescale(
        self, out: jax.Array, before: SoftmaxState, p: list[jax.Array]
    ) -> tuple[jax.Array, SoftmaxState, list[jax.Array]]:
        """In a warp where a sum has grown large, lets the largest p of each row be 1."""

        def rescale() -> tuple[jax.Array, SoftmaxState, list[jax.Array]]:
            highest = functools.reduce(
                jnp.maximum, (layouts.fold_octets(jnp.maximum, x) for x in p)
            )
            highest = jnp.maximum(highest.max(axis=1), 1.0)
            factor = jnp.where(highest < OVERFLOW_ABOVE, 1 / highest, jnp.nan)

            def scaled(x: jax.Array) -> jax.Array:
                return x * layouts.broadcast_rows(factor, x.shape)

            after = SoftmaxState(before.reference + jnp.log2(highest), scaled(before.row_sum))
            return scaled(out), after, list(map(scaled, p))

        grew = votes.warp_any_gt(before.row_sum, RESCALE_ABOVE)
        return cond(grew, rescale, lambda: (out, before, p))

    def final_pv(self, t: Any, acc: jax.Array, p: list[jax.Array]) -> jax.Array:
        values, step = self.memory.v_pipeline, self.kv_step0 + t
        (v,) = values.consumer_wait(step)
        self.turns.sync()

        def update(o_acc: Any) -> jax.Array:
            o_acc[...] = acc
            for part, some in zip(p, self.schedule.config.pv_pieces, strict=True):
                plgpu.wgmma(o_acc, part, v.at[some])
            self.turns.arrive()
            return o_acc[...]

        acc = pl.run_scoped(update, pipeline.accumulator(*acc.shape))
        values.consumer_release(step)
        return acc

    def init_missing_reference(self, s: jax.Array, scale: float, reference: jax.Array) -> jax.Array:
        """With those of rows that see their first key in this block."""
        if self.schedule.spec.has_no_mods:
            return reference

        def found() -> jax.Array:
            # A row that has seen no key yet subtracts infinity: its exponentials are 0.
            highest = _highest(s) * scale
            highest = jnp.where(highest < self.no_key_threshold, jnp.inf, highest)
            return jnp.where(reference == jnp.inf, highest, reference)

        missing = votes.warp_any_gt(reference, -NO_MAXIMUM)
        return cond(missing, found, lambda: reference)

    def close_references(
        self, acc: jax.Array, statistics: SoftmaxState, p: list[jax.Array]
    ) -> tuple:
        """Where no block that is cut has given a row its reference: should a full one have scores for it (a
        score function may hide keys), they overflow, and the tile is repeated."""
        reference = statistics.reference
        reference = jnp.where(reference == jnp.inf, self.no_key_threshold, reference)
        return acc, statistics._replace(reference=reference), p

    def row_sum(self, acc: jax.Array, statistics: SoftmaxState) -> jax.Array:
        """Of each row the sum of its exponentials, infinite or NaN if the tile is to be repeated."""
        total = statistics.row_sum
        if (
            self.schedule.spec.guards_nonfinite
        ):  # 0 times what is not finite is NaN, also for hidden keys
            output = layouts.fold_octets(jnp.add, acc)
            total += output - output
        return total.sum(axis=1)

    def epilogue(
        self, columns: Any, acc: jax.Array, reference: jax.Array, total: jax.Array
    ) -> None:
        """A piece of the output; with the first, lse."""
        batch, head, _ = self.tile.coordinates
        rows = pl.ds(self.first_row, self.shape[0])
        out = self.memory.out.at[self.warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored before has left them
        problem = self.schedule.spec
        share, sum_of_all = problem.dropout_scale / total, reference * (1 / LOG2E) + jnp.log(total)
        if not problem.has_no_mods:
            empty = total == 0
            share, sum_of_all = jnp.where(empty, 0.0, share), jnp.where(empty, -jnp.inf, sum_of_all)
        out[...] = (acc * layouts.broadcast_rows(share, acc.shape)).astype(out.dtype)
        plgpu.commit_smem()
        HeadRows(self.arrays.outputs.out, batch, rows, head, columns).store(out)

        @when(columns.start == 0)
        def _() -> None:
            self.arrays.outputs.lse[batch, head, rows] = sum_of_all

        plgpu.commit_smem_to_gmem_group()

    def load(self, source: Any, first_key: Any, columns: Any) -> Any:
        """64 keys or values into the buffer of the output, once all of the warpgroup have left it."""
        batch, kv_head = self.tile.coordinates[0], self.tile.kv_head
        buffer, full = self.memory.out.at[self.warpgroup], self.memory.retry_full(self.warpgroup)
        pipeline.arrive_and_wait(self.memory.retry_sync(self.warpgroup))
        rows = pl.ds(first_key, buffer.shape[0])
        HeadRows(source, batch, rows, kv_head, columns).load(buffer, self.memory.full, full)
        plgpu.barrier_wait(self.memory.full.at[full])
        return buffer

    def load_sanitized(
        self, source: Any, first_key: Any, columns: Any, wild: Any, value: float
    ) -> Any:
        """The first of them, with another value where `wild` is not 0."""
        buffer = self.load(source, first_key, columns)
        if wild is not None:
            nonfinite.overwrite_rows(buffer, wild, value)
            plgpu.commit_smem()
        return buffer.at[pl.ds(0, self.schedule.config.retry_block_kv)]

    def nonfinite_keys(self, first_key: Any) -> Any:
        """Which of 64 keys have values that are not finite, if these may be hidden: NaN, and 0 of others."""
        if not self.schedule.spec.guards_nonfinite:
            return None
        values = self.arrays.inputs.v
        pieces = HeadRows.existing_columns(values, self.schedule.config.epilogue_pieces)
        parts = (
            nonfinite.row_nonfiniteness(self.load(values, first_key, piece)) for piece in pieces
        )
        return functools.reduce(jnp.add, parts)

    def recompute_exact(self, columns: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Some columns of the output, and the statistics, with the true maximum of each row so far.

        FlashAttention-2 step by step, one buffer for keys and values, as it runs next to never: for
        scores that rise by 127 in base 2 within a block, and values that are not finite. These become 0 and
        their keys NaN: scores of such a pair are, and with them the output, unless the mask hides them.
        """
        rows, config = self.shape[0], self.schedule.config
        pieces = HeadRows.existing_columns(self.arrays.inputs.k, config.key_pieces)
        of_block = config.block_kv // config.retry_block_kv

        def scores(s_acc: Any, first_key: Any, wild: Any) -> jax.Array:
            for piece in pieces:
                k = self.load_sanitized(self.arrays.inputs.k, first_key, piece, wild, math.nan)
                whole = piece.size == config.head_dim
                q = self.queries if whole else self.queries.at[:, piece]
                plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
                plgpu.wgmma_wait(0)
            return s_acc[...]

        def step(t: Any, state: tuple) -> tuple:
            acc, reference, total = state
            block, piece = arithmetic.div(t, of_block), arithmetic.rem(t, of_block)
            number = self.kv_block_index(block)
            first_key = number * config.block_kv + piece * config.retry_block_kv
            square, wild = (
                pipeline.accumulator(rows, config.retry_block_kv),
                self.nonfinite_keys(first_key),
            )
            s = pl.run_scoped(lambda s_acc: scores(s_acc, first_key, wild), square)
            queries, data = self.row_inputs(masked=True), self.aux_from_gmem(first_key)
            s, scale = self.apply_score(s, first_key, queries, data)

            def hide() -> jax.Array:
                answers = self.load_mask_bits(number, True, [piece])
                return self.apply_mask(s, first_key, queries, data, answers)

            if self.schedule.spec.uses_mask_bits:  # not about a block of which nothing is hidden
                s = cond(self.tile.is_partial(block), hide, lambda: s)
            elif self.masked:
                s = hide()
            highest = jnp.maximum(reference, s.max(axis=1) * scale)
            factor, p = jnp.exp2(reference - highest), _exponentials(s, scale, highest)
            summed = p.sum(axis=1)
            p = self.apply_dropout(p, pl.ds(0, config.retry_block_kv), first_key, queries, data)
            v = self.load_sanitized(self.arrays.inputs.v, first_key, columns, wild, 0.0)

            def update(o_acc: Any) -> jax.Array:
                o_acc[...] = acc * layouts.broadcast_rows(factor, acc.shape)
                plgpu.wgmma(o_acc, p.astype(self.dtype), v)
                return o_acc[...]

            acc = pl.run_scoped(update, pipeline.accumulator(*acc.shape))
            return acc, highest, total * factor + summed

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output stored before has left
        state = (
            layouts.splat_constant(0.0, (rows, columns.size), ACC_LAYOUT),
            layouts.splat_constant(self.no_key_threshold, (rows,), ROW_LAYOUT),
            layouts.splat_constant(0.0, (rows,), ROW_LAYOUT),
        )
        state = lax.fori_loop(I32(0), self.tile.num_kv_blocks * of_block, step, state)
        pipeline.arrive_and_wait(self.memory.retry_sync(self.warpgroup))
        return state


def _highest(s: jax.Array) -> jax.Array:
    """The largest of each row."""
    return layouts.fold_octets(jnp.maximum, s).max(axis=1)


def _exponentials(s: jax.Array, scale: float, reference: jax.Array) -> jax.Array:
    """One multiply-add a score."""
    return jnp.exp2(s * scale - layouts.broadcast_rows(reference, s.shape))
