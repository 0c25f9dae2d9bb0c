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

# Tiles are dealt from the longest on; those of like costs stay together, as they share data in L2.
LEVELS = 32
# On the device, CTAs take tiles in turns. It comes out even if they take so many of a section of heads:
# with 2, the longest took 1.9 times the mean (packed documents), with 16 it takes 1.04 times.
TURNS = 16

# Where the number of full blocks begins in a tile's counts: both in an int32.
FULL_BIT = 16
MOST = (1 << (FULL_BIT - 1)) - 1


def decode(counts: Any) -> tuple[Any, Any]:
    """How many blocks a tile visits, and how many of them are cut."""
    visited, full = counts & np.int32(MOST), counts >> np.int32(FULL_BIT)
    return visited, visited - full


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
    lists: Any  # int32 [B | 1, heads | 1, tiles, blocks + 1], which; what follows means nothing

    @classmethod
    def of(cls, classes: Any) -> "Visits":
        """From the classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp, n = module_of(classes), classes.shape[-1]
        assert EMPTY < PARTIAL < FULL
        rank = np.int32(FULL) - classes
        lists = xp.sort(rank * np.int32(n) + _count(classes), -1) % np.int32(n)
        lists = xp.pad(lists, [(0, 0)] * 3 + [(0, 1)])  # the next of the last
        full = xp.sum(classes == FULL, -1, dtype=np.int32)
        visited = xp.maximum(xp.sum(classes != EMPTY, -1, dtype=np.int32), np.int32(1))
        return cls(visited + full * np.int32(1 << FULL_BIT), lists)

    def deal(self, batch: int, heads: int, section: int, hands: int) -> Any:
        """int32 `[hands, 2 + most, 2]`, a row a CTA: how many tiles; their numbers and counts; a zero.

        Tile `t` of head h of batch entry b has the number (b heads + h) tiles + t. Heads of a section
        (of their number, a divisor) follow each other, and its tiles go from the longest to the shortest.
        """
        xp, tiles = module_of(self.counts), self.counts.shape[-1]
        if xp is jnp:
            enough = [n for n in range(section, heads) if heads % n == 0]
            even = (n for n in enough if n * batch * tiles >= TURNS * hands)
            section = next(even, heads)
        each = self.counts.shape[1]
        counts = xp.broadcast_to(self.counts, (batch, each, tiles))
        counts = xp.moveaxis(counts, 1, 0).reshape(each, batch * tiles)
        order = _longest_first(counts & MOST)
        entry, tile = order // tiles, order % tiles
        head = np.arange(heads, dtype=np.int32)[:, None]
        number = (entry * heads + head) * tiles + tile
        counts = xp.broadcast_to(xp.take_along_axis(counts, order, -1), number.shape)

        def in_order(x: Any) -> Any:
            return x.reshape(-1, section, batch * tiles).swapaxes(1, 2).reshape(-1)

        entries = xp.stack([in_order(number), in_order(counts)], -1)
        return _in_turns(entries, hands) if xp is jnp else _to_the_first_free(entries, hands)


def _longest_first(costs: Any) -> Any:
    xp, n = module_of(costs), costs.shape[-1]
    top = xp.maximum(xp.max(costs, -1, keepdims=True), np.int32(1))
    level = np.int32(LEVELS) - (costs * np.int32(LEVELS) + top - np.int32(1)) // top
    return xp.sort(level * np.int32(n) + _count(costs), -1) % np.int32(n)


def _to_the_first_free(entries: np.ndarray, hands: int) -> np.ndarray:
    visited, cut = decode(entries[:, 1])
    # A tile's beginning and end cost about as much as a block, and the mask half as much.
    table = mosaic.deal(visited + 0.5 * cut + 1.0, min(hands, len(entries)))
    dealt = np.concatenate([table, np.zeros_like(table)], -1)
    for row in dealt:
        row[1 : 1 + row[0, 0]] = entries[row[1 : 1 + row[0, 0], 0]]
    return dealt


def _in_turns(entries: jax.Array, hands: int) -> jax.Array:
    """To the first, the second, ... and back again."""
    n = len(entries)
    hands = min(hands, n)
    rounds = -(-n // hands)
    entries = jnp.pad(entries, [(0, rounds * hands - n), (0, 0)]).reshape(rounds, hands, 2)
    number = np.arange(rounds * hands).reshape(rounds, hands)
    number[1::2] = number[1::2, ::-1]
    back = (np.arange(rounds) % 2 == 1)[:, None, None]
    entries = jnp.where(back, entries[:, ::-1], entries)
    dealt = np.stack([np.sum(number < n, 0), np.zeros(hands)], -1).astype(np.int32)
    last = np.zeros((1, hands, 2), np.int32)
    return jnp.concatenate([dealt[None], entries, last]).swapaxes(0, 1)


def cut_last(classes: Any) -> Any:
    """The last block as cut, if it was full: it reaches past the end."""
    xp = module_of(classes)
    last = _count(classes) == classes.shape[-1] - 1
    return xp.where(last & (classes == FULL), np.int32(PARTIAL), classes)
