"""The decode kernel of Hopper, compiled for an H200: spills, shared memory, and what stands beside the kernel in a
program.

tests/test_sm90_decode.py interprets it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode.schedule import plan_decode
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.sm90.decode.config import BARRIER_BYTES, choose, shared_bytes
from pallas_fa2.backends.sm90.decode.kernel import decode
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.ir.quantized import Scales
from tests.support import compile_gate, hopper
from tests.support.decode_cases import (
    CAUSAL,
    FP8,
    FULL,
    INT8,
    MODS,
    mods_of,
)
from tests.support.tiers import slow, slow_but

# Requests, queries of each, (N, K), (H, Hv), size of pages, distances: with a capacity of 8192.
COMPILED: dict[str, tuple] = {
    "group_4": (16, 1, (32, 8), (128, 128), None, CAUSAL),
    "pages_16": (16, 1, (32, 8), (128, 128), 16, CAUSAL),
    "pages_256": (16, 1, (32, 8), (128, 128), 256, CAUSAL),
    "mha": (16, 1, (32, 32), (128, 128), None, CAUSAL),
    "group_12": (16, 1, (96, 8), (128, 128), None, CAUSAL),
    "window": (16, 1, (32, 8), (128, 128), None, DistanceRange(-1023, 0)),
    "full": (16, 1, (32, 8), (128, 128), None, FULL),
    "queries_4": (16, 4, (32, 8), (128, 128), None, CAUSAL),
    "columns_64": (16, 8, (64, 8), (128, 128), None, CAUSAL),
    "columns_64_pages": (16, 8, (64, 8), (128, 128), 16, CAUSAL),
    "columns_64_window": (16, 8, (64, 8), (128, 128), None, DistanceRange(-511, 0)),
    "columns_64_mqa": (16, 1, (64, 1), (128, 128), None, CAUSAL),
    "h64": (16, 1, (32, 8), (64, 64), None, CAUSAL),
    "h64_columns_64": (16, 8, (64, 8), (64, 64), None, CAUSAL),
    "h64_columns_64_pages_fixed_splits": (16, 8, (64, 8), (64, 64), 16, CAUSAL, None, 32),
    "columns_32_mqa": (16, 1, (32, 1), (128, 128), None, CAUSAL),
    "h80": (16, 1, (32, 8), (80, 80), 64, CAUSAL),
    "h192_hv128": (16, 1, (32, 8), (192, 128), None, CAUSAL),
    "h256": (16, 1, (32, 8), (256, 256), None, CAUSAL),
    "h256_queries_4": (16, 4, (32, 8), (256, 256), None, CAUSAL),
    "fixed_splits": (16, 1, (32, 8), (128, 128), None, CAUSAL, None, 32),
    "columns_64_pages_fixed_splits": (16, 8, (64, 8), (128, 128), 16, CAUSAL, None, 32),
}
# Where a request has two entries, or a group two parts.
COMPILED_IN_PIECES: dict[str, tuple] = {
    "entries": (16, 8, (64, 8), (128, 128), None, CAUSAL, None, None, 2),
    "entries_pages_window": (16, 8, (64, 8), (128, 128), 16, DistanceRange(-511, 0), None, None, 2),
    "entries_fixed_splits": (16, 8, (64, 8), (128, 128), 16, CAUSAL, None, 32, 2),
    "entries_h256": (16, 4, (32, 8), (256, 256), None, CAUSAL, None, None, 2),
    "entries_with_tables": (300, 8, (64, 8), (128, 128), None, CAUSAL, None, None, 2),
    "parts": (16, 1, (128, 2), (128, 128), 16, CAUSAL, None, None, 1, 2),
    "parts_and_entries": (16, 1, (128, 2), (128, 128), None, CAUSAL, None, None, 2, 2),
    "int8_entries": (16, 4, (32, 8), (128, 128), 16, CAUSAL, INT8, None, 2),
    "fp8_parts": (16, 1, (64, 2), (128, 128), 64, CAUSAL, FP8, None, 1, 2),
}
# With 64 columns all registers are in use. What the store of a tile and the merge need, a thread stores before the loop
# over blocks, so many bytes, and loads after it; by jax 0.12's LLVM more.
SPILLS_OF_COLUMNS: dict[str, int] = {}
SPILLS_OF_PIECES = {"entries_pages_window": 64, "parts": 200, "parts_and_entries": 16}
if jax.__version_info__ >= (0, 12):
    SPILLS_OF_COLUMNS = {"columns_64_pages": 152}
    SPILLS_OF_PIECES = {"entries_pages_window": 152, "parts": 240, "parts_and_entries": 16}
COMPILED_QUICKLY = {"group_4", "pages_16", "columns_64_window", "h256_queries_4"}
COMPILED_OF_8_BITS: dict[str, tuple] = {
    "group_4": (16, 1, (32, 8), (128, 128), None, CAUSAL, FP8),
    "int8": (16, 1, (32, 8), (128, 128), None, CAUSAL, INT8),
    "pages_8": (16, 4, (32, 8), (128, 128), 8, CAUSAL, FP8),
    "pages_64": (16, 1, (32, 8), (128, 128), 64, CAUSAL, FP8),
    "int8_pages_16": (16, 4, (32, 8), (128, 128), 16, CAUSAL, INT8),
    "window": (16, 4, (32, 8), (128, 128), None, DistanceRange(-511, 0), INT8),
    "full": (16, 4, (64, 8), (128, 128), None, FULL, FP8),
    "h64": (16, 4, (32, 8), (64, 64), None, CAUSAL, INT8),
    "h64_pages": (16, 4, (32, 8), (64, 64), 16, CAUSAL, FP8),
    "h192_hv128": (16, 2, (32, 8), (192, 128), None, CAUSAL, FP8),
    "h256": (16, 2, (32, 8), (256, 256), 16, CAUSAL, INT8),
    "h256_window": (16, 2, (32, 8), (256, 256), None, DistanceRange(-511, 0), FP8),
    "float16": (16, 4, (32, 8), (128, 128), None, CAUSAL, FP8, None, 1, 1, jnp.float16),
    "h256_column": (16, 1, (32, 8), (256, 256), None, CAUSAL, FP8),
}
COMPILED_QUICKLY_OF_8_BITS = {"group_4", "int8_pages_16", "h256_window", "float16"}


@pytest.mark.parametrize("name", slow_but(COMPILED_QUICKLY.__contains__, COMPILED))
def test_compiles_clean(name: str) -> None:
    compile_clean(*COMPILED[name], spills=SPILLS_OF_COLUMNS.get(name, 0))


@pytest.mark.parametrize(
    "name", slow_but(COMPILED_QUICKLY_OF_8_BITS.__contains__, COMPILED_OF_8_BITS)
)
def test_8_bits_compile_clean(name: str) -> None:
    compile_clean(*COMPILED_OF_8_BITS[name])


@pytest.mark.parametrize(
    "name", slow_but(lambda name: name == "entries_pages_window", COMPILED_IN_PIECES)
)
def test_pieces_compile_clean(name: str) -> None:
    compile_clean(*COMPILED_IN_PIECES[name], spills=SPILLS_OF_PIECES.get(name, 0))


def without_spills(report: compile_gate.KernelReport, most: int) -> compile_gate.KernelReport:
    """The report of a kernel that spills so many bytes, and none in the loop over blocks, as if it did not."""
    if not most:
        return report
    assert report.spill_stores <= most
    assert compile_gate.spills_while_multiplying(report) == 0
    return dataclasses.replace(report, spill_stores=0, spill_loads=0)


def compile_clean(
    requests: int,
    queries: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    page_size: int | None,
    distances: DistanceRange,
    quantized: str | None = None,
    split_blocks: int | None = None,
    per_request: int = 1,
    parts: int = 1,
    dtype: Any = jnp.bfloat16,
    spills: int = 0,
) -> None:
    """`queries` are those of an entry, and the second of `heads` counts the parts of groups."""
    (n, tile_heads), entries, capacity = heads, requests * per_request, 8192
    tokens, kv_heads = entries * queries, tile_heads // parts
    spec = DecodeSpec(
        *(entries, queries, tokens, capacity, n, tile_heads, *dims, 0.125, distances, page_size),
        split_blocks=split_blocks,
        quantized=quantized,
        entries_per_request=per_request,
        parts=parts,
    )
    config = choose(spec, 132)
    assert config is not None

    def run(q: Any, k: Any, v: Any, lengths: Any, table: Any, scales: Any) -> Any:
        plan = plan_decode(spec, config, lengths)
        return decode(spec, config, q, k, v, plan, table, scales=scales)

    keys, table, scales = (requests, capacity), None, None
    if page_size is not None:
        keys = requests * capacity // page_size, page_size
        table = jax.ShapeDtypeStruct((requests, capacity // page_size), jnp.int32)
    if quantized is not None:
        shape = keys[0], kv_heads, keys[1]
        scales = Scales(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16),) * 2)
    q = jax.ShapeDtypeStruct((tokens, n, dims[0]), dtype)
    arrays = [
        jax.ShapeDtypeStruct((*keys, kv_heads, dim), quantized or jnp.bfloat16) for dim in dims
    ]
    lengths = jax.ShapeDtypeStruct((requests,), jnp.int32)
    (report,) = compile_gate.compile_for_h200(run, q, *arrays, lengths, table, scales)
    compile_gate.assert_clean(without_spills(report, spills))
    # all CTAs of an SM fit its registers and its shared memory
    assert config.ctas_per_sm * report.registers * 128 <= 65_536
    assert config.ctas_per_sm * (report.smem_bytes + 1024) <= 228 << 10
    counted = shared_bytes(spec, config.head_dim, config.value_dim, config.stages)
    assert 0 <= counted - report.smem_bytes < BARRIER_BYTES


def test_a_call_on_8_bits_is_one_kernel() -> None:
    """XLA has nothing to compute before it: the kernel makes operands of queries."""
    cache = jax.eval_shape(lambda: fa.Cache.zeros(4, 4096, kv_heads=8, head_dim=128, dtype=INT8))

    def run(q: Any, cache: Any) -> Any:
        return fa.cached_attention(q, cache, implementation="hopper")

    q = jax.ShapeDtypeStruct((4, 1, 32, 128), jnp.bfloat16)
    hlo = compile_gate.hlo_for_h200(run, q, cache)
    entry = hlo[hlo.index("ENTRY") :]
    assert entry.count("custom-call(") == 1
    assert not any(f" {x}(" in entry for x in ("fusion", "copy", "broadcast", "call"))


def test_the_cache_is_not_copied() -> None:
    """Between the arguments and the kernel there are operations on small arrays alone."""
    spec = DecodeSpec(4, 1, 4, 8192, 32, 8, 128, 128, 0.125, CAUSAL)
    config = choose(spec, 132)
    assert config is not None

    def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        return decode(spec, config, q, k, v, plan_decode(spec, config, lengths))

    q, k = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((4, 32, 128), (4, 8192, 8, 128)))
    temporary = compile_gate.temporary_bytes_for_h200(
        run, q, k, k, jax.ShapeDtypeStruct((4,), jnp.int32)
    )
    assert temporary < 4 << 20 < k.size * 2


def entry_of_layers(count: int, page_size: int | None, packed: bool) -> str:
    """The program of layers that attend to caches of the same lengths, as XLA compiles it for an H200."""

    def run(q: Any, layers: list[Any], lengths: Any, table: Any, starts: Any) -> Any:
        queries = fa.Packed(starts) if packed else None
        for k, v in layers:
            cache = fa.Pages(k, v, table, lengths) if page_size else fa.Cache(k, v, lengths)
            q = fa.cached_attention(q, cache, queries=queries)
        return q

    keys = (4, 8192) if page_size is None else (4 * 8192 // page_size, page_size)
    k = jax.ShapeDtypeStruct((*keys, 8, 128), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((7, 32, 128) if packed else (4, 1, 32, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((4, 8192 // (page_size or 64)), jnp.int32)
    integers = (jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, 5))
    with hopper.planned_for_h200():
        lengths, starts = integers
        program = compile_gate.hlo_for_h200(run, q, [(k, k)] * count, lengths, table, starts)
    return program[program.index("ENTRY") :]


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_decode_step_is_one_kernel(page_size: int | None) -> None:
    entry = entry_of_layers(1, page_size, packed=False)
    assert entry.count("custom-call(") == 1
    assert not any(f" {other}(" in entry for other in ("fusion", "copy", "broadcast", "call"))


def test_layers_of_packed_queries_share_a_plan() -> None:
    """XLA makes the tables once where layers of a program have the same lengths, and copies no cache."""
    one, two = (entry_of_layers(count, None, packed=True) for count in (1, 2))
    assert (one.count("custom-call("), two.count("custom-call(")) == (1, 2)
    assert one.count(" fusion(") == two.count(" fusion(") > 0
    assert " copy(" not in two


# As `SPILLS_OF_COLUMNS`, with these masks and scores.
SPILLS = {"streaming": 32, "images": 64, "tree": 40, "bias": 128, "dense": 32}


@pytest.mark.parametrize("queries", [1, slow(4), slow(8)])
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("alibi", "bias"), MODS))
def test_mods_compile_clean(name: str, queries: int) -> None:
    """With 64 columns if there are 4 queries, and two entries if there are 8."""
    shape = 4, 64, queries, 4096

    def run(q: Any, k: Any, v: Any, lengths: Any) -> Any:
        options = mods_of(name, shape)
        return fa.cached_attention(q, fa.Cache(k, v, lengths), implementation="hopper", **options)

    arrays = [
        jax.ShapeDtypeStruct(x, jnp.bfloat16)
        for x in ((4, queries, 64, 128), (4, 4096, 4, 128), (4, 4096, 4, 128))
    ]
    with hopper.planned_for_h200():
        (report,) = compile_gate.compile_for_h200(run, *arrays, jax.ShapeDtypeStruct((4,), "int32"))
    assert report.name.startswith("decode")
    spills = SPILLS.get(name, 0) if queries > 1 else 0
    compile_gate.assert_clean(without_spills(report, spills))


def test_mods_are_lowered_with_x64() -> None:
    with jax.enable_x64(True):
        test_mods_compile_clean("alibi", 1)


@pytest.mark.parametrize("name", slow_but(lambda name: name == "tree", MODS))
def test_mods_of_8_bits_compile_clean(name: str) -> None:
    """With as many columns as a tile has."""
    shape = 4, 32, 4, 4096

    def run(q: Any, cache: Any) -> Any:
        return fa.cached_attention(q, cache, implementation="hopper", **mods_of(name, shape))

    cache = jax.eval_shape(lambda: fa.Cache.zeros(4, 4096, kv_heads=4, head_dim=128, dtype=INT8))
    q = jax.ShapeDtypeStruct((4, 4, 32, 128), jnp.bfloat16)
    with hopper.planned_for_h200():
        (report,) = compile_gate.compile_for_h200(run, q, cache)
    compile_gate.assert_clean(report)
