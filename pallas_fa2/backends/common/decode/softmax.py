"""The online softmax of transposed tiles: the statistics m and l of Algorithm 1, of the queries in columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, COL_LAYOUT, broadcast_columns


class OnlineSoftmax(NamedTuple):
    """The statistics of all columns over the blocks so far, and O of these blocks."""

    acc: jax.Array  # O^T, unnormalized, float32 [Hv, columns]
    maximum: jax.Array  # m in base 2, [columns]
    total: jax.Array  # the sums of l over each thread's rows, [64, columns]

    @classmethod
    def start(cls, value_dim: int, columns: int) -> "OnlineSoftmax":
        """Return line 5."""

        def zeros(rows: int) -> jax.Array:
            return layouts.splat_constant(0.0, (rows, columns), ACC_LAYOUT)

        maximum = layouts.splat_constant(NO_MAXIMUM, (columns,), COL_LAYOUT)
        return cls(zeros(value_dim), maximum, zeros(64))

    def update(self, s: jax.Array) -> tuple[jax.Array, "OnlineSoftmax"]:
        """Return P^T of a block, unnormalized, from its scores in base 2, and line 9: the new statistics, with O scaled
        to the new maxima."""
        maximum = jnp.maximum(self.maximum, jnp.max(s, axis=0))
        factor = jnp.exp2(self.maximum - maximum)
        p = jnp.exp2(s - broadcast_columns(maximum, s.shape))
        total = self.total * broadcast_columns(factor, s.shape) + p
        acc = self.acc * broadcast_columns(factor, self.acc.shape)
        return p, OnlineSoftmax(acc, maximum, total)

    def finish(self, no_key_threshold: float) -> tuple[jax.Array, jax.Array]:
        """Return lines 12 and 13: O^T, normalized, and its lse in base 2, which is `NO_MAXIMUM` where it is empty."""
        total = jnp.sum(self.total, axis=0)
        is_empty = (total == 0) | (self.maximum <= no_key_threshold)
        scale = jnp.where(is_empty, 0.0, 1 / total)
        lse = jnp.where(is_empty, NO_MAXIMUM, self.maximum + jnp.log2(total))
        return self.acc * broadcast_columns(scale, self.acc.shape), lse
