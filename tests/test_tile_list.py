"""Which tile each CTA of the mma.sync kernels takes under a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.shapes import DOCUMENTS
from pallas_fa2.backends.common import tile_order_kernel
from pallas_fa2.backends.common.block_mask import BlockMask, unpack_counts
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import launch
from pallas_fa2.backends.sm80.backward.schedule import block_mask_by_keys
from pallas_fa2.backends.sm80.tile_list import TileList
from pallas_fa2.ir.block_classes import FULL, PARTIAL
from pallas_fa2.schedule import raster
from tests.support import interpreter


def document_classes(lengths, block_q, block_kv):
    """Return the classes of tiles of packed documents, each of which is causal."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    i, first = np.arange(len(starts)), np.arange(0, len(starts), block_q)
    last = np.minimum(first + block_q, len(starts)) - 1
    j = np.arange(0, len(starts), block_kv)
    seen = (starts[first, None] < j + block_kv) & (j <= i[last, None])
    full = (starts[last, None] <= j) & (j + block_kv - 1 <= first[:, None])
    return np.where(full, FULL, PARTIAL * seen).astype(np.int32)[None, None]


def tiles_of_ctas(spec, classes, num_ctas):
    """Return the batch entry, head and index of each CTA's tile, and how many blocks and full ones it visits."""
    tiles = TileList.build(BlockMask.from_classes(classes), spec, num_ctas)
    count = len(tiles.entries) - 1

    def run(refs, _):
        *arrays, out = refs
        tiles = TileList(*arrays)
        for field, value in enumerate((*tiles.load_coordinates(spec), *tiles.load_counts())):
            out[lax.axis_index("cta"), field] = value

    out = jax.ShapeDtypeStruct((count, 5), jnp.int32)
    return launch.build_kernel("tiles", run, [], out, {"cta": count}, 1)(*tiles)


# Two documents of 1 and one of 5 blocks, three heads: tiles visit 1, 1, 1, 2, 3, 4 and 5 blocks, each of 6 CTAs 8.5.
# The longest two shall start 1.5 times as long before the end: before the second head. Those of the last head go by
# length, and others from the last to the first, as the second half of a head visits 12 blocks and the first 5.
SPEC = KernelSpec(1, 448, 448, 3, 3, 1.0, None)
CLASSES = document_classes((64, 64, 320), 64, 64)
TILE_IDS = *reversed(range(7)), 13, 20, 12, 19, *reversed(range(7, 12)), 18, 17, 14, 15, 16


@pytest.mark.parametrize("known", [True, False])
def test_a_cta_takes_the_tile_of_its_index_in_the_order(known):
    run, arrays = (lambda x: tiles_of_ctas(SPEC, x, 6)), (CLASSES,)
    if known:
        run, arrays = (lambda: tiles_of_ctas(SPEC, CLASSES, 6)), ()
    found = interpreter.run(run, *arrays)
    head, tile = np.divmod(TILE_IDS, 7)
    visited = np.array([1, 1, 1, 2, 3, 4, 5])[tile]
    expected = np.stack([0 * head, head, tile, visited, visited - 1], -1)  # a diagonal is partial
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("batch, each", [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("num_ctas, max_tiles", [(3, 4096), (500, 4096), (3, 0)])
def test_every_tile_is_taken_once(batch, each, num_ctas, max_tiles, monkeypatch):
    """Masks of all batch entries and heads, or of each; fewer tiles than CTAs; too many to be ordered."""
    monkeypatch.setattr(tile_order_kernel, "MAX_TILES", max_tiles)
    classes = np.random.default_rng(0).integers(0, 3, (batch, each, 5, 6)).astype(np.int32)
    spec = KernelSpec(2, 320, 384, 4, 2, 1.0, None)
    found = interpreter.run(lambda x: tiles_of_ctas(spec, x, num_ctas), classes)
    assert sorted(map(tuple, found[:, :3])) == list(np.ndindex(2, 4, 5))
    seen = BlockMask.from_classes(np.broadcast_to(classes, (2, 4, 5, 6))).num_blocks
    visited, partial = unpack_counts(seen[tuple(found[:, :3].T)])
    np.testing.assert_array_equal(found[:, 3:], np.stack([visited, visited - partial], -1))


def last_beside_mean(entries, num_ctas):
    """When the last CTA ends; a tile's beginning and end take about as long as two blocks."""
    costs = unpack_counts(entries[:, 1])[0] + 2.0
    return max(raster.list_schedule(costs, num_ctas)[1]) * num_ctas / sum(costs)


@pytest.mark.parametrize(
    "name, by_keys, num_ctas, before",
    [("docs16", False, 264, 1.2), ("docs16", True, 132, 1.08), ("docs8x2048", False, 264, 1.1)],
)
def test_ctas_of_packed_documents_end_together(name, by_keys, num_ctas, before):
    """The forward's on an H200, and the backward's; in the order of ids the last one ends later than `before`."""
    if by_keys:
        block_mask = block_mask_by_keys(document_classes(DOCUMENTS[name], 64, 128))
    else:
        block_mask = BlockMask.from_classes(document_classes(DOCUMENTS[name], 128, 64))
    spec = KernelSpec(1, sum(DOCUMENTS[name]), sum(DOCUMENTS[name]), 16, 16, 1.0, None)
    entries = np.asarray(TileList.build(block_mask, spec, num_ctas).entries)[:-1]
    assert last_beside_mean(entries, num_ctas) < 1.03
    assert last_beside_mean(entries[np.argsort(entries[:, 0])], num_ctas) > before
