"""Which probabilities are dropped: bits from counters alone, the same for every tile size and kernel.

A pair of tokens has 16 bits, from the seed, the query head and both positions. The bits are halves of
hashed words, and keys whose positions differ by 8 alone share a word: on a GPU, one thread has both,
in tiles of scores and in their transposes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

SHARED = 8  # the bit of a key's position that chooses the half
FIRST, SECOND = 0x7FEB352D, 0x846CA68B  # C. Wellons, "hash prospector", lowbias32


class RowKeys(NamedTuple):
    """Two words of each query and head: they share a stream of bits only if both collide."""

    first: jax.Array
    second: jax.Array


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with full avalanche."""
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST)
    x = (x ^ (x >> 15)) * jnp.uint32(SECOND)
    return x ^ (x >> 16)


def row_keys(seed: jax.Array, head: jax.Array, row: jax.Array) -> RowKeys:
    """`seed` is uint32 `[2]`; heads are numbered through all batch entries."""
    head, row = (x.astype(jnp.uint32) for x in (head, row))
    second = _mix(head + seed[1]) + row * jnp.uint32(0x9E3779B9)
    return RowKeys(_mix(_mix(head ^ seed[0]) ^ row), _mix(second))


def bits(keys: RowKeys, column: jax.Array) -> jax.Array:
    """16 random bits of each pair, as uint32."""
    column = column.astype(jnp.uint32)
    x = keys.first ^ (column & ~jnp.uint32(SHARED))
    x = (x ^ (x >> 16)) * jnp.uint32(FIRST) + keys.second
    x = (x ^ (x >> 15)) * jnp.uint32(SECOND)
    x = x ^ (x >> 16)
    return jnp.where(column & SHARED != 0, x >> 16, x & jnp.uint32(0xFFFF))


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
