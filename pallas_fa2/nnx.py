"""Flax nnx: its own attention layer on our kernels.

Unmodified Flax takes `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from pallas_fa2.linen import attention_fn
from pallas_fa2.masks import Mask, as_mask
from pallas_fa2.spec import describe

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
        if decoding and keys is not None and index is not None and callable(mask):
            mask = as_mask(mask)
        if decoding and keys is not None and index is not None and isinstance(mask, Mask):
            mask = self._row(mask, keys.shape, index[...])
        return super().__call__(
            inputs_q,
            inputs_k,
            inputs_v,
            mask=mask,  # pyright: ignore[reportArgumentType]
            is_causal=self.causal if is_causal is None else is_causal,
            decode=decode,
            **options,
        )

    def _row(self, mask: Mask, cache: tuple[int, ...], index: Array) -> Array:
        """What the token at `index` sees of the cache, `[*B, N, 1, S]`: Flax joins masks as arrays."""
        *batch, length, heads, dim = cache
        query = jax.ShapeDtypeStruct((*batch, 1, self.num_heads, dim), jnp.float32)
        key = jax.ShapeDtypeStruct((*batch, length, heads, dim), jnp.float32)
        spec, data = describe(query, key, key, mask=mask, q_positions=index[None])
        assert spec.mask is not None
        row = spec.mask.on_tile(data.q_index, data.k_index, data.mask)
        row = jnp.broadcast_to(row, (spec.batch, heads, spec.group, 1, length))
        return row.reshape(*batch, self.num_heads, 1, length)
