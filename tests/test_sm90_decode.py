"""The decode kernel of Hopper, interpreted with race detection. tests/test_sm90_decode_gate.py compiles it."""

import dataclasses
import itertools
import types
import unittest.mock
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode import cursor, merge, scores, softmax
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.sm90.decode import (
    eight_bit_tile,
    eight_bits,
    loader,
    scales,
)
from pallas_fa2.backends.sm90.decode.config import choose
from pallas_fa2.backends.sm90.decode.kernel import decode
from tests.support import hopper, interpreter, launches
from tests.support.decode_cases import (
    CASES,
    FP8,
    MODS,
    OF_8_BITS,
    Case,
    check,
    mods_of,
)
from tests.support.shared import RaceDetected
from tests.support.tiers import slow_but


def run(case: Case, *arrays: Any) -> Any:
    return interpreter.run(lambda *args: case.run(decode, *args), *arrays)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted(case: Case) -> None:
    check(case, decode)


@pytest.mark.parametrize("name", ["splits", "two_splits_of_a_cta", "two_heads_of_a_request"])
def test_the_cta_that_begins_a_tile_may_be_the_last(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = launches.grid_order
    monkeypatch.setattr(launches, "grid_order", lambda grid: reversed(list(order(grid))))
    check(CASES[name], decode)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *(f"8_bits_{name}" for name in OF_8_BITS)])
def test_runs(name: str) -> None:
    cases = CASES | {f"8_bits_{name}": case for name, case in OF_8_BITS.items()}
    check(cases[name], decode, jax.jit)


@pytest.mark.parametrize("case", OF_8_BITS.values(), ids=OF_8_BITS)
def test_interpreted_with_8_bits(case: Case) -> None:
    """With anything in the scales of slots that are not used, and NaN in their numbers if they are float8."""
    check(case, decode)


def test_results_do_not_depend_on_the_number_of_ctas_beyond_rounding() -> None:
    one, three = (Case((256, 70), num_ctas=n) for n in (1, 3))
    arrays = one.arrays()
    outs = [np.asarray(run(x, *arrays)[0], np.float32) for x in (one, three)]
    np.testing.assert_allclose(*outs, atol=2e-2)


def test_fixed_splits_do_not_depend_on_the_batch() -> None:
    """Bits of a sequence: alone or with others, on one CTA or five. Equal shares cut it elsewhere."""

    def first(split_blocks: int | None, lengths: tuple[int, ...], num_ctas: int) -> np.ndarray:
        options: Any = {"queries": 2, "q_len": 2, "heads": (16, 2), "dtype": jnp.float16}
        case = Case(lengths, num_ctas=num_ctas, split_blocks=split_blocks, **options)
        rows = zip(Case((250,), **options).arrays(), case.arrays()[:3], strict=False)
        q, k, v = (np.concatenate([x, y[len(x) :]]) for x, y in rows)
        args = q, k, v, *case.arrays()[3:]
        return np.asarray(run(case, *args)[1])[:2]

    batches = ((250,), 1), ((250,), 5), ((250, 70, 256), 3)
    alone, *others = (first(1, *x) for x in batches)
    for other in others:
        np.testing.assert_array_equal(alone, other)
    assert any((first(None, *batches[0]) != first(None, *x)).any() for x in batches[1:])


def test_a_cta_has_all_of_an_sm_where_tiles_are_as_many_as_sms() -> None:
    spec = Case((512,) * 16, capacity=512, heads=(32, 8), dims=(128, 128)).spec
    chosen = [choose(spec, num_sms) for num_sms in (127, 128, 132, 140)]
    assert [c.ctas_per_sm for c in chosen if c] == [2, 1, 1, 2]
    small = choose(dataclasses.replace(spec, quantized=FP8), 132)
    assert small is not None and small.ctas_per_sm == 2  # blocks arrive in half of the time


def test_a_cta_has_all_of_an_sm_where_a_second_one_would_have_no_blocks() -> None:
    chosen = [
        choose(Case((1,), capacity=blocks * 64, heads=(32, 8), dims=(128, 128)).spec, 132)
        for blocks in (66, 67)
    ]
    assert [c.ctas_per_sm for c in chosen if c] == [1, 2]


def test_a_cta_has_all_of_an_sm_where_few_tiles_have_wide_splits() -> None:
    def chosen(requests: int, q_heads: int, **options: Any) -> tuple[int, int] | None:
        case = Case((8192,) * requests, capacity=8192, heads=(q_heads, 1), dims=(128, 128))
        config = choose(case._replace(**options).spec, 132)
        return config and (config.ctas_per_sm, config.stages)

    assert chosen(33, 32) == (1, 6)
    others = chosen(34, 32), chosen(33, 16), chosen(33, 32, page_size=64)
    assert others == ((2, 2),) * 3 and chosen(33, 32, quantized=FP8) == (2, 4)


def test_what_says_where_blocks_lie_is_read_before_the_first_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a copy, each read would be waited for (docs/decisions/0089-first-copies-and-wide-splits.md)."""
    calls: list[str] = []

    def advance(self: Any, before: Any) -> Any:
        calls.append("read")
        return plain_advance(self, before)

    def load_block(self: Any, *args: Any) -> None:
        calls.append("copy")
        load(self, *args)

    load, plain_advance = loader.KvLoader.load_block, cursor.BlockLine.advance
    monkeypatch.setattr(cursor.BlockLine, "advance", advance)
    monkeypatch.setattr(loader.KvLoader, "load_block", load_block)
    case = CASES["splits"]
    jax.eval_shape(lambda *args: case.run(decode, *args), *case.arrays())
    stages = calls.index("copy")
    assert stages > 1 and calls[: 2 * stages] == ["read"] * stages + ["copy"] * stages


def refill_too_early(self: Any, step: Any, num_steps: Any, cursor: Any) -> Any:
    return refill(self, step + 1, num_steps, cursor)


def one_split_of_each_cta(cta: Any, begins_tile: Any) -> Any:
    return 2 * cta


refill = loader.KvLoader.refill

BUGS: dict[str, tuple[Any, str, Callable]] = {
    "a slot filled while it is read": (loader.KvLoader, "refill", refill_too_early),
    "a missing fence": (plgpu, "commit_smem", lambda: None),
    "values that do not exist": (scores.ScoreTile, "zero_missing_values", lambda *_: None),
    "splits where others are": (merge, "_split_index", one_split_of_each_cta),
    "a skipped wait": (plgpu, "barrier_wait", lambda barrier: None),
}


@pytest.fixture
def last_block_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are interpreted one after another: a tile's first CTA is then the last one that arrives."""
    reverse = types.SimpleNamespace(product=lambda *x: list(itertools.product(*x))[::-1])
    monkeypatch.setattr(launches, "itertools", reverse)


def test_the_order_of_arrivals_does_not_matter(request: pytest.FixtureRequest) -> None:
    case = CASES["two_splits_of_a_cta"]
    arrays = case.arrays()
    before = run(case, *arrays)
    request.getfixturevalue("last_block_first")
    after = run(case, *arrays)
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.usefixtures("last_block_first")
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((RaceDetected, AssertionError)):
        check(CASES["two_splits_of_a_cta"], decode)


def scales_of_1(*args: Any) -> softmax.ValueScales:
    found = load_value_scales(*args)
    return found._replace(scales=jnp.where(found.scales > 0, 1.0, 0.0))


load_value_scales = eight_bit_tile.load_value_scales


def of_all_slots(buffer: Any, first: Any, end: Any) -> Any:
    return find_largest(buffer, np.int32(0), np.int32(64))


find_largest = scales.largest_exponent


def read_after_refill(self: Any, step: Any, num_steps: Any, cursor: Any) -> Any:
    cursor = refill(self, step, num_steps, cursor)
    eight_bits.load_values(self.cta.memory.v.at[(step - 1) % self.cta.config.stages])
    return cursor


def prepare_q_without_scales(split: Any) -> jax.Array:
    return jnp.where(prepare_q(split) > 0, 1.0, 0.0)


prepare_q = eight_bit_tile.prepare_q


def prepare_q_with_scales_of_another_row(split: Any) -> jax.Array:
    scale = prepare_q(split)
    return jnp.where(scale > 0, jnp.min(scale), 0.0)


def prepare_q_without_fence(split: Any) -> jax.Array:
    with unittest.mock.patch.object(plgpu, "commit_smem", lambda: None):
        return prepare_q(split)


BUGS_OF_8_BITS: dict[str, tuple[Any, str, Any]] = {
    **{name: BUGS[name] for name in ("a missing fence", "values that do not exist", "a skipped wait")},
    "a slot read while it is filled": (loader.KvLoader, "refill", read_after_refill),
    "V without scales": (eight_bit_tile, "load_value_scales", scales_of_1),
    "scales of slots that are not used": (scales, "largest_exponent", of_all_slots),
    "Q without scales": (eight_bit_tile, "prepare_q", prepare_q_without_scales),
    "Q with the scales of another row": (eight_bit_tile, "prepare_q", prepare_q_with_scales_of_another_row),
    "Q that is no operand": (eight_bit_tile, "prepare_q", lambda _: layouts.splat_constant(1.0, (8,), layouts.COL_LAYOUT)),
    "Q that is read before it is an operand": (eight_bit_tile, "prepare_q", prepare_q_without_fence),
    "O in no order": (eight_bits, "order_output", lambda acc: acc),
    "a unit that is not raised": (softmax.ValueUnit, "raised", lambda self, exponent: (self, jnp.float32(1))),
}  # fmt: skip


@pytest.mark.usefixtures("last_block_first")
@pytest.mark.parametrize("bug", BUGS_OF_8_BITS)
def test_a_planted_bug_with_8_bits_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS_OF_8_BITS[bug])
    with pytest.raises((RaceDetected, AssertionError)):
        check(OF_8_BITS["splits"], decode)


def test_a_merge_before_all_splits_are_stored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block that is interpreted finds all splits, but nothing orders them."""
    monkeypatch.setattr(
        merge,
        "_arrive_at",
        lambda splits, _: jnp.where(splits.last == jax.lax.axis_index("cta"), 1, 0),
    )
    with pytest.raises(RaceDetected, match="is not ordered after"):
        check(CASES["two_splits_of_a_cta"], decode)


@pytest.mark.parametrize("name", slow_but(lambda name: name in ("alibi", "streaming"), MODS))
def test_mods_over_splits(name: str) -> None:
    """Against the reference, with lengths that end in other blocks."""
    case = Case((250, 0, 133), queries=2, q_len=2)
    q, k, v, lengths, _ = case.arrays()
    if name == "streaming":  # keys that no query attends to
        k, v = k.copy(), v.copy()
        k[0, 5:100], v[0, 5:100] = np.nan, np.nan
    q = q.reshape(3, 2, *q.shape[1:])
    options = mods_of(name, (3, 4, 2, case.capacity))

    def run(q: Any, k: Any, v: Any, lengths: Any, implementation: str) -> Any:
        cache = fa.Cache(k, v, lengths)
        options_ = {"return_lse": True, "implementation": implementation}
        return fa.cached_attention(q, cache, **options, **options_)

    wide = (np.asarray(x, np.float32) for x in (q, k, v))
    expected, expected_lse = run(*wide, lengths, "reference")
    with hopper.planned_for_h200(cores=3):
        out, lse = interpreter.run(lambda *args: run(*args, "hopper"), q, k, v, lengths)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_hidden_nan_stays_hidden_from_columns_of_padding(packed: bool) -> None:
    """Columns that are no query read the mask of some other one, which may show them a key that no query sees."""
    case = Case((100, 128), queries=(1, 2) if packed else 1, capacity=128)
    q, k, v, lengths, starts = case.arrays()
    v = v.copy()
    v[0, 5:10] = np.nan
    if packed:
        flags = np.zeros(case.num_tokens, np.int32)
        flags[1:] = 1  # the second request's queries see those keys of their own
        hidden = fa.mask_fn(lambda q, k: (k.index < 5) | (k.index >= 10) | (q.flag == 1))
        options = {"mask": hidden(q_tokens={"flag": flags}), "queries": fa.Packed(starts)}
    else:
        q = q.reshape(2, 1, *q.shape[1:])
        mask = np.ones((2, 4, 1, 128), bool)
        mask[0, :, :, 5:10] = False
        options = {"mask": mask}

    def run(q: Any, k: Any, v: Any, lengths: Any, implementation: str) -> Any:
        return fa.cached_attention(
            q, fa.Cache(k, v, lengths), implementation=implementation, **options
        )

    wide = (np.asarray(x, np.float32) for x in (q, k, v))
    expected = run(*wide, lengths, "reference")
    assert np.isfinite(expected).all()
    with hopper.planned_for_h200(cores=3):
        out = interpreter.run(lambda *args: run(*args, "hopper"), q, k, v, lengths)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)


def test_hidden_nan_of_8_bits_stays_hidden() -> None:
    """V is loaded before the scores, but not where code says which keys a query attends to."""
    case = Case((100, 128), capacity=128)
    q, k, v, lengths, _ = case.arrays()
    k, v, mask = k.astype(FP8), v.astype(FP8), np.ones((2, 4, 1, 128), bool)
    v[0, 5:10], mask[0, :, :, 5:10] = np.nan, False
    q, scale = q.reshape(2, 1, *q.shape[1:]), np.ones((2, 2, 128), jnp.bfloat16)

    def run(q: Any, implementation: str, k: Any, v: Any, lengths: Any, *scales: Any) -> Any:
        cache = fa.Cache(k, v, lengths, *scales)
        return fa.cached_attention(q, cache, mask=mask, implementation=implementation)

    expected = run(
        *(np.asarray(q, np.float32), "reference"),
        *(np.asarray(x, np.float32) for x in (k, v)),
        lengths,
    )
    assert np.isfinite(expected).all()
    with hopper.planned_for_h200(cores=3):
        out = interpreter.run(
            lambda q, *rest: run(q, "hopper", *rest), q, k, v, lengths, scale, scale
        )
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)
