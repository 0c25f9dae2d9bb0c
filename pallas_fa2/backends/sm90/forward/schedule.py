"""Tile sizes of a Hopper forward kernel, and which blocks a CTA takes in which order."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90 import block_mask
from pallas_fa2.backends.sm90.block_mask import BlockMask
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.schedule import raster


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """Which query tiles a CTA takes, and which key blocks a tile visits."""

    spec: KernelSpec
    config: ForwardConfig

    @property
    def q_tiles(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def _l2_head_group(self) -> int:
        p = self.spec
        kv_bytes = 2 * p.kv_len * (self.config.head_dim + self.config.value_dim)
        return raster.heads_per_l2_group(p.kv_heads, kv_bytes, self.config.l2_budget) * p.group

    @property
    def order(self) -> raster.RasterOrder:
        p = self.spec
        return raster.RasterOrder(p.batch, p.q_heads, self.q_tiles, self._l2_head_group, p.causal)

    def tile_scheduler(self, seen: BlockMask | None) -> StaticTileScheduler | DynamicTileScheduler:
        """Which each CTA takes."""
        p = self.spec
        if seen is not None:
            # Elsewhere the 24 registers of the loader hold no claims beside what it knows of a tile.
            if self.config.head_dim == 128 and not p.pairwise_inputs():
                return seen.dynamic_schedule(p.batch, p.q_heads, self.config.num_ctas)
            return seen.static_schedule(
                p.batch, p.q_heads, self._l2_head_group, self.config.num_ctas
            )
        numbers = np.arange(self.order.count, dtype=np.int32)
        _, _, tile = self.order.coordinates(numbers)
        # A tile's beginning and end cost about as much as a block.
        costs, ctas = self.blocks(tile)[0] + 1.0, min(self.config.num_ctas, self.order.count)
        return StaticTileScheduler.deal(numbers[:, None], costs, ctas)

    def blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """How many key blocks a tile visits, and how many of them, the last ones, are cut."""
        p, c = self.spec, self.config
        whole = p.kv_len // c.block_kv
        if p.causal_offset is None:
            return 0 * q_tile + self.kv_blocks, 0 * q_tile + (self.kv_blocks - whole)
        first_row = q_tile * c.block_q
        end = first_row + (c.block_q + p.causal_offset + c.block_kv - 1)
        visited = arithmetic.minimum(arithmetic.div(end, c.block_kv), self.kv_blocks)
        full = arithmetic.minimum(
            arithmetic.div(first_row + (p.causal_offset + 1), c.block_kv), whole
        )
        return visited, visited - full


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A block of query rows of one head."""

    schedule: ForwardSchedule
    tile_id: Any
    counts: Any = None  # under a mask

    @property
    def coordinates(self) -> tuple[Any, Any, Any]:
        """Batch entry, head and block of rows."""
        return self.schedule.order.coordinates(self.tile_id)

    @property
    def kv_head(self) -> Any:
        return arithmetic.div(self.coordinates[1], self.schedule.spec.group)

    @property
    def first_row(self) -> Any:
        return self.coordinates[2] * self.schedule.config.block_q

    @property
    def num_kv_blocks(self) -> Any:
        """How many blocks of keys it sees."""
        return self._blocks[0]

    @property
    def num_full(self) -> Any:
        """How many of them it sees all of."""
        return self.num_kv_blocks - self.num_partial

    @property
    def reverse_kv(self) -> bool:
        """Whether it visits the last block of keys first, and so those that are cut.

        The first blocks give the references of the softmax, and score functions mostly favour near keys:
        after the farthest ones, `alibi` would have exponentials overflow.
        """
        return self.schedule.spec.score is not None

    @property
    def loops(self) -> list[tuple[bool, Any]]:
        """Whether blocks pass through the mask, and where those end that do or do not."""
        if self.reverse_kv:
            return [(True, self.num_partial), (False, self.num_kv_blocks)]
        return [(False, self.num_full), (True, self.num_kv_blocks)]

    def is_partial(self, t: Any) -> Any:
        """Whether the t-th block visited passes through the mask."""
        return t < self.num_partial if self.reverse_kv else t >= self.num_full

    def list_index(self, t: Any) -> Any:
        """Among the blocks of the tile, full ones before those that are cut, the t-th that it visits."""
        return self.num_kv_blocks - 1 - t if self.reverse_kv else t

    @property
    def _blocks(self) -> tuple[Any, Any]:
        if self.counts is None:
            return self.schedule.blocks(self.coordinates[2])
        return block_mask.unpack_counts(self.counts)

    @property
    def num_partial(self) -> Any:
        """How many pass through the mask: those of which it sees a part. Backwards, a full one follows
        them, where rows that have seen no key yet find their reference."""
        visited, cut = self._blocks
        return jnp.where(cut > 0, jnp.minimum(cut + 1, visited), 0) if self.reverse_kv else cut

    @property
    def next_partial(self) -> Any:
        """Of the blocks visited after the first, the first that is cut; if none is, one of them or the first."""
        first = jnp.int32(1) if self.reverse_kv else jnp.maximum(self.num_full, 1)
        return jnp.minimum(first, self.num_kv_blocks - 1)

    @property
    def num_without_aux(self) -> Any:
        """How many blocks come without data: full ones, unless scores read some."""
        return 0 if self.schedule.spec.loads_kv_aux(masked=False) else self.num_full

    def has_aux(self, t: Any) -> Any:
        """Whether data come with the t-th block visited."""
        return (
            t < self.num_kv_blocks - self.num_without_aux
            if self.reverse_kv
            else t >= self.num_without_aux
        )

    def aux_index(self, t: Any) -> Any:
        """With how many of the blocks visited before, data have come."""
        return t if self.reverse_kv else t - self.num_without_aux

    def advance(self, before: tuple[Any, Any]) -> tuple[Any, Any]:
        """With which the next tile begins: of the rings, and of those of data."""
        step, data = before
        if self.schedule.spec.loads_kv_aux():
            data = data + self.num_kv_blocks - self.num_without_aux
        return step + self.num_kv_blocks, data

    def rematerialized(self, zero: Any) -> "QueryTile":
        counts = None if self.counts is None else self.counts + zero
        return dataclasses.replace(self, tile_id=self.tile_id + zero, counts=counts)
