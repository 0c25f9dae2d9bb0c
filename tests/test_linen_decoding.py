"""Decoding by layers of linen: caches of Flax and of the caller, masks and positions in them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.flax.linen import MultiHeadAttention, attention_fn
from tests.support.linen import (
    KEY,
    LENGTH,
    STOCK,
    X,
    apply,
    close,
    init,
    jit,
    perturbed,
    stock_case,
)


def decoded(layer, params, x, sizes, cache=None, masks=None):
    """Feeds the tokens of x in pieces of the given sizes."""
    if cache is None:
        shapes = jax.eval_shape(layer.init, KEY, x)["cache"]
        cache = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    step = jit(
        lambda params, cache, x, mask: layer.apply(
            {**params, "cache": cache}, x, mask=mask, mutable=["cache"]
        )
    )
    x, outs, start = np.asarray(x), [], 0
    for size in sizes:
        mask = None if masks is None else masks(start)
        out, state = step(params, cache, x[..., start : start + size, :], mask)
        cache = state["cache"]
        outs.append(out)
        start += size
    return np.concatenate(outs, -2), cache


@pytest.mark.parametrize(
    ("kv_heads", "shape"), [(None, (2, LENGTH, 32)), (2, (LENGTH, 32))], ids=str
)
def test_decoding_is_the_causal_forward(kv_heads, shape):
    x = np.random.default_rng(2).standard_normal(shape, np.float32)
    options = {"num_heads": 4, "num_kv_heads": kv_heads, "normalize_qk": True}
    full = MultiHeadAttention(causal=True, **options)
    params = perturbed(init(full, x))
    expected = apply(full, params, x)
    step_by_step = MultiHeadAttention(decode=True, **options)
    out, cache = decoded(step_by_step, params, x, [1] * LENGTH)
    close(out, expected)
    assert cache["cached_key"].shape == (*shape[:-1], kv_heads or 4, 8)
    assert int(cache["cache_index"]) == LENGTH
    out, _ = decoded(step_by_step, params, x, [6, 1, 1, 5])  # a prompt, tokens, another prompt
    close(out, expected)


@pytest.mark.parametrize("attention", [None, attention_fn], ids=["ours", "unmodified Flax"])
def test_a_cache_of_flax_loads(attention):
    stock = STOCK(num_heads=4, decode=True)
    variables = init(stock, X)
    params = perturbed({"params": variables["params"]})
    ours = (
        MultiHeadAttention(num_heads=4, decode=True, causal=True)
        if attention is None
        else STOCK(num_heads=4, decode=True, attention_fn=attention)
    )
    chex.assert_trees_all_equal(init(ours, X), variables, strict=True)
    expected, end = decoded(stock, params, X, [1] * LENGTH)
    _, halfway = decoded(stock, params, X, [1] * 6)
    out, cache = decoded(ours, params, X[:, 6:], [1] * (LENGTH - 6), halfway)
    close((out, cache), (expected[:, 6:], end))


def test_masks_and_scores_see_the_position_in_decoding():
    mask = (fa.Causal() & fa.Window(3)) | fa.Prefix(2)
    full = MultiHeadAttention(num_heads=4)
    params, _ = stock_case()
    expected = apply(full, params, X, mask=mask)  # the prompt's first tokens see each other
    decode = MultiHeadAttention(num_heads=4, decode=True)
    out, _ = decoded(decode, params, X, [5] + [1] * (LENGTH - 5), masks=lambda start: mask)
    close(out, expected)
    causal = MultiHeadAttention(num_heads=4, decode=True, causal=True)
    out, _ = decoded(causal, params, X, [5] + [1] * (LENGTH - 5), masks=lambda start: mask)
    close(out, apply(full, params, X, mask=mask & fa.Causal()))

    rows = (jnp.arange(LENGTH) % 3 != 1)[None, None, None]  # stock's kind of mask: [.., 1, max]
    out, _ = decoded(decode, params, X, [1] * LENGTH, masks=lambda start: rows)
    close(out, apply(full, params, X, mask=fa.Causal() & fa.Dense(rows)))

    _, cache = decoded(decode, params, X, [6])
    out, _ = apply(
        decode, {**params, "cache": cache}, X[:, 6:7], score=fa.alibi(4), mutable=["cache"]
    )
    close(out, apply(full, params, X[:, :7], score=fa.alibi(4))[:, 6:])


def test_cache_errors():
    decode = MultiHeadAttention(num_heads=4, decode=True)
    variables = jax.eval_shape(decode.init, KEY, X)
    for wrong in (X[:1, :1], np.concatenate([X, X], 1)):
        with pytest.raises(ValueError, match=r"new keys must have shape .* but they have shape"):
            jax.eval_shape(functools.partial(decode.apply, mutable=["cache"]), variables, wrong)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: fa.Causal() | fa.Prefix(4),
        lambda: fa.Causal() | fa.Prefix(9),  # of which the cache has 6
        lambda: fa.mask_fn(lambda q, k: (q.index >= k.index) | (k.index < 3)),
        lambda: fa.Prefix(6) & fa.Window(4, 1),
    ],
)
@pytest.mark.parametrize("x", [X, X[0]], ids=["cache", "positions"])
def test_the_mask_decides_to_what_a_prompt_attends(x, mask):
    params, _ = stock_case()
    whole = apply(MultiHeadAttention(num_heads=4), params, x[..., :6, :], mask=mask())
    decode = MultiHeadAttention(num_heads=4, decode=True)
    out, _ = decoded(decode, params, x, [6], masks=lambda start: mask())
    close(out, whole)


def test_a_layer_of_flax_in_decoding_does_not_pass_the_position():
    params, _ = stock_case()
    rows = X[:, :1]

    def step(mask=None, **options):
        fn = functools.partial(attention_fn, **options)
        layer = STOCK(num_heads=4, decode=True, attention_fn=fn)
        cache = layer.init(KEY, X)["cache"]
        return layer.apply({**params, "cache": cache}, rows, mask=mask, mutable=["cache"])[0]

    for score in (fa.alibi(4), lambda s, q, k: s - abs(q.index - k.index).astype(s.dtype)):
        with pytest.raises(
            ValueError, match=r"one query and several keys.*MultiHeadAttention.*align"
        ):
            step(score=score)
    close(step(score=fa.soft_cap(1e6)), step())  # which reads no positions
    close(step(score=fa.alibi(4), align="start"), step())  # the first token
    with pytest.raises(AttributeError, match=r"no array.*decode=True.*linen\.MultiHeadAttention"):
        step(mask=fa.Window(3))


def test_one_query_without_positions_is_not_decoding():
    q, k, v = (jax.random.normal(KEY, (2, n, 4, 8)) for n in (1, 7, 7))
    mask = fa.Lengths(kv=jnp.array([3, 5]))
    close(attention_fn(q, k, v, mask=mask), fa.flash_attention(q, k, v, mask=mask))
    with pytest.raises(ValueError, match="one query and several keys"):
        attention_fn(q, k, v, mask=fa.Causal())
    end = attention_fn(q, k, v, mask=fa.SlidingWindow(2), align="end")
    close(end, fa.flash_attention(q, k, v, mask=fa.SlidingWindow(2), align="end"))


@pytest.mark.parametrize("paged", [False, True], ids=["cache", "pages"])
def test_a_cache_of_the_callers_gives_the_causal_forward(paged):
    """Prompts of 6 and 0 tokens, then all other tokens of both, packed."""
    options = {"num_heads": 4, "num_kv_heads": 2, "normalize_qk": True}
    layer = MultiHeadAttention(causal=True, **options)
    params = perturbed(init(layer, X))
    expected = apply(layer, params, X)
    lengths = jnp.zeros(2, jnp.int32)
    if paged:
        pool = jnp.full((9, 4, 2, 8), jnp.nan)
        cache = fa.Pages(pool, pool, jnp.array([[3, 1, 8, 2], [0, 4, 7, 5]]), lengths)
    else:
        cache = fa.Cache.zeros(2, 16, kv_heads=2, head_dim=8, dtype=jnp.float32)
    step = jit(
        lambda params, x, cache, queries: layer.apply(params, x, cache=cache, queries=queries)
    )
    starts = np.array([0, 6, 6], np.int32), np.array([0, LENGTH - 6, 2 * LENGTH - 6], np.int32)
    outs = []
    for rows, limits in zip((X[0, :6], np.concatenate([X[0, 6:], X[1]])), starts, strict=True):
        out, cache = step(params, rows, cache, fa.Packed(jnp.asarray(limits)))
        outs.append(out)
    actual = np.concatenate(outs).reshape(X.shape)
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]


def test_masks_and_rows_of_a_cache():
    layer = MultiHeadAttention(num_heads=4)
    params = perturbed(init(layer, X))
    expected = apply(layer, params, X, mask=fa.Causal() & fa.Window(3))
    cache = fa.Cache.zeros(2, LENGTH, kv_heads=4, head_dim=8, dtype=jnp.float32)
    out, cache = layer.apply(params, X, mask=fa.SlidingWindow(4), cache=cache)
    np.testing.assert_allclose(out, expected, atol=1e-5)


DROPPING = {"dropout_rate": 0.5}


def attend_on_a_cache(options, **call):
    layer = MultiHeadAttention(num_heads=4, **options)
    params = perturbed(init(MultiHeadAttention(num_heads=4), X))
    cache = fa.Cache.zeros(2, LENGTH, kv_heads=4, head_dim=8, dtype=jnp.float32)
    call = {"inputs_q": jnp.asarray(X), "cache": cache, **call}
    expected = apply(MultiHeadAttention(num_heads=4, causal=True), params, X)
    return layer.apply(params, **call), expected


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({"decode": True}, {}),
        (DROPPING, {}),
        (DROPPING, {"deterministic": False}),
        (DROPPING | {"deterministic": False}, {"dropout_rng": KEY}),
        ({}, {"inputs_k": X}),
        ({}, {"inputs_k": X, "inputs_v": X}),
    ],
)  # fmt: skip
def test_options_that_a_cache_excludes(options, call):
    with pytest.raises(ValueError, match=r"cache must be left out with decode .*leave these out"):
        attend_on_a_cache(options, **call)


def test_other_values_alone_are_excluded_too():
    """The keys are those of the queries."""
    x = jnp.asarray(X)
    with pytest.raises(ValueError, match="cache must be left out with decode"):
        attend_on_a_cache({}, inputs_q=x, inputs_k=x, inputs_v=x + 1)


@pytest.mark.parametrize(
    ("options", "call"),
    [
        (DROPPING, {"deterministic": True}),
        (DROPPING | {"deterministic": True}, {}),
        ({}, {"deterministic": False, "dropout_rng": KEY, "sow_weights": False}),
    ],
)  # fmt: skip
def test_options_that_have_no_effect_on_a_cache(options, call):
    (actual, _), expected = attend_on_a_cache(options, **call)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_errors_about_caches_name_the_argument():
    with pytest.raises(ValueError, match=r"sow_weights \(= True\) asks for the attention weights"):
        attend_on_a_cache({}, sow_weights=True)
    with pytest.raises(ValueError, match="queries must be left out without cache"):
        attend_on_a_cache({}, cache=None, queries=fa.Packed(jnp.array([0, 1, 2])))
    with pytest.raises(TypeError, match=r"cache must be a pallas_fa2\.Cache .* it is dict"):
        attend_on_a_cache({}, cache={})


@pytest.mark.parametrize(
    "options, error, message",
    [
        (
            {"dtype": jnp.bfloat16},
            TypeError,
            r"computes, float32, but it has bfloat16; .* dtype=fl",
        ),
        ({"kv_heads": 2}, ValueError, r"layer's 4 key heads of 8, but it has 2 of 8; .*kv_heads=4"),
        (
            {"head_dim": 16},
            ValueError,
            "but it has 4 of 16; make it with kv_heads=4 and head_dim=8",
        ),
        (None, TypeError, "cache must be a pallas_fa2.Cache or pallas_fa2.Pages, but it is dict"),
    ],
    ids=["dtype", "heads", "head dim", "no cache"],
)
def test_a_cache_that_does_not_fit_the_layer_names_the_cure(options, error, message):
    layer, cache = MultiHeadAttention(num_heads=4), {}
    if options is not None:
        cache = fa.Cache.zeros(
            2, LENGTH, **{"kv_heads": 4, "head_dim": 8, "dtype": jnp.float32} | options
        )
    with pytest.raises(error, match=message):
        layer.init(KEY, X, cache=cache)


def test_a_mask_in_the_place_of_inputs_is_an_error():
    for mask in (fa.Causal(), lambda q, k: q.index >= k.index):
        with pytest.raises(TypeError, match=r"inputs_k must be .*; pass a mask by name, mask="):
            MultiHeadAttention(num_heads=4).init(KEY, X, mask)
