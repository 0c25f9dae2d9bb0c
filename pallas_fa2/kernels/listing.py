"""What tiles visit, and in which order CTAs take them, under a mask that only the device knows: two
small kernels.

XLA would sort, in several kernels, most of which take little longer than their launch. Here places are
counted instead: by warps that wait for nobody, and so count again what others have counted too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import mosaic, ptx
from pallas_fa2.kernels.mosaic import I32, div, rem
from pallas_fa2.kernels.ptx import EACH, NUMBERS, i32, of_each, own
from pallas_fa2.kernels.tma import THREADS

# Where the second of two numbers in a word begins: each is at most `MOST`.
FULL_BIT = 16
MOST = (1 << (FULL_BIT - 1)) - 1

# How long before all are done a tile begins at the latest, of the time that it takes, if heads share what they visit.
# (With less, CTAs end apart; with more, more heads run side by side, of which L2 holds few: docs/performance.md.)
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
# Of tiles so many differ by their lengths and numbers.
RANKS = 1 << 28
# How many it has, which follow each other in a row; of heads that are alike so many CTAs write a share each, if there
# are no more of them.
TOGETHER, CTAS = 4, 512

LANES, WARPS = 32, 4
# Loads of a thread that are under way together: a row of 512 takes as long as one load.
AT_ONCE = 16


def halves(word: Any) -> tuple[Any, Any]:
    """The numbers below and from `FULL_BIT` on."""
    return word & np.int32(MOST), word >> np.int32(FULL_BIT)


def module_of(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else jnp


def of_entries(counts: Any, batch: int) -> Any:
    """Where each head has its own, those of each batch entry."""
    if counts.shape[1] == 1:
        return counts
    return module_of(counts).broadcast_to(counts, (batch, *counts.shape[1:]))


class Order(NamedTuple):
    """When a tile is taken: with its head, one head after another, or sooner, where CTAs would not be done together
    otherwise."""

    heads: int  # of all batch entries
    tiles: int  # of a head
    hands: int
    alike: int  # heads that follow each other and share what their tiles visit; or 1

    @classmethod
    def of(cls, counts: Any, batch: int, heads: int, hands: int) -> "Order":
        """Of `[B | 1, heads | 1, tiles]`, those `of_entries`."""
        alike = batch * heads // len(counts) if counts.shape[1] == 1 else 1
        return cls(batch * heads, counts.shape[-1], hands, alike)

    @property
    def last(self) -> int:
        """Heads whose tiles are all sorted."""
        each = SORTED_ALIKE if self.alike > 1 else SORTED
        return min(-(-each * self.hands // self.tiles), self.heads)

    def waits_for(self, visited: Any, total: Any) -> Any:
        """Of a tile that visits so many blocks, the heads that it lets begin before, if they come before its own.
        `total` is what all visit, of heads that are alike counted once, in float32.

        (Every warp must find the same: so no sum of a product is rounded, which may become one operation with it
        or not. And nothing is negative: Mosaic compares without a sign what `where` takes of two constants.)
        """
        unsorted = np.int32(self.heads - self.last)
        part = total * np.float32(self.alike / self.hands)  # of each CTA
        xp, visited = module_of(visited), visited.astype(np.float32)
        if self.alike == 1:
            long = part * np.float32(min(LONG, LONG_AT_END * self.last / self.heads))
            return xp.where(visited > long, np.int32(0), unsorted)
        to_end = (visited * (np.float32(SLACK * self.heads) / part)).astype(np.int32)
        return xp.minimum(np.int32(self.heads) - xp.minimum(to_end, np.int32(self.heads)), unsorted)


def list_blocks(classes: jax.Array, parts: int = 1) -> tuple[jax.Array, jax.Array]:
    """The counts and lists of `visits.Visits`, from classes `[B | 1, heads | 1, tiles, blocks parts]`.

    A list ends with the blocks that are not visited. A CTA writes a list, and a warp a quarter of its
    row's blocks, after it has counted all of the row.
    """
    *outer, blocks = classes.shape
    assert (EMPTY, PARTIAL, FULL) == (0, 1, 2) and blocks <= MOST
    rows = math.prod(outer)
    quarter = mosaic.round_up(-(-blocks // WARPS), LANES)

    def run(refs: tuple, _: Any) -> None:
        classes, counts, lists = refs
        row, thread = lax.axis_index("cta"), thread_numbers()
        classes, found = classes.at[row], lists.at[row]
        lane, first = rem(thread, LANES), div(thread, LANES) * quarter
        end = jnp.minimum(first + quarter, blocks)

        def seen(columns: list[Any]) -> list[Any]:
            """1 in the half of its class, of each block that is visited."""
            found = [gather(classes, column) for column in columns]
            return [jnp.where(x == FULL, 1 << FULL_BIT, x) for x in found]

        def count(columns: list[Any], sums: tuple[Any, Any]) -> tuple[Any, Any]:
            for column, x in zip(columns, seen(columns), strict=True):
                sums = sums[0] + x, sums[1] + jnp.where(column < first, x, 0)
            return sums

        def place(columns: list[Any], before: Any) -> Any:
            for column, x in zip(columns, seen(columns), strict=True):
                cut, full = halves(before + sum_of_lanes_before(x))
                at = jnp.where(x == 1, all_full + cut, all_full + all_cut + column - full - cut)
                at = jnp.where(x > 1, full, at)
                scatter(found, jnp.where(column < end, at, blocks), column)
                before = before + sum_of_lanes(x)
            return before

        sums = _strides(blocks, lane, LANES, count, (0 * thread, 0 * thread))
        total, before = map(sum_of_lanes, sums)
        all_cut, all_full = halves(total)
        _strides(quarter, first + lane, LANES, place, before)
        visited = div(jnp.maximum(all_full + all_cut, 1) + (parts - 1), parts)
        found = visited + (div(all_full, parts) << FULL_BIT)
        scatter(counts, jnp.where(thread == 0, row, rows), found)

    out = [jax.ShapeDtypeStruct(shape, I32) for shape in ((rows,), (rows, blocks))]
    kernel = mosaic.launch("list_blocks", run, [], out, {"cta": rows}, 1)
    counts, lists = kernel(classes.reshape(rows, blocks))
    return counts.reshape(outer), lists.reshape(classes.shape)


def in_order(counts: jax.Array, batch: int, heads: int, hands: int, before: int) -> jax.Array:
    """int32 `[before + n + 1, 2]`: rows of -1, n tiles with what they visit, and (n, 0).

    `counts` is that of `visits.Visits`. Tile t of head h of batch entry b has the number
    (b heads + h) tiles + t. They are in this order; but tiles that do not wait for all heads before their own
    (`Order.waits_for`) follow the last one that they wait for, from the longest to the shortest.

    A warp compares some tiles with all others, and writes the entries of all heads that share their counts.
    """
    counts = of_entries(counts, batch)
    order = Order.of(counts, batch, heads, hands)
    known, tiles, alike, n = counts.size, order.tiles, order.alike, order.heads * order.tiles
    size = before + n + 1
    assert known <= MOST_COMPARED and (MOST + 1) * 2 * MOST_COMPARED <= RANKS
    together = TOGETHER if tiles % TOGETHER == 0 else 1
    ctas = -(-known // (WARPS * together))
    shares = min(alike, max(1, CTAS // ctas))

    def rank_of(place: Any, length: Any) -> Any:
        """Larger for longer tiles, then for those before; for what is no tile, smaller than for any."""
        behind = (1 << known.bit_length()) - 1
        return length * (behind + 1) | (place & I32(behind) ^ I32(behind))

    def run(refs: tuple, _: Any) -> None:
        counts, found = refs
        cta, share, thread = lax.axis_index("cta"), lax.axis_index("share"), thread_numbers()
        lane, own = rem(thread, LANES), (cta * WARPS + div(thread, LANES)) * together
        row, tile = div(own, tiles), rem(own, tiles)
        mine = [gather(counts, own + i) for i in range(together)]
        visited = [halves(x)[0] for x in mine]

        def sums_of(terms: Callable, many: int) -> list[Any]:
            """Of all tiles: terms(place, length)."""

            def add(places: list[Any], sums: list[Any]) -> list[Any]:
                lengths = [halves(gather(counts, place))[0] for place in places]
                found = map(terms, places, lengths)
                return [functools.reduce(jnp.add, x) for x in zip(sums, *found, strict=True)]

            sums = _strides(known, lane, LANES, add, [0 * thread] * many)
            return [sum_of_lanes(x) for x in sums]

        (total,) = sums_of(lambda _, length: [length], 1)
        waits_for = functools.partial(order.waits_for, total=total.astype(jnp.float32))

        def put(i: int, place: Any, number: Any) -> None:
            there = (lane == 0) & (own + i < known)
            scatter(found, jnp.where(there, before + place, size), number, mine[i])

        def put_each() -> None:
            """Where each head has its own: by one number, those of long tiles above those of heads whose tiles come
            in turn, and these above those of the last heads."""

            def urgency(place: Any, length: Any) -> Any:
                rank, in_turn = rank_of(place, length), I32(RANKS) | rank_of(place, 0)
                begun = waits_for(length)
                in_turn = jnp.where(place < (order.heads - order.last) * tiles, in_turn, rank)
                return jnp.where(begun == 0, I32(2 * RANKS) | rank, in_turn)

            mine = [urgency(own + i, x) for i, x in enumerate(visited)]

            def more_urgent(place: Any, length: Any) -> list[Any]:
                other = urgency(place, length)
                return [jnp.where(other > x, I32(1), I32(0)) for x in mine]

            for i, place in enumerate(sums_of(more_urgent, together)):
                put(i, place, own + i)

        waits = [waits_for(x) for x in visited]
        ranks = [rank_of(own + i, x) for i, x in enumerate(visited)]

        def longer_than_mine(place: Any, length: Any) -> list[Any]:
            """Of the heads of a longer tile, those that an own tile does not wait for."""
            first, found = div(place, tiles) * alike, []
            for rank, begun in zip(ranks, waits, strict=True):
                rest = jnp.minimum(jnp.maximum(first + alike, begun) - begun, alike)
                found.append(jnp.where(rank_of(place, length) > rank, rest, I32(0)))
            return found

        def put_copy(turn: Any, earlier: list[Any]) -> list[Any]:
            """Of a head of those that share the own tiles' counts."""
            copy, first_head = share + turn * shares, row * alike
            head = first_head + copy

            def ahead(place: Any, length: Any) -> list[Any]:
                """Of the later heads of a tile, and of this one where it is later than all own tiles, those whose one
                comes before all the same, as it waits for none from this head on."""
                other, later = div(place, tiles), place >= own + together
                here = I32(alike - 1) - copy + jnp.where(later, I32(1), I32(0))
                of_heads = jnp.where(other == row, here, I32(alike))
                early = (waits_for(length) <= head) & (other >= row) & (place < known)
                return [jnp.where(early, of_heads, I32(0))]

            (more,) = sums_of(ahead, 1)
            for i in reversed(range(together)):
                number, early = head * tiles + tile + i, waits[i] <= head
                in_front = earlier[i] + head - jnp.maximum(waits[i], first_head)
                put(i, jnp.where(early, in_front, number + more), number)
                more = more + jnp.where(early, I32(1), I32(0))
            return earlier

        if alike == 1:
            put_each()
        else:
            longer = sums_of(longer_than_mine, together)
            # Also of the own tile, if it waits for heads of its row.
            earlier = [begun * tiles + x for begun, x in zip(waits, longer, strict=True)]
            lax.fori_loop(I32(0), div(alike - share + (shares - 1), shares), put_copy, earlier)

        def write_rest(rests: list[Any], _: Any) -> None:
            for rest in rests:
                last = jnp.where(rest == before, I32(size - 1), I32(size))
                place = jnp.where(rest < before, rest, last)
                values = (jnp.where(rest < before, I32(-1), I32(x)) for x in (n, 0))
                scatter(found, place, *values)

        first = (cta * shares + share) * THREADS + thread
        _strides(before + 1, first, ctas * shares * THREADS, write_rest, None)

    out = jax.ShapeDtypeStruct((2 * size,), I32)
    kernel = mosaic.launch("order_tiles", run, [], out, {"cta": ctas, "share": shares}, 1)
    return kernel(counts.reshape(-1)).reshape(size, 2)


def _strides(count: int, first: Any, stride: int, body: Callable, carry: Any) -> Any:
    """carry = body(numbers, carry): of first, first + stride, ... several at once, until all `count` are
    done that `stride` threads share. The last may lie past the end."""
    if count == 0:
        return carry
    steps = -(-count // stride)
    turns = -(-steps // AT_ONCE)
    at_once = -(-steps // turns)

    def turn(k: Any, carry: Any) -> Any:
        start = first + k * (at_once * stride)
        return body([start + i * stride for i in range(at_once)], carry)

    return turn(0, carry) if turns == 1 else lax.fori_loop(I32(0), I32(turns), turn, carry)


def thread_numbers() -> jax.Array:
    """Each thread's own number, `[THREADS]`."""
    return _thread_numbers()  # pyright: ignore[reportCallIssue]


def gather(source: Any, places: jax.Array) -> jax.Array:
    """A number for each thread, of device memory `[n]` that no thread writes; 0 where there is none."""
    return _gather(source, places)  # pyright: ignore[reportCallIssue]


def scatter(target: Any, places: Any, *values: Any) -> None:
    """Each thread's values, side by side, to its place in device memory, if there is such a place."""
    (_scatter if len(values) == 1 else _scatter_pairs)(target, places, *values)  # pyright: ignore[reportCallIssue]


def sum_of_lanes(x: jax.Array) -> jax.Array:
    """Of a warp, for each of its lanes."""
    return _sum_of_lanes(x)  # pyright: ignore[reportCallIssue]


def sum_of_lanes_before(x: jax.Array) -> jax.Array:
    """Of the lanes below a lane, where x is 0, 1 or 1 << FULL_BIT."""
    return _sum_of_lanes_before(x)  # pyright: ignore[reportCallIssue]


def _word(code: str, constraints: str, *operands: Any, apart: bool = True) -> Any:
    """Of a thread, what `code` leaves in $0. Without `apart` it may run anywhere, or not at all."""
    word = ir.IntegerType.get_signless(32)
    return of_each(llvm.inline_asm(word, operands, code, constraints, has_side_effects=apart))


@plgpu.inline_mgpu(arg_types=(), return_type=NUMBERS)
def _thread_numbers(_: Any) -> Any:
    return of_each(arith.andi(ptx.thread_number(), i32(THREADS - 1)))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), EACH), return_type=NUMBERS)
def _gather(_: Any, source: Any, places: Any) -> Any:
    (size,) = ir.MemRefType(source.type).shape
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $2, {size}; mad.wide.u32 a, $2, 4, $1; "
        "mov.b32 $0, 0; @p ld.global.nc.b32 $0, [a]; }"
    )
    return _word(code, "=&r,l,r", ptx.address(source), own(places), apart=False)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), EACH, EACH))
def _scatter(_: Any, target: Any, places: Any, values: Any) -> None:
    _store("st.global.b32 [a], $2;", 1, target, places, values)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), EACH, EACH, EACH))
def _scatter_pairs(_: Any, target: Any, places: Any, first: Any, second: Any) -> None:
    _store("st.global.v2.b32 [a], {$2, $3};", 2, target, places, first, second)


def _store(code: str, count: int, target: Any, places: Any, *values: Any) -> None:
    (size,) = ir.MemRefType(target.type).shape
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $1, {size // count}; "
        f"mad.wide.u32 a, $1, {4 * count}, $0; @p {code} }}"
    )
    operands = [ptx.address(target), *map(own, (places, *values))]
    constraints = ",".join(["l"] + ["r"] * (1 + count))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(EACH,), return_type=NUMBERS)
def _sum_of_lanes(_: Any, x: Any) -> Any:
    return _word("redux.sync.add.s32 $0, $1, -1;", "=r,r", own(x))


@plgpu.inline_mgpu(arg_types=(EACH,), return_type=NUMBERS)
def _sum_of_lanes_before(_: Any, x: Any) -> Any:
    code = (
        "{ .reg .pred p; .reg .b32 below, low, high; mov.u32 below, %lanemask_lt; "
        "setp.eq.b32 p, $1, 1; vote.sync.ballot.b32 low, p, -1; and.b32 low, low, below; "
        f"setp.eq.b32 p, $1, {1 << FULL_BIT}; vote.sync.ballot.b32 high, p, -1; "
        "and.b32 high, high, below; popc.b32 low, low; popc.b32 high, high; "
        f"shl.b32 high, high, {FULL_BIT}; or.b32 $0, low, high; }}"
    )
    return _word(code, "=r,r", own(x))
