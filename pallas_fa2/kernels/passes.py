"""What comes before and after the Hopper backward: passes over O, dO and dQ, as fast as memory is.

XLA takes 1.4 times as long (docs/performance.md).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import fragments, mosaic, tma
from pallas_fa2.kernels.backward_schedule import Config, Schedule
from pallas_fa2.kernels.mosaic import ROWS_PER_WARPGROUP, TILE, Problem
from pallas_fa2.kernels.tamed import Tamed
from pallas_fa2.kernels.tile_code import COLUMNS_AT_ONCE
from pallas_fa2.kernels.tma import Rows

# Pieces of a gradient of pairs, down and across, that a CTA puts in order: 64 queries and 128 keys, 16 KB
# of each batch entry in 16 bits.
PAIRS_AT_ONCE = 4, 2


def prepare(
    problem: Problem, config: Config, out: jax.Array, dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """-rowsum(dO ∘ O) in float32, `[B, N, T']`, and zeros to which dQ will be added.

    `out` and `dout` are `[B, T, N, Hv]`; T' is a multiple of `block_q`, and 0 stands there for rows that do
    not exist.
    """
    schedule = Schedule(problem, config)
    shape = config.block_q, config.value_dim

    def run(refs: tuple, memory: list[Any]) -> None:
        *arrays, delta, dq = refs
        *tiles, arrived = memory
        batch, head, first = _place(schedule)
        rows = pl.ds(first, config.block_q)
        for array, tile in zip(arrays, tiles, strict=True):
            Rows(array, batch, rows, head).load(tile, arrived, jnp.int32(0))
        block = dq.at[lax.axis_index("cta")]
        for part in range(config.dq_parts):
            tile = config.dq_place(part)
            nothing = mosaic.constant(0.0, tuple(x.size for x in tile), TILE)
            fragments.store_fragments(block.at[config.dq_numbers(*tile)], nothing)
        plgpu.barrier_wait(arrived.at[0])
        for start in range(0, config.block_q, ROWS_PER_WARPGROUP):
            parts = (tile.at[pl.ds(start, ROWS_PER_WARPGROUP)] for tile in tiles)
            total = mosaic.sum_rows(jnp.multiply, *parts)
            delta.at[batch, head, pl.ds(first + start, ROWS_PER_WARPGROUP)][...] = -total

    delta = problem.batch, problem.q_heads, schedule.q_blocks * config.block_q
    panel = tma.panel_width(config.value_dim, out.shape[3], out.dtype)
    arrived = mosaic.barriers(1, 2)
    kernel = mosaic.launch(
        "prepare_gradients",
        run,
        [*(mosaic.operand(*shape, dtype=out.dtype, panel=panel) for _ in range(2)), arrived],
        [jax.ShapeDtypeStruct(x, jnp.float32) for x in (delta, schedule.dq_shape)],
        {"cta": schedule.blocks},
        1,
    )
    return tuple(kernel(out, dout))


def _place(schedule: Schedule) -> tuple[Any, Any, Any]:
    """Batch entry, head and first query of a CTA's block."""
    problem = schedule.problem
    shape = problem.batch, problem.q_heads, schedule.q_blocks
    batch, head, block = mosaic.unravel(lax.axis_index("cta"), shape)
    return batch, head, block * schedule.config.block_q


def finish(problem: Problem, config: Config, dq: jax.Array, q: jax.Array | Tamed) -> jax.Array:
    """dQ, like q `[B, T, N, H]`, from the parts of all blocks as `fragments.add_fragments` has added them
    up."""
    schedule = Schedule(problem, config)

    def run(refs: tuple, memory: list[Any]) -> None:
        (parts, target), (tile,) = refs, memory
        batch, head, first = _place(schedule)
        for part in range(config.dq_parts):
            rows, columns = config.dq_place(part)
            numbers = parts.at[lax.axis_index("cta"), config.dq_numbers(rows, columns)]
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
    return kernel(dq)


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
