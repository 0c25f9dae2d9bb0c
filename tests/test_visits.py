"""Which blocks tiles visit, and that every tile is dealt once, on the host and on the device alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import DOCUMENTS
from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import visits
from pallas_fa2.kernels.backward_schedule import Config, Schedule
from pallas_fa2.kernels.mosaic import Problem
from pallas_fa2.kernels.visits import Visits


def random_classes(*shape):
    return np.random.default_rng(0).integers(0, 3, shape).astype(np.int32)


def test_full_blocks_come_first_then_those_that_are_cut():
    classes = np.array([[[[PARTIAL, EMPTY, FULL, PARTIAL, FULL]]]], np.int32)
    seen = Visits.of(classes)
    visited, cut = visits.decode(seen.counts)
    assert (visited.item(), cut.item()) == (4, 2)
    assert visits.block(seen.lists[0, 0, 0, :4]).tolist() == [2, 4, 0, 3]


def test_a_tile_that_sees_nothing_visits_one_block_that_is_cut():
    seen = Visits.of(np.full((1, 1, 2, 3), EMPTY, np.int32))
    visited, cut = visits.decode(seen.counts)
    assert visited.tolist() == cut.tolist() == [[[1, 1]]]


@pytest.mark.parametrize("each, heads", [(1, 6), (6, 6)])
@pytest.mark.parametrize("hands", [1, 5, 1000])
@pytest.mark.parametrize("on_device", [False, True])
def test_every_tile_is_dealt_once_with_its_counts(each, heads, hands, on_device):
    batch, tiles = 2, 7
    classes = random_classes(batch, each, tiles, 4)

    def deal(classes):
        return Visits.of(classes).deal(batch, heads, 2, hands)

    table = np.asarray(jax.jit(deal)(jnp.asarray(classes)) if on_device else deal(classes))
    counts = Visits.of(classes).counts
    dealt = [entry for row in table for entry in row[1 : 1 + row[0, 0]].tolist()]
    assert sorted(number for number, _ in dealt) == list(range(batch * heads * tiles))
    for number, count in dealt:
        head, tile = divmod(number, tiles)
        entry, head = divmod(head, heads)
        assert count == counts[entry, head if each > 1 else 0, tile]
    assert len(table) == min(hands, batch * heads * tiles)
    assert (table[:, -1] == 0).all()


def test_on_the_host_the_longest_hand_has_little_more_than_the_mean():
    classes = np.tril(np.full((64, 64), FULL, np.int32))[None, None]
    table = Visits.of(classes).deal(2, 16, 2, 132)
    visited, _ = visits.decode(table[:, 1:, 1])
    loads = visited.sum(1)
    assert loads.max() < 1.05 * loads.mean()


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("section", [1, 2, 4])
def test_on_the_device_the_longest_hand_has_little_more_than_the_mean(name, section):
    """Packed documents, 16 heads, an H200."""
    document = np.repeat(np.arange(len(DOCUMENTS[name])), DOCUMENTS[name]).reshape(-1, 128)
    first, last = document[:, 0], document[:, -1]
    seen = (first[:, None] <= last) & (first <= last[:, None])
    classes = np.where(seen & np.tri(len(seen), dtype=bool), np.int32(FULL), np.int32(EMPTY))
    table = Visits.of(jnp.asarray(classes[None, None])).deal(1, 16, section, 132)
    visited, _ = visits.decode(np.asarray(table[:, 1:, 1]))
    loads = visited.sum(1) + np.asarray(table[:, 0, 0])  # a tile's ends cost as much as a block
    assert loads.max() < 1.08 * loads.mean()


def test_what_reaches_past_the_end_is_cut():
    classes = visits.cut_last(np.array([[FULL, FULL], [FULL, EMPTY]], np.int32))
    assert classes.tolist() == [[FULL, PARTIAL], [FULL, EMPTY]]


def test_a_known_mask_divides_groups_as_a_causal_call_does():
    """Multi-query heads: 128 tiles for 132 CTAs, the longest of them twice the mean."""
    causal = Problem(4, 4096, 4096, 16, 1, scale=1.0, offset=0)
    masked = dataclasses.replace(causal, offset=None, mask="q.index >= k.index")
    config = Config(128)
    first_query, first_key = 64 * np.arange(64)[:, None], 128 * np.arange(32)
    seen = np.where(first_query >= first_key + 127, FULL, PARTIAL)
    classes = np.where(first_key > first_query + 63, EMPTY, seen).astype(np.int32)[None, None]
    parts = Schedule.of(causal, config).parts
    assert parts > 1
    assert Schedule.of(masked, config, classes).parts == parts
    assert Schedule.of(masked, config, np.full_like(classes, FULL)).parts == 1
