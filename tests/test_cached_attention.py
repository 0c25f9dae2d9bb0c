"""`cached_attention` against dense attention on each sequence's keys, with NaN wherever nobody may look."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_fa2 as fa
from pallas_fa2 import cached_autodiff
from pallas_fa2.backends import registry
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.backends.sm90.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.ir.equivalent_call import equivalent_spec
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.planning.cached_plan import make_cached_plan
from pallas_fa2.planning.plan import make_plan
from tests.support import cached, compile_gate, interpreter
from tests.support.hopper import A100, H200, planned_for, planned_for_h200
from tests.support.tiers import slow, slow_but

IMPLEMENTATIONS = ["reference", "blockwise"]
LAYOUTS = {
    "one": lambda **options: cached.make(1, **options),
    "several": lambda **options: cached.make(7, **options),
    "paged": lambda **options: cached.make(3, paged=True, **options),
    "packed": lambda **options: cached.make(None, **options),
    "packed_paged": lambda **options: cached.make(None, paged=True, **options),
}
RNG = np.random.default_rng(7)
BATCH = len(cached.LENGTHS)
SINKS = np.array([0.3, -1.0, 2.0, -np.inf], np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
PREFIX = np.array([2, 3, 4, 0])
IMAGE = RNG.integers(0, 3, (BATCH, cached.CAPACITY))
KEY_BIAS = RNG.standard_normal((BATCH, 1, 1, cached.CAPACITY)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Feature:
    """The options of a call, and the same for `cached.dense`."""

    options: Callable[[cached.Problem], dict[str, Any]]
    dense: Callable[[cached.Problem], dict[str, Any]]


def constant(options: dict, **dense: Any) -> Feature:
    return Feature(lambda problem: options, lambda problem: dense)


def _query_data(problem: cached.Problem) -> np.ndarray:
    shape = (problem.tokens,) if problem.is_packed else (BATCH, problem.tokens)
    return np.arange(np.prod(shape)).reshape(shape) % 3


def _of_query(problem: cached.Problem, b: int, row: int) -> int:
    data = _query_data(problem)
    return data[row] if problem.is_packed else data[b, row]


def _positions(problem: cached.Problem) -> np.ndarray:
    shape = (problem.tokens,) if problem.is_packed else (BATCH, problem.tokens)
    return (np.arange(np.prod(shape)) * 5 % 11).reshape(shape)


def _pairs(problem: cached.Problem) -> np.ndarray:
    shape = problem.tokens, cached.CAPACITY
    return np.random.default_rng(1).standard_normal((BATCH, cached.HEADS, *shape)).astype("f")


@fa.mask_fn
def _same_image(q: Any, k: Any) -> Any:
    return q.image == k.image


def _alibi(s: np.ndarray, b: int, row: int, q: int, k: np.ndarray) -> np.ndarray:
    return s - SLOPES[:, None] * abs(q - k)


FEATURES = {
    "causal": constant({}),
    "no_mask": constant({"mask": None}, visible=lambda b, row, q, k: k >= 0),
    "window": constant(
        {"mask": fa.SlidingWindow(3)}, visible=lambda b, row, q, k: (k <= q) & (q - k < 3)
    ),
    "window_of_data": constant(
        {"mask": fa.Causal() & fa.Window(jnp.int32(4))},
        visible=lambda b, row, q, k: (k <= q) & (q - k <= 4),
    ),
    "prefix": constant(
        {"mask": fa.Prefix(PREFIX) | fa.Causal()},
        visible=lambda b, row, q, k: (k <= q) | (k < PREFIX[b]),
    ),
    "streaming": constant(
        {"mask": fa.Causal() & (fa.Prefix(2) | fa.Window(3))},
        visible=lambda b, row, q, k: (k <= q) & ((k < 2) | (q - k <= 3)),
    ),
    "nothing": constant(
        {"mask": lambda q, k: q.index < 0}, visible=lambda b, row, q, k: np.full(k.shape, q < 0)
    ),
    "token_data": Feature(
        lambda problem: {
            "mask": _same_image(q_tokens={"image": _query_data(problem)}, k_tokens={"image": IMAGE})
        },
        lambda problem: {"visible": lambda b, row, q, k: IMAGE[b, k] == _of_query(problem, b, row)},
    ),
    "soft_cap": constant(
        {"score": fa.soft_cap(0.7)}, score=lambda s, b, row, q, k: 0.7 * np.tanh(s / 0.7)
    ),
    "alibi": constant({"score": fa.alibi(SLOPES)}, score=_alibi),
    "key_bias": constant(
        {"score": fa.bias(KEY_BIAS)}, score=lambda s, b, row, q, k: s + KEY_BIAS[b, 0, 0, k]
    ),
    "bias": Feature(
        lambda problem: {"score": fa.bias(_pairs(problem))},
        lambda problem: {"score": lambda s, b, row, q, k: s + _pairs(problem)[b, :, row, k].T},
    ),
    "scale": constant({"scale": 0.1}, scale=0.1),
    "sinks": constant({"sinks": SINKS}, sinks=SINKS),
    "positions": Feature(
        lambda problem: {"q_positions": _positions(problem), "score": fa.alibi(SLOPES)},
        lambda problem: {"positions": _positions(problem).ravel(), "score": _alibi},
    ),
}


def check(
    problem: cached.Problem, implementation: str | None, feature: Feature, tolerance: float = 2e-6
) -> None:
    def run(query: Any, cache: Any, queries: Any) -> Any:
        return fa.cached_attention(
            query, cache, queries=queries, return_lse=True, implementation=implementation,
            **feature.options(problem),
        )  # fmt: skip

    out, lse = interpreter.run(run, problem.query, problem.cache, problem.queries)
    expected_out, expected_lse = cached.dense(problem, **feature.dense(problem))
    assert out.dtype == problem.query.dtype and lse.dtype == np.float32
    np.testing.assert_allclose(problem.flatten(out), expected_out, rtol=0, atol=tolerance)
    lse = problem.flatten(lse, heads_first=True)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "layout", slow_but(lambda name: name in ("several", "packed_paged"), LAYOUTS)
)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_on_every_cache(feature: str, layout: str, implementation: str) -> None:
    check(LAYOUTS[layout](), implementation, FEATURES[feature])


def on_the_kernel(layout: str, **options: Any) -> cached.Problem:
    return LAYOUTS[layout](dtype=jnp.bfloat16, dims=(64, 128), page=8, **options)


def check_on_the_kernel(problem: cached.Problem, feature: Feature, device: Any = H200) -> None:
    """Interpreted, with what it claims to support."""
    spec, _ = _spec(problem, **feature.options(problem))
    plan = make_cached_plan(spec, device)
    assert plan.reads_cache and plan.implementation == ("hopper" if device.is_sm90 else "ampere")
    with planned_for(device._replace(num_sms=2)):
        check(problem, None, feature, tolerance=0.02)


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


@pytest.mark.parametrize("layout", slow_but(lambda name: name == "packed_paged", LAYOUTS))
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (12, 1)], ids=str)
def test_grouped_heads_on_the_kernel_of_hopper(layout: str, heads: tuple[int, int]) -> None:
    if layout == "several" and heads == (12, 1):
        pytest.skip("7 queries of 12 heads are more columns than a tile has")
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


AMPERE_QUICK = "causal", "sinks", "key_bias"


@pytest.mark.parametrize("feature", slow_but(lambda name: name in AMPERE_QUICK, FEATURES))
def test_features_on_the_kernel_of_ampere(feature: str) -> None:
    """The kernels share all that differs between layouts."""
    check_on_the_kernel(on_the_kernel("packed_paged"), FEATURES[feature], A100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [slow((4, 4)), (12, 1)], ids=str)
def test_grouped_heads_on_the_kernel_of_ampere(layout: str, heads: tuple[int, int]) -> None:
    if layout == "several" and heads == (12, 1):
        pytest.skip("7 queries of 12 heads are more columns than a tile has")
    check_on_the_kernel(on_the_kernel(layout, heads=heads), FEATURES["causal"], A100)


@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], slow([24, 24, 24, 24])], ids=["empty", "full"])
@pytest.mark.parametrize("layout", ["paged", slow("packed")])
def test_empty_and_full_sequences_on_the_kernel_of_ampere(layout: str, lengths: list[int]) -> None:
    counts = {"counts": np.minimum(cached.COUNTS, lengths)} if "packed" in layout else {}
    problem = on_the_kernel(layout, lengths=np.array(lengths), **counts)
    check_on_the_kernel(problem, FEATURES["causal"], A100)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (12, 1)], ids=str)
def test_grouped_heads(layout: str, heads: tuple[int, int]) -> None:
    check(LAYOUTS[layout](heads=heads), "blockwise", FEATURES["causal"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sixteen_bits(layout: str) -> None:
    check(LAYOUTS[layout](dtype=jnp.bfloat16), "blockwise", FEATURES["window"], tolerance=0.02)


@pytest.mark.parametrize("layout", slow_but(lambda name: name in ("one", "packed_paged"), LAYOUTS))
@pytest.mark.parametrize("quantized", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_eight_bits(implementation: str, quantized: str, layout: str) -> None:
    """As what they stand for, by the scale of each token and head; NaN where nobody may look, in scales too."""
    check(LAYOUTS[layout](quantized=quantized), implementation, FEATURES["window"])


def test_eight_bits_have_no_gradient() -> None:
    """Queries, sinks and score data do."""
    problem = cached.make(2, quantized="int8")
    plain = problem.cache.dequantize(jnp.float32)
    args = jnp.asarray(problem.query), jnp.asarray([*SINKS[:3].tolist(), 0.5]), jnp.asarray(SLOPES)

    def loss(cache: Any, query: Any, sinks: Any, slopes: Any) -> Any:
        options = {"sinks": sinks, "score": fa.alibi(slopes), "implementation": "blockwise"}
        return jnp.sum(fa.cached_attention(query, cache, **options) ** 2)

    expected, actual = (
        interpreter.run(jax.grad(functools.partial(loss, cache), argnums=(0, 1, 2)), *args)
        for cache in (plain, problem.cache)
    )
    chex.assert_trees_all_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[0, 0, 0, 0], [24, 24, 24, 24]], ids=["empty", "full"])
def test_all_sequences_empty_or_full(layout: str, lengths: list[int]) -> None:
    lengths_, counts = np.array(lengths), np.minimum(cached.COUNTS, lengths)
    problem = LAYOUTS[layout](
        lengths=lengths_, **({"counts": counts} if "packed" in layout else {})
    )
    check(problem, "blockwise", FEATURES["causal"])


def test_no_sequences() -> None:
    cache = fa.Cache.zeros(0, 8, kv_heads=2, head_dim=8, dtype=jnp.float32)
    out, lse = fa.cached_attention(jnp.ones((0, 1, 4, 8)), cache, return_lse=True)
    assert out.shape == (0, 1, 4, 8) and lse.shape == (0, 4, 1)
    with pytest.raises(
        ValueError, match="queries must be left out where the cache has no sequence"
    ):
        queries = fa.Packed(jnp.zeros(1, jnp.int32))
        fa.cached_attention(jnp.ones((2, 4, 8)), cache, queries=queries)
    assert cache.append(jnp.ones((0, 1, 2, 8)), jnp.ones((0, 1, 2, 8))).lengths.shape == (0,)


def test_x64() -> None:
    """Lengths, tables and starts of 64 bits."""
    with jax.enable_x64(True):
        problem = cached.make(None, paged=True, dtype=np.float64)
        cache = jax.tree.map(jnp.asarray, problem.cache)
        wide = {name: getattr(cache, name).astype(jnp.int64) for name in ("lengths", "table")}
        cache = dataclasses.replace(cache, **wide)
        new = [x[:16, 0].astype(jnp.float64) for x in (cache.key, cache.value)]
        queries = fa.Packed(jnp.asarray(problem.queries.starts, jnp.int64))
        out = fa.cached_attention(problem.query, cache, queries=queries, implementation="reference")
        np.testing.assert_allclose(out, cached.dense(problem)[0], atol=1e-12)
        empty = dataclasses.replace(cache, lengths=0 * cache.lengths)
        assert empty.append(*new, queries=queries).lengths.dtype == jnp.int64


def test_forward_mode_is_that_of_the_reference() -> None:
    problem = cached.make(1)
    query = jnp.asarray(problem.query)

    def attend(query: Any, name: str) -> Any:
        return fa.cached_attention(query, problem.cache, implementation=name)

    jax.jvp(lambda q: attend(q, "reference"), (query,), (query,))
    with pytest.raises(TypeError, match="'blockwise' has no forward-mode autodiff"):
        jax.jvp(lambda q: attend(q, "blockwise"), (query,), (query,))


def test_packed_starts_of_every_kind() -> None:
    """Requests of one token each, none at all, all rows of one request."""
    for counts in ([1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 9, 0]):
        check(cached.make(None, counts=np.array(counts)), "blockwise", FEATURES["sinks"])


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "hopper"])
@pytest.mark.parametrize("layout", ["several", "paged", "packed"])
def test_trees(layout: str, implementation: str) -> None:
    """Ancestors of random trees; positions are depths."""
    on_kernel = implementation == "hopper"
    problem = on_the_kernel(layout) if on_kernel else LAYOUTS[layout]()
    rows, rng = problem.rows, np.random.default_rng(3)
    counts = cached.COUNTS if problem.is_packed else np.full(BATCH, problem.tokens)
    starts = np.concatenate([[0], np.cumsum(counts)])
    words, depths = np.zeros(len(rows.row), np.uint32), np.zeros(len(rows.row), np.int32)
    for i, b in enumerate(rows.sequence):
        j = rows.row[i] - starts[b] if problem.is_packed else rows.row[i]
        parent = rng.integers(-1, j) if b >= 0 and j > 0 else -1
        if parent >= 0:
            words[i], depths[i] = words[i - j + parent], depths[i - j + parent] + 1
        words[i] |= np.uint32(1) << np.uint32(j if b >= 0 else 0)
    context = cached.LENGTHS - counts
    positions = np.maximum(context[rows.sequence] + depths, 0)

    def visible(b: int, row: int, q: int, k: np.ndarray) -> np.ndarray:
        i = row if problem.is_packed else b * problem.tokens + row
        new = k - context[b]
        return (new < 0) | ((words[i] >> np.maximum(new, 0)) & 1).astype(bool)

    shape = (-1,) if problem.is_packed else (BATCH, problem.tokens)
    options = {
        "mask": fa.Tree(jnp.asarray(words.reshape(shape))),
        "q_positions": positions.reshape(shape),
        "score": fa.alibi(SLOPES),
    }
    dense = {"visible": visible, "positions": positions, "score": _alibi}
    if on_kernel:
        check_on_the_kernel(problem, constant(options, **dense))
    else:
        check(problem, implementation, constant(options, **dense))


def test_a_tree_on_contiguous_keys_is_its_picture() -> None:
    ancestors = jnp.array([0b001, 0b011, 0b101], jnp.uint32)
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]
    dense = fa.Tree(ancestors, context=2).dense(3, 5)[0]
    np.testing.assert_array_equal(dense, np.array(expected, bool))
    word = jnp.full((32,), 1 << 31, jnp.uint32)  # the last bit, and none beyond it
    last = fa.Tree(word, context=0).dense(32, 64)[0]
    np.testing.assert_array_equal(last, np.broadcast_to(np.arange(64) == 31, (32, 64)))


def test_gradients_are_those_of_contiguous_attention() -> None:
    """Of query, the pool (a page that two sequences share gets both), sinks and score data."""
    problem = cached.make(None, paged=True)
    pages = problem.cache
    assert isinstance(pages, fa.Pages)
    query = jnp.asarray(problem.query)
    weights = jnp.asarray(RNG.standard_normal((*query.shape[:2], cached.VALUE_DIM)), jnp.float32)

    def loss(implementation: str, query: Any, key: Any, value: Any, sinks: Any, slopes: Any) -> Any:
        cache = dataclasses.replace(pages, key=key, value=value)
        options = {"sinks": sinks, "score": fa.alibi(slopes), "queries": problem.queries}
        out, lse = fa.cached_attention(
            query, cache, return_lse=True, implementation=implementation, **options
        )
        return jnp.sum(out * weights) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0))

    def by_hand(query: Any, key: Any, value: Any, sinks: Any, slopes: Any) -> Any:
        total, starts = jnp.zeros(()), np.concatenate([[0], np.cumsum(cached.COUNTS)])
        for b, (length, count) in enumerate(zip(cached.LENGTHS, cached.COUNTS, strict=True)):
            if count == 0:
                continue
            table = np.asarray(pages.table)[b, : -(-length // cached.PAGE)]
            k, v = (x[table].reshape(1, -1, *x.shape[2:])[:, :length] for x in (key, value))
            rows = slice(starts[b], starts[b + 1])
            out, lse = fa.flash_attention(
                query[None, rows], k, v, is_causal=True, align="end", score=fa.alibi(slopes),
                sinks=sinks, return_lse=True, implementation="reference",
            )  # fmt: skip
            total += jnp.sum(out[0] * weights[rows]) + jnp.sum(lse)
        return total

    args = (
        query,
        pages.key,
        pages.value,
        jnp.asarray([*SINKS[:3].tolist(), 0.5]),
        jnp.asarray(SLOPES),
    )
    expected = interpreter.run(jax.grad(by_hand, argnums=range(5)), *args)
    for implementation in IMPLEMENTATIONS:
        run = jax.grad(functools.partial(loss, implementation), argnums=range(5))
        actual = interpreter.run(run, *args)
        chex.assert_trees_all_close(actual, expected, atol=1e-5)


def test_one_program_serves_all_lengths_tables_and_starts() -> None:
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(query: Any, cache: Any, queries: Any, prefix: Any) -> Any:
        mask = fa.Causal() | fa.Prefix(prefix)
        return fa.cached_attention(query, cache, queries=queries, mask=mask)

    for seed, (lengths, counts) in enumerate(
        [(cached.LENGTHS, cached.COUNTS), ([7, 7, 24, 3], [2, 7, 0, 1])]
    ):
        problem = cached.make(
            None, paged=True, lengths=np.array(lengths), counts=np.array(counts), seed=seed
        )
        query = np.resize(problem.query, (16, *problem.query.shape[1:]))
        problem = dataclasses.replace(problem, query=query)
        out = step(query, problem.cache, problem.queries, jnp.asarray(PREFIX))
        visible = FEATURES["prefix"].dense(problem)["visible"]
        sequence = np.resize(problem.rows.sequence, 16)
        sequence[len(problem.rows.sequence) :] = -1
        rows = cached.Rows(sequence, np.arange(16), np.resize(problem.rows.position, 16))
        expected, _ = cached.dense(dataclasses.replace(problem, rows=rows), visible)
        np.testing.assert_allclose(out, expected, atol=2e-6)


def test_eager_calls_compile_once_for_all_lengths() -> None:
    problem = cached.make(1)
    fa.cached_attention(problem.query, problem.cache, implementation="reference")
    count_programs: Any = cached_autodiff.attention_on_cache
    programs = count_programs._cache_size()
    for lengths in ([1, 2, 3, 4], [24, 24, 0, 0]):
        cache = dataclasses.replace(problem.cache, lengths=jnp.array(lengths))
        fa.cached_attention(problem.query, cache, implementation="reference")
    assert count_programs._cache_size() == programs


def test_traced_garbage_reads_nothing_outside() -> None:
    """Lengths beyond the capacity and negative ones, pages out of range and starts that fall: finite results."""
    pool = jnp.ones((3, 4, 2, 8))

    @jax.jit
    def run(query: Any, table: Any, lengths: Any, starts: Any) -> Any:
        pages = fa.Pages(pool, pool, table, lengths)
        return fa.cached_attention(query, pages, queries=fa.Packed(starts), return_lse=True)

    query = jnp.ones((6, 4, 8))
    table = jnp.array([[-1, 2**31 - 1], [5, -(2**31)]], jnp.int32)
    for lengths in ([8, 8], [2**31 - 1, -5]):
        for starts in ([0, 3, 6], [4, 2, 99], [-9, 2**31 - 1, 1]):
            out, _ = run(query, table, jnp.array(lengths, jnp.int32), jnp.array(starts, jnp.int32))
            assert set(np.unique(np.round(out, 5))) <= {0.0, 1.0}


def test_vmap_and_scan() -> None:
    """Layers in a scan, each with a cache and a window of its own."""
    problems = [cached.make(2, seed=seed) for seed in range(3)]
    caches = jax.tree.map(lambda *x: jnp.stack(x), *[p.cache for p in problems])
    queries = jnp.stack([p.query for p in problems])
    windows = jnp.array([1, 4, 30])

    def attend(query: Any, cache: Any, window: Any) -> Any:
        return fa.cached_attention(
            query, cache, mask=fa.Causal() & fa.Window(window), implementation="blockwise"
        )

    each = [
        attend(*jax.tree.map(lambda x, i=i: x[i], (queries, caches, windows))) for i in range(3)
    ]
    _, scanned = jax.lax.scan(lambda c, x: (c, attend(*x)), None, (queries, caches, windows))
    mapped = jax.vmap(attend)(queries, caches, windows)
    chex.assert_trees_all_close(scanned, jnp.stack(each), atol=1e-6)
    chex.assert_trees_all_close(mapped, jnp.stack(each), atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_batch_and_heads_stay_divided_over_devices(kind: AxisType) -> None:
    """No program gathers a cache that is divided by sequences and by heads."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), (kind,) * 2, devices=jax.devices()[:4])
    problem = cached.make(2)
    args = problem.query, problem.cache.key[:, :2], problem.cache.value[:, :2], problem.cache
    axes = [jax.P("data", None, "model", None)] * 5 + [jax.P("data")]
    leaves, tree = jax.tree.flatten(args)
    placed = [
        jax.device_put(x, jax.NamedSharding(mesh, y)) for x, y in zip(leaves, axes, strict=True)
    ]

    def step(query: Any, key: Any, value: Any, cache: Any) -> Any:
        cache = dataclasses.replace(cache, lengths=cache.lengths - cache.lengths // 3)
        cache = cache.append(key, value)
        return fa.cached_attention(query, cache, implementation="blockwise"), cache

    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*tree.unflatten(placed)).compile()
        out, after = compiled(*tree.unflatten(placed))
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())
    assert out.sharding.is_equivalent_to(placed[0].sharding, 4)
    assert after.key.sharding.is_equivalent_to(placed[3].sharding, 4)
    np.testing.assert_allclose(out, jax.jit(step)(*args)[0], atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("layout", ["paged", "packed_paged"])
def test_heads_of_a_pool_stay_divided_over_devices(layout: str, kind: AxisType) -> None:
    mesh = jax.make_mesh((2,), ("model",), (kind,), devices=jax.devices()[:2])
    problem = LAYOUTS[layout]()
    tail = problem.query.shape[:-2]
    new = [
        np.zeros((*tail, *x.shape[2:]), np.float32)
        for x in (problem.cache.key, problem.cache.value)
    ]
    args = problem.query, *new, problem.cache, problem.queries
    leaves, tree = jax.tree.flatten(args)
    heads = [jax.P(*[None] * (x.ndim - 2), "model") if x.ndim > 2 else jax.P() for x in leaves]
    placed = [
        jax.device_put(x, jax.NamedSharding(mesh, y)) for x, y in zip(leaves, heads, strict=True)
    ]

    def step(query: Any, key: Any, value: Any, cache: Any, queries: Any) -> Any:
        cache = dataclasses.replace(cache, lengths=cache.lengths // 2)
        cache = cache.append(key, value, queries=queries)
        return fa.cached_attention(query, cache, queries=queries, implementation="blockwise"), cache

    with jax.set_mesh(mesh):
        compiled = jax.jit(step).lower(*tree.unflatten(placed)).compile()
        out, after = compiled(*tree.unflatten(placed))
    assert not re.search("all-gather|all-to-all|collective-permute", compiled.as_text())
    assert after.key.sharding.is_equivalent_to(placed[3].sharding, 4)
    np.testing.assert_allclose(out, jax.jit(step)(*args)[0], atol=1e-6)


# Plans and the seam of kernels.


def _spec(problem: cached.Problem, **options: Any) -> Any:
    return parse_cached(problem.query, problem.cache, queries=problem.queries, **options)


def test_the_spec_of_a_call() -> None:
    problem = cached.make(3, paged=True)
    spec, operands = _spec(problem, mask=fa.Causal())
    call = spec.call
    assert (call.batch, call.q_len, call.kv_len) == (4, 3, 24) and call.has_explicit_positions
    assert spec.page_size == 4 and not spec.is_packed and spec.is_causal
    assert operands.table.shape == (4, 6) and operands.starts is None
    assert operands.call.q_index.shape == (4, 1, 1, 3, 1)
    assert int(operands.table.min()) >= 0 and int(operands.table.max()) < 27

    packed = cached.make(None)
    data = _same_image(q_tokens={"image": _query_data(packed)}, k_tokens={"image": IMAGE})
    spec, operands = _spec(packed, mask=data, score=fa.bias(_pairs(packed)))
    assert (spec.call.batch, spec.call.q_len, spec.page_size, spec.is_packed) == (4, 16, None, True)
    assert spec.distances is None
    shapes = {x.shape for x in jax.tree.leaves(operands.call)}
    queries = {(1, 1, 1, 16, 1)}
    assert shapes == queries | {(4, 1, 1, 1, 24), (1, 1, 1, 1, 24), (1, 2, 2, 16, 24)}


@pytest.mark.parametrize(
    "mask, distances",
    [
        (fa.Causal(), (None, 0)),
        (None, (None, None)),
        (fa.SlidingWindow(9), (-8, 0)),
        (fa.Window(4), (-4, 4)),
        (fa.Causal() & fa.Prefix(4), None),
    ],
    ids=str,
)
def test_the_spec_tells_ranges_of_distances(mask: Any, distances: tuple | None) -> None:
    spec, _ = _spec(cached.make(1), mask=mask)
    assert spec.distances == (None if distances is None else DistanceRange(*distances))
    assert spec.is_causal == (distances == (None, 0))


CONFIGS = itertools.count()


def _with_cached_forward(monkeypatch: Any, supports: bool) -> list:
    """Let the hopper backend have a forward that reads caches (by the equivalent call); return its calls."""
    calls: list = []
    config = f"configuration {next(CONFIGS)}"  # a program of each test's own

    def forward(spec: Any, config: Any, *arrays: Any) -> Any:
        calls.append((spec, config))
        plan = make_cached_plan(spec, fa.Device(), "reference")
        return cached_autodiff._by_equivalent_call(spec, plan, *arrays)

    kernel = CachedForward(
        unsupported_reason=lambda spec, device: None if supports else "it is a test",
        configure=lambda spec, device: config,
        forward=forward,
        describe=lambda spec, config: f"a kernel, {config}",
    )
    backends = dict(registry.BACKENDS)
    backends["hopper"] = dataclasses.replace(backends["hopper"], cached=kernel)
    for module in ("planning.cached_plan", "cached_autodiff"):
        monkeypatch.setattr(f"pallas_fa2.{module}.BACKENDS", backends)
    return calls


@pytest.mark.parametrize("name", [None, "hopper", "fused"])
def test_a_backend_that_reads_caches_runs_the_call(monkeypatch: Any, name: Any) -> None:
    calls = _with_cached_forward(monkeypatch, supports=True)
    problem = cached.make(None, paged=True)
    check(problem, name, FEATURES["sinks"])
    ((spec, config),) = calls
    assert config.startswith("configuration") and spec.page_size == 4


def test_gradients_of_a_kernel_are_those_of_the_equivalent_call(monkeypatch: Any) -> None:
    calls = _with_cached_forward(monkeypatch, supports=True)
    problem = cached.make(2)
    fill = jnp.nan_to_num(problem.cache.key)

    def loss(name: Any, query: Any, key: Any, slopes: Any) -> Any:
        cache = dataclasses.replace(problem.cache, key=key)
        options = {"score": fa.alibi(slopes), "mask": fa.Causal() & fa.Prefix(PREFIX)}
        out = fa.cached_attention(query, cache, implementation=name, **options)
        return jnp.sum(jnp.nan_to_num(out) ** 2)

    args = jnp.asarray(problem.query), fill, jnp.asarray(SLOPES)
    by_kernel, expected = (
        interpreter.run(jax.grad(functools.partial(loss, name), argnums=(0, 1, 2)), *args)
        for name in ("hopper", "blockwise")
    )
    assert calls
    # Gradients of slopes are sums of terms up to 100 that cancel.
    chex.assert_trees_all_close(by_kernel, expected, atol=1e-3)


def test_what_no_kernel_reads_runs_as_the_equivalent_call(monkeypatch: Any) -> None:
    _with_cached_forward(monkeypatch, supports=False)
    spec, _ = _spec(cached.make(1), mask=fa.Causal())
    plan = make_cached_plan(spec, fa.Device())
    assert plan.implementation == "blockwise" and not plan.reads_cache
    assert plan.rejected[0] == ("hopper", "it is a test")
    with pytest.raises(ValueError, match="implementation 'hopper' does not support this call"):
        make_cached_plan(spec, fa.Device(), "hopper")


@pytest.mark.parametrize("tokens", [1, None], ids=["one", "packed"])
def test_the_equivalent_call_runs_on_a_gpu_by_its_kernels(tokens: int | None) -> None:
    """Calls on 16-bit caches that no kernel reads run on the kernels of `flash_attention`."""
    problem = cached.make(tokens, dtype=jnp.bfloat16, paged=True)
    with planned_for_h200(cores=2):
        check(problem, "fused", FEATURES["token_data"], tolerance=0.02)
    spec, _ = _spec(problem, mask=fa.Causal())
    plan = make_cached_plan(spec, H200)
    assert plan.implementation in registry.FUSED and not plan.reads_cache
    assert plan.rejected[0] == ("hopper", "a page has a multiple of 8 tokens, and here 4")
    assert plan.call == make_plan(equivalent_spec(spec), H200)


def test_no_kernel_takes_a_value_of_each_sequence_of_packed_queries() -> None:
    """The equivalent call's one entry has the queries of all sequences."""
    spec, _ = _spec(cached.make(None), mask=fa.Prefix(PREFIX))
    plan = make_cached_plan(spec, A100)
    assert plan.implementation == "blockwise"
    assert plan.rejected[-1][1].startswith("its masks and scores read a value for each sequence")
    spec, _ = _spec(cached.make(1), mask=fa.Prefix(PREFIX))
    plan = make_cached_plan(spec, A100)
    assert plan.implementation == "ampere" and not plan.reads_cache


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


def test_explain_the_kernel_of_hopper() -> None:
    explanation = fa.explain(
        (problem := on_the_kernel("packed_paged")).query,
        problem.cache,
        queries=problem.queries,
        device=H200,
    )
    assert explanation.implementation == "hopper" and explanation.gathered_bytes == 0
    assert "64 keys x 32 columns, for 4 queries of 2 heads" in explanation.forward
    assert "read the pages in the pool" in explanation.forward


def test_explain_the_kernel_of_ampere() -> None:
    problem = on_the_kernel("packed_paged")
    options = {"queries": problem.queries, "device": A100}
    explanation = fa.explain(problem.query, problem.cache, **options)
    assert explanation.implementation == "ampere" and explanation.gathered_bytes == 0
    assert "64 keys x 32 columns, for 4 queries of 2 heads" in explanation.forward
    assert "read the pages in the pool" in explanation.forward


def test_where_ampere_has_no_room_it_says_so_and_runs_the_equivalent_call() -> None:
    problem = cached.make(4, dtype=jnp.bfloat16, heads=(16, 1), dims=(256, 256))
    device = fa.Device("gpu", "NVIDIA GeForce RTX 4090", "8.9", 128)
    explanation = fa.explain(problem.query, problem.cache, device=device)
    assert explanation.implementation == "ampere" and "equivalent call" in str(explanation)
    reason = "not ampere's kernel that reads caches: 101376 bytes of shared memory have no room for 64 columns"
    assert reason in str(explanation)


UNSUPPORTED: dict[str, tuple[Callable[[], cached.Problem], dict, str]] = {
    "float32": (lambda: cached.make(1), {}, "bfloat16 or float16, not float32"),
    "queries": (lambda: cached.make(9, dtype=jnp.bfloat16), {}, "64 at most, and here are 9 times 8"),
    "packed": (
        lambda: cached.make(None, dtype=jnp.bfloat16, heads=(72, 1)), {}, "here are 1 times 72"
    ),
    "partial_panels": (
        lambda: cached.make(1, dtype=jnp.bfloat16, paged=True, page=8),
        {},
        "with pages of 8 tokens head dims are multiples of 64, and here 8 and 16",
    ),
    "odd_dims": (
        lambda: cached.make(1, dtype=jnp.bfloat16, dims=(8, 12)), {}, "up to 256, but Hv is 12"
    ),
    "dims_of_8_bits": (
        lambda: cached.make(1, dtype=jnp.bfloat16, dims=(64, 80), quantized="int8"),
        {},
        "of 8 bits are multiples of 64, but Hv is 80",
    ),
    "slots_of_8_bits": (
        lambda: cached.make(1, dtype=jnp.bfloat16, dims=(64, 64), quantized="int8", capacity=25),
        {},
        "has a multiple of 8 slots for a sequence, and here 25",
    ),
    "columns_of_8_bits": (
        lambda: cached.make(9, dtype=jnp.bfloat16, dims=(64, 64), quantized="int8"),
        {},
        "are 64 at most, and here are 9 times 8",
    ),
    "group_of_8_bits": (
        lambda: cached.make(1, dtype=jnp.bfloat16, dims=(64, 64), heads=(40, 1), quantized="int8"),
        {},
        "are 32 at most with caches of 8 bits and these head dims, and here are 40",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernel_of_hopper_does_not_support(name: str) -> None:
    make, options, reason = UNSUPPORTED[name]
    spec, _ = _spec(make(), **{"mask": fa.Causal(), **options})
    assert reason in (CACHED_FORWARD.unsupported_reason(spec, H200) or "")
    assert "needs a Hopper GPU" in (CACHED_FORWARD.unsupported_reason(spec, A100) or "")
    rejected = dict(make_cached_plan(spec, A100).rejected).get("ampere", "")
    # by cp.async, rows of any length are copied
    if name == "partial_panels":
        assert not rejected
    else:
        assert (reason if spec.quantized is None else "this one has 8 bits") in rejected


def test_explain_eight_bits() -> None:
    problem = cached.make(1, quantized="int8")
    explanation = fa.explain(problem.query, problem.cache)
    assert "keys and values of int8 with scales" in str(explanation)
    # 38 keys of 2 heads with 24 bytes and two scales, 4 queries of 4 heads in float32.
    assert explanation.bytes == 38 * 2 * (24 + 4) + 4 * 4 * 24 * 4 + 16 * 4
    assert explanation.gathered_bytes == 4 * 24 * 2 * 24 * 4
    assert "MB of keys and values in float32" in str(explanation)


def test_explain(monkeypatch: Any) -> None:
    problem = cached.make(None, paged=True)
    options = {"queries": problem.queries, "sinks": SINKS, "score": fa.alibi(SLOPES)}
    explanation = fa.explain(problem.query, problem.cache, **options)
    assert explanation.implementation == "blockwise"
    text = str(explanation)
    assert "pages of 4 tokens, packed queries" in text and "equivalent call" in text
    # Float32 of 38 keys of 2 heads and 16 queries of 4 heads with dims 8 + 16, and lse.
    assert explanation.bytes == (38 * 2 + 16 * 4) * 24 * 4 + 16 * 4 * 4
    assert explanation.gathered_bytes == 4 * 24 * 2 * 24 * 4

    shapes = jax.eval_shape(lambda: problem.cache)
    query = jax.ShapeDtypeStruct(problem.query.shape, problem.query.dtype)
    unknown = fa.explain(query, shapes, **options)
    assert unknown.bytes is None and unknown.plan == explanation.plan
    assert "unknown, as lengths are" in str(unknown)

    _with_cached_forward(monkeypatch, supports=True)
    monkeypatch.setattr("pallas_fa2.cached_explanation.BACKENDS", cached_autodiff.BACKENDS)
    explanation = fa.explain(problem.query, problem.cache, **options)
    assert explanation.implementation == "hopper" and explanation.gathered_bytes == 0
    assert "a kernel, configuration" in str(explanation)
    with pytest.raises(TypeError, match="is_causal"):
        fa.explain(problem.query, problem.cache, is_causal=True)


# Errors, before anything is lowered.


def _cache(**changes: Any) -> fa.Cache:
    return dataclasses.replace(fa.Cache.zeros(2, 8, kv_heads=2, head_dim=8, dtype=jnp.float32), **changes)  # fmt: skip


def _pages(table: Any, lengths: Any) -> fa.Pages:
    pool = jnp.zeros((3, 4, 2, 8))
    return fa.Pages(pool, pool, jnp.asarray(table), jnp.asarray(lengths))


Q = jnp.zeros((2, 1, 4, 8))
ROWS = jnp.zeros((5, 4, 8))


@pytest.mark.parametrize(
    "message, query, cache, options",
    [
        ("cache must be a pallas_fa2.Cache", Q, jnp.zeros((2, 8, 2, 8)), {}),
        (r"query must have shape \[B, T, N, H\].*query\[:, None\]", Q[:, 0], _cache(), {}),
        (r"query must have shape \[B, T, N, H\] with the cache's B = 2", Q[:1], _cache(), {}),
        (r"lengths must be 0 to the capacity of a sequence, 8", Q, _cache(lengths=jnp.array([9, 0])), {}),
        (r"lengths must be 0 to", Q, _cache(lengths=jnp.array([1, -1])), {}),
        (r"lengths must have a length for each of 2", Q, _cache(lengths=jnp.array([1])), {}),
        (r"lengths must be integers of shape \[B\]", Q, _cache(lengths=jnp.ones(2)), {}),
        (r"Cache.key must be an array of shape \[B, S, K, H\]", Q, _cache(key=jnp.zeros((8, 2, 8))), {}),
        (r"Cache.key and Cache.value must have the same axes", Q, _cache(value=jnp.zeros((2, 7, 2, 8))), {}),
        (r"entry 1 of sequence 0 is 3", Q, _pages([[0, 3], [1, -1]], [5, 4]), {}),
        (r"Pages.table must be integers of shape \[B, W\]", Q, _pages([0, 1], [5, 4]), {}),
        (r"query's heads N \(= 3\) must be a multiple", Q[:, :, :3], _cache(), {}),
        ("key's dtype must be query's", Q.astype(jnp.bfloat16), _cache(), {}),
        (r"query must have shape \[tokens, N, H\]", Q, _cache(), {"queries": fa.Packed(jnp.array([0, 1, 2]))}),
        (r"queries must be pallas_fa2.Packed", ROWS, _cache(), {"queries": jnp.array([0, 1, 2])}),
        (r"starts must have shape \[R \+ 1\] = \[3\]", ROWS, _cache(), {"queries": fa.Packed(jnp.array([0, 1]))}),
        (r"starts must begin with 0", ROWS, _cache(), {"queries": fa.Packed(jnp.array([1, 2, 3]))}),
        (r"starts must begin with 0, not fall", ROWS, _cache(), {"queries": fa.Packed(jnp.array([0, 3, 2]))}),
        (r"end at most at the number of rows, 5", ROWS, _cache(), {"queries": fa.Packed(jnp.array([0, 3, 6]))}),
        (r"Tree must have at most 32", jnp.zeros((2, 33, 4, 8)), _cache(), {"mask": fa.Tree(jnp.zeros((2, 33), jnp.uint32))}),
        (r"q_positions must have shape \[\*B, T\]", Q, _cache(), {"q_positions": jnp.zeros((2, 3), jnp.int32)}),
        (r"sinks must be floats of shape \[N\]", Q, _cache(), {"sinks": jnp.zeros(3)}),
        (r"implementation must be one of", Q, _cache(), {"implementation": "triton"}),
        (r"does not support this call", Q, _cache(), {"implementation": "fused"}),
        (r"split_size must be a positive multiple of 64 keys, or None, but it is 100", Q, _cache(), {"split_size": 100}),
        (r"split_size must be None where no kernel reads the cache.*\(hopper: ", Q, _cache(), {"split_size": 64}),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_remedy(
    message: str, query: Any, cache: Any, options: dict
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        fa.cached_attention(query, cache, **options)


def test_errors_of_trees() -> None:
    with pytest.raises(TypeError, match=r"Tree.ancestors must be an array of uint32 words"):
        fa.Tree(jnp.zeros(3, jnp.int32))
    q = jnp.zeros((3, 2, 8))
    with pytest.raises(ValueError, match=r"Tree.context must be given"):
        fa.flash_attention(q, q, q, mask=fa.Tree(jnp.zeros(3, jnp.uint32)))
    starts = fa.Packed(jnp.array([0, 33, 40]))
    tree = fa.Tree(jnp.zeros(40, jnp.uint32))
    with pytest.raises(ValueError, match=r"Tree must have at most 32 new tokens.*there are 33"):
        cache = fa.Cache.zeros(2, 64, kv_heads=2, head_dim=8, dtype=jnp.float32)
        fa.cached_attention(jnp.zeros((40, 4, 8)), cache, queries=starts, mask=tree)
