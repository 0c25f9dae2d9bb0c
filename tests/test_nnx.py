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


def new_cache(kv_heads=4):
    return fa.Cache.zeros(2, 16, kv_heads=kv_heads, head_dim=8, dtype=jnp.float32)


PRESETS = {
    "score": {"score": fa.alibi(4)},
    "scores": {"score": (fa.soft_cap(2.0), fa.alibi(4))},
    "sinks": {"sinks": jnp.arange(4.0)},
    "mask": {"mask": fa.Causal() & fa.Window(3)},
    "implementation": {"implementation": "reference"},
    "causal": {"is_causal": True, "align": "start", "precision": "highest"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_cache_has_what_a_partial_attention_fn_sets(name):
    """The same layer gives the same with and without it."""
    x, layer = jnp.asarray(X), build(MultiHeadAttention, attention_fn=attention_fn)
    changed = functools.partial(attention_fn, **PRESETS[name])
    layer = build(MultiHeadAttention, attention_fn=changed, causal=name not in ("mask", "causal"))
    close(layer(x, cache=new_cache())[0], layer(x))
    same = np.allclose(layer(x), build(MultiHeadAttention, causal=True)(x), atol=1e-3)
    assert same == (name in ("implementation", "causal"))


def test_options_of_a_call_take_the_place_of_those_of_a_partial_attention_fn():
    x = jnp.asarray(X)
    preset = functools.partial(attention_fn, score=fa.soft_cap(1.0), mask=fa.Window(2))
    layer = build(MultiHeadAttention, causal=True, attention_fn=preset)
    alibi = functools.partial(attention_fn, score=fa.alibi(4))
    expected = build(MultiHeadAttention, causal=True, attention_fn=alibi)(x, mask=fa.Window(5))
    actual, _ = layer(x, cache=new_cache(), score=fa.alibi(4), mask=fa.Window(5))
    close(actual, expected)
    implemented = layer(x, cache=new_cache(), implementation="reference")[0]
    close(implemented, layer(x))
    with pytest.raises(ValueError, match="'hopper' does not support this call"):
        layer(x, cache=new_cache(), implementation="hopper")


@pytest.mark.parametrize(
    "function",
    [
        nnx.dot_product_attention,
        functools.partial(nnx.dot_product_attention, bias=None),
        lambda *args, **options: attention_fn(*args, **options),
    ],
    ids=["stock", "partial", "wrapped"],
)
def test_a_cache_with_another_attention_fn_is_an_error(function):
    layer = build(MultiHeadAttention, attention_fn=function)
    with pytest.raises(ValueError, match=r"attention_fn must be pallas_fa2's.* where cache is"):
        layer(jnp.asarray(X), cache=new_cache())
    layer(X)


@pytest.mark.parametrize(
    "preset",
    [{"bias": jnp.zeros((4, 1, 1))}, {"deterministic_gradients": True}, {"promote_dtype": min}],
    ids=lambda preset: next(iter(preset)),
)
def test_what_a_cache_does_not_have_is_an_error(preset):
    layer = build(MultiHeadAttention, attention_fn=functools.partial(attention_fn, **preset))
    with pytest.raises(ValueError, match=f"attention_fn must not set {next(iter(preset))} where"):
        layer(jnp.asarray(X), cache=new_cache())


DROPPING = {"dropout_rate": 0.5}


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        ({}, {"decode": True}),
        ({"decode": True}, {}),
        (DROPPING, {}),
        (DROPPING, {"deterministic": False}),
        (DROPPING | {"deterministic": False}, {"rngs": nnx.Rngs(1)}),
        (DROPPING | {"deterministic": True}, {"deterministic": False}),
        ({}, {"inputs_k": X}),
        ({}, {"inputs_k": X, "inputs_v": X}),
    ],
)  # fmt: skip
def test_options_that_a_cache_excludes(layer, call):
    with pytest.raises(ValueError, match=r"cache must be left out with decode .*leave these out"):
        build(MultiHeadAttention, **layer)(jnp.asarray(X), cache=new_cache(), **call)


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        ({"decode": True}, {"decode": False}),
        (DROPPING, {"deterministic": True}),
        (DROPPING | {"deterministic": False}, {"deterministic": True}),
        (DROPPING | {"deterministic": True}, {}),
        ({}, {"deterministic": False, "rngs": nnx.Rngs(1), "sow_weights": False}),
        ({}, {"qkv_sharding": None, "out_sharding": None}),
    ],
)  # fmt: skip
def test_options_of_flax_that_have_no_effect_on_a_cache(layer, call):
    expected = build(MultiHeadAttention)(jnp.asarray(X), mask=fa.Causal())
    close(
        build(MultiHeadAttention, **layer)(jnp.asarray(X), cache=new_cache(), **call)[0], expected
    )


def test_errors_about_caches_name_the_argument():
    layer, x = build(MultiHeadAttention), jnp.asarray(X)
    with pytest.raises(ValueError, match=r"sow_weights \(= True\) asks for the attention weights"):
        layer(x, cache=new_cache(), sow_weights=True)
    with pytest.raises(ValueError, match="queries must be left out without cache"):
        layer(x[0], queries=fa.Packed(jnp.array([0, 5, LENGTH])))
    with pytest.raises(TypeError, match=r"cache must be a pallas_fa2\.Cache .* it is dict"):
        layer(x, cache={})
    for name in ("return_lse", "input_positions", "dropout"):
        with pytest.raises(TypeError, match=f"'{name}' is none of them"):
            layer(x, cache=new_cache(), **{name: X})


def test_a_cache_that_does_not_fit_the_layer_names_the_cure():
    layer, x = build(MultiHeadAttention, decode=False), jnp.asarray(X)
    with pytest.raises(
        TypeError, match=r"computes, float32, but it has bfloat16; .* dtype=float32"
    ):
        layer(x, cache=fa.Cache.zeros(2, LENGTH, kv_heads=4, head_dim=8))
    with pytest.raises(ValueError, match=r"4 key heads of 8, but it has 2 of 8; .*kv_heads=4"):
        layer(x, cache=fa.Cache.zeros(2, LENGTH, kv_heads=2, head_dim=8, dtype=jnp.float32))


def test_a_prompt_with_decode_is_an_error_that_names_cache():
    step = build(MultiHeadAttention, decode=True)
    step.init_cache(X.shape)
    with pytest.raises(ValueError, match=r"inputs_q must be one token.* \(2, 3, 32\); .*cache="):
        step(jnp.asarray(X[:, :3]))


def test_a_mask_in_the_place_of_inputs_is_an_error():
    with pytest.raises(
        TypeError, match=r"inputs_k must be .* Causal\(\); pass a mask by name, mask="
    ):
        build(MultiHeadAttention, decode=False)(jnp.asarray(X), fa.Causal())
