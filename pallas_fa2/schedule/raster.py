"""The order in which persistent CTAs take tiles, and how tiles are dealt to them."""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_fa2.arithmetic import div, rem


@dataclasses.dataclass(frozen=True)
class RasterOrder:
    """The order in which persistent CTAs take tiles, as a number for each (batch, head, tile).

    Full attention goes head by head. Causal attention goes tile by tile, the longest first, over a
    section of heads whose data share the L2: short tiles at the end fill the gaps that long ones
    leave.
    """

    batch: int
    heads: int
    tiles: int
    l2_head_group: int  # heads that run together, a divisor of their number
    longest_first: bool  # whether the last tile of a head is the longest

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.tiles

    def coordinates(self, number: Any) -> tuple[Any, Any, Any]:
        """(batch entry, head, tile) of a number: an int, a NumPy array or a traced scalar."""
        if not self.longest_first:
            head, tile = div(number, self.tiles), rem(number, self.tiles)
        else:
            per_section = self.l2_head_group * self.tiles
            section, rest = div(number, per_section), rem(number, per_section)
            tile = self.tiles - 1 - div(rest, self.l2_head_group)
            head = section * self.l2_head_group + rem(rest, self.l2_head_group)
        return div(head, self.heads), rem(head, self.heads), tile


def heads_per_l2_group(heads: int, bytes_per_head: int, budget: int) -> int:
    """The most heads, dividing their number, whose data fit into the L2 budget together."""
    fit = max(1, budget // max(bytes_per_head, 1))
    return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= fit)


def list_schedule(
    costs: Sequence[float] | np.ndarray, hands: int
) -> tuple[list[list[int]], list[float]]:
    """List scheduling: each tile, in order, to the CTA that is free first; and what each has to do."""
    free = [(0.0, hand) for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for number, cost in enumerate(costs):
        time, hand = free[0]
        dealt[hand].append(number)
        heapq.heapreplace(free, (time + cost, hand))
    return dealt, [time for time, _ in free]
