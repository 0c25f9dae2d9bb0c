"""The random bits of dropout: from counters alone, so that they are the same for every tile size and kernel.

A pair of tokens has 16 bits, from the seed, the query head and both positions. The bits are halves of
hashed words, and keys whose positions differ by 8 alone share a word: on a GPU, one thread has both,
in tiles of scores and in their transposes.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.ir.call_spec import CallSpec, Operands

HALF_SELECT_BIT = 8  # the bit of a key's position that chooses the half
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # C. Wellons, "hash prospector", lowbias32


class RowKeys(NamedTuple):
    """Two words of each query and head: two of these have the same bits only if both words collide."""

    first: jax.Array
    second: jax.Array


def _mix(x: jax.Array) -> jax.Array:
    """Map uint32 to uint32, one to one, with full avalanche."""
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_1)
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_2)
    return x ^ (x >> 16)


def row_keys(seed: jax.Array, head: jax.Array, row: jax.Array) -> RowKeys:
    """Hash the seed, uint32 `[2]`, a head's index among those of all batch entries, and a query's position."""
    head, row = (x.astype(jnp.uint32) for x in (head, row))
    second = _mix(head + seed[1]) + row * jnp.uint32(0x9E3779B9)
    return RowKeys(_mix(_mix(head ^ seed[0]) ^ row), _mix(second))


def bits(keys: RowKeys, column: jax.Array) -> jax.Array:
    """Return 16 random bits of each pair, as uint32; `column` is the key's position."""
    column = column.astype(jnp.uint32)
    x = keys.first ^ (column & ~jnp.uint32(HALF_SELECT_BIT))
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_1) + keys.second
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_2)
    x = x ^ (x >> 16)
    return jnp.where(column & HALF_SELECT_BIT != 0, x >> 16, x & jnp.uint32(0xFFFF))


def threshold(rate: float) -> int:
    """Return the threshold below which bits drop a probability: the rate is rounded to a multiple of 2^-16."""
    return min(round(rate * 2**16), 2**16 - 1)


def scale(threshold: int) -> float:
    """Return the factor of probabilities that are kept."""
    return 2**16 / (2**16 - threshold)


def factor(rate: float, keys: RowKeys, column: Any) -> jax.Array:
    """Return 0 where a probability is dropped, `scale` where it is kept."""
    bound = threshold(rate)
    return jnp.where(bits(keys, column) < bound, 0.0, scale(bound))


def query_row_keys(spec: CallSpec, operands: Operands, q_index: jax.Array) -> RowKeys:
    """Return the row keys, `[B, K, G, t, 1]`, of queries whose positions are `[B | 1, 1, 1, t, 1]`."""
    assert operands.seed is not None
    heads = (spec.batch, spec.kv_heads, spec.group)
    if spec.first_position:
        q_index = q_index + np.int32(spec.first_position)
    head = operands.head_index
    if head is None:
        head = lax.iota(jnp.uint32, math.prod(heads)).reshape(*heads, 1, 1)
    return row_keys(operands.seed, head, q_index)
