"""The order in which persistent CTAs take tiles, and how tiles are dealt to them."""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from pallas_fa2.arithmetic import IntOrArray, div, rem


@dataclasses.dataclass(frozen=True)
class RasterOrder:
    """The order in which persistent CTAs take tiles, as an id for each (batch, head, tile).

    Full attention goes head by head. Causal attention goes tile by tile, the longest first, over a
    group of heads whose operands share the L2: short tiles at the end fill the gaps that long ones
    leave.
    """

    batch: int
    heads: int
    tiles: int
    l2_head_group: int  # heads that run together, a divisor of all
    longest_first: bool  # whether the last tile of a head is the longest

    @property
    def count(self) -> int:
        """Return the number of tiles."""
        return self.batch * self.heads * self.tiles

    def coordinates(self, tile_id: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        """Return (batch entry, head, tile) of an id."""
        if not self.longest_first:
            head, tile = div(tile_id, self.tiles), rem(tile_id, self.tiles)
        else:
            group_tiles = self.l2_head_group * self.tiles
            group, rest = div(tile_id, group_tiles), rem(tile_id, group_tiles)
            tile = self.tiles - 1 - div(rest, self.l2_head_group)
            head = group * self.l2_head_group + rem(rest, self.l2_head_group)
        return div(head, self.heads), rem(head, self.heads), tile


def heads_per_l2_group(heads: int, bytes_per_head: int, budget: int) -> int:
    """Return the largest divisor of `heads` so that as many heads fit into the L2 budget together."""
    fitting = max(1, budget // max(bytes_per_head, 1))
    return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= fitting)


def list_schedule(
    costs: Sequence[float] | np.ndarray, num_workers: int
) -> tuple[list[list[int]], list[float]]:
    """Deal each tile, in order, to the CTA that is free first (list scheduling). Return the tiles of each CTA, and when
    CTAs are done, in no order."""
    free = [(0.0, worker) for worker in range(num_workers)]
    dealt: list[list[int]] = [[] for _ in range(num_workers)]
    for tile, cost in enumerate(costs):
        time, worker = free[0]
        dealt[worker].append(tile)
        heapq.heapreplace(free, (time + cost, worker))
    return dealt, [time for time, _ in free]
