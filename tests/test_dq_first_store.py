"""A backward that stores the first of a row's dQ and adds the others: which calls it suits, who waits for
whom, and its gradients."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import register_io
from pallas_fa2.backends.common.primitives.layouts import WARPS
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq import DqRequest
from pallas_fa2.backends.sm90.backward.dq.first_store import (
    ALL_STORED,
    STORED_BIT,
    DqTickets,
    FirstStoreDq,
)
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from tests.contract import suite
from tests.contract.cases import MASKED, Case
from tests.contract.rule import assert_as_dense
from tests.support import compile_gate, interpreter, shared
from tests.support.hopper import (
    all_at_once,
    attend_and_differentiate,
    packed_inputs,
    planned_for_h200,
    storing_first,
)
from tests.support.shared import RaceDetected
from tests.support.tiers import slow, slow_but
from tests.test_determinism import Sizes, differences

WINDOW = fa.Causal() & fa.Window(128)
WIDE = fa.Window(400)
# Whole blocks of queries that see nothing, and of keys that nobody sees.
UNSEEN = fa.Window(64) & fa.mask_fn(lambda q, k: (q.index // 150 == 1) & (k.index < 333))


def classes(visits: int) -> np.ndarray:
    """Each of 8 blocks of queries visited so often, by 8 tiles; two thirds of the visits are cut."""
    found = np.full((1, 1, 8, 8), EMPTY, np.int32)
    for i in range(8):
        found[..., i, np.arange(i, i + visits) % 8] = FULL if i % 3 else PARTIAL
    return found


def suits(found: Any, dim: int = 128, ordered: bool = False, **options: Any) -> bool:
    problem = KernelSpec(
        1, 512, 1024, 16, 16, 1.0, None, **({"mask": "any", "uses_mask_bits": True} | options)
    )
    config, possible = (
        BackwardConfig(dim, dim, deterministic=ordered),
        functools.partial(np.asarray, found),
    )
    return FirstStoreDq.suits(DqRequest(problem, config, found, possible))


def test_few_visits_are_known_when_traced() -> None:
    """As measured (docs/decisions/0029-dq-first-store.md)."""
    assert suits(classes(2)) and suits(classes(4)) and suits(classes(3), 64)
    assert not suits(classes(5)) and suits(jnp.asarray(classes(5)))
    assert not suits(jnp.asarray(classes(6))) and not suits(jnp.asarray(classes(5)), 64)
    assert not suits(classes(2), 256) and not suits(None, mask=None)
    assert not suits(classes(2), ordered=True)


@pytest.mark.parametrize(
    "mask, few",
    [
        (lambda ids: fa.Causal() & fa.Window(128) & fa.Segments(ids), True),
        (lambda ids: fa.Causal() & fa.Documents(ids, longest=512), True),
        (lambda ids: fa.Causal() & fa.Documents(ids, longest=1024), False),
        (lambda ids: fa.Causal() & fa.Segments(ids), False),
    ],
    ids=["window", "short", "long", "any"],
)
def test_few_visits_are_known_whatever_the_data(
    mask: Callable, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, suits = [], FirstStoreDq.suits
    monkeypatch.setattr(FirstStoreDq, "suits", lambda *x: found.append(suits(*x)) or found[-1])

    def attend(q: jax.Array, ids: jax.Array) -> jax.Array:
        out = fa.flash_attention(q, q, q, mask=mask(ids), implementation="hopper")
        return out.astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    with planned_for_h200():
        jax.eval_shape(jax.grad(attend), q, jax.ShapeDtypeStruct((4096,), jnp.int32))
    assert found == [few]


CASES = [
    case
    for case in MASKED
    if max(case.head_dim, case.value_dim or 0) <= 128 and not case.name.startswith("rising")
]
# Interpreting takes long.
INTERPRETED = [
    case
    for case in CASES
    if case.name in ("window_h96", "packed_h64", "lengths_h64", "capped_h96", "documents_h128")
]


@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in ("window_h96", "packed_h64"), INTERPRETED), ids=str
)
def test_contract_interpreted(case: Case) -> None:
    with planned_for_h200(cores=2), storing_first():
        suite.check(case, "hopper", jit=interpreter.jit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    with storing_first():
        suite.check(case, "hopper")


@pytest.mark.parametrize(
    "mask, head_dim, heads, cores",
    [
        (WIDE, 128, (1, 1), 4),
        (WINDOW, 128, (1, 1), 3),
        slow(UNSEEN, 128, (1, 1), 3),
        (UNSEEN, 64, (2, 1), 4),
    ],
)
def test_who_adds_waits_for_who_stores(
    mask: fa.Mask, head_dim: int, heads: tuple[int, int], cores: int
) -> None:
    """With CTAs at the same time; rows that nobody visits are 0."""
    args = packed_inputs(1, (450, 450), heads, head_dim)[:4]
    for _ in range(4):  # on a busy machine a CTA may be done before another one begins
        with planned_for_h200(cores=cores), storing_first(), all_at_once():
            got = interpreter.run(attend_and_differentiate(mask), *args)
        waited, told_rows = shared.current.added, shared.current.told
        if waited or mask is not WIDE:
            break
    assert_as_dense(got, attend_and_differentiate(mask, "reference"), args, run=interpreter.run)
    visited = np.ones(450, bool) if mask is not UNSEEN else mask.dense(450)[0].any(1)
    blocks = {row // BackwardConfig(head_dim, head_dim).block_q for row in np.flatnonzero(visited)}
    assert len(told_rows) >= heads[0] * len(blocks)  # tiles that see nothing visit a block too
    assert all(told >> STORED_BIT == 2 * WARPS for _, _, told in waited)
    assert all(ALL_STORED > ticket > 0 for _, ticket, _ in waited)
    assert waited or mask is not WIDE  # of which all tiles begin with the same queries


def test_all_have_stored_when_each_warp_has() -> None:
    """Of both warpgroups that multiply."""
    assert ALL_STORED >> STORED_BIT == 2 * WARPS


def test_a_store_that_is_told_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    put = register_io.put_fragments

    def told_before(target: Any, tile: jax.Array, first: Any) -> None:
        tell(*seen)
        put(target, tile, first)

    def used(tickets: DqTickets, t: Any, row: Any) -> Any:
        seen[:] = tickets, row, use(tickets, t, row)
        return seen[2]

    seen: list[Any] = []
    use, tell = DqTickets.resolve, DqTickets.signal
    monkeypatch.setattr(DqTickets, "resolve", used)
    monkeypatch.setattr(DqTickets, "signal", lambda *_: None)
    monkeypatch.setattr(register_io, "put_fragments", told_before)
    args = packed_inputs(1, (300, 300), (1, 1), 128)[:4]
    with planned_for_h200(cores=3), storing_first(), all_at_once(), pytest.raises(RaceDetected):
        interpreter.run(attend_and_differentiate(WIDE), *args)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", ["packed", "window"])
def test_the_same_up_to_the_order_of_sums(name: str, head_dim: int) -> None:
    with storing_first():
        found = differences(name, Sizes(3, 2000, head_dim, 1000), "hopper")
    assert not found.any(), found.tolist()


# Of a window, what a loop puts aside, and what all of the kernel does.
@pytest.mark.parametrize(
    "head_dim, in_loops, stores", [slow(64, 14, 184), slow(96, 0, 16), slow(128, 2, 40)]
)
def test_a_window_compiles_with_few_spills(head_dim: int, in_loops: int, stores: int) -> None:
    args = [jax.ShapeDtypeStruct((1, 4096, 16, head_dim), jnp.bfloat16)] * 4
    with planned_for_h200():
        found = compile_gate.compile_for_h200(attend_and_differentiate(WINDOW), *args)
    reports = {report.name: report for report in found}
    report = reports.pop("attention_gradients")
    assert compile_gate.spills_while_multiplying(report) <= in_loops
    assert report.spill_stores <= stores
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))
    for other in reports.values():
        compile_gate.assert_clean(other)


@pytest.mark.slow
def test_dq_takes_no_more_memory_than_with_zeros() -> None:
    """One float32 dQ, 33.6 MB, beside what the inputs' dtype has."""
    args = [jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)] * 4

    def differentiate(*args: Any) -> Any:
        return attend_and_differentiate(WINDOW)(*args)[1]

    with planned_for_h200():
        stored = compile_gate.temporary_bytes_for_h200(differentiate, *args)
        with storing_first(False):
            added = compile_gate.temporary_bytes_for_h200(differentiate, *args)
    assert stored <= added + (1 << 20)
