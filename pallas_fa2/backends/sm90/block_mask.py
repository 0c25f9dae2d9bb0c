"""Which blocks a tile visits under a mask, and which CTA takes which tiles.

Everything here is NumPy where the classes of tiles are known when a call is traced, and JAX on the
device where they depend on data.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa2.backends.sm90 import block_mask_kernel, tile_order_kernel
from pallas_fa2.backends.sm90.block_mask_kernel import FULL_BIT, MAX_BLOCKS
from pallas_fa2.backends.sm90.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.tile_order_kernel import LONG, array_namespace
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL


def unpack_counts(counts: Any) -> tuple[Any, Any]:
    """How many blocks a tile visits, and how many of them are cut."""
    visited, full = block_mask_kernel.unpack_counts(counts)
    return visited, visited - full


def block_id(listed: Any) -> Any:
    """Which one an entry of a tile's list is; lists that were sorted have its class above it."""
    return listed & np.int32(MAX_BLOCKS)


def reversed_classes(classes: Any) -> Any:
    """With blocks by their distance from the last one: lists begin there then."""
    return array_namespace(classes).flip(classes, -1)


def reversed_block_id(listed: Any, blocks: int) -> Any:
    """Which one an entry of such a tile's list is, of so many."""
    return np.int32(blocks - 1) - block_id(listed)


def _count(x: Any) -> np.ndarray:
    """0, 1, 2, ... along the last axis."""
    return np.arange(x.shape[-1], dtype=np.int32).reshape((1,) * (x.ndim - 1) + (-1,))


class BlockMask(NamedTuple):
    """The blocks that each tile visits: full ones first, then those that the mask cuts.

    A tile that sees nothing visits one block nevertheless, as one that is cut.
    """

    num_blocks: Any  # int32 [B | 1, heads | 1, tiles]: blocks, and full ones from `FULL_BIT` on
    block_indices: Any  # int32 [B | 1, heads | 1, tiles, blocks], which: see `block_id`

    @classmethod
    def from_classes(cls, classes: Any) -> "BlockMask":
        """List the blocks of each tile, from their classes `[B | 1, heads | 1, tiles, blocks]`."""
        if array_namespace(classes) is jnp:
            return cls(*block_mask_kernel.build_block_lists(classes))
        assert EMPTY < PARTIAL < FULL
        rank = np.int32(FULL) - classes
        lists = np.sort(rank * np.int32(MAX_BLOCKS + 1) + _count(classes), -1)
        full = np.sum(classes == FULL, -1, dtype=np.int32)
        visited = np.maximum(np.sum(classes != EMPTY, -1, dtype=np.int32), np.int32(1))
        return cls(visited + full * np.int32(1 << FULL_BIT), lists)

    def dynamic_schedule(self, batch: int, heads: int, hands: int) -> DynamicTileScheduler:
        """Tile t of head h of batch entry b has the number (b heads + h) tiles + t.

        Heads follow each other, and their tiles, as neighbours share data; but long ones and those of the last
        heads come sooner, so that all CTAs are done together: see `tile_order_kernel.TileOrder`. (On the device, more than
        `MOST_COMPARED` stay where they are.)
        """
        tiles = self.num_blocks.shape[-1]
        hands = min(hands, batch * heads * tiles)
        if isinstance(self.num_blocks, np.ndarray):
            entries = order_tiles_host(self.num_blocks, batch, heads, hands)
            return DynamicTileScheduler.build(entries[:, 0], entries[:, 1], hands)
        if (
            tile_order_kernel.of_entries(self.num_blocks, batch).size
            > tile_order_kernel.MOST_COMPARED
        ):
            numbers = np.arange(batch * heads * tiles, dtype=np.int32)
            counts = jnp.broadcast_to(self.num_blocks, (batch, heads, tiles))
            return DynamicTileScheduler.build(numbers, counts.reshape(-1), hands)
        front = DynamicTileScheduler.header_rows(hands)
        return DynamicTileScheduler(
            tile_order_kernel.order_tiles(self.num_blocks, batch, heads, hands, front), hands
        )

    def static_schedule(
        self, batch: int, heads: int, section: int, hands: int
    ) -> StaticTileScheduler | DynamicTileScheduler:
        """As `claim`; but known tiles are dealt.

        Sections of so many heads (a divisor of their number) follow each other, as each has its data in L2;
        their tiles go from the longest to the shortest, and if all are done earlier so, those that are `LONG`
        come before all sections.
        """
        if not isinstance(self.num_blocks, np.ndarray):
            return self.dynamic_schedule(batch, heads, hands)
        hands = min(hands, batch * heads * self.num_blocks.shape[-1])
        entries = self._in_sections(batch, heads, section)
        dealt = [
            StaticTileScheduler.deal(x, tile_costs(x[:, 1]), hands) for x in _orders(entries, hands)
        ]
        return min(dealt, key=lambda x: max(x.worker_costs))

    def _in_sections(self, batch: int, heads: int, section: int) -> np.ndarray:
        """int32 `[all tiles, 2]`: numbers and counts."""
        tiles = self.num_blocks.shape[-1]
        visited, _ = block_mask_kernel.unpack_counts(self.num_blocks)
        order = np.argsort(-visited, -1, kind="stable").astype(np.int32)
        head = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads, 1)
        found = head * np.int32(tiles) + order, np.take_along_axis(self.num_blocks, order, -1)
        shape = batch, heads, tiles
        each = (np.broadcast_to(x, shape).reshape(-1, section, tiles) for x in found)
        return np.stack([x.swapaxes(1, 2).reshape(-1) for x in each], -1)


def order_tiles_host(counts: np.ndarray, batch: int, heads: int, hands: int) -> np.ndarray:
    """The entries of `tile_order_kernel.order_tiles`, on the host."""
    counts = tile_order_kernel.of_entries(counts, batch)
    order = tile_order_kernel.TileOrder.of(counts, batch, heads, hands)
    shape = batch, heads, order.tiles
    known = np.broadcast_to(np.arange(counts.size).reshape(counts.shape), shape).reshape(-1)
    numbers, counts = np.arange(known.size), counts.reshape(-1)
    visited, _ = block_mask_kernel.unpack_counts(counts)
    waits = order.heads_before(visited, np.float32(visited.sum()))[known]
    head = numbers // order.tiles
    early = waits <= head
    by_length = np.where(early, known, 0), np.where(early, -visited[known], 0)
    places = np.lexsort((numbers, *by_length, ~early, np.minimum(waits, head)))
    return np.stack([places, counts[known[places]]], -1).astype(np.int32)


def _orders(entries: np.ndarray, hands: int) -> list[np.ndarray]:
    """The same, and with those first that are `LONG`, if any are."""
    each = tile_costs(entries[:, 1])
    long = each > LONG * each.sum() / hands
    if not long.any():
        return [entries]
    return [entries, entries[np.argsort(np.where(long, -each, 0), kind="stable")]]


def tile_costs(counts: np.ndarray) -> np.ndarray:
    """Of tiles. Their beginnings and ends cost about as much as a block, and the mask half as much."""
    visited, cut = unpack_counts(counts)
    return visited + 0.5 * cut + 1.0


def mark_last_partial(classes: Any) -> Any:
    """The last block as cut, if it was full: it reaches past the end."""
    xp = array_namespace(classes)
    last = _count(classes) == classes.shape[-1] - 1
    return xp.where(last & (classes == FULL), np.int32(PARTIAL), classes)
