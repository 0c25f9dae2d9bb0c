"""Flax linen: the same parameters, values and gradients as Flax's own layer."""

import copy
import functools
import inspect
import pickle
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa2 as fa
from pallas_fa2.flax.linen import MultiHeadAttention, attention_fn

KEY = jax.random.key(0)
LENGTH = 13
X = np.random.default_rng(1).standard_normal((2, LENGTH, 32), np.float32)
CAUSAL = nn.make_causal_mask(X[..., 0])
SEGMENTS = fa.Segments(jnp.broadcast_to(jnp.arange(LENGTH) // 5, (2, LENGTH)))
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


def repeat_kv(params, group):
    """The stock layer that a grouped one stands for."""
    inner = {
        name: jax.tree.map(lambda a: jnp.repeat(a, group, axis=-2), p)
        if name in ("key", "value")
        else p
        for name, p in params["params"].items()
    }
    return {"params": inner}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_qk": True, "qkv_features": 48, "out_features": 20},
        {"use_bias": False, "param_dtype": jnp.bfloat16, "dtype": jnp.float32},
        {"bias_init": nn.initializers.normal(), "out_kernel_init": nn.initializers.ones},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_parameters_equal_those_of_flax(options):
    stock = init(STOCK(num_heads=4, **options), X)
    ours = init(MultiHeadAttention(num_heads=4, **options), X)
    assert jax.tree.structure(stock) == jax.tree.structure(ours)
    chex.assert_trees_all_equal(stock, ours, strict=True)


@pytest.mark.parametrize(
    "layer",
    [MultiHeadAttention(num_heads=4), STOCK(num_heads=4, attention_fn=attention_fn)],
    ids=["ours", "unmodified Flax"],
)
def test_a_checkpoint_of_flax_gives_its_values_and_gradients(layer):
    params, expected = stock_case()
    close(value_and_gradients(call(layer, mask=CAUSAL), params, X), expected)


def test_cross_attention_equals_flax():
    stock, ours = STOCK(num_heads=4), MultiHeadAttention(num_heads=4)
    k, v = X[:, :5, :24], 2.0 * X[:, :5, :24]
    params = perturbed(init(stock, X, k))
    close(apply(ours, params, X, k), apply(stock, params, X, k))
    close(apply(ours, params, X, k, v), apply(stock, params, X, k, v))
    with pytest.raises(ValueError, match="inputs_k must be given"):
        apply(ours, params, X, inputs_v=v)


def test_bfloat16_is_as_exact_as_flax():
    params, exact = stock_case()
    half = {"num_heads": 4, "dtype": jnp.bfloat16}
    stock = value_and_gradients(call(STOCK(**half), mask=CAUSAL), params, X)
    ours = value_and_gradients(call(MultiHeadAttention(causal=True, **half)), params, X)
    chex.assert_trees_all_equal_dtypes(ours, stock)

    def error(actual):
        return jax.tree.map(lambda a, b: np.abs(np.float32(a) - np.float32(b)).max(), actual, exact)

    both = zip(jax.tree.leaves(error(ours)), jax.tree.leaves(error(stock)), strict=True)
    for mine, flax_result in both:
        assert mine <= 2 * flax_result + 1e-5


@pytest.mark.parametrize("shape", [(LENGTH, 32), (2, 3, LENGTH, 32)], ids=str)
def test_any_number_of_batch_axes(shape):
    x = np.random.default_rng(2).standard_normal(shape, np.float32)
    stock = STOCK(num_heads=4)
    params = perturbed(init(stock, x))
    mask = nn.make_causal_mask(x[..., 0])
    expected = apply(stock, params, x, mask=mask)
    close(apply(MultiHeadAttention(num_heads=4, causal=True), params, x), expected)
    close(apply(STOCK(num_heads=4, attention_fn=attention_fn), params, x, mask=mask), expected)


MASKS = {
    "float array": CAUSAL,
    "boolean array": CAUSAL.astype(bool),
    "numpy array": np.asarray(CAUSAL),
    "object": fa.Causal(),
    "function": lambda q, k: q.index >= k.index,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_every_kind_of_mask(mask):
    params, (expected, _) = stock_case()
    close(apply(STOCK(num_heads=4, attention_fn=attention_fn), params, X, mask=mask), expected)
    close(apply(MultiHeadAttention(num_heads=4), params, X, mask=mask), expected)


def test_mask_object_with_data_goes_through_jit_and_joins_causal():
    params, _ = stock_case()
    same = nn.make_attention_mask(SEGMENTS.ids, SEGMENTS.ids, jnp.equal)
    expected = apply(STOCK(num_heads=4), params, X, mask=nn.combine_masks(same, CAUSAL))
    ours = MultiHeadAttention(num_heads=4, causal=True)
    masked = jit(lambda p, x, m: ours.apply(p, x, mask=m))
    close(masked(params, X, SEGMENTS), expected)
    close(masked(params, X, same), expected)


def test_causal_documents_in_an_unmodified_layer():
    params, _ = stock_case()
    same = nn.make_attention_mask(SEGMENTS.ids, SEGMENTS.ids, jnp.equal)
    dense = call(STOCK(num_heads=4), mask=nn.combine_masks(same, CAUSAL))
    ours = call(STOCK(num_heads=4, attention_fn=attention_fn), mask=fa.Causal() & SEGMENTS)
    close(value_and_gradients(ours, params, X), value_and_gradients(dense, params, X))


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


@pytest.mark.parametrize("layer", [STOCK, MultiHeadAttention])
def test_dropout_drops(layer):
    options = {"attention_fn": attention_fn} if layer is STOCK else {}
    dropping = layer(num_heads=4, dropout_rate=0.5, **options)
    params = init(dropping, X, deterministic=True)
    plain = apply(layer(num_heads=4, **options), params, X)

    @jit
    def run(seed, dropout_rng=None):
        rngs = {"dropout": jax.random.key(seed)}
        return dropping.apply(params, X, rngs=rngs, deterministic=False, dropout_rng=dropout_rng)

    chex.assert_trees_all_equal(apply(dropping, params, X, deterministic=True), plain)
    chex.assert_trees_all_equal(run(1), run(1))
    chex.assert_trees_all_equal(run(1, dropout_rng=KEY), run(2, dropout_rng=KEY))
    assert not np.allclose(run(1), plain, atol=1e-3)
    assert not np.allclose(run(1), run(2), atol=1e-3)
    mean = jnp.mean(jax.vmap(run)(jnp.arange(512)), 0)
    assert float(jnp.abs(mean - plain).mean()) < 0.15 * float(jnp.abs(run(1) - plain).mean())


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


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_flax_with_repeated_keys(kv_heads):
    ours = MultiHeadAttention(num_heads=4, num_kv_heads=kv_heads, causal=True, normalize_qk=True)
    params = perturbed(init(ours, X))
    assert params["params"]["key"]["kernel"].shape == (32, kv_heads, 8)
    stock = STOCK(num_heads=4, normalize_qk=True)

    def repeated(params, x):
        return stock.apply(repeat_kv(params, 4 // kv_heads), x, mask=CAUSAL)

    expected = value_and_gradients(repeated, params, X)
    close(value_and_gradients(call(ours), params, X), expected)


def test_scores_reach_the_layer():
    slopes = np.float32([0.5, 0.25, 0.125, 0.0625])
    distance = np.abs(np.subtract.outer(np.arange(LENGTH), np.arange(LENGTH)))
    layer = MultiHeadAttention(num_heads=4)
    params, _ = stock_case()
    bias = np.float32(-slopes[:, None, None] * distance)[None]
    biased = functools.partial(nn.dot_product_attention, bias=jnp.asarray(bias))
    expected = apply(STOCK(num_heads=4, attention_fn=biased), params, X)
    close(apply(layer, params, X, score=fa.alibi(slopes)), expected)


class Block(nn.Module):
    attention: type[nn.Module]
    options: dict

    @nn.compact
    def __call__(self, x, mask):
        x = x + self.attention(num_heads=4, name="attention", **self.options)(
            nn.LayerNorm()(x), mask=mask
        )
        return x, None


@pytest.mark.parametrize(
    ("layer", "options"),
    [(STOCK, {"attention_fn": attention_fn}), (MultiHeadAttention, {})],
    ids=["unmodified Flax", "ours"],
)
def test_layers_scanned_and_rematerialized(layer, options):
    def stack(layer, options):
        return nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=3,
        )(layer, options)

    def run(layer, options, mask):
        scanned = stack(layer, options)
        return value_and_gradients(lambda p, x: scanned.apply(p, x, mask)[0], params, X)

    params = perturbed(init(stack(STOCK, {}), X, CAUSAL))
    same = nn.make_attention_mask(SEGMENTS.ids, SEGMENTS.ids, jnp.equal)
    close(run(layer, options, SEGMENTS), run(STOCK, {}, same))


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


def test_no_buffer_has_all_pairs():
    """No buffer of the forward or the gradients has all pairs; the documents are run-time data."""
    x = jax.ShapeDtypeStruct((1, 1024, 32), jnp.float32)
    documents = fa.Segments(jnp.arange(1024)[None] // 100)

    def square(layer, mask):
        def loss(params, x, mask):
            return layer.apply(params, x, mask=mask).sum()

        params = jax.eval_shape(layer.init, KEY, x)
        step = jax.jit(jax.value_and_grad(loss, (0, 1)))
        hlo = step.lower(params, x, mask).compile().as_text()
        return re.search(r"\[[\d,]*1024,1024\b", hlo)

    blockwise = functools.partial(attention_fn, implementation="blockwise")
    mask = fa.Causal() & fa.Window(300) & documents
    assert not square(MultiHeadAttention(num_heads=2, implementation="blockwise"), mask)
    assert not square(STOCK(num_heads=2, attention_fn=blockwise), fa.Causal() & documents)
    assert square(STOCK(num_heads=2), None)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: fa.Causal() | fa.Prefix(4),
        lambda: fa.Causal() | fa.Prefix(9),  # of which the cache has 6
        lambda: fa.mask_fn(lambda q, k: (q.index >= k.index) | (k.index < 3)),
        lambda: fa.Prefix(6) & fa.Window(4, 1),
    ],
)
def test_the_mask_decides_to_what_a_prompt_attends(mask):
    params, _ = stock_case()
    whole = apply(MultiHeadAttention(num_heads=4), params, X[:, :6], mask=mask())
    decode = MultiHeadAttention(num_heads=4, decode=True)
    out, _ = decoded(decode, params, X, [6], masks=lambda start: mask())
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


@pytest.mark.parametrize("mask", [lambda q, k: q.index >= k.index, fa.Causal()])
@pytest.mark.parametrize("transform", [nn.remat, nn.checkpoint, nn.jit])
def test_lifted_layers_take_plain_functions(mask, transform):
    params, _ = stock_case()
    score = lambda s, q, k: s * 0.5
    plain = apply(MultiHeadAttention(num_heads=4), params, X, mask=mask, score=score)
    lifted = transform(MultiHeadAttention)(num_heads=4)
    close(lifted.apply(params, X, mask=mask, score=score), plain)


def test_layers_can_be_pickled_and_copied():
    layer = MultiHeadAttention(num_heads=4, causal=True)
    params, _ = stock_case()
    expected = apply(layer, params, X)
    for same in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        close(same.apply(params, X), expected)


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
    for wrong in (
        MultiHeadAttention(num_heads=4, decode=True),
        MultiHeadAttention(num_heads=4, dropout_rate=0.1, deterministic=False),
    ):
        with pytest.raises(ValueError, match="cache must be left out with decode"):
            wrong.apply(params, X, cache=cache)
    with pytest.raises(ValueError, match="cache must be left out"):
        layer.apply(params, X, X + 1, cache=cache)
