"""The bits that drop probabilities: like random ones along every axis, and as often as asked."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.kernels import dropout

SIZE = 512
NEIGHBOURS = [
    (0, 0, 1),
    (0, 0, 2),
    (0, 0, 8),
    (0, 0, 16),
    (0, 1, 0),
    (0, 8, 0),
    (0, 1, 1),
    (1, 0, 0),
]


def uniform(seed: tuple[int, int]) -> np.ndarray:
    """`[heads, queries, keys]`, of mean 0 and variance 1."""
    head, row, column = (jnp.arange(n, dtype=jnp.int32) for n in (4, SIZE, SIZE))
    words = jnp.asarray(seed, jnp.uint32)
    keys = dropout.row_keys(words, head[:, None, None], row[None, :, None])
    bits = dropout.bits(keys, column[None, None])
    return (np.asarray(bits, np.float64) + 0.5 - 2**15) / 2**16 * np.sqrt(12)


@pytest.mark.parametrize("seed", [(0, 0), (1, 2), (12345, 999999)], ids=str)
def test_bits_are_like_random_ones(seed: tuple[int, int]) -> None:
    z = uniform(seed)
    assert abs(z.mean()) * np.sqrt(z.size) < 4
    assert abs((z**2).mean() - 1) * np.sqrt(z.size / 0.8) < 4
    for axis in (1, 2):  # sums of rows and columns vary as those of random numbers do
        sums = z.sum(axis) / np.sqrt(SIZE)
        assert abs((sums**2).mean() - 1) * np.sqrt(sums.size / 2) < 4
    for step in NEIGHBOURS:
        here = z[tuple(slice(n - d) for n, d in zip(z.shape, step, strict=True))]
        there = z[tuple(slice(d, None) for d in step)]
        assert abs((here * there).mean()) * np.sqrt(here.size) < 4, step


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.1, 0.5, 0.999999])
def test_the_mean_stays(rate: float) -> None:
    """Over all values of the bits, exactly."""
    bound = dropout.threshold(rate)
    kept = (np.arange(2**16) >= bound) * dropout.scale(bound)
    np.testing.assert_allclose(kept.mean(), 1.0, rtol=1e-12)
    assert abs(bound / 2**16 - rate) <= 2**-16


def test_keys_that_share_a_word_differ() -> None:
    keys = dropout.RowKeys(jnp.uint32(5), jnp.uint32(7))
    bits = np.asarray(dropout.bits(keys, jnp.arange(4096)))
    assert bits.max() < 2**16 and len(np.unique(bits)) > 3900
