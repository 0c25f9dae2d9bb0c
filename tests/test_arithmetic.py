"""What NumPy computes for interpreted kernels is what XLA computes: to the bit, but for functions that neither
rounds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.support import arithmetic, programs

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "uint32", "int8")
NUMBERS = (*FLOATS, *INTEGERS)
BITS = (*INTEGERS, "bool")

EXACT: dict[
    str, tuple[Callable, int, tuple[str, ...]]
] = {  # of how many arrays, and of which dtypes
    "abs": (lax.abs, 1, (*FLOATS, "int32")),
    "add": (lax.add, 2, NUMBERS),
    "add_any": (lambda x: jax.grad(lambda y: (y * 2 + y * 3).sum())(x), 1, ("float32",)),
    "and": (lax.bitwise_and, 2, BITS),
    "argmax": (lambda x: lax.argmax(x, 1, np.int32), 1, ("float32", "int32")),
    "argmin": (lambda x: lax.argmin(x, 0, np.int32), 1, ("float32", "int32")),
    "bitcast_convert_type": (
        lambda x: lax.bitcast_convert_type(x, np.int32),
        1,
        ("float32", "uint32"),
    ),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (2, *x.shape, 3), (1, 2)), 1, NUMBERS),
    "broadcast_in_dim of a number": (lambda x: jnp.broadcast_to(x[1, 1], (3, 4)), 1, NUMBERS),
    "ceil": (lax.ceil, 1, FLOATS),
    "clamp": (lambda x, y: lax.clamp(y - 2, x, y), 2, NUMBERS),
    "concatenate": (lambda x, y: lax.concatenate([x, y, x], 1), 2, NUMBERS),
    "convert_element_type to float": (lambda x: x.astype("float32"), 1, (*NUMBERS, "bool")),
    "convert_element_type to 16 bits": (lambda x: x.astype("bfloat16"), 1, (*FLOATS, "int32")),
    "convert_element_type to half": (lambda x: x.astype("float16"), 1, (*FLOATS, "int32")),
    "convert_element_type to an integer": (lambda x: x.astype("int32"), 1, (*NUMBERS, "bool")),
    "convert_element_type of what is large": (
        lambda x: lax.convert_element_type(x * x * x * 1e9 / (x - x[0, 0]), "int32"),
        1,
        ("float32",),
    ),
    "convert_element_type to bool": (lambda x: x.astype(bool), 1, NUMBERS),
    "cumsum": (lambda x: lax.cumsum(x, 1), 1, INTEGERS),
    "cumsum from the end": (lambda x: lax.cumsum(x, 0, reverse=True), 1, INTEGERS),
    "div": (lax.div, 2, (*FLOATS, "int32", "uint32")),
    "div of numbers": (lambda x, y: lax.div(x[2, 0], y[0, 2]), 2, ("int32", "uint32")),
    "dot_general": (lambda x, y: jnp.einsum("ab,cb->ac", x, y), 2, ("int32",)),
    "dot_general of a batch": (
        lambda x, y: jnp.einsum("abc,dbc->bad", x.reshape(3, 2, -1), y.reshape(3, 2, -1)),
        2,
        ("int32",),
    ),
    "dynamic_slice": (
        lambda x: lax.dynamic_slice(x, (np.int32(2), np.int32(9)), (2, 3)),
        1,
        NUMBERS,
    ),
    "dynamic_update_slice": (
        lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (np.int32(9), np.int32(1))),
        2,
        NUMBERS,
    ),
    "eq": (lax.eq, 2, (*NUMBERS, "bool")),
    "floor": (lax.floor, 1, FLOATS),
    "ge": (lax.ge, 2, NUMBERS),
    "gt": (lax.gt, 2, NUMBERS),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), 1, ("float32", "int32")),
    "integer_pow, negative": (lambda x: lax.integer_pow(x, -2), 1, ("float32",)),
    "iota": (lambda x: x + lax.broadcasted_iota(x.dtype, x.shape, 1), 1, NUMBERS),
    "is_finite": (lambda x: lax.is_finite(x / (x - x[0, 0])), 1, FLOATS),
    "le": (lax.le, 2, NUMBERS),
    "lt": (lax.lt, 2, NUMBERS),
    "max": (lax.max, 2, (*NUMBERS, "bool")),
    "max of nothing": (lambda x, y: lax.max(x, y * np.nan), 2, ("float32",)),
    "min": (lax.min, 2, (*NUMBERS, "bool")),
    "mul": (lax.mul, 2, NUMBERS),
    "ne": (lax.ne, 2, (*NUMBERS, "bool")),
    "neg": (lax.neg, 1, (*FLOATS, "int32")),
    "not": (lax.bitwise_not, 1, BITS),
    "or": (lax.bitwise_or, 2, BITS),
    "pad": (lambda x: lax.pad(x, x[0, 0], ((1, 2, 0), (0, 3, 0))), 1, NUMBERS),
    "reduce_and": (lambda x: lax.reduce_and_p.bind(x, axes=(1,)), 1, ("bool",)),
    "reduce_max": (lambda x: x.max(1), 1, NUMBERS),
    "reduce_min": (lambda x: x.min(0), 1, NUMBERS),
    "reduce_or": (lambda x: x.any(0), 1, ("bool",)),
    "reduce_prod": (lambda x: lax.reduce_prod_p.bind(x, axes=(0,)), 1, ("int32",)),
    "reduce_sum": (lambda x: x.sum(1, dtype=x.dtype), 1, ("int32", "uint32")),
    "rem": (lax.rem, 2, ("int32", "uint32", "float32")),
    "rem of numbers": (lambda x, y: lax.rem(x[2, 0], y[0, 2]), 2, ("int32", "uint32")),
    "reshape": (lambda x: x.reshape(2, -1), 1, NUMBERS),
    "rev": (lambda x: lax.rev(x, (1,)), 1, NUMBERS),
    "round": (lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), 1, FLOATS),
    "round away": (lambda x: lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO), 1, FLOATS),
    "select_n": (lambda x, y: lax.select(x > y, x, y), 2, NUMBERS),
    "select_n by a number": (lambda x, y: lax.select_n(x[0, 0] > y[0, 0], x, y), 2, NUMBERS),
    "select_n of three": (lambda x, y: lax.select_n(lax.abs(x) % 3, x, y, -x), 2, ("int32",)),
    "shift_left": (lambda x, y: lax.shift_left(x, y & 63), 2, ("int32", "uint32")),
    "shift_right_arithmetic": (
        lambda x, y: lax.shift_right_arithmetic(x, y & 63),
        2,
        ("int32",),
    ),
    "shift_right_logical": (
        lambda x, y: lax.shift_right_logical(x, y & 31),
        2,
        ("int32", "uint32"),
    ),
    "sign": (lax.sign, 1, (*FLOATS, "int32")),
    "slice": (lambda x: x[1:, 1:5:2], 1, NUMBERS),
    "sqrt": (lambda x: lax.sqrt(lax.abs(x)), 1, FLOATS),
    "square": (lax.square, 1, ("float32", "int32")),
    "squeeze": (lambda x: lax.squeeze(x[:, :1], (1,)), 1, NUMBERS),
    "sub": (lax.sub, 2, NUMBERS),
    "transpose": (lambda x: x.T, 1, NUMBERS),
    "xor": (lax.bitwise_xor, 2, BITS),
}

# With how many units in the last place of float32 between them; sums and products are in another order.
ROUNDED: dict[str, tuple[Callable, int, float]] = {
    "cos": (lax.cos, 1, 2),
    "dot_general": (lambda x, y: jnp.einsum("ab,cb->ac", lax.abs(x), lax.abs(y)), 2, 4),
    "exp": (lax.exp, 1, 2),
    # (XLA rounds ln 2 to 16 bits as well.)
    "exp2": (lambda x: lax.exp2(x.astype("float32")), 1, 2),
    "expm1": (lax.expm1, 1, 4),
    "log": (lambda x: lax.log(lax.abs(x) + 1), 1, 4),
    "log1p": (lambda x: lax.log1p(lax.abs(x)), 1, 4),
    "log2": (lambda x: lax.log2(lax.abs(x) + 1), 1, 8),
    "logistic": (lax.logistic, 1, 8),
    "pow": (lambda x, y: lax.pow(lax.abs(x), y), 2, 16),
    "reduce_sum": (lambda x: lax.reduce_sum_p.bind(lax.abs(x), axes=(1,), out_sharding=None), 1, 4),
    "rsqrt": (lambda x: lax.rsqrt(lax.abs(x)), 1, 2),
    "sin": (lax.sin, 1, 2),
    "tanh": (lax.tanh, 1, 16),
}


def arrays(count: int, dtype: str) -> list[np.ndarray]:
    """With zeros, halves, negative and large numbers."""
    rng = np.random.default_rng(0)
    kinds = {"bool": (0, 2), "int8": (-128, 128), "uint32": (0, 40), "int32": (-40, 40)}
    if dtype not in kinds:
        x = rng.standard_normal((count, 3, 8)) * 4
        x[:, 1] = rng.integers(-6, 6, (count, 8)) / 2
        return list(x.astype(jnp.dtype(dtype)))
    x = rng.integers(*kinds[dtype], (count, 3, 8)).astype(dtype)
    if dtype in ("int32", "uint32"):
        x[:, 2, ::3] = np.iinfo(dtype).max // np.arange(1, 4)
    return list(x)


def both(fn: Callable, args: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(all="ignore"):
        got = programs.evaluate(fn, *args)
    expected = np.asarray(jax.jit(fn)(*args))
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return got, expected


@pytest.mark.parametrize("name", EXACT)
def test_as_xla_to_the_bit(name: str) -> None:
    fn, count, dtypes = EXACT[name]
    for dtype in dtypes:
        np.testing.assert_array_equal(*both(fn, arrays(count, dtype)), err_msg=dtype)


@pytest.mark.parametrize("name", ROUNDED)
def test_as_xla_but_for_the_last_digits(name: str) -> None:
    fn, count, units = ROUNDED[name]
    for dtype in FLOATS:
        got, expected = (np.float64(x) for x in both(fn, arrays(count, dtype)))
        ulp = 2.0**-23 * units if dtype == "float32" else float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(got, expected, rtol=ulp, atol=ulp, err_msg=dtype)


def test_every_function_is_compared() -> None:
    traced: set[str] = set()

    def look(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            traced.add(eqn.primitive.name)
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns"):
                    look(inner)

    for cases in (EXACT, ROUNDED):
        for fn, count, of in cases.values():
            dtype = of[0] if isinstance(of, tuple) else "float32"
            look(jax.make_jaxpr(fn)(*arrays(count, dtype)))
    assert not arithmetic.FUNCTIONS.keys() - traced


def test_control_flow() -> None:
    def run(x: Any) -> Any:
        def halve(carry: Any) -> Any:
            return carry[0] // 2, carry[1] + 1

        _, steps = lax.while_loop(lambda carry: carry[0] > 1, halve, (x[0], jnp.int32(0)))
        total, sums = lax.scan(lambda total, y: (total + y, total * y), x[0], x)
        _, sums_of_rest = lax.scan(lambda total, y: (total + y, total), x[1], x, reverse=True)
        chosen = lax.switch(x[1], [lambda: x[2], lambda: x[3], lambda: -x[4]])
        return steps, total, sums, sums_of_rest, chosen

    for choice in (-3, 0, 1, 2, 7):
        x = np.array([1000, choice, 5, 6, 7], np.int32)
        for got, expected in zip(programs.evaluate(run, x), jax.jit(run)(x), strict=True):
            np.testing.assert_array_equal(got, expected)


def test_what_has_no_function_is_jaxs_own() -> None:
    x = np.array([3.0, 1.0, 2.0], np.float32)
    np.testing.assert_array_equal(programs.evaluate(lax.sort, x), [1, 2, 3])


def test_what_has_another_dtype_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arithmetic.FUNCTIONS, "sin", lambda accuracy: lambda x: np.float64(x))
    with pytest.raises(TypeError, match="float64"):
        programs.evaluate(lax.sin, np.float32([1]))
