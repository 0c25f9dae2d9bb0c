"""P^T and dS^T of some queries of a step, in registers: masks, scores and their gradients."""

import dataclasses
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.aux_inputs import AuxGrads
from pallas_fa2.backends.sm90.backward.config import QUERY_PANEL
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule, Step
from pallas_fa2.backends.sm90.primitives import layouts, masking, register_io, thread_values
from pallas_fa2.backends.sm90.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.tile_functions import (
    PIECE_COLUMNS,
    TARGET_OPS,
    ArgSource,
    AxisInputs,
    TileInputs,
)
from pallas_fa2.ir.tile_values import TileValue, broadcast_to_tile


@dataclasses.dataclass(frozen=True)
class TransposedTile:
    """Queries (columns) against a warpgroup's 64 keys (rows)."""

    schedule: BackwardSchedule
    data: Any  # token_data.TokenData, of masks and scores
    sums: AuxGrads | None  # of the gradients of the data of scores
    step: Step
    first_key: Any
    keys: AxisInputs
    numbers: Mapping[ArgSource, jax.Array]
    lse: Any  # [block_q], or [1 + rows, block_q] with what masks and scores read of queries
    delta: Any
    rings: list[Pipeline]  # of the data of pairs
    me: int  # the warpgroup
    answers: Sequence[jax.Array] = ()  # of a mask that has been asked, of each panel of queries
    place: Any = None  # in the step's block of queries
    pairs: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})

    def at(self, place: Any) -> "TransposedTile":
        return dataclasses.replace(self, place=place)

    def pieces(self, panel: Any) -> list["TransposedTile"]:
        """Of a panel, as many columns at a time as a score function takes."""
        size = PIECE_COLUMNS if self.problem.score is not None or self.rings else QUERY_PANEL
        return [self.at(pl.ds(panel.start + start, size)) for start in range(0, QUERY_PANEL, size)]

    @property
    def problem(self) -> KernelSpec:
        return self.schedule.problem

    def of(self, tile: jax.Array) -> jax.Array:
        """Of a tile of the whole block."""
        return tile[:, self.place.start : self.place.start + self.place.size]

    def row(self, row_data: Any) -> jax.Array:
        """A value of each query."""
        return layouts.load_row(1, row_data.at[self._every(row_data)], jnp.float32)

    def _every(self, row_data: Any) -> Any:
        return self.place if len(row_data.shape) == 1 else (0, self.place)

    def with_pairs(self) -> "TransposedTile":
        """With the data of pairs, once they have landed."""
        problem, found = self.problem, {}
        for ring, source in zip(self.rings, problem.pairs(), strict=True):
            tile = PairwiseTile(ring.wait(self.pair_step)[self.me], keys_are_rows=True)
            if source in problem.pairs(self.step.masked):
                found[source] = tile.load(0, PIECE_COLUMNS, source.dtype)
        return dataclasses.replace(self, pairs=found)

    @property
    def pair_step(self) -> Any:
        """In the rings of pairs."""
        return self.step.t * self.schedule.config.pieces + self.place.start // PIECE_COLUMNS

    def release_pairs(self, p: jax.Array) -> None:
        """Once P is known: an arrival may overtake reads (as in `RowBlock.release_data`)."""
        if self.rings:
            thread_values.fence_before_wgmma_wait(p)
        for ring in self.rings:
            ring.release(self.pair_step)

    def pair_at(self, columns: Any) -> TileInputs:
        """What masks and scores read, of some columns of these; of pairs, of all."""
        q = self.query_side(pl.ds(self.place.start + columns.start, columns.size))
        return TileInputs(q, self.keys, self.numbers, self.pairs)

    def query_side(self, place: Any) -> AxisInputs:
        problem, step, query_data = self.problem, self.step, self.lse
        sources, index = problem.rows("q", step.masked), None
        if problem.reads_index("q", step.masked):
            first = problem.first_query + step.first_query + place.start
            index = thread_values.column_iota(place.size, first)
        if not sources:
            return AxisInputs(1, index)
        if self.data.q is not None:
            block = pl.ds(step.first_query, self.schedule.config.block_q)
            query_data = self.data.q.at[step.head[0], :, block]
        return AxisInputs.load(1, index, query_data.at[:, place], sources)

    @property
    def pair(self) -> TileInputs:
        return self.pair_at(pl.ds(0, self.place.size))

    def probabilities(self, s: jax.Array) -> jax.Array:
        """P^T in float32, from S^T."""
        problem, lse = self.problem, self.row(self.lse)
        of_rows = layouts.broadcast_columns(lse, s.shape)
        if problem.score is None:
            exponent = s * (problem.scale * LOG2E) + of_rows
        else:
            exponent = problem.score.on_tile(s, problem.scale, self.pair) + of_rows
            exponent = self.hide_what_is_not_there(exponent, lse)
        if self.step.masked:
            exponent = self.hide_unseen(exponent)
        if problem.score is None and self.reaches_past:
            # Keys past the end are zeros. Their part of dQ is 0 and their dK and dV are cut off, as
            # long as p stays finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def drop(self, p: jax.Array) -> jax.Array:
        """-P^T where it is dropped."""
        dropped = self.problem.dropout
        if dropped is None:
            return p
        query_data, (batch, head), first = self.lse, self.step.head, self.lse.shape[0] - 2
        if self.data.row_keys is not None:
            block = pl.ds(self.step.first_query, self.schedule.config.block_q)
            query_data, first = self.data.row_keys.at[batch, head, :, block], 0
        words = (query_data.at[first + i, self.place] for i in range(2))
        row_keys = RowKeys(*(layouts.load_row(1, x, jnp.int32) for x in words))
        positions = self.keys.rows[dropped.key] if dropped.given else self.keys.index
        return dropped.negate(p, row_keys, positions, 0)

    def kept(self, p: jax.Array) -> jax.Array:
        """P^T with 0 where it is dropped."""
        return p if self.problem.dropout is None else jnp.maximum(p, 0.0)

    @property
    def reaches_past(self) -> bool:
        return self.step.masked and self.schedule.reaches_past

    def hide_what_is_not_there(self, exponent: jax.Array, lse: jax.Array) -> jax.Array:
        """-inf for keys and queries past the end, where a score may be anything."""
        problem, config, shape = self.problem, self.schedule.config, exponent.shape
        if self.reaches_past:
            number = layouts.index(shape, 0, self.first_key)
            there = layouts.broadcast_rows(number < problem.kv_len, shape)
            exponent = jnp.where(there, exponent, -jnp.inf)
        if problem.q_len % config.block_q:
            there = layouts.broadcast_columns(lse != -jnp.inf, shape)
            exponent = jnp.where(there, exponent, -jnp.inf)
        return exponent

    def hide_unseen(self, exponent: jax.Array) -> jax.Array:
        """-inf where a query does not see a key."""
        problem, step = self.problem, self.step
        if self.answers:
            panel, start = divmod(self.place.start, QUERY_PANEL)
            return masking.apply_bits(exponent, [self.answers[panel]], start)
        if problem.mask is not None:
            return problem.mask.hide(exponent, self.pair_at)
        if not problem.causal:
            return exponent
        # where a query comes before the first that sees a key
        shift = self.first_key - step.first_query - self.place.start - problem.offset
        return masking.mask_before(exponent, layouts.index(exponent.shape, 0, shift))

    def ds(
        self, p: jax.Array, s: jax.Array, dp: jax.Array
    ) -> tuple[jax.Array, dict[ArgSource, jax.Array]]:
        """dS^T, and the gradients of what scores read of keys and heads, to be added up.

        P^T is negative where it is dropped."""
        if self.problem.dropout is not None:
            dp = jnp.where(p > 0, dp * self.problem.kept_scale, 0.0)
            p = abs(p)
        ds = p * (dp + layouts.broadcast_columns(self.row(self.delta), p.shape))
        score = self.problem.score
        if score is None:
            if self.step.masked and self.problem.tames:
                ds = jnp.where(p == 0, 0.0, ds)  # of a hidden pair, dP may be NaN
            return ds, {}
        slope, others = score.slopes(s, self.problem.scale, self.pair)
        alive = p != 0  # and slopes infinite

        def times(slope: TileValue) -> jax.Array:
            slopes = broadcast_to_tile(slope, (0, 1), ds.shape, TARGET_OPS)
            return jnp.where(alive, ds * slopes, 0.0)

        gathered = {}
        for source, slope_of_it in others.items():
            if source.side == "q":
                self._add_to_queries(source, times(slope_of_it))
            elif source.side == "pair":
                self._add_to_pairs(source, times(slope_of_it))
            else:
                gathered[source] = layouts.fold_octets(jnp.add, times(slope_of_it))
        return times(slope), gathered

    def _add_to_queries(self, source: ArgSource, gradient: jax.Array) -> None:
        assert self.sums is not None
        queries = pl.ds(self.step.first_query + self.place.start, self.place.size)
        array, field = self.sums.place(self.problem.score, source)
        register_io.add_column_sums(array.at[self.step.head[0], field, queries], gradient)

    def _add_to_pairs(self, source: ArgSource, gradient: jax.Array) -> None:
        assert self.sums is not None
        query = self.step.first_query + self.place.start
        place = arithmetic.div(query, PIECE_COLUMNS), arithmetic.div(self.first_key, 64)
        array = self.sums.of_pairs(self.problem.score, source)
        target = layouts.index_broadcast(array, *self.step.head, *place)
        if array.dtype == jnp.float32:
            register_io.add_fragments(target, gradient)
        else:
            register_io.store_fragments(target, gradient.astype(array.dtype))

    def add(self, gathered: list[dict[ArgSource, jax.Array]]) -> None:
        """The gradients of some pieces."""
        batch, head = self.step.head
        for source in gathered[0]:
            assert self.sums is not None
            array, field = self.sums.place(self.problem.score, source)
            rows = pl.ds(self.first_key, 64) if source.side == "k" else head
            register_io.add_row_sums(
                array.at[batch, field, rows],
                functools.reduce(jnp.add, (x[source] for x in gathered)),
            )


def concat_columns(pieces: list[jax.Array]) -> jax.Array:
    """Side by side."""
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, 1)
