"""Adds the gradients of what score functions read, of one step, to device memory."""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.primitives import layouts, register_io
from pallas_fa2.backends.common.primitives.types import Scalar, Slice
from pallas_fa2.backends.sm90.backward.cta import Cta
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource
from pallas_fa2.ir.tile_values import TileValue

# Of some queries, the gradients of what is read of keys and heads, folded to `[64, 8]`.
type RowSums = dict[ArgSource, jax.Array]


class StepAuxGrads(NamedTuple):
    """The gradients of aux inputs, of 64 keys against the queries of a step."""

    cta: Cta
    step: Step
    first_key: Scalar

    @property
    def _arrays(self) -> AuxGrads:
        assert self.cta.outputs.aux_grads is not None
        return self.cta.outputs.aux_grads

    def add(
        self, slopes: Mapping[ArgSource, TileValue], times_ds: Callable, columns: Slice
    ) -> RowSums:
        """Add the gradients of what is read of some queries and of pairs; return those that queries share."""
        row_sums = {}
        for source, slope in slopes.items():
            gradient = times_ds(slope)
            if source.side == "q":
                self._add_to_queries(source, gradient, columns)
            elif source.side == "pair":
                self._add_to_pairs(source, gradient, columns)
            else:
                row_sums[source] = layouts.fold_octets(jnp.add, gradient)
        return row_sums

    def _add_to_queries(self, source: ArgSource, gradient: jax.Array, columns: Slice) -> None:
        queries = pl.ds(self.step.compute_first_query() + columns.start, columns.size)
        array, field = self._arrays.field_of(self.cta.schedule.spec.score, source)
        register_io.add_column_sums(array.at[self.step.compute_head()[0], field, queries], gradient)

    def _add_to_pairs(self, source: ArgSource, gradient: jax.Array, columns: Slice) -> None:
        query = self.step.compute_first_query() + columns.start
        tile = arithmetic.div(query, PIECE_COLUMNS), arithmetic.div(self.first_key, 64)
        array = self._arrays.pairwise_of(self.cta.schedule.spec.score, source)
        target = layouts.index_broadcast(array, *self.step.compute_head(), *tile)
        if array.dtype == jnp.float32:
            register_io.add_fragments(target, gradient)
        else:
            register_io.store_fragments(target, gradient.astype(array.dtype))

    def add_row_sums(self, row_sums: list[RowSums]) -> None:
        """Add the gradients of what is read of keys and heads, from those of several tiles of queries."""
        batch, head = self.step.compute_head()
        for source in row_sums[0]:
            array, field = self._arrays.field_of(self.cta.schedule.spec.score, source)
            rows = pl.ds(self.first_key, 64) if source.side == "k" else head
            total = functools.reduce(jnp.add, (sums[source] for sums in row_sums))
            register_io.add_row_sums(array.at[batch, field, rows], total)
