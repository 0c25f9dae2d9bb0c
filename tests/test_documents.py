"""Documents and segments: their lengths, limits, positions and padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa

STARTS = np.array([0, 0, 2, 2, 2, 5, 5, 5, 5])
SAME_DOCUMENT = STARTS[:, None] == STARTS


@pytest.mark.parametrize(
    "documents",
    [
        lambda: fa.Documents.from_lengths([2, 3, 4], 9),
        lambda: fa.Documents.from_lengths([2, 0, 3], 9),  # what follows is one of its own
        lambda: fa.Documents.from_cu_seqlens(jnp.array([0, 2, 5, 9]), 9),
        lambda: fa.Documents.from_cu_seqlens([0, 2, 2, 5, 9, 9], 9, longest=4),
        lambda: fa.Documents.from_positions([0, 1, 0, 1, 2, 0, 1, 2, 3]),
        lambda: fa.Segments(STARTS),
    ],
)
def test_documents_from_lengths_limits_and_positions(documents):
    np.testing.assert_array_equal(documents().dense(9)[0], SAME_DOCUMENT)
    np.testing.assert_array_equal(
        (fa.Causal() & documents()).dense(9)[0], SAME_DOCUMENT & np.tri(9, dtype=bool)
    )


def test_longest_limits_the_distance_of_keys():
    starts, distance = np.zeros(9, np.int32), np.abs(np.subtract.outer(range(9), range(9)))
    for longest in (1, 3, 9):
        mask_array = fa.Documents(starts, longest=longest).dense(9)[0]
        np.testing.assert_array_equal(mask_array, distance < longest)


def test_documents_of_each_batch_entry_also_under_jit():
    def dense(make, data):
        return jax.jit(lambda data: make(data).dense(9, batch=(2,)))(data)[:, 0]

    expected = np.stack([SAME_DOCUMENT, np.ones((9, 9), bool)])
    lengths = jnp.array([[2, 3, 4], [9, 0, 0]])
    np.testing.assert_array_equal(
        dense(lambda n: fa.Documents.from_lengths(n, 9), lengths), expected
    )
    positions = jnp.array([[0, 1, 0, 1, 2, 0, 1, 2, 3], range(9)])
    np.testing.assert_array_equal(dense(fa.Documents.from_positions, positions), expected)


def test_padding_of_segments_is_masked():
    ids = np.array([4, 4, -1, 7, -1])
    for padding in (-1, 4, 7):
        expected = (ids[:, None] == ids) & (ids != padding)
        np.testing.assert_array_equal(fa.Segments(ids, padding=padding).dense(5)[0], expected)
    np.testing.assert_array_equal(fa.Segments(ids).dense(5)[0], ids[:, None] == ids)


def test_data_of_batch_entries():
    mask = fa.mask_fn(lambda q, k, c: k.index < c.limit)(entries={"limit": jnp.array([1, 4])})
    mask_array = mask.dense(3, 5, batch=(2,))
    np.testing.assert_array_equal(mask_array[:, 0, 0], [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
