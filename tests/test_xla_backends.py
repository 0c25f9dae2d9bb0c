"""`reference` and `blockwise` on a CPU: layouts of 16-bit inputs, and errors beside those of jax.nn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.contract import dense

LAYOUTS = {
    "swapped": lambda x: jnp.swapaxes(x, 1, 2),
    "sliced": lambda x: jnp.swapaxes(x, 1, 2)[:, 8:-8],
    "transposed": lambda x: jnp.transpose(x, (1, 2, 3, 0)),
}
STORED = {"swapped": (2, 4, 48, 16), "sliced": (2, 4, 64, 16), "transposed": (16, 2, 48, 4)}


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_runs_on_a_cpu(layout, implementation, dtype):
    """XLA's CPU backend has no 16-bit products for some of them."""
    view = LAYOUTS[layout]
    arrays = jax.random.normal(jax.random.key(0), (3, *STORED[layout]), dtype)

    def attend(q, k, v):
        return fa.flash_attention(*map(view, (q, k, v)), implementation=implementation)

    def both(q, k, v):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(out)

    actual = jax.jit(both)(*arrays)
    q, k, v = (view(x).astype(jnp.float32) for x in arrays)
    expected = jax.nn.dot_product_attention(q, k, v)
    np.testing.assert_allclose(actual[0].astype(jnp.float32), expected, rtol=0.02, atol=0.02)
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in actual[1])


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("growth", [1, 100, 300])
@pytest.mark.parametrize("equal_keys", [False, True])
def test_float32_is_as_exact_as_jax_nn_where_scores_are_large(growth, equal_keys, implementation):
    rng = np.random.default_rng(0)
    # Of one entry alone the ratio is 1.0, 1.9 or, on jax 0.12, 2.05: it is the mean that counts.
    q, k, v, dout = (rng.standard_normal((8, 64, 2, 16)).astype(np.float32) for _ in range(4))
    q *= growth
    if equal_keys:
        k[:] = np.sign(q[:, -1:])

    def errors(attend):
        def both(q, k, v, dout):
            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(dout)

        results = jax.jit(both)(q, k, v, dout)
        return [distance(a, b) for a, b in zip(results, truth, strict=True)]

    def distance(a, b):
        off = np.abs(np.asarray(a, np.float64) - b).max((1, 2, 3))
        return float(off.mean() / max(np.abs(b).max(), 1.0))  # dq of equal keys is 0

    mask = np.tri(64, dtype=bool)[None, None]
    truth = dense.truth(
        q, k, v, dout, np.zeros((8, 2, 64), np.float32), mask=mask, score=None, scale=None
    )
    truth = [truth.out, truth.dq, truth.dk, truth.dv]
    ours = errors(
        functools.partial(fa.flash_attention, is_causal=True, implementation=implementation)
    )
    theirs = errors(functools.partial(jax.nn.dot_product_attention, is_causal=True))
    for name, a, b in zip(("out", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert a <= 2 * b + 3e-7, (name, a, b)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_16_bit_gradients_of_concentrated_rows_are_as_exact_as_jax_nn(implementation):
    """A row sees itself most: dS is a small difference of large numbers."""
    x = jax.random.normal(jax.random.key(0), (16, 64, 16, 48), jnp.bfloat16)
    bias = jax.random.normal(jax.random.key(1), (16, 16, 64, 64), jnp.bfloat16)

    def gradient(attend, x, bias):
        return jax.jit(lambda x, b: jax.vjp(lambda b: attend(x, x, x, b, scale=1.0), b)[1](x)[0])(
            x, bias
        )

    wide = gradient(jax.nn.dot_product_attention, x.astype(jnp.float32), bias.astype(jnp.float32))
    attend = functools.partial(fa.dot_product_attention, implementation=implementation)
    actual = gradient(attend, x, bias).astype(jnp.float32)
    rounding = jnp.abs(wide - wide.astype(jnp.bfloat16).astype(jnp.float32)).max()
    assert jnp.abs(actual - wide).max() <= 2 * rounding
