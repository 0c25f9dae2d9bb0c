"""Kernels that read a cache, interpreted, with every feature that `cached_attention` has."""

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.device import Device
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.planning.cached_plan import make_cached_plan
from tests.support import cached, compile_gate, interpreter
from tests.support.cached_features import (
    FEATURES,
    LAYOUTS,
    Feature,
    check_on_the_kernel,
    on_the_kernel,
)
from tests.support.hopper import A100, H200, planned_for, planned_for_h200
from tests.support.tiers import slow, slow_but


@pytest.mark.parametrize("layout", slow_but(lambda name: "paged" in name, LAYOUTS))
@pytest.mark.parametrize("feature", FEATURES)
def test_features_on_the_kernel_of_hopper(feature: str, layout: str) -> None:
    check_on_the_kernel(on_the_kernel(layout), FEATURES[feature])


def _is_quick_of_8_bits(name: str) -> bool:
    return name in ("window", "streaming", "token_data", "bias")


@pytest.mark.parametrize("layout", slow_but(lambda name: name in ("one", "packed_paged"), LAYOUTS))
@pytest.mark.parametrize("feature", slow_but(_is_quick_of_8_bits, FEATURES))
def test_features_of_8_bits_on_the_kernel_of_hopper(feature: str, layout: str) -> None:
    quantized = "int8" if layout in ("several", "packed_paged") else "float8_e4m3fn"
    check_on_the_kernel(on_the_kernel(layout, quantized=quantized), FEATURES[feature])


GROUPS = [(layout, heads) for heads in ((4, 4), (4, 1), (12, 1)) for layout in LAYOUTS]


@pytest.mark.parametrize(
    "layout, heads", [x if x[0] == "packed_paged" else slow(*x) for x in GROUPS]
)
def test_grouped_heads_on_the_kernel_of_hopper(layout: str, heads: tuple[int, int]) -> None:
    check_on_the_kernel(on_the_kernel(layout, heads=heads), FEATURES["causal"])


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], slow([24, 24, 24, 24])], ids=["empty", "full"])
@pytest.mark.parametrize("layout", slow_but(lambda name: name == "paged", LAYOUTS))
def test_empty_and_full_sequences_on_the_kernel_of_hopper(layout: str, lengths: list[int]) -> None:
    counts = {"counts": np.minimum(cached.COUNTS, lengths)} if "packed" in layout else {}
    problem = on_the_kernel(layout, lengths=np.array(lengths), **counts)
    check_on_the_kernel(problem, FEATURES["key_bias"])


@pytest.mark.parametrize("counts", [[1, 0, 1, 1], slow([0, 0, 0, 0]), slow([0, 0, 9, 0])], ids=str)
def test_packed_starts_on_the_kernel_of_hopper(counts: list[int]) -> None:
    check_on_the_kernel(on_the_kernel("packed", counts=np.array(counts)), FEATURES["sinks"])


MANY = "causal", "window", "streaming", "token_data", "bias", "positions", "alibi", "sinks"
DEVICES = pytest.mark.parametrize("device", [H200, A100], ids=["hopper", "ampere"])


@DEVICES
@pytest.mark.parametrize("feature", slow_but(lambda name: name in ("window", "bias"), MANY))
def test_more_queries_than_columns(feature: str, device: Device) -> None:
    """17 of each sequence: three entries, of which the last one has fewer."""
    problem = cached.make(17, dtype=jnp.bfloat16, dims=(64, 128), page=8, paged=True)
    spec, _ = parse_cached(problem.query, problem.cache)
    assert DecodeSpec.of_call(spec).entries_per_request == 3
    check_on_the_kernel(problem, FEATURES[feature], device)


@DEVICES
def test_a_tree_of_32_tokens(device: Device) -> None:
    """Each token attends to its parent, which is the one before the last, and to all ancestors."""
    problem = cached.make(
        32, dtype=jnp.bfloat16, dims=(64, 64), lengths=np.array([70, 40, 66]), capacity=72, page=8,
        paged=True,
    )  # fmt: skip
    parents = np.arange(32) // 2 - (np.arange(32) < 2)
    words = np.zeros(32, np.uint32)
    for token, parent in enumerate(parents):
        words[token] = np.uint32(1) << np.uint32(token) | (words[parent] if parent >= 0 else 0)
    tree = fa.Tree(jnp.asarray(np.tile(words, (3, 1))))

    def visible(b: int, row: int, q: int, k: np.ndarray) -> np.ndarray:
        drafted = k - (70, 40, 66)[b] + 32
        return (drafted < 0) | ((words[row] >> np.maximum(drafted, 0).astype("uint32")) & 1 == 1)

    feature = Feature(lambda problem: {"mask": tree}, lambda problem: {"visible": visible})
    check_on_the_kernel(problem, feature, device)


@DEVICES
@pytest.mark.parametrize("heads", [(71, 1), slow((260, 2))], ids=str)
@pytest.mark.parametrize("layout", ["paged", slow("packed")])
def test_groups_with_more_heads_than_columns(
    layout: str, heads: tuple[int, int], device: Device
) -> None:
    """Data of heads are of the whole group: 71 are parts of 36 and 35, and 130 of 44, 44 and 42."""
    problem = LAYOUTS[layout](dtype=jnp.bfloat16, dims=(64, 64), page=8, heads=heads)
    slopes = np.linspace(0.01, 1, heads[0]).astype(np.float32)
    shape = len(cached.LENGTHS), heads[0], problem.tokens, cached.CAPACITY
    bias = np.random.default_rng(2).standard_normal(shape).astype(np.float32)

    def score(s: np.ndarray, b: int, row: int, q: int, k: np.ndarray) -> np.ndarray:
        return s - slopes[:, None] * abs(q - k) + bias[b, :, row, k].T

    options = {"score": (fa.alibi(slopes), fa.bias(bias))}
    feature = Feature(lambda problem: options, lambda problem: {"score": score})
    check_on_the_kernel(problem, feature, device)


@DEVICES
def test_hidden_nan_stays_hidden_from_heads_that_pad_a_part(device: Device) -> None:
    """They are as the last head of their group, not as that of another sequence, which is shown those keys."""
    k, v = np.random.default_rng(0).standard_normal((2, 2, 64, 1, 64)).astype(jnp.bfloat16)
    q = np.random.default_rng(1).standard_normal((2, 1, 71, 64)).astype(jnp.bfloat16)
    v[0, 5:10] = np.nan
    mask = np.ones((2, 71, 1, 64), bool)
    mask[0, :, :, 5:10] = False

    def run(q: Any, k: Any, v: Any, implementation: Any = None) -> Any:
        cache = fa.Cache(k, v, jnp.array([64, 60]))
        return fa.cached_attention(q, cache, mask=mask, implementation=implementation)

    expected = run(*(x.astype(np.float32) for x in (q, k, v)), implementation="reference")
    assert np.isfinite(expected).all()
    with planned_for(device._replace(num_sms=2)):
        assert fa.explain(q, fa.Cache(k, v, jnp.array([64, 60])), mask=mask).plan.reads_cache
        out = interpreter.run(run, q, k, v)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)


AMPERE_QUICK = "causal", "sinks", "key_bias"


@pytest.mark.parametrize("feature", slow_but(lambda name: name in AMPERE_QUICK, FEATURES))
def test_features_on_the_kernel_of_ampere(feature: str) -> None:
    """The kernels share all that differs between layouts."""
    check_on_the_kernel(on_the_kernel("packed_paged"), FEATURES[feature], A100)


@pytest.mark.parametrize(
    "layout, heads",
    [x if x[1] == (12, 1) else slow(*x) for x in GROUPS if x[1] != (4, 1)],
)
def test_grouped_heads_on_the_kernel_of_ampere(layout: str, heads: tuple[int, int]) -> None:
    check_on_the_kernel(on_the_kernel(layout, heads=heads), FEATURES["causal"], A100)


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], slow([24, 24, 24, 24])], ids=["empty", "full"])
@pytest.mark.parametrize("layout", ["paged", slow("packed")])
def test_empty_and_full_sequences_on_the_kernel_of_ampere(layout: str, lengths: list[int]) -> None:
    counts = {"counts": np.minimum(cached.COUNTS, lengths)} if "packed" in layout else {}
    problem = on_the_kernel(layout, lengths=np.array(lengths), **counts)
    check_on_the_kernel(problem, FEATURES["causal"], A100)


def test_splits_of_a_size_are_those_of_the_kernel() -> None:
    problem = on_the_kernel("several")
    spec, _ = parse_cached(problem.query, problem.cache, split_size=128)
    assert "splits of 128 keys" in str(spec)
    plan = make_cached_plan(spec, H200)
    assert plan.reads_cache and DecodeSpec.of_call(spec).split_blocks == 2
    attend = functools.partial(fa.cached_attention, split_size=64)
    with planned_for_h200(cores=2):
        out = interpreter.run(attend, problem.query, problem.cache)
    np.testing.assert_allclose(problem.flatten(out), cached.dense(problem)[0], atol=0.02)


@pytest.mark.parametrize("device", [H200, A100], ids=["hopper", "ampere"])
@pytest.mark.parametrize("mask", [slow(fa.Causal()), fa.SlidingWindow(1230)], ids=str)
def test_bits_with_fixed_splits_do_not_depend_on_other_queries(
    mask: fa.Mask, device: Device
) -> None:
    """A query alone, with those before it, and with another request's, in wider tiles: with 20 splits, of which as many
    are merged at a time as the width leaves registers for. Sums of a score are exact in any order, and lse is near 0,
    where it shows a rounding of its sum."""
    lengths, dim = np.array([1500, 900]), 32
    rng = np.random.default_rng(0)
    k, v = rng.integers(-100, 101, (2, 2, 1536, 1, dim)) / 64
    q = rng.integers(-100, 101, (16, 8, dim)) / 64
    k[..., 0], q[..., 0] = -37.5, 1.0

    def last_of_first(counts: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        """Return out and lse of the query q[7], which is the last one of the first request."""
        requests, last = len(counts), counts[0] - 1
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        arrays = (jnp.asarray(x, jnp.bfloat16) for x in (k[:requests], v[:requests]))
        cache = fa.Cache(*arrays, jnp.asarray(lengths[:requests], jnp.int32))
        rows = jnp.asarray(q[7 - last :][: starts[-1]], jnp.bfloat16)

        def attend(rows: Any, cache: Any, starts: Any) -> Any:
            options: Any = {"split_size": 64, "mask": mask, "return_lse": True}
            return fa.cached_attention(rows, cache, queries=fa.Packed(starts), **options)

        with planned_for(device._replace(num_sms=3)):
            out, lse = interpreter.run(attend, rows, cache, starts)
        return np.asarray(out, np.float32)[last], np.asarray(lse)[:, last]

    alone, *others = (last_of_first(x) for x in ((1,), (8,), (1, 7)))
    assert abs(alone[1]).max() < 4
    for other in others:
        np.testing.assert_array_equal(alone[1], other[1])
        np.testing.assert_allclose(alone[0], other[0], atol=1e-2)


@pytest.mark.parametrize("layout", ["several", "paged", "packed"])
@pytest.mark.parametrize("quantized", [None, "int8"])
def test_vmap_of_the_kernel_of_hopper(layout: str, quantized: str | None) -> None:
    problems = [on_the_kernel(layout, seed=seed, quantized=quantized) for seed in range(2)]
    queries = problems[0].queries

    def attend(query: Any, cache: Any) -> Any:
        return fa.cached_attention(query, cache, queries=queries, return_lse=True)

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[(p.query, p.cache) for p in problems])
    with planned_for_h200(cores=2):
        out, lse = interpreter.run(jax.vmap(attend), *stacked)
    for i, problem in enumerate(problems):
        expected_out, expected_lse = cached.dense(problem)
        np.testing.assert_allclose(problem.flatten(out[i]), expected_out, atol=0.02)
        np.testing.assert_allclose(problem.flatten(lse[i], True), expected_lse, atol=1e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("quantized", ["", "int8"])
@pytest.mark.parametrize("placed", ["sequences", slow("heads"), slow("pages"), "packed"])
def test_the_kernel_of_hopper_on_two_gpus(placed: str, quantized: str, kind: AxisType) -> None:
    """Each has its sequences, or its heads; nothing is gathered."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",), axis_types=(kind,))
    sequences, heads = ("x", None) if placed == "sequences" else (None, "x")

    def array(dtype: Any, shape: tuple[int, ...], *axes: Any) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    bf16, i32 = jnp.bfloat16, jnp.int32
    q, starts = array(bf16, (4, 1, 32, 128), sequences, None, heads), None
    if placed in ("pages", "packed"):
        pool = array(quantized or bf16, (99, 64, 8, 128), None, None, heads)
        scales = (array(bf16, (99, 8, 64), None, heads),) * (2 if quantized else 0)
        cache = fa.Pages(pool, pool, array(i32, (4, 20)), array(i32, (4,)), *scales)
    else:
        keys = array(quantized or bf16, (4, 4096, 8, 128), sequences, None, heads)
        scales = (array(bf16, (4, 8, 4096), sequences, heads),) * (2 if quantized else 0)
        cache = fa.Cache(keys, keys, array(i32, (4,), sequences), *scales)
    if placed == "packed":
        q, starts = array(bf16, (8, 32, 128), None, heads), array(i32, (5,))

    def run(q: Any, cache: Any, starts: Any) -> Any:
        queries = None if starts is None else fa.Packed(starts)
        score = fa.alibi(np.ones(32, np.float32))
        return fa.cached_attention(q, cache, queries=queries, score=score, return_lse=True)

    with planned_for_h200(), jax.set_mesh(mesh):
        hlo = compile_gate.hlo_for_h200s(run, q, cache, starts)
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", hlo)
    half = 2 * 8 if placed == "sequences" else (8 if placed == "packed" else 4) * 4
    assert (
        f"{'f16' if quantized else 'bf16'}[{half},4,1,128]" in hlo
    )  # rows of tokens and key heads


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("placed", ["heads", slow("sequences"), slow("packed")])
def test_prompts_on_8_bits_on_two_gpus(placed: str, kind: AxisType) -> None:
    """Each reads the keys of its sequences, or of its heads, where they lie, and moves nothing."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",), axis_types=(kind,))
    sequences, heads = ("x", None) if placed == "sequences" else (None, "x")

    def array(dtype: Any, shape: tuple[int, ...], *axes: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*axes)))

    bf16, i32, starts = jnp.bfloat16, jnp.int32, None
    if placed == "packed":
        q, starts = array(bf16, (2048, 32, 128), None, heads), array(i32, (2,))
        pool = array("int8", (999, 64, 8, 128), None, None, heads)
        scales = (array(bf16, (999, 8, 64), None, heads),) * 2
        cache = fa.Pages(pool, pool, array(i32, (1, 256)), array(i32, (1,)), *scales)
    else:
        q = array(bf16, (2, 512, 32, 128), sequences, None, heads)
        keys = array("int8", (2, 16_384, 8, 128), sequences, None, heads)
        scales = (array(bf16, (2, 8, 16_384), sequences, heads),) * 2
        cache = fa.Cache(keys, keys, array(i32, (2,), sequences), *scales)

    def run(q: Any, cache: Any, starts: Any) -> Any:
        return fa.cached_attention(q, cache, queries=None if starts is None else fa.Packed(starts))

    with planned_for_h200(), jax.set_mesh(mesh):
        hlo = compile_gate.hlo_for_h200s(run, q, cache, starts)
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", hlo)
    part = {"sequences": "1,16384,8", "heads": "2,16384,4", "packed": "999,64,4"}[placed]
    assert f"s8[{part},128]" in hlo and " while(" not in hlo
    assert not re.search(r"bf16\[(\d,16384|999,64),\d,128\]", hlo)


@pytest.mark.parametrize(
    "layout, device",
    [
        *itertools.product(("pages", "packed", "fixed_splits"), (H200, A100)),
        *itertools.product(("prompts", "prompts_of_8_bits"), (H200,)),
    ],
    ids=str,
)
def test_loops_of_the_kernels_are_traced_in_shard_map(layout: str, device: Any) -> None:
    """What is loaded varies over its axes there, and what is computed does not: loops carry both. Results vary as
    inputs do."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",))
    bf16, i32 = jnp.bfloat16, jnp.int32
    q, lengths = jax.ShapeDtypeStruct((4, 1, 32, 128), bf16), jax.ShapeDtypeStruct((4,), i32)
    pool, table = jax.ShapeDtypeStruct((512, 64, 8, 128), bf16), jax.ShapeDtypeStruct((4, 64), i32)
    keys = jax.ShapeDtypeStruct((4, 4096, 8, 128), bf16)
    pages = layout == "pages"
    cache = fa.Pages(pool, pool, table, lengths) if pages else fa.Cache(keys, keys, lengths)
    if "prompts" in layout:
        q = jax.ShapeDtypeStruct((4, 512, 32, 128), bf16)
    if "8_bits" in layout:  # sizes with which prompts are tiles
        options: Any = {"kv_heads": 8, "head_dim": 128, "dtype": "int8"}
        cache = jax.eval_shape(lambda: fa.Cache.zeros(4, 16_384, **options))

    def run(q: Any, cache: Any) -> Any:
        if layout == "packed":
            queries = fa.Packed(jnp.arange(3, dtype=i32))
            return fa.cached_attention(q[:, 0], cache, queries=queries)
        fixed = layout == "fixed_splits"
        return fa.cached_attention(q, cache, split_size=2048 if fixed else None)

    def run_twice(q: Any, cache: Any) -> Any:
        out, pull = jax.vjp(lambda q: run(q, cache), q)
        assert jax.typeof(out).manual_axis_type.varying == {"x"}
        return out, *pull(out)

    with planned_for(device), jax.set_mesh(mesh):
        mapped = jax.shard_map(run_twice, in_specs=jax.P("x"), out_specs=jax.P("x"))
        assert [x.shape[0] for x in jax.eval_shape(mapped, q, cache)] == [4, 4]


@pytest.mark.parametrize("which", range(4))
def test_results_vary_over_the_axes_of_any_input(which: int) -> None:
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",))
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = (4, 1, 32, 128), (4, 4096, 8, 128), (4, 4096, 8, 128), (4,)
    inputs = [jax.ShapeDtypeStruct(x, i32 if len(x) == 1 else bf16) for x in shapes]

    def run(q: Any, *cache: Any) -> Any:
        def attend(q: Any) -> Any:
            return fa.cached_attention(q, fa.Cache(*cache), return_lse=True)

        results, pull = jax.vjp(attend, q)
        assert {jax.typeof(x).manual_axis_type.varying for x in results} == {frozenset({"x"})}
        (dq,) = pull(results)
        assert jax.typeof(dq).manual_axis_type == jax.typeof(q).manual_axis_type
        return results

    whole = jax.ShapeDtypeStruct((2 * shapes[which][0], *shapes[which][1:]), inputs[which].dtype)
    inputs[which] = whole
    specs = tuple(jax.P("x") if i == which else jax.P() for i in range(4))
    with planned_for_h200(), jax.set_mesh(mesh):
        mapped = jax.shard_map(run, in_specs=specs, out_specs=jax.P("x"))
        jax.eval_shape(mapped, *inputs)
