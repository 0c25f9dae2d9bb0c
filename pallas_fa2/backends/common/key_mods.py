"""Score functions, masks and dropout on transposed tiles, 64 keys by some queries, in registers: P^T and dS^T."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import (
    accumulate,
    layouts,
    masking,
    register_io,
    thread_values,
)
from pallas_fa2.backends.common.primitives.layouts import ROWS_PER_WARPGROUP
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.tile_ops import TILE_OPS
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.tile_gradients import softmax_gradient, times_derivative
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.control_flow import rematerialize
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource, AxisInputs, TileInputs


class KeyAxisInputs(NamedTuple):
    """What masks, scores and dropout read of 64 keys and of their head, in registers."""

    axis: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]

    @classmethod
    def load(
        cls,
        spec: KernelSpec,
        aux: AuxInputs,
        head: tuple[Scalar, Scalar],
        first_key: Scalar,
        masked: bool,
    ) -> "KeyAxisInputs":
        """Load what scores and dropout, and the mask if `masked`, read of keys of `head`, (batch entry, head)."""
        sources, reads_index = spec.token_inputs("k", masked), spec.reads_index("k", masked)
        axis, scalars = AxisInputs(0), {}
        if sources or reads_index:
            first = rematerialize(first_key)
            rows = aux.k.at[head[0], :, pl.ds(first, ROWS_PER_WARPGROUP)]
            shape = ROWS_PER_WARPGROUP, PIECE_COLUMNS
            index = layouts.index(shape, 0, first) if reads_index else None
            axis = load_axis_inputs(TILE_OPS, 0, index, rows, sources)
        if head_sources := spec.head_inputs(masked):
            scalars = aux.head_scalars.load(*head, head_sources)
        return cls(axis, scalars)


@dataclasses.dataclass(frozen=True)
class KeyMods:
    """The score functions, the mask and the dropout of 64 keys (rows) against some queries (columns)."""

    spec: KernelSpec
    aux: AuxInputs | None
    aux_grads: AuxGrads | None
    head: tuple[Scalar, Scalar]  # batch entry, query head
    first_key: Scalar
    first_query: Scalar
    key_inputs: KeyAxisInputs
    masked: bool  # whether inputs of the mask are loaded as well
    kv_tail_visible: bool  # whether some keys may not exist: zeros that nothing masks

    @classmethod
    def load(
        cls,
        spec: KernelSpec,
        aux: AuxInputs | None,
        aux_grads: AuxGrads | None,
        head: tuple[Scalar, Scalar],
        first_key: Scalar,
        first_query: Scalar,
        masked: bool,
        kv_tail_visible: bool,
    ) -> "KeyMods":
        """Load what scores and dropout, and the mask if `masked`, read of 64 keys; what they read of queries and pairs
        stays in device memory."""
        inputs = KeyAxisInputs(AxisInputs(0), {})
        if aux is not None:
            inputs = KeyAxisInputs.load(spec, aux, head, first_key, masked)
        tile = head, first_key, first_query
        return cls(spec, aux, aux_grads, *tile, inputs, masked, kv_tail_visible)

    def inputs_at(self, columns: Any) -> TileInputs:
        """Load what masks and scores read of some columns."""
        spec, aux, q, pairwise = self.spec, self.aux, AxisInputs(1), {}
        first = self.first_query + columns.start
        if spec.reads_index("q", self.masked):
            index = thread_values.column_iota(columns.size, spec.q_index_offset + first)
            q = AxisInputs(1, index)
        if sources := spec.token_inputs("q", self.masked):
            assert aux is not None
            rows = aux.q.at[self.head[0], :, pl.ds(first, columns.size)]
            q = load_axis_inputs(TILE_OPS, 1, q.index, rows, sources)
        for source in spec.pairwise_inputs(self.masked):
            assert aux is not None and source.position is not None
            pairs = pl.ds(first, columns.size), pl.ds(self.first_key, ROWS_PER_WARPGROUP)
            array = layouts.index_broadcast(aux.pairwise[source.position], *self.head, *pairs)
            tile = PairwiseTile(array, is_swizzled=False, transposed=True)
            pairwise[source] = tile.load(0, columns.size, source.dtype)
        return TileInputs(q, self.key_inputs.axis, self.key_inputs.head_scalars, pairwise)

    def exponents(self, s: jax.Array, lse: jax.Array) -> jax.Array:
        """Return log2 P^T from S^T = K Q^T, not scaled, and -lse in base 2 of each query, without the mask."""
        spec, column_lse = self.spec, layouts.broadcast_columns(lse, s.shape)
        if spec.score is None:
            return s * (spec.scale * LOG2E) + column_lse
        pieces = [
            spec.score.evaluate(layouts.slice_columns(s, x), spec.scale, self.inputs_at(x))
            for x in layouts.slices(s.shape[1], PIECE_COLUMNS)
        ]
        # -inf for keys and queries past the end, where a score may be anything
        key = layouts.index(s.shape, 0, self.first_key)
        exists = layouts.broadcast_rows(key < spec.kv_len, s.shape) & (column_lse != -jnp.inf)
        return jnp.where(exists, lax.concatenate(pieces, 1) + column_lse, -jnp.inf)

    def apply_mask(self, exponent: jax.Array, bits: Sequence[jax.Array] = ()) -> jax.Array:
        """Set to -inf where a query does not see a key, by the mask's bits if they are precomputed."""
        spec = self.spec
        if bits:
            return masking.apply_bits(exponent, bits)
        if spec.mask is not None:
            return spec.mask.apply(exponent, self.inputs_at)
        assert spec.causal_offset is not None
        # where a query comes before the first that sees a key
        shift = self.first_key - self.first_query - spec.causal_offset
        return masking.mask_before(exponent, layouts.index(exponent.shape, 0, shift))

    def probabilities(self, exponent: jax.Array) -> jax.Array:
        """Return P^T in float32."""
        if self.spec.score is None and self.kv_tail_visible:
            # Keys past the end are zeros. Their part of dQ is 0 and their dK and dV are not stored, as long as p
            # stays finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def apply_dropout(self, p: jax.Array) -> jax.Array:
        """Return -P^T where it is dropped."""
        dropout = self.spec.dropout
        if dropout is None:
            return p
        assert self.aux is not None and self.aux.row_keys is not None
        queries = pl.ds(self.first_query, p.shape[1])
        words = (self.aux.row_keys.at[(*self.head, i, queries)] for i in range(2))
        row_keys, axis = (
            RowKeys(*(layouts.load_row(1, x, I32) for x in words)),
            self.key_inputs.axis,
        )
        given = dropout.explicit_positions
        positions = axis.arrays[dropout.key_positions] if given else axis.index
        return dropout.mark_dropped(p, row_keys, positions, 0)

    def zero_dropped(self, p: jax.Array) -> jax.Array:
        """Return P^T with 0 where it is dropped."""
        return p if self.spec.dropout is None else jnp.maximum(p, 0.0)

    def ds(self, p: jax.Array, s: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
        """Return dS^T, and add the gradients of what scores read to device memory.

        P^T is negative where it is dropped; `delta` is -delta of each query.
        """
        ds = softmax_gradient(self.spec, p, dp, layouts.broadcast_columns(delta, p.shape))
        if self.spec.score is None:
            return ds
        pieces, row_grads = [], []
        for columns in layouts.slices(p.shape[1], PIECE_COLUMNS):
            piece_p, piece_s, piece_ds = (layouts.slice_columns(x, columns) for x in (p, s, ds))
            piece, of_rows = self._score_gradients(piece_p, piece_s, piece_ds, columns)
            pieces.append(piece)
            row_grads.append(of_rows)
        for source in row_grads[0]:
            self._add_to_rows(source, functools.reduce(jnp.add, (x[source] for x in row_grads)))
        return lax.concatenate(pieces, 1)

    def _score_gradients(
        self, p: jax.Array, s: jax.Array, ds: jax.Array, columns: Any
    ) -> tuple[jax.Array, dict[ArgSource, jax.Array]]:
        """Return the gradient of the scores of some columns, and of what they read of keys and heads."""
        score = self.spec.score
        inputs = self.inputs_at(columns)
        derivative, by_inputs = score.derivatives(s, self.spec.scale, inputs)
        of_rows = {}
        for source, by_input in by_inputs.items():
            gradient = times_derivative(ds, p, by_input)
            if source.side == "q":
                self._add_to_queries(source, gradient, columns)
            elif source.side == "pair":
                self._add_to_pairs(source, gradient, columns)
            else:
                of_rows[source] = layouts.fold_octets(jnp.add, gradient)
        return times_derivative(ds, p, derivative), of_rows

    def _add_to_rows(self, source: ArgSource, gradient: jax.Array) -> None:
        """Add the gradient of what scores read of keys or of the head."""
        assert self.aux_grads is not None
        array, field = self.aux_grads.field_of(self.spec.score, source)
        row = pl.ds(self.first_key, ROWS_PER_WARPGROUP) if source.side == "k" else self.head[1]
        register_io.add_row_sums(array.at[self.head[0], field, row], gradient)

    def _add_to_queries(self, source: ArgSource, gradient: jax.Array, columns: Any) -> None:
        assert self.aux_grads is not None
        array, field = self.aux_grads.field_of(self.spec.score, source)
        queries = pl.ds(self.first_query + columns.start, columns.size)
        register_io.add_column_sums(array.at[self.head[0], field, queries], gradient)

    def _add_to_pairs(self, source: ArgSource, gradient: jax.Array, columns: Any) -> None:
        assert self.aux_grads is not None
        query = arithmetic.div(self.first_query + columns.start, PIECE_COLUMNS)
        tile = query, arithmetic.div(self.first_key, ROWS_PER_WARPGROUP)
        array = self.aux_grads.pairwise_of(self.spec.score, source)
        target = layouts.index_broadcast(array, *self.head, *tile)
        if array.dtype == jnp.float32:
            accumulate.add_tile(target, gradient, vectors=False)
        else:
            register_io.store_fragments(target, gradient.astype(array.dtype))
