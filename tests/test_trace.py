"""Traced functions: equal for equal code, and without captured arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.ir.arrays import NUM_LEADING_AXES
from pallas_fa2.ir.trace import trace

INT = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.int32)
FLOAT = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.float32)


FUNCTIONS = {
    "product": lambda: lambda s: s * 0.1,
    "close constant": lambda: lambda s: s * 0.1000001,
    "adjacent constant": lambda: lambda s: s * float(np.nextafter(np.float32(0.1), np.float32(1))),
    "integer constant": lambda: lambda s: s * 1.0,
    "captured 2": lambda n=2.0: lambda s: s * n,
    "captured 3": lambda n=3.0: lambda s: s * n,
    "NumPy scalar": lambda: lambda s: s * np.float32(4),
    "order": lambda: lambda s: 0.1 - s,
    "other order": lambda: lambda s: s - 0.1,
    "softplus": lambda: lambda s: jax.nn.softplus(s),
    "gelu": lambda: lambda s: jax.nn.gelu(s),
    "relu": lambda: lambda s: jax.nn.relu(s),
    "inner jit": lambda: lambda s: jax.jit(lambda t: t * 0.1)(s),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_new_function_with_the_same_code_is_equal(name):
    first, second = (trace("f", FUNCTIONS[name](), FLOAT) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_functions_with_different_code_or_constants_differ():
    traced = {name: trace("f", make(), FLOAT) for name, make in FUNCTIONS.items()}
    assert len(set(traced.values())) == len(FUNCTIONS)


def test_the_same_code_on_another_dtype_or_tree_differs():
    def double(x):
        return jax.tree.leaves(x)[0] * 2

    assert len({trace("f", double, x) for x in (FLOAT, INT, {"a": INT}, {"b": INT})}) == 4


def _with_derivative(slope):
    @jax.custom_jvp
    def identity(x):
        return x

    identity.defjvp(lambda primals, tangents: (primals[0], slope * tangents[0]))
    return lambda s: identity(s)


def test_equal_values_with_different_derivatives_differ():
    one, two = (trace("f", _with_derivative(slope), FLOAT) for slope in (1.0, 2.0))
    assert one != two


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
@pytest.mark.parametrize("array", [jnp.arange(3), np.arange(3), jnp.int32(1)], ids=repr)
def test_a_captured_array_is_an_error(array, wrap):
    inner = wrap(lambda i: jnp.max(jnp.asarray(array)) + i)
    with pytest.raises(ValueError, match=r"f captures an array.*tokens=, heads=, params= or pairs"):
        trace("f", lambda i: inner(i), INT)


def under_jit(f):
    return jax.jit(f)(1.0)


def under_grad(f):
    return jax.grad(f)(1.0)


def under_vmap(f):
    return jax.vmap(f)(jnp.ones(2))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
@pytest.mark.parametrize("transform", [under_jit, under_grad, under_vmap])
def test_a_captured_tracer_is_an_error(transform, wrap):
    def call(t):
        inner = wrap(lambda s: s * t)
        return trace("f", lambda s: inner(s), FLOAT)(jnp.float32(1))

    with pytest.raises(ValueError, match=r"f captures an array of shape \(\)"):
        transform(call)
