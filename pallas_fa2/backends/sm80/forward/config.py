"""The configuration of a forward kernel."""

import dataclasses

from pallas_fa2.backends.sm80.primitives.mma import panel_width


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes of one forward kernel. A CTA computes `block_q` query rows of one head."""

    head_dim: int  # of queries and keys: a multiple of 32 up to 256; arrays may have less
    value_dim: int  # of values: no more
    warpgroups: int = 1
    # Tiles of 64 query rows a warpgroup: 16 or 32 rows a warp. Two share each fragment of K and V, which halves the
    # traffic of shared memory (FlashAttention-2's scheme on A100).
    row_tiles: int = 2
    block_kv: int = 64
    # Buffers of K and of V. With one, the copy of V hides behind S = Q K^T, and that of the next K behind P V.
    stages: int = 1
    # Whether fragments of Q are loaded once, and not for each block of keys.
    q_in_registers: bool = False
    # float16 numbers whose sum an element of Q, K, V or P is: 2 for float32 inputs (`split_float32`).
    terms: int = 1
    # How many CTAs run at the same time on the device: under a mask, tiles are ordered for so many (`tile_list`).
    num_ctas: int = 1

    @property
    def rows_per_warpgroup(self) -> int:
        return 64 * self.row_tiles

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows_per_warpgroup

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def is_split(self) -> bool:
        """Whether inputs are float32, as sums of float16 numbers."""
        return self.terms > 1

    @property
    def out_panel(self) -> int:
        """Return the columns of O that are computed at once: all, or of split operands, whose P V_j has accumulators of
        its own, a swizzled panel."""
        return panel_width(self.value_dim) if self.is_split else self.value_dim

    @property
    def smem_bytes(self) -> int:
        """Return the bytes of shared memory that a CTA takes."""
        q_rows = self.block_q * self.head_dim
        kv_rows = self.stages * self.block_kv * (self.head_dim + self.value_dim)
        scales = 4 * 3 * self.block_kv if self.is_split else 0
        return 2 * self.terms * (q_rows + kv_rows) + scales
