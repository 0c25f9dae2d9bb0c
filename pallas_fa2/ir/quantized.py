"""Keys and values of 8 bits with a scale for each token and key head: how they are made and what they stand for."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

# The largest number of each dtype that caches may hold; int8 has no -128, so that both signs round alike.
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}

# Scales have the range of float32 in half of its bytes: 1/64 of a token's at a head dim of 128, where float32 takes
# 1/32. Their 8 bits of precision cost none, because tokens are divided by the scale that is stored.
SCALE_DTYPE = jnp.bfloat16

# Of tokens whose largest element is 0 or nearly so. A smaller one would be subnormal, which XLA may flush to 0: 0 / 0.
LEAST_SCALE = 2.0**-126


class Scales(NamedTuple):
    """The scales of a cache: bfloat16 `[B, K, S]`, or `[P, K, page]` of a paged one.

    The tokens of a head lie side by side, because a kernel reads those of one head.
    """

    key: Any
    value: Any


def is_quantized(dtype: DTypeLike) -> bool:
    """Return whether a cache of this dtype has scales."""
    return jnp.dtype(dtype).name in LARGEST


def quantize(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return x `[..., H]` in 8 bits, and the scales `[...]` that it was divided by: those of the largest elements.

    Where x has infinity or NaN, the scale is not finite, and nor is what it stands for.
    """
    largest = LARGEST[jnp.dtype(dtype).name]
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1) / largest, LEAST_SCALE)
    # XLA may leave out a conversion to bfloat16 and back (`xla_allow_excess_precision`), but not this.
    info = jnp.finfo(SCALE_DTYPE)
    scale = lax.reduce_precision(scale, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    # A scale that was rounded down leaves up to 1.002 of the largest number.
    ratio = jnp.clip(x / scale[..., None], -largest, largest)
    if jnp.issubdtype(dtype, jnp.integer):
        ratio = jnp.round(jnp.where(jnp.isnan(ratio), largest, ratio))
    return ratio.astype(dtype), scale.astype(SCALE_DTYPE)


def dequantize(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return what 8-bit tokens `[..., tokens, K, H]` with scales `[..., K, tokens]` stand for: their product."""
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    scale = jnp.swapaxes(scale, -1, -2)[..., None]
    return (x.astype(wide) * scale.astype(wide)).astype(dtype)
