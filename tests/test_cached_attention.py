"""`cached_attention` against dense attention on each sequence's keys, with NaN wherever nobody may look."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_fa2 as fa
from pallas_fa2 import cached_autodiff
from tests.support import cached, interpreter
from tests.support.cached_features import (
    BATCH,
    FEATURES,
    LAYOUTS,
    PREFIX,
    SINKS,
    SLOPES,
    alibi,
    check,
    check_on_the_kernel,
    constant,
    on_the_kernel,
)
from tests.support.tiers import slow_but

IMPLEMENTATIONS = ["reference", "blockwise"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "layout", slow_but(lambda name: name in ("several", "packed_paged"), LAYOUTS)
)
@pytest.mark.parametrize("feature", FEATURES)
def test_features_on_every_cache(feature: str, layout: str, implementation: str) -> None:
    check(LAYOUTS[layout](), implementation, FEATURES[feature])


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
        table = jnp.arange(cache.table.size).reshape(cache.table.shape)
        empty = dataclasses.replace(cache, lengths=0 * cache.lengths, table=table)
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
    dense = {"visible": visible, "positions": positions, "score": alibi}
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
    rng = np.random.default_rng(7)
    weights = jnp.asarray(rng.standard_normal((*query.shape[:2], cached.VALUE_DIM)), jnp.float32)

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
        (r"multiple of the cache's 2 heads and its head dim 8, but it has shape \(2, 1, 3, 8\)", Q[:, :, :3], _cache(), {}),
        (r"has shape \(2, 1, 4, 4\); make the cache with the kv_heads= and head_dim= of the model", Q[..., :4], _cache(), {}),
        ("query's dtype must be the cache's, float32, but it is bfloat16; cast query, or make the cache with dtype=bfloat16",
         Q.astype(jnp.bfloat16), _cache(), {}),
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
