"""Caches with poison where nobody may look, and attention on them, densely, in NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa

# A whole cache, an empty sequence, and two that end within a page.
LENGTHS = np.array([24, 0, 9, 5])
CAPACITY, PAGE = 24, 4
# The new tokens of packed queries: a decode step, nothing, a whole prompt, a part of one; then unused rows.
COUNTS, UNUSED = np.array([1, 0, 9, 3]), 3
HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 4, 2, 8, 16


@dataclasses.dataclass(frozen=True)
class Rows:
    """Each query: its sequence (-1 of none), its row in the call and its position."""

    sequence: np.ndarray
    row: np.ndarray
    position: np.ndarray


@dataclasses.dataclass(frozen=True)
class Problem:
    """`key[b]` and `value[b]` are those of sequence b, `[length, K, H]`; query is `[rows of all, N, H]`.

    Of a cache of 8 bits they are what it stands for.
    """

    cache: fa.Cache | fa.Pages
    query: np.ndarray
    queries: fa.Packed | None
    key: list[np.ndarray]
    value: list[np.ndarray]
    rows: Rows

    @property
    def is_packed(self) -> bool:
        return self.queries is not None

    @property
    def tokens(self) -> int:
        return self.query.shape[0 if self.is_packed else 1]

    def flatten(self, x: Any, heads_first: bool = False) -> np.ndarray:
        """An output `[B, T, N, Hv]`, or with `heads_first` an lse `[B, N, T]`, by query: `[queries, N, ...]`."""
        x = np.asarray(x, np.float64)
        if heads_first:
            x = np.swapaxes(x, -1, -2)
        return x if self.is_packed else x.reshape(-1, *x.shape[2:])


def make(
    tokens: int | None,
    paged: bool = False,
    lengths: np.ndarray = LENGTHS,
    counts: np.ndarray = COUNTS,
    dtype: Any = np.float32,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    dims: tuple[int, int] = (HEAD_DIM, VALUE_DIM),
    page: int = PAGE,
    seed: int = 0,
    quantized: str | None = None,
    capacity: int = CAPACITY,
) -> Problem:
    """`tokens` queries of each sequence, or packed ones by `counts` if that is None; keys and values of `dtype`, or of
    the 8 bits `quantized`."""
    rng = np.random.default_rng(seed)
    batch, (q_heads, kv_heads) = len(lengths), heads

    def random(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32).astype(dtype)

    if paged:
        cache, slots = _pages(rng, random, lengths, kv_heads, dims, page, capacity)
        cache, whole = _in_bits(cache, quantized, rng)
        arrays = [
            [x[slots[b]].reshape(-1, *x.shape[2:])[:n] for b, n in enumerate(lengths)]
            for x in whole
        ]
    else:
        key, value = (random(batch, capacity, kv_heads, dim) for dim in dims)
        unused = np.arange(capacity) >= lengths[:, None]
        key[unused], value[unused] = np.nan, np.nan
        cache = fa.Cache(jnp.asarray(key), jnp.asarray(value), jnp.asarray(lengths, jnp.int32))
        cache, whole = _in_bits(cache, quantized, rng)
        arrays = [[x[b, :n] for b, n in enumerate(lengths)] for x in whole]
    if tokens is None:
        starts = np.concatenate([[0], np.cumsum(counts)])
        total = starts[-1] + UNUSED
        row = np.arange(total)
        sequence = np.searchsorted(starts, row, side="right") - 1
        sequence = np.where(sequence < batch, sequence, -1)
        position = lengths[sequence] - starts[sequence + 1] + row
        queries = fa.Packed(jnp.asarray(starts, jnp.int32))
        query = random(total, q_heads, dims[0])
    else:
        sequence, row = (x.ravel() for x in np.mgrid[:batch, :tokens])
        position = lengths[sequence] - tokens + row
        queries, query = None, random(batch, tokens, q_heads, dims[0])
    return Problem(cache, query, queries, *arrays, Rows(sequence, row, position))


def _in_bits[T: fa.Cache | fa.Pages](
    cache: T, quantized: str | None, rng: Any
) -> tuple[T, tuple[np.ndarray, np.ndarray]]:
    """The cache in these 8 bits, by scales between tokens of which are 2^6, and what its keys and values stand for.

    Where it was NaN, the scales are as well, and so are the numbers that may be.
    """
    if quantized is None:
        return cache, (np.asarray(cache.key), np.asarray(cache.value))
    arrays, whole, scales = [], [], []
    for x in (np.asarray(cache.key, np.float32), np.asarray(cache.value, np.float32)):
        unused = np.isnan(x).any(-1)
        exponent = rng.integers(-3, 3, x.shape[:3]) - (6 if quantized == "float8_e4m3fn" else 5)
        scale = np.exp2(exponent).astype(np.float32) * np.float32(1.25)
        numbers = np.asarray(np.nan_to_num(x) / scale[..., None])
        low = quantized == "int8"
        numbers = np.clip(np.round(numbers), -127, 127) if low else np.clip(numbers, -448, 448)
        numbers = numbers.astype(quantized)
        whole.append(numbers.astype(np.float64) * scale[..., None])
        scale[unused] = np.nan
        numbers[unused] = 127 if low else np.nan
        arrays.append(jnp.asarray(numbers))
        scales.append(jnp.asarray(np.moveaxis(scale, 2, 1), jnp.bfloat16))
    fields = {"key": arrays[0], "value": arrays[1], "k_scale": scales[0], "v_scale": scales[1]}
    return dataclasses.replace(cache, **fields), (whole[0], whole[1])


def _pages(
    rng: Any,
    random: Callable,
    lengths: np.ndarray,
    kv_heads: int,
    dims: tuple[int, int],
    page: int,
    capacity: int,
) -> tuple:
    """Pages in any order, of which two sequences share the first; what no token needs is NaN, or no page."""
    batch, width = len(lengths), capacity // page
    num_pages = batch * width + 3
    slots = rng.permutation(num_pages)[: batch * width].reshape(batch, width)
    slots[2, 0] = slots[0, 0]
    keys, values = (random(num_pages, page, kv_heads, dim) for dim in dims)
    used = np.zeros((num_pages, page), bool)
    for b, n in enumerate(lengths):
        for i in range(n):
            used[slots[b, i // page], i % page] = True
    keys[~used], values[~used] = np.nan, np.nan
    needed = np.arange(width) * page < lengths[:, None]
    anything = rng.choice([-7, num_pages, 10**9, 0], slots.shape)
    table = jnp.asarray(np.where(needed, slots, anything), jnp.int32)
    lengths = jnp.asarray(lengths, jnp.int32)
    return fa.Pages(jnp.asarray(keys), jnp.asarray(values), table, lengths), slots


def dense(
    problem: Problem,
    visible: Callable | None = None,
    score: Callable | None = None,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """out `[queries, N, Hv]` and lse `[queries, N]` in float64.

    `visible(b, row, q, k)` is about sequence b, a query's row and position and the positions of all its keys;
    `score(s, b, row, q, k)` returns the scores `[N, keys]`.
    """
    rows = problem.rows
    query = np.asarray(problem.query, np.float64).reshape(-1, *problem.query.shape[-2:])
    count, heads, head_dim = query.shape
    out = np.zeros((count, heads, problem.value[0].shape[-1]))
    lse = np.full((count, heads), -np.inf)
    scale = head_dim**-0.5 if scale is None else scale
    for i, (b, row) in enumerate(zip(rows.sequence, rows.row, strict=True)):
        if b < 0:
            continue
        position = rows.position[i] if positions is None else positions[i]
        k, v = (np.asarray(x[b], np.float64) for x in (problem.key, problem.value))
        k, v = (np.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))
        index = np.arange(len(k))
        s = np.einsum("nh,knh->nk", query[i], k) * scale
        if score is not None:
            s = score(s, b, row, position, index)
        keep = index <= position if visible is None else visible(b, row, position, index)
        s = np.where(keep, s, -np.inf)
        if sinks is not None:
            s = np.concatenate([s, sinks[:, None].astype(np.float64)], 1)
            v = np.concatenate([v, np.zeros((1, *v.shape[1:]))])
        top = s.max(1, initial=-np.inf)
        attends = top > -np.inf  # heads of whose scores one is left
        p = np.exp(s[attends] - top[attends, None])
        lse[i, attends] = top[attends] + np.log(p.sum(1))
        out[i, attends] = np.einsum("nk,knh->nh", p / p.sum(1, keepdims=True), v[:, attends])
    return out, lse
