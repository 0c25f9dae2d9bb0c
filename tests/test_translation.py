"""Code that reads differences of positions alone is told apart, and is classified for blocks at some distances."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.ir.arrays import CallShape
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.ir.translation import (
    classes_at_distances,
    is_translation_invariant,
    reads_positions,
)
from pallas_fa2.masks import as_mask
from pallas_fa2.scores import as_scores
from pallas_fa2.trace_mods import trace_mod

DIMS = CallShape((2,), 8, 8, 2, 1)
IDS = np.zeros((2, 8), np.int32)


def trace_mask(mask):
    mask = as_mask(mask)
    return trace_mod(mask, mask.normalized_data(DIMS), DIMS, 0)


MASKS: dict[str, tuple] = {
    # mask, whether it is invariant, whether it reads positions
    "causal": (fa.Causal(), True, True),
    "window": (fa.Window(3, 1), True, True),
    "window of data": (fa.Window(jnp.int32(3)), True, True),
    "sliding": (~fa.SlidingWindow(3) | fa.Causal(), True, True),
    "segments": (fa.Segments(IDS), True, False),
    "causal segments": (fa.Causal() & fa.Segments(IDS), True, True),
    "distance from the nearer": (
        lambda q, k: jnp.maximum(q.index, k.index) - jnp.minimum(q.index, k.index) < 3, True, True
    ),
    "chosen": (lambda q, k: jnp.where(q.index > k.index, q.index, k.index) > k.index, True, True),
    "prefix": (fa.Prefix(3), False, True),
    "chunks": (fa.Chunked(4), False, True),
    "documents": (fa.Documents(IDS), False, True),
    "sum": (lambda q, k: q.index + k.index < 9, False, True),
    "parity": (lambda q, k: (q.index - 2 * k.index) > 0, False, True),
    "chosen by a position": (lambda q, k: jnp.where(q.index > 3, True, q.index > k.index), False, True),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_read_differences_of_positions_alone(name: str) -> None:
    mask, invariant, reads = MASKS[name]
    code = trace_mask(mask)
    assert (is_translation_invariant(code), reads_positions(code)) == (invariant, reads)


@pytest.mark.parametrize(
    "score, invariant",
    [
        (fa.alibi(2), True),
        (fa.soft_cap(3.0), True),
        (lambda s, q, k: s + (q.index - k.index).astype(s.dtype), True),
        # Floating-point positions are rounded.
        (lambda s, q, k: s + (q.index.astype(s.dtype) - k.index.astype(s.dtype)), False),
        (lambda s, q, k: s * k.index.astype(s.dtype), False),
    ],
)
def test_scores_that_read_differences_of_positions_alone(score: Callable, invariant: bool) -> None:
    (score,) = as_scores(score)
    code = trace_mod(score, score.normalized_data(DIMS), DIMS, 0, np.dtype(np.float32))
    assert is_translation_invariant(code) == invariant


def test_classes_of_blocks_are_bounds_over_their_distances() -> None:
    lowest = np.array([[-8, 0], [8, 16]])
    table = classes_at_distances(trace_mask(fa.Causal()), lowest, lowest, 8, 8)
    np.testing.assert_array_equal(table, [[EMPTY, PARTIAL], [FULL, FULL]])
    table = classes_at_distances(trace_mask(fa.SlidingWindow(9)), lowest, lowest, 8, 8)
    np.testing.assert_array_equal(table, [[EMPTY, PARTIAL], [PARTIAL, EMPTY]])
    # 8 tokens behind the window is EMPTY on all devices from a distance of 9 + 7.
    table = classes_at_distances(trace_mask(fa.SlidingWindow(9)), lowest, lowest + 64, 8, 8)
    np.testing.assert_array_equal(table, [[PARTIAL, PARTIAL], [PARTIAL, EMPTY]])


@pytest.mark.parametrize("distance", range(-11, 12))
def test_a_class_is_that_of_the_dense_mask(distance: int) -> None:
    mask = fa.Window(5, 2)
    q, k = np.arange(3)[:, None] + distance, np.arange(4)[None]
    visible = (q - k <= 5) & (k - q <= 2)
    expected = FULL if visible.all() else PARTIAL if visible.any() else EMPTY
    at = np.array([distance])
    assert classes_at_distances(trace_mask(mask), at, at, 3, 4) == [expected]
