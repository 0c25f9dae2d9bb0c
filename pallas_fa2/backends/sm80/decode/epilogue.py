"""The output of a tile in device memory: lines 14 and 15 of Algorithm 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.columns import QueryColumns
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.softmax import natural_lse
from pallas_fa2.backends.common.primitives import gather_scatter, layouts
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm80.decode.memory import SharedStorage


class TileOutput(NamedTuple):
    """Where the output of a tile goes."""

    cta: Cta[SharedStorage]
    entry: Entry
    head: Scalar

    def store(self, acc: jax.Array, lse: jax.Array) -> None:
        """Store O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`: lines 14 and 15."""
        spec, outputs = self.cta.spec, self.cta.outputs
        columns = QueryColumns.compute(spec)
        is_query = columns.are_queries(spec, self.entry)
        index = columns.compute_index(spec, self.entry, self.head)
        for rows in layouts.slices(acc.shape[0], 64):
            tile = acc[rows.start : rows.start + rows.size].astype(outputs.out.dtype)
            row = layouts.index(tile.shape, 0, rows.start)
            row = jnp.where(row < spec.value_dim, row, -1)
            column = jnp.where(is_query, index * spec.value_dim, -1)
            gather_scatter.scatter_outer(outputs.out, tile, row, column)
        index = jnp.where(is_query, index, outputs.lse.shape[0])
        gather_scatter.scatter_columns(outputs.lse, natural_lse(lse), index)
