"""Flax nnx: its own attention layer on our kernels.

Unmodified Flax takes `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_fa2.flax.linen import DECODING, Decoding, attention_fn
from pallas_fa2.masks import Mask, as_mask

__all__ = ["MultiHeadAttention", "attention_fn"]


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with our `attention_fn` and, if asked, causal by default.

    Parameters, cache and arguments are those of Flax's layer, grouped heads (`num_kv_heads`)
    included. Masks may also be mask objects or functions of two tokens, and in decoding, of one token a
    call as in Flax, see its position in the whole sequence.

    Without `dtype`, float32 parameters make query, key and value float32, which the Hopper kernels do not
    take.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, options: as
        in Flax.
      causal: what `is_causal` is where a call does not say.
      attention_fn: ours by default; `functools.partial` sets its `score` and other options.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = MultiHeadAttention(
      ...     8, 256, num_kv_heads=2, causal=True, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> layer(jnp.ones((2, 128, 256))).shape
      (2, 128, 256)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        causal: bool = False,
        attention_fn: Callable[..., jax.Array] = attention_fn,
        **options: Any,
    ):
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            attention_fn=attention_fn,
            **options,
        )
        self.causal = causal

    def __call__(
        self,
        inputs_q: Float[Array, "*B T F"],
        inputs_k: Float[Array, "*B S Fk"] | None = None,
        inputs_v: Float[Array, "*B S Fv"] | None = None,
        *,
        mask: Mask | Callable | Array | None = None,
        is_causal: bool | None = None,
        decode: bool | None = None,
        **options: Any,
    ) -> Float[Array, "*B T out"]:
        """Projects, attends, and projects back; `options` are the further arguments of Flax."""
        decoding = self.decode if decode is None else decode
        keys, index = self.cached_key, self.cache_index
        run = functools.partial(
            super().__call__,
            inputs_q,
            inputs_k,
            inputs_v,
            is_causal=self.causal if is_causal is None else is_causal,
            decode=decode,
            **options,
        )
        if not decoding or keys is None or index is None:
            return run(mask=mask)
        # Flax joins masks as arrays; what is none, and where the token lies, goes past it.
        rest = as_mask(mask) if callable(mask) or isinstance(mask, Mask) else None
        step = Decoding(rest, jnp.asarray(index[...])[None])
        token = DECODING.set(step)
        try:
            out = run(mask=mask if rest is None else None)
        finally:
            DECODING.reset(token)
        if rest is not None and not step.was_read:
            raise ValueError(
                f"mask must be an array where attention_fn is not pallas_fa2's, but it is {rest!r}; leave "
                "attention_fn out, or wrap pallas_fa2.nnx.attention_fn in one that calls it"
            )
        return out
