"""Dense softmax attention, written without the library: the truth, and the measure of error."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Truth(NamedTuple):
    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def attention(q: Any, k: Any, v: Any, *, mask: Any, score: Any, scale: float | None) -> tuple:
    """Every array in the inputs' dtype, but the softmax itself in float32 at least.

    `mask` is a boolean array `[B, N, T, S]` or None, `score` a function of the scores.
    """
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    s = s.astype(jnp.float64 if q.dtype == jnp.float64 else jnp.float32)
    if score is not None:
        s = score(s)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    empty = top == -jnp.inf
    e = jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, s - jnp.where(empty, 0, top))))
    total = jnp.where(empty, 1, jnp.sum(e, -1, keepdims=True))
    p = (e / total).astype(q.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest")
    lse = jnp.where(empty, -jnp.inf, jnp.log(total) + jnp.where(empty, 0, top))
    return out, lse[..., 0]


def with_gradients(q: Any, k: Any, v: Any, dout: Any, dlse: Any, **options: Any) -> Truth:
    def run(q: Any, k: Any, v: Any) -> tuple:
        return attention(q, k, v, **options)

    (out, lse), pull = jax.vjp(run, q, k, v)
    return Truth(out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0))))


def truth(*inputs: Any, mask: Any, **options: Any) -> Truth:
    """Values and gradients in float64 from q, k, v, dout and dlse of any dtype."""
    with jax.enable_x64(True):
        up = [jnp.asarray(np.asarray(x, np.float64)) for x in inputs]
        mask = None if mask is None else jnp.asarray(np.asarray(mask))
        found = jax.jit(lambda *x: with_gradients(*x, mask=mask, **options))(*up)
        return Truth(*(np.asarray(x) for x in found))


def same_dtype(*inputs: Any, mask: Any, **options: Any) -> Truth:
    """The same in the inputs' own dtype, as a user would write it without a fused kernel."""
    mask = None if mask is None else jnp.asarray(mask)
    found = jax.jit(lambda *x: with_gradients(*x, mask=mask, **options))(*inputs)
    return Truth(*(np.asarray(x) for x in found))
