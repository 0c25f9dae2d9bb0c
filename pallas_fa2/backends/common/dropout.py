"""Which probabilities are dropped: bits from counters alone, the same for every tile size and kernel.

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

from pallas_fa2.ir.call_spec import CallSpec

HALF_SELECT_BIT = 8  # the bit of a key's position that chooses the half
MIX_1, MIX_2 = 0x7FEB352D, 0x846CA68B  # C. Wellons, "hash prospector", lowbias32


class RowKeys(NamedTuple):
    """Two words of each query and head: they share a stream of bits only if both collide."""

    first: jax.Array
    second: jax.Array


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with full avalanche."""
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_1)
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_2)
    return x ^ (x >> 16)


def row_keys(seed: jax.Array, head: jax.Array, row: jax.Array) -> RowKeys:
    """`seed` is uint32 `[2]`; heads are numbered through all batch entries."""
    head, row = (x.astype(jnp.uint32) for x in (head, row))
    second = _mix(head + seed[1]) + row * jnp.uint32(0x9E3779B9)
    return RowKeys(_mix(_mix(head ^ seed[0]) ^ row), _mix(second))


def bits(keys: RowKeys, column: jax.Array) -> jax.Array:
    """16 random bits of each pair, as uint32."""
    column = column.astype(jnp.uint32)
    x = keys.first ^ (column & ~jnp.uint32(HALF_SELECT_BIT))
    x = (x ^ (x >> 16)) * jnp.uint32(MIX_1) + keys.second
    x = (x ^ (x >> 15)) * jnp.uint32(MIX_2)
    x = x ^ (x >> 16)
    return jnp.where(column & HALF_SELECT_BIT != 0, x >> 16, x & jnp.uint32(0xFFFF))


def threshold(rate: float) -> int:
    """Below it, bits drop a probability: the rate is rounded to a multiple of 2^-16."""
    return min(round(rate * 2**16), 2**16 - 1)


def scale(threshold: int) -> float:
    """Of what is kept."""
    return 2**16 / (2**16 - threshold)


def factor(rate: float, keys: RowKeys, column: Any) -> jax.Array:
    """0 where a probability is dropped, `scale` where it is kept."""
    bound = threshold(rate)
    return jnp.where(bits(keys, column) < bound, 0.0, scale(bound))


def query_row_keys(spec: CallSpec, seed: jax.Array | None, q_index: jax.Array) -> RowKeys:
    """Of queries whose positions are `[B | 1, 1, 1, t, 1]`: `[B, K, G, t, 1]`."""
    assert seed is not None
    heads = (spec.batch, spec.kv_heads, spec.group)
    if spec.first_position:
        q_index = q_index + np.int32(spec.first_position)
    number = lax.iota(jnp.uint32, math.prod(heads)).reshape(*heads, 1, 1)
    return row_keys(seed, number, q_index)
