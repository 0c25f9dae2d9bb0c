"""Which blocks a tile visits under a mask, and which CTA takes which tiles.

Everything here is NumPy where the classes of tiles are known when a call is traced, and JAX on the
device where they depend on data.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import mosaic

# Where the number of full blocks begins in a tile's counts: both in an int32.
FULL_BIT = 16
MOST = (1 << (FULL_BIT - 1)) - 1


def decode(counts: Any) -> tuple[Any, Any]:
    """How many blocks a tile visits, and how many of them are cut."""
    visited, full = counts & np.int32(MOST), counts >> np.int32(FULL_BIT)
    return visited, visited - full


def block(listed: Any) -> Any:
    """Which one an entry of a tile's list is; above it stands its class, by which lists are sorted."""
    return listed & np.int32(MOST)


def module_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def _count(x: Any) -> np.ndarray:
    """0, 1, 2, ... along the last axis."""
    return np.arange(x.shape[-1], dtype=np.int32).reshape((1,) * (x.ndim - 1) + (-1,))


class Visits(NamedTuple):
    """The blocks that each tile visits: full ones first, then those that the mask cuts.

    A tile that sees nothing visits one block nevertheless, as one that is cut.
    """

    counts: Any  # int32 [B | 1, heads | 1, tiles]: blocks, and full ones from `FULL_BIT` on
    lists: Any  # int32 [B | 1, heads | 1, tiles, blocks], which: see `block`

    @classmethod
    def of(cls, classes: Any) -> "Visits":
        """From the classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp = module_of(classes)
        assert EMPTY < PARTIAL < FULL
        rank = np.int32(FULL) - classes
        lists = xp.sort(rank * np.int32(MOST + 1) + _count(classes), -1)
        full = xp.sum(classes == FULL, -1, dtype=np.int32)
        visited = xp.maximum(xp.sum(classes != EMPTY, -1, dtype=np.int32), np.int32(1))
        return cls(visited + full * np.int32(1 << FULL_BIT), lists)

    def deal(self, batch: int, heads: int, section: int, hands: int) -> Any:
        """int32 `[hands, 2 + most, 2]`, a row a CTA: how many tiles; their numbers and counts; a zero.

        Tile `t` of head h of batch entry b has the number (b heads + h) tiles + t. Sections of so many
        heads (a divisor of their number) follow each other, as each has its data in L2; their tiles go
        from the longest to the shortest.
        """
        xp, tiles = module_of(self.counts), self.counts.shape[-1]
        order = self._longest_first(xp)
        head = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads, 1)
        number = head * np.int32(tiles) + order
        counts = xp.take_along_axis(self.counts, order, -1)
        if xp is jnp:
            section = _wide_enough(section, batch * heads, tiles, hands)

        def in_order(x: Any) -> Any:
            x = xp.broadcast_to(x, number.shape).reshape(-1, section, tiles)
            return x.swapaxes(1, 2).reshape(-1)

        entries = xp.stack([in_order(number), in_order(counts)], -1)
        if xp is np:
            return _to_the_first_free(entries, hands)
        return _in_turns(entries, section * tiles, hands)

    def _longest_first(self, xp: Any) -> Any:
        """Each head's tiles by the blocks that they visit."""
        tiles, blocks = self.lists.shape[-2:]
        rank = np.int32(blocks) - (self.counts & np.int32(MOST))
        return xp.sort(rank * np.int32(tiles) + _count(self.counts), -1) % np.int32(tiles)


def _wide_enough(section: int, heads: int, tiles: int, hands: int) -> int:
    """For dealing in turns: the next multiple that divides the heads and has tiles for all CTAs, half of
    them twice."""
    sizes = (n for n in range(section, heads, section) if heads % n == 0)
    return next((n for n in sizes if n * tiles >= 1.5 * hands), heads)


def costs(counts: np.ndarray) -> np.ndarray:
    """Of tiles. Their beginnings and ends cost about as much as a block, and the mask half as much."""
    visited, cut = decode(counts)
    return visited + 0.5 * cut + 1.0


def _to_the_first_free(entries: np.ndarray, hands: int) -> np.ndarray:
    table = mosaic.deal(costs(entries[:, 1]), min(hands, len(entries)))
    dealt = np.concatenate([table, np.zeros_like(table)], -1)
    for row in dealt:
        row[1 : 1 + row[0, 0]] = entries[row[1 : 1 + row[0, 0], 0]]
    return dealt


def _in_turns(entries: jax.Array, section: int, hands: int) -> jax.Array:
    """What nobody knows before, by what anybody knows: its order.

    Of each section, so many entries, the first CTA takes the first, the second the next, ... and back
    again. The next section mirrors that, and each two begin elsewhere: long tiles would otherwise come
    to the same CTAs.
    """
    n = len(entries)
    hands = min(hands, n)
    number = np.arange(n)
    of, place = np.divmod(number, section)
    turn, hand = np.divmod(place, hands)
    hand = np.where((turn + of) % 2 == 1, hands - 1 - hand, hand)
    hand = (hand + (of - of % 2) * hands * section // n) % hands
    dealt = np.bincount(hand, minlength=hands)
    places = np.full((hands, 1 + dealt.max()), n)
    first = np.cumsum(dealt) - dealt
    by_hand = np.argsort(hand, kind="stable")
    places[hand[by_hand], number - first[hand[by_hand]]] = by_hand
    counts = np.stack([dealt, 0 * dealt], -1).astype(np.int32)[:, None]
    return jnp.concatenate([counts, jnp.pad(entries, [(0, 1), (0, 0)])[places]], 1)


def cut_last(classes: Any) -> Any:
    """The last block as cut, if it was full: it reaches past the end."""
    xp = module_of(classes)
    last = _count(classes) == classes.shape[-1] - 1
    return xp.where(last & (classes == FULL), np.int32(PARTIAL), classes)
