"""Shared memory of a decode kernel."""

from typing import NamedTuple

from jax.typing import DTypeLike

from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.merge import allocate_notes
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Ref, Scratch


class SharedStorage(NamedTuple):
    """Shared memory of a CTA. Of `stages` blocks that are on their way, each may begin a tile."""

    q: Ref  # [stages, columns, H]
    k: Ref  # [stages, 64, H]
    v: Ref  # [stages, 64, Hv]
    p: Ref  # [columns, 64]
    notes: Ref  # int32 [4, 5]: `merge.allocate_notes`

    @classmethod
    def allocate(cls, spec: DecodeSpec, config: DecodeConfig, dtype: DTypeLike) -> "SharedStorage":
        def smem(*shape: int) -> Scratch:
            return swizzle.swizzled_smem(*shape, dtype=dtype, panel=64)

        stages, block_kv = config.stages, config.block_kv
        return cls(
            q=smem(stages, spec.columns, config.head_dim),
            k=smem(stages, block_kv, config.head_dim),
            v=smem(stages, block_kv, config.value_dim),
            p=smem(spec.columns, block_kv),
            notes=allocate_notes(),
        )
