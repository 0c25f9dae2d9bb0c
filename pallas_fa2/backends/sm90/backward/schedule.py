"""The tiles that each CTA of the backward takes, and the query blocks that each tile visits."""

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import IntOrArray, array_namespace
from pallas_fa2.backends.common.block_mask import BlockMask, reversed_block_id, reversed_classes
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward import group_splits
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.schedule import raster
from pallas_fa2.schedule.raster import list_schedule


@dataclasses.dataclass(frozen=True)
class BackwardSchedule:
    """The order of tiles, each a block of keys, and the query blocks of each where no mask lists them."""

    spec: KernelSpec
    config: BackwardConfig
    group_splits: int = 1  # tiles that share a key block, each with some of its group's query heads

    @classmethod
    def choose(cls, spec: KernelSpec, config: BackwardConfig, classes: Any = None) -> Self:
        """Return the schedule with the fewest splits of a group that keep all CTAs busy."""
        splits = (n for n in range(1, spec.group + 1) if spec.group % n == 0)
        return group_splits.first_balanced([cls(spec, config, n) for n in splits], classes)

    @property
    def group(self) -> int:
        """Return the number of query heads of a tile."""
        return self.spec.group // self.group_splits

    @property
    def heads(self) -> int:
        """Return the number of key heads, each counted once for each split of its group."""
        return self.spec.kv_heads * self.group_splits

    @property
    def kv_tiles(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def q_blocks(self) -> int:
        """Return the number of query blocks of a head."""
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def num_q_blocks(self) -> int:
        """Return the number of query blocks of all heads."""
        return self.spec.batch * self.spec.q_heads * self.q_blocks

    @property
    def dq_shape(self) -> tuple[int, int]:
        """Return the shape of a float32 dQ: a row for each query block of each head, and one for no gradient's."""
        return self.num_q_blocks + 1, self.config.block_q * self.config.head_dim

    @property
    def order(self) -> raster.RasterOrder:
        p = self.spec
        # Q, dO and the float32 dQ of a head: the group's heads follow each other.
        q_bytes = p.q_len * self.config.head_dim * (2 + 2 + 4)
        l2_head_group = raster.heads_per_l2_group(self.heads, q_bytes, self.config.l2_budget)
        return raster.RasterOrder(p.batch, self.heads, self.kv_tiles, l2_head_group, p.causal)

    def coordinates(self, tile_id: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        """Return the batch entry, the head and the key block of a tile; the first block of a head is the longest."""
        batch, head, tile = self.order.coordinates(tile_id)
        return batch, head, self.kv_tiles - 1 - tile if self.spec.causal else tile

    @property
    def max_workers(self) -> int:
        return self.config.num_ctas // (2 if self.config.two_cta else 1)

    @property
    def num_workers(self) -> int:
        """Return the number of CTAs, or pairs of them, that share the tiles."""
        return min(self.max_workers, self.order.count)

    @property
    def uses_dynamic(self) -> bool:
        """Return whether CTAs claim tiles that could be dealt as well, because some CTAs are slower than others.

        (At H = 64 by up to 14 %, through all of a kernel, by how their two warpgroups happen to meet.)
        Tiles that are soon over are dealt, as a claim is answered after a step; so are equal ones that come out
        even, as the faster CTAs would take one more, and those with pairwise inputs, which leave no registers.
        """
        even = not self.spec.causal and self.order.count % self.num_workers == 0
        long = self.spec.q_len * self.group >= 2048
        return long and not even and not self.spec.pairwise_inputs()

    def tile_scheduler(self, block_mask: Any) -> StaticTileScheduler | DynamicTileScheduler:
        """Return the scheduler that gives each CTA its tiles; under a mask by what each tile visits."""
        order, workers = self.order, self.num_workers
        if block_mask is not None:
            # A tile visits all heads of a group, of which L2 holds few; pairwise inputs leave no registers.
            if self.spec.group == 1 and not self.spec.pairwise_inputs():
                return block_mask.dynamic_schedule(order.batch, order.heads, workers)
            return block_mask.static_schedule(
                order.batch, order.heads, order.l2_head_group, workers
            )
        tile_ids = np.arange(order.count, dtype=np.int32)
        if self.uses_dynamic:
            return DynamicTileScheduler.build(tile_ids, 0 * tile_ids, workers)
        return StaticTileScheduler.deal(tile_ids[:, None], self._tile_costs(), workers)

    def worker_costs(self, classes: Any = None) -> list[float]:
        """Return when CTAs are done if tiles are dealt, in steps, by known classes of tiles or without a mask."""
        if isinstance(classes, np.ndarray):
            scheduler = self.tile_scheduler(self.block_mask(classes))
            assert isinstance(scheduler, StaticTileScheduler)
            return scheduler.worker_costs
        return list_schedule(self._tile_costs(), self.max_workers)[1]

    def _tile_costs(self) -> np.ndarray:
        """Return the steps of each tile; its prologue and epilogue cost about half a step."""
        _, _, kv_tile = self.coordinates(np.arange(self.order.count))
        return self.count_steps(kv_tile) + 0.5

    def block_mask(self, classes: Any) -> Any:
        """Return the query blocks that each tile visits, from the classes `[B | 1, N | 1, T tiles, S tiles]`.

        Those of a tile's query heads follow each other, and are listed by their distance from the last one. So where
        the last queries see keys far apart, tiles of those meet them together, and find in L2 what each other has
        loaded.
        """
        return BlockMask.from_classes(reversed_classes(self.classes_by_kv_tile(classes)))

    def classes_by_kv_tile(self, classes: Any) -> Any:
        """Return the classes as `[B | 1, heads | 1, S tiles, query blocks of all query heads of a tile]`."""
        xp = array_namespace(classes)
        batch, distinct_heads, q_tiles, kv_tiles = classes.shape
        heads = 1 if distinct_heads == 1 else self.heads
        shape = (batch, heads, self.group, q_tiles, kv_tiles)
        classes = classes.reshape(batch, heads, -1, q_tiles, kv_tiles)
        classes = xp.moveaxis(xp.broadcast_to(classes, shape), -1, 2)
        return classes.reshape(batch, heads, kv_tiles, -1)

    def decode_q_block(self, list_entry: IntOrArray) -> IntOrArray:
        """Return the query block, of those of all query heads of a tile, that an entry of a tile's list stands for."""
        return reversed_block_id(list_entry, self.group * self.q_blocks)

    def first_q_block(self, kv_tile: IntOrArray) -> IntOrArray:
        """Return the first query block that sees the first key of a tile."""
        if self.spec.causal_offset is None:
            return 0 * kv_tile
        first_key = kv_tile * self.config.block_kv
        first_query = arithmetic.maximum(first_key - self.spec.causal_offset, 0)
        return arithmetic.div(first_query, self.config.block_q)

    def count_steps(self, kv_tile: IntOrArray) -> IntOrArray:
        """Return how many query blocks a tile visits, of all its query heads: at least one."""
        return (self.q_blocks - self.first_q_block(kv_tile)) * self.group

    def count_head_steps(self, kv_tile: IntOrArray) -> tuple[IntOrArray, IntOrArray]:
        """Return how many query blocks of a head a tile visits, and how many of them, the first ones, are partial."""
        first, c = self.first_q_block(kv_tile), self.config
        steps, partial = self.q_blocks - first, 0 * kv_tile
        if self.spec.causal_offset is not None:
            past_last_key = (kv_tile + 1) * c.block_kv - self.spec.causal_offset
            first_full = arithmetic.div(
                arithmetic.maximum(past_last_key + c.block_q - 2, 0), c.block_q
            )
            partial = arithmetic.minimum(first_full - first, steps)
        if self.kv_tail_visible:
            partial = jnp.where(kv_tile == self.kv_tiles - 1, steps, partial)
        return steps, partial

    def last_kv_tile(self, first_query: IntOrArray) -> IntOrArray:
        """Return the last tile whose first key a query of the block that begins with `first_query` sees."""
        last = self.kv_tiles - 1
        if self.spec.causal_offset is None:
            return last
        end = first_query + self.config.block_q + (self.spec.causal_offset - 1)
        return arithmetic.minimum(arithmetic.div(end, self.config.block_kv), last)

    def locate_q_block(self, dq_block: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        """Return the batch entry, the head and the first query of a block of all query blocks."""
        shape = self.spec.batch, self.spec.q_heads, self.q_blocks
        batch, head, block = arithmetic.unravel(dq_block, shape)
        return batch, head, block * self.config.block_q

    @property
    def kv_tail_visible(self) -> bool:
        """Return whether queries see keys past the end, in the last tile: zeros that no mask hides."""
        p = self.spec
        ragged = p.kv_len % self.config.block_kv != 0
        return ragged and (p.causal_offset is None or p.q_len + p.causal_offset > p.kv_len)

    @property
    def has_partial(self) -> bool:
        """Return whether there are partial blocks without a mask, or with a causal one."""
        return self.spec.causal or self.kv_tail_visible

    @property
    def separate_partial_loop(self) -> bool:
        """Return whether partial blocks have a loop of their own: at H = 64 and 256 it is no faster, and spills more,
        as with pairwise inputs."""
        return (
            self.has_partial
            and self.config.head_dim in (96, 128)
            and not self.spec.pairwise_inputs()
        )

    @property
    def shared_consumer_code(self) -> bool:
        """Return whether both consumer warpgroups run the same code: a call with gradients compiles in 0.7 of the time.

        At H = 64 it would run at 0.986 to 0.995 of the speed, documents at 0.995. And pairwise inputs come in pipelines
        of each warpgroup.
        """
        p = self.spec
        return self.config.symmetric_dq and p.mask is None and not p.pairwise_inputs()
