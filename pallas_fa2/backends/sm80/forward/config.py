"""The configuration of a forward kernel."""

import dataclasses


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
    q_in_registers: bool = (
        False  # whether fragments of Q are loaded once, and not for each block of keys
    )

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
    def smem_bytes(self) -> int:
        """Return the bytes of shared memory that a CTA takes."""
        q_rows = self.block_q * self.head_dim
        kv_rows = self.stages * self.block_kv * (self.head_dim + self.value_dim)
        return 2 * (q_rows + kv_rows)
