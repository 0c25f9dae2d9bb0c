"""What tiles visit, and in which order CTAs take them, under a mask that only the device knows: two
small kernels.

XLA would sort, in several kernels, most of which take little longer than their launch. Here places are
counted instead: by warps that wait for nobody, and so count again what others have counted too.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

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

# Of all that a CTA does, the part from which a tile must come early, or all would wait for it: a few
# keys that all queries see, beside a window, took the backward 1.7 times as long as an even division.
LONG = 0.25
# And how many times what a CTA has of the heads that are sorted, on average.
LONG_AT_END = 1.5
# With how many tiles a warp compares its own, in 8 turns of `AT_ONCE`. Of more, each CTA has 30 at
# least, whose order matters little.
MOST_COMPARED = 4096
# How many it has, which follow each other in a row.
TOGETHER = 4

LANES, WARPS = 32, 4
# Loads of a thread that are under way together: a row of 512 takes as long as one load.
AT_ONCE = 16


def halves(word: Any) -> tuple[Any, Any]:
    """The numbers below and from `FULL_BIT` on."""
    return word & np.int32(MOST), word >> np.int32(FULL_BIT)


def long_part(last: int, heads: int) -> float:
    """From which part of all that a CTA does a tile is long, where the `last` of all heads are sorted."""
    return min(LONG, LONG_AT_END * last / heads)


def list_blocks(classes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The counts and lists of `visits.Visits`, from classes `[B | 1, heads | 1, tiles, blocks]`.

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
        visited = jnp.maximum(all_full + all_cut, 1)
        scatter(counts, jnp.where(thread == 0, row, rows), visited + (all_full << FULL_BIT))

    out = [jax.ShapeDtypeStruct(shape, I32) for shape in ((rows,), (rows, blocks))]
    kernel = mosaic.launch("list_blocks", run, [], out, {"cta": rows}, 1)
    counts, lists = kernel(classes.reshape(rows, blocks))
    return counts.reshape(outer), lists.reshape(classes.shape)


def in_order(
    counts: jax.Array, batch: int, heads: int, hands: int, last: int, before: int
) -> jax.Array:
    """int32 `[before + n + 1, 2]`: rows of -1, n tiles with what they visit, and (n, 0).

    `counts` is that of `visits.Visits`. Tile t of head h of batch entry b has the number
    (b heads + h) tiles + t. They are in this order; but those of the `last` heads go from the longest to the
    shortest, and before all come those that visit more than `long_part` of what each of the `hands` has to.

    A warp compares some tiles with all others, and writes the entries of all heads and batch entries that
    share their counts.
    """
    _, each, tiles = counts.shape
    known, n = counts.size, batch * heads * tiles
    alike = n // known
    # The number of a row's first head, and what lies between the heads that share it.
    stride, step = (alike, 1) if each == 1 else (1, heads)
    first_sorted, part = batch * heads - last, long_part(last, batch * heads)
    size = before + n + 1
    together = TOGETHER if tiles % TOGETHER == 0 else 1
    ctas = -(-known // (WARPS * together))
    # Whether rows are those of batch entries: the heads of one come between long tiles of another.
    apart = each == 1 and known > tiles
    first_row_sorted = -(-max(first_sorted - (alike - 1) * step, 0) // stride)

    def sorted_heads(row: Any) -> Any:
        """How many of the heads that share a row are among the last ones."""
        unsorted = jnp.maximum(first_sorted - row * stride, 0) + (step - 1)
        return alike - jnp.minimum(div(unsorted, step), alike)

    def run(refs: tuple, _: Any) -> None:
        counts, found = refs
        cta, thread = lax.axis_index("cta"), thread_numbers()
        lane, own = rem(thread, LANES), (cta * WARPS + div(thread, LANES)) * together
        row, tile = div(own, tiles), rem(own, tiles)
        mine = [gather(counts, own + i) for i in range(together)]
        visited = [halves(x)[0] for x in mine]

        def sums_of(terms: Callable, count: int, first: int = 0) -> list[Any]:
            """Of all tiles from the first on: terms(place, length)."""

            def add(places: list[Any], sums: list[Any]) -> list[Any]:
                lengths = [halves(gather(counts, place))[0] for place in places]
                found = map(terms, places, lengths)
                return [functools.reduce(jnp.add, x) for x in zip(sums, *found, strict=True)]

            sums = _strides(known - first, first + lane, LANES, add, [0 * thread] * count)
            return [sum_of_lanes(x) for x in sums]

        (total,) = sums_of(lambda _, length: [length], 1)
        share = (total.astype(jnp.float32) * (alike * part / hands)).astype(I32)

        def long_ones(place: Any, length: Any) -> list[Any]:
            """1 for each that is long, of those before, and in rows above and beside."""
            long, other = jnp.where(length > share, I32(1), I32(0)), div(place, tiles)
            of_rows = (other < row, other == row) if apart else ()
            return [long, *(jnp.where(x, long, 0) for x in (place < own, *of_rows))]

        def longer_ones(place: Any, length: Any) -> list[Any]:
            """Of those that are sorted, for each own tile."""
            heads_of_row, found = sorted_heads(div(place, tiles)), []
            for i, x in enumerate(visited):
                longer = (length > x) | ((length == x) & (place < own + i))
                found.append(jnp.where(longer, heads_of_row, 0))
            return found

        longer = sums_of(longer_ones, together, first_row_sorted * tiles)
        long, left, *of_rows = sums_of(long_ones, 4 if apart else 2)
        above, beside = of_rows or (0 * long, long)

        def write(i: int, left: Any, copies: list[Any], _: Any) -> None:
            for copy in copies:
                head = row * stride + copy * step
                number = head * tiles + tile + i
                long_before = left + above * (stride - 1) + copy * beside
                in_turn = longer[i] + copy - (alike - sorted_heads(row)) + first_sorted * tiles
                after_long = number + long * alike - long_before
                place = jnp.where(head < first_sorted, after_long, in_turn)
                place = jnp.where(visited[i] > share, long_before, place)
                there = (copy < alike) & (own + i < known)
                scatter(found, jnp.where(there, before + place, size), number, mine[i])

        for i, x in enumerate(visited):
            _strides(alike, lane, LANES, functools.partial(write, i, left), None)
            left = left + jnp.where(x > share, I32(1), I32(0))

        def write_rest(rests: list[Any], _: Any) -> None:
            for rest in rests:
                last = jnp.where(rest == before, I32(size - 1), I32(size))
                place = jnp.where(rest < before, rest, last)
                values = (jnp.where(rest < before, I32(-1), I32(x)) for x in (n, 0))
                scatter(found, place, *values)

        _strides(before + 1, cta * THREADS + thread, ctas * THREADS, write_rest, None)

    out = jax.ShapeDtypeStruct((2 * size,), I32)
    kernel = mosaic.launch("order_tiles", run, [], out, {"cta": ctas}, 1)
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
