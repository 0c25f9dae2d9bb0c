"""Which blocks tiles visit, and that every tile is dealt once, on the host and on the device alike."""

import dataclasses

import numpy as np
import pytest

from benchmarks.shapes import DOCUMENTS
from pallas_fa2.backends.common import block_mask, tile_order_kernel
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.schedule import raster
from tests.support import interpreter
from tests.support.tiers import slow_but


def random_classes(*shape):
    return np.random.default_rng(0).integers(0, 3, shape).astype(np.int32)


def test_full_blocks_come_first_then_those_that_are_cut():
    classes = np.array([[[[PARTIAL, EMPTY, FULL, PARTIAL, FULL]]]], np.int32)
    seen = BlockMask.from_classes(classes)
    visited, cut = block_mask.unpack_counts(seen.num_blocks)
    assert (visited.item(), cut.item()) == (4, 2)
    assert block_mask.block_id(seen.block_indices[0, 0, 0, :4]).tolist() == [2, 4, 0, 3]


def test_a_tile_that_sees_nothing_visits_one_block_that_is_cut():
    seen = BlockMask.from_classes(np.full((1, 1, 2, 3), EMPTY, np.int32))
    visited, cut = block_mask.unpack_counts(seen.num_blocks)
    assert visited.tolist() == cut.tolist() == [[[1, 1]]]


@pytest.mark.parametrize("each, heads", [(1, 6), (6, 6)])
@pytest.mark.parametrize("hands", [1, 5, 1000])
@pytest.mark.parametrize("on_device, compares", [(False, True), (True, True), (True, False)])
def test_every_tile_is_taken_once_with_its_counts(
    each, heads, hands, on_device, compares, monkeypatch
):
    if not compares:
        monkeypatch.setattr(tile_order_kernel, "MAX_TILES", 0)
    batch, tiles = 2, 7
    classes = random_classes(batch, each, tiles, 4)

    def table(classes):
        return BlockMask.from_classes(classes).static_schedule(batch, heads, 2, hands).table

    found = np.asarray(interpreter.run(table, classes) if on_device else table(classes))
    all_tiles, counts = batch * heads * tiles, BlockMask.from_classes(classes).num_blocks
    hands = min(hands, all_tiles)
    front = DynamicTileScheduler.header_rows(hands) if on_device else 0
    assert on_device or len(found) == hands
    assert (found[:front] == -1).all()
    entries = found[front:].reshape(-1, 2).tolist()
    taken = [entry for entry in entries if entry[0] < all_tiles]
    assert sorted(number for number, _ in taken) == list(range(all_tiles))
    for number, count in taken:
        head, tile = divmod(number, tiles)
        entry, head = divmod(head, heads)
        assert count == counts[entry, head if each > 1 else 0, tile]
    assert entries[-1] == [all_tiles, 0]


def test_known_tiles_are_claimed_in_the_order_of_others():
    classes = random_classes(2, 1, 9, 4)
    found = interpreter.run(
        lambda x: BlockMask.from_classes(x).dynamic_schedule(2, 6, 5).table, classes
    )
    np.testing.assert_array_equal(
        BlockMask.from_classes(classes).dynamic_schedule(2, 6, 5).table, found
    )


@pytest.mark.parametrize("kv_heads, taken", [(4, DynamicTileScheduler), (1, StaticTileScheduler)])
def test_of_grouped_heads_known_tiles_are_dealt(kv_heads, taken):
    problem = KernelSpec(2, 512, 512, 4, kv_heads, scale=1.0, causal_offset=None)
    classes = random_classes(1, 1, 8, 4)
    schedule = BackwardSchedule.choose(problem, BackwardConfig(128, 128), classes)
    assert isinstance(schedule.tile_scheduler(schedule.block_mask(classes)), taken)


def test_on_the_host_the_longest_hand_has_little_more_than_the_mean():
    classes = np.tril(np.full((64, 64), FULL, np.int32))[None, None]
    dealt = BlockMask.from_classes(classes).static_schedule(2, 16, 2, 132)
    there = dealt.table[..., 0] < dealt.num_tiles
    loads = np.sum(block_mask.tile_costs(dealt.table[..., 1]), 1, where=there)
    assert loads.max() < 1.05 * loads.mean()


def test_on_the_host_tiles_that_are_long_come_before_all_sections():
    """Windows, and keys that all queries see: a tile of them is as long as half of a CTA's."""
    near = np.tril(np.triu(np.ones((64, 64), np.int32), -8))
    classes = np.where(np.arange(64)[:, None] == 0, np.int32(PARTIAL), PARTIAL * near)
    loads = BlockMask.from_classes(classes[None, None]).static_schedule(1, 32, 4, 132).worker_costs
    assert max(loads) < 1.05 * np.mean(loads)


def last_beside_mean(entries):
    """When the last of 132 CTAs is done, that take these tiles as they become free."""
    costs = block_mask.tile_costs(entries[:, 1])
    _, loads = raster.list_schedule(costs, 132)
    return max(loads) * 132 / sum(costs)


def test_on_the_device_long_tiles_come_early():
    """Of 16 heads, two that see all, and others that see their neighbors alone."""
    near = np.tril(np.triu(np.ones((64, 64), np.int32), -6))
    heads = np.arange(16)[:, None, None] % 8 == 7
    classes = np.where(heads, FULL * np.tril(np.ones((64, 64))), FULL * near).astype(np.int32)
    found = interpreter.run(
        lambda x: BlockMask.from_classes(x).static_schedule(1, 16, 16, 132).table, classes[None]
    )
    entries = np.asarray(found)[DynamicTileScheduler.header_rows(132) : -1]
    assert last_beside_mean(entries) < 1.05


@pytest.mark.parametrize("name", slow_but(("docs16", "docs8x2048").__contains__, DOCUMENTS))
@pytest.mark.parametrize("block_q", [64, 128])
def test_on_the_device_too(name, block_q):
    """Packed documents, 16 heads; a CTA takes the next tile as soon as it is free."""
    document = np.repeat(np.arange(len(DOCUMENTS[name])), DOCUMENTS[name])
    q, k = document.reshape(-1, block_q), document.reshape(-1, 128)
    seen = (q[:, :1] <= k[:, -1]) & (k[:, 0] <= q[:, -1:])
    last_query = np.arange(len(q))[:, None] * block_q + block_q - 1
    first_key = np.arange(len(k)) * 128
    classes = np.where(seen & (first_key <= last_query), np.int32(FULL), np.int32(EMPTY))
    classes = (classes if block_q == 128 else classes.T)[None, None]
    found = interpreter.run(
        lambda x: BlockMask.from_classes(x).dynamic_schedule(1, 16, 132).table, classes
    )
    assert last_beside_mean(np.asarray(found)[DynamicTileScheduler.header_rows(132) : -1]) < 1.02


def test_a_few_long_tiles_among_many_come_early():
    """Longformer's, of 32768 tokens: three tiles of a head see all keys, others 37 blocks of them. Begun with the
    last heads, they would end 9 % late."""
    near = np.tril(np.triu(np.ones((256, 256), np.int32), -16), 16)
    sees_all = np.arange(256)[:, None] % 85 == 0
    classes = np.where(sees_all | sees_all.T, PARTIAL, FULL * near).astype(np.int32)
    entries = block_mask.order_tiles_host(
        BlockMask.from_classes(classes[None, None]).num_blocks, 1, 16, 132
    )
    assert last_beside_mean(entries) < 1.02


@pytest.mark.parametrize("each, late", [(1, 1.2), (16, 1.05)])
def test_of_two_tiles_a_cta_the_longest_come_first(each, late):
    """Four documents of 512 tokens, 16 heads: long ones first, but one head after another, they end 33 % late."""
    documents = np.kron(np.eye(4), np.tril(np.ones((4, 4)))).astype(np.int32)
    classes = np.broadcast_to(FULL * documents, (1, each, 16, 16))
    entries = block_mask.order_tiles_host(BlockMask.from_classes(classes).num_blocks, 1, 16, 132)
    assert last_beside_mean(entries) < late


def test_tiles_of_heads_that_are_alike_stay_with_their_heads_while_they_can():
    """One of a head's tiles takes a third of what a CTA does: it waits for half of the heads at most."""
    classes = np.eye(64, dtype=np.int32)[None, None] * FULL
    classes[..., 5, :12] = PARTIAL
    entries = block_mask.order_tiles_host(BlockMask.from_classes(classes).num_blocks, 1, 64, 132)
    places = np.empty(64 * 64, int)
    places[entries[:, 0]] = np.arange(64 * 64)
    of_head = places.reshape(64, 64)[:, 5] // 64
    np.testing.assert_array_equal(of_head, np.minimum(np.arange(64), 33))


def test_what_reaches_past_the_end_is_cut():
    classes = block_mask.mark_last_partial(np.array([[FULL, FULL], [FULL, EMPTY]], np.int32))
    assert classes.tolist() == [[FULL, PARTIAL], [FULL, EMPTY]]


def test_a_known_mask_divides_groups_as_a_causal_call_does():
    """Multi-query heads: 128 tiles for 132 CTAs, the longest of them twice the mean."""
    causal = KernelSpec(4, 4096, 4096, 16, 1, scale=1.0, causal_offset=0)
    masked = dataclasses.replace(causal, causal_offset=None, mask="q.index >= k.index")
    config = BackwardConfig(128, 128)
    first_query, first_key = 64 * np.arange(64)[:, None], 128 * np.arange(32)
    seen = np.where(first_query >= first_key + 127, FULL, PARTIAL)
    classes = np.where(first_key > first_query + 63, EMPTY, seen).astype(np.int32)[None, None]
    parts = BackwardSchedule.choose(causal, config).group_splits
    assert parts > 1 and BackwardSchedule.choose(masked, config, classes).group_splits == parts
    assert BackwardSchedule.choose(masked, config, np.full_like(classes, FULL)).group_splits == 1
