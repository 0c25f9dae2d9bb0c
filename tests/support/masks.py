"""Masks that tests of several modules use, what they mean in NumPy, and data for them."""

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS, default_positions
from pallas_fa2.parse_call import parse_call


@fa.mask_fn
def causal_end(q, k):
    """Causal with the last query at the last key, by the mask's own code."""
    return q.index + (k.length - q.length) >= k.index


@fa.mask_fn
def of_all_kinds(q, k, c):
    return (q.both + k.both + q.own * k.own > c.head + c.param[1]) ^ c.pair


B, N, K = 2, 4, 2
T, S = 9, 14
I, J = np.arange(T)[:, None], np.arange(S)[None]


def dense(mask, q_len=T, kv_len=S, **positions):
    """The mask as `[B, N, T, S]`."""
    q = jax.ShapeDtypeStruct((B, q_len, N, 16), jnp.float32)
    k = jax.ShapeDtypeStruct((B, kv_len, K, 16), jnp.float32)
    spec, operands = parse_call(q, k, k, mask=mask, **positions)
    index = [
        default_positions(length, axis) if explicit is None else explicit
        for length, axis, explicit in (
            (q_len, Q_AXIS, operands.q_index),
            (kv_len, K_AXIS, operands.k_index),
        )
    ]
    visible = spec.mask.on_leading_axes(*index, operands.mask)
    return jnp.broadcast_to(visible, (B, K, N // K, q_len, kv_len)).reshape(B, N, q_len, kv_len)


def check(mask, expected, **positions):
    actual = np.asarray(dense(mask, *expected.shape[-2:], **positions))
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def integers(high, *shape, seed=0):
    return np.random.default_rng(seed).integers(0, high, shape, dtype=np.int32)


def column(x):
    """Data of queries, `[B, T]` or `[B]`, against `[B, N, T, S]`."""
    return x.reshape(B, 1, -1, 1)


def row(x):
    return x.reshape(B, 1, 1, -1)


POSITIONAL = {
    "causal": (fa.Causal(), lambda i, j, t, s: j <= i),
    "causal to the end": (causal_end, lambda i, j, t, s: j <= i + s - t),
    "window": (fa.Window(3), lambda i, j, t, s: abs(i - j) <= 3),
    "window to the left": (fa.Window(3, 0), lambda i, j, t, s: (j <= i) & (i - j <= 3)),
    "window to the right": (fa.Window(0, right=2), lambda i, j, t, s: (j >= i) & (j - i <= 2)),
    "window without a left end": (fa.Window(-1, 0), lambda i, j, t, s: j <= i),
    "window without a right end": (fa.Window(2, None), lambda i, j, t, s: i - j <= 2),
    "window without ends": (fa.Window(None, -1), lambda i, j, t, s: (i >= 0) & (j >= 0)),
    "window of data without a left end": (
        fa.Window(np.int32(-1), np.int32(1)),
        lambda i, j, t, s: j - i <= 1,
    ),
    "sliding window": (fa.SlidingWindow(3), lambda i, j, t, s: (j <= i) & (i - j < 3)),
    "sliding window of data": (
        fa.SlidingWindow(jnp.int32(3)),
        lambda i, j, t, s: (j <= i) & (i - j < 3),
    ),
    "window of itself": (fa.Window(0), lambda i, j, t, s: i == j),
    "endless window to the left": (
        fa.Window(2**31 - 1, 0),
        lambda i, j, t, s: j <= i,
    ),
    "endless window to the right": (
        fa.Window(3, 2**31 - 1),
        lambda i, j, t, s: i - j <= 3,
    ),
    "query length": (fa.Lengths(q=4), lambda i, j, t, s: (i < 4) & (j >= 0)),
    "key length": (fa.Lengths(kv=5), lambda i, j, t, s: (j < 5) & (i >= 0)),
    "lengths": (fa.Lengths(4, 5), lambda i, j, t, s: (i < 4) & (j < 5)),
    "no lengths": (fa.Lengths(), lambda i, j, t, s: (i >= 0) & (j >= 0)),
    "prefix": (fa.Prefix(3), lambda i, j, t, s: (j < 3) & (i >= 0)),
    "chunks": (fa.Chunked(4), lambda i, j, t, s: i // 4 == j // 4),
}


IDS, KV_IDS = integers(3, B, T), integers(3, B, S, seed=1)
SQUARE = integers(3, B, S, seed=2)
Q_LENGTHS, KV_LENGTHS = np.array([9, 4], np.int32), np.array([0, 11], np.int32)
PAIRS = integers(2, B, N, T, S, seed=3).astype(bool)

WITH_DATA = {
    "segments": (fa.Segments(SQUARE), column(SQUARE) == row(SQUARE)),
    "segments of both sides": (fa.Segments(IDS, KV_IDS), column(IDS) == row(KV_IDS)),
    "shared segments": (fa.Segments(IDS[0], kv_ids=KV_IDS), IDS[0][:, None] == row(KV_IDS)),
    "documents": (fa.Documents(IDS), column(IDS) <= J),
    "documents with ends": (
        fa.Documents(IDS, IDS[0] + 4),
        (column(IDS) <= J) & ((IDS[0] + 4)[:, None] > J),
    ),
    "query lengths": (fa.Lengths(q=Q_LENGTHS), (column(Q_LENGTHS) > I) & (J >= 0)),
    "key lengths": (fa.Lengths(kv=KV_LENGTHS), (row(KV_LENGTHS) > J) & (I >= 0)),
    "lengths": (fa.Lengths(Q_LENGTHS, KV_LENGTHS), (column(Q_LENGTHS) > I) & (row(KV_LENGTHS) > J)),
    "one length": (fa.Lengths(5, jnp.int32(6)), (I < 5) & (J < 6)),
    "prefixes": (fa.Prefix(KV_LENGTHS), (row(KV_LENGTHS) > J) & (I >= 0)),
    "array window": (fa.Window(np.int32(2), jnp.int32(5)), (I - J <= 2) & (J - I <= 5)),
    "symmetric array window": (fa.Window(jnp.int32(2)), abs(I - J) <= 2),
    "dense": (fa.Dense(PAIRS), PAIRS),
    "dense of one head": (fa.Dense(PAIRS[:, :1]), PAIRS[:, :1]),
    "dense of one row": (fa.Dense(PAIRS[:, :, :1]), PAIRS[:, :, :1].repeat(T, 2)),
    "dense of one column": (fa.Dense(PAIRS[..., :1]), PAIRS[..., :1].repeat(S, 3)),
    "dense without batch": (fa.Dense(PAIRS[0]), PAIRS[0]),
    "dense of pairs alone": (fa.Dense(PAIRS[0, 0]), PAIRS[0, 0]),
    "array": (PAIRS, PAIRS),
    "jax array": (jnp.asarray(PAIRS), PAIRS),
    "function": (lambda q, k: q.index + k.index > 8, I + J > 8),
    "function of a context": (
        lambda q, k, c: q.index > k.length - q.length,
        np.where(J < 0, 0, I) > 5,
    ),
}


CAUSAL, SEGMENTS = J <= I, column(IDS) == row(KV_IDS)
A, C = fa.Causal(), fa.Segments(IDS, KV_IDS)

COMPOSED = {
    "and": (A & C, CAUSAL & SEGMENTS),
    "or": (A | C, CAUSAL | SEGMENTS),
    "not": (~A, ~CAUSAL),
    "not of data": (~C, ~SEGMENTS),
    "nested": (~(A & ~C) | (fa.Prefix(2) & A), ~(CAUSAL & ~SEGMENTS) | ((J < 2) & CAUSAL)),
    "precedence": (A & C | fa.Prefix(2), (CAUSAL & SEGMENTS) | (J < 2)),
    "chain": (A & C & fa.Window(4) & ~fa.Window(1), CAUSAL & SEGMENTS & (I - J <= 4) & (I - J > 1)),
    "with a function": (A & (lambda q, k: k.index > 1), CAUSAL & (J > 1)),
    "with an array": (C | PAIRS, SEGMENTS | PAIRS),
    "with a function first": ((lambda q, k: k.index > 1) & A, CAUSAL & (J > 1)),
    "with an array first": (PAIRS | C, SEGMENTS | PAIRS),
    "with a jax array first": (jnp.asarray(PAIRS) & C, SEGMENTS & PAIRS),
    "of two sides": (C & fa.Dense(PAIRS) | fa.Lengths(kv=KV_LENGTHS),
                     SEGMENTS & PAIRS | (row(KV_LENGTHS) > J)),
}  # fmt: skip
