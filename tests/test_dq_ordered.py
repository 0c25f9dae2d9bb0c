"""dQ in one order: who adds before whom, that nobody waits for ever, and what the compiler makes of it."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import fallback
from pallas_fa2.backends.common import block_mask_kernel
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.dq import ordered_schedule
from pallas_fa2.backends.sm90.backward.dq.ordered_schedule import (
    OrderedBlockMask,
    OrderedSchedule,
    OrderedTile,
)
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from tests.contract.rule import assert_as_dense
from tests.support import compile_gate, interpreter, shared
from tests.support.hopper import (
    all_at_once,
    asking_first,
    packed_inputs,
    planned_for_h200,
    whole_heads,
)
from tests.support.masks import causal_end
from tests.support.tiers import slow


def schedule(
    head_dim: int, q_len: int, kv_len: int, offset: int | None, heads: tuple[int, int] = (4, 2)
) -> OrderedSchedule:
    problem = KernelSpec(2, q_len, kv_len, *heads, scale=1.0, causal_offset=offset)
    return OrderedSchedule.choose(
        problem, BackwardConfig(head_dim, head_dim, num_ctas=6, deterministic=True)
    )


SCHEDULES = [
    schedule(64, 1000, 1000, 0),
    schedule(128, 700, 700, 0),
    schedule(128, 300, 900, 600),
    schedule(256, 900, 500, 0, (6, 2)),
    schedule(128, 500, 700, None),
]


def rows_of(plan: OrderedSchedule, tile: Any) -> list[int]:
    """Of dQ, in the order of the tile's visits; every head of its group, in turn."""
    first = plan.first_q_block(tile.compute_coordinates()[2])
    heads = range(plan.group)
    return [tile.compute_dq_block(h, m) for h in heads for m in range(first, plan.q_blocks)]


@pytest.mark.parametrize("plan", SCHEDULES, ids=str)
def test_a_tile_adds_after_those_before_it_in_the_order(plan: OrderedSchedule) -> None:
    added = dict.fromkeys(range(plan.dq_shape[0]), 0)
    for number in range(plan.order.count):
        tile = OrderedTile(plan, 0, 0, number)
        for row in rows_of(plan, tile):
            assert plan.compute_dq_rank(Step(tile, 0, row, masked=False)) == added[row]
            added[row] += 1


def test_under_a_mask_each_head_of_a_group_has_tiles() -> None:
    problem = KernelSpec(1, 9000, 9000, 64, 16, scale=1.0, causal_offset=None)
    config = BackwardConfig(128, 128, deterministic=True)
    assert OrderedSchedule.choose(problem, config).group_splits == 1
    masked = dataclasses.replace(problem, mask="any")
    assert OrderedSchedule.choose(masked, config).group_splits == 4


def random_classes(*shape: int) -> np.ndarray:
    found = np.random.default_rng(0).choice([EMPTY, PARTIAL, FULL], shape).astype(np.int32)
    found[:, :, 1] = EMPTY
    return found


def test_lists_go_from_the_first_block_to_the_last_in_runs() -> None:
    classes = random_classes(2, 3, 5, 11)
    plan, seen = SCHEDULES[0], OrderedBlockMask.from_classes(classes)
    added = np.zeros((2, 3, 11), int)
    for tile in reversed(range(5)):
        for at in np.ndindex(2, 3):
            expected = [m for m in range(11) if classes[*at, tile, m] != EMPTY] or [10]
            assert seen.num_blocks[*at, tile] == len(expected)
            entries = seen.block_indices[*at, tile, : len(expected)]
            assert [int(plan.decode_q_block(jnp.int32(x))) for x in entries] == expected
            ordinals = entries >> ordered_schedule.RANK_BIT & (ordered_schedule.MAX_TILES - 1)
            assert ordinals.tolist() == added[*at, expected].tolist()
            added[*at, expected] += 1
            found, place = [], 0
            while place < len(expected):
                run = int(seen.run_lengths[*at, tile, place])
                cut, full = run & 0xFFFF, run >> ordered_schedule.FULL_BIT
                assert cut + full > 0
                found += [PARTIAL] * cut + [FULL] * full
                place += cut + full
            assert found == [max(classes[*at, tile, m], PARTIAL) for m in expected]


def test_the_device_lists_what_the_host_does() -> None:
    classes = random_classes(1, 2, 6, 17)
    on_device = jax.jit(OrderedBlockMask.from_classes)(jnp.asarray(classes))
    chex.assert_trees_all_equal(tuple(on_device), tuple(OrderedBlockMask.from_classes(classes)))


@pytest.mark.parametrize("known", [True, False])
def test_the_table_counts_what_each_tile_visits(known: bool) -> None:
    plan = dataclasses.replace(SCHEDULES[1], spec=SCHEDULES[4].spec)
    classes = random_classes(2, 4, plan.q_blocks, plan.kv_tiles)
    seen = plan.block_mask(classes if known else jnp.asarray(classes))
    counts = np.broadcast_to(seen.num_blocks, (2, plan.heads, plan.kv_tiles))
    expected = [counts[plan.coordinates(number)] for number in range(plan.order.count)]
    entries = np.asarray(plan.tile_scheduler(seen).table)[
        DynamicTileScheduler.header_rows(plan.num_workers) :
    ]
    assert entries[:-1, 0].tolist() == list(range(plan.order.count))
    assert entries[:-1, 1].tolist() == expected
    assert entries[-1, 0] == plan.order.count


CALLS = {
    "causal": lambda ids: fa.Causal(),
    "end": lambda ids: causal_end,
    "full": lambda ids: None,
    "packed": lambda ids: fa.Causal() & fa.Segments(ids),
    "window": lambda ids: fa.Causal() & fa.Window(100),
    "dense": lambda ids: fa.Dense(jnp.tril(jnp.ones((300, 300), bool))),
    # the first 128 keys are seen by nobody
    "unseen": lambda ids: fa.mask_fn(
        lambda q, k: (k.index >= 140) & ((q.index * 7 - k.index) % 5 < 3)
    ),
}


def gradients(name: str, implementation: str) -> Any:
    def run(q: Any, k: Any, v: Any, dout: Any, ids: Any) -> Any:
        def attend(q: Any, k: Any, v: Any) -> Any:
            options = {"implementation": implementation, "deterministic_gradients": True}
            return fa.flash_attention(q, k, v, mask=CALLS[name](ids), **options)

        return jax.vjp(attend, q, k, v)[1](dout)

    return run


@pytest.mark.parametrize(
    "name, head_dim, lengths, heads, ctas",
    [
        ("causal", 128, (400, 400), (1, 1), 3),
        ("end", 64, (300, 420), (2, 1), 3),
        *(("full", head_dim, (100, 260), (1, 1), 4) for head_dim in (192, 256)),
        ("packed", 128, (300, 300), (2, 1), 3),
        slow("packed", 256, (200, 200), (1, 1), 4),
        slow("window", 64, (400, 400), (1, 1), 2),
        slow("dense", 128, (300, 300), (1, 1), 2),
    ],
)
def test_turns_come_in_order(
    name: str, head_dim: int, lengths: tuple, heads: tuple, ctas: int
) -> None:
    """With fewer CTAs than tiles, all at the same time."""
    args = packed_inputs(1, lengths, heads, head_dim)
    with planned_for_h200(cores=ctas), all_at_once():
        got = interpreter.run(gradients(name, "hopper"), *args)
    added = shared.current.added
    assert_as_dense(got, gradients(name, "reference"), args, run=interpreter.run)
    nothing = max(row for row, _, _ in added)  # where dQ goes before the first step
    assert all(ordinal == turn for row, ordinal, turn in added if row != nothing)
    assert max(ordinal for _, ordinal, _ in added) > 0


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_cta_may_find_all_tiles_taken(head_dim: int) -> None:
    """By the first one, where one runs after another."""
    args = packed_inputs(1, (60, 300), (1, 1), head_dim)
    with planned_for_h200(cores=4), whole_heads(False):
        got = interpreter.run(gradients("full", "hopper"), *args)
    assert_as_dense(got, gradients("full", "reference"), args, run=interpreter.run)


@pytest.mark.parametrize("head_dim", [128, slow(256)])
def test_a_mask_is_asked_about_what_tiles_visit(head_dim: int) -> None:
    args = packed_inputs(1, (300, 330), (2, 1), head_dim)
    with planned_for_h200(cores=4), asking_first():
        got = interpreter.run(gradients("unseen", "hopper"), *args)
    assert_as_dense(got, gradients("unseen", "reference"), args, run=interpreter.run)


@pytest.mark.parametrize(
    "head_dim, name",
    [slow(64, "causal"), slow(128, "packed"), slow(192, "causal"), slow(256, "full")],
)
def test_compiles_without_spills_where_it_multiplies(head_dim: int, name: str) -> None:
    shapes = [(2, 4096, heads, head_dim) for heads in (4, 2, 2, 4)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with planned_for_h200():
        reports = compile_gate.compile_for_h200(
            gradients(name, "hopper"), *args, jax.ShapeDtypeStruct((2, 4096), jnp.int32)
        )
    (report,) = (x for x in reports if x.name == "attention_gradients")
    # of a step, four values at most; the loader puts more aside, which has 24 registers and time
    assert compile_gate.spills_while_multiplying(report) <= 4
    assert report.spill_stores <= 400
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


def test_what_masks_may_list_has_room_in_an_entry() -> None:
    assert block_mask_kernel.MAX_BLOCKS < 1 << (
        ordered_schedule.EMPTY_BIT - ordered_schedule.BLOCK_BIT
    )
    assert (
        -(-block_mask_kernel.MAX_BLOCKS * 64 // BackwardConfig.block_kv)
        <= ordered_schedule.MAX_TILES
    )


def test_blockwise_sums_gradients_of_score_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are asked for; the forward is ours."""
    monkeypatch.setattr(fallback, "_warned", set())
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (jax.random.normal(key, (1, 70, 2, 64), jnp.bfloat16) for key in keys[:3])
    slopes = jax.random.uniform(keys[3], (2,))

    def loss(implementation: str) -> Any:
        def run(q: Any, k: Any, v: Any, slopes: Any) -> Any:
            options = {"implementation": implementation, "deterministic_gradients": True}
            out = fa.flash_attention(q, k, v, score=fa.alibi(slopes), **options)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(run, (0, 1, 2, 3))

    with planned_for_h200(cores=2), pytest.warns(fa.FallbackWarning, match="run on blockwise"):
        got = interpreter.run(loss("hopper"), q, k, v, slopes)
    assert not shared.current.added
    assert_as_dense(got, loss("reference"), [q, k, v, slopes], run=interpreter.run)
