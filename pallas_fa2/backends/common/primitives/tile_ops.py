"""The operations on tiles of scores in accumulators of WGMMA or mma.sync by which masks, scores and dropout are
applied."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import (
    dropout_bits,
    layouts,
    masking,
    thread_values,
    votes,
)
from pallas_fa2.backends.common.tile_mods import TileOps
from pallas_fa2.ir.tile_values import TargetOps


def _broadcast_to_rows(x: jax.Array, rows: int) -> jax.Array:
    return plgpu.layout_cast(jnp.broadcast_to(x, (rows,)), layouts.ROW_LAYOUT)


TARGET_OPS = TargetOps(
    reciprocal=thread_values.reciprocal,
    broadcast=layouts.broadcast_axis,
    any_abs_ge_2=votes.warp_any_abs_ge_2,
    defeat_minmax_fusion=thread_values.defeat_minmax_fusion,
    materialize_int=layouts.materialize_int,
)
TILE_OPS = TileOps(
    values=TARGET_OPS,
    load_vector=layouts.load_row,
    broadcast_to_rows=_broadcast_to_rows,
    mask_outside=masking.mask_outside,
    pack_bits=masking.pack_bits,
    negate_dropped=dropout_bits.negate_dropped,
)
