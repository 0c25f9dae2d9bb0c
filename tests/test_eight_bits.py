"""Operands of 8 bits, as far as no kernel is needed: queries, and the orders of columns and rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.backends.sm90.decode import eight_bits
from tests.support import inline, programs


def ordered(q: np.ndarray) -> eight_bits.Queries:
    return eight_bits.Queries(*map(np.asarray, programs.evaluate(eight_bits.order_queries, q)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_are_operands_times_powers_of_two(dtype: str) -> None:
    """All that is not far below the largest of its row is exact, whatever its size."""
    rng = np.random.default_rng(0)
    sizes = np.exp2([-100.0, -20, 0, 9, 100] if dtype == "bfloat16" else [-14.0, -9, 0, 3, 9])
    q = (rng.standard_normal((5, 2, 64)) * sizes[:, None, None]).astype(dtype)
    q[2, 1, 3] = q[2, 1].astype("f").max() * 2**-20
    operand, scale = ordered(q)
    assert operand.dtype == np.float16 and scale.dtype == np.float32
    largest = np.abs(operand.astype("f")).max(-1)
    assert (largest >= 2**14).all() and (largest < 2**15).all()
    whole = operand.astype(np.float64) * scale[..., None]
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    ordered_q = inline.LOADED["load_keys"](np.arange(64.0)[None]).astype(int)[0]
    np.testing.assert_array_equal(whole, q[..., ordered_q].astype(np.float64))


def test_queries_of_zeros_and_of_no_numbers() -> None:
    q = np.zeros((4, 16), jnp.bfloat16)
    q[1, 2], q[2, 3], q[3, 0] = np.nan, np.inf, 2.0**-133
    operand, scale = ordered(q)
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert not operand[0].any()
    np.testing.assert_array_equal(np.isfinite(operand.astype("f")).sum(1), [16, 15, 15, 16])


def test_orders_are_permutations_within_sixteen() -> None:
    """That of the output undoes that of V."""
    index = np.arange(128)
    columns = inline.LOADED["load_keys"](np.tile(index, (64, 1)))[0]
    rows = inline.LOADED["load_values"](np.tile(index, (64, 1)))
    for order in (columns, rows[:, 0]):
        np.testing.assert_array_equal(order // 16, index // 16)
        np.testing.assert_array_equal(np.sort(order), index)
    np.testing.assert_array_equal(inline.INLINE["order_output"](rows)[:, 0], index)
    assert rows[[0, 8, 1], 0].tolist() == [0, 1, 2] and columns[[0, 1, 2, 8]].tolist() == [
        0,
        1,
        4,
        2,
    ]
