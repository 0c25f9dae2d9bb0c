"""Copies keys and values of a cache of 8 bits in 16, for tiles: WGMMA multiplies K and V as they are in shared memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import empty
from jax.typing import DTypeLike

from pallas_fa2.arithmetic import I32
from pallas_fa2.ir.equivalent_call import contiguous_keys
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.ir.quantized import Scales

# The slots of a sequence that are copied at a time, so that the time follows lengths: those of K 8 and H 128 are 50 MB to read and to
# write, 28 to 41 us by XLA, and in 36 to 77 the host learns how many turns there are (docs/decisions/0091-prompts-on-8-bits.md).
CHUNK = 8192


def copy_keys(
    k: jax.Array,
    v: jax.Array,
    table: jax.Array | None,
    scales: Scales,
    lengths: jax.Array,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """Return what keys and values of 8 bits stand for, `[B, S, K, H]` and `[B, S, K, Hv]` in `dtype`, up to the largest length.
    Slots behind it may hold anything.

    k and v are those of a cache, or of pages that `table` lists for each sequence; lengths are integers `[B]`, any.
    """
    page = 1 if table is None else k.shape[1]
    capacity = k.shape[1] if table is None else table.shape[1] * page
    size = max(1, CHUNK // page) * page
    if capacity <= size:
        return contiguous_keys(k, v, table, scales, dtype)

    def copy_chunk(i: jax.Array, copies: tuple[jax.Array, jax.Array]) -> tuple:
        # JAX moves a slice that would end behind the array: the last two may overlap.
        first = i * size

        def load(x: jax.Array, axis: int) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, first, size, axis)

        if table is None:
            inputs = load(k, 1), load(v, 1), None, Scales(*(load(x, 2) for x in scales))
        else:
            pages = lax.dynamic_slice_in_dim(table, lax.div(first, I32(page)), size // page, 1)
            inputs = k, v, pages, scales
        chunk = contiguous_keys(*inputs, dtype)
        return tuple(
            lax.dynamic_update_slice_in_dim(x, y, first, 1)
            for x, y in zip(copies, chunk, strict=True)
        )

    used = jnp.clip(jnp.max(lengths).astype(I32), 0, capacity)
    unwritten = [empty((lengths.size, capacity, *x.shape[2:]), dtype) for x in (k, v)]
    copies = match_varying_axes(tuple(unwritten), (k, v, table, scales))
    return lax.fori_loop(I32(0), lax.div(used + (size - 1), I32(size)), copy_chunk, copies)
