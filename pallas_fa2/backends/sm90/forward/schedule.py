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

    problem: KernelSpec
    config: ForwardConfig

    @property
    def listed(self) -> int:
        """Keys of an entry in lists."""
        return self.config.block_kv // self.problem.parts

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def _section(self) -> int:
        p = self.problem
        kv_bytes = 2 * p.kv_len * (self.config.head_dim + self.config.value_dim)
        return raster.heads_per_l2_group(p.kv_heads, kv_bytes, self.config.section_bytes) * p.group

    @property
    def order(self) -> raster.RasterOrder:
        p = self.problem
        return raster.RasterOrder(p.batch, p.q_heads, self.q_tiles, self._section, p.causal)

    def tiles(self, seen: BlockMask | None) -> StaticTileScheduler | DynamicTileScheduler:
        """Which each CTA takes."""
        p = self.problem
        if seen is not None:
            # Elsewhere the 24 registers of the loader hold no claims beside what it knows of a tile.
            if self.config.head_dim == 128 and not p.pairs():
                return seen.claim(p.batch, p.q_heads, self.config.ctas)
            return seen.deal(p.batch, p.q_heads, self._section, self.config.ctas)
        numbers = np.arange(self.order.count, dtype=np.int32)
        _, _, tile = self.order.place(numbers)
        # A tile's beginning and end cost about as much as a block.
        costs, ctas = self.blocks(tile)[0] + 1.0, min(self.config.ctas, self.order.count)
        return StaticTileScheduler.of(numbers[:, None], costs, ctas)

    def blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """How many key blocks a tile visits, and how many of them, the last ones, are cut."""
        p, c = self.problem, self.config
        whole = p.kv_len // c.block_kv
        if p.offset is None:
            return 0 * q_tile + self.kv_blocks, 0 * q_tile + (self.kv_blocks - whole)
        first_row = q_tile * c.block_q
        end = first_row + (c.block_q + p.offset + c.block_kv - 1)
        visited = arithmetic.minimum(arithmetic.div(end, c.block_kv), self.kv_blocks)
        full = arithmetic.minimum(arithmetic.div(first_row + (p.offset + 1), c.block_kv), whole)
        return visited, visited - full


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A block of query rows of one head."""

    schedule: ForwardSchedule
    number: Any
    counts: Any = None  # under a mask

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Batch entry, head and block of rows."""
        return self.schedule.order.place(self.number)

    @property
    def kv_head(self) -> Any:
        return arithmetic.div(self.place[1], self.schedule.problem.group)

    @property
    def first_row(self) -> Any:
        return self.place[2] * self.schedule.config.block_q

    @property
    def visited(self) -> Any:
        """How many blocks of keys it sees."""
        return self._blocks[0]

    @property
    def full(self) -> Any:
        """How many of them it sees all of."""
        return self.visited - self.cut

    @property
    def backwards(self) -> bool:
        """Whether it visits the last block of keys first, and so those that are cut.

        The first blocks give the references of the softmax, and score functions mostly favour near keys:
        after the farthest ones, `alibi` would have exponentials overflow.
        """
        return self.schedule.problem.score is not None

    @property
    def phases(self) -> list[tuple[bool, Any]]:
        """Whether blocks pass through the mask, and where those end that do or do not."""
        if self.backwards:
            return [(True, self.cut), (False, self.visited)]
        return [(False, self.full), (True, self.visited)]

    def is_cut(self, t: Any) -> Any:
        """Whether the t-th block visited passes through the mask."""
        return t < self.cut if self.backwards else t >= self.full

    def place_of(self, t: Any) -> Any:
        """Among the blocks of the tile, full ones before those that are cut, the t-th that it visits."""
        return self.visited - 1 - t if self.backwards else t

    @property
    def _blocks(self) -> tuple[Any, Any]:
        if self.counts is None:
            return self.schedule.blocks(self.place[2])
        return block_mask.unpack_counts(self.counts)

    @property
    def cut(self) -> Any:
        """How many pass through the mask: those of which it sees a part. Backwards, a full one follows
        them, where rows that have seen no key yet find their reference."""
        visited, cut = self._blocks
        return jnp.where(cut > 0, jnp.minimum(cut + 1, visited), 0) if self.backwards else cut

    @property
    def first_cut_after(self) -> Any:
        """Of the blocks visited after the first, the first that is cut; if none is, one of them or the first."""
        first = jnp.int32(1) if self.backwards else jnp.maximum(self.full, 1)
        return jnp.minimum(first, self.visited - 1)

    @property
    def bare(self) -> Any:
        """How many blocks come without data: full ones, unless scores read some."""
        return 0 if self.schedule.problem.reads_block(masked=False) else self.full

    def has_data(self, t: Any) -> Any:
        """Whether data come with the t-th block visited."""
        return t < self.visited - self.bare if self.backwards else t >= self.bare

    def data_before(self, t: Any) -> Any:
        """With how many of the blocks visited before, data have come."""
        return t if self.backwards else t - self.bare

    def next_steps(self, before: tuple[Any, Any]) -> tuple[Any, Any]:
        """With which the next tile begins: of the rings, and of those of data."""
        step, data = before
        if self.schedule.problem.reads_block():
            data = data + self.visited - self.bare
        return step + self.visited, data

    def shifted(self, zero: Any) -> "QueryTile":
        counts = None if self.counts is None else self.counts + zero
        return dataclasses.replace(self, number=self.number + zero, counts=counts)
