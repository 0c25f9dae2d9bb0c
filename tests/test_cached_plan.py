"""What a call on a cache is parsed to, which kernel runs it, and what `explain` says of that."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2 import cached_autodiff, fallback
from pallas_fa2.backends import registry
from pallas_fa2.backends.protocol import CachedForward
from pallas_fa2.backends.sm90.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.ir.equivalent_call import equivalent_spec
from pallas_fa2.planning.cached_plan import make_cached_plan
from pallas_fa2.planning.plan import make_plan
from tests.support import cached, interpreter
from tests.support.cached_features import (
    FEATURES,
    IMAGE,
    PREFIX,
    SINKS,
    SLOPES,
    check,
    on_the_kernel,
    pairs,
    query_data,
    same_image,
    spec_of,
)
from tests.support.hopper import A100, H200, planned_for_h200


def test_the_spec_of_a_call() -> None:
    problem = cached.make(3, paged=True)
    spec, operands = spec_of(problem, mask=fa.Causal())
    call = spec.call
    assert (call.batch, call.q_len, call.kv_len) == (4, 3, 24) and call.has_explicit_positions
    assert spec.page_size == 4 and not spec.is_packed and spec.is_causal
    assert operands.table.shape == (4, 6) and operands.starts is None
    assert operands.call.q_index.shape == (4, 1, 1, 3, 1)

    packed = cached.make(None)
    data = same_image(q_tokens={"image": query_data(packed)}, k_tokens={"image": IMAGE})
    spec, operands = spec_of(packed, mask=data, score=fa.bias(pairs(packed)))
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
    spec, _ = spec_of(cached.make(1), mask=mask)
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
    spec, _ = spec_of(cached.make(1), mask=fa.Causal())
    plan = make_cached_plan(spec, fa.Device())
    assert plan.implementation == "blockwise" and not plan.reads_cache
    assert plan.rejected[0] == ("hopper", "it is a test")
    with pytest.raises(ValueError, match="implementation 'hopper' does not support this call"):
        make_cached_plan(spec, fa.Device(), "hopper")


@pytest.mark.parametrize("tokens", [1, None], ids=["one", "packed"])
def test_the_equivalent_call_runs_on_a_gpu_by_its_kernels(tokens: int | None) -> None:
    """Calls on 16-bit caches that no kernel reads run on the kernels of `flash_attention`, with a warning."""
    problem = cached.make(tokens, dtype=jnp.bfloat16, paged=True)
    warning = (
        "no kernel reads this cache: .* runs the equivalent call.*, which copies all pages.*"
        "a page has a multiple of 8 tokens, and here 4.*Choose sizes as these reasons ask"
    )
    fallback._warned.clear()
    with planned_for_h200(cores=2), pytest.warns(fa.FallbackWarning, match=warning):
        check(problem, None, FEATURES["token_data"], tolerance=0.02)
    spec, _ = spec_of(problem, mask=fa.Causal())
    plan = make_cached_plan(spec, H200)
    assert plan.implementation in registry.FUSED and not plan.reads_cache
    assert plan.rejected[0] == ("hopper", "a page has a multiple of 8 tokens, and here 4")
    assert plan.call == make_plan(equivalent_spec(spec), H200)


def test_no_kernel_takes_a_value_of_each_sequence_of_packed_queries() -> None:
    """The equivalent call's one entry has the queries of all sequences."""
    spec, _ = spec_of(cached.make(None), mask=fa.Prefix(PREFIX))
    plan = make_cached_plan(spec, A100)
    assert plan.implementation == "blockwise"
    assert plan.rejected[-1][1].startswith("its masks and scores read a value for each sequence")
    spec, _ = spec_of(cached.make(1), mask=fa.Prefix(PREFIX))
    plan = make_cached_plan(spec, A100)
    assert plan.implementation == "ampere" and not plan.reads_cache


def test_gradients_of_a_fused_kernel_on_a_cache_warn_where_xla_computes_them(
    monkeypatch: Any,
) -> None:
    """The kernel of the cache serves a value of each sequence of packed queries, the equivalent call does not."""
    monkeypatch.setattr(fallback, "_warned", set())
    _with_cached_forward(monkeypatch, supports=True)
    problem = cached.make(None, dtype=jnp.bfloat16)

    def loss(name: Any, query: Any, lengths: Any) -> Any:
        cache = dataclasses.replace(problem.cache, lengths=lengths)
        options = {"queries": problem.queries, "mask": fa.Prefix(PREFIX)}
        return fa.cached_attention(query, cache, implementation=name, **options).sum()

    args = jnp.asarray(problem.query), jnp.asarray(problem.cache.lengths)
    for name in (None, "fused"):
        run = functools.partial(loss, name)
        with planned_for_h200():
            jax.eval_shape(run, *args)  # warnings are errors here
            expected = (
                pytest.warns(fa.FallbackWarning, match="gradients of this call.* value for each")
                if name is None
                else pytest.raises(ValueError, match="'fused' does not support the gradients")
            )
            with expected:
                jax.eval_shape(jax.grad(run), *args)


def test_explain_the_kernel_of_hopper() -> None:
    explanation = fa.explain(
        (problem := on_the_kernel("packed_paged")).query,
        problem.cache,
        queries=problem.queries,
        device=H200,
    )
    assert explanation.implementation == "hopper" and explanation.copied_bytes == 0
    assert "64 keys x 32 columns, for 4 queries of 2 heads" in explanation.forward
    assert "read the pages in the pool" in explanation.forward


def test_explain_the_kernel_of_ampere() -> None:
    problem = on_the_kernel("packed_paged")
    options = {"queries": problem.queries, "device": A100}
    explanation = fa.explain(problem.query, problem.cache, **options)
    assert explanation.implementation == "ampere" and explanation.copied_bytes == 0
    assert "64 keys x 32 columns, for 4 queries of 2 heads" in explanation.forward
    assert "read the pages in the pool" in explanation.forward


def test_where_ampere_has_no_room_it_says_so_and_runs_the_equivalent_call() -> None:
    problem = cached.make(4, dtype=jnp.bfloat16, heads=(16, 1), dims=(256, 256))
    device = fa.Device("gpu", "NVIDIA GeForce RTX 4090", "8.9", 128)
    explanation = fa.explain(problem.query, problem.cache, device=device)
    assert explanation.implementation == "ampere" and "equivalent call" in str(explanation)
    reason = "not ampere's kernel that reads caches: 101360 bytes of shared memory have no room for 64 columns"
    assert reason in str(explanation)


def test_a_reason_is_said_once() -> None:
    problem = cached.make(1)
    for device in (fa.Device(), A100, H200):
        lines = str(fa.explain(problem.query, problem.cache, device=device)).splitlines()
        reasons = [line for line in lines if line.startswith("  not ")]
        assert len(reasons) == len(set(reasons)) == 2


def shapes(
    queries: int,
    heads: tuple[int, int],
    batch: int = 1,
    page: int | None = None,
    dtype: Any = jnp.bfloat16,
) -> tuple[Any, Any]:
    """So many queries of a sequence on a cache of 4096 slots."""
    array, (n, kv_heads) = jax.ShapeDtypeStruct, heads
    q, lengths = array((batch, queries, n, 64), dtype), array((batch,), jnp.int32)
    keys = (batch, 4096) if page is None else (batch * 4096 // page, page)
    k = array((*keys, kv_heads, 64), dtype)
    if page is None:
        return q, fa.Cache(k, k, lengths)
    return q, fa.Pages(k, k, array((batch, 4096 // page), jnp.int32), lengths)


def reads_cache(*args: Any, device: fa.Device, **options: Any) -> bool:
    """Whether many queries of contiguous keys have a kernel that reads caches, and not that of the equivalent call."""
    explanation = fa.explain(*shapes(*args), device=device, **options)
    assert explanation.plan.not_read is None
    assert explanation.plan.reads_cache or "read keys" in str(explanation)
    return explanation.plan.reads_cache


def test_many_queries_have_whichever_kernel_of_ampere_has_fewer_tiles() -> None:
    """Of contiguous keys, which neither copies. A tile of the other kernels has 128 queries of one head."""
    on_ampere = functools.partial(reads_cache, device=A100)
    assert on_ampere(32, (32, 8), 16)  # 4 entries, and as many heads
    assert not on_ampere(33, (32, 8), 16)
    assert on_ampere(8, (8, 8), 64) and not on_ampere(9, (8, 8), 64)
    assert on_ampere(9, (8, 8), 2)  # 32 tiles or 16, for more multiprocessors than both
    assert not on_ampere(1000, (8, 2)) and not on_ampere(1000, (8, 2), implementation="fused")
    assert on_ampere(1000, (8, 2), 1, 64)  # pages would be copied
    assert on_ampere(1000, (8, 2), split_size=2048)  # only the kernel of caches has them


def test_many_queries_have_the_other_kernel_of_hopper_where_its_own_has_no_tiles() -> None:
    """By what an H200 was measured to take (docs/decisions/0087-prompts-on-a-cache.md)."""
    on_hopper = functools.partial(reads_cache, device=H200)
    assert on_hopper(1000, (32, 8), 16)  # tiles of queries on the cache
    of_code: dict[str, Any] = {"mask": fa.Causal() & fa.Prefix(4)}
    assert on_hopper(12, (32, 8), 16, **of_code) and not on_hopper(13, (32, 8), 16, **of_code)
    assert on_hopper(1000, (32, 8), 16, 64, **of_code)  # pages would be copied
    assert on_hopper(1000, (32, 8), split_size=2048)


def test_no_copy_is_made_in_silence() -> None:
    """By any kernel of this package: an error. A named one makes it as it is told, and on a CPU there is nothing to
    warn of."""
    for options, cost, cure in (
        ({"page": 4}, "copies all pages of all sequences", "Choose sizes"),
        ({"dtype": jnp.float32}, "splits no sequence", "Keep queries and caches in bfloat16"),
    ):
        arguments = shapes(1, (8, 2), **options)
        with pytest.raises(ValueError, match=f"'fused' has no kernel.*{cost}.*{cure}"):
            fa.explain(*arguments, device=H200, implementation="fused")
        explanation = fa.explain(*arguments, device=H200, implementation="ampere")
        assert explanation.implementation == "ampere" and not explanation.plan.reads_cache
    spec = fa.explain(*shapes(1, (8, 2), page=4)).spec
    plan = make_cached_plan(spec, fa.Device())
    fallback.warn_of_equivalent_call(spec, plan, fa.Device())
    assert plan.not_read and "hopper: it needs a Hopper GPU" in plan.not_read
    eight_bits = dataclasses.replace(spec, quantized="int8", page_size=None)
    with pytest.raises(ValueError, match=r"copies all keys and values to bfloat16.*16 bits"):
        make_cached_plan(eight_bits, A100, "fused")


UNSUPPORTED: dict[str, tuple[Callable[[], cached.Problem], dict, str]] = {
    "float32": (lambda: cached.make(1), {}, "bfloat16 or float16, not float32"),
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
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernel_of_hopper_does_not_support(name: str) -> None:
    make, options, reason = UNSUPPORTED[name]
    spec, _ = spec_of(make(), **{"mask": fa.Causal(), **options})
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
    assert explanation.copied_bytes == 4 * 24 * 2 * 24 * 4
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
    assert explanation.copied_bytes == 4 * 24 * 2 * 24 * 4

    shapes = jax.eval_shape(lambda: problem.cache)
    query = jax.ShapeDtypeStruct(problem.query.shape, problem.query.dtype)
    unknown = fa.explain(query, shapes, **options)
    assert unknown.bytes is None and unknown.plan == explanation.plan
    assert "unknown, as lengths are" in str(unknown)

    _with_cached_forward(monkeypatch, supports=True)
    monkeypatch.setattr("pallas_fa2.cached_explanation.BACKENDS", cached_autodiff.BACKENDS)
    explanation = fa.explain(problem.query, problem.cache, **options)
    assert explanation.implementation == "hopper" and explanation.copied_bytes == 0
    assert "a kernel, configuration" in str(explanation)
    with pytest.raises(TypeError, match="is_causal"):
        fa.explain(problem.query, problem.cache, is_causal=True)
