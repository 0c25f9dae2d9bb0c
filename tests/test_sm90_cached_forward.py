"""The forward of Hopper on a cache, interpreted with race detection."""

import dataclasses
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode.spec import DecodeSpec, max_packed_entries
from pallas_fa2.backends.sm90 import cached_forward
from pallas_fa2.backends.sm90.cached_forward import (
    CACHED_FORWARD,
    TileConfigs,
    unsupported_tiles,
)
from pallas_fa2.backends.sm90.configs import cached_forward_config
from pallas_fa2.backends.sm90.forward import cached_tiles, epilogue
from pallas_fa2.backends.sm90.forward.cached_tiles import CachedTiles, plan_tiles
from pallas_fa2.backends.sm90.forward.kernel import attention_on_cache
from pallas_fa2.ir.affine import DistanceRange
from pallas_fa2.parse_cached import parse_cached
from tests.contract import cases as contract
from tests.contract import suite
from tests.support import cached, compile_gate, hopper, interpreter
from tests.support.cached_features import FEATURES, check_on_the_kernel, constant
from tests.support.decode_cases import FULL, Case, check
from tests.support.shared import RaceDetected
from tests.support.tiers import slow, slow_but


class Tiles(Case):
    """Requests whose entries are tiles of the forward."""

    @property
    def config(self) -> Any:
        config = cached_forward_config(*self.dims, eight_bits=self.quantized is not None)
        assert config is not None
        return dataclasses.replace(config, num_ctas=self.num_ctas)

    @property
    def spec(self) -> DecodeSpec:
        spec = super().spec
        entries = max_packed_entries(self.num_tokens, len(self.lengths), self.config.block_q)
        return dataclasses.replace(spec, q_len=self.config.block_q, max_entries=entries)

    def plan(self, lengths: Any, starts: Any) -> Any:
        return plan_tiles(self.spec, self.config, lengths, starts)

    def in_8_bits(self, x: np.ndarray, rise: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What 8 bits stand for is rounded to 16 in tiles."""
        numbers, scale, whole = super().in_8_bits(x, rise)
        return numbers, scale, whole.astype(self.dtype).astype(np.float64)


H128: Any = {"dims": (128, 128)}
CASES = {
    "one_prompt": Tiles((256,), queries=(256,)),
    "parts": Tiles((256, 250), queries=(5, 130)),
    # every kind of request: a prompt, one without tokens, more tokens than keys, a decode step; NaN behind all lengths
    "prompts": Tiles((200, 77, 120, 70), queries=(150, 0, 130, 1)),
    "unpacked": Tiles((200, 131), queries=70),
    "empty": Tiles((0, 0), queries=3),
    "too_long": Tiles((300, 1 << 30), queries=(20, 9), capacity=200),
    "negative": Tiles((-5, 70), queries=(9, 9)),
    "mqa": Tiles((256, 40), queries=(129, 40), heads=(3, 1)),
    "full": Tiles((130, 64), queries=(3, 64), distances=FULL),
    # full blocks between partial ones; partial ones alone; more keys than a request has; keys after a query
    "window": Tiles((768, 300), queries=(130, 40), capacity=768, distances=DistanceRange(-299, 0)),
    "short_window": Tiles((256, 131), queries=(140, 3), distances=DistanceRange(-9, 0)),
    "window_pages": Tiles(
        (500, 20, 0),
        queries=(9, 20, 2),
        capacity=512,
        page_size=16,
        distances=DistanceRange(-130, 0),
    ),
    "no_past": Tiles((300, 140), queries=(20, 140), capacity=384, distances=DistanceRange(0, None)),
    "future": Tiles((400, 140), queries=(30, 140), capacity=512, distances=DistanceRange(-200, 70)),
    "h128": Tiles((256, 140), queries=(131, 7), **H128),
    "float16": Tiles((256,), queries=(20,), dtype=jnp.float16, **H128),
    "h96": Tiles((200,), queries=(20,), dims=(96, 96), page_size=16),
    "h192_hv128": Tiles((200,), queries=(20,), dims=(192, 128), page_size=64),
    "h192": Tiles((150,), queries=(20,), dims=(192, 192), distances=DistanceRange(-99, 0)),
    "h256": Tiles((150,), queries=(20,), dims=(256, 256), page_size=16),
    "pages_8": Tiles((250, 64), queries=(130, 9), page_size=8),
    "pages_16": Tiles((256, 130), queries=(130, 9), page_size=16, **H128),
    "pages_24": Tiles((120, 50), queries=(20, 50), capacity=120, page_size=24),
    "pages_128": Tiles((200, 129), queries=(129, 1), page_size=128),
    "pages_256": Tiles((200, 512), queries=(129, 130), capacity=512, page_size=256),
}
OF_8_BITS = {
    "prompts": Tiles((200, 77, 120, 70), queries=(150, 0, 130, 1), quantized="int8"),
    "float8": Tiles((150, 131), queries=70, capacity=150, quantized="float8_e4m3fn"),
    "pages_8": Tiles((250, 64), queries=(130, 9), page_size=8, quantized="int8"),
    "pages_24": Tiles(
        (120, 50), queries=(20, 50), capacity=120, page_size=24, quantized="float8_e4m3fn"
    ),
    "h128": Tiles((256, 140), queries=(131, 7), page_size=64, quantized="int8", **H128),
    # several pages in a part of a block
    "h128_pages_16": Tiles((256, 140), queries=(9, 7), page_size=16, quantized="int8", **H128),
    "h192_pages_16": Tiles((150,), queries=(20,), dims=(192, 192), page_size=16, quantized="int8"),
    "h256_pages_8": Tiles((150,), queries=(20,), dims=(256, 256), page_size=8, quantized="int8"),
    "h96": Tiles((200,), queries=(20,), dims=(96, 96), page_size=16, quantized="int8"),
    "h192_hv128": Tiles((200,), queries=(20,), dims=(192, 128), quantized="float8_e4m3fn"),
    "h192": Tiles(
        (150,), queries=(20,), dims=(192, 192), distances=DistanceRange(-99, 0), quantized="int8"
    ),
    "h256": Tiles((150,), queries=(20,), dims=(256, 256), page_size=16, quantized="int8"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted(case: Tiles) -> None:
    check(case, attention_on_cache)


@pytest.mark.parametrize("case", OF_8_BITS.values(), ids=OF_8_BITS)
def test_interpreted_with_8_bits(case: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile is computed again: that would hide what is wrong, and keys that do not exist are zeros."""
    original = epilogue.recompute_exact

    def wrong(*args: Any) -> Any:
        out, *rest = original(*args)
        return out * 3, *rest

    monkeypatch.setattr(epilogue, "recompute_exact", wrong)
    check(case, attention_on_cache)


PER_SEQUENCE = np.random.default_rng(3).uniform(0.1, 2, 4).astype(np.float32)


class Rising(Tiles):
    """Requests whose scores rise by more than 2^120 from one block of keys to the next: all tiles are computed
    again."""

    def in_8_bits(self, x: np.ndarray, rise: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return super().in_8_bits(x, rise or 2)


RISING: Any = {
    "h64": Rising((256,), queries=(140,), quantized="int8"),
    "h128_pages": Rising(
        (256,), queries=(20,), page_size=24, capacity=264, quantized="float8_e4m3fn", **H128
    ),
    "h128_pages_16": Rising((256,), queries=(20,), page_size=16, quantized="int8", **H128),
    "h192": Rising((256,), queries=(20,), dims=(192, 192), quantized="int8"),
    "h192_hv128": Rising((256,), queries=(20,), dims=(192, 128), quantized="int8"),
}


@pytest.mark.parametrize("case", RISING.values(), ids=RISING)
def test_retries_of_8_bits(case: Tiles) -> None:
    check(case, attention_on_cache, rtol=1e-6)


TILE_FEATURES = {
    name: FEATURES[name] for name in ("causal", "window", "soft_cap", "alibi", "sinks")
}
TILE_FEATURES["score_of_sequences"] = constant(
    {"score": fa.score_fn(lambda s, q, k, c: s * c.factor)(entries={"factor": PER_SEQUENCE})},
    score=lambda s, b, row, q, k: s * PER_SEQUENCE[b],
)


QUICK_FEATURES = {
    ("window", "packed_paged"),
    ("alibi", "packed_paged"),
    ("score_of_sequences", "several"),
}


@pytest.mark.parametrize(
    "feature, layout",
    [
        case if case in QUICK_FEATURES else slow(*case)
        for case in itertools.product(TILE_FEATURES, ("several", "packed_paged"))
    ],
)
def test_features(feature: str, layout: str) -> None:
    check_tiles(feature, layout)


LENGTHS = np.array([150, 0, 140, 20])


# The feature, the layout, the dtype, the tokens of a page: tiles alone, and beside the decode kernel.
FEATURES_OF_8_BITS = [
    ("alibi", "packed_paged", "int8", 8),
    ("window", "several", "float8_e4m3fn", 16),
    slow("window", "packed_paged", "float8_e4m3fn", 16),
    slow("score_of_sequences", "several", "int8", 16),
]


@pytest.mark.parametrize("feature, layout, quantized, page", FEATURES_OF_8_BITS)
def test_features_on_8_bits(
    feature: str, layout: str, quantized: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_forward, "_prefers_tiles", lambda spec, num_sms: True)
    check_tiles(feature, layout, page, quantized=quantized)


def check_tiles(
    feature: str, layout: str, page: int = 16, lengths: np.ndarray = LENGTHS, **options: Any
) -> None:
    """Compare a call with the dense definition, of which some requests, or all, are tiles."""
    counts = np.array([1, 0, 137, 5])
    options = {"capacity": 160, "page": page, "dtype": jnp.bfloat16, "dims": (64, 64)} | options
    problem = cached.make(
        None if "packed" in layout else 20, "paged" in layout, lengths, counts, **options
    )
    spec, _ = parse_cached(
        problem.query,
        problem.cache,
        queries=problem.queries,
        **TILE_FEATURES[feature].options(problem),
    )
    config = CACHED_FORWARD.configure(spec, hopper.H200._replace(num_sms=2))
    assert isinstance(config, TileConfigs) and (config.decode is not None) == ("packed" in layout)
    check_on_the_kernel(problem, TILE_FEATURES[feature])


def test_scores_under_a_window() -> None:
    """The first of two full blocks is visited without the mask. (No key is NaN: no tile is computed again.)"""
    options: Any = {"capacity": 768, "dtype": jnp.bfloat16, "dims": (64, 64), "heads": (2, 1)}
    problem = cached.make(130, False, np.array([768]), **options)
    feature = constant(
        {"mask": fa.SlidingWindow(400), "score": fa.soft_cap(0.7)},
        visible=lambda b, row, q, k: (k <= q) & (q - k < 400),
        score=lambda s, b, row, q, k: 0.7 * np.tanh(s / 0.7),
    )
    check_on_the_kernel(problem, feature)


def test_heads_of_an_l2_group_come_together() -> None:
    """Two groups of two heads; within one the longest tiles first, those of its heads side by side; then no tiles."""
    case = Tiles((300, 100), queries=(140, 100), capacity=320, num_ctas=1)
    config = dataclasses.replace(case.config, l2_budget=2 * 320 * 128)
    plan = plan_tiles(case.spec, config, jnp.array(case.lengths), jnp.array(case.starts))
    order = np.asarray(plan.scheduler.table)[plan.scheduler.header_rows(1) :]
    entries, none = case.spec.max_entries, case.spec.max_entries * 4
    head, entry = order[order[:, 0] < none, 0] // entries, order[order[:, 0] < none, 0] % entries
    assert head.tolist() == [0, 1] * 4 + [2, 3] * 4
    assert entry.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] * 2  # the last one has the rows of no request
    blocks = np.asarray(plan.entries)[:, 0]
    assert blocks.tolist()[:4] == [3, 3, 1, 1]
    assert (order[-1 - (none - 16) :, 0] == none).all()


def has_tiles(case: contract.Case) -> bool:
    """Whether a case of the contract has tiles on a cache, if they were faster."""
    shapes = [jax.ShapeDtypeStruct(x, case.dtype) for x in case.shapes[:3]]
    found: list = []

    def parse(q: Any, k: Any, v: Any) -> None:
        given = {} if case.q_len == case.kv_len else {"q_positions": jnp.arange(case.q_len)}
        cache = fa.Cache(k, v, jnp.full(case.batch, case.kv_len))
        mask = case.mask(case)[0] if case.mask else None
        score = case.score(case)[0] if case.score else None
        found.append(parse_cached(q, cache, mask=mask, score=score, **given)[0])

    jax.eval_shape(parse, *shapes)
    return unsupported_tiles(found[0]) is None


OF_THE_CONTRACT = [case for case in contract.PLAIN + contract.GENERAL if has_tiles(case)]
QUICK_OF_THE_CONTRACT = {
    "full",
    "grouped",
    "more_keys",
    "h96_causal",
    "h192_causal",
    "rising_7_h64",
}


@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in QUICK_OF_THE_CONTRACT, OF_THE_CONTRACT), ids=str
)
def test_contract_interpreted(case: contract.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_forward, "_prefers_tiles", lambda spec, num_sms: True)
    with hopper.planned_for_h200(cores=3):
        suite.check(case, "hopper", jit=interpreter.jit, gradients=False, on_cache=True)


def of_next_request(self: Any, entry: Any, field: str) -> Any:
    found = load(self, entry, field)
    return found + 64 if field == "num_queries" else found


def pages_in_order(self: Any, source: Any, request: Any, keys: Any, *rest: Any) -> Any:
    return kv_rows(self._replace(table=None), source, request, keys, *rest)


load, kv_rows = CachedTiles.load, CachedTiles.kv_rows

BUGS: dict[str, tuple[Any, str, Any]] = {
    "rows of the next request are stored": (CachedTiles, "load", of_next_request),
    "a table that nobody reads": (CachedTiles, "kv_rows", pages_in_order),
    "partial blocks taken for full ones": (
        cached_tiles,
        "_find_full_blocks",
        lambda *args: (args[2].first_block, args[2].num_blocks),
    ),
    "a skipped wait": (plgpu, "barrier_wait", lambda barrier: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    # no NaN behind the first length: rows that meet one are computed again, with the whole mask
    with pytest.raises((RaceDetected, AssertionError, IndexError, ValueError)):
        check(Tiles((256, 64), queries=(130, 9), page_size=64), attention_on_cache)


def test_pages_out_of_range_are_the_nearest() -> None:
    case = Tiles((64, 40), queries=(20, 40), capacity=64, page_size=16)
    q, k, v, *rest = case.arrays()
    pages = np.random.default_rng(1).permutation(8).astype(np.int32)
    k, v = (np.nan_to_num(case.paged(x, pages).astype(np.float32)).astype(x.dtype) for x in (k, v))
    table = pages.reshape(2, 4)

    def run(table: np.ndarray) -> Any:
        return interpreter.run(
            lambda *args: case.run(attention_on_cache, *args), q, k, v, *rest, table
        )

    outside = np.where(table == 7, 1 << 30, np.where(table == 0, -5, table)).astype(np.int32)
    for x, y in zip(run(table), run(outside), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def attend(q: Any, cache: Any, starts: Any, implementation: str) -> Any:
    queries = None if starts is None else fa.Packed(starts)
    options: Any = {"return_lse": True, "implementation": implementation}
    return fa.cached_attention(q, cache, queries=queries, **options)


# New tokens of three requests of 300, 40 and 150: a step, a prompt and a part of one; nothing for tiles; none for the
# other.
COUNTS = {
    "both": (1, 40, 145),
    "all_decoded": (1, 4, 3),
    "all_in_tiles": (200, 40, 150),
    "unpacked": None,
}


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("both", "unpacked"), COUNTS))
def test_requests_of_a_call_take_either_kernel(name: str) -> None:
    rng, lengths, counts = (
        np.random.default_rng(0),
        np.array([300, 40, 150], np.int32),
        COUNTS[name],
    )
    table = rng.permutation(3 * 20).astype(np.int32).reshape(3, 20)
    rows = (3, 50) if counts is None else (max(sum(counts) + 4, 3 + 128),)
    q = rng.normal(size=(*rows, 2, 64)).astype(jnp.bfloat16)
    k, v = (rng.normal(size=(60, 16, 1, 64)).astype(jnp.bfloat16) for _ in range(2))
    starts = None if counts is None else np.cumsum([0, *counts]).astype(np.int32)

    def run(q: Any, k: Any, v: Any, implementation: str, *integers: Any) -> Any:
        table, lengths, *starts = integers
        pages = fa.Pages(k, v, table, lengths)
        return attend(q, pages, starts[0] if starts else None, implementation)

    integers: list[Any] = [table, lengths] if starts is None else [table, lengths, starts]
    wide_q, wide_k, wide_v = (x.astype(np.float32) for x in (q, k, v))
    expected = run(wide_q, wide_k, wide_v, "reference", *integers)
    with hopper.planned_for_h200(cores=3):
        found = interpreter.run(lambda q, k, v, *x: run(q, k, v, "hopper", *x), q, k, v, *integers)
    np.testing.assert_allclose(np.asarray(found[0], np.float32), expected[0], atol=0.02)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


@pytest.mark.slow
def test_both_kernels_write_the_same_arrays() -> None:
    """No cache is copied, nor is what the first of two kernels stores for the second; two layers have the same tables,
    of which a kernel writes to that of the order of tiles."""

    def run(q: Any, k: Any, v: Any, table: Any, lengths: Any, starts: Any) -> Any:
        pages = fa.Pages(k, v, table, lengths)
        for _ in range(2):
            q = fa.cached_attention(q, pages, queries=fa.Packed(starts))
        return q

    shapes = (4, 128), (4,), (5,)
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    q, k = (jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((1024, 32, 128), (512, 64, 8, 128)))
    with hopper.planned_for_h200():
        program = compile_gate.hlo_for_h200(run, q, k, k, *integers)
    entry = program[program.index("ENTRY") :]
    assert entry.count("custom-call(") == 4 and "transpose(" not in entry
    assert entry.count(" copy(") == 1 and len(re.findall(r" fusion\(", entry)) <= 16
