"""dot_product_attention, with the function of jax.nn as the judge."""

import inspect
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa

B, T, S, N, K, H = 2, 13, 10, 4, 2, 16


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QKV = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)
ONE = tuple(x[0] for x in QKV)


def close(actual, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    chex.assert_trees_all_close(actual, want, rtol=1e-5, atol=3e-6)


def judge(*args, **options):
    """`jax.nn.dot_product_attention`, which is not written for strict dtypes and ranks."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(*args, **options)


def compare(qkv=QKV, bias=None, mask=None, **options):
    """Outputs and gradients, of the bias too, beside those of jax.nn."""

    def run(attention):
        def loss(qkv, bias):
            out = attention(*qkv, bias, mask, **options)
            return jnp.sum(jnp.sin(2.0 * out)), out

        argnums = 0 if bias is None else (0, 1)
        gradients, out = jax.jit(jax.grad(loss, argnums, has_aux=True))(qkv, bias)
        return out, gradients

    close(run(fa.dot_product_attention), run(judge))


def random_mask(*shape, seed=4):
    """A random mask in which every query sees the first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 0] = True
    return mask


LENGTHS = {"query_seq_lengths": np.array([13, 5], np.int32),
           "key_value_seq_lengths": np.array([4, 10], np.int32)}  # fmt: skip
WINDOW = (7, 1)  # every query sees a key, though T > S

OPTIONS = {
    "window": {"local_window_size": WINDOW},
    "symmetric window, scale": {"local_window_size": 5, "scale": 0.3},
    "query lengths": {"query_seq_lengths": LENGTHS["query_seq_lengths"]},
    "lengths, causal": {**LENGTHS, "is_causal": True},
    "all": {
        "bias": normal(B, N, T, S, seed=5),
        "mask": random_mask(B, N, T, S),
        "scale": 0.2,
        "is_causal": True,
        "local_window_size": (20, 3),
        **LENGTHS,
    },
    "xla, causal": {"implementation": "xla", "is_causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_in_jax_nn(name):
    compare(**OPTIONS[name])


@pytest.mark.parametrize("shape", [(B, 1, 1, S), (S,)], ids=str)
def test_a_bias_broadcasts_and_gets_a_gradient_of_its_shape(shape):
    compare(bias=normal(*shape, seed=5))


@pytest.mark.parametrize("shape", [(1, N, 1, S), (T, S), (S,)], ids=str)
def test_a_mask_broadcasts(shape):
    mask = random_mask(*shape)
    close(fa.dot_product_attention(*QKV, mask=mask), judge(*QKV, mask=mask))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": normal(N, T, S, seed=5), "mask": random_mask(N, T, S), "is_causal": True},
        {"bias": normal(1, N, T, S, seed=5), "mask": random_mask(1, 1, T, S)},
        {"key_value_seq_lengths": np.array([4], np.int32)},
    ],
    ids=["of three axes", "of four axes", "lengths"],
)
def test_inputs_without_a_batch_axis(options):
    compare(ONE, **options)


def test_causal_is_aligned_to_the_top_left_with_fewer_queries_too():
    compare((QKV[0][:, :6], *QKV[1:]), is_causal=True)


@pytest.mark.parametrize(
    "qkv, dtype", [(QKV, jnp.float32), (ONE, jnp.bfloat16)], ids=["batch, f32", "no batch, bf16"]
)
def test_the_residual_is_the_logsumexp_in_the_layout_and_dtype_of_jax_nn(qkv, dtype):
    qkv = [jnp.asarray(x, dtype) for x in qkv]
    options = {"is_causal": True, "return_residual": True}
    want = judge(*qkv, **options)
    actual = fa.dot_product_attention(*qkv, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    tolerance = {"rtol": 1e-5, "atol": 3e-6} if dtype == jnp.float32 else {"atol": 0.05}
    chex.assert_trees_all_close(actual, want, **tolerance)


def test_lengths_may_be_python_lists_as_in_jax_nn():
    options = {name: lengths.tolist() for name, lengths in LENGTHS.items()}
    close(fa.dot_product_attention(*QKV, **options), judge(*QKV, **options))


def test_the_signature_begins_as_that_of_jax_nn():
    reference = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(fa.dot_product_attention).parameters
    for name, parameter in reference.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default
    assert list(ours)[: len(reference)] == list(reference)


def test_a_query_without_keys_gets_zero_and_in_jax_nn_the_mean():
    mask = random_mask(T, S)
    mask[3] = False
    mean = np.repeat(QKV[2].mean(1), N // K, 1)
    np.testing.assert_allclose(judge(*QKV, mask=mask)[:, 3], mean, rtol=1e-5, atol=3e-6)

    def attend(qkv):
        return fa.dot_product_attention(*qkv, mask=mask, return_residual=True)

    out, residual = attend(QKV)
    assert np.all(out[:, 3] == 0) and np.all(residual[:, 3] == -np.inf)
    (dq, _, _) = jax.grad(lambda qkv: jnp.sum(attend(qkv)[0]))(QKV)
    assert np.all(dq[:, 3] == 0) and np.all(np.isfinite(dq))


def test_queries_beyond_their_length_get_zero():
    out, residual = fa.dot_product_attention(*QKV, **LENGTHS, return_residual=True)
    assert np.all(out[1, 5:] == 0) and np.all(residual[1, 5:] == -np.inf)


def test_the_residual_is_differentiable_unlike_that_of_jax_nn():
    def ours(query):
        return jnp.sum(fa.dot_product_attention(query, *QKV[1:], return_residual=True)[1])

    def dense(query):
        key = jnp.repeat(QKV[1], N // K, 2)
        s = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") / math.sqrt(H)
        return jnp.sum(jax.nn.logsumexp(s, -1))

    def reference(query):
        return jnp.sum(judge(query, *QKV[1:], return_residual=True)[1])

    close(jax.grad(ours)(QKV[0]), jax.grad(dense)(QKV[0]))
    assert np.all(jax.grad(reference)(QKV[0]) == 0)


def test_our_options_join_those_of_jax_nn():
    """A mask object, a score behind the bias, and another head dim of the values."""
    value = normal(B, S, K, 8, seed=6)
    bias, ids = normal(1, N, T, S, seed=5), np.arange(T, dtype=np.int32) // 4
    actual = fa.dot_product_attention(
        *QKV[:2], value, bias, fa.Segments(ids, ids[:S]) | fa.Prefix(1), is_causal=True,
        score=fa.soft_cap(0.5), implementation="blockwise",
    )  # fmt: skip
    key, value = (jnp.repeat(x, N // K, 2) for x in (QKV[1], value))
    s = jnp.einsum("btnh,bsnh->bnts", QKV[0], key, precision="highest") / math.sqrt(H)
    visible = (ids[:, None] == ids[None, :S]) | (np.arange(S) == 0)
    s = jnp.where(
        (visible & np.tri(T, S, dtype=bool))[None, None], 0.5 * jnp.tanh((s + bias) / 0.5), -jnp.inf
    )
    close(actual, jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), value, precision="highest"))


def test_sinks_and_reproducible_gradients_in_the_drop_in():
    sinks = normal(N, seed=7)
    actual = fa.dot_product_attention(
        *QKV, is_causal=True, sinks=sinks, deterministic_gradients=True
    )
    close(actual, fa.flash_attention(*QKV, mask=fa.Causal(), sinks=sinks))
    with pytest.raises(TypeError, match="deterministic_gradients must be a Python bool"):
        fa.dot_product_attention(*QKV, deterministic_gradients="yes")  # pyright: ignore[reportArgumentType]


def test_a_window_of_numpy_integers():
    actual = fa.dot_product_attention(*QKV, local_window_size=np.int64(3))  # pyright: ignore[reportArgumentType]
    close(actual, fa.dot_product_attention(*QKV, local_window_size=3))


def test_numpy_float64_inputs_become_float32():
    wide = [x.astype(np.float64) for x in QKV]
    actual = fa.flash_attention(*wide, score=fa.soft_cap(2.0))
    close(actual, fa.flash_attention(*QKV, score=fa.soft_cap(2.0)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "cudnn"}, r"but it is 'cudnn'; for cuDNN call jax\.nn"),
        ({"implementation": "triton"}, r"implementation must be one of .* but it is 'triton'"),
        ({"query_seq_lengths": np.ones(3, np.int32)}, r"query_seq_lengths must be int32 of shape"),
        (
            {"key_value_seq_lengths": np.ones(B, np.int16)},
            r"key_value_seq_lengths must be int32 of",
        ),
        (
            {"bias": np.ones((B, T, S))},
            r"bias of three axes .* shape \(2, 13, 10\);.* bias\[:, None\]",
        ),
        ({"mask": np.ones((B, T, S), bool)}, rf"mask of three .* N = {N}, T = {T}, S = {S}, but"),
    ],
)
def test_invalid_options_of_the_drop_in_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        fa.dot_product_attention(*QKV, **options)
