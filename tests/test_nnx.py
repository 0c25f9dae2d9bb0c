"""Flax nnx: its own layer with our attention gives its own values and gradients."""

import copy
import functools
import pickle
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa2 as fa
from pallas_fa2.flax.linen import attention_fn
from pallas_fa2.flax.nnx import MultiHeadAttention

LENGTH = 13
X = np.random.default_rng(1).standard_normal((2, LENGTH, 32), np.float32)
CAUSAL = nnx.make_causal_mask(X[..., 0])
SEGMENTS = fa.Segments(jnp.broadcast_to(jnp.arange(LENGTH) // 5, (2, LENGTH)))


def close(actual, expected):
    """Float32 rounding, measured against the largest entry of each array (if it exceeds 1)."""
    chex.assert_trees_all_equal_structs(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        largest = float(np.abs(np.asarray(b)).max())
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=4e-6 * max(1.0, largest))


def build(cls=nnx.MultiHeadAttention, **options):
    options = {"decode": False, "bias_init": nnx.initializers.normal(0.1), **options}
    return cls(4, 32, rngs=nnx.Rngs(0), **options)


def parameters(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def value_and_gradients(layer, x, **options):
    def loss(layer, x):
        out = layer(x, **options)
        return jnp.sum(jnp.sin(out)), out

    (_, out), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer, x)
    return out, nnx.to_pure_dict(gradients)


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "normalize_qk": True}], ids=["plain", "grouped"]
)
def test_stock_parameters_values_and_gradients(options):
    stock = build(**options)
    expected = value_and_gradients(stock, X, mask=CAUSAL)
    ours = build(MultiHeadAttention, causal=True, **options)
    chex.assert_trees_all_equal(parameters(ours), parameters(stock), strict=True)
    close(value_and_gradients(ours, X), expected)
    changed = build(attention_fn=attention_fn, **options)
    close(value_and_gradients(changed, X, mask=CAUSAL), expected)
    close(changed(X, is_causal=True), expected[0])
    close(ours(X, is_causal=False), stock(X))


@pytest.mark.parametrize(
    "mask",
    [fa.Causal(), lambda q, k: q.index >= k.index, CAUSAL, CAUSAL.astype(bool)],
    ids=["object", "function", "float array", "boolean array"],
)
def test_every_kind_of_mask(mask):
    close(build(MultiHeadAttention)(X, mask=mask), build()(X, mask=CAUSAL))


def test_mask_object_with_data_goes_through_jit():
    layer = build(MultiHeadAttention, causal=True)
    same = nnx.make_attention_mask(SEGMENTS.ids, SEGMENTS.ids, jnp.equal)
    actual = nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(layer, X, SEGMENTS)
    close(actual, build()(X, mask=nnx.combine_masks(same, CAUSAL)))


def test_causal_documents_in_an_unmodified_layer():
    same = nnx.make_attention_mask(SEGMENTS.ids, SEGMENTS.ids, jnp.equal)
    expected = value_and_gradients(build(), X, mask=nnx.combine_masks(same, CAUSAL))
    changed = build(attention_fn=attention_fn)
    close(value_and_gradients(changed, X, mask=fa.Causal() & SEGMENTS), expected)


def test_no_buffer_has_all_pairs():
    """No buffer of the forward or the gradients has all pairs; the documents are run-time data."""
    x = jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32)

    def square(attention, mask):
        graph, state = nnx.split(build(attention_fn=attention))

        def loss(state, x, mask):
            return nnx.merge(graph, state)(x, mask=mask).sum()

        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        hlo = step.lower(state, x, mask).compile().as_text()
        return re.search(r"\[[\d,]*1024,1024\b", hlo)

    blockwise = functools.partial(attention_fn, implementation="blockwise")
    assert not square(blockwise, fa.Causal() & fa.Segments(jnp.arange(1024)[None] // 100))
    assert square(nnx.dot_product_attention, None)


@pytest.mark.parametrize("shape", [(LENGTH, 32), (2, 3, LENGTH, 32)], ids=str)
def test_any_number_of_batch_axes(shape):
    x = np.random.default_rng(2).standard_normal(shape, np.float32)
    flat = x.reshape(-1, LENGTH, 32)
    expected = build()(flat, mask=nnx.make_causal_mask(flat[..., 0])).reshape(shape)
    close(build(MultiHeadAttention, causal=True)(x), expected)


def test_bfloat16():
    layer = build(MultiHeadAttention, causal=True, dtype=jnp.bfloat16)
    out = layer(X)
    assert out.dtype == jnp.bfloat16
    exact = build()(X, mask=CAUSAL)
    with jax.numpy_dtype_promotion("standard"):
        stock = build(dtype=jnp.bfloat16)(X, mask=CAUSAL)
    ours, theirs = (float(np.abs(np.float32(actual) - exact).max()) for actual in (out, stock))
    assert ours <= 2 * theirs


@pytest.mark.parametrize("cls", [nnx.MultiHeadAttention, MultiHeadAttention])
def test_dropout_drops(cls):
    dropping = build(cls, attention_fn=attention_fn, dropout_rate=0.5, deterministic=False)
    run = nnx.jit(lambda layer, x, key: layer(x, rngs=nnx.Rngs(key)))
    one, two = jax.random.key(1), jax.random.key(2)
    plain = build()(X)
    close(dropping(X, deterministic=True), plain)
    chex.assert_trees_all_equal(run(dropping, X, one), run(dropping, X, one))
    assert not np.allclose(run(dropping, X, one), plain, atol=1e-3)
    assert not np.allclose(run(dropping, X, one), run(dropping, X, two), atol=1e-3)


def test_sow_weights_is_an_error():
    for layer in (build(attention_fn=attention_fn), build(MultiHeadAttention)):
        with pytest.raises(ValueError, match=r"attention weights, which .* never .*sow_weights"):
            layer(X, sow_weights=True)


@pytest.mark.parametrize(
    ("shapes", "options", "theirs", "ours"),
    [
        ([(2, 5, 4, 8), (5, 4, 8), (5, 4, 8)], {}, "same rank", "query's batch axes"),
        ([(2, 5, 4, 8), (3, 5, 4, 8), (3, 5, 4, 8)], {}, "batch dims", "query's batch axes"),
        ([(2, 5, 4, 8), (2, 5, 4, 8), (2, 6, 4, 8)], {}, "lengths must match", "one length S"),
        ([(2, 5, 4, 8), (2, 5, 4, 7), (2, 5, 4, 8)], {}, "depths must match", "one head dim H"),
        ([(2, 5, 4, 8)] * 3, {"dropout_rate": 1.0}, "range", r"Python number in \[0, 1\)"),
        ([(2, 5, 4, 8)] * 3, {"dropout_rate": float("nan")}, "range", "it is nan"),
        ([(2, 5, 4, 8)] * 3, {"dropout_rate": 0.5}, "is required", "dropout_rng must be given"),
    ],
)  # fmt: skip
def test_errors_correspond_to_those_of_flax(shapes, options, theirs, ours):
    qkv = [jnp.ones(shape) for shape in shapes]
    options = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)} | options
    if "required" in theirs:
        options["dropout_rng"] = None
    for attention, message in ((nnx.dot_product_attention, theirs), (attention_fn, ours)):
        with pytest.raises(ValueError, match=message):
            attention(*qkv, **options)


def decoded(layer, x, **options):
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, **options))
    return np.concatenate([step(layer, x[:, i : i + 1]) for i in range(x.shape[1])], 1)


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_decoding_is_the_causal_forward(kv_heads):
    expected = build(num_kv_heads=kv_heads)(X, mask=CAUSAL)
    ours = build(MultiHeadAttention, num_kv_heads=kv_heads, causal=True, decode=True)
    close(decoded(ours, X), np.asarray(expected))
    assert ours.cached_key.shape == (2, LENGTH, kv_heads or 4, 8)
    changed = build(num_kv_heads=kv_heads, attention_fn=attention_fn, decode=True)
    close(decoded(changed, X), np.asarray(expected))


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_masks_see_the_position_in_decoding(kv_heads):
    mask = fa.Causal() & fa.Window(3) | fa.Prefix(2)
    expected = build(MultiHeadAttention, num_kv_heads=kv_heads)(X, mask=fa.Causal() & mask)
    decode = build(MultiHeadAttention, num_kv_heads=kv_heads, decode=True)
    close(decoded(decode, X, mask=mask), np.asarray(expected))


def test_score_and_implementation_by_partial():
    score = functools.partial(attention_fn, score=fa.alibi(4), implementation="reference")
    slopes = 2.0 ** (-8.0 * np.arange(1, 5) / 4)
    distance = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
    bias = np.asarray(-slopes[:, None, None] * distance, np.float32)[None]
    stock = functools.partial(nnx.dot_product_attention, bias=bias)
    close(build(MultiHeadAttention, attention_fn=score)(X), build(attention_fn=stock)(X))


@pytest.mark.parametrize(
    "options",
    [
        {"score": fa.alibi(4)},
        {
            "score": (
                lambda s, q, k: s * 0.5 - abs(q.index - k.index).astype(s.dtype),
                fa.soft_cap(3.0),
            )
        },
    ],
)
@pytest.mark.parametrize("mask", [None, fa.SlidingWindow(3), fa.Causal() | fa.Prefix(2)])
def test_scores_see_the_position_in_decoding(options, mask):
    fn = functools.partial(attention_fn, **options)
    whole = build(MultiHeadAttention, attention_fn=fn)(
        X, mask=fa.Causal() if mask is None else mask & fa.Causal()
    )
    step = build(MultiHeadAttention, attention_fn=fn, decode=True)
    step.init_cache(X.shape)
    run = nnx.jit(lambda step, x: step(x, mask=mask))
    actual = [run(step, X[:, i : i + 1]) for i in range(X.shape[1])]
    close(jnp.concatenate(actual, 1), whole)


def test_errors_about_ids_of_the_whole_sequence_in_decoding_name_the_remedy():
    step = build(MultiHeadAttention, decode=True)
    step.init_cache(X.shape)
    with pytest.raises(
        ValueError, match=r"one for each token of the other side.*kv_ids=.*decoding"
    ):
        step(X[:, :1], mask=SEGMENTS)
    ids = SEGMENTS.ids
    step(X[:, :1], mask=fa.Segments(ids[..., :1], ids))


def test_a_mask_object_with_another_attention_fn_is_an_error():
    step = build(MultiHeadAttention, attention_fn=nnx.dot_product_attention, decode=True)
    step.init_cache(X.shape)
    with pytest.raises(ValueError, match=r"mask must be an array where attention_fn is not"):
        step(X[:, :1], mask=fa.SlidingWindow(3))


def test_layers_can_be_pickled_and_copied():
    layer = build(MultiHeadAttention, causal=True)
    expected = layer(X)
    graph, state = nnx.split(layer)
    close(nnx.merge(pickle.loads(pickle.dumps(graph)), state)(X), expected)
    close(copy.deepcopy(layer)(X), expected)


def test_a_cache_of_the_callers_gives_the_causal_forward():
    layer = build(MultiHeadAttention, causal=True, num_kv_heads=2, normalize_qk=True)
    expected = layer(jnp.asarray(X))
    pool = jnp.full((9, 4, 2, 8), jnp.nan)
    table = jnp.array([[3, 1, 8, 2], [0, 4, 7, 5]])
    pages = fa.Pages(pool, pool, table, jnp.zeros(2, jnp.int32))
    first, pages = layer(jnp.asarray(X[:, :6]), cache=pages)
    rows = fa.Packed(jnp.array([0, LENGTH - 6, 2 * (LENGTH - 6)]))
    rest, pages = layer(jnp.concatenate([X[0, 6:], X[1, 6:]]), cache=pages, queries=rows)
    close(jnp.concatenate([first, rest.reshape(2, LENGTH - 6, 32)], 1), expected)
    masked, _ = layer(
        jnp.asarray(X[:, :6]),
        cache=fa.Cache.zeros(2, 6, kv_heads=2, head_dim=8, dtype=jnp.float32),
        mask=fa.Window(2),
        implementation="reference",
    )
    close(masked, layer(jnp.asarray(X[:, :6]), mask=fa.Window(2)))
    with pytest.raises(ValueError, match="cache must be left out with decode"):
        layer(jnp.asarray(X), cache=pages, decode=True)
