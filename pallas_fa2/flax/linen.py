"""Flax linen: an attention layer, and the function that puts our attention into Flax's own layers.

    layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)

`attention_fn` serves linen and nnx alike. Its signature is spelled out because linen passes to an
attention function only what its signature names, and nnx passes everything by name.
"""

import contextvars
import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import initializers
from flax.linen.dtypes import promote_dtype as promote
from flax.linen.linear import DenseGeneral, default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from pallas_fa2.api import Implementation, Scores, dot_product_attention, flash_attention
from pallas_fa2.ir.call_spec import reads_query_positions
from pallas_fa2.masks import Causal, Lengths, Mask, as_mask
from pallas_fa2.parse_call import parse_call
from pallas_fa2.scores import as_scores


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Mask | Callable | Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKeyArray | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Dtype | None = None,
    precision: PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable | None = None,
    qk_attn_weights_einsum: Callable | None = None,
    attn_weights_value_einsum: Callable | None = None,
    promote_dtype: Callable | None = None,
    is_causal: bool = False,
    *,
    score: Scores | None = None,
    sinks: Float[Array, " N"] | None = None,
    align: Literal["start", "end"] | None = None,
    deterministic_gradients: bool = False,
    implementation: Implementation | None = None,
) -> Float[Array, "*B T N Hv"]:
    """`flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`, on our kernels.

    For `flax.linen.MultiHeadDotProductAttention(attention_fn=...)` and
    `flax.nnx.MultiHeadAttention(attention_fn=...)`; set what follows `is_causal` with
    `functools.partial`. A query that sees no key gets 0 (there, the mean of the values).

    Args:
      query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, Hv]`, N a multiple of K;
        promoted to one dtype as Flax does it.
      bias: added to the scaled scores; broadcasts to `[*B, N, T, S]`.
      mask: an array that broadcasts to `[*B, N, T, S]` and is not 0 where a query attends to a key
        (`flax.linen.make_causal_mask` gives float32), a mask object, or a function of two tokens.
      broadcast_dropout: without effect; bits are drawn for every batch entry and head.
      dropout_rng, dropout_rate, deterministic: dropout of the probabilities.
      dtype: the dtype to compute in; the promoted dtype of query, key and value by default. (A Flax layer
        without `dtype` makes them float32, as its parameters are, which the Hopper kernels do not take.)
      precision: without effect; float32 products are always of the highest precision.
      force_fp32_for_softmax: without effect; the softmax is always in float32 at least.
      module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
      promote_dtype: called as `promote_dtype((query, key, value), dtype=dtype)`, as nnx does it.
      is_causal: query i sees keys 0 .. i.
      score, sinks, implementation: as in `pallas_fa2.flash_attention`.
      align: as there, `"start"` by default. One query among many keys is also what Flax's own layers make of a
        token in decoding, and they do not say where it lies: scores and mask objects that read its position
        are refused then unless `align` is given.
      deterministic_gradients: as there; Flax's `deterministic` is about dropout.

    Returns:
      `[*B, T, N, Hv]`.
    """
    _refuse_weights(None if module is None else f"module (= {type(module).__name__})")
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise ValueError(
                f"{name} must be None, because the matrix products are formed inside the kernel, "
                f"but it is {einsum!r}; leave it out, or use flax.linen.dot_product_attention"
            )
    if promote_dtype is None:
        query, key, value = promote(query, key, value, dtype=dtype)
    else:
        query, key, value = promote_dtype((query, key, value), dtype=dtype)
    mask = _boolean(mask)
    decoding = DECODING.get()
    options: dict[str, Any] = {"align": "start" if align is None else align}
    if decoding is not None:
        mask, options = decoding.joined(mask), {"q_positions": decoding.q_positions}
    elif align is None and query.shape[-3] == 1 < key.shape[-3]:
        _refuse_unknown_position(query, key, value, mask, score)
    return dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        score=score,
        sinks=sinks,
        **options,
        dropout_rate=0.0 if deterministic else dropout_rate,
        dropout_rng=dropout_rng,
        deterministic_gradients=deterministic_gradients,
        implementation=implementation,
    )


def lecun_normal(key: PRNGKeyArray, shape: Any, dtype: Any = jnp.float32) -> Array:
    """Flax's default initial kernels, by a function that can be pickled."""
    return default_kernel_init(key, shape, dtype)


class Decoding:
    """What our layers know of a decoding step that Flax does not hand to the attention function."""

    def __init__(self, mask: Mask | None, q_positions: jax.Array):
        self.mask = mask
        self.q_positions = q_positions
        self.was_read = False

    def joined(self, mask: Any) -> Any:
        self.was_read = True
        if self.mask is None or mask is None:
            return self.mask if mask is None else mask
        return self.mask & mask


DECODING: contextvars.ContextVar[Decoding | None] = contextvars.ContextVar("decoding", default=None)


def _refuse_unknown_position(query: Any, key: Any, value: Any, mask: Any, score: Any) -> None:
    spec, _ = parse_call(query, key, value, mask=mask, score=score)
    if reads_query_positions(spec):
        raise ValueError(
            "attention_fn got one query and several keys, where a score or a mask reads the query's position. A Flax "
            "layer with decode=True does not say where the token lies: use pallas_fa2.linen.MultiHeadAttention "
            "or pallas_fa2.nnx.MultiHeadAttention. Where it lies at the first or the last key, say so by "
            "functools.partial(attention_fn, align='start' or 'end')"
        )


def _refuse_weights(asked_by: str | None) -> None:
    if asked_by is not None:
        raise ValueError(
            f"{asked_by} asks for the attention weights, which flash attention never forms; call "
            "with sow_weights=False, or look at them with flax.linen.dot_product_attention"
        )


def _boolean(mask: Any) -> Any:
    """Flax's masks are arrays of zeros and ones in float32."""
    if isinstance(mask, jax.Array | np.ndarray) and mask.dtype != jnp.bool_:
        return mask != 0
    return mask


class MultiHeadAttention(nn.Module):
    """Multi-head attention with grouped heads and masks that are never arrays of `[T, S]`.

    Where `num_kv_heads` is None, its parameters and cache are those of
    `flax.linen.MultiHeadDotProductAttention` in name, shape, dtype and initial value, so that
    checkpoints load unchanged (a parent that leaves its layers unnamed calls this one
    `MultiHeadAttention_0`; give it `name=` to load such a checkpoint). With fewer key heads than
    query heads, the kernels of `key` and `value` are `[features, num_kv_heads, head_dim]`.

    With `decode=True`, `init` on inputs of the greatest length makes the cache (`cached_key`,
    `cached_value`, `cache_index`). Each further call appends its tokens, one as in Flax or a whole
    prompt. Without a mask they attend to all tokens before them and to themselves; a mask that is given
    decides itself which of the tokens written so far they see (a prefix language model's prompt sees itself in
    both directions; `causal=True` joins `Causal()`). Masks and scores see positions in the whole sequence, and
    S is the length of the cache. Tokens beyond the greatest length overwrite the last ones.

    Attributes:
      num_heads: query heads N.
      num_kv_heads: key heads K, a divisor of N; N by default.
      causal: queries see no later keys.
      dtype: the dtype to compute in; promoted from inputs and parameters by default: float32 with such
        parameters, which the Hopper kernels do not take.
      param_dtype: the dtype of the parameters.
      qkv_features: N times the head dim; the features of `inputs_q` by default.
      out_features: the features of the output; those of `inputs_q` by default.
      broadcast_dropout: without effect; bits are drawn for every batch entry and head.
      dropout_rate, deterministic: dropout of the probabilities.
      precision: of the projections; attention itself is always of the highest.
      kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias: the projections, as in Flax.
      decode: keep a cache of keys and values.
      normalize_qk: layer norm of queries and keys, per head (arXiv:2302.05442).
      force_fp32_for_softmax: without effect; the softmax is always in float32 at least.
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
        """`nn.remat` and its like are subclasses whose arguments must be pytrees: plain functions become masks."""
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
    ) -> Float[Array, "*B T out"]:
        """Projects, attends, and projects back.

        Args:
          inputs_q: what queries are made of.
          inputs_k: what keys are made of; `inputs_q` by default.
          inputs_v: what values are made of; `inputs_k` by default.
          mask: a mask object, a function of two tokens, or an array that broadcasts to
            `[*B, N, T, S]` and is not 0 where a query attends to a key.
          score: score functions, as in `pallas_fa2.flash_attention`.
          deterministic: no dropout; takes precedence over the attribute of the name.
          dropout_rng: the key for dropout; the stream "dropout" by default.
          sow_weights: must be False, as the attention weights are never formed.
        """
        _refuse_weights("sow_weights (= True)" if sow_weights else None)
        if inputs_k is None and inputs_v is not None:
            raise ValueError(
                f"inputs_k must be given where inputs_v is (of shape {inputs_v.shape}); pass what "
                "both are made of as inputs_k and leave inputs_v out"
            )
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)

        masks = [] if mask is None else [as_mask(_boolean(mask))]
        start = None
        if self.decode:
            key, value, start = self._append(key, value)
        positions = None
        if start is not None:
            new = query.shape[-3]
            positions = start + jnp.arange(new)
            written = Lengths(kv=start + new)
            # Without a mask, tokens of a prompt see those before them, as they would one by one.
            masks = [*(masks or [Causal()]), written]
        if self.causal:
            masks.append(Causal())

        rate = self.dropout_rate
        if rate > 0.0:
            if nn.merge_param("deterministic", self.deterministic, deterministic):
                rate = 0.0
            elif dropout_rng is None:
                dropout_rng = self.make_rng("dropout")
        query, key, value = promote(query, key, value, dtype=self.dtype)
        x = flash_attention(
            query,
            key,
            value,
            mask=functools.reduce(lambda a, b: a & b, masks) if masks else None,
            score=score,
            dropout_rate=rate,
            dropout_rng=dropout_rng,
            q_positions=positions,
            implementation=self.implementation,
        )
        return DenseGeneral(
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

    def _project(
        self, inputs_q: jax.Array, inputs_k: jax.Array, inputs_v: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[*B, T, N, H]`, `[*B, S, K, H]` and `[*B, S, K, H]`."""
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

    def _append(
        self, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The cache with new keys and values in it, and where they begin (None as it is made)."""
        made = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not made:
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
