"""Which blocks a tile visits under a mask, and which CTA takes which tiles.

Everything here is NumPy where the classes of tiles are known when a call is traced, and JAX on the
device where they depend on data.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import listing, ordering
from pallas_fa2.kernels.listing import FULL_BIT, MOST
from pallas_fa2.kernels.ordering import LONG, module_of
from pallas_fa2.kernels.tiles import Claims, Dealt


def decode(counts: Any) -> tuple[Any, Any]:
    """How many blocks a tile visits, and how many of them are cut."""
    visited, full = listing.halves(counts)
    return visited, visited - full


def block(listed: Any) -> Any:
    """Which one an entry of a tile's list is; lists that were sorted have its class above it."""
    return listed & np.int32(MOST)


def from_last(classes: Any) -> Any:
    """With blocks by their distance from the last one: lists begin there then."""
    return module_of(classes).flip(classes, -1)


def block_from_last(listed: Any, blocks: int) -> Any:
    """Which one an entry of such a tile's list is, of so many."""
    return np.int32(blocks - 1) - block(listed)


def _count(x: Any) -> np.ndarray:
    """0, 1, 2, ... along the last axis."""
    return np.arange(x.shape[-1], dtype=np.int32).reshape((1,) * (x.ndim - 1) + (-1,))


# Of the blocks that are visited without parts; parts that are no neighbours take two copies.
WORTH_PARTS = 0.98


class Visits(NamedTuple):
    """The blocks that each tile visits: full ones first, then those that the mask cuts.

    A tile that sees nothing visits one block nevertheless, as one that is cut.

    A block may have parts, each with an entry in a list: those that follow each other there are a block. So
    it is full if all its parts are, and the last that a tile visits may have some that it does not see.
    """

    counts: Any  # int32 [B | 1, heads | 1, tiles]: blocks, and full ones from `FULL_BIT` on
    lists: Any  # int32 [B | 1, heads | 1, tiles, blocks parts], which: see `block`

    @classmethod
    def of(cls, classes: Any, parts: int = 1) -> "Visits":
        """From the classes of tiles, `[B | 1, heads | 1, tiles, blocks parts]`."""
        assert classes.shape[-1] % parts == 0
        if module_of(classes) is jnp:
            return cls(*listing.list_blocks(classes, parts))
        assert EMPTY < PARTIAL < FULL
        rank = np.int32(FULL) - classes
        lists = np.sort(rank * np.int32(MOST + 1) + _count(classes), -1)
        full = np.sum(classes == FULL, -1, dtype=np.int32)
        visited = np.maximum(np.sum(classes != EMPTY, -1, dtype=np.int32), np.int32(1))
        visited = (visited + np.int32(parts - 1)) // np.int32(parts)
        return cls(visited + full // np.int32(parts) * np.int32(1 << FULL_BIT), lists)

    def claim(self, batch: int, heads: int, hands: int) -> Claims:
        """Tile t of head h of batch entry b has the number (b heads + h) tiles + t.

        Heads follow each other, and their tiles, as neighbours share data; but long ones and those of the last
        heads come sooner, so that all CTAs are done together: see `ordering.Order`. (On the device, more than
        `MOST_COMPARED` stay where they are.)
        """
        tiles = self.counts.shape[-1]
        hands = min(hands, batch * heads * tiles)
        if isinstance(self.counts, np.ndarray):
            entries = in_order(self.counts, batch, heads, hands)
            return Claims.of(entries[:, 0], entries[:, 1], hands)
        if ordering.of_entries(self.counts, batch).size > ordering.MOST_COMPARED:
            numbers = np.arange(batch * heads * tiles, dtype=np.int32)
            counts = jnp.broadcast_to(self.counts, (batch, heads, tiles))
            return Claims.of(numbers, counts.reshape(-1), hands)
        front = Claims.in_front(hands)
        return Claims(ordering.in_order(self.counts, batch, heads, hands, front), hands)

    def deal(self, batch: int, heads: int, section: int, hands: int) -> Dealt | Claims:
        """As `claim`; but known tiles are dealt.

        Sections of so many heads (a divisor of their number) follow each other, as each has its data in L2;
        their tiles go from the longest to the shortest, and if all are done earlier so, those that are `LONG`
        come before all sections.
        """
        if not isinstance(self.counts, np.ndarray):
            return self.claim(batch, heads, hands)
        hands = min(hands, batch * heads * self.counts.shape[-1])
        entries = self._in_sections(batch, heads, section)
        dealt = [Dealt.of(x, costs(x[:, 1]), hands) for x in _orders(entries, hands)]
        return min(dealt, key=lambda x: max(x.loads))

    def _in_sections(self, batch: int, heads: int, section: int) -> np.ndarray:
        """int32 `[all tiles, 2]`: numbers and counts."""
        tiles = self.counts.shape[-1]
        visited, _ = listing.halves(self.counts)
        order = np.argsort(-visited, -1, kind="stable").astype(np.int32)
        head = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads, 1)
        found = head * np.int32(tiles) + order, np.take_along_axis(self.counts, order, -1)
        shape = batch, heads, tiles
        each = (np.broadcast_to(x, shape).reshape(-1, section, tiles) for x in found)
        return np.stack([x.swapaxes(1, 2).reshape(-1) for x in each], -1)


def in_order(counts: np.ndarray, batch: int, heads: int, hands: int) -> np.ndarray:
    """The entries of `ordering.in_order`, on the host."""
    counts = ordering.of_entries(counts, batch)
    order = ordering.Order.of(counts, batch, heads, hands)
    shape = batch, heads, order.tiles
    known = np.broadcast_to(np.arange(counts.size).reshape(counts.shape), shape).reshape(-1)
    numbers, counts = np.arange(known.size), counts.reshape(-1)
    visited, _ = listing.halves(counts)
    waits = order.waits_for(visited, np.float32(visited.sum()))[known]
    head = numbers // order.tiles
    early = waits <= head
    by_length = np.where(early, known, 0), np.where(early, -visited[known], 0)
    places = np.lexsort((numbers, *by_length, ~early, np.minimum(waits, head)))
    return np.stack([places, counts[known[places]]], -1).astype(np.int32)


def _orders(entries: np.ndarray, hands: int) -> list[np.ndarray]:
    """The same, and with those first that are `LONG`, if any are."""
    each = costs(entries[:, 1])
    long = each > LONG * each.sum() / hands
    if not long.any():
        return [entries]
    return [entries, entries[np.argsort(np.where(long, -each, 0), kind="stable")]]


def costs(counts: np.ndarray) -> np.ndarray:
    """Of tiles. Their beginnings and ends cost about as much as a block, and the mask half as much."""
    visited, cut = decode(counts)
    return visited + 0.5 * cut + 1.0


def in_whole_blocks(classes: Any, parts: int) -> Any:
    """With empty parts at the end, if blocks of so many were not whole."""
    missing = -classes.shape[-1] % parts
    return module_of(classes).pad(classes, [(0, 0)] * (classes.ndim - 1) + [(0, missing)])


def joined(classes: Any, parts: int) -> Any:
    """Of blocks, from the classes of their parts."""
    if parts == 1:
        return classes
    of_parts = classes.reshape(*classes.shape[:-1], -1, parts)
    least, most = of_parts.min(-1), of_parts.max(-1)
    return module_of(classes).where(least == most, most, np.int32(PARTIAL))


def are_fewer(of_parts: Any, classes: Any, parts: int) -> bool:
    """Whether tiles visit fewer blocks by the classes of so many parts of each than by those of blocks. Of what
    only the device knows, they may, unless there is one block alone."""
    if classes.shape[-1] == 1 or of_parts.shape[-1] > MOST:
        return False
    if module_of(classes) is jnp:
        return True
    by_parts, whole = (
        np.sum(decode(Visits.of(*x).counts)[0]) for x in ((of_parts, parts), (classes, 1))
    )
    return bool(by_parts < WORTH_PARTS * whole)


def cut_last(classes: Any) -> Any:
    """The last block as cut, if it was full: it reaches past the end."""
    xp = module_of(classes)
    last = _count(classes) == classes.shape[-1] - 1
    return xp.where(last & (classes == FULL), np.int32(PARTIAL), classes)
