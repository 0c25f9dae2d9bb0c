"""In which order CTAs take the tiles of a mask that only the device knows: a small kernel, which counts places
as `block_mask_kernel` does."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.block_mask_kernel import MAX_BLOCKS, unpack_word
from pallas_fa2.backends.common.primitives import launch, thread_ops
from pallas_fa2.backends.common.primitives.layouts import LANES, THREADS, WARPS

# How long before all are done a tile begins at the latest, of the time that it takes, if heads share what they visit.
# (With less, CTAs end apart; with more, more heads run side by side, of which L2 holds few: docs/decisions/0058-tile-hoisting.md.)
SLACK = 1.5
# How many tiles of each CTA are sorted, those of the last heads: where heads share what they visit, and where each has
# its own.
SORTED_ALIKE, SORTED = 1, 2
# Of all that a CTA does, the part from which a tile comes before all others, if each head has its own or tiles are dealt;
# and how many times what a CTA has of the heads that are sorted, on average.
LONG = 0.25
LONG_AT_END = 1.5
# With how many tiles a warp compares its own, in 8 turns of `AT_ONCE`. Of more, each CTA has 30 at
# least, whose order matters little.
MOST_COMPARED = 4096
# All ranks of tiles, by their lengths and numbers, are below it; two bits above are free (`_Warp.urgency`).
RANKS = 1 << 28
# How many tiles a warp has, which follow each other in a row; of heads that are alike so many CTAs write a share each, if there
# are no more of them.
TILES_PER_WARP, MAX_CTAS = 4, 512


def array_namespace(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def of_entries(counts: Any, batch: int) -> Any:
    """Where each head has its own, those of each batch entry."""
    if counts.shape[1] == 1:
        return counts
    return array_namespace(counts).broadcast_to(counts, (batch, *counts.shape[1:]))


class TileOrder(NamedTuple):
    """When a tile is taken: with its head, one head after another, or sooner, where CTAs would not be done together
    otherwise."""

    heads: int  # of all batch entries
    tiles: int  # of a head
    num_workers: int
    heads_sharing_mask: int  # heads that follow each other and share what their tiles visit; or 1

    @classmethod
    def of(cls, counts: Any, batch: int, heads: int, hands: int) -> "TileOrder":
        """Of `[B | 1, heads | 1, tiles]`, those `of_entries`."""
        alike = batch * heads // len(counts) if counts.shape[1] == 1 else 1
        return cls(batch * heads, counts.shape[-1], hands, alike)

    @property
    def num_tail_heads(self) -> int:
        """Heads whose tiles are all sorted."""
        each = SORTED_ALIKE if self.heads_sharing_mask > 1 else SORTED
        return min(-(-each * self.num_workers // self.tiles), self.heads)

    def heads_before(self, visited: Any, total: Any) -> Any:
        """Of a tile that visits so many blocks, the heads that it lets begin before, if they come before its own.
        `total` is what all visit, of heads that are alike counted once, in float32.

        (Every warp must find the same: so no sum of a product is rounded, which may become one operation with it
        or not. And nothing is negative: Mosaic compares without a sign what `where` takes of two constants.)
        """
        unsorted = np.int32(self.heads - self.num_tail_heads)
        part = total * np.float32(self.heads_sharing_mask / self.num_workers)  # of each CTA
        xp, visited = array_namespace(visited), visited.astype(np.float32)
        if self.heads_sharing_mask == 1:
            long = part * np.float32(min(LONG, LONG_AT_END * self.num_tail_heads / self.heads))
            return xp.where(visited > long, np.int32(0), unsorted)
        to_end = (visited * (np.float32(SLACK * self.heads) / part)).astype(np.int32)
        return xp.minimum(np.int32(self.heads) - xp.minimum(to_end, np.int32(self.heads)), unsorted)


def order_tiles(counts: jax.Array, batch: int, heads: int, hands: int, before: int) -> jax.Array:
    """int32 `[before + n + 1, 2]`: rows of -1, n tiles with what they visit, and (n, 0).

    `counts` is that of `block_mask.BlockMask`. Tile t of head h of batch entry b has the number
    (b heads + h) tiles + t. They are in this order; but tiles that do not wait for all heads before their own
    (`Order.waits_for`) follow the last one that they wait for, from the longest to the shortest.

    A warp compares some tiles with all others, and writes the entries of all heads that share their counts.
    """
    counts = of_entries(counts, batch)
    order = TileOrder.of(counts, batch, heads, hands)
    count, size = order.heads * order.tiles, before + order.heads * order.tiles + 1
    assert counts.size <= MOST_COMPARED and (MAX_BLOCKS + 1) * 2 * MOST_COMPARED <= RANKS
    together = TILES_PER_WARP if order.tiles % TILES_PER_WARP == 0 else 1
    ctas = -(-counts.size // (WARPS * together))
    shares = min(order.heads_sharing_mask, max(1, MAX_CTAS // ctas))

    def run(refs: tuple, _: Any) -> None:
        counts, entries = refs
        cta, share = lax.axis_index("cta"), lax.axis_index("share")
        warp = _Warp.of(order, counts, cta, together)

        def write(places: list[Any], numbers: list[Any]) -> None:
            for i, (place, number) in enumerate(zip(places, numbers, strict=True)):
                there = (warp.lane == 0) & (warp.first + i < warp.known)
                place = jnp.where(there, before + place, size)
                thread_ops.scatter(entries, place, number, warp.counts[i])

        def write_copy(turn: Any, earlier: list[Any]) -> list[Any]:
            write(*warp.places_in_head(share + turn * shares, earlier))
            return earlier

        if order.heads_sharing_mask == 1:
            write(warp.places_by_urgency(), warp.each)
        else:
            copies = div(order.heads_sharing_mask - share + (shares - 1), shares)
            lax.fori_loop(I32(0), copies, write_copy, warp.earlier())

        def write_rest(rests: list[Any], _: Any) -> None:
            for rest in rests:
                last = jnp.where(rest == before, I32(size - 1), I32(size))
                place = jnp.where(rest < before, rest, last)
                values = (jnp.where(rest < before, I32(-1), I32(x)) for x in (count, 0))
                thread_ops.scatter(entries, place, *values)

        thread = (cta * shares + share) * THREADS + thread_ops.thread_indices()
        thread_ops.strided_loop(before + 1, thread, ctas * shares * THREADS, write_rest, None)

    out = jax.ShapeDtypeStruct((2 * size,), I32)
    kernel = launch.build_kernel("order_tiles", run, [], out, {"cta": ctas, "share": shares}, 1)
    return kernel(counts.reshape(-1)).reshape(size, 2)


class _Warp(NamedTuple):
    """Some tiles of a row (of heads that are alike), which a warp compares with all others."""

    order: TileOrder
    of_all: Any  # [known], what tiles visit, in device memory
    lane: Any
    first: Any  # of its tiles
    counts: list[Any]
    total: Any  # of what all visit

    @classmethod
    def of(cls, order: TileOrder, of_all: Any, cta: Any, together: int) -> "_Warp":
        thread = thread_ops.thread_indices()
        first = (cta * WARPS + div(thread, LANES)) * together
        counts = [thread_ops.gather(of_all, first + i) for i in range(together)]
        warp = cls(order, of_all, rem(thread, LANES), first, counts, None)
        (total,) = warp.sums_of(lambda _, length: [length], 1)
        return warp._replace(total=total.astype(jnp.float32))

    @property
    def known(self) -> int:
        return self.of_all.shape[0]

    @property
    def each(self) -> list[Any]:
        """Its tiles."""
        return [self.first + i for i in range(len(self.counts))]

    @property
    def lengths(self) -> list[Any]:
        return [unpack_word(x)[0] for x in self.counts]

    @property
    def waits(self) -> list[Any]:
        return list(map(self.waits_for, self.lengths))

    def waits_for(self, length: Any) -> Any:
        return self.order.heads_before(length, self.total)

    def rank(self, place: Any, length: Any) -> Any:
        """Larger for longer tiles, then for those before; for what is no tile, smaller than for any."""
        behind = (1 << self.known.bit_length()) - 1
        return length * (behind + 1) | (place & I32(behind) ^ I32(behind))

    def sums_of(self, terms: Callable, many: int) -> list[Any]:
        """Of all tiles, `many` numbers each: terms(place, length)."""

        def add(places: list[Any], sums: list[Any]) -> list[Any]:
            lengths = [unpack_word(thread_ops.gather(self.of_all, place))[0] for place in places]
            found = map(terms, places, lengths)
            return [functools.reduce(jnp.add, x) for x in zip(sums, *found, strict=True)]

        sums = thread_ops.strided_loop(self.known, self.lane, LANES, add, [0 * self.lane] * many)
        return [thread_ops.warp_sum(x) for x in sums]

    def urgency(self, place: Any, length: Any) -> Any:
        """Where each head has its own tiles, all that decides, as one number: long ones are above those that come
        with their heads, and these above those of the last heads."""
        order, rank = self.order, self.rank(place, length)
        in_turn = I32(RANKS) | self.rank(place, 0)
        in_turn = jnp.where(
            place < (order.heads - order.num_tail_heads) * order.tiles, in_turn, rank
        )
        return jnp.where(self.waits_for(length) == 0, I32(2 * RANKS) | rank, in_turn)

    def places_by_urgency(self) -> list[Any]:
        own = list(map(self.urgency, self.each, self.lengths))

        def more_urgent(place: Any, length: Any) -> list[Any]:
            other = self.urgency(place, length)
            return [jnp.where(other > x, I32(1), I32(0)) for x in own]

        return self.sums_of(more_urgent, len(own))

    def earlier(self) -> list[Any]:
        """Where heads share tiles: how many come before one that does not wait for its head, counting all tiles of the
        heads that it waits for, also its own in these."""
        order, waits = self.order, self.waits
        own = list(map(self.rank, self.each, self.lengths))

        def longer(place: Any, length: Any) -> list[Any]:
            """Of the heads of a longer tile, those that an own one does not wait for."""
            end, rank = (
                (div(place, order.tiles) + 1) * order.heads_sharing_mask,
                self.rank(place, length),
            )
            rests = (
                jnp.minimum(jnp.maximum(end, begun) - begun, order.heads_sharing_mask)
                for begun in waits
            )
            return [jnp.where(rank > x, rest, I32(0)) for x, rest in zip(own, rests, strict=True)]

        found = self.sums_of(longer, len(own))
        return [begun * order.tiles + x for begun, x in zip(waits, found, strict=True)]

    def places_in_head(self, copy: Any, earlier: list[Any]) -> tuple[list[Any], list[Any]]:
        """And numbers, in a head of those that share these tiles."""
        order, row = self.order, div(self.first, self.order.tiles)
        first_head = row * order.heads_sharing_mask
        head = first_head + copy
        number = head * order.tiles + rem(self.first, order.tiles)

        def ahead(place: Any, length: Any) -> list[Any]:
            """Of the later heads of a tile, and of this one where it is later than all own tiles, those whose one
            comes before all the same, as it waits for none from this head on."""
            other, later = div(place, order.tiles), place >= self.first + len(earlier)
            here = I32(order.heads_sharing_mask - 1) - copy + jnp.where(later, I32(1), I32(0))
            of_heads = jnp.where(other == row, here, I32(order.heads_sharing_mask))
            early = (self.waits_for(length) <= head) & (other >= row) & (place < self.known)
            return [jnp.where(early, of_heads, I32(0))]

        (more,) = self.sums_of(ahead, 1)
        places, numbers = [], [number + i for i in range(len(earlier))]
        for begun, before, own in reversed(list(zip(self.waits, earlier, numbers, strict=True))):
            early = begun <= head
            in_front = before + head - jnp.maximum(begun, first_head)
            places.insert(0, jnp.where(early, in_front, own + more))
            more = more + jnp.where(early, I32(1), I32(0))
        return places, numbers
