"""One tile of FlashAttention-2 (arXiv:2307.08691), Algorithms 1 and 2, in XLA operations.

A tile is a block of t query rows and s key columns for every batch entry and head: scores are `[B, K, G, t, s]`.
Statistics are in the accumulator dtype; operands of products are in the input dtype, on a CPU in the accumulator's. A
tile of the size of the call is the dense definition, a loop over tiles the blockwise backend.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import query_row_keys
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS, default_positions
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD, CallSpec, Operands, split_floats


class Tile(NamedTuple):
    """The position and size of one tile of a call, and the operands sliced to it."""

    spec: CallSpec
    q_start: Any
    k_start: Any
    q_size: int
    k_size: int
    operands: Operands

    @property
    def rows(self) -> jax.Array:
        """The indices of the tile's queries, `[1, 1, 1, t, 1]`."""
        return default_positions(self.q_size, Q_AXIS) + self.q_start

    @property
    def columns(self) -> jax.Array:
        """The indices of the tile's keys, `[1, 1, 1, 1, s]`."""
        return default_positions(self.k_size, K_AXIS) + self.k_start

    @property
    def q_index(self) -> jax.Array:
        """The positions of the tile's queries: `rows`, unless they are explicit."""
        return self.rows if self.operands.q_index is None else self.operands.q_index

    @property
    def k_index(self) -> jax.Array:
        return self.columns if self.operands.k_index is None else self.operands.k_index


def tile_at(
    spec: CallSpec, operands: Operands, q_start: Any, k_start: Any, q_size: int, k_size: int
) -> Tile:
    operands = operands.slice_tile(q_start, q_size, k_start, k_size)
    return Tile(spec, q_start, k_start, q_size, k_size, operands)


def product(letters: str, a: jax.Array, b: jax.Array, accumulator: Any) -> jax.Array:
    """Compute a product (an einsum) in the accumulator dtype; if one operand has 16 bits, the other is rounded to
    them."""

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(accumulator), b.astype(accumulator)
        return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST)

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = min((a.dtype, b.dtype), key=lambda d: d.itemsize)
        a, b = a.astype(dtype), b.astype(dtype)
        return jnp.einsum(letters, a, b, preferred_element_type=accumulator)

    if a.dtype == b.dtype == accumulator:
        return wide(a, b)
    # XLA's CPU backend supports 16-bit products for some layouts of the operands only.
    return lax.platform_dependent(a, b, cpu=wide, default=narrow)


def scaled(spec: CallSpec, q: jax.Array) -> jax.Array:
    """Multiply the queries by the scale where that is as precise as to scale the scores.

    XLA may fuse a scale of the scores with the subtraction of the maximum in the forward and not in the backward, and p
    is then wrong by the rounding of a score: 1e-4 where scores are 1000 and all is float32.
    """
    return q * spec.scale if spec.dtype == spec.accumulator else q


def scores(tile: Tile, raw: jax.Array, data: tuple) -> jax.Array:
    """Scale q·k of `scaled` queries, `[B, K, G, t, s]`, and apply the score functions."""
    spec = tile.spec
    s = raw if spec.dtype == spec.accumulator else raw * spec.scale
    for code, arrays in zip(spec.scores, data, strict=True):
        s = jnp.broadcast_to(code.on_leading_axes(s, tile.q_index, tile.k_index, arrays), s.shape)
    return s


def visible(tile: Tile) -> jax.Array:
    """Return which pairs are not masked: both tokens exist, and the mask is True."""
    spec = tile.spec
    inside = (tile.rows < spec.q_len) & (tile.columns < spec.kv_len)
    if spec.mask is None:
        return inside
    return inside & spec.mask.on_leading_axes(tile.q_index, tile.k_index, tile.operands.mask)


def zero_masked_tokens(x: jax.Array, keep: jax.Array, axis: int) -> jax.Array:
    """Zero the tokens of `[B, t, K, (G,) H]` of which the tile keeps no pair.

    Their values may be NaN (padding), and a probability of 0 times NaN is NaN.
    """
    reduced = (K_AXIS,) if axis == Q_AXIS else (2, Q_AXIS)  # a group shares its keys
    kept = jnp.any(keep, reduced)  # [B, K, G, t] or [B, K, s]
    kept = jnp.moveaxis(kept, -1, 1)[..., None]
    return jnp.where(kept, x, jnp.zeros((), x.dtype))


def is_empty_row(spec: CallSpec, maximum: jax.Array) -> jax.Array:
    """Return which rows attend to no key, by their largest scores."""
    return maximum <= (MASKED_SCORE_THRESHOLD if spec.scores else -jnp.inf)


def replace_masked(raw: jax.Array, data: tuple, keep: jax.Array) -> tuple[jax.Array, tuple]:
    """Replace q·k of masked pairs, and score data that only masked pairs read, by 1.

    Score functions are differentiated there too, and 0 times NaN or infinity is NaN. Few functions have an infinite
    derivative at 1; they may divide by 0.
    """

    def replace(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        shared = tuple(axis for axis in range(NUM_LEADING_AXES) if x.shape[axis] == 1)
        kept = jnp.any(keep, shared, keepdims=True)
        kept = lax.expand_dims(kept, range(NUM_LEADING_AXES, x.ndim))
        return jnp.where(kept, x, jnp.ones((), x.dtype))

    return jnp.where(keep, raw, jnp.ones((), raw.dtype)), jax.tree.map(replace, data)


class Running(NamedTuple):
    """The state of the online softmax of Algorithm 1: row maximum, row sum and unnormalized output."""

    maximum: jax.Array  # [B, K, G, t]
    total: jax.Array
    out: jax.Array  # [B, t, K, G, Hv]


def start(spec: CallSpec, rows: int) -> Running:
    shape = (spec.batch, spec.kv_heads, spec.group, rows)
    out = (spec.batch, rows, spec.kv_heads, spec.group, spec.value_dim)
    dtype = spec.accumulator
    return Running(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros(out, dtype))


def forward(tile: Tile, state: Running, q: Any, k: Any, v: Any, masked: bool) -> Running:
    """Update the online softmax by one tile (Algorithm 1, lines 8-10)."""
    spec, dtype = tile.spec, tile.spec.accumulator
    keep = visible(tile) if masked else None
    if keep is not None:
        v = zero_masked_tokens(v, keep, K_AXIS)
    raw = product("btkgh,bskh->bkgts", scaled(spec, q), k, dtype)
    s = scores(tile, raw, tile.operands.scores)
    if keep is not None:
        s = jnp.where(keep, s, -jnp.inf)
    maximum = jnp.maximum(state.maximum, jnp.max(s, -1))
    base = jnp.where(is_empty_row(spec, maximum), 0, maximum)
    rescale = jnp.exp(state.maximum - base)
    p = jnp.exp(s - base[..., None])
    total = state.total * rescale + jnp.sum(p, -1)
    if spec.dropout_rate:
        p = p * dropout_factor(tile)
    out = state.out * _as_rows(rescale)
    out = out + product("bkgts,bskh->btkgh", p, v, dtype)
    return Running(maximum, total, out)


class RowSums(NamedTuple):
    """The denominators of p in each row, `total * exp(maximum)`; a row that attends to no key has a total of 0.

    The backward reads these instead of the logsumexp, whose rounding is an error of p: 1e-4 where scores are 1000
    and all is float32.
    """

    maximum: jax.Array  # always finite
    total: jax.Array


def finish(state: Running) -> tuple[jax.Array, jax.Array, RowSums]:
    """Return out `[B, t, K, G, Hv]`, the natural lse `[B, K, G, t]` (0 and -inf for empty rows) and the row sums."""
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    out = state.out / _as_rows(total)
    lse = jnp.where(empty, -jnp.inf, state.maximum + jnp.log(total))
    return out, lse, RowSums(jnp.where(empty, 0, state.maximum), state.total)


def sums_from_lse(lse: jax.Array) -> RowSums:
    """Return row sums where only the natural logsumexp is known."""
    empty = lse == -jnp.inf
    return RowSums(jnp.where(empty, 0, lse), jnp.where(empty, 0, jnp.ones_like(lse)))


def lse_from_sums(sums: RowSums) -> jax.Array:
    """Return the natural logsumexp of row sums, -inf for empty rows."""
    return jnp.where(sums.total == 0, -jnp.inf, sums.maximum + jnp.log(sums.total))


def _as_rows(x: jax.Array) -> jax.Array:
    """Transpose row statistics `[B, K, G, t]` to `[B, t, K, G, 1]`."""
    return jnp.moveaxis(x, -1, 1)[..., None]


class Gradients(NamedTuple):
    """The gradients of one tile: of q `[B, t, K, G, H]`, k `[B, s, K, H]`, v `[B, s, K, Hv]` and the score data."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    scores: tuple


def row_delta(out: Any, dout: Any, dlse: Any, dtype: Any) -> jax.Array:
    """Return delta = rowsum(dO ∘ O) - dlse, `[B, N, T]`; without `dlse` if it is None."""
    delta = jnp.moveaxis(jnp.sum(dout.astype(dtype) * out.astype(dtype), -1), 1, 2)
    return delta if dlse is None else delta - dlse


def backward(
    tile: Tile, q: Any, k: Any, v: Any, dout: Any, sums: RowSums, delta: Any, masked: bool
) -> Gradients:
    """Return the gradients of one tile (Algorithm 2, lines 11-16); P is recomputed from the row sums.

    Row sums and `delta` are `[B, K, G, t]`.
    """
    spec, dtype = tile.spec, tile.spec.accumulator
    keep = visible(tile) if masked else None
    if keep is not None:
        q, dout = zero_masked_tokens(q, keep, Q_AXIS), zero_masked_tokens(dout, keep, Q_AXIS)
        k, v = zero_masked_tokens(k, keep, K_AXIS), zero_masked_tokens(v, keep, K_AXIS)
    q = scaled(spec, q)
    raw, data = product("btkgh,bskh->bkgts", q, k, dtype), tile.operands.scores
    if keep is not None and spec.scores:
        raw, data = replace_masked(raw, data, keep)
    # Floating-point data is differentiated; the rest is closed over.
    floats, rebuild = split_floats(data)
    s, scores_vjp = jax.vjp(lambda raw, data: scores(tile, raw, rebuild(data)), raw, floats)
    empty = sums.total == 0
    p = jnp.exp(s - jnp.where(empty, jnp.inf, sums.maximum)[..., None])
    p = p / jnp.where(empty, 1, sums.total)[..., None]
    dp = product("btkgh,bskh->bkgts", dout, v, dtype)
    p_out = p if keep is None else jnp.where(keep, p, 0)
    if spec.dropout_rate:
        factor = dropout_factor(tile)
        p_out, dp = p_out * factor, dp * factor
    ds = p * (dp - jnp.where(empty, 0, delta)[..., None])
    if keep is not None:
        ds = jnp.where(keep, ds, 0)
    dv = product("bkgts,btkgh->bskh", p_out, dout, dtype)
    draw, ddata = scores_vjp(ds)
    if keep is not None:
        draw = jnp.where(keep, draw, 0)
    dq = scaled(spec, product("bkgts,bskh->btkgh", draw, k, dtype))
    dk = product("bkgts,btkgh->bskh", draw, q, dtype)
    return Gradients(dq, dk, dv, ddata)


def dropout_factor(tile: Tile) -> jax.Array:
    """Return 0 where a probability is dropped and 1 / (1 - rate) where it is kept, `[B, K, G, t, s]`."""
    spec = tile.spec
    keys = query_row_keys(spec, tile.operands, tile.q_index)
    return dropout.factor(spec.dropout_rate, keys, tile.k_index).astype(spec.accumulator)
