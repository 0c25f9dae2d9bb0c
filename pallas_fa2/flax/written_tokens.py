"""Flax's own cache, arrays of which the first tokens are written, as a `Cache` for `cached_attention`."""

import jax
import jax.numpy as jnp

from pallas_fa2.caches import Cache


def as_cache(
    key: jax.Array, value: jax.Array, length: jax.Array, dropout_rate: float
) -> Cache | None:
    """Return the cache whose first `length` tokens of each sequence are written, the last ones by this call.

    `cached_attention` on it is what a layer wants: positions follow from the length, and masks and scores are the same
    objects. None where that has not all that a layer has, which are dropout and batch axes other than one:
    `flash_attention` then takes the positions as data.
    """
    if key.ndim != 4 or dropout_rate:
        return None
    batch, capacity = key.shape[:2]
    # Tokens beyond the capacity have overwritten the last ones.
    lengths = jnp.broadcast_to(jnp.minimum(length, capacity).astype(jnp.int32), (batch,))
    return Cache(key, value, lengths)
