"""Gradients by the scores of a tile in registers, whether its rows are queries or keys."""

import jax
import jax.numpy as jnp

from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives.tile_ops import TARGET_OPS
from pallas_fa2.ir.tile_values import TileValue, broadcast_to_tile


def softmax_gradient(
    spec: KernelSpec, p: jax.Array, dp: jax.Array, negative_delta: jax.Array
) -> jax.Array:
    """Return dS = P ∘ (dP - delta) in float32, without the derivative of score functions.

    P is negative where it is dropped (`TileDropout.mark_dropped`). All are tiles of one shape.
    """
    if spec.dropout is not None:
        dp = jnp.where(p > 0, dp * spec.dropout_scale, 0.0)
        p = abs(p)
    ds = p * (dp + negative_delta)
    if spec.score is None and spec.guards_nonfinite:
        return jnp.where(p == 0, 0.0, ds)  # where a mask hides a pair, dP may be NaN
    return ds


def times_derivative(ds: jax.Array, p: jax.Array, derivative: TileValue) -> jax.Array:
    """Return dS times a derivative of the score functions: 0 where P is 0, as derivatives of hidden pairs may be
    infinite."""
    tile = broadcast_to_tile(derivative, (0, 1), ds.shape, TARGET_OPS)
    return jnp.where(p != 0, ds * tile, 0.0)
