"""The passes behind the backward: dQ in the dtype of q, and gradients of pairwise inputs, from its sums."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.primitives import launch, register_io, swizzle
from pallas_fa2.backends.common.primitives.layouts import ROWS_PER_WARPGROUP
from pallas_fa2.backends.common.primitives.types import Ref
from pallas_fa2.backends.sm90.backward.preprocess import compute_q_block
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS

# Pieces of a pairwise gradient, down and across, that a CTA puts in order: 64 queries and 128 keys, 16 KB
# of each batch entry in 16 bits.
PIECES_DOWN, PIECES_ACROSS = 4, 2


def convert_dq(
    schedule: BackwardSchedule,
    dq: jax.Array,
    q: jax.Array | SanitizedArray,
    visits: jax.Array | None = None,
) -> jax.Array:
    """Return dQ like q `[B, T, N, H]`, scaled, from the float32 dQ of the backward.

    A row of that has the tiles of a query block, as `register_io.add_fragments` has added them. Where `visits`, a
    number for each query block, is 0, the row was never written, and dQ is 0.
    """
    config, inputs = schedule.config, [dq] if visits is None else [dq, visits]

    def run(refs: tuple[Ref, ...], memory: list[Ref]) -> None:
        (dq, *visits, target), (smem,) = refs, memory
        q_block = compute_q_block(schedule)
        exists = [words[q_block] != 0 for words in visits]
        batch, head, first = schedule.locate_q_block(q_block)
        for index in range(config.num_dq_tiles):
            tile = config.dq_tile(index)
            source = dq.at[q_block, config.dq_range(tile)]
            if exists:
                value = register_io.take_fragments(source, tile.num_columns, *exists)
            else:
                value = register_io.load_fragments(source, tile.num_columns)
            smem.at[tile.rows, tile.columns][...] = (value * schedule.spec.scale).astype(q.dtype)
        plgpu.commit_smem()
        HeadRows(target, batch, pl.ds(first, config.block_q), head).store(smem)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    panel = swizzle.panel_width(config.head_dim, q.shape[3], q.dtype)
    kernel = launch.build_kernel(
        "finish_gradients",
        run,
        [swizzle.swizzled_smem(config.block_q, config.head_dim, dtype=q.dtype, panel=panel)],
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        {"cta": schedule.num_q_blocks},
        1,
    )
    return kernel(*inputs)


def finalize_pairwise_grad(pieces: jax.Array, entries: int, dtype: DTypeLike) -> jax.Array:
    """Return a gradient of a pairwise input, `[entries, N | 1, T', S']`, from the pieces of `aux_grads.AuxGrads`.

    If there are more batch entries, those are summed in float32.
    """
    batch, heads, q_pieces, k_pieces, _ = pieces.shape
    shared = batch > entries
    grid = entries, heads, q_pieces // PIECES_DOWN, k_pieces // PIECES_ACROSS
    size = PIECES_DOWN * PIECE_COLUMNS, PIECES_ACROSS * ROWS_PER_WARPGROUP

    def run(refs: tuple[Ref, Ref], memory: list[Ref]) -> None:
        (pieces, target), (tile,) = refs, memory
        entry, head, row, column = arithmetic.unravel(lax.axis_index("cta"), grid)
        for i, j in np.ndindex(PIECES_DOWN, PIECES_ACROSS):
            index = head, row * PIECES_DOWN + i, column * PIECES_ACROSS + j
            total = load_sum([pieces.at[e, *index] for e in (range(batch) if shared else [entry])])
            total = plgpu.layout_cast(total.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            queries = pl.ds(i * PIECE_COLUMNS, PIECE_COLUMNS)
            keys = pl.ds(j * ROWS_PER_WARPGROUP, ROWS_PER_WARPGROUP)
            tile.at[queries, keys].transpose((1, 0))[...] = total
        plgpu.commit_smem()
        slices = (pl.ds(x * n, n) for x, n in zip((row, column), size, strict=True))
        plgpu.copy_smem_to_gmem(tile, target.at[entry, head, *slices])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def load_sum(sources: list[Ref]) -> jax.Array:
        terms = (register_io.load_fragments(source, PIECE_COLUMNS) for source in sources)
        return functools.reduce(jnp.add, (x.astype(jnp.float32) for x in terms))

    shape = entries, heads, q_pieces * PIECE_COLUMNS, k_pieces * ROWS_PER_WARPGROUP
    kernel = launch.build_kernel(
        "finish_pair_gradients",
        run,
        [swizzle.swizzled_smem(*size, dtype=dtype)],
        jax.ShapeDtypeStruct(shape, dtype),
        {"cta": math.prod(grid)},
        1,
    )
    return jax.custom_batching.sequential_vmap(kernel)(pieces)
