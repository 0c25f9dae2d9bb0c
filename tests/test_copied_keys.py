"""Copies in 16 bits of caches of 8, which tiles of Hopper's forward read: what is copied, and which calls have one."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa2 as fa
from pallas_fa2.backends.sm90 import cached_forward
from pallas_fa2.backends.sm90.cached_forward import (
    CACHED_FORWARD,
    TileConfigs,
    unsupported_tiles,
)
from pallas_fa2.backends.sm90.forward import copied_keys
from pallas_fa2.ir.quantized import Scales
from tests.support import cached, compile_gate, hopper
from tests.support.tiers import slow
from tests.test_sm90_cached_forward import LENGTHS, check_tiles
from tests.test_sm90_cached_plan import spec_of


@pytest.fixture
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small caches are copied as well, in several chunks, into NaN."""
    monkeypatch.setattr(copied_keys, "CHUNK", 64)
    monkeypatch.setattr(copied_keys, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    monkeypatch.setattr(cached_forward, "_prefers_tiles", lambda spec, num_sms: True)


# The feature, the layout, the dtype, the tokens of a page. The slots behind the longest sequence's chunk are never written.
OF_8_BITS: Any = [
    ("alibi", "paged", "int8", 8),
    ("window", "several", "float8_e4m3fn", 16),
    slow("window", "paged", "float8_e4m3fn", 16),
    slow("score_of_sequences", "several", "int8", 16),
]


@pytest.mark.parametrize("feature, layout, quantized, page", OF_8_BITS)
def test_tiles_read_a_copy_of_8_bits(
    feature: str, layout: str, quantized: str, page: int, small_copies: None
) -> None:
    lengths = np.array([40, 0, 60, 20]) if layout == "paged" else LENGTHS
    check_tiles(feature, layout, page, lengths, quantized=quantized)


# A copy in chunks of 48 slots: the longest sequence ends in the last one, which overlaps another, or in none of the last ones;
# the slots of one page at least are a chunk.
CHUNKS: Any = {
    "contiguous": (False, 16, (150, 0, 140, 20), 48, 4),
    "pages": (True, 16, (150, 0, 140, 20), 48, 4),
    "few": (True, 16, (90, 0, 40, 20), 48, 2),
    "none": (True, 8, (0, 0, 0, 0), 48, 0),
    "out_of_range": (True, 16, (160, 0, 1, 7), 48, 4, (1 << 30, -(1 << 30), 1, 7)),
    "large_pages": (True, 80, (81, 7, 0, 3), 48, 2),
    "whole": (True, 16, (150, 0, 140, 20), 160, 1),
}


fori_loop = lax.fori_loop


@pytest.mark.parametrize("name", CHUNKS)
def test_copies_end_with_the_longest_sequence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind it is not written in whole chunks."""
    paged, page, lengths, chunk, count, *given = CHUNKS[name]
    monkeypatch.setattr(copied_keys, "CHUNK", chunk)
    monkeypatch.setattr(copied_keys, "empty", lambda shape, dtype: jnp.full(shape, 1e30, dtype))
    options: Any = {"capacity": 160, "dtype": jnp.bfloat16, "dims": (64, 64), "quantized": "int8"}
    cache: Any = cached.make(1, paged, np.array(lengths), page=page, **options).cache
    table, scales = cache.table if paged else None, Scales(cache.k_scale, cache.v_scale)
    of_call = jnp.array(given[0] if given else lengths)
    turns = []
    loop = lambda first, end, *rest: turns.append(int(end)) or fori_loop(first, end, *rest)
    monkeypatch.setattr(lax, "fori_loop", loop)
    copies = copied_keys.copy_keys(cache.key, cache.value, table, scales, of_call, jnp.bfloat16)
    assert turns == ([] if chunk >= 160 else [count])
    if paged:
        table = np.clip(table, 0, cache.key.shape[0] - 1)
    for copy, x, scale in zip(copies, (cache.key, cache.value), scales, strict=True):
        whole = np.asarray(x, np.float32) * np.swapaxes(scale, 1, 2).astype(np.float32)[..., None]
        whole = whole[table].reshape(4, 160, *x.shape[2:]) if paged else whole
        written = min(160, count * max(page * (chunk // page), page))
        for b, length in enumerate(lengths):
            np.testing.assert_array_equal(copy[b, :length], whole[b, :length].astype(jnp.bfloat16))
        behind = np.asarray(copy[:, written:], np.float32)
        assert behind.size == 0 or (behind == np.float32(jnp.bfloat16(1e30))).all()


def of_8_bits(
    tokens: int, requests: int = 1, packed: bool = False, capacity: int = 4096, **options: Any
) -> Any:
    spec = spec_of(tokens, requests, packed, **options)
    call = dataclasses.replace(spec.call, kv_len=capacity)
    return dataclasses.replace(spec, call=call, quantized="int8")


def has_copy(spec: Any) -> bool:
    """Whether a call's tiles read a copy; else they would take less time, or its description says why there are none."""
    config = CACHED_FORWARD.configure(spec, hopper.H200)
    is_copied = isinstance(config, TileConfigs)
    assert CACHED_FORWARD.copies_keys(spec, config) == is_copied
    text = CACHED_FORWARD.describe(spec, config)
    assert ("that read a copy of the keys in bfloat16" in text) == is_copied
    return is_copied


def test_a_copy_of_8_bits_has_to_be_worth_it() -> None:
    """It costs as much as some tokens of each request do, and more under a window, where others read few keys."""
    assert not has_copy(of_8_bits(64)) and has_copy(of_8_bits(128))
    assert not has_copy(of_8_bits(64, packed=True)) and has_copy(of_8_bits(128, packed=True))
    assert not has_copy(of_8_bits(16, 16)) and has_copy(of_8_bits(64, 16))
    window = {"mask": fa.SlidingWindow(128)}
    assert has_copy(of_8_bits(128, capacity=256, **window))
    assert not has_copy(of_8_bits(128, **window))
    assert not has_copy(of_8_bits(2048, packed=True, capacity=32_768, **window))
    assert has_copy(of_8_bits(2048, capacity=32_768, mask=fa.SlidingWindow(20_000)))


def test_calls_without_a_copy_of_8_bits() -> None:
    def reason(spec: Any, **changes: Any) -> str | None:
        call = dataclasses.replace(spec.call, **changes)
        return unsupported_tiles(dataclasses.replace(spec, call=call))

    assert reason(of_8_bits(2048, 2)) is None
    assert "may have no prompt" in str(reason(of_8_bits(2048, 2, packed=True)))
    float16 = {"dtype": jnp.dtype("float16")}
    assert "in float16, where numbers times large scales" in str(reason(of_8_bits(9), **float16))
    assert reason(of_8_bits(9, capacity=131_072)) is None
    spec = of_8_bits(2048, capacity=131_072 + 16)
    assert "has 512 MiB at most, and here 512.1" in str(reason(spec))
    assert not has_copy(spec) and "has 512 MiB" in CACHED_FORWARD.describe(
        spec, CACHED_FORWARD.configure(spec, hopper.H200)
    )
    # The equivalent call would copy as much: the decode kernel reads no pages of 4 tokens.
    assert reason(dataclasses.replace(spec, page_size=4)) is None
    assert reason(dataclasses.replace(spec, page_size=4), **float16) is None


def test_explain_counts_a_copy_of_8_bits() -> None:
    """Of 4 sequences of 4096 slots with 8 heads and 2 times 128 numbers of 2 bytes; the decode kernel has none."""
    cache = jax.eval_shape(
        lambda: fa.Cache.zeros(4, 4096, kv_heads=8, head_dim=128, dtype=jnp.int8)
    )
    for tokens, copied in ((1, 0), (512, 4 * 4096 * 8 * 256 * 2)):
        q = jax.ShapeDtypeStruct((4, tokens, 32, 128), jnp.bfloat16)
        explanation: Any = fa.explain(q, cache, device=hopper.H200)
        assert explanation.implementation == "hopper" and explanation.copied_bytes == copied
        assert ("67.11 MB of keys and values in bfloat16" in str(explanation)) == (copied > 0)


@pytest.mark.slow
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
def test_a_copy_of_8_bits_is_written_in_place(paged: bool) -> None:
    """No pool and no copy is copied, and there is one loop."""

    def run(q: Any, cache: Any) -> Any:
        return fa.cached_attention(q, cache)

    def make() -> Any:
        options: Any = {"kv_heads": 8, "head_dim": 128, "dtype": jnp.int8}
        if paged:
            return fa.Pages.zeros(4096, 64, table=jnp.zeros((1, 512), jnp.int32), **options)
        return fa.Cache.zeros(1, 32_768, **options)

    q = jax.ShapeDtypeStruct((1, 2048, 32, 128), jnp.bfloat16)
    with hopper.planned_for_h200():
        program = compile_gate.hlo_for_h200(run, q, jax.eval_shape(make))
    large = r"(s8|bf16)\[(1,32768|4096,64),8,128\]\S* "
    assert program.count(" while(") == 1
    assert not re.search(large + r"(copy|transpose|pad|concatenate)\(", program)
    assert len(re.findall(large + r"dynamic-update-slice\(", program)) == 2
