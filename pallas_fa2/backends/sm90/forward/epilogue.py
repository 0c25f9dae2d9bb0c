"""The end of a query tile: O is normalized and stored with lse, or the tile is retried."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common.primitives import layouts, register_io, votes
from pallas_fa2.backends.common.primitives.types import Scalar, Slice
from pallas_fa2.backends.sm90.forward.exact_retry import recompute_exact
from pallas_fa2.backends.sm90.forward.rows import WarpgroupRows
from pallas_fa2.backends.sm90.forward.schedule import PipelinePosition
from pallas_fa2.backends.sm90.forward.softmax import SoftmaxState
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.control_flow import cond, when


def epilogue(
    rows: WarpgroupRows,
    warpgroup: Scalar,
    acc: jax.Array,
    softmax: SoftmaxState,
    release_q: Callable[[], None],
) -> PipelinePosition:
    """Store O and lse of 64 rows, lines 12 to 15, from `acc`, O unnormalized; return the pipelines' position then.

    Where a row sum is not finite, all 64 rows are computed again: scores rose by too much within a block, or a
    value is infinite or NaN and may be masked.
    """
    row_sum = softmax.sum_rows(rows.spec, acc)
    retried = votes.warpgroup_any_nonfinite(row_sum, warpgroup)
    tiles = HeadRows.existing_columns(rows.arrays.outputs.out, rows.config.epilogue_tiles)

    def finish() -> PipelinePosition:
        release_q()
        here = rows.rematerialized(retried)
        for columns in tiles:
            tile_acc = layouts.slice_columns(acc, columns)
            store_output(here, columns, tile_acc, softmax.reference, row_sum)
        return here.advance()

    def retry() -> PipelinePosition:
        here = rows.rematerialized(retried - 1)

        def retry_columns(i: Scalar, _: Any) -> None:
            columns = pl.ds(i * rows.config.out_columns, rows.config.out_columns)
            store_output(here, columns, *recompute_exact(here, columns))

        lax.fori_loop(0, len(tiles), retry_columns, None)
        release_q()
        return here.advance()

    return cond(retried != 0, retry, finish)


def store_output(
    rows: WarpgroupRows, columns: Slice, acc: jax.Array, reference: jax.Array, row_sum: jax.Array
) -> None:
    """Normalize and store some columns of O; with the first, store lse."""
    batch, head, _ = rows.tile.compute_coordinates()
    row_range, spec = rows.compute_row_range(), rows.spec
    out = rows.memory.out.at[rows.compute_warpgroup()]
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the buffer
    scale, lse = spec.dropout_scale / row_sum, reference * (1 / LOG2E) + jnp.log(row_sum)
    if not spec.has_no_mods:
        no_key = row_sum == 0
        scale, lse = jnp.where(no_key, 0.0, scale), jnp.where(no_key, -jnp.inf, lse)
    normalized = (acc * layouts.broadcast_rows(scale, acc.shape)).astype(out.dtype)
    if spec.in_cache:
        return store_existing_rows(rows, columns, normalized, lse)
    out[...] = normalized
    plgpu.commit_smem()
    HeadRows(rows.arrays.outputs.out, batch, row_range, head, columns).store(out)

    @when(columns.start == 0)
    def store_lse() -> None:
        rows.arrays.outputs.lse[batch, head, row_range] = lse

    plgpu.commit_smem_to_gmem_group()


def store_existing_rows(
    rows: WarpgroupRows, columns: Slice, out: jax.Array, lse: jax.Array
) -> None:
    """Store those rows of some columns of O that the tile's entry has, and with the first columns lse.

    TMA would store rows of the next request as well: registers go to device memory.
    """
    _, head, _ = rows.tile.compute_coordinates()
    row_range = pl.ds(rows.load_first_query(), layouts.ROWS_PER_WARPGROUP)
    before = rows.compute_warpgroup() * layouts.ROWS_PER_WARPGROUP
    count = rows.load_entry_field("num_queries") - before
    outputs = rows.arrays.outputs
    register_io.store_rows(outputs.out.at[0, row_range, head], out, columns.start, count)

    @when(columns.start == 0)
    def store_lse() -> None:
        register_io.store_row_values(lse, outputs.lse.at[0, row_range, head], count)
