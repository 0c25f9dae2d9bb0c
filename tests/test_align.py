"""Alignment of queries to keys: `align="end"` is the same as giving those positions."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.support import interpreter
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow

B, N, K, H = 2, 4, 2, 8
KEY = jax.random.key(0)

MASKS = {
    "none": None,
    "causal": fa.Causal(),
    "window": fa.Window(3, 1),
    "sliding": fa.SlidingWindow(4),
    "chunks": fa.Chunked(5),
    "prefix": fa.Causal() | fa.Prefix(2),
    "function": lambda q, k: (q.index + k.index) % 3 != 0,
    "not": ~fa.Window(2) | fa.Causal(),
}


def inputs(t, s, h=H, dtype=jnp.float32):
    shapes = ((B, t, N, h), (B, s, K, h), (B, s, K, h), (B, t, N, h))
    return [jax.random.normal(KEY, shape, dtype) for shape in shapes]


def value_and_gradients(q, k, v, dout, **options):
    (out, lse), pull = jax.vjp(
        lambda q, k, v: fa.flash_attention(q, k, v, return_lse=True, **options), q, k, v
    )
    return out, lse, *pull((dout, jnp.zeros_like(lse)))


@pytest.mark.parametrize("implementation", [slow("reference"), "blockwise"])
@pytest.mark.parametrize("sizes", [(5, 17), (17, 5), slow((1, 9)), slow((6, 6))], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_align_end_equals_explicit_positions(mask, sizes, implementation):
    t, s = sizes
    score = (fa.alibi(N), lambda s, q, k: s + 0.1 * q.index.astype(s.dtype))
    options = {"mask": MASKS[mask], "score": score, "implementation": implementation}
    options |= {"dropout_rate": 0.3, "dropout_rng": KEY}

    def attend(**where):
        return interpreter.run(
            functools.partial(value_and_gradients, **where, **options), *inputs(t, s)
        )

    aligned, explicit = attend(align="end"), attend(q_positions=jnp.arange(s - t, s))
    chex.assert_trees_all_close(aligned, explicit, rtol=2e-5, atol=2e-5)


def test_the_last_queries_equal_those_of_the_whole_sequence():
    q, k, v, _ = inputs(16, 16)
    for mask, score in itertools.product((fa.Causal(), fa.SlidingWindow(5)), (None, fa.alibi(N))):
        whole = fa.flash_attention(q, k, v, mask=mask, score=score)
        last = fa.flash_attention(q[:, -3:], k, v, mask=mask, score=score, align="end")
        chex.assert_trees_all_close(last, whole[:, -3:], rtol=1e-5, atol=1e-5)
    expected = fa.flash_attention(q, k, v, is_causal=True)[:, -3:]
    drop_in = fa.dot_product_attention(q[:, -3:], k, v, is_causal=True, align="end")
    chex.assert_trees_all_close(drop_in, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("t, s", [(70, 130), (130, 70)])
def test_sm90_kernels_support_align_end(t, s):
    """Dropout's bits, a window's range and a score by positions, interpreted."""
    options = {"mask": fa.Window(40, 3), "score": fa.alibi(N)}
    options |= {"dropout_rate": 0.25, "dropout_rng": KEY}

    def run(*args, implementation="hopper", **where):
        return value_and_gradients(*args, implementation=implementation, **where, **options)

    arrays = inputs(t, s, 64, jnp.bfloat16)
    with planned_for_h200():
        actual = interpreter.run(lambda *args: run(*args, align="end"), *arrays)
    positions = jnp.arange(s - t, s)
    expected = run(*arrays, implementation="blockwise", q_positions=positions)
    for a, b in zip(actual, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_array_equal(np.isinf(a), np.isinf(b))
        np.testing.assert_allclose(a[np.isfinite(a)], b[np.isfinite(b)], rtol=0.05, atol=0.05)


def test_invalid_alignments_are_errors():
    q, k, v, _ = inputs(3, 5)
    with pytest.raises(ValueError, match=r"align \(= 'end'\) must be left out where q_positions"):
        fa.flash_attention(q, k, v, align="end", q_positions=jnp.arange(3))
    with pytest.raises(ValueError, match="align must be 'start' or 'end', but it is 'bottom'"):
        fa.flash_attention(q, k, v, align="bottom")  # pyright: ignore[reportArgumentType]


def test_explicit_key_positions_keep_the_alignment_of_queries():
    q, k, v, _ = inputs(3, 7)
    order = jnp.array([6, 0, 3, 1, 5, 2, 4])
    out = fa.flash_attention(q, k, v, is_causal=True, align="end", kv_positions=order)
    both = fa.flash_attention(
        q, k, v, is_causal=True, q_positions=jnp.arange(4, 7), kv_positions=order
    )
    chex.assert_trees_all_close(out, both, rtol=1e-6, atol=1e-6)
