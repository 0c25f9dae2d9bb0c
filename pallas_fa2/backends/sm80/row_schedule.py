"""Which blocks of keys a block of queries visits: in the forward, and where dQ has a kernel of its own."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.block_mask import block_id
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.mask_bits import load_bits
from pallas_fa2.backends.sm80.multiprocessor import L2_BUDGET
from pallas_fa2.backends.sm80.tile_list import TileList
from pallas_fa2.schedule import raster


class RowConfig(Protocol):
    """A configuration of a kernel whose CTAs have `block_q` queries each and visit blocks of keys.

    An element of K or V is `terms` 16-bit numbers; each warpgroup has `row_tiles` tiles of 64 queries.
    """

    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def terms(self) -> int: ...
    @property
    def warpgroups(self) -> int: ...
    @property
    def row_tiles(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class RowSchedule[C: RowConfig]:
    """The order of CTAs, and the blocks of keys that each visits, where no mask lists them."""

    spec: KernelSpec
    config: C

    @property
    def q_tiles(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def raster_order(self) -> raster.RasterOrder:
        """Return the order of tiles: under a causal mask the last queries of a group of heads come first."""
        spec, dims = self.spec, self.config.head_dim + self.config.value_dim
        kv_bytes = 2 * self.config.terms * spec.kv_len * dims
        heads = raster.heads_per_l2_group(spec.kv_heads, kv_bytes, L2_BUDGET) * spec.group
        return raster.RasterOrder(spec.batch, spec.q_heads, self.q_tiles, heads, spec.causal)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether some block has keys that some row does not see, or that do not exist."""
        spec = self.spec
        return spec.causal or spec.mask is not None or spec.kv_len % self.config.block_kv != 0

    def block_counts(self, q_tile: jax.Array) -> tuple[Any, Any]:
        """Return how many blocks of keys a tile visits, and how many of these, the first ones, are full."""
        block_q, block_kv = self.config.block_q, self.config.block_kv
        whole, offset = self.spec.kv_len // block_kv, self.spec.causal_offset
        if offset is None:
            return I32(self.kv_blocks), I32(whole)
        # Row i sees the first i + offset + 1 keys. The last row's, rounded up to blocks, are visited, the first row's
        # are full.
        first_row = q_tile * block_q
        end = first_row + (block_q + offset + block_kv - 1)
        visited = jnp.minimum(arithmetic.div(end, block_kv), self.kv_blocks)
        full = jnp.minimum(arithmetic.div(first_row + (offset + 1), block_kv), whole)
        return visited, full


@dataclasses.dataclass(frozen=True)
class RowTile[C: RowConfig]:
    """The queries of a CTA, of which each warpgroup has some tiles of 64, and the blocks of keys that they visit."""

    schedule: RowSchedule[C]
    tiles: TileList | None  # under a mask
    coordinates: tuple[Any, Any, Any]  # batch entry, head and tile
    num_blocks: Any
    num_full: Any  # of them, the first ones
    warpgroup: Any

    @classmethod
    def load(cls, schedule: RowSchedule[C], tiles: TileList | None) -> "RowTile[C]":
        """Load what this warpgroup of this CTA has."""
        if tiles is None:
            coordinates = schedule.raster_order.coordinates(lax.axis_index("cta"))
        else:
            coordinates = tiles.load_coordinates(schedule.spec)
        warpgroup = lax.axis_index("warpgroup") if schedule.config.warpgroups > 1 else I32(0)
        counts = schedule.block_counts(coordinates[2]) if tiles is None else tiles.load_counts()
        return cls(schedule, tiles, coordinates, *counts, warpgroup)

    @property
    def head(self) -> tuple[Any, Any]:
        """Batch entry and head."""
        return self.coordinates[:2]

    def compute_kv_head(self) -> Any:
        return arithmetic.div(self.coordinates[1], self.schedule.spec.group)

    def compute_first_row(self) -> Any:
        """Return the first row of the CTA, in the sequence."""
        return self.coordinates[2] * self.schedule.config.block_q

    def compute_row(self, n: int) -> Any:
        """Return the first row of the warpgroup's n-th tile, in the sequence."""
        return self.compute_first_row() + self._row_in_cta(n)

    def own_rows(self, buffer: Any, n: int) -> Any:
        """Return the rows of the warpgroup's n-th tile."""
        return buffer.at[pl.ds(self._row_in_cta(n), 64)]

    def _row_in_cta(self, n: int) -> Any:
        return self.warpgroup * (64 * self.schedule.config.row_tiles) + 64 * n

    def load_block_index(self, t: Any) -> Any:
        """Return the block of keys that is visited as the t-th; beyond the last one, any number."""
        if self.tiles is None:
            return t
        return block_id(self.tiles.load_block_entry(self.coordinates, t))

    def load_mask_bits(self, mask_bits: Any, n: int, j: Any) -> Any:
        """Load the bits of the n-th tile's rows and the keys of block j."""
        batch, _, tile = self.coordinates
        fragment = self.warpgroup * self.schedule.config.row_tiles + n
        return load_bits(mask_bits, batch, tile, j, fragment)
