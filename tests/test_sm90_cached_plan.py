"""Which requests of a call on a cache are tiles of Hopper's forward, and which the decode kernel's, by shapes and
masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.sm90.cached_forward import (
    CACHED_FORWARD,
    TileConfigs,
    max_decoded,
    unsupported_tiles,
)
from pallas_fa2.parse_cached import parse_cached
from tests.support import hopper


def spec_of(
    tokens: int, requests: int, packed: bool = True, heads: Any = (32, 8), **options: Any
) -> Any:
    """A call on pages of 16 tokens: so many tokens packed, or of each request."""
    shape: Any = jax.ShapeDtypeStruct((64, 16, heads[1], 128), jnp.bfloat16)
    integers = [jax.ShapeDtypeStruct(x, jnp.int32) for x in ((requests, 16), (requests,))]
    starts = jax.ShapeDtypeStruct((requests + 1,), jnp.int32)
    rows = (tokens,) if packed else (requests, tokens)
    q = jax.ShapeDtypeStruct((*rows, heads[0], 128), jnp.bfloat16)
    found: list = []

    def parse(q: Any, shape: Any, table: Any, lengths: Any, starts: Any) -> None:
        queries = fa.Packed(starts) if packed else None
        pages = fa.Pages(shape, shape, table, lengths)
        found.append(parse_cached(q, pages, queries=queries, **{"mask": fa.Causal(), **options})[0])

    jax.eval_shape(parse, q, shape, *integers, starts)
    return found[0]


def config_of(*args: Any, **options: Any) -> Any:
    return CACHED_FORWARD.configure(spec_of(*args, **options), hopper.H200)


# Heads, requests: the tokens of each on an H200 with which entries of the decode kernel take longest, and tiles least.
# Measured (docs/decisions/0087-prompts-on-a-cache.md) at 8 and 16 tokens, at 32, and at 1 and 8; the rest is an
# estimate.
BREAK_EVENS = {((32, 8), 16): (12, 13), ((32, 8), 1): (48, 64), ((32, 32), 16): (5, 6)}


@pytest.mark.parametrize("heads, requests", BREAK_EVENS)
def test_requests_of_many_tokens_are_tiles(heads: Any, requests: int) -> None:
    most, least = BREAK_EVENS[heads, requests]
    for tokens in (1, most):
        assert isinstance(config_of(tokens, requests, False, heads), DecodeConfig)
    for tokens in (least, 128, 3000):
        assert isinstance(config_of(tokens, requests, False, heads), TileConfigs)


def test_of_packed_requests_those_with_many_tokens_are_tiles() -> None:
    """More of them stay with the decode kernel where the tiles of all requests are fewer than multiprocessors."""

    def decoded(*heads: int) -> list[int]:
        return [max_decoded(spec_of(2048, n, heads=heads), 132) for n in (2, 60)]

    assert decoded(32, 8) == [20, 8] and decoded(32, 32) == [8, 4] and decoded(16, 1) == [90, 24]


CODE = fa.Causal() & fa.Prefix(4)


def test_tiles_count_their_blocks_in_15_bits() -> None:
    def reason(capacity: int) -> str | None:
        spec = spec_of(132, 4, mask=None)
        call = dataclasses.replace(spec.call, kv_len=capacity)
        return unsupported_tiles(dataclasses.replace(spec, call=call))

    assert reason(1 << 20) is None and "2097088 slots at most" in str(reason(1 << 21))


@pytest.mark.parametrize("heads", [(32, 8), (1, 1)])
def test_requests_may_be_more_than_packed_tokens(heads: Any) -> None:
    """Those without a token have none in this step."""
    for tokens in range(1, 7):
        spec = spec_of(tokens, 5, heads=heads)
        config = CACHED_FORWARD.configure(spec, hopper.H200)
        assert isinstance(config, DecodeConfig) and CACHED_FORWARD.describe(spec, config)


def test_shapes_and_masks_say_whether_there_are_tiles() -> None:
    # A token of each request, and so many that tiles of one request would save half of the time.
    assert isinstance(config_of(105, 4), DecodeConfig)
    both = config_of(132, 4)
    assert isinstance(both, TileConfigs) and both.decode is not None
    alone = config_of(132, 1)
    assert isinstance(alone, TileConfigs) and alone.decode is None
    no_tiles: list[Any] = [
        {"mask": CODE},
        {"score": fa.bias(jnp.zeros((1, 1, 1, 256)))},
        {"split_size": 64},
        {"scale": -0.1},  # the largest product would be the least score
    ]
    for options in no_tiles:
        spec = spec_of(132, 4, **options)
        config = CACHED_FORWARD.configure(spec, hopper.H200)
        assert isinstance(config, DecodeConfig)
        assert "would take less time, but" in CACHED_FORWARD.describe(spec, config)


def of_8_bits(*args: Any, quantized: str = "int8", **options: Any) -> Any:
    return dataclasses.replace(spec_of(*args, **options), quantized=quantized)


def test_tiles_read_8_bits() -> None:
    """They cost more beside entries that cost less, and their pages have any number of tokens."""
    for tokens, requests, packed in ((20, 16, False), (84, 1, False), (9, 4, True)):
        spec = of_8_bits(tokens, requests, packed)
        assert isinstance(CACHED_FORWARD.configure(spec, hopper.H200), DecodeConfig)
    for tokens, requests, packed in (
        (21, 16, False),
        (85, 1, False),
        (2048, 1, True),
        (2048, 60, True),
    ):
        spec = of_8_bits(tokens, requests, packed)
        config: Any = CACHED_FORWARD.configure(spec, hopper.H200)
        assert isinstance(config, TileConfigs) and config.tiles.subtile_kv == 64
        assert (config.decode is not None) == (requests == 60)
        assert "that read the pages in the pool" in CACHED_FORWARD.describe(spec, config)
        assert unsupported_tiles(dataclasses.replace(spec, page_size=5)) is None


def test_tiles_of_8_bits_are_for_queries_in_bfloat16() -> None:
    spec = of_8_bits(2048, 2)
    call = dataclasses.replace(spec.call, dtype=jnp.dtype("float16"))
    reason = unsupported_tiles(dataclasses.replace(spec, call=call))
    assert "numbers times large scales are infinite" in str(reason)


@pytest.mark.parametrize("page", [None, 64])
def test_tiles_index_8_bits_in_32(page: int | None) -> None:
    def step(slots: int) -> None:
        pool = (slots // page, page) if page else (1, slots)
        of = jax.ShapeDtypeStruct
        numbers, scales = of((*pool, 512, 128), jnp.int8), of((pool[0], 512, pool[1]), jnp.bfloat16)
        table: Any = [of((1, 32), jnp.int32)] if page else []
        kind: Any = fa.Pages if page else fa.Cache
        cache = kind(numbers, numbers, *table, of((1,), jnp.int32), scales, scales)
        with hopper.planned_for_h200():
            jax.eval_shape(fa.cached_attention, of((1, 2048, 512, 128), jnp.bfloat16), cache)

    step(1 << 20)
    with pytest.raises(ValueError, match="here are 68723671040 and 68723671040; divide the cache"):
        step((1 << 20) + 64)


def test_explain_says_which_kernels_run() -> None:
    shape, table = (
        jax.ShapeDtypeStruct((64, 16, 8, 128), jnp.bfloat16),
        jnp.zeros((4, 16), jnp.int32),
    )
    pages: Any = fa.Pages(shape, shape, table, jnp.zeros(4, jnp.int32))  # pyright: ignore
    rows, packed = (jax.ShapeDtypeStruct((*n, 32, 128), jnp.bfloat16) for n in ((4, 9), (2000,)))
    options: Any = {"queries": fa.Packed(jnp.zeros(5, jnp.int32)), "device": hopper.H200}
    explained = [fa.explain(packed, pages, mask=mask, **options).forward for mask in (None, CODE)]
    explained.append(fa.explain(rows, pages, device=hopper.H200).forward)
    few = "requests of up to 8 tokens: 64 keys x 32 columns, for 4 queries of 4 heads"
    tiles = "others: 128 queries x 128 keys, 2 stages"
    assert few in explained[0] and tiles in explained[0]
    assert "tiles would take less time, but its mask is causal, a window" in explained[1]
    assert "for 5 queries" in explained[2] and "128 keys" not in explained[2]
