"""The zigzag order of tokens over devices."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.distributed.zigzag import to_sequence_order, to_zigzag_order


@pytest.mark.parametrize("length, n", [(12, 3), (8, 1), (64, 4)])
def test_zigzag_gives_each_device_a_chunk_of_both_ends(length: int, n: int) -> None:
    order = fa.zigzag(length, n)
    chunks = np.arange(length).reshape(2 * n, -1)
    expected = [np.concatenate([chunks[i], chunks[2 * n - 1 - i]]) for i in range(n)]
    np.testing.assert_array_equal(order.permutation, np.concatenate(expected))
    np.testing.assert_array_equal(order.permutation[order.inverse], np.arange(length))
    x = jnp.asarray(order.permutation)[None]
    np.testing.assert_array_equal(to_sequence_order(x, 1, n)[0], np.arange(length))
    np.testing.assert_array_equal(to_zigzag_order(jnp.arange(length), 0, n), order.permutation)


@pytest.mark.parametrize(
    "length, n, message",
    [
        (10, 3, r"length must be a multiple of 2 \* shards = 6, but it is 10"),
        (8, 0, "shards must be at least 1, but it is 0"),
        (8.0, 4, "length must be an integer, but it is 8.0"),
        (8, True, "shards must be an integer, but it is True"),
    ],
)
def test_zigzag_needs_whole_chunks(length: Any, n: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fa.zigzag(length, n)
