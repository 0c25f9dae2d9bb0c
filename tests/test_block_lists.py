"""The lists of blocks of decode kernels against NumPy: all blocks that hold a visible key, and few others."""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode import block_lists
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.entries import Entry, step_entry
from pallas_fa2.backends.common.decode.mods import ModArrays
from pallas_fa2.backends.common.decode.schedule import plan_decode
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.parse_cached import parse_cached
from tests.support import cached, compile_gate, hopper, programs
from tests.support.cached_features import Feature
from tests.support.cached_features import check as check_values
from tests.support.decode_cases import FP8, INT8
from tests.support.tiers import slow

CAPACITY = 600  # a last block of 24 keys
LENGTHS = np.array([600, 0, 150, 64])
COUNTS = np.array([2, 0, 9, 1])  # of packed queries
CONFIG = DecodeConfig(64, 64, stages=2, ctas_per_sm=1, num_sms=3)
RNG = np.random.default_rng(3)
DOCUMENTS = np.sort(RNG.integers(0, 9, (4, CAPACITY)), 1)
DENSE = np.zeros((4, 4, 1, CAPACITY), bool)
DENSE[0, 3, 0, 70], DENSE[2, 0, 0, 140] = True, True
PAIRS = RNG.random((4, 4, COUNTS.sum() + cached.UNUSED, CAPACITY)) < 0.01
WIDTHS = np.array([1, 5, 70, 200], np.int32)


class Masked(NamedTuple):
    """A mask, and the same in NumPy: visible(sequence, head, row of the query, its position, positions of keys)."""

    mask: Any
    visible: Callable[..., np.ndarray]
    exact: bool = True  # whether no block is listed but those with a visible key and the last one


@fa.mask_fn
def of_head(q: Any, k: Any, c: Any) -> Any:
    return (k.index <= q.index) & (q.index - k.index < c.width)


@fa.mask_fn
def backwards(q: Any, k: Any) -> Any:
    return (q.index + k.index) & 64 == 0  # no rule for these bits


MASKS = {
    "streaming": Masked(
        fa.Causal() & (fa.Prefix(4) | fa.Window(100)),
        lambda b, n, t, q, k: (k <= q) & ((k < 4) | (q - k <= 100)),
    ),
    "chunked": Masked(
        fa.Causal() & fa.Chunked(100), lambda b, n, t, q, k: (k <= q) & (k // 100 == q // 100)
    ),
    "prefixes": Masked(
        fa.Prefix(jnp.array([2, 0, 65, 64])),
        lambda b, n, t, q, k: k < np.array([2, 0, 65, 64])[b],
    ),
    "heads": Masked(
        of_head(heads={"width": WIDTHS}),
        lambda b, n, t, q, k: (k <= q) & (q - k < WIDTHS[n]),
    ),
    "unknown": Masked(
        backwards, lambda b, n, t, q, k: (q + k) & 64 == 0, exact=False
    ),
    "nothing": Masked(lambda q, k: q.index < 0, lambda b, n, t, q, k: np.full(k.shape, q < 0)),
}  # fmt: skip


def segments(tokens: int) -> Masked:
    """Documents, of which some of the last tokens belong to other ones than their neighbors."""
    ids = DOCUMENTS[:, -tokens:]
    return Masked(
        fa.Segments(jnp.asarray(ids), jnp.asarray(DOCUMENTS)),
        lambda b, n, t, q, k: DOCUMENTS[b, k] == ids[b, t],
    )


OF_STEPS = {
    **MASKS,
    "documents": segments(2),
    "dense": Masked(DENSE, lambda b, n, t, q, k: DENSE[b, n, 0, k]),
}


def listed(problem: cached.Problem, mask: Any, **options: Any) -> list[tuple[Entry, list[int]]]:
    """The entries of a launch, and the blocks that each visits."""
    spec, operands = parse_cached(
        problem.query, problem.cache, queries=problem.queries, mask=mask, **options
    )
    launch = DecodeSpec.of_call(spec)

    def plan(lengths: Any, starts: Any, leaves: Any) -> Any:
        mods = ModArrays.pack(spec, operands._replace(call=leaves)).in_rows()
        visible = functools.partial(block_lists.visible_blocks, spec, launch, mods)
        return plan_decode(launch, CONFIG, lengths, starts, visible)

    made = programs.evaluate(plan, operands.lengths, operands.starts, operands.call)
    if problem.is_packed or launch.split_blocks is not None:
        entries = [Entry(*row[: len(Entry._fields)].tolist()) for row in made.entries]
    else:
        index = jnp.arange(launch.max_entries, dtype=jnp.int32)
        lengths = jnp.repeat(operands.lengths, launch.entries_per_request)
        columns = [np.asarray(x) for x in step_entry(launch, index, lengths)]
        entries = [Entry(*(int(x[i]) for x in columns)) for i in range(launch.max_entries)]
        ends = zip(entries, made.blocks_before, made.blocks_before[1:], strict=False)
        entries = [
            entry._replace(first_block=int(a), num_blocks=int(b - a)) for entry, a, b in ends
        ]
    result, position = [], 0
    for entry in entries:
        if entry.num_blocks == 0:
            continue
        assert entry.first_block == position  # one after another
        position += entry.num_blocks
        result.append((entry, made.blocks[entry.first_block : position].tolist()))
    return result


def blocks_with_visible_keys(problem: cached.Problem, entry: Entry, masked: Masked) -> set[int]:
    blocks, rows = set(), problem.rows
    for query in range(entry.first_query, entry.first_query + entry.num_queries):
        b = rows.sequence[query]
        keys = np.arange(int(LENGTHS[b]) if b >= 0 else 0)
        for head in range(4):
            seen = masked.visible(b, head, rows.row[query], rows.position[query], keys)
            blocks |= set((keys[seen] // 64).tolist())
    return blocks


def check(problem: cached.Problem, masked: Masked) -> None:
    entries = listed(problem, masked.mask)
    assert sum(entry.num_queries for entry, _ in entries) == len(problem.rows.position)
    for entry, blocks in entries:
        last = max(-(-entry.kv_len // 64) - 1, 0)
        visible = blocks_with_visible_keys(problem, entry, masked)
        assert blocks == sorted(set(blocks)) and visible <= set(blocks)
        assert set(blocks) <= (visible | {last} if masked.exact else set(range(last + 1)))


@pytest.mark.parametrize("name", OF_STEPS)
def test_entries_of_steps_list_the_blocks_that_they_see(name: str) -> None:
    check(cached.make(2, lengths=LENGTHS, capacity=CAPACITY, heads=(4, 2)), OF_STEPS[name])


OF_PACKED = {
    **MASKS,
    "pairs": Masked(PAIRS, lambda b, n, t, q, k: PAIRS[b, n, t, k]),
}


@pytest.mark.parametrize("name", OF_PACKED)
def test_entries_of_packed_queries_list_the_blocks_that_they_see(name: str) -> None:
    problem = cached.make(None, lengths=LENGTHS, counts=COUNTS, capacity=CAPACITY, heads=(4, 2))
    check(problem, OF_PACKED[name])


@pytest.mark.parametrize("tokens", [2, None])
def test_each_fixed_split_visits_a_block(tokens: int | None) -> None:
    """Else a query's bits would depend on what others of its entry see."""
    options: dict[str, Any] = {"lengths": LENGTHS, "counts": COUNTS, "capacity": CAPACITY}
    problem = cached.make(tokens, **options, heads=(4, 2))
    masked = MASKS["streaming"]
    for _, blocks in (rows := listed(problem, masked.mask, split_size=128)):
        assert len({block // 2 for block in blocks}) == 1
    splits = -(-np.maximum(LENGTHS, 1) // 128)
    found = [entry.request for entry, blocks in rows if entry.num_queries]
    counted = np.bincount(found, minlength=4)
    if tokens is not None:
        np.testing.assert_array_equal(counted, splits)


def test_what_is_visited_follows_what_is_seen_and_not_the_length() -> None:
    visited = {}
    for length in (640, 6400):
        problem = cached.make(1, lengths=np.array([length]), capacity=length, heads=(4, 2))
        ((_, blocks),) = listed(problem, MASKS["streaming"].mask)
        visited[length] = len(blocks)
    # the first block, and those of the last 101 keys
    assert visited == {640: 3, 6400: 3}


def lists_blocks(mask: Any, capacity: int = 4096, **options: Any) -> bool:
    lengths = np.array([capacity])
    problem = cached.make(1, lengths=lengths, capacity=capacity, heads=(4, 2))
    spec, _ = parse_cached(problem.query, problem.cache, mask=mask, **options)
    return block_lists.lists_blocks(spec, DecodeSpec.of_call(spec), CONFIG)


@fa.mask_fn
def dilated(q: Any, k: Any) -> Any:
    return (k.index <= q.index) & ((q.index - k.index) % 3 == 0)


@pytest.mark.parametrize(
    "mask, expected",
    [
        (None, False),
        (fa.Causal(), False),
        (fa.SlidingWindow(100), False),  # a range
        (dilated, False),  # of each block before the query's it shows some key
        (fa.Causal() & fa.Chunked(100), True),
        (MASKS["streaming"].mask, True),
        (np.ones((1, 1, 1, 4096), bool), True),
    ],
)
def test_lists_are_made_where_a_mask_may_hide_blocks(mask: Any, expected: bool) -> None:
    assert lists_blocks(mask) == expected


def test_there_are_no_lists_where_all_blocks_take_as_long() -> None:
    """3 CTAs that have 4 blocks each have all of 6 for each key head."""
    mask = fa.Causal() & fa.Chunked(100)
    assert [lists_blocks(mask, 64 * n) for n in (6, 7)] == [False, True]


def test_causal_masks_at_given_positions_are_listed() -> None:
    """Keys after a query may exist there."""
    assert lists_blocks(fa.Causal(), q_positions=jnp.zeros((1, 1), jnp.int32))


# A device, a mask, queries of each sequence (packed ones if None), and other options of `cached.make` and of the call.
LAYOUTS: dict[str, tuple[Any, str, int | None, dict, dict]] = {
    "contiguous": (hopper.H200, "streaming", 2, {}, {}),
    "pages": (hopper.H200, "chunked", 1, {"paged": True}, {}),
    "packed": (hopper.H200, "streaming", None, {}, {}),
    "fixed_splits": (hopper.H200, "streaming", 2, {}, {"split_size": 128}),
    "fixed_splits_packed_pages": (
        hopper.H200, "chunked", None, {"paged": True}, {"split_size": 64}
    ),
    "float8_in_parts": (hopper.H200, "streaming", 7, {"quantized": FP8}, {}),
    "int8_packed_pages": (hopper.H200, "chunked", None, {"quantized": INT8, "paged": True}, {}),
    "ampere": (hopper.A100, "chunked", 2, {}, {}),
    "ampere_packed_pages": (hopper.A100, "streaming", None, {"paged": True}, {}),
}  # fmt: skip
QUICK = ("pages", "fixed_splits_packed_pages", "float8_in_parts", "ampere")


@pytest.mark.parametrize("layout", [x if x in QUICK else slow(x) for x in LAYOUTS])
def test_values_of_listed_blocks(layout: str) -> None:
    device, name, tokens, made, options = LAYOUTS[layout]
    made = {"lengths": LENGTHS, "counts": COUNTS, "capacity": CAPACITY, "page": 24, **made}
    problem = cached.make(tokens, **made, dims=(64, 64), dtype=jnp.bfloat16, heads=(4, 2))
    mask, visible = MASKS[name][:2]
    feature = Feature(
        lambda problem: {"mask": mask, **options},
        lambda problem: {"visible": lambda b, row, q, k: visible(b, 0, row, q, k)},
    )
    small = device._replace(num_sms=2)
    call = {"queries": problem.queries, "device": small, **feature.options(problem)}
    text = fa.explain(problem.query, problem.cache, **call).forward
    assert "in equal shares by lists of the blocks that the mask does not hide" in text
    with hopper.planned_for(small):
        check_values(problem, None, feature, tolerance=0.02)


def program(mask: Any, layers: int, pages: bool = False, **options: Any) -> Any:
    """Layers of a decode step of 16 sequences, and their arguments."""

    def run(q: Any, layers: list[Any], lengths: Any, table: Any) -> Any:
        for k, v in layers:
            cache = fa.Cache(k, v, lengths) if table is None else fa.Pages(k, v, table, lengths)
            q = fa.cached_attention(q, cache, mask=mask, **options)
        return q

    bf16, i32 = (functools.partial(jax.ShapeDtypeStruct, dtype=x) for x in (jnp.bfloat16, "int32"))
    k = bf16((16 * 512, 16, 8, 128) if pages else (16, 8192, 8, 128))
    table = i32((16, 512)) if pages else None
    return run, bf16((16, 1, 32, 128)), [(k, k)] * layers, i32((16,)), table


def test_layers_share_a_list() -> None:
    """Which XLA makes by a few small kernels: of the mask, of sums, and of the list."""
    mask = MASKS["streaming"].mask
    with hopper.planned_for_h200():
        programs = [compile_gate.hlo_for_h200(*program(mask, n)) for n in (1, 2)]
    one, two = (program[program.index("ENTRY") :] for program in programs)
    assert (one.count("custom-call("), two.count("custom-call(")) == (1, 2)
    assert one.count(" fusion(") == two.count(" fusion(") <= 8
    assert " copy(" not in two and " while(" not in two


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("placed", ["sequences", slow("heads"), "shard_map"])
def test_lists_on_two_gpus(placed: str, kind: AxisType) -> None:
    """Each lists the blocks of its sequences, or of its heads; nothing is gathered."""
    mesh = jax.sharding.Mesh(np.array(compile_gate.h200s(2)), ("x",), axis_types=(kind,))
    sequences, heads = (None, "x") if placed == "heads" else ("x", None)
    axes = jax.P(sequences, None, heads)

    def array(dtype: Any, shape: tuple[int, ...], spec: jax.P) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    q = array(jnp.bfloat16, (4, 1, 32, 128), axes)
    keys = array(jnp.bfloat16, (4, 16384, 8, 128), axes)
    cache = fa.Cache(keys, keys, array(jnp.int32, (4,), jax.P(sequences)))
    prefix, ids = (array(jnp.int32, x, jax.P(sequences)) for x in ((4,), (4, 16384)))

    def run(q: Any, cache: Any, prefix: Any, ids: Any) -> Any:
        widths = np.arange(32, dtype=np.int32)
        same = fa.Segments(ids[:, -1:], kv_ids=ids)
        mask = fa.Prefix(prefix) | same | of_head(heads={"width": widths})
        return fa.cached_attention(q, cache, mask=mask, return_lse=True)

    if placed == "shard_map":
        specs = axes, fa.Cache(axes, axes, jax.P("x")), jax.P("x"), jax.P("x")  # pyright: ignore
        run = jax.shard_map(run, in_specs=specs, out_specs=jax.P("x"))
    with hopper.planned_for_h200(), jax.set_mesh(mesh):
        hlo = compile_gate.hlo_for_h200s(run, q, cache, prefix, ids)
    assert not re.search("all-gather|all-to-all|all-reduce|collective-permute", hlo)
    assert f"s32[{(4 if placed == 'heads' else 2) * 256}]" in hlo  # the list


@pytest.mark.parametrize(
    "options", [{}, slow({"pages": True}), slow({"split_size": 2048})], ids=str
)
def test_kernels_with_lists_compile_clean(options: dict[str, Any]) -> None:
    with hopper.planned_for_h200():
        (report,) = compile_gate.compile_for_h200(*program(MASKS["streaming"].mask, 1, **options))
    compile_gate.assert_clean(report)
