"""Classes of tiles, those found and those that masks have; and data of tokens, to make masks of."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL, block_classes
from pallas_fa2.parse_call import parse_call

B, N, K = 2, 4, 2
RAGGED = (45, 61, 8, 16)  # T, S, and those of a tile
EDGE = 2**31 - 1


def describe_shapes(mask, q_len, kv_len, **options):
    q, k = (
        jax.ShapeDtypeStruct((B, n, heads, 8), jnp.float32)
        for n, heads in ((q_len, N), (kv_len, K))
    )
    return parse_call(q, k, k, mask=mask, **options)


def table(mask, sizes, **options):
    """Classes as `[B, N, T tiles, S tiles]`."""
    q_len, kv_len, *blocks = sizes
    each = block_classes(*describe_shapes(mask, q_len, kv_len, **options), *blocks)
    each = np.broadcast_to(each, (B, K, N // K, *each.shape[-2:]))
    return each.reshape(B, N, *each.shape[-2:])


def exact(visible, sizes):
    """The classes that a mask of `[B, N, T, S]` has."""
    q_len, kv_len, block_q, block_kv = sizes
    visible = np.broadcast_to(visible, (B, N, q_len, kv_len))

    def over(op, x):
        x = op.reduceat(x, np.arange(0, q_len, block_q), axis=2)
        return op.reduceat(x, np.arange(0, kv_len, block_kv), axis=3)

    return np.where(
        over(np.logical_and, visible), FULL, np.where(over(np.logical_or, visible), PARTIAL, EMPTY)
    )


def assert_sound(got, want):
    assert not np.any((got == EMPTY) & (want != EMPTY)), "a tile with visible pairs is skipped"
    assert not np.any((got == FULL) & (want != FULL)), "a tile with hidden pairs is not masked"


def q_side(x):
    """Data of queries, `[B, T]`, `[T]` or `[B, 1]`, against `[B, N, T, S]`."""
    return x[..., None, :, None]


def k_side(x):
    return x[..., None, None, :]


def integers(*shape, low=0, high=5, seed=0):
    return np.random.default_rng(seed).integers(low, high, shape, dtype=np.int32)


def documents(n, count=5, seed=0):
    """Sorted ids of `count` documents, each of some tokens."""
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, n), count - 1, replace=False))
    return np.searchsorted(cuts, np.arange(n), side="right").astype(np.int32)


def token_data(n, seed):
    """Awkward on purpose: NaN, infinities, unsigned numbers, image spans, ids in no order."""
    rng = np.random.default_rng(seed)
    x = rng.choice(np.arange(-8, 9), n).astype(np.float32) / 4
    for value, rate in ((np.nan, 0.02), (np.inf, 0.04), (-np.inf, 0.04)):
        x[rng.random(n) < rate] = value
    doc, index = documents(n, seed=seed), np.arange(n)
    return {
        "doc": doc,
        "start": np.searchsorted(doc, doc).astype(np.int32),
        "image": np.where((index % 20 >= 6) & (index % 20 < 15), index // 20, -1).astype(np.int32),
        "random": rng.integers(0, 9, n, dtype=np.int32),
        "count": rng.integers(0, 40, n, dtype=np.uint32),
        "flag": index % 24 < 12,
        "x": x,
    }


def dense(choose, q_data, k_data):
    """What a mask of arrays is: the same code on a column and a row."""
    q, k = (
        types.SimpleNamespace(**{n: put(x) for n, x in data.items()}, index=put(index))
        for data, put, index in (
            (q_data, q_side, np.arange(len(q_data["x"]), dtype=np.int32)),
            (k_data, k_side, np.arange(len(k_data["x"]), dtype=np.int32)),
        )
    )
    with np.errstate(all="ignore"):
        return choose(q, k, np)
