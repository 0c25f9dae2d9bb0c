"""The configuration of a forward kernel."""

import dataclasses
import math
from typing import ClassVar

from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Slice
from pallas_fa2.backends.sm90.forward.staging import STAGES
from pallas_fa2.backends.sm90.primitives import pipeline


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes and pipeline depths of one forward kernel."""

    head_dim: int  # of queries and keys, up to 256; arrays may have less
    value_dim: int
    warpgroups: int  # consumers; each owns 64 query rows
    block_kv: int
    stages: int
    # Of a thread in a consumer and in the producer warpgroup, or in the producers of V and of K of 8 bits.
    registers: tuple[int, ...]
    # Whether Q is read into registers once a tile: less shared memory traffic (16 of 80 KB a block at
    # H = 128) where there are 32 registers for it.
    q_in_registers: bool = False
    # Buffers of Q, at least: a kernel has two where there is room (`with_double_buffered_q`), and the next
    # tile's Q is loaded while this one's is read.
    q_stages: int = 1
    # Keys of one P V product, if not a whole block: a warp that issues products waits for the tensor cores
    # to take them, and with fewer at a time it begins sooner with its exponentials.
    pv_chunk: int | None = None
    # Columns, at most, of the buffer through which the output leaves, and K and V of a retried tile come.
    epilogue_columns: int = 128
    # Keys of 8 bits that are copied at once, a subtile of a block: of K and of V `staging.STAGES` each are under way.
    subtile_kv: int = 0
    num_ctas: int = 132  # persistent, one for each SM
    # Bytes of K and V of the heads that run at the same time: about half of the 60 MB of L2.
    l2_budget: int = 32 << 20

    rows_per_warpgroup: ClassVar[int] = layouts.ROWS_PER_WARPGROUP

    @property
    def registers_per_warpgroup(self) -> tuple[int, ...]:
        """Registers of a thread in each warpgroup, producers last."""
        consumer, *producers = self.registers
        return *[consumer] * self.warpgroups, *producers

    @property
    def producers(self) -> int:
        return len(self.registers) - 1

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows_per_warpgroup

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    def free_smem(self, key_rows: int) -> int:
        """Return the bytes of shared memory that are left beside K and V, so many rows of the keys' aux inputs,
        Q, the output and barriers."""
        kv_bytes = self.stages * self.block_kv * (self.head_dim + self.value_dim) * 2
        q_bytes = self.q_stages * self.head_dim * 2
        rows_bytes = self.block_q * (q_bytes + self.out_columns * 2)
        aux_bytes = self.stages * key_rows * self.block_kv * 4
        kv_bytes += STAGES * self.subtile_kv * (self.head_dim + self.value_dim)
        barriers = 512  # up to 60
        if self.subtile_kv:
            barriers += 2048  # scales of K and of V, which Pallas aligns to 1024
        return pipeline.SHARED_MEMORY_BYTES - kv_bytes - rows_bytes - aux_bytes - barriers

    def with_double_buffered_q(self, key_rows: int) -> "ForwardConfig":
        """Return this with two buffers of Q if there is room beside so many rows of the keys' aux inputs, if need
        be with half of the output's buffer."""
        if self.q_in_registers:
            return self
        double_buffered = (
            dataclasses.replace(self, q_stages=2, epilogue_columns=columns)
            for columns in (self.epilogue_columns, self.epilogue_columns // 2)
            if self.value_dim % min(self.value_dim, columns) == 0
        )
        return next((config for config in double_buffered if config.free_smem(key_rows) >= 0), self)

    def pairwise_stages(self, pair_bytes: int, key_rows: int) -> int:
        """Return for how many key blocks pairwise inputs of so many bytes a pair fit."""
        return min(2, self.free_smem(key_rows) // (self.block_q * self.block_kv * pair_bytes))

    @property
    def pv_chunks(self) -> list[Slice]:
        """The keys of a block, divided into those of each P V product."""
        return layouts.slices(self.block_kv, self.pv_chunk or self.block_kv)

    @property
    def out_columns(self) -> int:
        """Columns of the output's buffer."""
        return min(self.value_dim, self.epilogue_columns)

    @property
    def epilogue_tiles(self) -> list[Slice]:
        """The columns of the output, divided into what leaves at once."""
        return layouts.slices(self.value_dim, self.out_columns)

    @property
    def retry_block_kv(self) -> int:
        """Keys that are loaded at once when a tile is retried, into the rows of the output's buffer."""
        return math.gcd(self.block_kv, self.rows_per_warpgroup)

    @property
    def retry_k_tiles(self) -> list[Slice]:
        """The columns of K, divided into what is loaded at once when a tile is retried."""
        return layouts.slices(self.head_dim, self.out_columns)
