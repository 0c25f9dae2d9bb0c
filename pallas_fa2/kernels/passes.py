"""What comes before and after the Hopper backward: passes over O, dO and dQ, as fast as memory is.

XLA takes 1.4 times as long (docs/decisions/0024-pre-and-postprocess.md).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import fragments, mosaic, tma
from pallas_fa2.kernels.backward_config import Config
from pallas_fa2.kernels.backward_schedule import Schedule
from pallas_fa2.kernels.branches import cond, when
from pallas_fa2.kernels.mosaic import I32, ROWS_PER_WARPGROUP, TILE, Problem
from pallas_fa2.kernels.tamed import Copies, Part, Tamed, any_infinite
from pallas_fa2.kernels.tile_code import COLUMNS_AT_ONCE
from pallas_fa2.kernels.tma import Rows

# Pieces of a gradient of pairs, down and across, that a CTA puts in order: 64 queries and 128 keys, 16 KB
# of each batch entry in 16 bits.
PAIRS_AT_ONCE = 4, 2


class Factors(NamedTuple):
    """What the backward multiplies, arrays or each a `Tamed`."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]


class _Before(NamedTuple):
    """What `prepare` reads and writes, in device memory."""

    out: Any
    dout: Any
    doubted: Any  # q, k, v and lse, where tokens may take part in nothing, and whether they may, of each entry
    delta: Any
    dq: Any
    of_rows: Any  # of q and dout, what `Copies` has
    of_keys: Any


class _Tiles(NamedTuple):
    """In shared memory."""

    out: Any
    dout: Any
    arrived: Any
    other: Any = None  # of q or k
    other_arrived: Any = None


def prepare(
    problem: Problem,
    config: Config,
    factors: Factors,
    out: jax.Array,
    lse: jax.Array,
    with_zeros: bool = True,
    in_doubt: jax.Array | None = None,
) -> tuple[Factors, jax.Array, jax.Array | None]:
    """The factors; -rowsum(dO ∘ O) in float32, `[B, N, T']`; and zeros to which dQ will be added, if it is.

    `out` is like dout; lse is `[B, N, T']`. T' is a multiple of `block_q`, and 0 stands there for rows that
    do not exist. If by the mask's code tokens may take part in nothing, `in_doubt`, int32 `[B]`, is 0 in
    entries whose data say that all take part.

    P and dS are 0 where a mask hides a pair, and meet k, q and dout. Where tokens may take part in nothing,
    these become finite. Of a key that was not, v is NaN instead, and with it dS of a pair that is seen; of a
    row, lse or delta is, and q is read only where one of them is. (Under a score function, everywhere: lse
    may be finite although q is not.)
    """
    schedule, tames, (q, k, v, dout) = Schedule(problem, config), problem.tames, factors
    of_q, of_dout = Part(q, config.head_dim, 0.0), Part(dout, config.value_dim, 0.0)
    of_k, of_v = Part(k, config.head_dim, 0.0), Part(v, config.value_dim, math.nan)
    rows = Copies((of_q, of_dout), config.block_q)
    keys = Copies((of_k, of_v), config.block_q, config.block_kv)

    def run(refs: tuple, tiles: _Tiles) -> None:
        arrays, cta = _Before(*jax.tree.unflatten(tree, refs)), lax.axis_index("cta")
        block = _block(schedule)
        if not tames:
            prepare_rows(arrays, tiles, block)
            return

        @when(cta < schedule.blocks)
        def _() -> None:
            tame_rows(arrays, tiles, block, prepare_rows(arrays, tiles, block))

        @when(cta >= schedule.blocks)
        def _() -> None:
            _, k, v, _, in_doubt = arrays.doubted
            place, buffers = cta - schedule.blocks, (tiles.other, tiles.dout)
            batch, _, _ = mosaic.unravel(place, keys.grid)

            def look() -> None:
                keys.write_as_the_first((k, v), arrays.of_keys, place, buffers, tiles.other_arrived)

            cond(in_doubt[batch] != 0, look, lambda: keys.tell(arrays.of_keys, place, I32(0)))

    def prepare_rows(arrays: _Before, tiles: _Tiles, block: Any) -> list[jax.Array]:
        """NaN where delta or lse is not finite."""
        batch, head, first = schedule.queries(block)
        for array, tile in zip(arrays[:2], tiles[:2], strict=True):
            rows.part(array, block, tile).load(tile, tiles.arrived, I32(0))
        for part in range(config.dq_parts if with_zeros else 0):
            place = config.dq_place(part)
            nothing = mosaic.constant(0.0, tuple(x.size for x in place), TILE)
            fragments.store_fragments(arrays.dq.at[block, config.dq_numbers(*place)], nothing)
        plgpu.barrier_wait(tiles.arrived.at[0])
        doubts = []
        for square in rows.squares:
            total = mosaic.sum_rows(jnp.multiply, *(tile.at[square] for tile in tiles[:2]))
            place = batch, head, pl.ds(first + square.start, square.size)
            arrays.delta.at[place][...] = -total
            if tames:
                lse = mosaic.load_row(0, arrays.doubted[3].at[place], jnp.float32)
                doubts.append((total - total) + (lse - lse))
        return doubts

    def tame_rows(arrays: _Before, tiles: _Tiles, block: Any, doubts: list[jax.Array]) -> None:
        (q, *_, in_doubt), buffers = arrays.doubted, (tiles.other, tiles.dout)

        def look() -> Any:
            rows.part(q, block, tiles.other).load(tiles.other, tiles.other_arrived, I32(0))
            plgpu.barrier_wait(tiles.other_arrived.at[0])
            found = rows.look(buffers)
            wild = any_infinite(found)
            when(wild != 0)(lambda: rows.write(arrays.of_rows, block, buffers, found))
            return wild

        batch, _, _ = schedule.queries(block)
        looks = in_doubt[batch] != 0
        if problem.score is None:
            looks &= any_infinite(doubts) != 0
        wild = cond(looks, look, lambda: I32(0))
        rows.tell(arrays.of_rows, block, wild)

    delta = problem.batch, problem.q_heads, schedule.q_blocks * config.block_q
    delta, dq = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (delta, schedule.dq_shape))
    dq = dq if with_zeros else None
    copies = [x.outputs if tames else [] for x in (rows, keys)]
    inputs, outputs = (out, dout, [q, k, v, lse, in_doubt] if tames else []), (delta, dq, *copies)
    tree = jax.tree.structure((*inputs, *outputs))
    out_tile, dout_tile = (of_dout.buffer(config.block_q) for _ in range(2))
    tiles = _Tiles(out_tile, dout_tile, mosaic.barriers(1, 2))
    if tames:
        other = of_q.buffer(config.block_q)
        tiles = tiles._replace(other=other, other_arrived=mosaic.barriers(1))
    grid = {"cta": schedule.blocks + (math.prod(keys.grid) if tames else 0)}
    made, made_tree = jax.tree.flatten(outputs)
    kernel = mosaic.launch("prepare_gradients", run, tiles, made, grid, 1)
    made = kernel(*jax.tree.leaves(inputs))
    delta, zeros, *copied = jax.tree.unflatten(made_tree, made)
    if tames:
        (q, dout), (k, v) = (x.tamed(y) for x, y in zip((rows, keys), copied, strict=True))
    return Factors(q, k, v, dout), delta, zeros


def _block(schedule: Schedule) -> Any:
    """A CTA's block of queries, the last first: L2 holds what the kernel before has written last, and the one
    after begins with the first."""
    return schedule.blocks - 1 - lax.axis_index("cta")


def finish(
    problem: Problem,
    config: Config,
    dq: jax.Array,
    q: jax.Array | Tamed,
    visits: jax.Array | None = None,
) -> jax.Array:
    """dQ, like q `[B, T, N, H]`, from the parts of all blocks as `fragments.add_fragments` has added them
    up. Of `visits`, a number for each block, 0 says that nothing is there."""
    schedule, inputs = Schedule(problem, config), [dq] if visits is None else [dq, visits]

    def run(refs: tuple, memory: list[Any]) -> None:
        (parts, *visits, target), (tile,) = refs, memory
        block = _block(schedule)
        there = [numbers[block] != 0 for numbers in visits]
        batch, head, first = schedule.queries(block)
        for part in range(config.dq_parts):
            rows, columns = config.dq_place(part)
            numbers = parts.at[block, config.dq_numbers(rows, columns)]
            if there:
                found = fragments.take_fragments(numbers, columns.size, *there)
            else:
                found = fragments.load_fragments(numbers, columns.size)
            tile.at[rows, columns][...] = (found * problem.scale).astype(q.dtype)
        plgpu.commit_smem()
        Rows(target, batch, pl.ds(first, config.block_q), head).store(tile)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    panel = tma.panel_width(config.head_dim, q.shape[3], q.dtype)
    kernel = mosaic.launch(
        "finish_gradients",
        run,
        [mosaic.operand(config.block_q, config.head_dim, dtype=q.dtype, panel=panel)],
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        {"cta": schedule.blocks},
        1,
    )
    return kernel(*inputs)


def finish_pairs(pieces: jax.Array, entries: int, dtype: Any) -> jax.Array:
    """A gradient of data of pairs, `[entries, N | 1, T', S']`, from the pieces of `token_data.Sums`.

    What more batch entries have is added up, in float32.
    """
    batch, heads, q_pieces, k_pieces, _ = pieces.shape
    shared = batch > entries
    down, across = PAIRS_AT_ONCE
    grid = entries, heads, q_pieces // down, k_pieces // across
    size = down * COLUMNS_AT_ONCE, across * ROWS_PER_WARPGROUP

    def run(refs: tuple, memory: list[Any]) -> None:
        (pieces, target), (tile,) = refs, memory
        entry, head, row, column = mosaic.unravel(lax.axis_index("cta"), grid)
        for i, j in np.ndindex(down, across):
            place = head, row * down + i, column * across + j
            total = sum_of([pieces.at[e, *place] for e in (range(batch) if shared else [entry])])
            total = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            queries = pl.ds(i * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE)
            keys = pl.ds(j * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP)
            tile.at[queries, keys].transpose((1, 0))[...] = total
        plgpu.commit_smem()
        place = (pl.ds(x * n, n) for x, n in zip((row, column), size, strict=True))
        plgpu.copy_smem_to_gmem(tile, target.at[entry, head, *place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sum_of(sources: list[Any]) -> jax.Array:
        parts = (fragments.load_fragments(source, COLUMNS_AT_ONCE) for source in sources)
        return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in parts))

    shape = entries, heads, q_pieces * COLUMNS_AT_ONCE, k_pieces * ROWS_PER_WARPGROUP
    kernel = mosaic.launch(
        "finish_pair_gradients",
        run,
        [mosaic.operand(*size, dtype=dtype)],
        jax.ShapeDtypeStruct(shape, dtype),
        {"cta": math.prod(grid)},
        1,
    )
    return jax.custom_batching.sequential_vmap(kernel)(pieces)
