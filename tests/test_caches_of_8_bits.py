"""Caches of 8 bits: what is appended and with which scales, what it stands for, and which arrays are refused."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, SingleDeviceSharding

import pallas_fa2 as fa
from pallas_fa2.ir.quantized import quantize
from tests.support import compile_gate
from tests.support.small_caches import (
    PAGE,
    QUANTIZED,
    RNG,
    TABLE,
    TOKEN,
    B,
    H,
    K,
    S,
    append,
    contiguous,
    empty,
    random_tokens,
)
from tests.support.tiers import slow

OF_8_BITS = pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
LAYOUTS = pytest.mark.parametrize("layout", QUANTIZED)
LARGEST = {"float8_e4m3fn": 448, "int8": 127}


def _rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The numbers in 8 bits of tokens `[..., H]`, and their scales."""
    scale = (np.abs(x).max(-1) / np.float32(LARGEST[dtype])).astype(jnp.bfloat16)
    ratio = np.clip(x / scale.astype("f")[..., None], -LARGEST[dtype], LARGEST[dtype])
    return (np.round(ratio) if dtype == "int8" else ratio).astype(dtype), scale


@OF_8_BITS
@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_tokens_are_appended_in_8_bits(layout: str, dtype: str, packed: bool) -> None:
    """Each token of each head by its own scale, where its numbers are; nothing else is written."""
    tokens = np.exp2(RNG.integers(-9, 9, (B, 3, K, 1))).astype("f") * random_tokens(B, 3, K, H)
    x, options = tokens, {"new": np.array([2, 0, 1], np.int32)}
    if packed:
        x = np.concatenate([tokens[0, 1:], tokens[2, 2:], tokens[1, :1]])
        options = {"queries": fa.Packed(np.array([0, 2, 2, 3], np.int32))}
    cache = QUANTIZED[layout](dtype)
    after = append(cache, x, **options)
    numbers, scales = _rounded(tokens, dtype)
    written = [(0, 0, 1), (0, 1, 2), (2, 11, 2)]  # sequence, position, token of its row
    for name, negative in (("key", False), ("value", True)):
        expected = np.zeros_like(np.asarray(cache.key, "f"))
        expected_scales = np.zeros_like(np.asarray(cache.k_scale, "f"))
        for b, i, t in written:
            slot = (b, i) if layout == "cache" else (TABLE[b, i // PAGE], i % PAGE)
            expected[slot] = numbers[b, t].astype("f") * (-1 if negative else 1)
            expected_scales[slot[0], :, slot[1]] = scales[b, t]
        np.testing.assert_array_equal(np.asarray(getattr(after, name), "f"), expected)
        found = np.asarray(getattr(after, f"{name[0]}_scale"), "f")
        np.testing.assert_array_equal(found, expected_scales)
        assert getattr(after, name).dtype == dtype


def test_on_a_gpu_tokens_are_divided_by_the_scales_that_are_stored() -> None:
    """XLA's compiler for GPUs leaves out conversions to bfloat16 and back."""
    place = SingleDeviceSharding(compile_gate.h200s(1)[0])
    x = jax.ShapeDtypeStruct((2, 3, 64), jnp.bfloat16, sharding=place)
    compiled = jax.jit(lambda x: quantize(x, jnp.int8)).lower(x).compile()
    assert "reduce-precision(" in compiled.as_text()


@OF_8_BITS
def test_what_8_bits_stand_for(dtype: str) -> None:
    """Within half a step of the largest element of a token and head, whatever its size; zeros are zeros."""
    sizes = np.float32([1e-30, 3e-4, 1, 7e4, 1e30, 0, 1e-38])
    x = sizes[:, None, None] * RNG.uniform(0.1, 1, (1, 7, K, H)).astype("f")
    cache = fa.Cache.zeros(1, 8, kv_heads=K, head_dim=H, dtype=dtype)
    plain = append(cache, x).dequantize(jnp.float32)
    assert plain.key.dtype == jnp.float32 and plain.k_scale is None
    off = np.abs(np.asarray(plain.key)[:, :7] - x)
    step = 2**-7 if dtype == "int8" else 2**-4
    assert (off <= step * np.abs(x).max(-1, keepdims=True) + 1e-38).all()
    np.testing.assert_array_equal(plain.key[0, 5], 0)
    np.testing.assert_array_equal(plain.key, -plain.value)
    assert cache.dequantize(jnp.float32).key.dtype == jnp.float32
    assert contiguous().dequantize().key.dtype == jnp.float32  # it stands for itself


@OF_8_BITS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tokens_that_are_not_finite_stay_so(dtype: str, value: float) -> None:
    x = np.ones((1, 1, K, H), "f")
    x[0, 0, 1, 2] = value
    cache = fa.Cache.zeros(1, 8, kv_heads=K, head_dim=H, dtype=dtype)
    plain = np.asarray(append(cache, x).dequantize(jnp.float32).key)
    assert not np.isfinite(plain[0, 0, 1, 2]) and np.isfinite(plain[0, 0, 0]).all()


@OF_8_BITS
@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_a_donated_cache_of_8_bits_is_written_in_place(
    layout: str, dtype: str, packed: bool
) -> None:
    x = jnp.ones((3, K, H) if packed else (B, 1, K, H), jnp.bfloat16)
    queries = fa.Packed(jnp.array([0, 1, 2, 3], jnp.int32)) if packed else None
    cache = jax.eval_shape(lambda: QUANTIZED[layout](dtype))

    def step(cache: Any, x: Any, queries: Any) -> Any:
        return cache.append(x, x, queries=queries)

    compiled = jax.jit(step, donate_argnames="cache").lower(cache, x, queries).compile()
    sizes = [x.size * x.dtype.itemsize for x in (cache.key, cache.k_scale)]
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * sum(sizes)
    for x in (cache.key, cache.k_scale):
        shape = ",".join(map(str, x.shape))
        assert not re.findall(rf"\[{shape}\][^ ]* (?:copy|transpose)\(.*", compiled.as_text())


@LAYOUTS
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit], ids=str)
def test_heads_of_a_cache_of_8_bits_stay_divided_over_gpus(
    kind: AxisType, layout: str, packed: bool
) -> None:
    """Nothing is gathered, and nothing runs in a loop."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",), axis_types=(kind,))
    cache = jax.eval_shape(lambda: QUANTIZED[layout]("int8"))
    x = jax.ShapeDtypeStruct((3, K, H) if packed else (B, 1, K, H), jnp.bfloat16)
    queries = fa.Packed(jax.ShapeDtypeStruct((B + 1,), jnp.int32)) if packed else None

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # heads of tokens are behind the tokens, those of scales before them
        axis = x.ndim - 2 if x.ndim > 2 else None
        spec = jax.P(*("x" if i == axis else None for i in range(x.ndim)))
        return x.update(sharding=jax.NamedSharding(mesh, spec))

    def step(cache: Any, x: Any, queries: Any) -> Any:
        return cache.append(x, x, queries=queries)

    with jax.set_mesh(mesh):
        args = jax.tree.map(place, (cache, x, queries))
        text = jax.jit(step, donate_argnames="cache").lower(*args).compile().as_text()
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute| while[(]", text)


@pytest.mark.parametrize(
    "message, changes",
    [
        (r"k_scale must be bfloat16\[3, 2, 12\]", {"k_scale": None}),
        (r"v_scale must be bfloat16\[3, 2, 12\].*float32\[3, 2, 12\]", {"v_scale": jnp.ones((B, K, S))}),
        (r"k_scale must be bfloat16\[3, 2, 12\]", {"k_scale": jnp.ones((B, S, K), jnp.bfloat16)}),
        (r"must have one dtype where they have 8 bits", {"value": jnp.zeros((B, S, K, H), jnp.float8_e4m3fn)}),
        (r"k_scale must be None where key and value have 32 bits", {"key": jnp.zeros((B, S, K, H)), "value": jnp.zeros((B, S, K, H))}),
        (r"must be floats of 16 bits or more, or both float8_e4m3fn or int8", {"key": jnp.zeros((B, S, K, H), jnp.float8_e5m2)}),
    ],
)  # fmt: skip
def test_scales_fit_the_cache(message: str, changes: dict) -> None:
    cache = dataclasses.replace(empty("int8"), **changes)
    for call in (
        lambda: cache.append(TOKEN, TOKEN),
        cache.dequantize,
        lambda: fa.cached_attention(TOKEN, cache),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_what_is_appended_in_8_bits_are_floats() -> None:
    token = TOKEN.astype(jnp.int8)
    with pytest.raises(
        TypeError, match="key must be bfloat16, float16 or float32 for a cache of 8"
    ):
        empty("int8").append(token, token)
