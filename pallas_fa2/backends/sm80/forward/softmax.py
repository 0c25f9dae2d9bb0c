"""The online softmax of 64 rows: Algorithm 1, line 9 and the rescaling of line 10."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Ref
from pallas_fa2.backends.common.split_float32 import TOP_EXPONENT

# Below any score, but finite: a row that has seen no key yet gives p = 0 rather than NaN.
NO_MAXIMUM = -1e30
LN2_HIGH = 0.693359375  # 9 bits
LN2_LOW = math.log(2) - LN2_HIGH


class Softmax(NamedTuple):
    """Algorithm 1's statistics of 64 rows, in base 2, and their unnormalized output."""

    maximum: jax.Array  # m, [64]
    row_sum: jax.Array  # l, [64, 8]: a thread's share of each row
    out: list[jax.Array]  # O, [64, columns] of each panel


class KeyScales(NamedTuple):
    """The `split_float32.Scales` of a block of keys, in registers, `[block_kv]` each."""

    power: jax.Array
    size: jax.Array
    weight: jax.Array

    @classmethod
    def load(cls, buffer: Ref) -> "KeyScales":
        """Load them from shared memory, `[3 block_kv]`."""
        size = buffer.shape[0] // 3
        columns = (buffer.at[pl.ds(i * size, size)] for i in range(3))
        return cls(*(layouts.load_row(1, x, jnp.float32) for x in columns))


def update(
    s: jax.Array, scale: float, state: Softmax, keys: KeyScales | None
) -> tuple[jax.Array, Softmax]:
    """Return P of `scale * s`, line 9, and m, l and O rescaled to the new maximum, as line 10 begins.

    With `keys`, P has the size of each key's value and is about 2^14 at most; m counts these sizes, l does not.
    """
    size = None if keys is None else layouts.broadcast_columns(keys.size, s.shape)
    if size is None:
        highest = layouts.fold_octets(jnp.maximum, s).max(axis=1) * scale
    else:
        highest = round_to_integer(layouts.fold_octets(jnp.maximum, s * scale + size).max(axis=1))
    maximum = jnp.maximum(state.maximum, highest)
    factor = jnp.exp2(state.maximum - maximum)
    if size is None:
        p = jnp.exp2(s * scale - layouts.broadcast_rows(maximum, s.shape))
    else:
        # size - m is exact, so that s * scale is not rounded before it is added to it.
        reference = layouts.broadcast_rows(maximum - float(TOP_EXPONENT), s.shape)
        p = jnp.exp2(s * scale + (size - reference))
    row_sum = state.row_sum * layouts.broadcast_rows(factor, state.row_sum.shape)
    weighted = p if keys is None else p * layouts.broadcast_columns(keys.weight, p.shape)
    row_sum += layouts.fold_octets(jnp.add, weighted)
    out = [x * layouts.broadcast_rows(factor, x.shape) for x in state.out]
    return p, Softmax(maximum, row_sum, out)


def log_sum(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Return m ln 2 + log l of split operands, rounded once: gradients are relative to its error.

    m is an integer, and counts the sizes of values, which l takes back: both may be 2^100 where their product is 1. So
    they are added as exponents, and ln 2 has two parts, of which products with the first are exact up to 2^15.
    """
    bits = lax.bitcast_convert_type(total, jnp.int32)
    exponent = maximum + ((bits >> 23) - 127).astype(jnp.float32)
    mantissa = lax.bitcast_convert_type((bits & 0x7FFFFF) | (127 << 23), jnp.float32)
    lse = exponent * LN2_HIGH + (exponent * LN2_LOW + jnp.log(mantissa))
    return jnp.where(total < jnp.inf, lse, jnp.nan)


def round_to_integer(x: jax.Array) -> jax.Array:
    """Round to the nearest integer; from 2^22 on, where float32 has no more than halves, x stays as it is."""
    big = 1.5 * 2.0**23  # its neighbors are integers
    return jnp.where(jnp.abs(x) < 2.0**22, (x + big) - big, x)
