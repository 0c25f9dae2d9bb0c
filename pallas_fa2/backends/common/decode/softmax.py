"""The online softmax of transposed tiles: the statistics m and l of Algorithm 1, of the queries in columns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    COL_LAYOUT,
    broadcast_columns,
    broadcast_rows,
)

# In the unit of O, P^T times the scales of V is below 2^15, float16's largest power of two, and down to 2^-14, 2^-29 of
# that, it is no subnormal number: so it has 11 bits, where bfloat16 would have 8.
P_EXPONENT = 14
MANTISSA_BITS, BIAS = 23, 127  # of float32


class ValueUnit(NamedTuple):
    """A power of two in which O is summed: 2^-14 times that of the largest scale of V so far.

    The products of P and the scales then fit float16, whatever the scales are.
    """

    exponent: jax.Array  # of the largest scale: the bits of that power of two as float32

    @classmethod
    def start(cls) -> "ValueUnit":
        """Return the least unit that is, as its inverse is, a normal float32."""
        return cls(jnp.int32((P_EXPONENT + 1) << MANTISSA_BITS))

    def raised(self, exponent: jax.Array) -> tuple["ValueUnit", jax.Array]:
        """Return the unit after a block whose largest scale has this exponent, and this unit over that one."""
        larger = jnp.maximum(self.exponent, exponent)
        return ValueUnit(larger), _power(self.exponent - larger, BIAS)

    @property
    def value(self) -> jax.Array:
        """The unit, 2^-14 times the power of two of the largest scale."""
        return _power(self.exponent, -P_EXPONENT)

    @property
    def inverse(self) -> jax.Array:
        return _power(-self.exponent, 2 * BIAS + P_EXPONENT)


def _power(exponent: jax.Array, added: int) -> jax.Array:
    """Return the power of two whose exponent is in these bits, plus a number; 0 where it is too small for float32."""
    bits = jnp.maximum((exponent >> MANTISSA_BITS) + added, 0)
    return lax.bitcast_convert_type(bits << MANTISSA_BITS, jnp.float32)


class ValueScales(NamedTuple):
    """The scales of V of a block."""

    scales: jax.Array  # float32 [64], 0 where no query attends to a key
    # The power of two of the largest finite scale, as the bits of a float32: of the keys that exist, also where the
    # mask's code hides them.
    exponent: jax.Array


class OnlineSoftmax(NamedTuple):
    """The statistics of all columns over the blocks so far, and O of these blocks."""

    acc: jax.Array  # O^T, unnormalized, float32 [Hv, columns]
    maximum: jax.Array  # m in base 2, [columns]
    total: jax.Array  # the sums of l over each thread's rows, [64, columns]
    unit: ValueUnit | None = None  # of O, where V has scales

    @classmethod
    def start(cls, value_dim: int, columns: int, has_scales: bool = False) -> "OnlineSoftmax":
        """Return line 5."""

        def zeros(rows: int) -> jax.Array:
            return layouts.splat_constant(0.0, (rows, columns), ACC_LAYOUT)

        maximum = layouts.splat_constant(NO_MAXIMUM, (columns,), COL_LAYOUT)
        unit = ValueUnit.start() if has_scales else None
        return cls(zeros(value_dim), maximum, zeros(64), unit)

    def update(
        self, s: jax.Array, values: ValueScales | None = None
    ) -> tuple[jax.Array, "OnlineSoftmax"]:
        """Return P^T of a block, unnormalized, from its scores in base 2, and line 9: the new statistics, with O scaled
        to the new maxima.

        Where V has scales, P^T is multiplied by them, in the new unit of O.
        """
        maximum = jnp.maximum(self.maximum, jnp.max(s, axis=0))
        factor = jnp.exp2(self.maximum - maximum)
        p = jnp.exp2(s - broadcast_columns(maximum, s.shape))
        total = self.total * broadcast_columns(factor, s.shape) + p
        unit = self.unit
        if unit is not None:
            assert values is not None
            unit, raised = unit.raised(values.exponent)
            factor = factor * raised
            p = p * broadcast_rows(values.scales * unit.inverse, p.shape)
        acc = self.acc * broadcast_columns(factor, self.acc.shape)
        return p, OnlineSoftmax(acc, maximum, total, unit)

    def finish(self, no_key_threshold: float) -> tuple[jax.Array, jax.Array]:
        """Return lines 12 and 13: O^T, normalized, and its lse in base 2, which is `NO_MAXIMUM` where it is empty."""
        total = jnp.sum(self.total, axis=0)
        is_empty = (total == 0) | (self.maximum <= no_key_threshold)
        one = 1.0 if self.unit is None else self.unit.value
        scale = jnp.where(is_empty, 0.0, one / total)
        lse = jnp.where(is_empty, NO_MAXIMUM, self.maximum + jnp.log2(total))
        return self.acc * broadcast_columns(scale, self.acc.shape), lse


def natural_lse(lse: jax.Array) -> jax.Array:
    """Return the natural logsumexp, -inf where there is no key, of one in base 2."""
    return jnp.where(lse <= NO_MAXIMUM, -jnp.inf, lse * (1 / LOG2E))
