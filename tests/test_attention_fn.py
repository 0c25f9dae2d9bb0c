"""`attention_fn` for layers of Flax: its arguments, with Flax's own function as the judge."""

import functools
import inspect

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa2 as fa
from pallas_fa2.flax.linen import MultiHeadAttention, attention_fn
from tests.support.linen import CAUSAL, KEY, STOCK, X, close, init


def test_the_signature_has_all_arguments_of_flax():
    def names(fn):
        return list(inspect.signature(fn).parameters)

    stock = names(nn.dot_product_attention)
    assert names(attention_fn)[: len(stock)] == stock
    assert set(names(nnx.dot_product_attention)) <= set(names(attention_fn))


def test_attention_fn_equals_flax_with_bias_and_promotion():
    q, k, v = jax.random.normal(KEY, (3, 2, 7, 4, 8))
    bias = jax.random.normal(KEY, (1, 4, 7, 7))
    half = k.astype(jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        expected = nn.dot_product_attention(q, half, v, bias=bias)
        actual = attention_fn(q, half, v, bias=bias)
    assert actual.dtype == expected.dtype == jnp.float32
    close(actual, expected)


def test_partial_sets_score_and_implementation():
    q, k, v = jax.random.normal(KEY, (3, 2, 7, 4, 8))
    capped = functools.partial(attention_fn, score=fa.soft_cap(2.0), implementation="reference")
    expected = fa.flash_attention(q, k, v, score=fa.soft_cap(2.0), implementation="reference")
    chex.assert_trees_all_equal(capped(q, k, v), expected)
    with pytest.raises(ValueError, match="implementation"):
        attention_fn(q, k, v, implementation="cudnn")


def test_partial_sets_sinks_and_reproducible_gradients():
    q, k, v = jax.random.normal(KEY, (3, 2, 7, 4, 8))
    sinks = jnp.arange(4.0)
    actual = functools.partial(attention_fn, sinks=sinks, deterministic_gradients=True)(q, k, v)
    chex.assert_trees_all_equal(actual, fa.flash_attention(q, k, v, sinks=sinks))
    with pytest.raises(TypeError, match="deterministic_gradients must be a Python bool"):
        attention_fn(q, k, v, deterministic_gradients=0)  # pyright: ignore[reportArgumentType]


def test_dtype_and_promote_dtype_are_respected():
    q, k, v = jax.random.normal(KEY, (3, 2, 7, 4, 8))

    def halve(arrays, *, dtype):
        assert dtype is None
        return [x.astype(jnp.float16) for x in arrays]

    for options, dtype in (
        ({"dtype": jnp.bfloat16}, "bfloat16"),
        ({"promote_dtype": halve}, "float16"),
    ):
        assert jax.eval_shape(functools.partial(attention_fn, **options), q, k, v).dtype == dtype


def test_dropout_needs_its_arguments():
    layer = MultiHeadAttention(num_heads=4, dropout_rate=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        layer.init(KEY, X)
    q = jnp.ones((2, 7, 4, 8))
    with pytest.raises(ValueError, match="dropout_rng must be given"):
        attention_fn(q, q, q, dropout_rate=0.5)
    attention_fn(q, q, q, dropout_rate=0.5, deterministic=True)


def test_unsupported_arguments_are_errors():
    for layer in (STOCK(num_heads=4, attention_fn=attention_fn), MultiHeadAttention(num_heads=4)):
        with pytest.raises(ValueError, match=r"attention weights, which .* never .*sow_weights"):
            layer.init(KEY, X, sow_weights=True)
    q = jnp.ones((2, 7, 4, 8))
    for name in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(ValueError, match=f"{name} must be None.*einsum"):
            attention_fn(q, q, q, **{name: jnp.einsum})
    with pytest.raises(ValueError, match=r"num_kv_heads \(= 3\) must divide num_heads \(= 4\)"):
        init(MultiHeadAttention(num_heads=4, num_kv_heads=3), X)
    with pytest.raises(ValueError, match=r"qkv_features \(= 32\) must be a multiple of num_heads"):
        init(MultiHeadAttention(num_heads=5), X)
    with pytest.raises(ValueError, match="implementation"):
        init(MultiHeadAttention(num_heads=4, implementation="cudnn"), X)


def test_a_query_without_keys_gets_zero_and_in_flax_the_mean():
    q, k, v = jax.random.normal(KEY, (3, 2, 7, 4, 8))
    mask = np.ones((1, 1, 7, 7), bool)
    mask[..., 3, :] = False
    mean = nn.dot_product_attention(q, k, v, mask=mask)[:, 3]
    np.testing.assert_allclose(mean, v.mean(1), rtol=1e-5, atol=3e-6)
    assert np.all(attention_fn(q, k, v, mask=mask)[:, 3] == 0)


def test_dropout_differs_between_batch_entries_and_heads():
    x = jnp.ones((2, 5, 3, 8))

    def kept_rows(attention, **options):
        return attention(x, x, x, dropout_rate=0.5, dropout_rng=KEY, **options)[..., 0]

    shared = kept_rows(nn.dot_product_attention)
    chex.assert_trees_all_equal(shared, jnp.broadcast_to(shared[:1, :, :1], shared.shape))
    ours = kept_rows(attention_fn)
    rows = np.moveaxis(np.asarray(ours), 1, -1).reshape(6, 5)
    assert len(np.unique(rows, axis=0)) == 6
    for idle in (
        {"broadcast_dropout": False},
        {"precision": "default"},
        {"force_fp32_for_softmax": True},
    ):
        chex.assert_trees_all_equal(kept_rows(attention_fn, **idle), ours)


def test_complex_numbers_and_deprecated_arguments_are_errors():
    q = jnp.ones((2, 7, 4, 8), jnp.complex64)
    assert nn.dot_product_attention(q, q, q).dtype == jnp.complex64
    with pytest.raises(TypeError, match=r"query's dtype must be one of .* but it is complex64"):
        attention_fn(q, q, q)
    layer = MultiHeadAttention(num_heads=4)
    with pytest.raises(TypeError, match="inputs_kv"):
        layer.init(KEY, X, inputs_kv=X)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="positional"):
        layer.init(KEY, X, X, X, CAUSAL)  # pyright: ignore[reportCallIssue]
