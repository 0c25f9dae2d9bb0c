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

from pallas_fa2.cached_api import cached_attention
from pallas_fa2.caches import Cache, Packed, Pages
from pallas_fa2.flax.attention_fn import (
    DECODING_STEP,
    DecodingStep,
    as_boolean,
    attention_fn,
    check_cache_of_layer,
    check_inputs,
    forbid_weights,
)
from pallas_fa2.flax.cache_options import cached_options, check_cache_options, options_of
from pallas_fa2.masks import Causal, Mask, as_mask

__all__ = ["MultiHeadAttention", "attention_fn"]


def __dir__() -> list[str]:
    return __all__


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
      attention_fn: ours by default; `functools.partial` sets its `score` and other options, for calls with a cache too,
        and the default of `mask`.

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
        cache: Cache | Pages | None = None,
        queries: Packed | None = None,
        **options: Any,
    ) -> Any:
        """Project the inputs, attend, and project the result to `[*B, T, out_features]`; `options` are Flax's.

        With a `cache`, the keys and values of `inputs_q` `[B, T, F]`, or `[tokens, F]` of packed `queries`, are
        appended to it, and the result is a pair of the output and the cache. Attention is causal then unless a mask is
        given, and `options` are Flax's or `score`, `sinks` and others of `cached_attention`, which take the place of
        those that a partial `attention_fn` sets.

        Raises:
          ValueError, TypeError: as Flax's layer and `flash_attention`; a ValueError where a mask object or function
            would not reach `attention_fn` in decoding, for `queries` without a cache, and for a cache with decoding,
            dropout, other inputs, or an `attention_fn` that is not ours.
        """
        check_inputs(inputs_k, inputs_v)
        check_cache_options(
            cache,
            queries,
            has_other_inputs=inputs_k is not None or inputs_v is not None,
            decode=self.decode if decode is None else decode,
            dropout_rate=self.dropout_rate,
            deterministic=_first(options.get("deterministic"), self.deterministic),
        )
        options_of_fn = options_of(self.attention_fn)
        preset = options_of_fn or {}
        mask = preset.get("mask") if mask is None else mask
        causal = _first(is_causal, self.causal or preset.get("is_causal"))
        if cache is not None:
            return self._attend_on_cache(inputs_q, cache, queries, mask, causal, **options)
        decoding = self.decode if decode is None else decode
        keys, index = self.cached_key, self.cache_index
        run = functools.partial(
            super().__call__,
            inputs_q,
            inputs_k,
            inputs_v,
            is_causal=bool(causal),
            decode=decode,
            **options,
        )
        if not decoding or keys is None or index is None:
            return run(mask=mask)
        if inputs_q.shape[-2] != 1:
            raise ValueError(
                f"inputs_q must be one token, [*B, 1, F], with decode=True, as in Flax, but it has shape {inputs_q.shape}; "
                "for a prompt call the layer with decode=False and cache=, a pallas_fa2.Cache or Pages"
            )
        # Flax joins masks as arrays. A mask object and the token's position bypass it.
        mask_object = as_mask(mask) if callable(mask) or isinstance(mask, Mask) else None
        is_ours = options_of_fn is not None  # another function may join masks of its own
        has_flax_mask_alone = is_ours and (mask is None or mask_object is not None)
        step = DecodingStep(mask_object, jnp.asarray(index[...]), has_flax_mask_alone)
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

    def _attend_on_cache(
        self, x: jax.Array, cache: Any, queries: Any, mask: Any, causal: Any, **options: Any
    ) -> Any:
        forbid_weights("sow_weights (= True)" if options.pop("sow_weights", False) else None)
        for name in ("deterministic", "rngs"):  # Nothing is dropped.
            options.pop(name, None)
        of_inputs, of_out = (
            {"out_sharding": options.pop(name)} if name in options else {}
            for name in ("qkv_sharding", "out_sharding")
        )
        options = cached_options(self.attention_fn, options)
        query, key, value = (
            project(x, **of_inputs) for project in (self.query, self.key, self.value)
        )
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        check_cache_of_layer(cache, key)
        cache = cache.append(key, value, queries=queries)
        mask = Causal() if mask is None else as_mask(as_boolean(mask))
        mask = mask & Causal() if causal else mask
        out = cached_attention(query, cache, queries=queries, mask=mask, **options)
        return self.out(out, **of_out), cache


def _first(value: Any, default: Any) -> Any:
    return default if value is None else value
