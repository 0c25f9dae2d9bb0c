"""The output of a tile in device memory: lines 14 and 15 of Algorithm 1."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import LOG2E, div, rem
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.schedule import Entry
from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
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
        is_query, index = self._queries()
        for rows in layouts.slices(acc.shape[0], 64):
            tile = acc[rows.start : rows.start + rows.size].astype(outputs.out.dtype)
            row = layouts.index(tile.shape, 0, rows.start)
            row = jnp.where(row < spec.value_dim, row, -1)
            column = jnp.where(is_query, index * spec.value_dim, -1)
            gather_scatter.scatter_outer(outputs.out, tile, row, column)
        lse = jnp.where(lse <= NO_MAXIMUM, -jnp.inf, lse * (1 / LOG2E))
        index = jnp.where(is_query, index, outputs.lse.shape[0])
        gather_scatter.scatter_columns(outputs.lse, lse, index)

    def _queries(self) -> tuple[jax.Array, jax.Array]:
        """Return which columns are queries, and their indices among those of all tokens and heads."""
        spec = self.cta.spec
        column = layouts.index((64, spec.columns), 1, 0)
        token, member = div(column, spec.padded_group), rem(column, spec.padded_group)
        row = (self.entry.first_query + token) * spec.kv_heads + self.head
        is_query = (token < self.entry.num_queries) & (member < spec.group)
        return is_query, row * spec.group + member
