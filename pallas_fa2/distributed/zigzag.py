"""The zigzag order of a sequence over devices, by which each computes as much of a causal mask as the others."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Layout = Literal["contiguous", "zigzag"]


class Zigzag(NamedTuple):
    """The zigzag order of T tokens: `x[permutation]` is in it, and `y[inverse]` in the order of the sequence again.

    Both are int32 `[T]`. `permutation` holds the positions of the tokens of device 0, then those of device 1, ...
    """

    permutation: np.ndarray
    inverse: np.ndarray


def zigzag(length: int, shards: int) -> Zigzag:
    """Order `length` tokens so that device i of `shards` has chunks i and 2 shards - 1 - i of 2 shards equal chunks.

    Under a causal mask chunk c attends to c + 1 chunks, and both chunks of each device to 2 shards + 1 together.
    Permute tokens, labels and whatever belongs to them once, before they are divided over devices::

        order = fa.zigzag(T, n)
        tokens, labels = tokens[:, order.permutation], labels[:, order.permutation]
        positions = order.permutation                       # for RoPE and learned positions

    Raises:
      TypeError, ValueError: one is no integer; `shards` is below 1; `length` is no multiple of `2 * shards`.
    """
    for name, x in (("length", length), ("shards", shards)):
        if isinstance(x, bool) or not isinstance(x, int | np.integer):
            raise TypeError(
                f"zigzag: {name} must be an integer, but it is {x!r}; write zigzag(T, number of devices)"
            )
    if shards < 1:
        raise ValueError(
            f"zigzag: shards must be at least 1, but it is {shards}; pass the number of devices of the mesh axis"
        )
    if length % (2 * shards):
        raise ValueError(
            f"zigzag: length must be a multiple of 2 * shards = {2 * shards}, but it is {length}; pad the sequence"
        )
    permutation = positions("zigzag", length // shards, shards).reshape(-1)
    return Zigzag(permutation, np.argsort(permutation).astype(np.int32))


def positions(layout: Layout, length: int, shards: int) -> np.ndarray:
    """Return the positions of the tokens of all devices, of which each has `length`: int32 `[shards, length]`."""
    starts = chunk_starts(layout, length, shards)
    tokens = np.arange(length // starts.shape[1], dtype=np.int32)
    return (starts[..., None] + tokens).reshape(shards, length)


def chunk_starts(layout: Layout, length: int, shards: int) -> np.ndarray:
    """Return the position of the first token of each chunk, int32 `[shards, 1 | 2]`; a shard has `length` tokens."""
    device = np.arange(shards, dtype=np.int32)
    if layout == "contiguous":
        return (device * length)[:, None]
    return np.stack([device, 2 * shards - 1 - device], 1) * np.int32(length // 2)


def to_sequence_order(x: jax.Array, axis: int, shards: int) -> jax.Array:
    """Reorder an axis with the tokens of all devices from zigzag order to that of the sequence."""
    chunks = _split(x, axis, shards, 2)
    low, high = (jax.lax.index_in_dim(chunks, i, axis + 1, keepdims=False) for i in range(2))
    return jnp.concatenate([low, jnp.flip(high, axis)], axis).reshape(x.shape)


def to_zigzag_order(x: jax.Array, axis: int, shards: int) -> jax.Array:
    """Reorder an axis with the tokens of all devices from the order of the sequence to zigzag order."""
    chunks = _split(x, axis, 2, shards)
    low, high = (jax.lax.index_in_dim(chunks, i, axis, keepdims=False) for i in range(2))
    return jnp.stack([low, jnp.flip(high, axis)], axis + 1).reshape(x.shape)


def _split(x: jax.Array, axis: int, *sizes: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], *sizes, -1, *x.shape[axis + 1 :])
