"""Which CTA reads which blocks of keys: the plan of decode kernels against NumPy."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_fa2.backends.common.decode import plan_tables, support
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig
from pallas_fa2.backends.common.decode.deal import Deal
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.plan_tables import FixedSplits, PlanTables
from pallas_fa2.backends.common.decode.share import Share
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.decode.step_plan import MAX_ENTRIES, StepPlan
from pallas_fa2.backends.common.primitives.launch import build_kernel
from tests.support import interpreter, programs
from tests.support.decode_cases import CASES, Case

SHARE = Share(0, 0, 0, 0, 0, 0, Entry(*[0] * len(Entry._fields)), Deal(0, 0, 0, 0))


def load_by_kernel(case: Case, count: int, like: Any, load: Callable[[Any, Any], Any]) -> Any:
    """What `load` of a plan and an index gives in a kernel, for indices below `count`: arrays in the structure of
    `like`."""
    leaves, structure = jax.tree.flatten(like)

    def run_all(lengths: Any, starts: Any) -> Any:
        flat, tree = jax.tree.flatten(case.plan(lengths, starts))

        def run(refs: tuple, _: Any) -> None:
            *arrays, out = refs
            index = lax.axis_index("cta")
            for i, x in enumerate(jax.tree.leaves(load(jax.tree.unflatten(tree, arrays), index))):
                out[index, i] = jnp.int32(x)

        shape = (jax.ShapeDtypeStruct((count, len(leaves)), jnp.int32),)
        return build_kernel("load_plan", run, [], shape, {"cta": count}, 1)(*flat)

    (rows,) = interpreter.run(run_all, np.array(case.lengths, np.int32), case.starts)
    return jax.tree.unflatten(structure, list(np.asarray(rows).T))


def load_shares(case: Case) -> Share:
    def load(plan: Any, cta: Any) -> Share:
        return plan.load_share(case.spec, case.config, cta)

    return load_by_kernel(case, case.num_ctas, SHARE, load)


def load_entries(case: Case) -> Entry:
    spec = case.spec
    return load_by_kernel(
        case, spec.max_rows, SHARE.first_entry, lambda x, i: x.load_entry(spec, i)
    )


def tables_of(case: Case) -> PlanTables:
    """The tables that XLA makes, also of decode steps."""
    spec, config, starts = case.spec, case.config, case.starts if case.is_packed else None

    def make(lengths: Any) -> Any:
        return plan_tables.make_tables(spec, config, lengths, starts)

    return programs.evaluate(make, np.array(case.lengths, np.int32))


@pytest.mark.parametrize("num_ctas", [1, 3, 5, 40])
def test_fixed_splits_are_cut_by_position_and_dealt_whole(num_ctas: int) -> None:
    case = CASES["fixed_splits_packed"]._replace(num_ctas=num_ctas)
    plan = tables_of(case)
    entries = tables_of(case._replace(split_blocks=None)).entries
    rows = [Entry(*row[:7].tolist()) for row in plan.entries]
    splits = [FixedSplits(*row[7:].tolist()) for row in plan.entries]
    expected, owners = [], []
    for row in entries.tolist():
        entry = Entry(*row)
        blocks = range(entry.first_block, entry.first_block + entry.num_blocks)
        starts = sorted({max(blocks.start, i // 2 * 2) for i in blocks})
        owners += [FixedSplits(len(expected), len(starts))] * len(starts)
        for start in starts:
            end = min(blocks.stop, start // 2 * 2 + 2)
            expected.append(entry._replace(num_blocks=end - start, first_block=start))
    assert rows[: len(expected)] == expected and splits[: len(expected)] == owners
    assert all(row.num_blocks == 0 for row in rows[len(expected) :])
    shares = load_shares(case)
    np.testing.assert_array_equal(shares.begin, shares.tile_begin)  # whole rows
    total = sum(row.num_blocks for row in expected) * case.heads[1]
    assert shares.begin[0] == 0 and shares.end[-1] == total
    assert (shares.end >= shares.begin).all()
    np.testing.assert_array_equal(shares.begin[1:], shares.end[:-1])


@pytest.mark.parametrize(
    "lengths, num_ctas, whole",
    [
        # 8 tiles of 4 blocks: 9 CTAs would be done at 1.13 of the mean
        ((256, 256, 200, 193), 9, False),
        ((256, 256, 200, 193), 8, True),
        ((256, 256, 200, 193), 4, True),
        ((256, 256, 200, 192), 8, False),
    ],
)
def test_equal_tiles_are_not_split_where_whole_ones_come_out_even(
    lengths: tuple[int, ...], num_ctas: int, whole: bool
) -> None:
    shares = load_shares(Case(lengths, num_ctas=num_ctas))
    sizes = shares.end - shares.begin
    assert (sizes[sizes > 0] % 4 == 0).all() == whole


def line_of_blocks(case: Case, entries: Entry) -> list[tuple[int, int, int]]:
    """(head, entry, index of the block) of every block, in order."""
    return [
        (head, entry, i)
        for head in range(case.heads[1])
        for entry, count in enumerate(entries.num_blocks)
        for i in range(count)
    ]


# Lanes of a warp have up to 3 entries each.
MANY = {
    "33_entries": Case(tuple(range(1, 67, 2)), capacity=70, heads=(2, 1)),
    "70_entries": Case((1, 200, 0, 70, 300) * 14, capacity=290, heads=(2, 2)),
    "35_of_7": Case((140, 3, 64, 1, 0, 200, 9), queries=15, q_len=3, per_request=5),
}
DEALT = ["splits", "empty", "too_long", "window", "past", "packed", "packed_full", *MANY]


@pytest.mark.parametrize("name", DEALT)
@pytest.mark.parametrize("num_ctas", [1, 2, 3, 5, 40])
def test_the_plan_deals_every_block_once(name: str, num_ctas: int) -> None:
    case = (CASES | MANY)[name]._replace(num_ctas=num_ctas)
    entries, shares = load_entries(case), load_shares(case)
    line = line_of_blocks(case, entries)
    assert shares.begin[0] == 0 and shares.end[-1] == len(line)
    np.testing.assert_array_equal(shares.begin[1:], shares.end[:-1])
    sizes = shares.end - shares.begin
    assert (sizes >= 0).all()
    counts = entries.num_blocks[entries.num_blocks > 0]
    run_ctas = int(shares.deal.run_ctas[0])
    for first in range(0, num_ctas, run_ctas):
        run = sizes[first : first + run_ctas]
        used = run[run > 0]
        has_whole_tiles = np.ptp(counts) == 0 and (used % counts[0] == 0).all()
        is_even = has_whole_tiles or np.ptp(used) <= 1
        assert is_even or (used[:-1] == case.config.min_share).all()
    owner = np.repeat(np.arange(num_ctas), sizes)
    for cta in np.flatnonzero(sizes):
        head, entry, i = line[shares.begin[cta]]
        assert (shares.head[cta], shares.entry[cta]) == (head, entry)
        assert shares.tile_begin[cta] == shares.begin[cta] - i
        for first, column in zip(shares.first_entry, entries, strict=True):
            assert first[cta] == column[entry]
        deal = Deal(*(x[cta] for x in shares.deal))
        tile = shares.tile_begin[cta] + np.arange(entries.num_blocks[entry])
        np.testing.assert_array_equal(deal.cta_of(tile), owner[tile])


@pytest.mark.parametrize("name", ["splits", "empty", "too_long", "window", "past", *MANY])
def test_kernels_compute_the_plan_that_tables_have(name: str) -> None:
    """Decode steps of more than `MAX_ENTRIES` have tables."""
    case = (CASES | MANY)[name]._replace(num_ctas=5)
    assert isinstance(case.plan(np.array(case.lengths, np.int32), case.starts), StepPlan)
    tables, shares, entries = tables_of(case), load_shares(case), load_entries(case)
    np.testing.assert_array_equal(np.stack(entries, 1), tables.entries)
    for i, field in enumerate(plan_tables.ShareRow._fields[:5]):
        np.testing.assert_array_equal(getattr(shares, field), tables.shares[:-1, i])


def test_many_decode_steps_have_tables() -> None:
    for count, kind in ((MAX_ENTRIES, StepPlan), (MAX_ENTRIES + 1, PlanTables)):
        case = Case((1,) * count)
        assert isinstance(case.plan(jnp.ones(count, jnp.int32), case.starts), kind)


ENTRIES = {"three_entries": Case((140, 3, 64), queries=5, q_len=2, per_request=3)}


@pytest.mark.parametrize(
    "name", ["splits", "window", "past", "future", "packed", "packed_full", "three_entries"]
)
def test_entries_are_all_queries_and_the_keys_that_they_attend_to(name: str) -> None:
    case = (CASES | ENTRIES)[name]
    tokens = []
    least, most = case.distances
    for row in np.stack(load_entries(case), 1):
        entry = Entry(*row.tolist())
        if not entry.num_blocks:
            continue
        queries = range(entry.first_query, entry.first_query + entry.num_queries)
        tokens += queries
        request = np.searchsorted(case.starts, queries[0], side="right") - 1
        if request == len(case.lengths):
            assert entry.kv_len == 0 and entry.num_blocks == 1
            continue
        assert entry.request == request
        length, end = min(case.lengths[request], case.capacity), case.starts[request + 1]
        assert entry.first_position == length - end + queries[0]
        last = entry.first_position + entry.num_queries - 1
        kv_len = length if most is None else max(0, min(length, last + most + 1))
        assert entry.kv_len == kv_len
        first = 0 if least is None else max(0, entry.first_position + least)
        blocks = range(entry.first_block, entry.first_block + entry.num_blocks)
        assert blocks.stop == max(-(-kv_len // 64), 1)
        assert blocks.start == min(first // 64, blocks.stop - 1)
    assert sorted(tokens) == list(range(case.num_tokens))


def spec_of(requests: int, blocks: int, split_blocks: int | None = None) -> DecodeSpec:
    case = Case((1,) * requests, capacity=64 * blocks, heads=(8, 1), split_blocks=split_blocks)
    return case.spec


@pytest.mark.parametrize(
    "spec, reason",
    [
        (spec_of(2, 1 << 16, split_blocks=1), None),
        (spec_of(2, (1 << 16) + 1, split_blocks=1), "a sequence has 65536 splits at most"),
        (spec_of(4, support.MAX_BLOCKS // 4), None),
        (spec_of(4, support.MAX_BLOCKS // 4 + 1), "blocks of 64 keys are 2064"),
    ],
)
def test_what_is_counted_has_a_bound(spec: DecodeSpec, reason: str | None) -> None:
    found = support.unsupported_launch(spec)
    assert found is None if reason is None else reason in (found or "")


def deal_of(counts: list[int], kv_heads: int, num_ctas: int) -> tuple[Deal, np.ndarray]:
    """How tiles of so many blocks are dealt, and the first block of each CTA, and of one more."""
    config = DecodeConfig(64, 64, 2, 1, num_ctas)
    args = (jnp.int32(x) for x in (len(counts), sum(counts), max(counts)))
    deal, *blocks = Deal.compute(config, kv_heads, *args, cta=jnp.arange(num_ctas + 1))
    begins, ends = map(np.asarray, blocks)
    np.testing.assert_array_equal(ends[:-1], begins[1:])
    return deal, begins


# Blocks of the entries, key heads, CTAs; the largest share, and how many tiles a CTA has a part of, or heads.
@pytest.mark.parametrize(
    "counts, kv_heads, num_ctas, largest, tiles, heads",
    [
        pytest.param([512] * 4, 8, 264, 64, 1, 1, id="eight_ctas_for_each_tile"),
        pytest.param([2048], 8, 264, 63, 1, 1, id="33_ctas_for_each_tile"),
        pytest.param([66], 8, 264, 4, 1, 1, id="least_shares_of_a_tile"),
        pytest.param([1], 8, 264, 1, 1, 1, id="one_block"),
        pytest.param([128] * 16, 8, 132, 128, 1, 1, id="whole_tiles"),
        pytest.param([32] * 64, 8, 264, 64, 2, 1, id="two_whole_tiles"),
        pytest.param([313] * 5, 8, 264, 48, 2, 1, id="tiles_that_do_not_divide_ctas"),
        pytest.param([512, 511, 512, 512], 8, 264, 63, 2, 1, id="tiles_of_two_lengths"),
        pytest.param([3, 200, 1, 70], 8, 264, 9, 3, 1, id="heads_that_divide_ctas"),
        pytest.param([3, 200, 1, 70], 7, 264, 8, 3, 2, id="one_line"),
    ],
)
def test_how_blocks_are_dealt(
    counts: list[int], kv_heads: int, num_ctas: int, largest: int, tiles: int, heads: int
) -> None:
    deal, begins = deal_of(counts, kv_heads, num_ctas)
    head, tile = (
        np.repeat(np.arange(n * kv_heads), c)
        for n, c in ((1, sum(counts)), (len(counts), counts * kv_heads))
    )
    assert begins[0] == 0 and begins[-1] == len(tile) and (np.diff(begins) >= 0).all()
    assert np.diff(begins).max() == largest
    shares = [slice(*x) for x in itertools.pairwise(begins) if x[0] < x[1]]
    assert max(len(np.unique(tile[x])) for x in shares) == tiles
    assert max(len(np.unique(head[x])) for x in shares) == heads
    owners = np.repeat(np.arange(num_ctas), np.diff(begins))
    np.testing.assert_array_equal(deal.cta_of(jnp.arange(len(tile))), owners)


@pytest.mark.parametrize("requests", [1, 4, 512])
@pytest.mark.parametrize("num_ctas", [1, 132, 264, 1000])
def test_no_number_of_blocks_that_is_admitted_overflows(requests: int, num_ctas: int) -> None:
    """int32 of NumPy wraps around as that of kernels does."""
    config = DecodeConfig(64, 64, 2, 1, num_ctas)
    longest = support.MAX_BLOCKS // requests
    counts = (jnp.int32(x) for x in (requests, requests * longest, longest))
    deal, *blocks = Deal.compute(config, 1, *counts, cta=jnp.arange(num_ctas + 1))
    total = requests * longest
    begins, ends = map(np.asarray, blocks)
    sizes = ends.astype(np.int64) - begins
    assert begins[0] == 0 and begins[-1] == total and (sizes >= 0).all()
    np.testing.assert_array_equal(ends[:-1], begins[1:])
    assert sizes.max() <= MAX_IMBALANCE * total / num_ctas + 1
    blocks = np.array([0, total // 3, total - 1])
    owners = np.searchsorted(begins, blocks, side="right") - 1
    np.testing.assert_array_equal(deal.cta_of(jnp.asarray(blocks, jnp.int32)), owners)
