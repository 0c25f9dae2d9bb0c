"""dQ of whole heads, for short sequences: no pass before or after the kernel (docs/decisions/0027-head-per-cta.md).

A CTA takes all key blocks of a head, from the first to the last. So the same thread always sums the same elements of
dQ: the first visit to a query block overwrites what is there, and the last one stores dQ. No other kernel writes zeros,
no CTA waits for another one, the order of additions is the same in every run, and the sums lie in L2, in an array that
CTAs use again for each head.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, IntOrArray, array_namespace
from pallas_fa2.backends.common.block_mask import BlockMask, reversed_classes
from pallas_fa2.backends.common.primitives import layouts, register_io
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.dq.strategy import DqConsumer, DqRequest, DqStrategy
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray
from pallas_fa2.control_flow import cond, rematerialize
from pallas_fa2.ir.block_classes import EMPTY, PARTIAL
from pallas_fa2.schedule import raster

# Bytes of Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2. From there on each step waits
# for L2 or for device memory. (`BackwardConfig.l2_budget` is what the raster order leaves room for.)
L2_LIMIT = 50 << 20
# How much later the last CTA may be done than with tiles dealt one by one, full and causal: less than what is
# saved otherwise.
MAX_SLOWDOWN = 1.05, 1.15
# Heads of a CTA, at least, under a mask: some heads are longer.
MIN_HEADS_PER_CTA = 3


class HeadPerCtaDq(DqStrategy):
    """The strategy in which a CTA has a head to itself, and sums its dQ in an array of its own."""

    summary = "a CTA has all keys of a head, and adds up its dQ in L2, in one order"
    needs_zeros = False

    @classmethod
    def suits(cls, request: DqRequest) -> bool:
        """Return whether L2 has room for whole heads, and they keep CTAs busy."""
        spec, config = request.spec, request.config
        if config.two_cta or not request.visits_empty_blocks:
            return False
        if config.head_per_cta is not None:
            return config.head_per_cta
        heads = HeadSchedule.choose(spec, config)
        if heads.kv_tiles == 1:
            return True
        if heads.bytes_in_l2 > L2_LIMIT:
            return False
        if spec.mask is not None:
            return heads.heads_in_all >= MIN_HEADS_PER_CTA * heads.num_workers
        dealt = heads.tile_scheduler(None)
        assert isinstance(dealt, StaticTileScheduler)
        one_by_one = BackwardSchedule.choose(spec, config).worker_costs()
        return max(dealt.worker_costs) <= MAX_SLOWDOWN[spec.causal] * max(one_by_one)

    @classmethod
    def choose(cls, request: DqRequest) -> "HeadPerCtaDq":
        return cls(HeadSchedule.choose(request.spec, request.config))

    def consumer(self, cta: Cta, warpgroup: WarpgroupIndex) -> DqConsumer:
        return HeadPerCtaConsumer(cta, warpgroup)

    @property
    def accumulator_shape(self) -> tuple[int, int]:
        schedule = cast(HeadSchedule, self.schedule)
        return schedule.num_workers * schedule.accumulator_rows, schedule.dq_shape[1]

    def allocate(
        self, q: jax.Array | SanitizedArray, zeros: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return dQ like q, and the sums of each CTA."""
        return lax.empty(q.shape, q.dtype), lax.empty(self.accumulator_shape, jnp.float32)

    def finish(
        self, dq: jax.Array, workspace: jax.Array | None, q: jax.Array | SanitizedArray
    ) -> jax.Array:
        return dq


class HeadPerCtaConsumer(DqConsumer):
    """A consumer that sums its tiles of dQ, and stores dQ at the last visit to a query block."""

    def open(self) -> Scalar:
        return DqVisit.none().encode()

    def compute_destination(self, step: Step) -> Scalar:
        return cast(HeadSchedule, self.cta.schedule).load_visit(step).encode()

    def add(self, t: Scalar, destination: Scalar, dq: Callable[[], jax.Array]) -> None:
        """Add the tile of dQ, of which the sum before is loaded while products are in flight."""
        schedule = cast(HeadSchedule, self.cta.schedule)
        visit, tile = DqVisit.decode(destination), self.compute_tile()
        columns = self.cta.config.dq_range(tile)
        row = schedule.compute_accumulator_row(visit.dq_block)
        accumulator = self.cta.outputs.dq_workspace.at[row, columns]
        summed = visit.is_last & ~visit.is_first
        before = register_io.take_fragments(accumulator, tile.num_columns, summed)
        value = dq()

        def store() -> None:
            target = self.cta.outputs.dq
            batch, head, first = schedule.locate_q_block(visit.dq_block)
            first += tile.rows.start
            register_io.store_rows(
                target.at[batch, pl.ds(first, tile.rows.size), head],
                ((before + value) * schedule.spec.scale).astype(target.dtype),
                tile.columns.start,
                schedule.spec.q_len - first,
            )

        cond(
            visit.is_last,
            store,
            lambda: register_io.put_fragments(accumulator, value, visit.is_first),
        )


class DqVisit(NamedTuple):
    """A visit of a tile to a query block."""

    dq_block: Scalar
    is_first: jax.Array  # of all visits to the block
    is_last: jax.Array

    @classmethod
    def none(cls) -> "DqVisit":
        """Return a visit before all others: what it leaves is overwritten by the first one."""
        return cls(I32(0), jnp.bool_(True), jnp.bool_(False))

    @classmethod
    def from_flags(cls, dq_block: Scalar, flags: Scalar) -> "DqVisit":
        return cls(dq_block, flags & I32(1) != 0, flags & I32(2) != 0)

    def encode(self) -> jax.Array:
        """Return the visit as one int32, which loops carry."""
        flags = self.is_last.astype(I32) << I32(1) | self.is_first.astype(I32)
        return self.dq_block << I32(2) | flags

    @classmethod
    def decode(cls, code: Scalar) -> "DqVisit":
        return cls.from_flags(code >> I32(2), code)


class HeadBlockMask(NamedTuple):
    """A `BlockMask`, with flags of the first and the last visit to each query block.

    A block that nobody sees is visited once, for its dQ of 0.
    """

    num_blocks: Any
    block_indices: Any
    flags: Any  # int32 [B | 1, heads | 1, tiles, blocks], of a `DqVisit`

    @classmethod
    def from_classes(cls, classes: Any) -> "HeadBlockMask":
        """Return the lists of classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp, (tiles, blocks) = array_namespace(classes), classes.shape[2:]
        first_tile = (np.arange(tiles) == 0).reshape(1, 1, -1, 1)
        last_block = (np.arange(blocks) == blocks - 1).reshape(1, 1, 1, -1)
        never_seen = xp.all(classes == EMPTY, 2, keepdims=True) & first_tile
        sees_nothing = xp.all(classes == EMPTY, 3, keepdims=True) & last_block
        classes = xp.where(never_seen | sees_nothing, np.int32(PARTIAL), classes)
        visited = (classes != EMPTY).astype(np.int32)
        before = xp.cumsum(visited, 2, dtype=np.int32) - visited
        after = xp.sum(visited, 2, keepdims=True, dtype=np.int32) - visited - before
        flags = (before == 0).astype(np.int32) + 2 * (after == 0).astype(np.int32)
        return cls(*BlockMask.from_classes(reversed_classes(classes)), flags)


class HeadSchedule(BackwardSchedule):
    """The order of tiles head by head, from the first keys to the last. A head is a key head, or a split of its
    group."""

    @property
    def bytes_in_l2(self) -> float:
        """Return the bytes of all heads that run at the same time, on the average: under a causal mask, the first
        queries are done before the last."""
        config, tiles = self.config, self.kv_tiles
        row_bytes = 2 * (config.head_dim + config.value_dim) + 4 * config.head_dim
        share = (tiles + 1) / (2 * tiles) if self.spec.causal else 1.0
        return self.num_workers * self.rows_of_head * config.block_q * row_bytes * share

    @property
    def heads_in_all(self) -> int:
        return self.spec.batch * self.heads

    @property
    def num_workers(self) -> int:
        return min(self.config.num_ctas, self.heads_in_all)

    @property
    def order(self) -> raster.RasterOrder:
        return dataclasses.replace(super().order, longest_first=False)

    def coordinates(self, tile_id: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        return self.order.coordinates(tile_id)

    def block_mask(self, classes: Any) -> HeadBlockMask:
        return HeadBlockMask.from_classes(self.classes_by_kv_tile(classes))

    def tile_scheduler(
        self, block_mask: HeadBlockMask | None
    ) -> StaticTileScheduler | DynamicTileScheduler:
        """Return the scheduler that deals heads, or from which CTAs claim them where a mask makes some longer."""
        order, workers = self.order, self.num_workers
        tile_ids = np.arange(order.count, dtype=np.int32)
        if block_mask is not None:
            counts, shape = block_mask.num_blocks, (order.batch, order.heads, order.tiles)
            counts = array_namespace(counts).broadcast_to(counts, shape).reshape(-1)
            return DynamicTileScheduler.build(tile_ids, counts, workers, together=order.tiles)
        cost = float(np.sum(self.count_steps(np.arange(order.tiles)) + 0.5))
        costs = [cost] * self.heads_in_all
        return StaticTileScheduler.deal(tile_ids[:, None], costs, workers, together=order.tiles)

    @property
    def rows_of_head(self) -> int:
        """Return the number of query blocks that the keys of a head meet."""
        return self.group * self.q_blocks

    @property
    def accumulator_rows(self) -> int:
        """Return how many rows of dQ a CTA sums: with one tile a head, only what the step before the first one
        writes."""
        return self.rows_of_head if self.kv_tiles > 1 else 1

    def compute_accumulator_row(self, dq_block: Scalar) -> Scalar:
        # computed anew each time: it would hold registers
        cta = rematerialize(lax.axis_index("cta"))
        return cta * self.accumulator_rows + arithmetic.rem(dq_block, self.accumulator_rows)

    def load_visit(self, step: Step) -> DqVisit:
        """Compute the visit of a step, under a mask from its flags."""
        tile, dq_block = step.tile, step.dq_block
        if tile.block_mask is not None:
            flags = layouts.index_broadcast(tile.block_mask.flags, *tile.compute_coordinates())
            return DqVisit.from_flags(dq_block, flags[arithmetic.rem(dq_block, self.rows_of_head)])
        kv_tile = tile.compute_coordinates()[2]
        is_first = cast(jax.Array, kv_tile == 0)
        return DqVisit(dq_block, is_first, kv_tile == self.last_kv_tile(step.compute_first_query()))
