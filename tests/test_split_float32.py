"""float32 arrays as sums of float16 arrays, as XLA makes them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends.common.split_float32 import (
    MAX_SIZE_DIFFERENCE,
    Scales,
    row_powers,
    split_for_gradients,
    split_operands,
)

DIMS, TILE = (16, 16), (64, 64)


def _split(*arrays: np.ndarray) -> tuple[list[np.ndarray], Scales]:
    """Split q, k and v as compiled for the machine's device, where XLA might leave out conversions to float16."""
    run = jax.jit(lambda q, k, v: split_operands(q, k, v, DIMS, TILE))
    *terms, scales = jax.tree.map(np.asarray, run(*arrays))
    return terms, scales


def _tokens(length: int, dim: int, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((2, length, 3, dim))
    sizes = np.random.default_rng(seed + 1).integers(-80, 80, (2, length, 3, 1))
    return (x * np.exp2(sizes)).astype(np.float32)


def _sum(terms: np.ndarray, dim: int) -> np.ndarray:
    high, low = (terms[..., i : i + dim].astype(np.float64) for i in (0, DIMS[0]))
    assert np.isfinite(terms).all() and np.abs(low).max() > 0
    return high + low


def test_terms_have_23_bits() -> None:
    q, k = _tokens(70, 12), _tokens(90, 12, 2)
    (q_terms, k_terms, _), scales = _split(q, k, k)
    powers = scales.queries.swapaxes(1, 2)[:, :70], scales.keys.reshape(2, 3, 2, 3, 64)
    k_power = powers[1][..., 0, :].reshape(2, 3, 128).swapaxes(1, 2)[:, :90]
    for x, terms, power in ((q, q_terms, powers[0]), (k, k_terms, k_power)):
        error = np.abs(_sum(terms, 12) * power[..., None] - x)
        largest = np.abs(x).max(-1, keepdims=True)
        assert (error <= np.maximum(2.0**-23 * np.abs(x), 2.0**-39 * largest)).all()
        assert (terms[..., 12:16] == 0).all() and (terms[..., 28:] == 0).all()


def test_values_have_sizes_in_relation_to_the_largest_of_their_head() -> None:
    v = _tokens(64, 16)
    (_, _, terms), scales = _split(v, v, v)
    _, size, weight = scales.keys.reshape(2, 3, 3, 64).transpose(2, 0, 3, 1)
    assert size.max() == 0 and size.min() >= -MAX_SIZE_DIFFERENCE
    np.testing.assert_array_equal(weight, np.exp2(-size - 14))
    power = np.exp2(size) * scales.heads[:, None] * 2.0**14
    expected = np.where(size[..., None] > -MAX_SIZE_DIFFERENCE, v, 0)
    actual = np.where(size[..., None] > -MAX_SIZE_DIFFERENCE, _sum(terms, 16) * power[..., None], 0)
    assert (np.abs(actual - expected) <= 2.0**-22 * np.abs(v).max(-1, keepdims=True)).all()


def test_tokens_that_are_not_finite_are_zeros_with_a_scale_of_nan() -> None:
    q, k, v = (np.ones((1, 64, 1, 16), np.float32) for _ in range(3))
    q[0, 1, 0, 3], k[0, 2, 0, 4], v[0, 3, 0, 5], v[0, 4] = np.nan, -np.inf, np.inf, 0
    (q_terms, k_terms, v_terms), scales = _split(q, k, v)
    powers, size, weight = scales.keys[0, 0, 0].reshape(3, 64)
    assert np.isnan(scales.queries[0, 0]).nonzero()[0].tolist() == [1]
    assert np.isnan(powers).nonzero()[0].tolist() == [2, 3]
    assert np.isfinite(size).all() and np.isfinite(weight).all() and scales.heads == 2.0**-28
    for terms, token in ((q_terms, 1), (k_terms, 2), (v_terms, 3)):
        assert np.isfinite(terms).all() and (terms[0, token] == 0).all()
    assert size[0] == 0 and size[4] == -98


def test_the_smallest_and_the_largest_numbers_stay_finite() -> None:
    x = np.float32([0, 1e-45, 1e-38, 3e38])[None, :, None, None] * np.ones(16, np.float32)
    terms, scales = _split(x, x, x)
    for array in jax.tree.leaves((terms, scales)):
        assert np.isfinite(array).all() and array.dtype in (jnp.float16, jnp.float32)


def test_gradients_have_a_power_of_two_for_each_token() -> None:
    arrays = [
        _tokens(n, dim, seed) for n, dim, seed in ((70, 12, 0), (90, 12, 2), (90, 8, 4), (70, 8, 6))
    ]
    arrays[1][0, 3, 0, 5], arrays[2][1, 4, 0] = np.nan, 0
    run = jax.jit(lambda *x: split_for_gradients(*x, DIMS, (64, 128)))
    *terms, scales = jax.tree.map(np.asarray, run(*arrays))
    powers, lengths = (scales.q, scales.k, scales.v, scales.dout), (128, 128, 128, 128)
    for x, parts, power, length in zip(arrays, terms, powers, lengths, strict=True):
        assert power.shape == (2, 3, length) and (power[..., x.shape[1] :] == 0).all()
        power = power.swapaxes(1, 2)[:, : x.shape[1], :, None]
        total = _sum(parts, x.shape[3]) * power
        expected = np.where(np.isfinite(x).all(-1, keepdims=True), x, 0)
        largest = np.abs(expected).max(-1, keepdims=True)
        bound = np.maximum(2.0**-23 * np.abs(expected), 2.0**-39 * largest)
        assert (np.abs(total - expected) <= bound).all() and np.isfinite(power).all()


def test_powers_of_rows_and_their_inverses() -> None:
    highest = np.float32([0, 1e-45, 2.0**-112, 2.0**-111, 0.75, 1, 3, 2.0**127, 3.4e38])
    power, inverse = (np.asarray(x) for x in row_powers(jnp.asarray(highest)))
    np.testing.assert_array_equal(power * inverse, 1)
    scaled = (highest * inverse)[2:]
    assert (scaled >= 2.0**14).all() and (scaled < 2.0**15).all()
    assert (power[:2] == power[2]).all() and power[2] == 2.0**-126
