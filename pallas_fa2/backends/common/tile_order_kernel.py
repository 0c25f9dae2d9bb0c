"""The order in which CTAs take the tiles of a mask that only the device knows, by a small kernel.

XLA would sort, in several kernels, most of which take little longer than their launch. Here each warp counts how many
tiles come before its own (an enumeration sort), so that no warps synchronize. `block_mask.order_tiles_host` is the
same order as a lexicographic sort.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import I32, array_namespace, div, rem
from pallas_fa2.backends.common.block_mask_kernel import MAX_BLOCKS, unpack_word
from pallas_fa2.backends.common.primitives import launch, thread_ops
from pallas_fa2.backends.common.primitives.layouts import LANES, THREADS, WARPS

# The least time between the start of a tile and the end of the kernel, as a multiple of the tile's own duration, where
# heads share a mask. With less, CTAs end apart; with more, more heads run side by side, of which L2 holds few
# (docs/decisions/0058-tile-hoisting.md).
SLACK = 1.5
# How many tiles for each CTA are sorted by length at the end: where heads share a mask, and where each has its own.
# With more, L2 misses cost more than the balance gains (docs/decisions/0057-long-tiles-first.md).
TAIL_TILES_SHARED_MASK, TAIL_TILES = 1, 2
# A tile is long, and comes before all heads, from this fraction of the blocks that a CTA visits on average; or from so
# many times the blocks that a CTA visits of the sorted heads (docs/decisions/0057-long-tiles-first.md).
LONG = 0.25
LONG_IN_TAIL = 1.5
# The second half of a head's tiles is longer if it visits more blocks than the first, by more than one in so many.
# Blocks on the diagonal count in full, so that halves of the keys of a device in zigzag order differ, by less where its
# chunks are long; of its rows, the second half visits 1 in 15.5 more on the last of 16 devices
# (docs/decisions/0092-last-tiles-first.md).
LONGER_BY_ONE_IN = 16
# The most tiles with counts of their own that the kernel orders. Of more, each CTA has 30 at least, and none need be
# hoisted.
MAX_TILES = 4096
# Consecutive tiles that a warp ranks together, which share what is computed of each count: two take up to 1.2 times as
# long (docs/decisions/0058-tile-hoisting.md).
TILES_PER_WARP = 4


def counts_per_row(counts: Any, batch: int) -> Any:
    """Return block counts `[rows, heads | 1, tiles]`: one row for each batch entry if heads have masks of their own."""
    if counts.shape[1] == 1:
        return counts
    return array_namespace(counts).broadcast_to(counts, (batch, *counts.shape[1:]))


def half_of(tiles: int) -> int:
    """Return how many tiles each half of a head's has; of an odd number the middle one is in neither."""
    return tiles // 2


def is_last_tile_first(first_half: Any, second_half: Any) -> Any:
    """Return whether a head's tiles go from the last to the first, by how many blocks its halves visit."""
    return second_half > first_half + div(first_half, LONGER_BY_ONE_IN)


class TileOrder(NamedTuple):
    """The order of tiles: head by head, but some are hoisted, so that CTAs end together.

    The tiles of a head go from the first to the last, or from the last to the first if its second half visits more
    blocks, by more than a sixteenth. Where lengths fall or rise with the tile's number, as under a causal mask, the
    longest come first: a CTA that ends the shortest of the tiles under way then begins the longest one that is left,
    and all stay at the same keys, which L2 has (docs/decisions/0092-last-tiles-first.md).

    A hoisted tile comes before the tiles of an earlier head (`hoist_head`). Those that come before the same head go
    from the longest to the shortest, equally long ones by row and tile, and then by head.
    """

    heads: int  # of all batch entries
    tiles: int  # of a head
    num_workers: int
    heads_per_mask: int  # consecutive heads whose tiles visit the same blocks

    @classmethod
    def build(cls, counts: Any, batch: int, heads: int, num_workers: int) -> "TileOrder":
        """Return the order for the counts that `counts_per_row` returns."""
        heads_per_mask = batch * heads // len(counts) if counts.shape[1] == 1 else 1
        return cls(batch * heads, counts.shape[-1], num_workers, heads_per_mask)

    @property
    def num_tail_heads(self) -> int:
        """Return the number of last heads whose tiles are all sorted by length."""
        tiles_per_worker = TAIL_TILES_SHARED_MASK if self.heads_per_mask > 1 else TAIL_TILES
        return min(-(-tiles_per_worker * self.num_workers // self.tiles), self.heads)

    def hoist_head(self, visited: Any, total: Any) -> Any:
        """Return the head before whose tiles a tile of `visited` blocks comes, if that is before its own head.

        `total` is the sum over all tiles with counts of their own, in float32. All warps compute the same head: no sum
        of a product is rounded, which may be one operation with it or not. And no number is negative, as Mosaic
        compares without a sign what `where` takes of two constants.
        """
        tail = np.int32(self.heads - self.num_tail_heads)
        blocks_per_worker = total * np.float32(self.heads_per_mask / self.num_workers)
        xp, visited = array_namespace(visited), visited.astype(np.float32)
        if self.heads_per_mask == 1:
            fraction = min(LONG, LONG_IN_TAIL * self.num_tail_heads / self.heads)
            long = blocks_per_worker * np.float32(fraction)
            return xp.where(visited > long, np.int32(0), tail)
        heads_to_end = (visited * (np.float32(SLACK * self.heads) / blocks_per_worker)).astype(
            np.int32
        )
        head = np.int32(self.heads) - xp.minimum(heads_to_end, np.int32(self.heads))
        return xp.minimum(head, tail)


def order_tiles(
    counts: jax.Array, batch: int, heads: int, num_workers: int, header_rows: int
) -> jax.Array:
    """Return the table of a `DynamicTileScheduler`, or that of CTAs of one tile each: int32 `[header_rows + n + 1, 2]`.

    Its rows are `header_rows` times -1, the ids and counts of n tiles in their `TileOrder`, and (n, 0). Tile t of head
    h of batch entry b has the id (b heads + h) tiles + t; `counts` is `BlockMask.num_blocks`.
    """
    counts = counts_per_row(counts, batch)
    assert counts.size <= MAX_TILES
    order = TileOrder.build(counts, batch, heads, num_workers)
    num_tiles = order.heads * order.tiles
    size = header_rows + num_tiles + 1
    tiles_per_warp = TILES_PER_WARP if order.tiles % TILES_PER_WARP == 0 else 1
    ctas = -(-num_tiles // (WARPS * tiles_per_warp))

    def run(refs: tuple, _: Any) -> None:
        counts, table = refs
        cta, thread = lax.axis_index("cta"), thread_ops.thread_indices()
        lane, warp = rem(thread, LANES), cta * WARPS + div(thread, LANES)
        first_tile = warp * tiles_per_warp
        ranking = _Ranking.build(order, counts, lane, div(first_tile, order.tiles))
        tiles = [ranking.load(first_tile + i) for i in range(tiles_per_warp)]
        for tile, rank in zip(tiles, ranking.compute_ranks(tiles), strict=True):
            stored = (lane == 0) & (tile.id < num_tiles)
            row = jnp.where(stored, header_rows + rank, size)
            thread_ops.scatter(table, row, tile.id, tile.count)

        def fill(rows: list[Any], _: Any) -> None:
            """Write the header and the last row, which is index `header_rows` of this loop."""
            for index in rows:
                row = jnp.where(index == header_rows, I32(size - 1), index)
                row = jnp.where(index > header_rows, I32(size), row)
                in_header = index < header_rows
                values = (jnp.where(in_header, I32(-1), I32(x)) for x in (num_tiles, 0))
                thread_ops.scatter(table, row, *values)

        thread_ops.strided_loop(header_rows + 1, cta * THREADS + thread, ctas * THREADS, fill, None)

    out = jax.ShapeDtypeStruct((2 * size,), I32)
    kernel = launch.build_kernel("order_tiles", run, [], out, {"cta": ctas}, 1)
    return kernel(counts.reshape(-1)).reshape(size, 2)


class _Tile(NamedTuple):
    """A tile of one head, for each thread.

    `slot` is 2h + 1 if it comes in order, with the tiles of its head h, and 2h if it is hoisted before those of head h.
    """

    id: Any
    index: Any  # of its count
    count: Any
    head: Any
    slot: Any
    priority: Any  # among hoisted tiles of a slot: larger for longer ones, then for lower indices


class _Ranking(NamedTuple):
    """How a warp counts the tiles that come before its own, which are of one head."""

    order: TileOrder
    counts: Any  # int32 [rows tiles], in device memory
    lane: Any
    total: Any  # of all blocks that tiles visit, in float32
    flip: Any  # `index ^ flip` is in the order in which the tiles of the warp's head come

    @classmethod
    def build(cls, order: TileOrder, counts: Any, lane: Any, head: Any) -> "_Ranking":
        """Add up what all tiles visit, and those in the halves of a warp's head."""
        ranking = cls(order, counts, lane, None, None)
        first = div(head, order.heads_per_mask) * order.tiles
        end, half = first + order.tiles, half_of(order.tiles)

        def terms(index: Any, visited: Any) -> list[Any]:
            in_first_half = (first <= index) & (index < first + half)
            in_second_half = (end - half <= index) & (index < end)
            return [visited, *(jnp.where(x, visited, 0) for x in (in_first_half, in_second_half))]

        total, *halves = ranking.sum_over_tiles(terms, 3)
        flip = jnp.where(is_last_tile_first(*halves), I32(ranking.index_bits), I32(0))
        return ranking._replace(total=total.astype(jnp.float32), flip=flip)

    @property
    def index_bits(self) -> int:
        """Return a number of ones in binary that is no less than any index."""
        return (1 << self.counts.shape[0].bit_length()) - 1

    def load(self, tile_id: Any) -> _Tile:
        """Load the count of a tile and locate the tile in the order."""
        tiles = self.order.tiles
        head = div(tile_id, tiles)
        index = div(head, self.order.heads_per_mask) * tiles + rem(tile_id, tiles)
        count = thread_ops.gather(self.counts, index)
        visited, _ = unpack_word(count)
        hoist_head = self.order.hoist_head(visited, self.total)
        slot = jnp.where(hoist_head <= head, 2 * hoist_head, 2 * head + 1)
        return _Tile(tile_id, index, count, head, slot, self.priority(index, visited))

    def priority(self, index: Any, visited: Any) -> Any:
        """Return one number that is larger for longer tiles, then for those of lower indices."""
        assert (MAX_BLOCKS + 1) * 2 * MAX_TILES <= 1 << 30
        bits = self.index_bits
        return visited * (bits + 1) | (index & I32(bits) ^ I32(bits))

    def compute_ranks(self, tiles: list[_Tile]) -> list[Any]:
        """Return how many tiles of all heads come before each of these.

        A count stands for the tiles of `heads_per_mask` heads. Either all of them come before, because its hoisted ones
        do, or those of the heads below a limit.
        """
        order = self.order
        shared_by_all = order.heads_per_mask == order.heads

        def count_before(index: Any, visited: Any) -> list[Any]:
            first_head = 0 if shared_by_all else div(index, order.tiles) * order.heads_per_mask
            slot = 2 * order.hoist_head(visited, self.total)
            priority, position = self.priority(index, visited), index ^ self.flip

            def before(tile: _Tile) -> Any:
                hoisted_before = (slot < tile.slot) | (
                    (slot == tile.slot) & (priority > tile.priority)
                )
                # Heads below that of the slot; a tile in order also comes after some of its own head, a hoisted one
                # after the lower heads of its own count.
                earlier = position < tile.index ^ self.flip
                limit = div(tile.slot, 2) + jnp.where(earlier, rem(tile.slot, 2), 0)
                same = (slot == tile.slot) & (priority == tile.priority)
                limit = jnp.where(same, tile.head, limit)
                if not shared_by_all:
                    limit = jnp.maximum(limit, first_head) - first_head
                    limit = jnp.minimum(limit, order.heads_per_mask)
                return jnp.where(hoisted_before, order.heads_per_mask, limit)

            return [before(tile) for tile in tiles]

        return self.sum_over_tiles(count_before, len(tiles))

    def sum_over_tiles(self, terms: Any, num_sums: int) -> list[Any]:
        """Return the sums of terms(index, visited) over all counts, to each lane; the lanes share them."""
        num_counts = self.counts.shape[0]

        def add(indices: list[Any], sums: list[Any]) -> list[Any]:
            for index in indices:
                visited, _ = unpack_word(thread_ops.gather(self.counts, index))
                values = terms(index, visited)
                sums = [
                    total + jnp.where(index < num_counts, x, 0)
                    for total, x in zip(sums, values, strict=True)
                ]
            return sums

        zeros = [0 * self.lane] * num_sums
        sums = thread_ops.strided_loop(num_counts, self.lane, LANES, add, zeros)
        return list(map(thread_ops.warp_sum, sums))
