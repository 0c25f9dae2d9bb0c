"""A backward whose CTAs take whole heads: who visits what, which calls it suits, and its gradients."""

import collections
import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import block_mask
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq import DqRequest
from pallas_fa2.backends.sm90.backward.dq.head_per_cta import (
    DqVisit,
    HeadBlockMask,
    HeadPerCtaDq,
    HeadSchedule,
)
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from tests.contract import suite
from tests.contract.cases import MASKED, PLAIN, Case
from tests.support import compile_gate, interpreter
from tests.support.hopper import (
    attend_and_differentiate,
    packed,
    planned_for_h200,
    whole_heads,
)
from tests.support.tiers import slow, slow_but
from tests.test_determinism import CALLS, Sizes, differences

SCHEDULES = [
    HeadSchedule.choose(
        KernelSpec(3, q_len, kv_len, *heads, 1.0, offset), BackwardConfig(dim, dim, num_ctas=4)
    )
    for dim, q_len, kv_len, heads, offset in (
        (64, 500, 500, (2, 2), 0),
        (128, 500, 500, (2, 2), 0),
        (128, 100, 300, (4, 2), 200),
        (96, 300, 200, (2, 1), 0),
        (128, 197, 197, (1, 1), None),
        (64, 60, 60, (2, 2), None),
        (128, 300, 300, (3, 1), None),
    )
]


@pytest.mark.parametrize("plan", SCHEDULES, ids=str)
def test_one_cta_has_all_visits_to_a_row(plan: HeadSchedule) -> None:
    """The first of them begins, and the last ends; between heads, no rows of what is added up are shared."""
    found: dict[Any, list[tuple[int, DqVisit]]] = collections.defaultdict(list)
    table = plan.tile_scheduler(None).table
    for cta in range(plan.num_workers):
        for number in table[cta, :, 0]:
            if number == plan.order.count:
                break
            tile = KvTile(plan, 0, 0, number)
            heads, first = range(plan.group), plan.first_q_block(tile.compute_coordinates()[2])
            for t, (head, block) in enumerate(
                (h, m) for h in heads for m in range(first, plan.q_blocks)
            ):
                row = tile.compute_dq_block(head, block)
                step = Step(
                    dataclasses.replace(tile, first_step=t - (block - first)), t, row, False
                )
                found[row].append((cta, plan.load_visit(step)))
    assert sorted(found) == list(range(plan.num_q_blocks))
    for all_of_row in found.values():
        assert len({cta for cta, _ in all_of_row}) == 1
        others = [False] * (len(all_of_row) - 1)
        assert [visit.is_first for _, visit in all_of_row] == [True, *others]
        assert [visit.is_last for _, visit in all_of_row] == [*others, True]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_a_visit_is_one_number(first: bool, last: bool) -> None:
    visit = DqVisit(jnp.int32(12345), jnp.bool_(first), jnp.bool_(last))
    assert DqVisit.decode(visit.encode()) == visit


def suits(
    dim: int, length: int, batch: int, heads: tuple[int, int] = (16, 16), **options: Any
) -> bool:
    options = {"scale": 1.0, "causal_offset": 0} | options
    problem = KernelSpec(batch, length, length, *heads, **options)
    return HeadPerCtaDq.suits(DqRequest(problem, BackwardConfig(dim, dim)))


def test_short_sequences_of_many_heads_are_taken_whole() -> None:
    """As measured (docs/decisions/0027-head-per-cta.md)."""
    assert suits(128, 512, 32) and suits(64, 512, 32, (32, 32)) and suits(64, 1024, 16, (32, 32))
    assert suits(128, 256, 64, causal_offset=None) and suits(
        64, 512, 32, (32, 32), causal_offset=None
    )
    assert suits(128, 197, 83, causal_offset=None) and suits(128, 384, 42)
    assert not suits(128, 1024, 16) and not suits(128, 512, 32, causal_offset=None)
    assert not suits(
        128, 384, 42, causal_offset=None
    )  # some CTAs would have 6 heads, and most have 5
    assert not suits(128, 512, 4) and not suits(128, 256, 9)  # heads for some CTAs alone
    assert not suits(256, 256, 64)


def test_under_a_mask_some_heads_may_be_longer() -> None:
    assert suits(128, 256, 64, mask="any", causal_offset=None)
    assert not suits(128, 256, 16, mask="any", causal_offset=None)


def test_who_is_first_and_last_under_a_mask() -> None:
    classes = np.random.default_rng(0).choice([EMPTY, EMPTY, PARTIAL, FULL], (2, 3, 5, 7))
    classes[0, 0, :, 2], classes[0, 1, 3] = EMPTY, EMPTY
    classes = classes.astype(np.int32)
    seen = HeadBlockMask.from_classes(classes)
    on_device = interpreter.run(HeadBlockMask.from_classes, jnp.asarray(classes))
    np.testing.assert_array_equal(on_device.flags, seen.flags)
    for at in np.ndindex(2, 3):
        visited: dict[int, list[int]] = {block: [] for block in range(7)}
        for tile in range(5):
            count, _ = block_mask.unpack_counts(seen.num_blocks[*at, tile])
            listed = block_mask.reversed_block_id(seen.block_indices[*at, tile, :count], 7)
            assert set(listed) >= set(np.flatnonzero(classes[*at, tile]))
            for block in listed:
                visited[int(block)].append(int(seen.flags[*at, tile, block]))
        for flags in visited.values():
            assert [x & 1 for x in flags] == [1] + [0] * (len(flags) - 1)
            assert [x >> 1 for x in flags] == [0] * (len(flags) - 1) + [1]


@pytest.mark.parametrize("batch, heads", [(1, (1, 1)), (5, (16, 4)), (200, (16, 16))])
def test_one_block_of_keys_is_a_whole_head(batch: int, heads: tuple[int, int]) -> None:
    assert suits(128, 128, batch, heads) and suits(64, 100, batch, heads, causal_offset=None)


OTHER = re.compile(r".*(h136|h192|h256|hv_larger|rising).*")
CASES = [
    case
    for case in (*PLAIN, *MASKED)
    if not OTHER.fullmatch(case.name) and max(case.head_dim, case.value_dim or 0) <= 128
]
# One for each kind, as interpreting takes long; masks that are asked first take no whole heads.
INTERPRETED = [
    case
    for case in CASES
    if case.name
    in (
        *("full", "causal_end_one_query", "grouped", "multi_query", "h72", "h80_causal_end", "h96"),
        *("h104_narrow", "hv_much_smaller", "h128_causal", "odd_h64", "odd_h96", "odd_h128"),
        *("window_h96", "packed_h64", "documents_h128", "lengths_h64", "extremes_h128"),
        *("reach_h64", "capped_h96"),
    )
]


QUICK = (
    "full",
    "causal_end_one_query",
    "grouped",
    "h80_causal_end",
    "odd_h128",
    "packed_h64",
    "capped_h96",
)


@pytest.mark.parametrize("case", slow_but(lambda case: case.name in QUICK, INTERPRETED), ids=str)
def test_contract_interpreted(case: Case) -> None:
    with planned_for_h200(cores=2), whole_heads():
        suite.check(case, "hopper", jit=interpreter.jit)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract(case: Case) -> None:
    with whole_heads():
        suite.check(case, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", CALLS)
def test_dq_is_the_same_in_every_run(name: str, head_dim: int) -> None:
    """Without asking for it."""
    with whole_heads():
        found = differences(name, Sizes(70, 450, head_dim, 1000), "hopper", in_bits=True)
    assert not found.any(), found.tolist()


@pytest.mark.parametrize(
    "dims, length, mask",
    [
        slow((64, 64), 512, fa.Causal()),
        slow((64, 64), 197, None),
        slow((72, 72), 196, None),
        slow((128, 128), 512, fa.Causal()),
        slow((128, 128), 256, None),
        slow((128, 128), 197, None),
        slow((104, 128), 128, None),
    ],
)
def test_compiles_without_passes_after_it(dims: tuple, length: int, mask: Any) -> None:
    shapes = [(64, length, 16, dim) for dim in (dims[0], dims[0], dims[1], dims[1])]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with planned_for_h200():
        found = compile_gate.compile_for_h200(attend_and_differentiate(mask), *args)
    reports = {report.name: report for report in found}
    assert sorted(reports) == ["attention", "attention_gradients", "prepare_gradients"]
    report = reports["attention_gradients"]
    # of a step, three values at most
    assert compile_gate.spills_while_multiplying(report) <= 3
    assert report.spill_stores <= 96
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))
    compile_gate.assert_clean(reports["prepare_gradients"])


# Of the stores at H = 128, 12 are jax 0.12's.
@pytest.mark.parametrize("head_dim, in_loops, stores", [slow(64, 22, 260), slow(128, 4, 112)])
def test_masks_compile_with_few_spills(head_dim: int, in_loops: int, stores: int) -> None:
    shapes = [(64, 256, 16, head_dim)] * 4
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        return attend_and_differentiate(packed(ids))(q, k, v, dout)

    ids = jax.ShapeDtypeStruct((64, 256), jnp.int32)
    with planned_for_h200():
        found = compile_gate.compile_for_h200(run, *args, ids)
    (report,) = (x for x in found if x.name == "attention_gradients")
    assert "finish_gradients" not in {x.name for x in found}
    assert compile_gate.spills_while_multiplying(report) <= in_loops
    assert report.spill_stores <= stores
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


def test_one_visit_needs_no_room() -> None:
    """As in attention to few keys: 132 CTAs would keep 65,536 queries each."""
    spec = KernelSpec(1, 1 << 16, 77, 16, 16, 1.0, None)
    strategy = HeadPerCtaDq.choose(DqRequest(spec, BackwardConfig(128, 128)))
    assert strategy.accumulator_shape == (16, 64 * 128)


def test_few_heads_of_keys_are_taken_in_parts() -> None:
    """As by other schedules, where one block of keys is a whole head."""
    plan = HeadSchedule.choose(KernelSpec(2, 2048, 100, 64, 1, 1.0, None), BackwardConfig(128, 128))
    assert plan.group_splits == 64 and plan.num_workers == 128


def test_what_is_added_up_has_room_for_a_head_of_each_cta() -> None:
    """A float32 dQ of all heads would take 268 MB."""
    args = [jax.ShapeDtypeStruct((32, 512, 16, 128), jnp.bfloat16)] * 4

    def differentiate(*args: Any) -> Any:
        return attend_and_differentiate(fa.Causal())(*args)[1]

    with planned_for_h200():
        found = compile_gate.temporary_bytes_for_h200(differentiate, *args)
    assert found < 120e6
