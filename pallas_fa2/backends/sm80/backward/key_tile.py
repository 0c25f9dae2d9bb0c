"""The keys of a CTA of the backward, as `row_schedule.RowTile` has the queries of one."""

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.block_mask import reversed_block_id
from pallas_fa2.backends.common.mask_bits import load_bits
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.tile_list import TileList


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """The keys of a CTA for one query head, and the blocks of that head's queries that visit them.

    The scores of a block are formed in tiles of 64 keys by some queries. Warpgroups divide the keys, or, where they
    divide the columns of dK and dV, the queries.
    """

    schedule: BackwardSchedule
    tiles: TileList | None  # under a general mask
    coordinates: tuple[Any, Any, Any]  # batch entry, head and block of keys
    first_block: Any  # of queries, without a general mask
    num_blocks: Any
    num_full: Any  # under a general mask: the first of them
    warpgroup: Any

    @classmethod
    def load(cls, schedule: BackwardSchedule, tiles: TileList | None) -> "KeyTile":
        """Load what this warpgroup of this CTA has."""
        if tiles is None:
            coordinates = schedule.coordinates(lax.axis_index("cta"))
        else:
            coordinates = tiles.load_coordinates(schedule.spec)
        warpgroup = lax.axis_index("warpgroup") if schedule.config.warpgroups > 1 else I32(0)
        first_block, num_full = I32(0), I32(0)
        if tiles is None:
            first_block = schedule.first_q_block(coordinates[2])
            num_blocks = schedule.q_blocks - first_block
        else:
            num_blocks, num_full = tiles.load_counts()
        return cls(schedule, tiles, coordinates, first_block, num_blocks, num_full, warpgroup)

    @property
    def head(self) -> tuple[Any, Any]:
        """Batch entry and head."""
        return self.coordinates[:2]

    def compute_kv_head(self) -> Any:
        return arithmetic.div(self.coordinates[1], self.schedule.spec.group)

    def compute_first_key(self) -> Any:
        """Return the first key of the CTA, in the sequence."""
        return self.coordinates[2] * self.schedule.config.block_kv

    def load_block_index(self, t: Any) -> Any:
        """Return the block of queries that is visited as the t-th; beyond the last one, any number."""
        if self.tiles is None:
            return self.first_block + t
        entry = self.tiles.load_block_entry(self.coordinates, t)
        return reversed_block_id(entry, self.schedule.q_blocks)

    def is_partial(self, t: Any, i: Any) -> Any:
        """Return whether the mask hides some pair of the block i of queries, the t-th, or None if there is no mask."""
        if self.schedule.spec.mask is not None:
            return t >= self.num_full
        if self.schedule.spec.causal:
            return i < self.schedule.first_full_q_block(self.coordinates[2])
        return None

    def slice_score_rows(self) -> list[Any]:
        """Return the tiles of keys, within the CTA's, whose scores the warpgroup forms."""
        config = self.schedule.config
        first = 0 if config.divides_columns else self.warpgroup * (64 * config.key_tiles)
        return [pl.ds(first + 64 * n, 64) for n in range(config.key_tiles)]

    def slice_score_columns(self) -> list[Any]:
        """Return the queries, within a block, whose scores the warpgroup forms, so many at once."""
        config = self.schedule.config
        size = config.score_columns
        if config.divides_columns:
            return [pl.ds(self.warpgroup * size, size)]
        return layouts.slices(config.block_q, size)

    def load_mask_bits(self, mask_bits: Any, n: int, i: Any, columns: Any) -> list[Any]:
        """Load the bits of the warpgroup's n-th tile of keys and block i of queries, of which those of the first of
        these columns are the highest ones; nothing if the mask is not precomputed."""
        config = self.schedule.config
        if not self.schedule.spec.uses_mask_bits:
            return []
        first = 0 if config.divides_columns else self.warpgroup * config.key_tiles
        batch, _, block = self.coordinates
        bits = load_bits(mask_bits, batch, block, i, first + n)
        # A thread has half a bit a column: 4 values in 8 columns.
        return [word << (columns.start // 2) for word in bits]
