"""Layers of linen, their parameters and inputs, which tests of several modules use."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

KEY = jax.random.key(0)
LENGTH = 13
X = np.random.default_rng(1).standard_normal((2, LENGTH, 32), np.float32)
CAUSAL = nn.make_causal_mask(X[..., 0])
STOCK = nn.MultiHeadDotProductAttention

# Nearly all of the time goes into compiling.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def close(actual, expected):
    """Float32 rounding, measured against the largest entry of each array (if it exceeds 1)."""
    chex.assert_trees_all_equal_structs(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = float(np.abs(np.asarray(b)).max())
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6 * max(1.0, largest))


def init(layer, *args, **options):
    return jit(lambda *args: layer.init(KEY, *args, **options))(*args)


def apply(layer, params, *args, **options):
    return jit(lambda params, *args: layer.apply(params, *args, **options))(params, *args)


def perturbed(params):
    """Biases start at 0; a test should see them."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)


def value_and_gradients(fn, params, x):
    def loss(params, x):
        out = fn(params, x)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    return out, gradients


def call(layer, **options):
    return lambda params, x: layer.apply(params, x, **options)


@functools.cache
def stock_case():
    """Parameters of Flax's own layer, and its causal values and gradients on X."""
    stock = STOCK(num_heads=4)
    params = perturbed(init(stock, X))
    return params, value_and_gradients(call(stock, mask=CAUSAL), params, X)
