"""Attention sinks: a logit a head that has no value."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa

B, T, S, N, K, H = 2, 20, 13, 4, 2, 8
SINKS = np.array([-3.0, 0.0, 1.5, 6.0], np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


Q, KEY, V = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)
WEIGHT = normal(B, T, N, H, seed=3)


def dense(q, k, v, sinks, mask):
    """Compute dense attention with one more column for the sink, and drop its probability."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * H**-0.5
    s = jnp.where(mask[None, None], s, -jnp.inf)
    sink = jnp.broadcast_to(sinks[None, :, None, None], (B, N, T, 1))
    s = jnp.concatenate([s, sink], -1)
    p = jax.nn.softmax(s, -1)[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", p, v, precision="highest"), jax.nn.logsumexp(s, -1)


I, J = np.arange(T)[:, None], np.arange(S)[None]
MASKS = {
    "none": (None, np.full((T, S), True)),
    "causal": (fa.Causal(), J <= I),
    "rows without keys": (fa.Causal() & fa.Window(2), (J <= I) & (J >= I - 2)),
}


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_equal_those_of_one_more_column(mask, implementation):
    ours, visible = MASKS[mask]

    def loss(attend):
        def loss_fn(*args):
            out, lse = attend(*args)
            return jnp.sum(out * WEIGHT) + jnp.sum(jnp.sin(lse)), (out, lse)

        return jax.value_and_grad(loss_fn, (0, 1, 2, 3), has_aux=True)

    def flash(q, k, v, sinks):
        return fa.flash_attention(
            q, k, v, sinks=sinks, mask=ours, return_lse=True, implementation=implementation
        )

    args = [jnp.asarray(x) for x in (Q, KEY, V, SINKS)]
    actual = loss(flash)(*args)
    chex.assert_trees_all_close(
        actual, loss(lambda *x: dense(*x, visible))(*args), rtol=2e-5, atol=5e-6
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_sink_of_minus_infinity_is_no_sink(dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in (Q, KEY, V))
    none = jnp.full(N, -jnp.inf, dtype)
    mask = fa.Window(2) & fa.Causal()
    without = fa.flash_attention(q, k, v, mask=mask, return_lse=True)
    chex.assert_trees_all_equal(
        fa.flash_attention(q, k, v, mask=mask, sinks=none, return_lse=True), without
    )


def test_gradients_of_empty_rows_without_a_sink():
    """The gradient of a head's sink was NaN there."""

    def loss(q, sinks):
        out, lse = fa.flash_attention(q, KEY, V, mask=fa.Window(2), sinks=sinks, return_lse=True)
        return jnp.sum(out * WEIGHT) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse))

    dq, dsinks = jax.grad(loss, (0, 1))(jnp.asarray(Q), jnp.full(N, -jnp.inf))
    chex.assert_trees_all_equal(dq, jax.grad(loss)(jnp.asarray(Q), None))
    chex.assert_trees_all_equal(dsinks, jnp.zeros(N))


@pytest.mark.parametrize(
    "sinks", [np.zeros(3, np.float32), np.zeros((N, 1)), np.zeros(N, np.int32)]
)
def test_sinks_must_be_a_float_for_each_head(sinks):
    with pytest.raises(ValueError, match=r"sinks must be floats of shape \[N\], one for each of 4"):
        fa.flash_attention(Q, KEY, V, sinks=sinks)
    with pytest.raises(ValueError, match=r"sinks must be floats of shape \[N\]"):
        fa.explain(Q, KEY, V, sinks=sinks)


def test_sinks_are_explained_by_their_shape():
    assert fa.explain(Q, KEY, V, sinks=jax.ShapeDtypeStruct((N,), jnp.bfloat16)).spec.q_heads == N
