"""The mathematics of one tile: FlashAttention-2 (arXiv:2307.08691), Algorithms 1 and 2.

A tile is a block of query rows against a block of key columns, for every batch entry and head at
once: scores are `[B, K, G, t, s]`. Statistics are kept in the accumulator dtype; products take operands in the
input dtype, on a CPU in the accumulator's. A tile that is the whole of the problem is the dense definition; tiles
in a loop are the blockwise implementation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import query_row_keys
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD, CallSpec, Operands, split_floats


class Tile(NamedTuple):
    """One tile of a problem: where it lies and the arrays that its masks and scores read."""

    spec: CallSpec
    q_start: Any
    k_start: Any
    q_size: int
    k_size: int
    operands: Operands

    def positions(self, given: jax.Array | None, axis: int, start: Any, size: int) -> jax.Array:
        """Global positions of the tile's tokens."""
        if given is not None:
            return given
        shape = [1] * NUM_LEADING_AXES
        shape[axis] = size
        return lax.broadcasted_iota(jnp.int32, shape, axis) + start

    @property
    def q_index(self) -> jax.Array:
        return self.positions(self.operands.q_index, Q_AXIS, self.q_start, self.q_size)

    @property
    def k_index(self) -> jax.Array:
        return self.positions(self.operands.k_index, K_AXIS, self.k_start, self.k_size)


def tile_at(
    spec: CallSpec, operands: Operands, q_start: Any, k_start: Any, q_size: int, k_size: int
) -> Tile:
    part = operands.slice_tile(q_start, q_size, k_start, k_size)
    return Tile(spec, q_start, k_start, q_size, k_size, part)


def product(letters: str, a: jax.Array, b: jax.Array, accumulator: Any) -> jax.Array:
    """A matrix product with sums in the accumulator dtype; wider operands are rounded to 16 bits if one has them."""

    def wide(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(accumulator), b.astype(accumulator)
        return jnp.einsum(letters, a, b, precision=lax.Precision.HIGHEST)

    def narrow(a: jax.Array, b: jax.Array) -> jax.Array:
        dtype = min((a.dtype, b.dtype), key=lambda d: d.itemsize)
        a, b = a.astype(dtype), b.astype(dtype)
        return jnp.einsum(letters, a, b, preferred_element_type=accumulator)

    if a.dtype == b.dtype == accumulator:
        return wide(a, b)
    # XLA's CPU backend has 16-bit products for some layouts of the operands only.
    return lax.platform_dependent(a, b, cpu=wide, default=narrow)


def scaled(spec: CallSpec, q: jax.Array) -> jax.Array:
    """Queries times the scale, where that loses nothing to scaling scores.

    A product after q·k may be fused with the subtraction of the maximum in the forward and not in the backward,
    and p is then wrong by the rounding of a score: 1e-4 where scores are 1000 and all is float32.
    """
    return q * spec.scale if spec.dtype == spec.accumulator else q


def scores(tile: Tile, raw: jax.Array, data: tuple) -> jax.Array:
    """Scaled and passed through the score functions. `raw` is q·k, `[B, K, G, t, s]`, of `scaled` queries."""
    spec = tile.spec
    s = raw if spec.dtype == spec.accumulator else raw * spec.scale
    for code, arrays in zip(spec.scores, data, strict=True):
        s = jnp.broadcast_to(code.on_leading_axes(s, tile.q_index, tile.k_index, arrays), s.shape)
    return s


def visible(tile: Tile) -> jax.Array:
    """The pairs that take part: both tokens exist, and the mask lets one see the other."""
    spec = tile.spec
    row = tile.positions(None, Q_AXIS, tile.q_start, tile.q_size)
    column = tile.positions(None, K_AXIS, tile.k_start, tile.k_size)
    inside = (row < spec.q_len) & (column < spec.kv_len)
    if spec.mask is None:
        return inside
    return inside & spec.mask.on_leading_axes(tile.q_index, tile.k_index, tile.operands.mask)


def zero_unseen(x: jax.Array, keep: jax.Array, axis: int) -> jax.Array:
    """Zeroes the tokens of `[B, t, K, (G,) H]` that take part in no pair of the tile.

    Their values may be NaN (padding), and a probability of 0 times NaN is NaN.
    """
    other = K_AXIS if axis == Q_AXIS else Q_AXIS
    over = (other,) if axis == Q_AXIS else (2, other)  # a key is shared by its group
    seen = jnp.any(keep, over)  # [B, K, G, t] or [B, K, s]
    seen = jnp.moveaxis(seen, -1, 1)[..., None]
    return jnp.where(seen, x, jnp.zeros((), x.dtype))


def sees_nothing(spec: CallSpec, maximum: jax.Array) -> jax.Array:
    """Of rows' largest scores."""
    return maximum <= (MASKED_SCORE_THRESHOLD if spec.scores else -jnp.inf)


def hide_masked(raw: jax.Array, data: tuple, keep: jax.Array) -> tuple[jax.Array, tuple]:
    """What score functions get, with 1 at masked pairs and in data that no other pair reads.

    They would be differentiated there too, and 0 times NaN or infinity is NaN. Few functions have
    an infinite derivative at 1; by 0 they may divide.
    """

    def hide(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        shared = tuple(axis for axis in range(NUM_LEADING_AXES) if x.shape[axis] == 1)
        read = jnp.any(keep, shared, keepdims=True)
        return jnp.where(
            lax.expand_dims(read, range(NUM_LEADING_AXES, x.ndim)), x, jnp.ones((), x.dtype)
        )

    return jnp.where(keep, raw, jnp.ones((), raw.dtype)), jax.tree.map(hide, data)


class Running(NamedTuple):
    """The online softmax of Algorithm 1: row maximum, row sum and unnormalized output."""

    maximum: jax.Array  # [B, K, G, t]
    total: jax.Array
    out: jax.Array  # [B, t, K, G, Hv]


def start(spec: CallSpec, rows: int) -> Running:
    shape = (spec.batch, spec.kv_heads, spec.group, rows)
    out = (spec.batch, rows, spec.kv_heads, spec.group, spec.value_dim)
    dtype = spec.accumulator
    return Running(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype), jnp.zeros(out, dtype))


def forward(tile: Tile, state: Running, q: Any, k: Any, v: Any, masked: bool) -> Running:
    """Takes one tile into the running softmax (Algorithm 1, lines 8-10)."""
    spec, dtype = tile.spec, tile.spec.accumulator
    keep = visible(tile) if masked else None
    if keep is not None:
        v = zero_unseen(v, keep, K_AXIS)
    raw = product("btkgh,bskh->bkgts", scaled(spec, q), k, dtype)
    s = scores(tile, raw, tile.operands.scores)
    if keep is not None:
        s = jnp.where(keep, s, -jnp.inf)
    maximum = jnp.maximum(state.maximum, jnp.max(s, -1))
    base = jnp.where(sees_nothing(spec, maximum), 0, maximum)  # of no key yet
    rescale = jnp.exp(state.maximum - base)
    p = jnp.exp(s - base[..., None])
    total = state.total * rescale + jnp.sum(p, -1)
    if spec.dropout_rate:
        p = p * dropout_factor(tile)
    out = state.out * _as_rows(rescale)
    out = out + product("bkgts,bskh->btkgh", p, v, dtype)
    return Running(maximum, total, out)


class RowSums(NamedTuple):
    """Of each row, p's denominator: `total * exp(maximum)`, with a total of 0 where it sees no key.

    The backward reads these and not the logsumexp, whose rounding is an error of p: 1e-4 where scores are 1000
    and all is float32.
    """

    maximum: jax.Array  # finite
    total: jax.Array


def finish(state: Running) -> tuple[jax.Array, jax.Array, RowSums]:
    """Output `[B, t, K, G, Hv]` and natural logsumexp `[B, K, G, t]`; 0 and -inf for empty rows."""
    empty = state.total == 0
    total = jnp.where(empty, 1, state.total)
    out = state.out / _as_rows(total)
    lse = jnp.where(empty, -jnp.inf, state.maximum + jnp.log(total))
    return out, lse, RowSums(jnp.where(empty, 0, state.maximum), state.total)


def sums_of(lse: jax.Array) -> RowSums:
    """Of rows whose natural logsumexp alone is known."""
    empty = lse == -jnp.inf
    return RowSums(jnp.where(empty, 0, lse), jnp.where(empty, 0, jnp.ones_like(lse)))


def _as_rows(x: jax.Array) -> jax.Array:
    """Row statistics `[B, K, G, t]` against rows `[B, t, K, G, 1]`."""
    return jnp.moveaxis(x, -1, 1)[..., None]


class Gradients(NamedTuple):
    """What one tile adds to the gradients; `scores` is the gradient of the score functions' data."""

    q: jax.Array  # [B, t, K, G, H]
    k: jax.Array  # [B, s, K, H]
    v: jax.Array
    scores: tuple


def row_delta(out: Any, dout: Any, dlse: Any, dtype: Any) -> jax.Array:
    """rowsum(dO ∘ O), less `dlse` if there is one, `[B, N, T]`."""
    delta = jnp.moveaxis(jnp.sum(dout.astype(dtype) * out.astype(dtype), -1), 1, 2)
    return delta if dlse is None else delta - dlse


def backward(
    tile: Tile, q: Any, k: Any, v: Any, dout: Any, sums: RowSums, delta: Any, masked: bool
) -> Gradients:
    """One tile of Algorithm 2 (lines 11-16); probabilities are formed again from the rows' sums.

    Those and `delta` are `[B, K, G, t]`; delta is rowsum(dO ∘ O) minus the cotangent of lse.
    """
    spec, dtype = tile.spec, tile.spec.accumulator
    keep = visible(tile) if masked else None
    if keep is not None:
        q, dout = zero_unseen(q, keep, Q_AXIS), zero_unseen(dout, keep, Q_AXIS)
        k, v = zero_unseen(k, keep, K_AXIS), zero_unseen(v, keep, K_AXIS)
    q = scaled(spec, q)
    raw, data = product("btkgh,bskh->bkgts", q, k, dtype), tile.operands.scores
    if keep is not None and spec.scores:
        raw, data = hide_masked(raw, data, keep)
    # Only differentiable arrays are differentiated; the rest of the data is closed over.
    floats, rebuild = split_floats(data)
    s, pull = jax.vjp(lambda raw, data: scores(tile, raw, rebuild(data)), raw, floats)
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
    draw, ddata = pull(ds)
    if keep is not None:
        draw = jnp.where(keep, draw, 0)
    dq = scaled(spec, product("bkgts,bskh->btkgh", draw, k, dtype))
    dk = product("bkgts,btkgh->bskh", draw, q, dtype)
    return Gradients(dq, dk, dv, ddata)


def dropout_factor(tile: Tile) -> jax.Array:
    """0 where a probability is dropped, 1 / (1 - rate) where it is kept: `[B, K, G, t, s]`."""
    spec = tile.spec
    keys = query_row_keys(spec, tile.operands.seed, tile.q_index)
    return dropout.factor(spec.dropout_rate, keys, tile.k_index).astype(spec.accumulator)
