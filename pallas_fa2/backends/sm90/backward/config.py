"""Tile sizes of a Hopper backward kernel, its stages and registers, and how a block's dQ is divided."""

import dataclasses
from typing import Any, ClassVar

from jax.experimental import pallas as pl

from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS

# A block's dQ is formed and added in tiles of 64 x 64 or less: an accumulator of 32 registers.
DQ_TILE = 64
# dS lies in panels of 64 queries, the width of a swizzled row.
QUERY_PANEL = 64
# The axis of the two CTAs that share a block of keys.
CLUSTER_AXIS = "pair"


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes and schedule of one backward kernel."""

    head_dim: int  # of queries and keys, up to 256; arrays may have less
    value_dim: int  # of values, as many up to 128
    num_ctas: int = 132  # persistent, one a multiprocessor
    deterministic: bool = False  # dQ is added in one order, the same in every run
    head_per_cta: bool | None = None  # whether a CTA takes these; where it suits, if None
    first_store: bool | None = None  # whether the first dQ of a row is stored; likewise
    # Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2.
    l2_budget: int = 40 << 20

    @property
    def two_cta(self) -> bool:
        """Whether two CTAs share a block of keys."""
        return self.head_dim > 128

    @property
    def registers(self) -> tuple[int, ...]:
        """Of a thread in each warpgroup, the one that loads last."""
        return (192, 192, 120) if self.two_cta else (240, 240, 24)

    @property
    def block_q(self) -> int:
        """At H = 64 twice as many, or shared memory could not keep up: keys are read once a block."""
        return 128 if self.head_dim == 64 else 64

    block_kv: ClassVar[int] = 128

    @property
    def kv_rows(self) -> int:
        """Of a block's keys, those in one CTA."""
        return 64 if self.two_cta else 128

    @property
    def stages(self) -> tuple[int, int]:
        """Of Q and dO. In pairs dV is formed a good while before dP of the next step; but a second dO is 8 %
        faster at (192, 128), no faster at (192, 192), and has no room at (256, 256)."""
        return (2, 1) if self.value_dim > 128 else (2, 2)

    @property
    def kv_stages(self) -> tuple[int, int]:
        """Of K and V. Up to H = 128, the last dQ of a tile is formed in the first step of the next."""
        return 1 if self.two_cta else 2, 1

    @property
    def ds_stages(self) -> int:
        """One to be written, one to be read by this warpgroup and one by the other; in pairs each
        is read by others than its writer."""
        return 2 if self.two_cta else 3

    @property
    def column_pieces(self) -> int:
        """Of a step's queries, as many as a score function takes at a time."""
        return self.block_q // PIECE_COLUMNS

    def free_smem(self, query_rows: int) -> int:
        """Bytes of shared memory, up to H = 128, that are left by operands, so many rows of data of
        queries and 2 KB of all else."""
        (q, do), (k, v), block_q = self.stages, self.kv_stages, self.block_q
        operands = (k * self.kv_rows + q * block_q) * self.head_dim
        operands += (v * self.kv_rows + do * block_q) * self.value_dim
        operands += self.ds_stages * self.kv_rows * block_q
        row_bytes = (q * (1 + query_rows) + do) * block_q * 4
        return pipeline.SHARED_MEMORY_BYTES - 2 * operands - row_bytes - 2048

    def pairwise_stages(self, pair_bytes: int, query_rows: int) -> int:
        """How many pieces of queries fit there with the data of pairs: up to those of a step."""
        piece_bytes = PIECE_COLUMNS * self.kv_rows * pair_bytes
        return min(self.column_pieces, self.free_smem(query_rows) // piece_bytes)

    @property
    def _dq_columns(self) -> list[Any]:
        """How a block's dQ is divided: for the warpgroups that form it. Of a pair of CTAs each has half, and
        the one that owns dV gets most of that."""
        if self.two_cta:
            return [self.dq_half(cta, me) for cta in range(2) for me in range(2)]
        starts = range(0, self.head_dim, DQ_TILE)
        return [pl.ds(start, min(DQ_TILE, self.head_dim - start)) for start in starts]

    def dq_half(self, cta: Any, me: int) -> Any:
        """Of a pair's CTA, the columns of a warpgroup."""
        half = self.head_dim // 2
        return pl.ds(cta * half + (half - DQ_TILE) * me, DQ_TILE if me else half - DQ_TILE)

    @property
    def num_dq_parts(self) -> int:
        """How many tiles of dQ a block of queries has."""
        return self.block_q // DQ_TILE * len(self._dq_columns)

    @property
    def symmetric_dq(self) -> bool:
        """Whether the two warpgroups that multiply form half of the columns of dQ each."""
        return not self.two_cta and [x.size for x in self._dq_columns] == [DQ_TILE, DQ_TILE]

    def dq_part_slices(self, part: Any) -> tuple[Any, Any]:
        """The rows and columns of a part, within the block."""
        if self.symmetric_dq:
            return pl.ds(0, DQ_TILE), pl.ds(part * DQ_TILE, DQ_TILE)
        row, column = divmod(part, len(self._dq_columns))
        return pl.ds(row * DQ_TILE, DQ_TILE), self._dq_columns[column]

    def dq_part_range(self, rows: Any, columns: Any) -> Any:
        """Where a part is among the block's numbers, as it lies in registers."""
        first = rows.start * self.head_dim + columns.start * DQ_TILE
        return pl.ds(first, columns.size * DQ_TILE)

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv
