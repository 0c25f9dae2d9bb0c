"""What a mask says of the tiles that it cuts, a bit for each pair of tokens.

Where heads share a mask, a kernel asks it once, and attention reads the answers: it would ask for each
head again, and a mask may take longer than the softmax. 64 rows and columns of a tile are a square, a word
for each of a warpgroup's threads: of its own values, in the order of registers, whether they are hidden.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90 import block_mask
from pallas_fa2.backends.sm90.block_mask import BlockMask
from pallas_fa2.backends.sm90.primitives import layouts, thread_ops, thread_values
from pallas_fa2.backends.sm90.primitives.launch import build_kernel
from pallas_fa2.backends.sm90.primitives.layouts import LANES, WARPS
from pallas_fa2.backends.sm90.primitives.packed_bools import BoolTile
from pallas_fa2.backends.sm90.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.sm90.primitives.tile_ops import TILE_OPS
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource, AxisInputs, TileInputs

FRAGMENT = 64
# CTAs that share a row of tiles, where there are no more of them in all. With fewer, a row of which much is cut
# takes longer than all others; to begin in vain, so many take 2 us.
CTAS_PER_ROW, MAX_CTAS = 16, 4096
# A mask is asked before the attention where that saves so many operations on a pair: on all of a GPU's
# multiprocessors they take 12 us, and to ask takes 5 and more. (docs/decisions/0046-mask-bitmap.md)
MIN_OPS_SAVED = 2.5e8
# To ask takes as long as two heads that ask by themselves.
PRECOMPUTE_COST_IN_HEADS = 2
# In the backward, a mask of fewer operations is asked again while answers would be loaded.
MIN_OPS_BACKWARD = 10
# Of a mask that is not known, one tile in so many is thought to be cut.
ASSUMED_PARTIAL_1_IN = 8


def precompute_pays_off(
    problem: KernelSpec, head_dim: int, classes: Any, tile: tuple[int, int], q_axis: int
) -> bool:
    """Whether a mask that reads no pairs is asked once for all heads, before the attention; of the classes of its
    tiles of so many queries and keys, `[B | 1, N | 1, T tiles, S tiles]`. The rows of an attention's CTA are those
    of `q_axis`. (For those that do, `compile_mods.needs_mask_bits`.)"""
    if problem.score is not None or classes.shape[1] > 1 or any(n % FRAGMENT for n in tile):
        return False
    size = len(classes) * problem.q_len * problem.kv_len // 8
    if size > 2 * problem.batch * problem.q_len * problem.q_heads * head_dim:
        return False  # more memory than queries have
    if q_axis == 0 and problem.mask.is_key_interval:
        return False  # a few operations a row, and none a pair
    visible, heads = problem.mask.visible, problem.q_heads * (problem.batch // len(classes))
    known = isinstance(classes, np.ndarray)
    cut = np.sum(classes == PARTIAL) if known else classes.size / ASSUMED_PARTIAL_1_IN
    operations = visible.op_cost("k" if q_axis == 0 else "q")
    saved = (heads - PRECOMPUTE_COST_IN_HEADS) * cut * math.prod(tile) * operations
    return saved >= MIN_OPS_SAVED and (q_axis == 0 or operations >= MIN_OPS_BACKWARD)


def compute_bits(
    problem: KernelSpec, data: AuxInputs, seen: BlockMask, tile: tuple[int, int], q_axis: int
) -> jax.Array:
    """int32 `[B | 1, tiles, blocks, squares of a tile's rows, of its columns, 128]`, of blocks that are cut.

    A block is found by its number. Of the tile, which has so many queries and keys, a row is a query if `q_axis`
    is 0, else a key. `seen` is what each row of tiles visits; where they are keys, its lists are
    `block_mask.reversed_classes`. Where the problem's blocks of keys have parts, each of these is one here.
    """
    batch, _, tiles, blocks = seen.block_indices.shape
    asking = _BitsKernel(problem, data, tile, q_axis, (batch, tiles, blocks))

    def run(refs: tuple, _: Any) -> None:
        counts, lists, data, answers = jax.tree.unflatten(tree, refs)
        entry, row, _ = asking.axes
        visited, cut = (
            x * problem.kv_subblocks for x in block_mask.unpack_counts(counts[entry, 0, row])
        )

        def number(place: Any) -> Any:
            # A share may have no block; it reads an entry nevertheless.
            listed = lists[entry, 0, row, jnp.minimum(visited - cut + place, blocks - 1)]
            return (
                block_mask.block_id(listed)
                if q_axis == 0
                else block_mask.reversed_block_id(listed, blocks)
            )

        asking.each(cut, number, functools.partial(asking.write, answers, data))

    inputs = jnp.asarray(seen.num_blocks), jnp.asarray(seen.block_indices), asking.data
    tree = jax.tree.structure((*inputs, asking.answers))
    return asking.launch(run, asking.answers)(*jax.tree.leaves(inputs))


def compute_bits_and_classes(
    problem: KernelSpec, data: AuxInputs, tile: tuple[int, int], q_axis: int
) -> tuple[jax.Array, jax.Array]:
    """As `ask`, of all blocks; and by what the mask answers, the classes of its tiles, `[B | 1, 1, T tiles,
    S tiles]`.

    Where an array says what is seen, to classify tiles takes as long as to ask about them.
    """
    q_tiles, k_tiles = -(-problem.q_len // tile[0]), -(-problem.kv_len // tile[1])
    counts = _entries(problem, data), *_rows_first((q_tiles, k_tiles), q_axis)
    asking = _BitsKernel(problem, data, tile, q_axis, counts)
    flags = jax.ShapeDtypeStruct((math.prod((*asking.answers.shape[:4], WARPS)),), I32)

    def run(refs: tuple, _: Any) -> None:
        data, answers, flags = jax.tree.unflatten(tree, refs)
        entry, row, _ = asking.axes

        def block(number: Any) -> None:
            words = asking.write(answers, data, number)
            hidden = functools.reduce(jnp.bitwise_or, words) != 0
            seen = functools.reduce(jnp.bitwise_and, words) != -1
            flags_of = (jnp.where(x, I32(y), I32(0)) for x, y in ((hidden, HIDDEN), (seen, SEEN)))
            found = thread_ops.warp_sum(functools.reduce(jnp.add, flags_of))
            place = entry
            for size, n in zip(
                asking.answers.shape[1:4], (row, number, asking.warpgroup), strict=True
            ):
                place = place * size + n
            thread = thread_ops.thread_indices()
            place = place * WARPS + arithmetic.div(thread, LANES)
            first = arithmetic.rem(thread, LANES) == 0
            thread_ops.scatter(flags, jnp.where(first, place, flags.shape[0]), found)

        asking.each(asking.counts[2], lambda place: place, block)

    tree = jax.tree.structure((asking.data, asking.answers, flags))
    made = asking.launch(run, [asking.answers, flags])(*jax.tree.leaves(asking.data))
    answers, flags = made
    flags = flags.reshape(*asking.answers.shape[:3], -1)
    hidden, seen = (jnp.any(flags & (x * (2 * LANES - 1)) != 0, -1) for x in (HIDDEN, SEEN))
    classes = jnp.where(hidden, jnp.where(seen, PARTIAL, EMPTY), FULL).astype(I32)[:, None]
    return answers, classes if q_axis == 0 else classes.swapaxes(2, 3)


# What a warp finds in a block, so many times as it has lanes that do.
HIDDEN, SEEN = 1, 2 * LANES


def _entries(problem: KernelSpec, data: AuxInputs) -> int:
    """How many batch entries differ in what a mask reads."""
    visible = problem.mask.visible
    if visible.token_inputs("q") or visible.token_inputs("k") or visible.head_inputs:
        return problem.batch
    return max(
        data.pairwise_unpacked[cast(int, source.position)].shape[0]
        for source in visible.pairwise_inputs
    )


def _rows_first(of_both: tuple[Any, Any], q_axis: int) -> tuple[Any, Any]:
    """What belongs to queries and to keys, that of a tile's rows first."""
    q, k = of_both
    return (q, k) if q_axis == 0 else (k, q)


@dataclasses.dataclass(frozen=True)
class _BitsKernel:
    """A kernel that asks a mask: a CTA has a share of the blocks of a row of tiles, a warpgroup 64 of its rows."""

    problem: KernelSpec
    given: AuxInputs
    tile: tuple[int, int]  # queries and keys
    q_axis: int
    counts: tuple[int, int, int]  # batch entries, tiles, and blocks (or parts) that each may visit

    @property
    def squares(self) -> tuple[int, int]:
        rows, columns = _rows_first(self.tile, self.q_axis)
        return rows // FRAGMENT, columns // (FRAGMENT * self.problem.kv_subblocks)

    @property
    def shares(self) -> int:
        batch, tiles, blocks = self.counts
        return min(blocks, CTAS_PER_ROW, max(1, MAX_CTAS // (batch * tiles)))

    @functools.cached_property
    def data(self) -> AuxInputs:
        return self.given._replace(pairwise=self.given.pairwise_unpacked).padded(*self.tile)

    @property
    def answers(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.counts, *self.squares, layouts.THREADS), I32)

    def launch(self, run: Callable, out: Any) -> Callable:
        entries, tiles, _ = self.counts
        grid = {"batch": entries, "tile": tiles, "share": self.shares}
        return build_kernel("ask_mask", run, [], out, grid, self.squares[0])

    @property
    def axes(self) -> list[Any]:
        """A CTA's batch entry, row of tiles, and share of it."""
        return [lax.axis_index(name) for name in ("batch", "tile", "share")]

    @property
    def warpgroup(self) -> Any:
        return lax.axis_index("warpgroup")

    def each(self, count: Any, number: Callable, block: Callable) -> None:
        """block(number(i)) for those of so many that are a CTA's share; the next number is loaded meanwhile."""
        share, shares = self.axes[2], self.shares
        mine = arithmetic.div(count - share + (shares - 1), shares)
        last = jnp.maximum(mine - 1, 0)

        def step(i: Any, this: Any) -> Any:
            following = number(share + jnp.minimum(i + 1, last) * shares)
            block(this)
            return following

        lax.fori_loop(I32(0), mine, step, number(share))

    def write(self, answers: Any, data: AuxInputs, number: Any) -> list[jax.Array]:
        """The answers about a warpgroup's rows of a block, which are returned."""
        problem, q_axis, squares = self.problem, self.q_axis, self.squares
        entry, row, _ = self.axes
        # Keys past the end are hidden where they are columns; where they are rows, theirs are cut off.
        k_end = problem.kv_len if q_axis == 0 and problem.kv_len % self.tile[1] else None
        found, words = answers.at[entry, row, number, self.warpgroup], []
        for j in range(squares[1]):
            squares_before = row * squares[0] + self.warpgroup, number * squares[1] + j
            first = [I32(FRAGMENT) * x for x in squares_before]
            words.append(_hidden(problem, data, entry, first, q_axis, k_end))
            found[j] = words[-1]
        return words


def load_bits(answers: Any, entry: Any, *place: Any, squares: Sequence[Any] | None = None) -> Any:
    """Some squares, or all, of a block's row of them: its tile, its number, and which row."""
    found = answers.at[(entry if answers.shape[0] > 1 else 0, *place)]
    if squares is None:
        squares = range(found.shape[0])
    return [
        plgpu.load(found.at[j], layout=thread_values.PER_THREAD, optimized=False) for j in squares
    ]


def _hidden(
    problem: KernelSpec,
    data: AuxInputs,
    entry: Any,
    first: list[Any],
    q_axis: int,
    k_end: int | None,
) -> jax.Array:
    """Which pairs of a square are hidden: `masking.pack_bits`."""
    visible, shape = problem.mask.visible, (FRAGMENT, FRAGMENT)
    first_query, first_key = first[q_axis], first[1 - q_axis]
    numbers = data.head_scalars.load(entry, 0, visible.head_inputs)
    square = pl.ds(first_query, FRAGMENT), pl.ds(first_key, FRAGMENT)

    def pairs_of(source: ArgSource) -> PairwiseTile | BoolTile:
        found = layouts.index_broadcast(
            data.pairwise[cast(int, source.position)], entry, 0, *square
        )
        if source.dtype == "bool":
            return BoolTile.load_packed(found, keys_are_rows=q_axis == 1)
        return PairwiseTile(found, is_swizzled=False, transposed=q_axis == 1)

    of_pairs = {source: pairs_of(source) for source in visible.pairwise_inputs}

    def side(name: str, axis: int, start: Any) -> AxisInputs:
        count = FRAGMENT if axis == 0 else PIECE_COLUMNS
        tokens = (data.q if name == "q" else data.k).at[entry, :, pl.ds(start, count)]
        number = start + (problem.q_index_offset if name == "q" else 0)
        if axis == 0:
            index = layouts.index(shape, 0, number)
        else:
            index = thread_values.column_iota(count, number)
        return load_axis_inputs(TILE_OPS, axis, index, tokens, visible.token_inputs(name), first=0)

    names = ("q", "k") if q_axis == 0 else ("k", "q")
    rows = side(names[0], 0, first[0])

    def pair_at(columns: Any) -> TileInputs:
        sides = {names[0]: rows, names[1]: side(names[1], 1, first[1] + columns.start)}
        pairs = {s: x.load(columns.start, columns.size, s.dtype) for s, x in of_pairs.items()}
        return TileInputs(sides["q"], sides["k"], numbers, pairs)

    return problem.mask.pack_bits(pair_at, k_end)
