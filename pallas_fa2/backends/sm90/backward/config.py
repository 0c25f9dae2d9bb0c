"""Tile sizes, stages and registers of a backward kernel, and how dQ of a query block is divided into tiles."""

import dataclasses
import itertools
from typing import ClassVar, NamedTuple

from jax.experimental import pallas as pl

from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Scalar, Slice
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS

# dQ is formed and added in tiles of 64 x 64 or less: an accumulator of 32 registers.
DQ_TILE = 64
# P and dS are in panels of 64 queries, the width of a swizzled row.
QUERY_PANEL = 64
# The axis of the two CTAs that share a block of keys.
CLUSTER_AXIS = "pair"


class DqTile(NamedTuple):
    """A tile of a query block's dQ, by its rows and columns in the block."""

    rows: Slice
    columns: Slice

    @property
    def num_columns(self) -> int:
        assert isinstance(self.columns.size, int)
        return self.columns.size


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """Tile sizes and pipeline depths of one backward kernel."""

    head_dim: int  # of queries and keys, up to 256; arrays may have less
    value_dim: int  # of values, as many up to 128
    num_ctas: int = 132  # persistent, one for each SM
    deterministic: bool = False  # dQ is added in one order, the same in every run
    head_per_cta: bool | None = None  # whether a CTA takes whole heads; where that suits, if None
    first_store: bool | None = None  # whether the first dQ of a row is stored; likewise
    # Bytes of Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2.
    l2_budget: int = 40 << 20

    block_kv: ClassVar[int] = 128

    @property
    def two_cta(self) -> bool:
        """Return whether two CTAs share a block of keys."""
        return self.head_dim > 128

    @property
    def registers(self) -> tuple[int, ...]:
        """Return the registers of a thread in each warpgroup, the one that loads last."""
        return (192, 192, 120) if self.two_cta else (240, 240, 24)

    @property
    def block_q(self) -> int:
        """Return the queries of a step. With fewer at H = 64 shared memory could not keep up: each step reads K
        once."""
        return 128 if self.head_dim == 64 else 64

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def panels(self) -> list[Slice]:
        """Return the queries of a step, divided into those whose P takes 32 registers."""
        return layouts.slices(self.block_q, QUERY_PANEL)

    @property
    def kv_rows(self) -> int:
        """Return the keys of a block that are in one CTA."""
        return 64 if self.two_cta else 128

    @property
    def stages(self) -> tuple[int, int]:
        """Return the stages of Q and of dO. With two CTAs dV is formed a good while before dP of the next step; but a
        second dO is 8 % faster at (192, 128), no faster at (192, 192), and has no room at (256, 256)."""
        return (2, 1) if self.value_dim > 128 else (2, 2)

    @property
    def kv_stages(self) -> tuple[int, int]:
        """Return the stages of K and of V. Up to H = 128, the last dQ of a tile is formed in the first step of the next
        one."""
        return 1 if self.two_cta else 2, 1

    @property
    def ds_stages(self) -> int:
        """Return the stages of dS: one is written, one is read by this warpgroup and one by the other one. With two
        CTAs, warpgroups other than its writer read each."""
        return 2 if self.two_cta else 3

    @property
    def column_pieces(self) -> int:
        """Return the number of pieces of a step's queries, each of as many as a score function takes."""
        return self.block_q // PIECE_COLUMNS

    def free_smem(self, query_rows: int) -> int:
        """Return the bytes of shared memory, up to H = 128, that are left beside operands, so many rows of the queries'
        aux inputs, and 2 KB of all else."""
        (q, do), (k, v), block_q = self.stages, self.kv_stages, self.block_q
        operands = (k * self.kv_rows + q * block_q) * self.head_dim
        operands += (v * self.kv_rows + do * block_q) * self.value_dim
        operands += self.ds_stages * self.kv_rows * block_q
        row_bytes = (q * (1 + query_rows) + do) * block_q * 4
        return pipeline.SHARED_MEMORY_BYTES - 2 * operands - row_bytes - 2048

    def pairwise_stages(self, pair_bytes: int, query_rows: int) -> int:
        """Return for how many pieces of queries pairwise inputs fit there: up to those of a step."""
        piece_bytes = PIECE_COLUMNS * self.kv_rows * pair_bytes
        return min(self.column_pieces, self.free_smem(query_rows) // piece_bytes)

    @property
    def num_dq_tiles(self) -> int:
        """Return the number of tiles of dQ of a query block."""
        return self.block_q // DQ_TILE * len(self._dq_columns)

    @property
    def symmetric_dq(self) -> bool:
        """Return whether the two consumer warpgroups form half of dQ's columns each."""
        return not self.two_cta and [x.size for x in self._dq_columns] == [DQ_TILE, DQ_TILE]

    @property
    def _dq_columns(self) -> list[Slice]:
        """Return the columns of dQ, divided between the warpgroups that form them."""
        if self.two_cta:
            owners = itertools.product(range(2), range(2))
            return [self.dq_tile_2cta(cta, warpgroup).columns for cta, warpgroup in owners]
        starts = range(0, self.head_dim, DQ_TILE)
        return [pl.ds(start, min(DQ_TILE, self.head_dim - start)) for start in starts]

    def dq_tile_2cta(self, cta: Scalar, warpgroup: int) -> DqTile:
        """Return the tile of dQ of a warpgroup in one of two CTAs, each of which has half of the columns. The warpgroup
        that owns dK has what the other one leaves of these."""
        half = self.head_dim // 2
        start = cta * half + (half - DQ_TILE) * warpgroup
        return DqTile(pl.ds(0, DQ_TILE), pl.ds(start, DQ_TILE if warpgroup else half - DQ_TILE))

    def dq_tile(self, index: Scalar) -> DqTile:
        """Return a tile of dQ: up to H = 128 that of a warpgroup. The index may be traced if `symmetric_dq`."""
        if self.symmetric_dq:
            return DqTile(pl.ds(0, DQ_TILE), pl.ds(index * DQ_TILE, DQ_TILE))
        assert isinstance(index, int)
        row, column = divmod(index, len(self._dq_columns))
        return DqTile(pl.ds(row * DQ_TILE, DQ_TILE), self._dq_columns[column])

    def dq_range(self, tile: DqTile) -> Slice:
        """Return where a tile is in the row of a query block's dQ: tiles follow each other, each in the order of
        registers (`register_io.add_fragments`)."""
        first = tile.rows.start * self.head_dim + tile.columns.start * DQ_TILE
        return pl.ds(first, tile.columns.size * DQ_TILE)
