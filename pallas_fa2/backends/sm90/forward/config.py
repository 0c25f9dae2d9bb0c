"""The configuration of a forward kernel."""

import dataclasses
import math
from typing import Any, ClassVar

from pallas_fa2.backends.sm90.primitives import layouts, pipeline


@dataclasses.dataclass(frozen=True)
class ForwardConfig:
    """Tile sizes and schedule of one forward kernel."""

    head_dim: int  # of queries and keys, up to 256; arrays may have less
    value_dim: int
    warpgroups: int  # that multiply; each owns 64 query rows
    block_kv: int
    stages: int
    registers: tuple[int, int]  # of a thread in a multiplying and in the loading warpgroup
    # Whether Q is read into registers once a tile: less shared memory traffic (16 of 80 KB a block at
    # H = 128) where there are 32 registers for it.
    q_in_registers: bool = False
    # Of queries in shared memory, at least: a kernel has two where there is room (`with_queries_ahead`), and the
    # next tile's come while this one's are read.
    q_stages: int = 1
    # Keys whose values are multiplied at once, if not a whole block: a warp that issues products waits for
    # the tensor cores to take them, and with fewer at a time it begins sooner with its exponentials.
    pv_chunk: int | None = None
    # Of the buffer through which the output leaves, and a repeated tile's keys and values come.
    epilogue_columns: int = 128
    num_ctas: int = 132  # persistent, one a multiprocessor
    # Keys and values of the heads that run at the same time: about half of the 60 MB of L2.
    l2_budget: int = 32 << 20

    rows_per_warpgroup: ClassVar[int] = layouts.ROWS_PER_WARPGROUP

    @property
    def registers_per_warpgroup(self) -> tuple[int, ...]:
        """Registers of a thread in each warpgroup, the loading one last."""
        multiplying, loading = self.registers
        return *[multiplying] * self.warpgroups, loading

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows_per_warpgroup

    def free_smem(self, key_rows: int) -> int:
        """Bytes of shared memory that are left by keys and values and so many rows of their data, queries,
        the output and barriers."""
        kv_bytes = self.stages * self.block_kv * (self.head_dim + self.value_dim) * 2
        q_bytes = self.q_stages * self.head_dim * 2
        rows_bytes = self.block_q * (q_bytes + self.epilogue_pieces[0].size * 2)
        data_bytes = self.stages * key_rows * self.block_kv * 4
        barriers = 512  # up to 60
        return pipeline.SHARED_MEMORY_BYTES - kv_bytes - rows_bytes - data_bytes - barriers

    def with_double_buffered_q(self, key_rows: int) -> "ForwardConfig":
        """With two buffers of queries where there is room beside so many rows of keys' data, if need be with half of
        the output's buffer."""
        if self.q_in_registers:
            return self
        ahead = (
            dataclasses.replace(self, q_stages=2, epilogue_columns=columns)
            for columns in (self.epilogue_columns, self.epilogue_columns // 2)
            if self.value_dim % min(self.value_dim, columns) == 0
        )
        return next((config for config in ahead if config.free_smem(key_rows) >= 0), self)

    def pairwise_stages(self, pair_bytes: int, key_rows: int) -> int:
        """How many blocks' data of pairs fit there."""
        return min(2, self.free_smem(key_rows) // (self.block_q * self.block_kv * pair_bytes))

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def retry_block_kv(self) -> int:
        """Keys that come together when a tile is repeated: they have the rows of the output's buffer."""
        return math.gcd(self.block_kv, self.rows_per_warpgroup)

    @property
    def epilogue_pieces(self) -> list[Any]:
        """Columns of the output that leave together."""
        return self._pieces(self.value_dim)

    @property
    def key_pieces(self) -> list[Any]:
        """Columns of the keys that come together when a tile is repeated."""
        return self._pieces(self.head_dim)

    @property
    def pv_pieces(self) -> list[Any]:
        """Keys of a block whose values are multiplied at once."""
        return layouts.slices(self.block_kv, self.pv_chunk or self.block_kv)

    def _pieces(self, dim: int) -> list[Any]:
        return layouts.slices(dim, min(self.value_dim, self.epilogue_columns))
