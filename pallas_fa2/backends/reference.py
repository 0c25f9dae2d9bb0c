"""The definition of attention: one tile of the size of the whole call, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.backends.protocol import Backend, Configuration, KernelDescription
from pallas_fa2.backends.xla import tile
from pallas_fa2.ir import arrays
from pallas_fa2.ir.call_spec import CallSpec, Operands


def forward(
    spec: CallSpec, config: None, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` and the natural `lse [B, N, T]`, in O(T S) memory."""
    whole = tile.tile_at(spec, operands, 0, 0, spec.q_len, spec.kv_len)
    dtype = spec.accumulator
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    keep = tile.visible(whole) if spec.mask is not None else None
    if keep is not None:
        q = tile.zero_masked_tokens(q, keep, arrays.Q_AXIS)
        k, v = (tile.zero_masked_tokens(x, keep, arrays.K_AXIS) for x in (k, v))
    q = tile.scaled(spec, q)
    raw, data = tile.product("btkgh,bskh->bkgts", q, k, dtype), operands.scores
    if keep is not None and spec.scores:
        raw, data = tile.replace_masked(raw, data, keep)
    s = tile.scores(whole, raw, data)
    if keep is not None:
        s = jnp.where(keep, s, -jnp.inf)
    # An empty row must have finite values on every path, or its gradient is NaN.
    maximum = lax.stop_gradient(jnp.max(s, -1, keepdims=True))
    empty = tile.is_empty_row(spec, maximum)
    maximum = jnp.where(empty, 0, maximum)
    e = jnp.exp(jnp.where(empty, -jnp.inf, s - maximum))
    total = jnp.where(empty, 1, jnp.sum(e, -1, keepdims=True))
    lse = maximum + jnp.log(total)
    p = e / total
    if spec.dropout_rate:
        p = p * tile.dropout_factor(whole)
    out = tile.product("bkgts,bskh->btkgh", p, v, dtype)
    # The cotangent of such a row, NaN perhaps, must not reach v through p = 0.
    out = jnp.where(jnp.moveaxis(empty, 3, 1), 0, out)
    lse = jnp.where(empty, -jnp.inf, lse)
    return (
        out.reshape(spec.batch, spec.q_len, spec.q_heads, spec.value_dim).astype(spec.dtype),
        lse.reshape(spec.batch, spec.q_heads, spec.q_len),
    )


def describe(
    spec: CallSpec, forward: None, backward: None, operands: Operands
) -> KernelDescription:
    """Describe the dense definition, whose backward holds P, dP and dS of all pairs."""
    pairs = spec.batch * spec.q_heads * spec.q_len * spec.kv_len
    return KernelDescription(
        (spec.q_len, spec.kv_len),
        "XLA's operations on all pairs at once",
        "JAX's derivative of these",
        3 * pairs * spec.accumulator.itemsize,
    )


BACKEND = Backend(
    name="reference",
    unsupported_reason=lambda spec, device: None,
    configure=lambda spec, device: Configuration(),
    forward=forward,
    backward=None,
    describe=describe,
)
