"""Gradients of the inputs of score functions, in their shapes and dtypes."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.compile_mods import float_sources
from pallas_fa2.backends.common.tile_mods import TileScore
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.ir.tile_functions import ArgSource


def aux_gradients(
    spec: CallSpec,
    score: TileScore | None,
    grads: AuxGrads | None,
    floats: list[jax.Array],
    finalize_pairwise: Callable,
) -> list[jax.Array]:
    """Return the gradients of the floating-point inputs of scores, from what the kernel has summed.

    `finalize_pairwise(pieces, batch entries, dtype)` makes an array of the pieces of a pairwise gradient.
    """

    def gradient(source: ArgSource, x: jax.Array) -> jax.Array:
        if grads is None or score is None or source not in score.diff_inputs:
            return jnp.zeros(x.shape, x.dtype)
        total = _on_leading_axes(spec, score, grads, source, x, finalize_pairwise)
        shared = tuple(i for i in range(NUM_LEADING_AXES) if x.shape[i] == 1)
        return total.sum(shared, keepdims=True).astype(x.dtype)

    return [gradient(source, x) for source, x in zip(float_sources(spec), floats, strict=True)]


def _on_leading_axes(
    spec: CallSpec,
    score: TileScore,
    grads: AuxGrads,
    source: ArgSource,
    x: jax.Array,
    finalize_pairwise: Callable,
) -> jax.Array:
    """Return a gradient on the axes `[B, K, G, T, S]`, before it is summed over those that x shares. (Pairwise ones are
    summed over the batch already.)"""
    if source.side == "pair":
        return _pairwise_gradient(spec, grads.pairwise_of(score, source), x, finalize_pairwise)
    array, field = grads.field_of(score, source)
    if source.side == "real":
        return array[:, field].sum(-1).reshape(spec.batch, spec.kv_heads, spec.group, 1, 1)
    axis, length = (Q_AXIS, spec.q_len) if source.side == "q" else (K_AXIS, spec.kv_len)
    shape = [spec.batch, 1, 1, 1, 1]
    shape[axis] = length
    return array[:, field, :length].reshape(shape)


def _pairwise_gradient(
    spec: CallSpec, pieces: jax.Array, x: jax.Array, finalize_pairwise: Callable
) -> jax.Array:
    heads = pieces.shape[1]
    split = (spec.kv_heads, spec.group) if heads > 1 else (1, 1)
    # where groups or their heads share it, there is more to sum
    dtype = x.dtype if x.shape[1:3] == split else jnp.dtype("float32")
    total = finalize_pairwise(pieces, min(len(pieces), x.shape[0]), dtype)
    total = total[..., : spec.q_len, : spec.kv_len]
    return total.reshape(-1, *split, spec.q_len, spec.kv_len)
