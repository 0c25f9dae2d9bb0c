"""The key blocks that each tile visits under a mask, and the order in which CTAs take the tiles.

Everything here is NumPy where block classes are known when a call is traced, and JAX on the device where they
depend on data.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa2.arithmetic import array_namespace
from pallas_fa2.backends.common import block_mask_kernel, tile_order_kernel
from pallas_fa2.backends.common.block_mask_kernel import FULL_BIT, MAX_BLOCKS
from pallas_fa2.backends.common.scheduler import (
    DynamicTileScheduler,
    StaticTileScheduler,
    tile_table,
)
from pallas_fa2.backends.common.tile_order_kernel import LONG
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL


def unpack_counts(counts: Any) -> tuple[Any, Any]:
    """Return how many blocks a tile visits, and how many of them are partial."""
    visited, full = block_mask_kernel.unpack_word(counts)
    return visited, visited - full


def block_id(list_entry: Any) -> Any:
    """Return the index of a block from its entry in a tile's list; lists that were sorted have its class above it."""
    return list_entry & np.int32(MAX_BLOCKS)


def reversed_classes(classes: Any) -> Any:
    """Return the classes with blocks by their distance from the last one: lists then begin there."""
    return array_namespace(classes).flip(classes, -1)


def reversed_block_id(list_entry: Any, blocks: int) -> Any:
    """Return the index of a block from its entry in a list of `reversed_classes` of so many blocks."""
    return np.int32(blocks - 1) - block_id(list_entry)


def _indices(x: Any) -> np.ndarray:
    """Return 0, 1, 2, ... along the last axis."""
    return np.arange(x.shape[-1], dtype=np.int32).reshape((1,) * (x.ndim - 1) + (-1,))


class BlockMask(NamedTuple):
    """A list of the blocks that each tile visits: full ones first, then partial ones.

    A tile that sees nothing visits one block nevertheless, as a partial one.
    """

    num_blocks: Any  # int32 [B | 1, heads | 1, tiles]: blocks, and full ones from `FULL_BIT` on
    block_indices: Any  # int32 [B | 1, heads | 1, tiles, blocks]: entries for `block_id`

    @classmethod
    def from_classes(cls, classes: Any) -> "BlockMask":
        """List the blocks of each tile, from their classes `[B | 1, heads | 1, tiles, blocks]`."""
        if array_namespace(classes) is jnp:
            return cls(*block_mask_kernel.build_block_lists(classes))
        assert EMPTY < PARTIAL < FULL
        rank = np.int32(FULL) - classes
        lists = np.sort(rank * np.int32(MAX_BLOCKS + 1) + _indices(classes), -1)
        full = np.sum(classes == FULL, -1, dtype=np.int32)
        visited = np.maximum(np.sum(classes != EMPTY, -1, dtype=np.int32), np.int32(1))
        return cls(visited + full * np.int32(1 << FULL_BIT), lists)

    def order_tiles(self, batch: int, heads: int, num_workers: int, header_rows: int) -> Any:
        """Return the table of `tile_order_kernel.order_tiles`: the ids and counts of all tiles, in the order in which
        so many CTAs take them.

        Heads follow each other, and their tiles, as neighbors share data; but long tiles and those of the last
        heads come sooner, so that all CTAs end together, and a head's may come in reverse: see
        `tile_order_kernel.TileOrder`. (On the device, none of more than `MAX_TILES` tiles come sooner.)
        """
        if isinstance(self.num_blocks, np.ndarray):
            entries = order_tiles_host(self.num_blocks, batch, heads, num_workers)
            return tile_table(entries[:, 0], entries[:, 1], header_rows)
        counts = tile_order_kernel.counts_per_row(self.num_blocks, batch)
        if counts.size > tile_order_kernel.MAX_TILES:
            shape = batch, heads, self.num_blocks.shape[-1]
            tile_ids = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
            reverse = last_tile_first(self.num_blocks)
            ids, counts = (
                jnp.broadcast_to(jnp.where(reverse, jnp.flip(x, -1), x), shape).reshape(-1)
                for x in (tile_ids, self.num_blocks)
            )
            return tile_table(ids, counts, header_rows)
        return tile_order_kernel.order_tiles(
            self.num_blocks, batch, heads, num_workers, header_rows
        )

    def dynamic_schedule(self, batch: int, heads: int, num_workers: int) -> DynamicTileScheduler:
        """Return a scheduler whose tiles the CTAs claim, in the order of `order_tiles`."""
        num_workers = min(num_workers, batch * heads * self.num_blocks.shape[-1])
        header = DynamicTileScheduler.header_rows(num_workers)
        table = self.order_tiles(batch, heads, num_workers, header)
        return DynamicTileScheduler(table, num_workers)

    def static_schedule(
        self, batch: int, heads: int, l2_head_group: int, num_workers: int
    ) -> StaticTileScheduler | DynamicTileScheduler:
        """Return a scheduler as `dynamic_schedule`; but tiles of known masks are dealt to the CTAs beforehand.

        Groups of so many heads (a divisor of their number) follow each other, as the data of each are in L2; their
        tiles go from the longest to the shortest, and if all CTAs end earlier so, those that are `LONG` come
        before all groups.
        """
        if not isinstance(self.num_blocks, np.ndarray):
            return self.dynamic_schedule(batch, heads, num_workers)
        num_workers = min(num_workers, batch * heads * self.num_blocks.shape[-1])
        entries = self._entries_by_head_group(batch, heads, l2_head_group)
        schedulers = [
            StaticTileScheduler.deal(x, tile_costs(x[:, 1]), num_workers)
            for x in _candidate_orders(entries, num_workers)
        ]
        return min(schedulers, key=lambda x: max(x.worker_costs))

    def _entries_by_head_group(self, batch: int, heads: int, l2_head_group: int) -> np.ndarray:
        """Return the ids and counts of all tiles in the order of groups, int32 `[all tiles, 2]`."""
        tiles = self.num_blocks.shape[-1]
        visited, _ = block_mask_kernel.unpack_word(self.num_blocks)
        order = np.argsort(-visited, -1, kind="stable").astype(np.int32)
        head = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads, 1)
        ids, counts = head * np.int32(tiles) + order, np.take_along_axis(self.num_blocks, order, -1)
        shape = batch, heads, tiles
        grouped = (
            np.broadcast_to(x, shape).reshape(-1, l2_head_group, tiles) for x in (ids, counts)
        )
        return np.stack([x.swapaxes(1, 2).reshape(-1) for x in grouped], -1)


def last_tile_first(counts: Any) -> Any:
    """Return whether the tiles of each head go from the last to the first, `[..., 1]` for counts `[..., tiles]`."""
    visited, _ = block_mask_kernel.unpack_word(counts)
    tiles = counts.shape[-1]
    half = tile_order_kernel.half_of(tiles)
    halves = (x.sum(-1, keepdims=True) for x in (visited[..., :half], visited[..., tiles - half :]))
    return tile_order_kernel.is_last_tile_first(*halves)


def order_tiles_host(counts: np.ndarray, batch: int, heads: int, num_workers: int) -> np.ndarray:
    """Return the entries of `tile_order_kernel.order_tiles`, computed on the host."""
    counts = tile_order_kernel.counts_per_row(counts, batch)
    order = tile_order_kernel.TileOrder.build(counts, batch, heads, num_workers)
    shape = batch, heads, order.tiles
    row = np.broadcast_to(np.arange(counts.size).reshape(counts.shape), shape).reshape(-1)
    is_reversed = np.broadcast_to(last_tile_first(counts), shape).reshape(-1)
    tile_ids, counts = np.arange(row.size), counts.reshape(-1)
    visited, _ = block_mask_kernel.unpack_word(counts)
    hoist_head = order.hoist_head(visited, np.float32(visited.sum()))[row]
    head = tile_ids // order.tiles
    hoisted = hoist_head <= head
    in_order = np.where(is_reversed & ~hoisted, -tile_ids, tile_ids)
    by_length = np.where(hoisted, row, 0), np.where(hoisted, -visited[row], 0)
    sorted_ids = np.lexsort((in_order, *by_length, ~hoisted, np.minimum(hoist_head, head)))
    return np.stack([sorted_ids, counts[row[sorted_ids]]], -1).astype(np.int32)


def _candidate_orders(entries: np.ndarray, num_workers: int) -> list[np.ndarray]:
    """Return the entries as they are and, if any tiles are `LONG`, with these first."""
    costs = tile_costs(entries[:, 1])
    long = costs > LONG * costs.sum() / num_workers
    if not long.any():
        return [entries]
    return [entries, entries[np.argsort(np.where(long, -costs, 0), kind="stable")]]


def tile_costs(counts: np.ndarray) -> np.ndarray:
    """Return the costs of tiles in blocks: the prologue and epilogue cost about as much as a block, and the mask half
    as much."""
    visited, partial = unpack_counts(counts)
    return visited + 0.5 * partial + 1.0


def mark_last_partial(classes: Any) -> Any:
    """Return the classes with the last block partial if it was full, because it reaches past the end."""
    xp = array_namespace(classes)
    last = _indices(classes) == classes.shape[-1] - 1
    return xp.where(last & (classes == FULL), np.int32(PARTIAL), classes)
