"""Attention sinks: a logit for each query head that has no value (gpt-oss, arXiv:2508.10925)."""

from typing import Any

import jax
import jax.numpy as jnp


def as_sinks(sinks: Any, heads: int) -> jax.Array:
    """Return the sinks as floats `[N]`, or raise a ValueError."""
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats of shape [N], one for each of {heads} query heads, but has shape "
            f"{sinks.shape} and dtype {sinks.dtype}; broadcast or cast it"
        )
    return sinks


def add_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add a logit to the sum of each row: `out [*B, T, N, Hv]` shrinks, `lse [*B, N, T]` grows."""
    sinks = sinks.astype(lse.dtype).reshape(*[1] * (lse.ndim - 2), -1, 1)
    sinks = jnp.broadcast_to(sinks, lse.shape)
    empty = lse == -jnp.inf
    no_logit = empty & (sinks == -jnp.inf)  # logaddexp's gradient is NaN there
    total = jnp.logaddexp(jnp.where(no_logit, 0.0, lse), sinks)
    total = jnp.where(no_logit, -jnp.inf, total)
    factor = jnp.where(empty, 0.0, jnp.exp(jnp.where(empty, 0.0, lse - total)))
    factor = jnp.moveaxis(factor, -1, -2)[..., None]
    return (out.astype(lse.dtype) * factor).astype(out.dtype), total
