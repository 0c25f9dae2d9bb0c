"""The forward of Hopper on a cache, compiled for an H200: spills and shared memory. tests/test_sm90_cached_forward.py
interprets it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.sm90.cached_forward import (
    CACHED_FORWARD,
    TileConfigs,
    unsupported_tiles,
)
from pallas_fa2.backends.sm90.configs import cached_forward_config
from pallas_fa2.parse_cached import parse_cached
from tests.support import compile_gate
from tests.support.tiers import slow_but

WINDOW = {"mask": fa.SlidingWindow(1000)}
SOFT_CAP = {"score": fa.soft_cap(30.0)}
# H and Hv, size of pages, options
COMPILED: dict[str, tuple[tuple[int, int], int | None, Any]] = {
    "h128": ((128, 128), None, {}),
    "h128_pages_16": ((128, 128), 16, {}),
    "h128_pages_64": ((128, 128), 64, {}),
    "h128_pages_256": ((128, 128), 256, {}),
    "h64": ((64, 64), None, {}),
    "h64_pages_16": ((64, 64), 16, {}),
    "h64_pages_64": ((64, 64), 64, {}),
    **{
        f"h{h}_hv{hv}_{name}": ((h, hv), page, {})
        for h, hv in ((96, 96), (192, 128), (192, 192), (256, 256))
        for name, page in (("contiguous", None), ("pages_16", 16))
    },
    **{
        f"h{h}_{name}_{kind}": ((h, h), page, options)
        for h in (64, 96, 128, 192, 256)
        for name, options in (
            ("window", WINDOW),
            ("soft_cap", SOFT_CAP),
            ("soft_cap_window", SOFT_CAP | WINDOW),
            ("alibi", {"score": fa.alibi(32)}),
        )
        for kind, page in (("contiguous", None), ("pages_16", 16))
    },
}
COMPILED_QUICKLY = {"h128", "h128_pages_16", "h64_pages_16"}


def compile_tiles(
    dims: tuple[int, int], page_size: int | None, options: Any, quantized: str | None = None
) -> compile_gate.KernelReport:
    """Compile a launch that has tiles alone, of packed queries."""
    tokens, requests, capacity, dtype = 4096, 16, 8192, quantized or jnp.bfloat16
    capacity -= capacity % (page_size or 1)
    tiles = cached_forward_config(*dims, eight_bits=quantized is not None)
    assert tiles is not None

    def run(q: Any, keys: Any, lengths: Any, starts: Any, table: Any, scales: Any) -> Any:
        make: Any = fa.Cache if table is None else functools.partial(fa.Pages, table=table)
        cache = make(*keys, lengths=lengths, **scales)
        spec, operands = parse_cached(
            q, cache, queries=fa.Packed(starts), **{"mask": fa.Causal(), **options}
        )
        assert unsupported_tiles(spec) is None
        return CACHED_FORWARD.forward(spec, TileConfigs(None, 0, tiles), q, *keys, operands)

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows, table = (requests, capacity), None
    if page_size is not None:
        rows = requests * capacity // page_size, page_size
        table = array(requests, capacity // page_size)
    q = array(tokens, 32, dims[0], dtype=jnp.bfloat16)
    keys = [array(*rows, 8, n, dtype=dtype) for n in dims]
    scale = array(rows[0], 8, rows[1], dtype=jnp.bfloat16)
    scales = {"k_scale": scale, "v_scale": scale} if quantized else {}
    lengths, starts = array(requests), array(requests + 1)
    (report,) = compile_gate.compile_for_h200(run, q, keys, lengths, starts, table, scales)
    return report


@pytest.mark.parametrize("name", slow_but(COMPILED_QUICKLY.__contains__, COMPILED))
def test_compiles_clean(name: str) -> None:
    dims, page_size, options = COMPILED[name]
    assert_clean(compile_tiles(dims, page_size, options), options)


def assert_clean(report: compile_gate.KernelReport, options: Any) -> None:
    if "score" in options:
        # What is known of a tile is stored before its blocks, and loaded where they begin and after them.
        assert compile_gate.spills_while_multiplying(report) == 0
        assert report.spill_stores <= 56 and report.spill_loads <= 96
        report = dataclasses.replace(report, spill_stores=0, spill_loads=0)
    compile_gate.assert_clean(report)


# H and Hv, size of pages, options, dtype
COMPILED_OF_8_BITS: Any = {
    "h128": ((128, 128), 64, {}, "int8"),
    "h128_float8": ((128, 128), 16, {}, "float8_e4m3fn"),
    "h128_contiguous": ((128, 128), None, {}, "int8"),
    "h128_soft_cap_window": ((128, 128), 64, SOFT_CAP | WINDOW, "int8"),
    "h128_alibi": ((128, 128), None, {"score": fa.alibi(32)}, "float8_e4m3fn"),
    "h128_pages_24": ((128, 128), 24, {}, "int8"),  # threads find the pages of their rows
    "h64": ((64, 64), 64, {}, "int8"),
    "h96": ((96, 96), 64, {}, "int8"),
    "h192": ((192, 192), 64, {}, "int8"),
    "h192_hv128": ((192, 128), 64, {}, "int8"),
    "h256": ((256, 256), 64, {}, "int8"),
    "h256_alibi_window": ((256, 256), 16, {"score": fa.alibi(32)} | WINDOW, "int8"),
}


@pytest.mark.parametrize("name", slow_but("h128".__eq__, COMPILED_OF_8_BITS))
def test_8_bits_compile_clean(name: str) -> None:
    dims, page_size, options, quantized = COMPILED_OF_8_BITS[name]
    assert_clean(compile_tiles(dims, page_size, options, quantized), options)
