"""dQ in the dtype of q, and gradients of pairwise arrays, from the sums of the backward."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.preprocess import _block
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray
from pallas_fa2.backends.sm90.primitives import launch, pipeline, register_io, swizzle
from pallas_fa2.backends.sm90.primitives.layouts import ROWS_PER_WARPGROUP
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS

# Pieces of a gradient of pairs, down and across, that a CTA puts in order: 64 queries and 128 keys, 16 KB
# of each batch entry in 16 bits.
PAIRS_AT_ONCE = 4, 2


def convert_dq(
    problem: KernelSpec,
    config: BackwardConfig,
    dq: jax.Array,
    q: jax.Array | SanitizedArray,
    visits: jax.Array | None = None,
) -> jax.Array:
    """dQ, like q `[B, T, N, H]`, from the parts of all blocks as `register_io.add_fragments` has added them
    up. Of `visits`, a number for each block, 0 says that nothing is there."""
    schedule, inputs = BackwardSchedule(problem, config), [dq] if visits is None else [dq, visits]

    def run(refs: tuple, memory: list[Any]) -> None:
        (parts, *visits, target), (tile,) = refs, memory
        block = _block(schedule)
        there = [numbers[block] != 0 for numbers in visits]
        batch, head, first = schedule.queries(block)
        for part in range(config.num_dq_parts):
            rows, columns = config.dq_part_slices(part)
            numbers = parts.at[block, config.dq_part_range(rows, columns)]
            if there:
                found = register_io.take_fragments(numbers, columns.size, *there)
            else:
                found = register_io.load_fragments(numbers, columns.size)
            tile.at[rows, columns][...] = (found * problem.scale).astype(q.dtype)
        plgpu.commit_smem()
        HeadRows(target, batch, pl.ds(first, config.block_q), head).store(tile)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    panel = swizzle.panel_width(config.head_dim, q.shape[3], q.dtype)
    kernel = launch.build_kernel(
        "finish_gradients",
        run,
        [pipeline.swizzled_smem(config.block_q, config.head_dim, dtype=q.dtype, panel=panel)],
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        {"cta": schedule.blocks},
        1,
    )
    return kernel(*inputs)


def finalize_pairwise_grad(pieces: jax.Array, entries: int, dtype: Any) -> jax.Array:
    """A gradient of data of pairs, `[entries, N | 1, T', S']`, from the pieces of `aux_grads.AuxGrads`.

    What more batch entries have is added up, in float32.
    """
    batch, heads, q_pieces, k_pieces, _ = pieces.shape
    shared = batch > entries
    down, across = PAIRS_AT_ONCE
    grid = entries, heads, q_pieces // down, k_pieces // across
    size = down * PIECE_COLUMNS, across * ROWS_PER_WARPGROUP

    def run(refs: tuple, memory: list[Any]) -> None:
        (pieces, target), (tile,) = refs, memory
        entry, head, row, column = arithmetic.unravel(lax.axis_index("cta"), grid)
        for i, j in np.ndindex(down, across):
            place = head, row * down + i, column * across + j
            total = sum_of([pieces.at[e, *place] for e in (range(batch) if shared else [entry])])
            total = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            queries = pl.ds(i * PIECE_COLUMNS, PIECE_COLUMNS)
            keys = pl.ds(j * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP)
            tile.at[queries, keys].transpose((1, 0))[...] = total
        plgpu.commit_smem()
        place = (pl.ds(x * n, n) for x, n in zip((row, column), size, strict=True))
        plgpu.copy_smem_to_gmem(tile, target.at[entry, head, *place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def sum_of(sources: list[Any]) -> jax.Array:
        parts = (register_io.load_fragments(source, PIECE_COLUMNS) for source in sources)
        return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in parts))

    shape = entries, heads, q_pieces * PIECE_COLUMNS, k_pieces * ROWS_PER_WARPGROUP
    kernel = launch.build_kernel(
        "finish_pair_gradients",
        run,
        [pipeline.swizzled_smem(*size, dtype=dtype)],
        jax.ShapeDtypeStruct(shape, dtype),
        {"cta": math.prod(grid)},
        1,
    )
    return jax.custom_batching.sequential_vmap(kernel)(pieces)
