"""Which blocks of keys a CTA of the Hopper backward takes, and which queries each meets."""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common import tile_order_kernel
from pallas_fa2.backends.common.block_mask import (
    BlockMask,
    reversed_block_id,
    reversed_classes,
    unpack_counts,
)
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.schedule import raster
from pallas_fa2.schedule.raster import list_schedule

# How much later than an even division the last CTA may be done, before tiles are divided.
MAX_IMBALANCE = 1.05


@dataclasses.dataclass(frozen=True)
class BackwardSchedule:
    """Which key blocks a CTA takes, and which query blocks of which heads each visits.

    A group's query heads may be divided into parts, with a tile for each: otherwise few key heads would
    leave CTAs idle.
    """

    spec: KernelSpec
    config: BackwardConfig
    group_splits: int = 1

    # Under a mask, the fields of `seen` that tiles read; its counts are in their entries.
    ARRAYS: ClassVar[tuple[str, ...]] = ("block_indices",)
    # Whether dQ is added to zeros that another kernel has written.
    NEEDS_ZEROS: ClassVar[bool] = True
    # How dQ is accumulated, to which tiles of several CTAs add.
    DQ_ACCUMULATION: ClassVar[str] = "float32 dQ, atomic additions in any order"

    @classmethod
    def choose(cls, problem: KernelSpec, config: BackwardConfig, classes: Any = None) -> Self:
        """With the fewest parts that keep all CTAs busy, as far as classes of tiles are known."""
        group = problem.group
        schedules = [cls(problem, config, n) for n in range(1, group + 1) if group % n == 0]
        found = (s for s in schedules[:-1] if s._imbalance(classes) <= MAX_IMBALANCE)
        return next(found, schedules[-1])

    @property
    def group(self) -> int:
        """The query heads of a tile."""
        return self.spec.group // self.group_splits

    @property
    def heads(self) -> int:
        """Key heads, counted once for each part of their groups."""
        return self.spec.kv_heads * self.group_splits

    @property
    def kv_tiles(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def order(self) -> raster.RasterOrder:
        p = self.spec
        # Q, dO and the float32 dQ of a head: the group's heads follow each other.
        q_bytes = p.q_len * self.config.head_dim * (2 + 2 + 4)
        section = raster.heads_per_l2_group(self.heads, q_bytes, self.config.l2_budget)
        return raster.RasterOrder(p.batch, self.heads, self.kv_tiles, section, p.causal)

    def coordinates(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch entry, head and key block of a tile; the first block of a head is the longest."""
        batch, head, tile = self.order.coordinates(number)
        return batch, head, self.kv_tiles - 1 - tile if self.spec.causal else tile

    def tile_scheduler(self, seen: Any) -> StaticTileScheduler | DynamicTileScheduler:
        """Which each CTA takes; `seen` is what each visits, if there is a mask."""
        if seen is not None:
            order = self.order
            # Of a group or its part a tile visits all heads, of which L2 holds few; data of pairs leave no registers.
            if self.spec.group == 1 and not self.spec.pairwise_inputs():
                return seen.dynamic_schedule(order.batch, order.heads, self.num_workers)
            return seen.static_schedule(
                order.batch, order.heads, order.l2_head_group, self.num_workers
            )
        numbers = np.arange(self.order.count, dtype=np.int32)
        if self.uses_dynamic:
            return DynamicTileScheduler.build(numbers, 0 * numbers, self.num_workers)
        return StaticTileScheduler.deal(numbers[:, None], self._costs, self.num_workers)

    def block_mask(self, classes: Any) -> BlockMask:
        """The blocks of queries that each block of keys visits, of all heads of a group's part, by their
        distance from the last; from the classes `[B | 1, N | 1, T tiles, S tiles]`.

        From the last: where the last queries see keys far apart, tiles of those meet them together, and
        find in L2 what each other has loaded.
        """
        return BlockMask.from_classes(reversed_classes(self.classes_by_kv_tile(classes)))

    def arrays(self, of: Any) -> dict[str, Any]:
        return {name: getattr(of, name) for name in self.ARRAYS}

    def classes_by_kv_tile(self, classes: Any) -> Any:
        """`[B | 1, heads | 1, S tiles, blocks of queries of all heads of a group's part]`."""
        xp = tile_order_kernel.array_namespace(classes)
        batch, each, q_tiles, kv_tiles = classes.shape
        heads = 1 if each == 1 else self.heads
        shape = (batch, heads, self.group, q_tiles, kv_tiles)
        classes = classes.reshape(batch, heads, -1, q_tiles, kv_tiles)
        classes = xp.moveaxis(xp.broadcast_to(classes, shape), -1, 2)
        return classes.reshape(batch, heads, kv_tiles, -1)

    @property
    def uses_dynamic(self) -> bool:
        """Whether CTAs claim tiles where they could be dealt as well: some are slower than others.

        (At H = 64 by up to 14 %, through all of a kernel, by how their two warpgroups happen to meet.)
        Not tiles that are soon over, as a claim is answered after a step; nor equal ones that come out
        even, as the faster CTAs would take one more. Nor under data of pairs, which leave no registers.
        """
        even = not self.spec.causal and self.order.count % self.num_workers == 0
        long = self.spec.q_len * self.group >= 2048
        return long and not even and not self.spec.pairwise_inputs()

    def tile(self, k: Any, first_step: Any, entry: list[Any], **arrays: Any) -> "KvTile":
        """A CTA's k-th, of its entry in the table."""
        return KvTile(self, k, first_step, *self.known(entry), **arrays)

    def known(self, entry: list[Any]) -> list[Any]:
        """A tile's number, and under a mask its counts."""
        return entry if self.spec.mask is not None else entry[:1]

    def block(self, listed: Any) -> Any:
        """Of queries, by an entry of a tile's list."""
        return reversed_block_id(listed, self.group * self.q_blocks)

    @property
    def num_workers(self) -> int:
        """CTAs, or pairs of them, that share the tiles."""
        return min(self._max_workers, self.order.count)

    @property
    def _max_workers(self) -> int:
        return self.config.num_ctas // (2 if self.config.two_cta else 1)

    @property
    def _costs(self) -> np.ndarray:
        """Of the tiles; their beginnings and ends cost about half a step."""
        _, _, kv_tile = self.coordinates(np.arange(self.order.count))
        return self.num_steps(kv_tile) + 0.5

    def _imbalance(self, classes: Any) -> float:
        """When the last CTA is done, by when all would be if they could share everything."""
        if isinstance(classes, np.ndarray):
            dealt = self.tile_scheduler(self.block_mask(classes))
            assert isinstance(dealt, StaticTileScheduler)
            loads = dealt.worker_costs
        else:
            loads = self.worker_costs
        return max(loads) * self._max_workers / sum(loads)

    @property
    def worker_costs(self) -> list[float]:
        """Of CTAs, without a mask."""
        return list_schedule(self._costs, self._max_workers)[1]

    def first_q_block(self, kv_tile: Any) -> Any:
        """The first whose queries see the block's first key."""
        if self.spec.causal_offset is None:
            return 0 * kv_tile
        first_key = kv_tile * self.config.block_kv
        first_query = arithmetic.maximum(first_key - self.spec.causal_offset, 0)
        return arithmetic.div(first_query, self.config.block_q)

    def num_steps(self, kv_tile: Any) -> Any:
        """At least one."""
        return (self.q_blocks - self.first_q_block(kv_tile)) * self.group

    @property
    def kv_tail_visible(self) -> bool:
        """Whether queries see keys past the end, of the last block: zeros that nothing hides."""
        p = self.spec
        ragged = p.kv_len % self.config.block_kv != 0
        return ragged and (p.causal_offset is None or p.q_len + p.causal_offset > p.kv_len)

    @property
    def has_partial(self) -> bool:
        """Whether there are blocks of which something is hidden, without a mask but a causal one."""
        return self.spec.causal or self.kv_tail_visible

    @property
    def separate_partial_loop(self) -> bool:
        """Whether they have a loop of their own: at H = 64 and 256 it is no faster, and more is put
        aside, as where there are data of pairs."""
        return (
            self.has_partial
            and self.config.head_dim in (96, 128)
            and not self.spec.pairwise_inputs()
        )

    @property
    def shared_consumer_code(self) -> bool:
        """Whether both warpgroups that multiply share their code: a call with gradients compiles in 0.7 of the time.

        At H = 64 it would run at 0.986 to 0.995 of the speed, documents at 0.995. And data of pairs come in rings
        of each warpgroup.
        """
        p = self.spec
        return self.config.symmetric_dq and p.mask is None and not p.pairwise_inputs()

    def steps_of_head(self, kv_tile: Any) -> tuple[Any, Any]:
        """How many blocks a head has, and how many of them, the first ones, are cut."""
        first, c = self.first_q_block(kv_tile), self.config
        steps, cut = self.q_blocks - first, 0 * kv_tile
        if self.spec.causal:
            past_last_key = (kv_tile + 1) * c.block_kv - self.spec.causal_offset
            first_full = arithmetic.div(
                arithmetic.maximum(past_last_key + c.block_q - 2, 0), c.block_q
            )
            cut = arithmetic.minimum(first_full - first, steps)
        if self.kv_tail_visible:
            cut = jnp.where(kv_tile == self.kv_tiles - 1, steps, cut)
        return steps, cut

    def last_kv_tile(self, first_query: Any) -> Any:
        """The last whose first key the last query of a block sees; the block begins with `first_query`."""
        last = self.kv_tiles - 1
        if self.spec.causal_offset is None:
            return last
        end = first_query + self.config.block_q + (self.spec.causal_offset - 1)
        return arithmetic.minimum(arithmetic.div(end, self.config.block_kv), last)

    def queries(self, row: Any) -> tuple[Any, Any, Any]:
        """Batch entry, head and first query of a block, of all blocks."""
        shape = self.spec.batch, self.spec.q_heads, self.q_blocks
        batch, head, block = arithmetic.unravel(row, shape)
        return batch, head, block * self.config.block_q

    @property
    def blocks(self) -> int:
        """Of queries, of all heads."""
        return self.spec.batch * self.spec.q_heads * self.q_blocks

    @property
    def dq_shape(self) -> tuple[int, int]:
        """A row for each block of queries of each head, and one for what is no gradient."""
        return self.blocks + 1, self.config.block_q * self.config.head_dim

    @property
    def accumulator_shape(self) -> tuple[int, int]:
        """Of the float32 array in device memory where dQ is accumulated."""
        return self.dq_shape

    @property
    def workspace_bytes(self) -> int:
        """Of float32 arrays beside inputs and gradients: dQ, delta and lse. (Shares of dK and dV, lists of tiles
        and order words come to less, and are left out.)"""
        return 4 * (math.prod(self.accumulator_shape) + 2 * self.blocks * self.config.block_q)

    def combine_splits(self, gradient: list[jax.Array]) -> jax.Array:
        """`[B, S, K, H]` from the numbers that make up dK or dV, and the parts of each group."""
        if self.group_splits == 1:
            return gradient[0]
        batch, length, _, dim = gradient[0].shape
        total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in gradient))
        total = total.reshape(batch, length, self.spec.kv_heads, self.group_splits, dim).sum(3)
        return total.astype(gradient[0].dtype)


@dataclasses.dataclass(frozen=True)
class KvTile:
    """A block of keys, and the query blocks that see it, of all heads of its group."""

    schedule: BackwardSchedule
    k: Any  # of the CTA's tiles, this one
    first_step: Any  # steps count through all tiles of a CTA
    tile_id: Any
    # under a mask
    counts: Any = None
    block_indices: Any = None

    @property
    def coordinates(self) -> tuple[Any, Any, Any]:
        """Batch entry, head and key block."""
        return self.schedule.coordinates(self.tile_id)

    @property
    def kv_head(self) -> Any:
        return arithmetic.div(self.coordinates[1], self.schedule.group_splits)

    @property
    def first_key(self) -> Any:
        return self.coordinates[2] * self.schedule.config.block_kv

    @property
    def next_step(self) -> Any:
        """Of the next tile, the first."""
        if self.counts is None:
            return self.first_step + self.schedule.num_steps(self.coordinates[2])
        return self.first_step + unpack_counts(self.counts)[0]

    @property
    def first_partial(self) -> Any:
        """Of the steps whose scores pass through the mask, the first."""
        return self.next_step - unpack_counts(self.counts)[1]

    def _row_of(self, group_head: int, block: Any) -> Any:
        """Of dQ; blocks of queries are numbered through all heads of all batch entries."""
        batch, head, _ = self.coordinates
        head = batch * self.schedule.spec.q_heads + head * self.schedule.group + group_head
        return head * self.schedule.q_blocks + block

    def kv_list(self, t: Any) -> Any:
        """The list's entry of step t; of the one after the last, whatever follows there."""
        place = arithmetic.minimum(t - self.first_step, self.block_indices.shape[-1] - 1)
        return layouts.index_broadcast(self.block_indices, *self.coordinates)[place]

    def _listed_row(self, t: Any) -> Any:
        return self._row_of(0, self.schedule.block(self.kv_list(t)))

    @property
    def first_row(self) -> Any:
        if self.block_indices is not None:
            return self._listed_row(self.first_step)
        return self._row_of(0, self.schedule.first_q_block(self.coordinates[2]))

    @property
    def last_row(self) -> Any:
        if self.block_indices is not None:
            return self._listed_row(self.next_step - 1)
        return self._row_of(self.schedule.group, -1)

    def row_after(self, t: Any, row: Any) -> Any:
        """After step t, whose row is given."""
        blocks = self.schedule.q_blocks
        if self.block_indices is not None:
            return self._listed_row(t + 1)
        if self.schedule.group == 1 or not self.schedule.spec.causal:
            return row + 1
        hidden = self.schedule.first_q_block(self.coordinates[2])  # of the next head
        return row + 1 + jnp.where(arithmetic.rem(row, blocks) == blocks - 1, hidden, 0)

    def each_step(self, body: Any, carry: Any = None, apart: bool = False) -> Any:
        """carry = body(step, carry), over the group's heads and their blocks.

        With `apart`, a loop for full blocks and a loop for those of which something is hidden.
        """
        state, cuts = (self.first_row, carry), self.schedule.has_partial
        if self.block_indices is None and apart and self.schedule.separate_partial_loop:
            return self._each_head(body, state)[1]
        if self.block_indices is None or not apart:
            return self.loop(body, self.first_step, self.next_step, cuts, state)[1]
        state = self.loop(body, self.first_step, self.first_partial, False, state)
        return self.loop(body, self.first_partial, self.next_step, True, state)[1]

    def _each_head(self, body: Any, state: tuple) -> tuple:
        """Of a group's heads one after another, the blocks that are cut and then the others."""
        steps, cut = self.schedule.steps_of_head(self.coordinates[2])

        def head(number: Any, state: tuple) -> tuple:
            first = self.first_step + number * steps
            state = self.loop(body, first, first + cut, True, state)
            return self.loop(body, first + cut, first + steps, False, state)

        if self.schedule.group == 1:
            return head(0, state)
        return lax.fori_loop(0, self.schedule.group, head, state)

    def loop(self, body: Any, first: Any, end: Any, masked: bool, state: tuple) -> tuple:
        """The row and the carry, after some steps that are masked or not."""

        def step(t: Any, state: tuple) -> tuple:
            row, carry = state
            return self.row_after(t, row), body(Step(self, t, row, masked), carry)

        return lax.fori_loop(first, end, step, state)


class Step(NamedTuple):
    """One block of queries against one block of keys."""

    tile: KvTile
    global_step: Any
    dq_block: Any  # of dQ
    masked: bool  # whether something is hidden

    @property
    def first(self) -> Any:
        return self.global_step == self.tile.first_step

    @property
    def last(self) -> Any:
        return self.global_step == self.tile.next_step - 1

    @property
    def next(self) -> "Step":
        """Of the same tile."""
        return self._replace(
            global_step=self.global_step + 1,
            dq_block=self.tile.row_after(self.global_step, self.dq_block),
        )

    @property
    def head(self) -> tuple[Any, Any]:
        """Batch entry and query head."""
        schedule = self.tile.schedule
        head, heads = arithmetic.div(self.dq_block, schedule.q_blocks), schedule.spec.q_heads
        return arithmetic.div(head, heads), arithmetic.rem(head, heads)

    @property
    def first_query(self) -> Any:
        schedule, tile = self.tile.schedule, self.tile
        if schedule.group == 1 and tile.block_indices is None:
            # no division, whose numbers would hold registers
            block = self.global_step - tile.first_step + schedule.first_q_block(tile.coordinates[2])
        else:
            block = arithmetic.rem(lax.optimization_barrier(self.dq_block), schedule.q_blocks)
        return lax.optimization_barrier(block) * schedule.config.block_q
