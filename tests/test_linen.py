"""Flax linen: the same parameters, values and gradients as Flax's own layer."""

import copy
import functools
import pickle
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.flax.linen import MultiHeadAttention, attention_fn
from tests.support.linen import (
    CAUSAL,
    KEY,
    LENGTH,
    STOCK,
    X,
    apply,
    call,
    close,
    init,
    jit,
    perturbed,
    stock_case,
    value_and_gradients,
)

SEGMENTS = fa.Segments(jnp.broadcast_to(jnp.arange(LENGTH) // 5, (2, LENGTH)))


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
