"""Shared memory and barriers of a decode kernel."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.merge import allocate_notes
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, Scratch
from pallas_fa2.backends.sm90.decode.config import SCALE_LINE
from pallas_fa2.backends.sm90.decode.eight_bits import OPERAND_DTYPE, panel_width
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA.

    The ring of K and V needs no barriers that tell when a slot is empty: the one warpgroup that reads it also fills it.
    """

    q: Ref  # [2, columns, H]: this tile's, and the next one's
    k: Ref  # [stages, 64, H], of 8 or 16 bits
    v: Ref  # [stages, 64, Hv]
    p: Ref  # [columns, 64]
    notes: Ref  # int32 [4, 5]: `merge.allocate_notes`
    out: Ref  # [columns, Hv]
    q_full: Barriers
    kv_full: Barriers
    # Of K of 8 bits, [stages, copies of a block, heads, keys]: a copy brings 64 scales, those of its keys of this head
    # and of the next ones.
    k_scale: Ref = None
    v_scale: Ref = None
    # Beside K of 8 bits, float32 [columns]: what rows of this tile's Q were divided by. One slot will do: all warps
    # read it when the tile begins, and meet in each of its blocks, of which it has one at least, before the next tile's
    # are stored.
    q_scale: Ref = None

    @classmethod
    def allocate(cls, spec: DecodeSpec, config: DecodeConfig, dtype: DTypeLike) -> "SharedStorage":
        operand = OPERAND_DTYPE if spec.quantized else dtype

        def smem(*shape: int, dtype: DTypeLike = operand) -> Scratch:
            return swizzle.swizzled_smem(*shape, dtype=dtype, panel=64)

        def ring(dim: int) -> Scratch:
            shape = config.stages, config.block_kv, dim
            if spec.quantized is None:
                return smem(*shape)
            return swizzle.swizzled_smem(*shape, dtype=spec.quantized, panel=panel_width(dim))

        copies, scales = config.block_kv // page_rows(spec, config.block_kv), {}
        if spec.quantized is not None:
            kind = plgpu.SMEM((config.stages, copies, copies, SCALE_LINE // copies), jnp.bfloat16)
            scales = {"k_scale": kind, "v_scale": kind}
            scales["q_scale"] = plgpu.SMEM((spec.columns,), jnp.float32)
            copies *= 2  # the scales arrive with their tokens
        return cls(
            q=smem(2, spec.columns, config.head_dim),
            k=ring(config.head_dim),
            v=ring(config.value_dim),
            p=smem(spec.columns, config.block_kv),
            notes=allocate_notes(),
            out=smem(spec.columns, config.value_dim, dtype=dtype),
            q_full=Barriers.allocate(spec.q_len, q=2),
            kv_full=Barriers.allocate(copies, k=config.stages, v=config.stages),
            **scales,
        )
