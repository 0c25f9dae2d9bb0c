"""The order of tiles: the kernel's counts agree with the host's sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import block_mask, block_mask_kernel, tile_order_kernel
from pallas_fa2.backends.common.block_mask import BlockMask
from tests.support import arithmetic, compile_gate, interpreter
from tests.support.tiers import slow_but

# The shape of the counts; batch, heads, CTAs, header rows.
ORDERS = [
    ((1, 1, 1), (1, 1, 1, 0)),
    ((1, 1, 7), (2, 4, 3, 5)),
    ((2, 1, 9), (2, 4, 8, 0)),
    ((1, 4, 9), (2, 4, 9, 600)),
    ((2, 4, 40), (2, 4, 30, 3)),
    ((2, 4, 40), (2, 4, 132, 3)),
    ((2, 3, 5), (2, 3, 5, 1)),
    ((3, 1, 16), (3, 4, 12, 0)),
    ((1, 1, 3), (6, 20, 100, 0)),
    ((1, 1, 600), (1, 2, 132, 0)),  # more tiles than one iteration compares
]


def random_counts(shape, order):
    """Return counts with many tiles of equal length; shorter ones have more full blocks. Lengths are in no order, or
    rise or fall along the first row, and rows take turns."""
    visited = np.random.default_rng(0).integers(1, 6, shape).astype(np.int32)
    if order != "none":
        odd = (np.arange(shape[0] * shape[1]) % 2 == 1).reshape(*shape[:2], 1)
        visited = np.sort(visited, -1)
        visited = np.where(odd == (order == "rising"), visited[..., ::-1], visited)
    return visited + ((7 - visited) << block_mask_kernel.FULL_BIT)


@pytest.mark.parametrize("order", ["rising", "falling", "none"])
@pytest.mark.parametrize("shape, where", ORDERS)
def test_tiles_are_ordered_as_on_the_host(shape, where, order):
    *dims, header_rows = where
    counts = random_counts(shape, order)
    if order == "rising" and shape[2] > 5:
        assert block_mask.last_tile_first(counts).flat[0]
    got = interpreter.run(lambda x: tile_order_kernel.order_tiles(x, *where), counts)
    entries = block_mask.order_tiles_host(counts, *dims)
    rows = [np.full((header_rows, 2), -1), entries, [(len(entries), 0)]]
    np.testing.assert_array_equal(got, np.concatenate(rows))


@pytest.mark.parametrize(
    "shape, where", [((1, 1, 16), (1, 16, 132, 5)), ((1, 16, 16), (1, 16, 132, 0)),
                     ((2, 4, 40), (2, 4, 30, 3))]
)  # fmt: skip
def test_tiles_are_ordered_without_signs(shape, where, monkeypatch):
    """Mosaic compares without a sign what `where` takes of two constants, so no number may be negative."""
    compared = []

    def unsigned(name):
        signed = arithmetic.PLAIN[name]

        def compare(x, y):
            if x.dtype != np.int32 or x.ndim == y.ndim == 0:
                return signed(x, y)
            compared.append(name)
            found = signed(x.astype(np.uint32), y.astype(np.uint32))
            return found if found.dtype == bool else found.astype(np.int32)

        return lambda: compare

    for name in ("lt", "le", "gt", "ge", "max", "min"):
        monkeypatch.setitem(arithmetic.FUNCTIONS, name, unsigned(name))
    counts = np.random.default_rng(1).integers(1, 60, shape).astype(np.int32)
    counts[..., 3] = 500
    counts[..., -2] = 600
    assert block_mask.last_tile_first(counts).any()
    got = interpreter.run(lambda x: tile_order_kernel.order_tiles(x, *where), counts)
    np.testing.assert_array_equal(
        got[where[-1] : -1], block_mask.order_tiles_host(counts, *where[:-1])
    )
    assert compared


# For three heads: the blocks that the tiles of each visit, and the ids of tiles in the order in which two CTAs claim
# them.
@pytest.mark.parametrize(
    "counts, tile_ids",
    [
        # A CTA visits 15 of 30 blocks: no tile is hoisted but those of the last head, the longest first.
        ([[4, 3, 2, 1]], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]),
        # The second half of a head visits more blocks than the first: the last tiles come first.
        ([[1, 2, 3, 4]], [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8]),
        ([[4, 3, 4, 3]], [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9, 11]),
        # By a sixteenth at most, the first ones do.
        ([[8, 8, 9, 8]], [0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11]),
        ([[8, 8, 9, 9]], [3, 2, 1, 0, 7, 6, 5, 4, 10, 11, 8, 9]),
        # Of an odd number the middle one is in neither half.
        ([[2, 9, 4]], [2, 1, 0, 5, 4, 3, 7, 8, 6]),
        ([[4, 9, 2]], [0, 1, 2, 3, 4, 5, 7, 6, 8]),
        # A tile of 8 of a CTA's 18 blocks starts 12 blocks before the end: after the first of three equal heads.
        ([[1, 8, 1, 2]], [0, 1, 2, 3, 5, 9, 4, 6, 7, 11, 8, 10]),
        # Where each head has its own mask, tiles of more than a quarter of a CTA's 9 blocks come first.
        ([[1, 2], [1, 5], [4, 5]], [3, 5, 4, 1, 0, 2]),
    ],
)
def test_tiles_come_with_their_heads_or_are_hoisted(counts, tile_ids):
    counts = np.array([counts], np.int32)
    table = interpreter.run(lambda x: tile_order_kernel.order_tiles(x, 1, 3, 2, 0), counts)
    assert table[:, 0].tolist() == [*tile_ids, len(tile_ids)]


@pytest.mark.parametrize(
    "devices, device", [(2, 0), (2, 1), (3, 1), (3, 2), (4, 1), (4, 3), (16, 15)]
)
def test_which_tiles_of_a_device_come_first_in_zigzag_order(devices, device):
    """Of causal queries in two of `2 devices` chunks, later ones see more keys. Keys of all chunks are seen by as many
    queries in both halves, or by more in the first, but for blocks on the diagonal, which count in full."""
    # blocks of 64 queries and of 128 keys, of which a chunk has 16 and 8
    queries, keys = (fa.zigzag(2 * devices * n, devices).permutation for n in (16, 8))
    visible = queries.reshape(devices, -1)[device][:, None] // 2 >= keys
    rows, columns = (np.maximum(visible.sum(axis, dtype=np.int32), 1) for axis in (1, 0))
    assert block_mask.last_tile_first(rows) and not block_mask.last_tile_first(columns)


def test_more_tiles_than_are_ordered_begin_with_the_longer_half_too(monkeypatch):
    monkeypatch.setattr(tile_order_kernel, "MAX_TILES", 0)
    counts = jnp.array([[[1, 2, 4], [4, 2, 1]]], jnp.int32)
    table = np.asarray(BlockMask(counts, None).order_tiles(2, 2, 2, header_rows=0))
    assert table[:-1, 0].tolist() == [2, 1, 0, 3, 4, 5, 8, 7, 6, 9, 10, 11]
    assert table[:-1, 1].tolist() == [4, 2, 1, 4, 2, 1] * 2


# A few documents, 131072 tokens, the heads of a group as one row, and the longest there can be.
SHAPES = (
    (1, 1, 128, 128),
    (1, 1, 512, 1024),
    (2, 4, 64, 8192),
    (1, 1, 1, block_mask_kernel.MAX_BLOCKS),
)


@pytest.mark.parametrize("shape", slow_but(lambda shape: shape == SHAPES[0], SHAPES))
def test_two_kernels_and_nothing_else(shape):
    def plan(classes):
        seen = BlockMask.from_classes(classes)
        heads = 16 if shape[1] == 1 else shape[1]
        order = tile_order_kernel.order_tiles(seen.num_blocks, 2, heads, 132, 1000)
        return seen.block_indices, order

    classes = jax.ShapeDtypeStruct(shape, jnp.int32)
    reports = compile_gate.compile_for_h200(plan, classes)
    assert {report.name for report in reports} == {"list_blocks", "order_tiles"}
    for report in reports:
        compile_gate.assert_clean(report)
        # 8 CTAs on an SM hide each other's loads; 4 of those that order tiles are enough.
        assert report.registers <= (64 if report.name == "list_blocks" else 128)
    hlo = compile_gate.hlo_for_h200(plan, classes)
    assert " sort(" not in hlo and " fusion(" not in hlo
