"""Shared memory, barriers and arrays of a decode kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, Scratch
from pallas_fa2.backends.sm90.decode.config import DecodeConfig
from pallas_fa2.backends.sm90.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.sm90.decode.schedule import DecodePlan
from pallas_fa2.backends.sm90.decode.spec import DecodeSpec
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA.

    The ring of K and V needs no barriers that tell when a slot is empty: the one warpgroup that reads it also fills it.
    """

    q: Ref  # [2, columns, H]: this tile's, and the next one's
    k: Ref  # [stages, 64, H]
    v: Ref  # [stages, 64, Hv]
    p: Ref  # [columns, 64]
    out: Ref  # [columns, Hv]
    q_full: Barriers
    kv_full: Barriers

    @classmethod
    def allocate(cls, spec: DecodeSpec, config: DecodeConfig, dtype: DTypeLike) -> "SharedStorage":
        def smem(*shape: int) -> Scratch:
            return swizzle.swizzled_smem(*shape, dtype=dtype, panel=64)

        stages, block_kv = config.stages, config.block_kv
        pages = block_kv // page_rows(spec, block_kv)
        return cls(
            q=smem(2, spec.columns, config.head_dim),
            k=smem(stages, block_kv, config.head_dim),
            v=smem(stages, block_kv, config.value_dim),
            p=smem(spec.columns, block_kv),
            out=smem(spec.columns, config.value_dim),
            q_full=Barriers.allocate(spec.q_len, q=2),
            kv_full=Barriers.allocate(pages, k=stages, v=stages),
        )


def page_rows(spec: DecodeSpec, block_kv: int) -> int:
    """Return how many keys of a block one copy brings: those that lie side by side in device memory for any table."""
    if spec.page_size is None:
        return block_kv
    rows = block_kv
    while spec.page_size % rows:
        rows //= 2
    return rows


class Inputs(NamedTuple):
    """Arrays in device memory that the kernel reads."""

    q: Any  # [tokens * K, G, 1, H], H a multiple of 64
    k: Any  # [B, S, K, H], or pages [P, page size, K, H]
    v: Any
    plan: DecodePlan
    table: Any = None  # int32 [B, pages of a request]: the pages, of a paged cache
    mods: ModArrays = NO_MODS


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
