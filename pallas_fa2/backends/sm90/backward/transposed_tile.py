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
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90.backward.config import QUERY_PANEL
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule, Step
from pallas_fa2.backends.sm90.primitives import layouts, masking, register_io, thread_values
from pallas_fa2.backends.sm90.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.primitives.tile_ops import TARGET_OPS, TILE_OPS
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource, AxisInputs, TileInputs
from pallas_fa2.ir.tile_values import TileValue, broadcast_to_tile


@dataclasses.dataclass(frozen=True)
class TransposedTile:
    """Queries (columns) against a warpgroup's 64 keys (rows)."""

    schedule: BackwardSchedule
    aux: Any  # token_data.TokenData, of masks and scores
    aux_grads: AuxGrads | None  # of the gradients of the data of scores
    step: Step
    first_key: Any
    keys: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    lse: Any  # [block_q], or [1 + rows, block_q] with what masks and scores read of queries
    delta: Any
    pairwise_pipelines: list[Pipeline]  # of the data of pairs
    warpgroup: int  # the warpgroup
    mask_bits: Sequence[jax.Array] = ()  # of a mask that has been asked, of each panel of queries
    columns: Any = None  # in the step's block of queries
    pairwise: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})

    def at_columns(self, place: Any) -> "TransposedTile":
        return dataclasses.replace(self, columns=place)

    def column_pieces(self, panel: Any) -> list["TransposedTile"]:
        """Of a panel, as many columns at a time as a score function takes."""
        size = (
            PIECE_COLUMNS
            if self.problem.score is not None or self.pairwise_pipelines
            else QUERY_PANEL
        )
        return [
            self.at_columns(pl.ds(panel.start + start, size))
            for start in range(0, QUERY_PANEL, size)
        ]

    @property
    def problem(self) -> KernelSpec:
        return self.schedule.spec

    def slice(self, tile: jax.Array) -> jax.Array:
        """Of a tile of the whole block."""
        return tile[:, self.columns.start : self.columns.start + self.columns.size]

    def row(self, row_data: Any) -> jax.Array:
        """A value of each query."""
        return layouts.load_row(1, row_data.at[self._every(row_data)], jnp.float32)

    def _every(self, row_data: Any) -> Any:
        return self.columns if len(row_data.shape) == 1 else (0, self.columns)

    def with_pairwise(self) -> "TransposedTile":
        """With the data of pairs, once they have landed."""
        problem, found = self.problem, {}
        for ring, source in zip(self.pairwise_pipelines, problem.pairwise_inputs(), strict=True):
            tile = PairwiseTile(
                ring.consumer_wait(self.pairwise_step)[self.warpgroup], transposed=True
            )
            if source in problem.pairwise_inputs(self.step.masked):
                found[source] = tile.load(0, PIECE_COLUMNS, source.dtype)
        return dataclasses.replace(self, pairwise=found)

    @property
    def pairwise_step(self) -> Any:
        """In the rings of pairs."""
        return (
            self.step.global_step * self.schedule.config.column_pieces
            + self.columns.start // PIECE_COLUMNS
        )

    def release_pairwise(self, p: jax.Array) -> None:
        """Once P is known: an arrival may overtake reads (as in `RowBlock.release_aux`)."""
        if self.pairwise_pipelines:
            thread_values.fence_before_wgmma_wait(p)
        for ring in self.pairwise_pipelines:
            ring.consumer_release(self.pairwise_step)

    def inputs_for_columns(self, columns: Any) -> TileInputs:
        """What masks and scores read, of some columns of these; of pairs, of all."""
        q = self.query_side(pl.ds(self.columns.start + columns.start, columns.size))
        return TileInputs(q, self.keys, self.head_scalars, self.pairwise)

    def query_side(self, place: Any) -> AxisInputs:
        problem, step, query_data = self.problem, self.step, self.lse
        sources, index = problem.token_inputs("q", step.masked), None
        if problem.reads_index("q", step.masked):
            first = problem.q_index_offset + step.first_query + place.start
            index = thread_values.column_iota(place.size, first)
        if not sources:
            return AxisInputs(1, index)
        if self.aux.q is not None:
            block = pl.ds(step.first_query, self.schedule.config.block_q)
            query_data = self.aux.q.at[step.head[0], :, block]
        return load_axis_inputs(TILE_OPS, 1, index, query_data.at[:, place], sources)

    @property
    def inputs(self) -> TileInputs:
        return self.inputs_for_columns(pl.ds(0, self.columns.size))

    def probabilities(self, s: jax.Array) -> jax.Array:
        """P^T in float32, from S^T."""
        problem, lse = self.problem, self.row(self.lse)
        of_rows = layouts.broadcast_columns(lse, s.shape)
        if problem.score is None:
            exponent = s * (problem.scale * LOG2E) + of_rows
        else:
            exponent = problem.score.evaluate(s, problem.scale, self.inputs) + of_rows
            exponent = self.mask_tails(exponent, lse)
        if self.step.masked:
            exponent = self.apply_mask(exponent)
        if problem.score is None and self.kv_tail_visible:
            # Keys past the end are zeros. Their part of dQ is 0 and their dK and dV are cut off, as
            # long as p stays finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def apply_dropout(self, p: jax.Array) -> jax.Array:
        """-P^T where it is dropped."""
        dropped = self.problem.dropout
        if dropped is None:
            return p
        query_data, (batch, head), first = self.lse, self.step.head, self.lse.shape[0] - 2
        if self.aux.row_keys is not None:
            block = pl.ds(self.step.first_query, self.schedule.config.block_q)
            query_data, first = self.aux.row_keys.at[batch, head, :, block], 0
        words = (query_data.at[first + i, self.columns] for i in range(2))
        row_keys = RowKeys(*(layouts.load_row(1, x, jnp.int32) for x in words))
        positions = (
            self.keys.arrays[dropped.key_positions]
            if dropped.explicit_positions
            else self.keys.index
        )
        return dropped.mark_dropped(p, row_keys, positions, 0)

    def undropped(self, p: jax.Array) -> jax.Array:
        """P^T with 0 where it is dropped."""
        return p if self.problem.dropout is None else jnp.maximum(p, 0.0)

    @property
    def kv_tail_visible(self) -> bool:
        return self.step.masked and self.schedule.kv_tail_visible

    def mask_tails(self, exponent: jax.Array, lse: jax.Array) -> jax.Array:
        """-inf for keys and queries past the end, where a score may be anything."""
        problem, config, shape = self.problem, self.schedule.config, exponent.shape
        if self.kv_tail_visible:
            number = layouts.index(shape, 0, self.first_key)
            there = layouts.broadcast_rows(number < problem.kv_len, shape)
            exponent = jnp.where(there, exponent, -jnp.inf)
        if problem.q_len % config.block_q:
            there = layouts.broadcast_columns(lse != -jnp.inf, shape)
            exponent = jnp.where(there, exponent, -jnp.inf)
        return exponent

    def apply_mask(self, exponent: jax.Array) -> jax.Array:
        """-inf where a query does not see a key."""
        problem, step = self.problem, self.step
        if self.mask_bits:
            panel, start = divmod(self.columns.start, QUERY_PANEL)
            return masking.apply_bits(exponent, [self.mask_bits[panel]], start)
        if problem.mask is not None:
            return problem.mask.apply(exponent, self.inputs_for_columns)
        if not problem.causal:
            return exponent
        # where a query comes before the first that sees a key
        shift = self.first_key - step.first_query - self.columns.start - problem.causal_offset
        return masking.mask_before(exponent, layouts.index(exponent.shape, 0, shift))

    def ds(
        self, p: jax.Array, s: jax.Array, dp: jax.Array
    ) -> tuple[jax.Array, dict[ArgSource, jax.Array]]:
        """dS^T, and the gradients of what scores read of keys and heads, to be added up.

        P^T is negative where it is dropped."""
        if self.problem.dropout is not None:
            dp = jnp.where(p > 0, dp * self.problem.dropout_scale, 0.0)
            p = abs(p)
        ds = p * (dp + layouts.broadcast_columns(self.row(self.delta), p.shape))
        score = self.problem.score
        if score is None:
            if self.step.masked and self.problem.guards_nonfinite:
                ds = jnp.where(p == 0, 0.0, ds)  # of a hidden pair, dP may be NaN
            return ds, {}
        slope, others = score.derivatives(s, self.problem.scale, self.inputs)
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
        assert self.aux_grads is not None
        queries = pl.ds(self.step.first_query + self.columns.start, self.columns.size)
        array, field = self.aux_grads.field_of(self.problem.score, source)
        register_io.add_column_sums(array.at[self.step.head[0], field, queries], gradient)

    def _add_to_pairs(self, source: ArgSource, gradient: jax.Array) -> None:
        assert self.aux_grads is not None
        query = self.step.first_query + self.columns.start
        place = arithmetic.div(query, PIECE_COLUMNS), arithmetic.div(self.first_key, 64)
        array = self.aux_grads.pairwise_of(self.problem.score, source)
        target = layouts.index_broadcast(array, *self.step.head, *place)
        if array.dtype == jnp.float32:
            register_io.add_fragments(target, gradient)
        else:
            register_io.store_fragments(target, gradient.astype(array.dtype))

    def accumulate_aux_grads(self, gathered: list[dict[ArgSource, jax.Array]]) -> None:
        """The gradients of some pieces."""
        batch, head = self.step.head
        for source in gathered[0]:
            assert self.aux_grads is not None
            array, field = self.aux_grads.field_of(self.problem.score, source)
            rows = pl.ds(self.first_key, 64) if source.side == "k" else head
            register_io.add_row_sums(
                array.at[batch, field, rows],
                functools.reduce(jnp.add, (x[source] for x in gathered)),
            )


def concat_columns(pieces: list[jax.Array]) -> jax.Array:
    """Side by side."""
    return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, 1)
