"""Which kernels Flax's layers take in their decoding mode, and that they compute what dense decoding does."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa2 as fa
from tests.support import interpreter
from tests.support.hopper import A100, H200, planned_for
from tests.support.tiers import slow

HEADS, KV_HEADS, FEATURES, CAPACITY = 4, 2, 32, 96
OURS = {"num_kv_heads": KV_HEADS}
DEVICES = pytest.mark.parametrize("device", [H200, A100], ids=["hopper", "ampere"])


def linen(cls: Any = fa.linen.MultiHeadAttention, **options: Any) -> Any:
    options = (OURS if cls is fa.linen.MultiHeadAttention else {}) | options
    return cls(num_heads=HEADS, **{"dtype": jnp.bfloat16, "decode": True, **options})


def of_nnx(cls: Any = fa.nnx.MultiHeadAttention, **options: Any) -> Any:
    options = {"dtype": jnp.bfloat16, "decode": True, **OURS, **options}
    return cls(HEADS, FEATURES, rngs=nnx.Rngs(0), **options)


def trace_linen(layer: Any, capacity: int, tokens: int = 1, batch: tuple = (2,)) -> str:
    """The program of a step of these tokens with a cache of this capacity."""
    whole = jax.ShapeDtypeStruct((*batch, capacity, FEATURES), jnp.bfloat16)
    variables = jax.eval_shape(layer.init, jax.random.key(0), whole)
    new = jax.ShapeDtypeStruct((*batch, tokens, FEATURES), jnp.bfloat16)

    def step(variables: Any, x: Any) -> Any:
        rngs = {"dropout": jax.random.key(1)}
        return layer.apply(variables, x, mutable=["cache"], rngs=rngs)

    return str(jax.make_jaxpr(step)(variables, new))


def trace_nnx(layer: Any, capacity: int, **options: Any) -> str:
    layer.init_cache((2, capacity, FEATURES), dtype=jnp.bfloat16)
    graph, state = nnx.split(layer)

    def step(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x, **options)

    return str(jax.make_jaxpr(step)(state, jnp.ones((2, 1, FEATURES), jnp.bfloat16)))


STOCK_LINEN = functools.partial(
    linen, nn.MultiHeadDotProductAttention, attention_fn=fa.linen.attention_fn
)
STOCK_NNX = functools.partial(of_nnx, nnx.MultiHeadAttention, attention_fn=fa.nnx.attention_fn)
LAYERS: dict[str, Callable[[], str]] = {
    "linen": lambda: trace_linen(linen(), 32768),
    "linen_prompt_part": lambda: trace_linen(linen(causal=True), 32768, 3),
    "linen_stock": lambda: trace_linen(STOCK_LINEN(), 32768),
    "nnx": lambda: trace_nnx(of_nnx(), 32768),
    "nnx_mask": lambda: trace_nnx(of_nnx(causal=True), 32768, mask=fa.SlidingWindow(5)),
    "nnx_stock": lambda: trace_nnx(STOCK_NNX(), 32768),
}


@DEVICES
@pytest.mark.parametrize("name", LAYERS)
def test_layers_take_the_decode_kernel(name: str, device: fa.Device) -> None:
    """Ours by the lengths alone; those of Flax pass an array, of which lists say what to visit."""
    with planned_for(device):
        program = LAYERS[name]()
    assert "name=decode" in program
    assert ("cumsum" in program) == ("stock" in name)


OTHERS: dict[str, Callable[[], str]] = {
    "dropout": lambda: trace_linen(linen(dropout_rate=0.5, deterministic=False), 256),
    "batch_axes": lambda: trace_linen(linen(), 256, batch=(2, 3)),
    "float32": lambda: trace_linen(linen(dtype=jnp.float32), 256),
    "nnx_bias": lambda: trace_nnx(
        of_nnx(attention_fn=functools.partial(fa.nnx.attention_fn, bias=np.ones((1, 1, 1, 256)))), 256
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_caches_have_not_takes_the_other_kernels(name: str) -> None:
    """A cache of float32 is one that no kernel reads, which is said."""
    warned = pytest.warns(fa.FallbackWarning, match="no kernel reads this cache.*bfloat16")
    with planned_for(A100), warned if name == "float32" else contextlib.nullcontext():
        program = OTHERS[name]()
    assert "name=decode" not in program


def drawn(layer: Any, x: np.ndarray) -> Any:
    """Parameters whose biases are no zeros."""
    params = layer.init(jax.random.key(0), x)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    return tree.unflatten([p + n for p, n in zip(leaves, noise, strict=True)])


CALLS: dict[str, dict] = {
    "causal": {},
    "window": {"mask": fa.SlidingWindow(40)},
    "prefix": {"mask": fa.Causal() & fa.Window(20) | fa.Prefix(3)},
    "rows": {"mask": (np.arange(CAPACITY) % 3 > 0)[None, None, None]},
    "alibi": {"score": fa.alibi(np.array([0.5, 0.25, 0.125, 0.0625], np.float32))},
}


@DEVICES
@pytest.mark.parametrize("name", ["causal", "prefix", *map(slow, ("window", "rows", "alibi"))])
def test_linen_decodes_on_the_kernel_as_densely(name: str, device: fa.Device) -> None:
    """After a prompt of 70 tokens, by `blockwise`: one of 3 tokens and a single one."""
    x = np.random.default_rng(0).standard_normal((2, CAPACITY, FEATURES), np.float32)
    options = CALLS[name]
    full = linen(dtype=jnp.float32, decode=False)
    params = drawn(full, x[:, :4])
    masks = options.get("mask", fa.Causal())
    masks = (fa.Dense(jnp.asarray(masks)) if isinstance(masks, np.ndarray) else masks) & fa.Causal()
    expected = full.apply({"params": params}, x, **{**options, "mask": masks})

    layer = linen(causal=True)
    cache = layer.init(jax.random.key(0), x)["cache"]

    def step(cache: Any, x: Any) -> Any:
        return layer.apply({"params": params, "cache": cache}, x, mutable=["cache"], **options)

    _, state = step(cache, x[:, :70])
    with planned_for(device._replace(num_sms=2)):
        for begin, end in ((70, 73), (73, 74)):
            out, state = interpreter.run(step, state["cache"], x[:, begin:end])
            np.testing.assert_allclose(
                np.asarray(out, np.float32), expected[:, begin:end], atol=0.06
            )


@pytest.mark.parametrize("mask", [None, slow(fa.SlidingWindow(40))], ids=str)
def test_nnx_decodes_on_the_kernel_as_densely(mask: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, FEATURES), np.float32)
    layer = of_nnx(causal=True)
    layer.init_cache((2, CAPACITY, FEATURES), dtype=jnp.bfloat16)
    for cached in (layer.cached_key, layer.cached_value):
        cached[...] = jax.random.normal(jax.random.key(0), cached[...].shape, jnp.bfloat16)
    layer.cache_index[...] = jnp.int32(70)
    graph, state = nnx.split(layer)

    def step(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x, mask=mask)

    expected = jax.jit(step)(state, x)  # by `blockwise`
    with planned_for(H200._replace(num_sms=2)):
        out = interpreter.run(step, state, x)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (out, expected)), atol=0.03)


def test_tokens_beyond_the_greatest_length_overwrite_the_last_ones() -> None:
    x = np.random.default_rng(0).standard_normal((2, 8, FEATURES), np.float32)
    layer = linen(dtype=jnp.float32)
    variables = layer.init(jax.random.key(0), x)
    _, state = layer.apply(variables, x[:, :7], mutable=["cache"])
    variables = {**variables, **state}
    out, state = layer.apply(variables, x[:, 5:7], mutable=["cache"])
    assert int(state["cache"]["cache_index"]) == 9
    other = linen(dtype=jnp.float32, decode=False)
    tokens = np.concatenate([x[:, :6], x[:, 5:7]], 1)
    expected = other.apply({"params": variables["params"]}, tokens, mask=fa.Causal())
    np.testing.assert_allclose(out, expected[:, 6:], atol=1e-5)


@pytest.mark.parametrize("is_joined", [False, True])
def test_nnx_attends_to_what_arrays_of_the_caller_show(is_joined: bool) -> None:
    """A mask that is an array, which Flax joins to its own, and one that an attention function of the caller's
    joins."""
    rows = (np.arange(8) % 3 != 1)[None, None, None]

    def joining(*args: Any, mask: Any, **options: Any) -> Any:
        return fa.nnx.attention_fn(*args, mask=(mask != 0) & rows, **options)

    layer = of_nnx(dtype=jnp.float32, **({"attention_fn": joining} if is_joined else {}))
    stock = of_nnx(nnx.MultiHeadAttention, dtype=jnp.float32)
    x = np.random.default_rng(0).standard_normal((2, 4, FEATURES), np.float32)
    for each in (layer, stock):
        each.init_cache((2, 8, FEATURES))
    for i in range(4):
        out = layer(x[:, i : i + 1], mask=None if is_joined else rows)
        np.testing.assert_allclose(out, stock(x[:, i : i + 1], mask=rows), atol=1e-5)
