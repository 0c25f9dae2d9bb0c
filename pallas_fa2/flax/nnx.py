"""Attention for Flax nnx: its layer with our kernels.

In an unmodified layer use `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_fa2.flax.attention_fn import DECODING_STEP, DecodingStep, attention_fn
from pallas_fa2.masks import Mask, as_mask

__all__ = ["MultiHeadAttention", "attention_fn"]


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` with our `attention_fn`, and an option to be causal by default.

    Parameters, cache and arguments are those of Flax's layer, grouped heads (`num_kv_heads`)
    included. Masks may also be mask objects or functions of two tokens. In decoding, of one token per call as in Flax,
    they read its position in the whole sequence.

    Without `dtype`, float32 parameters make query, key and value float32, which is slower.

    Args:
      num_heads, in_features, qkv_features, out_features, num_kv_heads, in_kv_features, options: as
        in Flax.
      causal: the default of `is_causal` in calls.
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
        """Project the inputs, attend, and project the result to `[*B, T, out_features]`; `options` are Flax's.

        Raises:
          ValueError, TypeError: as Flax's layer and `flash_attention`; a ValueError where a mask object or function would
            not reach `attention_fn` in decoding.
        """
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
        # Flax joins masks as arrays. A mask object and the token's position bypass it.
        mask_object = as_mask(mask) if callable(mask) or isinstance(mask, Mask) else None
        step = DecodingStep(mask_object, jnp.asarray(index[...])[None])
        reset_token = DECODING_STEP.set(step)
        try:
            out = run(mask=mask if mask_object is None else None)
        finally:
            DECODING_STEP.reset(reset_token)
        if mask_object is not None and not step.was_read:
            raise ValueError(
                f"mask must be an array where attention_fn is not pallas_fa2's, but it is {mask_object!r}; leave "
                "attention_fn out, or wrap pallas_fa2.nnx.attention_fn in one that calls it"
            )
        return out
