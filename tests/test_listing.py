"""Lists of blocks and the order of tiles: what the kernels count is what the host sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import listing, mosaic, visits
from pallas_fa2.kernels.visits import Visits
from tests.support import compile_gate, interpreter, shared

# [B | 1, heads | 1, tiles, blocks], from one block to more than a loop's turn of the whole row and of
# the quarter that a warp places
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 3, 5),
    (1, 1, 2, 33),
    (1, 2, 1, 128),
    (1, 1, 2, 700),
    (1, 1, 1, 2500),
]

# The shape of counts; batch, heads, CTAs, how many heads have their tiles sorted, rows before.
ORDERS = [
    ((1, 1, 1), (1, 1, 1, 1, 0)),
    ((1, 1, 7), (2, 4, 3, 2, 5)),
    ((2, 1, 9), (2, 4, 8, 4, 0)),
    ((1, 4, 9), (2, 4, 9, 1, 600)),
    ((2, 4, 40), (2, 4, 132, 0, 3)),
    ((2, 4, 40), (2, 4, 90, 3, 3)),
    ((2, 3, 5), (2, 3, 5, 6, 1)),
    ((1, 1, 3), (6, 100, 300, 20, 0)),  # more heads than a loop's turn writes
    ((1, 1, 600), (1, 2, 132, 1, 0)),  # more tiles than a loop's turn compares
]


def on_device(function, x):
    return jax.tree.map(np.asarray, interpreter.run(function, x))


def check_lists(classes):
    counts, lists = on_device(Visits.of, classes)
    want = Visits.of(classes)
    np.testing.assert_array_equal(counts, want.counts)
    np.testing.assert_array_equal(visits.block(lists), visits.block(want.lists))


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_listed_as_on_the_host(shape):
    check_lists(np.random.default_rng(0).integers(0, 3, shape).astype(np.int32))


@pytest.mark.parametrize("of", [EMPTY, PARTIAL, FULL])
@pytest.mark.parametrize("blocks", [1, 130])
def test_blocks_of_one_class(of, blocks):
    check_lists(np.full((1, 1, 2, blocks), of, np.int32))


def random_counts(shape):
    """As many tiles are as long as others, for shorter ones have more full blocks."""
    visited = np.random.default_rng(0).integers(1, 6, shape).astype(np.int32)
    return visited + ((6 - visited) << listing.FULL_BIT)


@pytest.mark.parametrize("shape, where", ORDERS)
def test_tiles_are_ordered_as_on_the_host(shape, where):
    *of_what, before = where
    counts = random_counts(shape)
    got = on_device(lambda x: listing.in_order(x, *where), counts)
    entries = visits.in_order(counts, *of_what)
    rows = [np.full((before, 2), -1), entries, [(len(entries), 0)]]
    np.testing.assert_array_equal(got, np.concatenate(rows))


@pytest.mark.parametrize(
    "hands, numbers", [(1, [0, 1, 2, 7, 8, 4, 5, 3, 6]), (2, [4, 5, 7, 8, 0, 1, 2, 3, 6])]
)
def test_long_tiles_come_first_and_the_longest_of_the_last_heads_before_shorter_ones(
    hands, numbers
):
    counts = np.array([[[1, 1, 2], [2, 3, 3], [1, 5, 4]]], np.int32)
    found = on_device(lambda x: listing.in_order(x, 1, 3, hands, 2, 0), counts).tolist()
    assert found == [*([n, counts.flat[n]] for n in numbers), [9, 0]]


def test_a_place_that_two_threads_write_is_a_race():
    def run(refs, _):
        listing.scatter(refs[0], listing.thread_numbers() >> 1, listing.thread_numbers())

    out = jax.ShapeDtypeStruct((listing.THREADS,), jnp.int32)
    with pytest.raises(shared.RaceDetected, match="written twice"):
        interpreter.run(mosaic.launch("twice", run, [], out, {"cta": 1}, 1))


# A few documents, 131072 tokens, the heads of a group as one row, and the longest there can be.
@pytest.mark.parametrize("shape", [(1, 1, 128, 128), (1, 1, 512, 1024), (2, 4, 64, 8192),
                                   (1, 1, 1, listing.MOST)])  # fmt: skip
def test_two_kernels_and_nothing_else(shape):
    def plan(classes):
        seen = Visits.of(classes)
        return seen.lists, listing.in_order(seen.counts, 2, 16, 132, 4, 1000)

    classes = jax.ShapeDtypeStruct(shape, jnp.int32)
    reports = compile_gate.compile_for_h200(plan, classes)
    assert {report.name for report in reports} == {"list_blocks", "order_tiles"}
    for report in reports:
        compile_gate.assert_clean(report)
        # 8 CTAs of a multiprocessor, which hide each other's loads; of those that order, all there can be.
        assert report.registers <= (64 if report.name == "list_blocks" else 128)
    hlo = compile_gate.hlo_for_h200(plan, classes)
    assert " sort(" not in hlo and " fusion(" not in hlo
