"""Attention for Flax linen: a layer, and `attention_fn` for Flax's own layers."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype as promote
from flax.linen.linear import DenseGeneral, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from pallas_fa2.api import flash_attention
from pallas_fa2.cached_api import cached_attention
from pallas_fa2.caches import Cache, Packed, Pages
from pallas_fa2.flax.attention_fn import (
    as_boolean,
    attention_fn,
    check_cache_of_layer,
    check_inputs,
    forbid_weights,
)
from pallas_fa2.flax.cache_options import check_cache_options
from pallas_fa2.flax.written_tokens import as_cache
from pallas_fa2.masks import Causal, Lengths, Mask, as_mask
from pallas_fa2.options import Implementation, Scores
from pallas_fa2.scores import as_scores

__all__ = ["MultiHeadAttention", "attention_fn"]


def __dir__() -> list[str]:
    return __all__


def lecun_normal(key: PRNGKeyArray, shape: Any, dtype: Any = jnp.float32) -> Array:
    """Initialize a kernel as Flax does by default; this function can be pickled."""
    return default_kernel_init(key, shape, dtype)


class MultiHeadAttention(nn.Module):
    """Multi-head attention with grouped heads, whose masks are never arrays of `[T, S]`.

    If `num_kv_heads` is None, its parameters and cache are those of
    `flax.linen.MultiHeadDotProductAttention` in name, shape, dtype and initial value, so that
    checkpoints of named layers load unchanged (in a parent that leaves its layers unnamed the name of this one is
    `MultiHeadAttention_0`; give it `name="MultiHeadDotProductAttention_0"` to load such a checkpoint). With fewer key
    heads than query heads, the kernels of `key` and `value` are `[features, num_kv_heads, head_dim]`.

    With `decode=True`, `init` on inputs of the greatest length makes the cache (`cached_key`,
    `cached_value`, `cache_index`). Each further call appends its tokens, one as in Flax or a whole
    prompt. Without a mask they attend to all tokens before them and to themselves; a mask alone decides
    to which of the tokens written so far they attend (the prompt of a prefix language model attends to itself in
    both directions; `causal=True` joins `Causal()`). Masks and scores read positions in the whole sequence, and
    S is the length of the cache. Tokens beyond the greatest length overwrite the last ones.

    A `Cache` or `Pages` of the caller's is an argument of the call instead, and comes back with the new tokens.

    Attributes:
      num_heads: query heads N.
      num_kv_heads: key heads K, a divisor of N; N by default.
      causal: whether queries attend to no later keys.
      dtype: the dtype to compute in; promoted from inputs and parameters by default: float32 with such
        parameters, which the Hopper kernels do not support.
      param_dtype: the dtype of the parameters.
      qkv_features: N times the head dim; the features of `inputs_q` by default.
      out_features: the features of the output; those of `inputs_q` by default.
      broadcast_dropout: has no effect; bits are drawn for every batch entry and head.
      dropout_rate, deterministic: dropout of the probabilities.
      precision: that of the projections; attention itself always has the highest.
      kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias: those of the projections, as in Flax.
      decode: whether to keep a cache of keys and values.
      normalize_qk: whether to apply layer norm to queries and keys, per head (arXiv:2302.05442).
      force_fp32_for_softmax: has no effect; the softmax is always in float32 at least.
      implementation: as in `pallas_fa2.flash_attention`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> layer = MultiHeadAttention(num_heads=8, num_kv_heads=2, causal=True)
      >>> x = jnp.ones((2, 128, 256))
      >>> params = layer.init(jax.random.key(0), x)
      >>> layer.apply(params, x).shape
      (2, 128, 256)
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Make plain functions masks and scores in subclasses such as `nn.remat`'s, whose arguments must be pytrees."""
        super().__init_subclass__(**options)
        if (call := vars(cls).get("__call__")) is not None:

            @functools.wraps(call)
            def with_pytrees(self: Any, *args: Any, **options: Any) -> Any:
                if callable(mask := options.get("mask")) and not isinstance(mask, Mask):
                    options["mask"] = as_mask(mask)
                if options.get("score") is not None:
                    options["score"] = as_scores(options["score"])
                return call(self, *args, **options)

            cls.__call__ = with_pytrees

    num_heads: int
    num_kv_heads: int | None = None
    causal: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: PrecisionLike = None
    kernel_init: Initializer = lecun_normal
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    implementation: Implementation | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "*B T F"],
        inputs_k: Float[Array, "*B S Fk"] | None = None,
        inputs_v: Float[Array, "*B S Fv"] | None = None,
        *,
        mask: Mask | Callable | Array | None = None,
        score: Scores | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKeyArray | None = None,
        sow_weights: bool = False,
        cache: Cache | Pages | None = None,
        queries: Packed | None = None,
    ) -> Any:
        """Project the inputs to queries, keys and values, attend, and project the result.

        Args:
          inputs_q: the inputs of the queries.
          inputs_k: the inputs of the keys; `inputs_q` by default.
          inputs_v: the inputs of the values; `inputs_k` by default.
          mask: a mask object, a function of two tokens, or an array that broadcasts to
            `[*B, N, T, S]` and is not 0 where a query attends to a key.
          score: score functions, as in `pallas_fa2.flash_attention`.
          deterministic: whether there is no dropout; either the attribute of this name or this argument must be given
            if `dropout_rate` is not 0.
          dropout_rng: the key for dropout; the stream "dropout" by default.
          sow_weights: must be False, as the attention weights are never formed.
          cache: a cache to which the tokens' keys and values are appended, and to whose tokens they then attend:
            `inputs_q` is `[B, T, F]`, causal without a mask. The attribute `decode` is of Flax's own cache and must be
            False.
          queries: the `Packed` rows of requests, where `inputs_q` is `[tokens, F]`.

        Returns:
          `[*B, T, out_features]` in the dtype of the computation; with a cache, a pair of it and the cache with the new
          tokens.

        Raises:
          ValueError, TypeError: as `flash_attention`; a ValueError for heads that do not divide each other, in decoding
            for inputs that do not fit the cache, for `queries` without `cache`, and for `cache` with decoding, dropout
            or other inputs.
        """
        forbid_weights("sow_weights (= True)" if sow_weights else None)
        check_inputs(inputs_k, inputs_v)
        check_cache_options(
            cache,
            queries,
            has_other_inputs=any(x is not None and x is not inputs_q for x in (inputs_k, inputs_v)),
            decode=self.decode,
            dropout_rate=self.dropout_rate,
            deterministic=self.deterministic or deterministic,
        )
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                f"inputs_k must be given where inputs_v is (of shape {inputs_v.shape}); pass the input "
                "of both as inputs_k and leave inputs_v out"
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)

        masks = [] if mask is None else [as_mask(as_boolean(mask))]
        start = None
        if self.decode:
            key, value, start = self._append_to_cache(key, value)
        if start is not None or cache is not None:
            # Without a mask, tokens of a prompt attend to those before them, as they would one by one.
            masks = masks or [Causal()]
        if self.causal:
            masks.append(Causal())

        rate = self.dropout_rate
        if rate > 0.0:
            if nn.merge_param("deterministic", self.deterministic, deterministic):
                rate = 0.0
            elif dropout_rng is None:
                dropout_rng = self.make_rng("dropout")
        query, key, value = promote(query, key, value, dtype=self.dtype)
        attended = positions = None
        if cache is not None:
            check_cache_of_layer(cache, key)
            attended = cache = cache.append(key, value, queries=queries)
        elif start is not None:
            new = query.shape[-3]
            attended = as_cache(key, value, start + new, rate)
            if attended is None:
                positions = start + jnp.arange(new)
                masks.append(Lengths(kv=start + new))
        joined = functools.reduce(operator.and_, masks) if masks else None
        if attended is not None:
            x = cached_attention(
                query,
                attended,
                queries=queries,
                mask=joined,
                score=score,
                implementation=self.implementation,
            )
        else:
            x = flash_attention(
                query,
                key,
                value,
                mask=joined,
                score=score,
                dropout_rate=rate,
                dropout_rng=dropout_rng,
                q_positions=positions,
                implementation=self.implementation,
            )
        out = DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            name="out",
        )(x)
        return out if cache is None else (out, cache)

    def _project(
        self, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return query `[*B, T, N, H]`, key and value `[*B, S, K, H]`."""
        features = self.qkv_features or inputs_q.shape[-1]
        kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if features % self.num_heads:
            raise ValueError(
                f"qkv_features (= {features}) must be a multiple of num_heads (= {self.num_heads})"
                "; by default it is the last axis of inputs_q"
            )
        if kv_heads < 1 or self.num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads (= {kv_heads}) must divide num_heads (= {self.num_heads}); each key "
                "head serves as many query heads"
            )

        def dense(name: str, heads: int, x: jax.Array) -> jax.Array:
            return DenseGeneral(
                features=(heads, features // self.num_heads),
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                name=name,
            )(x)

        def norm(name: str, x: jax.Array) -> jax.Array:
            if not self.normalize_qk:
                return x
            return nn.LayerNorm(
                use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype, name=name
            )(x)

        query = norm("query_ln", dense("query", self.num_heads, inputs_q))
        key = norm("key_ln", dense("key", kv_heads, inputs_k))
        return query, key, dense("value", kv_heads, inputs_v)

    def _append_to_cache(
        self, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Return the cached keys and values with the new ones, and the index of these (None while `init` runs)."""
        exists = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not exists:
            return key, value, None
        *batch, length, heads, dim = cached_key.value.shape
        new = key.shape[-3]
        if key.shape != (*batch, new, heads, dim) or new > length:
            raise ValueError(
                f"with decode=True the new keys must have shape {(*batch, f'1 .. {length}', heads, dim)}"
                f" to fit into the cache, but they have shape {key.shape}; make the cache by init "
                "on inputs of the same batch axes and of the greatest length"
            )
        start = index.value
        for cache, x in ((cached_key, key), (cached_value, value)):
            cache.value = lax.dynamic_update_slice_in_dim(
                cache.value, x.astype(cache.value.dtype), start, axis=-3
            )
        index.value = start + new
        return cached_key.value, cached_value.value, start
