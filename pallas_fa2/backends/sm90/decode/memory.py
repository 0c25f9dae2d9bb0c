"""Shared memory, barriers and arrays of a decode kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, Scratch
from pallas_fa2.backends.sm90.decode.config import SCALE_LINE, DecodeConfig, page_rows
from pallas_fa2.backends.sm90.decode.eight_bits import OPERAND_DTYPE, panel_width
from pallas_fa2.backends.sm90.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.sm90.decode.schedule import DecodePlan
from pallas_fa2.backends.sm90.decode.spec import DecodeSpec
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers
from pallas_fa2.ir.quantized import Scales


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA.

    The ring of K and V needs no barriers that tell when a slot is empty: the one warpgroup that reads it also fills it.
    """

    q: Ref  # [2, columns, H]: this tile's, and the next one's
    k: Ref  # [stages, 64, H], of 8 or 16 bits
    v: Ref  # [stages, 64, Hv]
    p: Ref  # [columns, 64]
    out: Ref  # [columns, Hv]
    q_full: Barriers
    kv_full: Barriers
    # Of K of 8 bits, [stages, copies of a block, heads, keys]: a copy brings 64 scales, those of its keys of this head and
    # of the next ones.
    k_scale: Ref = None
    v_scale: Ref = None

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

        copies, scales = config.block_kv // page_rows(spec), {}
        if spec.quantized is not None:
            kind = plgpu.SMEM((config.stages, copies, copies, SCALE_LINE // copies), jnp.bfloat16)
            scales = {"k_scale": kind, "v_scale": kind}
            copies *= 2  # the scales arrive with their tokens
        return cls(
            q=smem(2, spec.columns, config.head_dim),
            k=ring(config.head_dim),
            v=ring(config.value_dim),
            p=smem(spec.columns, config.block_kv),
            out=smem(spec.columns, config.value_dim, dtype=dtype),
            q_full=Barriers.allocate(spec.q_len, q=2),
            kv_full=Barriers.allocate(copies, k=config.stages, v=config.stages),
            **scales,
        )


class Inputs(NamedTuple):
    """Arrays in device memory that the kernel reads."""

    q: Any  # [tokens * K, G, 1, H], H a multiple of 64
    k: Any  # [B, S, K, H], or pages [P, page size, K, H]
    v: Any
    plan: DecodePlan
    table: Any = None  # int32 [B, pages of a request]: the pages, of a paged cache
    mods: ModArrays = NO_MODS
    scales: Scales | None = None  # [B, K, S], or of pages [P, K, page size]: of K and V of 8 bits
    q_largest: Any = (
        None  # float32 [tokens * N], the largest magnitudes of Q, which was divided for these
    )


class Outputs(NamedTuple):
    """Arrays in device memory that the kernel writes.

    A CTA has two splits at most, one of a tile that an earlier CTA begins, and one of a tile that it begins itself: in
    this order they are splits `2 * cta` and `2 * cta + 1`.
    """

    out: Any  # [tokens * K, G, 1, Hv], Hv a multiple of 64
    lse: Any  # float32 [tokens * N], natural
    split_out: Any  # float32 [splits, Hv / 64, 64 * columns]: O^T, normalized, as its tiles lie in registers
    split_lse: Any  # float32 [splits, columns], in base 2

    @classmethod
    def types(cls, spec: DecodeSpec, config: DecodeConfig, dtype: DTypeLike) -> "Outputs":
        """Return the types of the arrays of a launch."""
        splits, f32 = 2 * config.num_ctas, jnp.float32
        out = spec.num_tokens * spec.kv_heads, spec.group, 1, config.value_dim
        fragments = splits, config.value_dim // 64, 64 * spec.columns
        return cls(
            jax.ShapeDtypeStruct(out, dtype),
            jax.ShapeDtypeStruct((spec.num_tokens * spec.q_heads,), f32),
            jax.ShapeDtypeStruct(fragments, f32),
            jax.ShapeDtypeStruct((splits, spec.columns), f32),
        )


@dataclasses.dataclass(frozen=True)
class Cta:
    """What one CTA works with."""

    spec: DecodeSpec
    config: DecodeConfig
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage
