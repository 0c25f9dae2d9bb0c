"""The bits that drop probabilities: like random ones along every axis, and as often as asked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import dropout
from tests.fuzz import dense
from tests.fuzz.shapes import Shape

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
def test_dropout_preserves_the_mean(rate: float) -> None:
    """Over all values of the bits, exactly."""
    bound = dropout.threshold(rate)
    factors = (np.arange(2**16) >= bound) * dropout.scale(bound)
    np.testing.assert_allclose(factors.mean(), 1.0, rtol=1e-12)
    assert abs(bound / 2**16 - rate) <= 2**-16


def test_keys_that_share_a_word_differ() -> None:
    keys = dropout.RowKeys(jnp.uint32(5), jnp.uint32(7))
    bits = np.asarray(dropout.bits(keys, jnp.arange(4096)))
    assert bits.max() < 2**16 and len(np.unique(bits)) > 3900


def test_each_word_of_the_seed_makes_other_bits() -> None:
    def bits(*seed: int) -> np.ndarray:
        words, head = jnp.asarray(seed, jnp.uint32), jnp.arange(2)[:, None]
        keys = dropout.row_keys(words, head, jnp.full((1, 1), 3))
        return np.asarray(dropout.bits(keys, jnp.arange(1000)[None]))

    for different in ((1, 3), (0, 2), (2, 1)):
        assert np.mean(bits(1, 2) == bits(*different)) < 0.01, different


def test_bits_below_the_threshold_are_dropped() -> None:
    keys = dropout.RowKeys(jnp.uint32(5), jnp.uint32(7))
    bits = np.asarray(dropout.bits(keys, jnp.arange(64)))
    bound = int(bits[17])
    factor = dropout.factor(bound / 2**16, keys, jnp.arange(64))
    expected = np.where(bits < bound, 0, 2**16 / (2**16 - bound))
    assert 0 < bound < 2**16 and expected[17] > 0
    np.testing.assert_array_equal(factor, expected.astype(np.float32))


def test_a_call_drops_what_the_numpy_copy_drops() -> None:
    """The bits are a promise: those of other versions, and the same in every implementation."""
    q, k, n, rate = 5, 7, 2, 0.3
    x = jnp.zeros((1, q, n, k)), jnp.zeros((1, k, n, k))
    v = jnp.broadcast_to(k * jnp.eye(k)[None, :, None], (1, k, n, k))
    key = jax.random.key(6)
    out = fa.flash_attention(*x, v, dropout_rate=rate, dropout_rng=key, implementation="reference")
    i, j = np.arange(q)[:, None], np.arange(k)[None]
    words = np.asarray(jax.random.key_data(key))
    expected = dense.dropout(rate, words, Shape((1,), q, k, n), i, j)
    np.testing.assert_allclose(out[0].swapaxes(0, 1), expected[0], rtol=1e-5)
    assert np.mean(expected == 0) > 0.1
