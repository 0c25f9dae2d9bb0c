"""Shared memory and barriers of a decode kernel."""

from typing import NamedTuple

from jax.typing import DTypeLike

from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, Scratch
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
