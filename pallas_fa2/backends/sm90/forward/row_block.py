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
    def next_steps(self) -> tuple[Any, Any]:
        """With which the next tile begins, in the rings."""
        return self.tile.next_steps((self.first_step, self.first_data))

    def shifted(self, zero: Any) -> "RowBlock":
        """The same: `zero` is 0 wherever this is used, which ptxas does not know. What only the end
        of a tile needs is computed there, not before the loops, where it would hold 25 registers."""
        names = ("place", "first_step", "first_data")
        numbers = {name: getattr(self, name) + zero for name in names}
        return dataclasses.replace(self, tile=self.tile.shifted(zero), **numbers)

    @property
    def dtype(self) -> Any:
        return self.q.dtype

    @property
    def lowest(self) -> float:
        """A row whose scores in base 2 are below it sees none of their keys."""
        return NO_MAXIMUM if self.schedule.problem.score is None else MASKED_SCORE_THRESHOLD * LOG2E

    @property
    def queries(self) -> Any:
        if self.schedule.config.q_in_registers:
            return self.q
        # Descriptors of Q are computed where they are used: 32 registers less outside the loops.
        buffers = self.schedule.config.q_buffers
        place = lax.optimization_barrier(self.place)
        return self.memory.q.at[arithmetic.div(place, buffers), arithmetic.rem(place, buffers)]

    def attend(self) -> tuple[jax.Array, SoftmaxState]:
        """The unnormalized output and the statistics."""
        (state, answers), begin = self.first_block(), I32(1)

        for masked, end in self.tile.phases:
            if masked and not self.masked:
                continue
            state = self.next_blocks(begin, end, masked, state, answers)
            begin = jnp.maximum(end, 1)
            if masked and self.tile.backwards:
                state = self.settled(*state)
        acc, statistics, p = state
        return self.last_output(self.tile.visited - 1, acc, p), statistics

    def first_block(
        self,
    ) -> tuple[tuple[jax.Array, SoftmaxState, list[jax.Array]], list[jax.Array]]:
        """Scores and softmax of the first block; there is no output to update yet. And answers about the first one
        after it that is cut, which come meanwhile.

        Its maximum is a reference for all that follow. (Without a mask every row sees its first key.)
        """
        rows, keys, queries = self.shape[0], self.memory.keys, self.query_data(masked=self.masked)
        problem, first_key = self.schedule.problem, self.first_key(0)
        answers = self.answers(self.numbers(0), self.masked)  # of no meaning unless it is cut
        following = self.numbers(self.tile.first_cut_after)
        (k,) = keys.wait(self.first_step)
        self.turns.take()

        def multiply(s_acc: Any) -> Any:
            plgpu.wgmma(s_acc, self.queries, k.transpose((1, 0)))
            self.turns.give()
            ahead = self.answers(following, self.masked)
            return s_acc[...], ahead

        s, ahead = pl.run_scoped(multiply, pipeline.accumulator(*self.shape))
        keys.release(self.first_step)
        if self.schedule.config.q_in_registers:
            self.memory.queries(self.me).release(self.place)
        data = self.wait_for_data(0, masked=False)
        s, scale = self.scored(s, first_key, queries, data)
        if problem.mask is not None:

            def hide() -> jax.Array:
                found = self.wait_for_data(0, masked=True) if data is None else data
                return self.hide(s, first_key, queries, found, answers)

            s = cond(self.tile.is_cut(0), hide, lambda: s)
        elif self.masked:
            s = self.hide(s, first_key, queries, data, [])
        reference = _highest(s) * scale
        if not problem.plain:
            # A later block that is cut finds it, but no full one does.
            lowest = jnp.where(self.tile.is_cut(0), jnp.inf, self.lowest)
            reference = jnp.where(reference < self.lowest, lowest, reference)
        p = _exponentials(s, scale, reference)
        statistics = SoftmaxState(reference, layouts.fold_octets(jnp.add, p))
        parts = [
            self.drop(layouts.slice_columns(p, some), some, first_key, queries, data)
            for some in self.schedule.config.value_parts
        ]
        if data is not None:
            self.release_data(0, statistics)
        elif problem.reads_block():
            when(self.tile.is_cut(0))(lambda: self.release_data(0, statistics))
        acc = layouts.splat_constant(0.0, (rows, self.schedule.config.value_dim), ACC_LAYOUT)
        return (acc, statistics, self.converted(parts)), ahead

    def next_blocks(
        self, begin: Any, end: Any, masked: bool, state: tuple, answers: list[jax.Array]
    ) -> tuple:
        """Those from `begin` to `end`. Answers about a block come while the one before is multiplied; those about
        the first of them are at hand."""
        if not (masked and self.schedule.problem.asked):
            return lax.fori_loop(
                begin, end, lambda t, state: self.next_block(t, masked, state)[0], state
            )

        last = jnp.maximum(end - 1, 0)  # 0 where there are none

        def step(t: Any, carry: tuple) -> tuple:
            (state, answers), following = carry, self.numbers(jnp.minimum(t + 1, last))
            look = functools.partial(self.answers, following, masked)
            return self.next_block(t, masked, state, answers, look)

        return lax.fori_loop(begin, end, step, (state, answers))[0]

    def next_block(
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
        keys, values, step = self.memory.keys, self.memory.values, self.first_step + t
        (acc, before, p), queries = state, self.query_data(masked)
        first_key, parts = self.first_key(t), self.schedule.config.value_parts
        start = None
        if answers and self.schedule.problem.score is None:  # scales are positive: -inf remains so
            # while keys and the tensor cores are waited for
            start = masking.apply_bits(layouts.splat_constant(0.0, self.shape, ACC_LAYOUT), answers)
        (k,) = keys.wait(step)
        self.turns.take()

        # The scores' accumulator is allocated just before its first product, so that ptxas starts
        # it from zero in the instruction itself and not by 64 moves.
        def multiply(s_acc: Any) -> tuple:
            if start is not None:
                s_acc[...] = start
            plgpu.wgmma(s_acc, self.queries, k.transpose((1, 0)))
            (v,) = values.wait(step - 1)

            def update(o_acc: Any) -> tuple:
                o_acc[...] = acc
                plgpu.wgmma(o_acc, p[0], v.at[parts[0]])
                self.turns.give()
                seen = look() if start is not None else None
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                keys.release(step)
                reference = before.reference
                data = self.wait_for_data(t, masked)
                s, scale = self.scored(s, first_key, queries, data)
                if masked:
                    if start is None:
                        s = self.hide(s, first_key, queries, data, answers)
                    reference = self.found_reference(s, scale, reference)
                p_next, total = [], before.total
                for i, some in enumerate(parts):
                    if i > 0:
                        plgpu.wgmma(o_acc, p[i], v.at[some])
                    found = _exponentials(layouts.slice_columns(s, some), scale, reference)
                    total = total + layouts.fold_octets(jnp.add, found)
                    thread_values.fence_before_wgmma_wait(total)
                    p_next.append(self.drop(found, some, first_key, queries, data))
                return o_acc[...], SoftmaxState(reference, total), p_next, seen

            return pl.run_scoped(update, pipeline.accumulator(*acc.shape))

        out, statistics, p, seen = pl.run_scoped(multiply, pipeline.accumulator(*self.shape))
        values.release(step - 1)
        if self.schedule.problem.reads_block(masked):
            self.release_data(t, statistics)
        out, statistics, p = self.raise_references(out, statistics, p)
        # P's conversion comes last: until here its registers were being read by P V.
        state = out, statistics, self.converted(p)
        return state, look() if start is None else seen

    def converted(self, p: list[jax.Array]) -> list[jax.Array]:
        return [x.astype(self.dtype) for x in p]

    def raise_references(
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

            after = SoftmaxState(before.reference + jnp.log2(highest), scaled(before.total))
            return scaled(out), after, list(map(scaled, p))

        grew = votes.warp_any_gt(before.total, RESCALE_ABOVE)
        return cond(grew, rescale, lambda: (out, before, p))

    def last_output(self, t: Any, acc: jax.Array, p: list[jax.Array]) -> jax.Array:
        values, step = self.memory.values, self.first_step + t
        (v,) = values.wait(step)
        self.turns.take()

        def update(o_acc: Any) -> jax.Array:
            o_acc[...] = acc
            for part, some in zip(p, self.schedule.config.value_parts, strict=True):
                plgpu.wgmma(o_acc, part, v.at[some])
            self.turns.give()
            return o_acc[...]

        acc = pl.run_scoped(update, pipeline.accumulator(*acc.shape))
        values.release(step)
        return acc

    def found_reference(self, s: jax.Array, scale: float, reference: jax.Array) -> jax.Array:
        """With those of rows that see their first key in this block."""
        if self.schedule.problem.plain:
            return reference

        def found() -> jax.Array:
            # A row that has seen no key yet subtracts infinity: its exponentials are 0.
            highest = _highest(s) * scale
            highest = jnp.where(highest < self.lowest, jnp.inf, highest)
            return jnp.where(reference == jnp.inf, highest, reference)

        missing = votes.warp_any_gt(reference, -NO_MAXIMUM)
        return cond(missing, found, lambda: reference)

    def settled(self, acc: jax.Array, statistics: SoftmaxState, p: list[jax.Array]) -> tuple:
        """Where no block that is cut has given a row its reference: should a full one have scores for it (a
        score function may hide keys), they overflow, and the tile is repeated."""
        reference = statistics.reference
        reference = jnp.where(reference == jnp.inf, self.lowest, reference)
        return acc, statistics._replace(reference=reference), p

    def total(self, acc: jax.Array, statistics: SoftmaxState) -> jax.Array:
        """Of each row the sum of its exponentials, infinite or NaN if the tile is to be repeated."""
        total = statistics.total
        if self.schedule.problem.tames:  # 0 times what is not finite is NaN, also for hidden keys
            output = layouts.fold_octets(jnp.add, acc)
            total += output - output
        return total.sum(axis=1)

    def store(self, columns: Any, acc: jax.Array, reference: jax.Array, total: jax.Array) -> None:
        """A piece of the output; with the first, lse."""
        batch, head, _ = self.tile.place
        rows = pl.ds(self.first_row, self.shape[0])
        out = self.memory.out.at[self.me]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what was stored before has left them
        problem = self.schedule.problem
        share, sum_of_all = problem.kept_scale / total, reference * (1 / LOG2E) + jnp.log(total)
        if not problem.plain:
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
        batch, kv_head = self.tile.place[0], self.tile.kv_head
        buffer, full = self.memory.out.at[self.me], self.memory.repeat_full(self.me)
        pipeline.arrive_and_wait(self.memory.repeat_met(self.me))
        rows = pl.ds(first_key, buffer.shape[0])
        HeadRows(source, batch, rows, kv_head, columns).load(buffer, self.memory.full, full)
        plgpu.barrier_wait(self.memory.full.at[full])
        return buffer

    def load_tamed(self, source: Any, first_key: Any, columns: Any, wild: Any, value: float) -> Any:
        """The first of them, with another value where `wild` is not 0."""
        buffer = self.load(source, first_key, columns)
        if wild is not None:
            nonfinite.overwrite_rows(buffer, wild, value)
            plgpu.commit_smem()
        return buffer.at[pl.ds(0, self.schedule.config.repeat_kv)]

    def wild_keys(self, first_key: Any) -> Any:
        """Which of 64 keys have values that are not finite, if these may be hidden: NaN, and 0 of others."""
        if not self.schedule.problem.tames:
            return None
        values = self.arrays.inputs.v
        pieces = HeadRows.pieces(values, self.schedule.config.out_pieces)
        parts = (
            nonfinite.row_nonfiniteness(self.load(values, first_key, piece)) for piece in pieces
        )
        return functools.reduce(jnp.add, parts)

    def repeat(self, columns: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Some columns of the output, and the statistics, with the true maximum of each row so far.

        FlashAttention-2 step by step, one buffer for keys and values, as it runs next to never: for
        scores that rise by 127 in base 2 within a block, and values that are not finite. These become 0 and
        their keys NaN: scores of such a pair are, and with them the output, unless the mask hides them.
        """
        rows, config = self.shape[0], self.schedule.config
        pieces = HeadRows.pieces(self.arrays.inputs.k, config.key_pieces)
        of_block, of_entry = (
            keys // config.repeat_kv for keys in (config.block_kv, self.schedule.listed)
        )

        def scores(s_acc: Any, first_key: Any, wild: Any) -> jax.Array:
            for piece in pieces:
                k = self.load_tamed(self.arrays.inputs.k, first_key, piece, wild, math.nan)
                whole = piece.size == config.head_dim
                q = self.queries if whole else self.queries.at[:, piece]
                plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
                plgpu.wgmma_wait(0)
            return s_acc[...]

        def step(t: Any, state: tuple) -> tuple:
            acc, reference, total = state
            block, piece = arithmetic.div(t, of_block), arithmetic.rem(t, of_block)
            number = self.arrays.part(self.tile, block, arithmetic.div(piece, of_entry))
            within = arithmetic.rem(piece, of_entry)
            first_key = number * self.schedule.listed + within * config.repeat_kv
            square, wild = pipeline.accumulator(rows, config.repeat_kv), self.wild_keys(first_key)
            s = pl.run_scoped(lambda s_acc: scores(s_acc, first_key, wild), square)
            queries, data = self.query_data(masked=True), self.data_in_device_memory(first_key)
            s, scale = self.scored(s, first_key, queries, data)

            def hide() -> jax.Array:
                answers = self.answers([number], True, [within])
                return self.hide(s, first_key, queries, data, answers)

            if self.schedule.problem.asked:  # not about a block of which nothing is hidden
                s = cond(self.tile.is_cut(block), hide, lambda: s)
            elif self.masked:
                s = hide()
            highest = jnp.maximum(reference, s.max(axis=1) * scale)
            factor, p = jnp.exp2(reference - highest), _exponentials(s, scale, highest)
            summed = p.sum(axis=1)
            p = self.drop(p, pl.ds(0, config.repeat_kv), first_key, queries, data)
            v = self.load_tamed(self.arrays.inputs.v, first_key, columns, wild, 0.0)

            def update(o_acc: Any) -> jax.Array:
                o_acc[...] = acc * layouts.broadcast_rows(factor, acc.shape)
                plgpu.wgmma(o_acc, p.astype(self.dtype), v)
                return o_acc[...]

            acc = pl.run_scoped(update, pipeline.accumulator(*acc.shape))
            return acc, highest, total * factor + summed

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the output stored before has left
        state = (
            layouts.splat_constant(0.0, (rows, columns.size), ACC_LAYOUT),
            layouts.splat_constant(self.lowest, (rows,), ROW_LAYOUT),
            layouts.splat_constant(0.0, (rows,), ROW_LAYOUT),
        )
        state = lax.fori_loop(I32(0), self.tile.visited * of_block, step, state)
        pipeline.arrive_and_wait(self.memory.repeat_met(self.me))
        return state


def _highest(s: jax.Array) -> jax.Array:
    """The largest of each row."""
    return layouts.fold_octets(jnp.maximum, s).max(axis=1)


def _exponentials(s: jax.Array, scale: float, reference: jax.Array) -> jax.Array:
    """One multiply-add a score."""
    return jnp.exp2(s * scale - layouts.broadcast_rows(reference, s.shape))
