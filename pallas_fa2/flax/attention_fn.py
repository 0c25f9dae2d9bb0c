"""The function that runs our attention in Flax's own layers.

    layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn)

`attention_fn` works for linen and nnx. Its signature is explicit because linen passes to an attention function only
what its signature names, and nnx passes everything by name.
"""

import contextvars
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype as promote
from flax.typing import Dtype, PrecisionLike
from jaxtyping import Array, Float, PRNGKeyArray

from pallas_fa2.cached_api import cached_attention
from pallas_fa2.caches import Cache, Pages
from pallas_fa2.check_caches import check_cache
from pallas_fa2.drop_in import dot_product_attention
from pallas_fa2.flax.written_tokens import as_cache
from pallas_fa2.ir.call_spec import reads_query_positions
from pallas_fa2.ir.quantized import is_quantized
from pallas_fa2.masks import Mask
from pallas_fa2.options import Implementation, Scores
from pallas_fa2.parse_call import parse_call


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
    """Compute what `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention` do, by our kernels.

    It is for `flax.linen.MultiHeadDotProductAttention(attention_fn=...)` and
    `flax.nnx.MultiHeadAttention(attention_fn=...)`; set the arguments after `is_causal` by `functools.partial`. A query
    that attends to no key gets 0 (there, the mean of the values).

    Args:
      query, key, value: `[*B, T, N, H]`, `[*B, S, K, H]`, `[*B, S, K, Hv]`, N a multiple of K;
        promoted to one dtype as in Flax.
      bias: added to the scaled scores; broadcasts to `[*B, N, T, S]`.
      mask: an array that broadcasts to `[*B, N, T, S]` and is not 0 where a query attends to a key
        (`flax.linen.make_causal_mask` gives float32), a mask object, or a function of two tokens.
      broadcast_dropout: has no effect; bits are drawn for every batch entry and head.
      dropout_rng, dropout_rate, deterministic: dropout of the probabilities; none if `deterministic`.
      dtype: the dtype to compute in; the promoted dtype of query, key and value by default. (A Flax layer
        without `dtype` makes them float32, as its parameters are, which is slower.)
      precision: has no effect; float32 attention is always as exact as with the highest precision.
      force_fp32_for_softmax: has no effect; the softmax is always in float32 at least.
      module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: must be None.
      promote_dtype: called as `promote_dtype((query, key, value), dtype=dtype)`, as nnx does.
      is_causal: whether query i attends to keys 0 to i alone.
      score, sinks, implementation: as in `pallas_fa2.flash_attention`.
      align: as there, `"start"` by default. Flax's own layers pass one query and many keys for a token in decoding as
        well, without its position: scores and mask objects that read the query's position are then an error unless
        `align` is given.
      deterministic_gradients: as there; Flax's `deterministic` is about dropout.

    Returns:
      `[*B, T, N, Hv]` in the dtype of the computation.

    Raises:
      ValueError, TypeError: as `flash_attention`; a ValueError for arguments that require the attention weights.
    """
    forbid_weights(None if module is None else f"module (= {type(module).__name__})")
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
    mask = as_boolean(mask)
    step = DECODING_STEP.get()
    options: dict[str, Any] = {"align": "start" if align is None else align}
    if step is not None:
        cache = as_cache(key, value, step.position + 1, 0.0 if deterministic else dropout_rate)
        if cache is not None and bias is None and not deterministic_gradients:
            # The last token of all, to which `is_causal` hides nothing.
            return cached_attention(
                query,
                cache,
                mask=step.join_mask(None if step.has_flax_mask_alone else mask),
                score=score,
                sinks=sinks,
                implementation="reference" if implementation == "xla" else implementation,
            )
        mask, options = step.join_mask(mask), {"q_positions": step.position[None]}
    elif align is None and query.shape[-3] == 1 < key.shape[-3]:
        _check_position_is_known(query, key, value, mask, score)
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


class DecodingStep:
    """What Flax does not pass to the attention function: the mask object of a call, and the position `[]` of its token.

    With `has_flax_mask_alone`, the array that Flax passes says which tokens are written, and nothing else.
    """

    def __init__(self, mask: Mask | None, position: jax.Array, has_flax_mask_alone: bool):
        self.mask = mask
        self.position = position
        self.has_flax_mask_alone = has_flax_mask_alone
        self.was_read = False

    def join_mask(self, mask: Any) -> Any:
        self.was_read = True
        if self.mask is None or mask is None:
            return self.mask if mask is None else mask
        return self.mask & mask


DECODING_STEP: contextvars.ContextVar[DecodingStep | None] = contextvars.ContextVar(
    "decoding_step", default=None
)


def _check_position_is_known(query: Any, key: Any, value: Any, mask: Any, score: Any) -> None:
    spec, _ = parse_call(query, key, value, mask=mask, score=score)
    if reads_query_positions(spec):
        raise ValueError(
            "attention_fn got one query and several keys, where a score or a mask reads the query's position. A Flax "
            "layer with decode=True does not pass the token's position: use pallas_fa2.linen.MultiHeadAttention "
            "or pallas_fa2.nnx.MultiHeadAttention. If it is at the first or the last key, use "
            "functools.partial(attention_fn, align='start' or 'end')"
        )


def forbid_weights(request: str | None) -> None:
    if request is not None:
        raise ValueError(
            f"{request} asks for the attention weights, which flash attention never forms; call "
            "with sow_weights=False, or look at them with flax.linen.dot_product_attention"
        )


def check_inputs(inputs_k: Any, inputs_v: Any) -> None:
    """Raise a TypeError for a mask in the place of inputs."""
    for name, x in (("inputs_k", inputs_k), ("inputs_v", inputs_v)):
        if isinstance(x, Mask) or callable(x):
            raise TypeError(
                f"{name} must be an array or None, but it is {x!r}; pass a mask by name, mask="
            )


def check_cache_of_layer(cache: Cache | Pages, key: jax.Array) -> None:
    """Raise a TypeError or ValueError unless a cache has the heads and the dtype of a layer's keys `[..., K, H]`."""
    check_cache(cache)
    heads, head_dim = key.shape[-2:]
    if cache.key.shape[2:] != (heads, head_dim):
        raise ValueError(
            f"cache must have the layer's {heads} key heads of {head_dim}, but it has {cache.key.shape[2]} of "
            f"{cache.key.shape[3]}; make it with kv_heads={heads} and head_dim={head_dim}, or the layer with other heads"
        )
    if not is_quantized(cache.key.dtype) and cache.key.dtype != key.dtype:
        raise TypeError(
            f"cache must have the dtype in which the layer computes, {key.dtype}, but it has {cache.key.dtype}; make the "
            f"layer with dtype={cache.key.dtype}, or the cache with dtype={key.dtype}"
        )


def as_boolean(mask: Any) -> Any:
    """Return a mask array as booleans; Flax's masks are zeros and ones in float32."""
    if isinstance(mask, jax.Array | np.ndarray) and mask.dtype != jnp.bool_:
        return mask != 0
    return mask
