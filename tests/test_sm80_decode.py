"""The decode kernel by mma.sync, interpreted with race detection. tests/test_sm80_gate.py compiles it."""

from typing import Any

import jax
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode import scores
from pallas_fa2.backends.sm80.decode import loader
from pallas_fa2.backends.sm80.decode.config import choose
from pallas_fa2.backends.sm80.decode.kernel import decode
from pallas_fa2.backends.sm80.primitives import async_copy
from pallas_fa2.device import Device
from tests.support import gpus, interpreter
from tests.support.decode_cases import CASES, Case, check, mods_of
from tests.support.hopper import A100, planned_for
from tests.support.shared import RaceDetected
from tests.support.tiers import slow, slow_but

RTX_3090 = gpus.device("8.6")


@pytest.mark.parametrize("name", slow_but(lambda name: name not in ("group_20", "full"), CASES))
def test_interpreted(name: str) -> None:
    check(CASES[name], decode)


@pytest.mark.gpu
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_runs(name: str, stages: int) -> None:
    check(CASES[name]._replace(stages=stages), decode, jax.jit)


@pytest.mark.parametrize("stages", [1, slow(3), slow(4)])
@pytest.mark.parametrize("name", ["two_splits_of_a_cta", "packed", "pages_16"])
def test_rings_of_other_lengths(name: str, stages: int) -> None:
    """Of one stage, K_j+1 is copied while V_j is multiplied; a long one has the blocks of several tiles."""
    check(CASES[name]._replace(stages=stages), decode)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_tiles_of_one_block(stages: int) -> None:
    """Every block brings a Q of its own."""
    check(Case((60, 3, 0, 64, 33), num_ctas=2, stages=stages), decode)


def ask_too_late(self: Any) -> int:
    return pending(self) + 1


def load_values_too_early(self: Any, step: Any, block: Any) -> None:
    load_values(self, step + 1, block)


def one_slot_for_q(self: Any, slot: Any, tile: Any) -> None:
    load_q(self, slot * 0, tile)


pending = loader.KvLoader.pending.fget
load_values, load_q = loader.KvLoader.load_values, loader.KvLoader._load_q

BUGS: dict[str, tuple[Any, str, Any]] = {
    "a block that has not landed": (loader.KvLoader, "pending", property(ask_too_late)),
    "a slot filled while it is read": (loader.KvLoader, "load_values", load_values_too_early),
    "a missing meeting": (async_copy, "sync_cta", lambda warpgroups: None),
    "Q of another tile": (loader.KvLoader, "_load_q", one_slot_for_q),
    "values that do not exist": (scores.ScoreTile, "zero_missing_values", lambda *_: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    with pytest.raises((RaceDetected, AssertionError)):
        check(CASES["two_splits_of_a_cta"], decode)


@pytest.mark.parametrize("meeting", range(3))
def test_each_meeting_of_a_block_is_needed(meeting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before S, before O, and after zeros in V: the calls are traced in this order, once each, after the ring is
    filled."""
    calls = iter(range(100))

    def all_but_one(warpgroups: int) -> None:
        if next(calls) != meeting:
            sync_cta(warpgroups)

    sync_cta = async_copy.sync_cta
    monkeypatch.setattr(async_copy, "sync_cta", all_but_one)
    with pytest.raises(RaceDetected):
        check(CASES["two_splits_of_a_cta"], decode)


@pytest.mark.parametrize(
    "name", slow_but(lambda name: name == "streaming", ["soft_cap", "streaming", "bias", "tree"])
)
def test_mods_over_splits(name: str) -> None:
    """Against the reference, with lengths that end in other blocks."""
    case = Case((250, 0, 133), queries=2, q_len=2)
    q, k, v, lengths, _ = case.arrays()
    if name == "streaming":  # keys that no query attends to
        k, v = k.copy(), v.copy()
        k[0, 5:100], v[0, 5:100] = np.nan, np.nan
    q = q.reshape(3, 2, *q.shape[1:])
    options = mods_of(name, (3, 4, 2, case.capacity))

    def run(q: Any, k: Any, v: Any, lengths: Any, implementation: Any) -> Any:
        cache = fa.Cache(k, v, lengths)
        return fa.cached_attention(
            q, cache, return_lse=True, implementation=implementation, **options
        )

    wide = [np.asarray(x, np.float32) for x in (q, k, v)]
    expected, expected_lse = run(*wide, lengths, "reference")
    with planned_for(RTX_3090._replace(num_sms=3)):
        out, lse = interpreter.run(lambda *args: run(*args, "ampere"), q, k, v, lengths)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize(
    "device, dims, columns, expected",
    [
        (A100, (128, 128), 8, (2, 2)),
        (A100, (64, 64), 8, (4, 2)),
        (A100, (256, 256), 8, (2, 1)),
        (RTX_3090, (64, 64), 8, (2, 2)),
        (RTX_3090, (128, 128), 8, (2, 1)),
        (RTX_3090, (256, 256), 8, (1, 1)),
        (RTX_3090, (256, 256), 64, None),
        (gpus.device("9.0"), (128, 128), 8, (3, 2)),
    ],
)
def test_the_ring_fits_into_shared_memory(
    device: Device, dims: tuple[int, int], columns: int, expected: tuple[int, int] | None
) -> None:
    """As many stages, and CTAs on a multiprocessor."""
    case = Case((256,), queries=columns // 8, q_len=columns // 8, heads=(8, 1), dims=dims)
    config = choose(case.spec, device)
    assert (config and (config.stages, config.ctas_per_sm)) == expected
