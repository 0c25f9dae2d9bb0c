"""What a mask says of the tiles that it cuts, a bit for each pair of tokens.

Where heads share a mask, a kernel asks it once, and attention reads the answers: it would ask for each
head again, and a mask may take longer than the softmax. 64 rows and columns of a tile are a square, a word
for each of a warpgroup's threads: of its own values, in the order of registers, whether they are hidden.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.bounds import PARTIAL
from pallas_fa2.kernels import hiding, mosaic, ptx, tma, visits
from pallas_fa2.kernels.mosaic import I32, Problem
from pallas_fa2.kernels.pair_tile import PairTile
from pallas_fa2.kernels.tile_code import COLUMNS_AT_ONCE, Pair, Side
from pallas_fa2.kernels.token_data import TokenData
from pallas_fa2.kernels.visits import Visits

SQUARE = 64
# CTAs that share a machine's 132 multiprocessors: each has a part of a row of tiles.
CTAS = 2048
# A mask is asked before the attention where that saves so many operations on a pair: on all of a GPU's
# multiprocessors they take 12 us, and to ask takes 5 and more. (Measured: docs/performance.md.)
WORTH_ASKING = 2.5e8
# To ask takes as long as two heads that ask by themselves.
AS_LONG_AS = 2
# In the backward, a mask of fewer operations is asked again while answers would be loaded.
COSTLY_BACKWARD = 12
# Of a mask that is not known, one tile in so many is thought to be cut.
GUESSED_CUT = 8


def are_worth_it(
    problem: Problem, head_dim: int, classes: Any, tile: tuple[int, int], q_axis: int
) -> bool:
    """Whether the mask is asked once for all heads, before the attention; of the classes of its tiles,
    `[B | 1, N | 1, T tiles, S tiles]`. Queries are those of `tile[q_axis]`."""
    if problem.mask is None or problem.score is not None or classes.shape[1] > 1:
        return False
    if q_axis == 0 and problem.mask.sees_a_range:
        return False  # a few operations a row, and none a pair
    size = len(classes) * problem.q_len * problem.kv_len // 8
    if size > 2 * problem.batch * problem.q_len * problem.q_heads * head_dim:
        return False  # more memory than queries have
    visible, heads = problem.mask.visible, problem.q_heads * (problem.batch // len(classes))
    if visible.pairs:
        return heads >= AS_LONG_AS
    known = isinstance(classes, np.ndarray)
    cut = np.sum(classes == PARTIAL) if known else classes.size / GUESSED_CUT
    operations = visible.operations("k" if q_axis == 0 else "q")
    saved = (heads - AS_LONG_AS) * cut * math.prod(tile) * operations
    return saved >= WORTH_ASKING and (q_axis == 0 or operations >= COSTLY_BACKWARD)


def ask(problem: Problem, data: TokenData, seen: Visits, tile: tuple[int, int], q_axis: int) -> Any:
    """int32 `[B | 1, tiles, blocks, squares of a tile's rows, of its columns, 128]`, of blocks that are cut.

    `seen` is what each tile of `tile` rows and columns visits, whose queries are those of `q_axis`. Where
    rows are queries, a block is found by its place in the tile's list. Else lists are `visits.from_last`, and
    a block is found by its number: the heads of a group, whose blocks follow each other in lists, share it.
    """
    data = data._replace(pairs=data.bytes).with_places(tile[q_axis], tile[1 - q_axis])
    batch, _, tiles, blocks = seen.lists.shape
    squares = tile[0] // SQUARE, tile[1] // SQUARE
    parts = min(blocks, -(-CTAS // (batch * tiles)))
    # Keys past the end are hidden where they are columns; where they are rows, theirs are cut off.
    k_end = problem.kv_len if q_axis == 0 and problem.kv_len % tile[1] else None

    def run(refs: tuple, _: Any) -> None:
        counts, lists, data, answers = jax.tree.unflatten(tree, refs)
        entry, row, part = (lax.axis_index(name) for name in ("batch", "tile", "part"))
        warpgroup = lax.axis_index("warpgroup")
        visited, cut = visits.decode(counts[entry, 0, row])

        def block(i: Any, _: Any) -> None:
            place = visited - cut + part + i * parts
            listed = lists[entry, 0, row, place]
            number = visits.block(listed) if q_axis == 0 else visits.block_from_last(listed, blocks)
            found = answers.at[entry, row, place if q_axis == 0 else number, warpgroup]
            for j in range(squares[1]):
                squares_before = row * squares[0] + warpgroup, number * squares[1] + j
                first = [I32(SQUARE) * x for x in squares_before]
                found[j] = hiding.signs(_hidden(problem, data, entry, first, q_axis, k_end))

        lax.fori_loop(I32(0), mosaic.div(cut - part + (parts - 1), parts), block, None)

    out = jax.ShapeDtypeStruct((batch, tiles, blocks, *squares, tma.THREADS), I32)
    inputs = jnp.asarray(seen.counts), jnp.asarray(seen.lists), data
    tree = jax.tree.structure((*inputs, out))
    grid = {"batch": batch, "tile": tiles, "part": parts}
    return mosaic.launch("ask_mask", run, [], out, grid, squares[0])(*jax.tree.leaves(inputs))


def load(answers: Any, entry: Any, *place: Any, squares: Sequence[Any] | None = None) -> Any:
    """Some squares, or all, of a block's row of them: its tile, place or number, and which row."""
    found = answers.at[(entry if answers.shape[0] > 1 else 0, *place)]
    if squares is None:
        squares = range(found.shape[0])
    return [plgpu.load(found.at[j], layout=ptx.EACH, optimized=False) for j in squares]


def _hidden(
    problem: Problem,
    data: TokenData,
    entry: Any,
    first: list[Any],
    q_axis: int,
    k_end: int | None,
) -> jax.Array:
    """-inf where a pair of a square is hidden, else 0."""
    visible, shape = problem.mask.visible, (SQUARE, SQUARE)
    first_query, first_key = first[q_axis], first[1 - q_axis]
    numbers = data.numbers.load(entry, 0, visible.numbers)
    of_pairs = {
        source: PairTile(
            mosaic.shared_at(
                data.pairs[cast(int, source.place)], entry, 0,
                pl.ds(first_query, SQUARE), pl.ds(first_key, SQUARE),
            ),
            in_panels=False,
            keys_are_rows=q_axis == 1,
        )
        for source in visible.pairs
    }  # fmt: skip

    def side(name: str, axis: int, start: Any) -> Side:
        count = SQUARE if axis == 0 else COLUMNS_AT_ONCE
        tokens = (data.q if name == "q" else data.k).at[entry, :, pl.ds(start, count)]
        number = start + (problem.first_query if name == "q" else 0)
        if axis == 0:
            index = mosaic.index(shape, 0, number)
        else:
            index = ptx.column_numbers(count, number)
        return Side.load(axis, index, tokens, visible.rows(name))

    names = ("q", "k") if q_axis == 0 else ("k", "q")
    rows = side(names[0], 0, first[0])

    def pair_at(columns: Any) -> Pair:
        sides = {names[0]: rows, names[1]: side(names[1], 1, first[1] + columns.start)}
        pairs = {s: x.load(columns.start, columns.size, s.dtype) for s, x in of_pairs.items()}
        return Pair(sides["q"], sides["k"], numbers, pairs)

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.TILE)
    return problem.mask.hide(zeros, pair_at, k_end)
