"""A Hopper backward whose CTAs take whole heads, for short sequences: dQ needs no passes before and after.

A CTA takes all blocks of keys of a head, from the first to the last. So the same thread always adds up the same
numbers of dQ: the first visit to a block of queries replaces what lies there, and the last one stores dQ. No other
kernel writes zeros, none waits for what is complete, the order of additions is the same in every run, and what is
added up lies in L2, in an array that CTAs use again for each head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import tile_order_kernel
from pallas_fa2.backends.common.block_mask import BlockMask, reversed_classes
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule, KvTile, Step
from pallas_fa2.ir.block_classes import EMPTY, PARTIAL
from pallas_fa2.schedule import raster

# Of 60 MB of L2: Q, dO and float32 dQ of the heads that run at the same time. From there on each step waits for
# L2 or for device memory (docs/decisions/0027-head-per-cta.md).
L2_LIMIT = 50 << 20
# How much later the last CTA may be done than with tiles dealt one by one, full and causal: less than what is
# saved otherwise.
MAX_SLOWDOWN = 1.05, 1.15
# Under a mask, how many heads a CTA has at least: some are longer.
MIN_HEADS_PER_CTA = 3


class DqVisit(NamedTuple):
    """Of a block of queries by a block of keys."""

    row: Any  # of all blocks of queries
    first: Any  # whether no other comes before, or after
    last: Any

    @classmethod
    def none(cls) -> "DqVisit":
        """One before all others leaves what the first one replaces."""
        return cls(I32(0), jnp.bool_(True), jnp.bool_(False))

    @classmethod
    def of(cls, row: Any, flags: Any) -> "DqVisit":
        return cls(row, flags & I32(1) != 0, flags & I32(2) != 0)

    @property
    def encoded(self) -> Any:
        """As one number, which loops carry."""
        flags = self.last.astype(I32) << I32(1) | self.first.astype(I32)
        return self.row << I32(2) | flags

    @classmethod
    def decode(cls, number: Any) -> "DqVisit":
        return cls.of(number >> I32(2), number)


class HeadBlockMask(NamedTuple):
    """`Visits`, and which of them are the first or the last to their block. Each block has one: its dQ is 0 if nobody
    sees it."""

    num_blocks: Any
    block_indices: Any
    flags: Any  # int32 [B | 1, heads | 1, tiles, blocks], of a `Visit`

    @classmethod
    def of(cls, classes: Any) -> "HeadBlockMask":
        """From the classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp = tile_order_kernel.array_namespace(classes)
        tiles, blocks = classes.shape[2:]
        first_tile = (np.arange(tiles) == 0).reshape(1, 1, -1, 1)
        last_block = (np.arange(blocks) == blocks - 1).reshape(1, 1, 1, -1)
        nobody = xp.all(classes == EMPTY, 2, keepdims=True) & first_tile
        nothing = xp.all(classes == EMPTY, 3, keepdims=True) & last_block
        classes = xp.where(nobody | nothing, np.int32(PARTIAL), classes)
        there = (classes != EMPTY).astype(np.int32)
        before = xp.cumsum(there, 2, dtype=np.int32) - there
        after = xp.sum(there, 2, keepdims=True, dtype=np.int32) - there - before
        flags = (before == 0).astype(np.int32) + 2 * (after == 0).astype(np.int32)
        return cls(*BlockMask.from_classes(reversed_classes(classes)), flags)


class HeadPerCtaSchedule(BackwardSchedule):
    """Tiles are numbered head by head, from the first keys to the last; a head is one of keys, or a part of its
    group of queries' heads."""

    ARRAYS = "block_indices", "flags"
    NEEDS_ZEROS = False
    DQ_ACCUMULATION = "a CTA has all keys of a head, and adds up its dQ in L2, in one order"

    @classmethod
    def suits(cls, problem: KernelSpec, config: BackwardConfig) -> bool:
        """Whether L2 has room for whole heads, and they keep CTAs busy."""
        if config.two_cta:
            return False
        if config.head_per_cta is not None:
            return config.head_per_cta
        heads = cls.choose(problem, config)
        if heads.kv_tiles == 1:
            return True
        if heads.bytes_in_l2 > L2_LIMIT:
            return False
        if problem.mask is not None:
            return heads.heads_in_all >= MIN_HEADS_PER_CTA * heads.num_workers
        tiles = BackwardSchedule.choose(problem, config)
        dealt = heads.tile_scheduler(None)
        assert isinstance(dealt, StaticTileScheduler)
        return max(dealt.worker_costs) <= MAX_SLOWDOWN[problem.causal] * max(tiles.worker_costs)

    @property
    def bytes_in_l2(self) -> float:
        """On the average: under a causal mask, the first queries are done before the last."""
        config, tiles = self.config, self.kv_tiles
        row_bytes = 2 * (config.head_dim + config.value_dim) + 4 * config.head_dim
        part = (tiles + 1) / (2 * tiles) if self.spec.causal else 1.0
        return self.num_workers * self.rows_of_head * config.block_q * row_bytes * part

    @property
    def heads_in_all(self) -> int:
        return self.order.batch * self.order.heads

    @property
    def num_workers(self) -> int:
        return min(self.config.num_ctas, self.heads_in_all)

    @property
    def order(self) -> raster.RasterOrder:
        return dataclasses.replace(super().order, longest_first=False)

    def coordinates(self, number: Any) -> tuple[Any, Any, Any]:
        return self.order.coordinates(number)

    def tile(self, k: Any, first_step: Any, entry: list[Any], **arrays: Any) -> "HeadTile":
        return HeadTile(self, k, first_step, *self.known(entry), **arrays)

    def block_mask(self, classes: Any) -> HeadBlockMask:  # pyright: ignore[reportIncompatibleMethodOverride]
        return HeadBlockMask.of(self.classes_by_kv_tile(classes))

    def tile_scheduler(self, seen: Any) -> StaticTileScheduler | DynamicTileScheduler:
        """Dealt, or claimed head by head where masks make some longer."""
        order = self.order
        numbers = np.arange(order.count, dtype=np.int32)
        if seen is not None:
            shape = order.batch, order.heads, order.tiles
            counts = (
                tile_order_kernel.array_namespace(seen.num_blocks)
                .broadcast_to(seen.num_blocks, shape)
                .reshape(-1)
            )
            return DynamicTileScheduler.build(
                numbers, counts, self.num_workers, together=order.tiles
            )
        cost = float(np.sum(self.num_steps(np.arange(order.tiles)) + 0.5))
        costs = [cost] * self.heads_in_all
        return StaticTileScheduler.deal(
            numbers[:, None], costs, self.num_workers, together=order.tiles
        )

    @property
    def rows_of_head(self) -> int:
        """Blocks of queries that a head's keys meet."""
        return self.group * self.q_blocks

    @property
    def _partial_rows(self) -> int:
        """What has one visit alone is not added up; before the first tile, a row is written all the same."""
        return self.rows_of_head if self.kv_tiles > 1 else 1

    @property
    def accumulator_shape(self) -> tuple[int, int]:
        """Of what CTAs add up, of a head each."""
        return self.num_workers * self._partial_rows, self.dq_shape[1]

    def partial_row(self, row: Any) -> Any:
        # computed anew each time: it would hold registers
        cta = lax.optimization_barrier(lax.axis_index("cta"))
        return cta * self._partial_rows + arithmetic.rem(row, self._partial_rows)

    def visit(self, step: Step) -> DqVisit:
        if isinstance(step.tile, HeadTile) and step.tile.flags is not None:
            flags = layouts.index_broadcast(step.tile.flags, *step.tile.coordinates)
            return DqVisit.of(
                step.dq_block, flags[arithmetic.rem(step.dq_block, self.rows_of_head)]
            )
        tile = step.tile.coordinates[2]
        return DqVisit(step.dq_block, tile == 0, tile == self.last_kv_tile(step.first_query))


@dataclasses.dataclass(frozen=True)
class HeadTile(KvTile):
    flags: Any = None
