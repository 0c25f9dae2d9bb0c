"""The order of tiles in which dQ is added deterministically, and the query blocks of each under a mask."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from jax import lax

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, IntOrArray, array_namespace
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.control_flow import rematerialize
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.schedule import raster

# An entry of a list, whose order is that of blocks: whether the block is full (bit 0), and from these bits on how many
# tiles add to its row of dQ before, its index, and whether the tile does not visit it.
RANK_BIT, BLOCK_BIT, EMPTY_BIT = 1, 15, 30
MAX_TILES = 1 << (BLOCK_BIT - RANK_BIT)
# The length of a run: how many partial blocks, and from this bit on how many full ones after them.
FULL_BIT = 16


class OrderedBlockMask(NamedTuple):
    """The query blocks that each tile visits, from the first to the last, in runs of partial and then full ones.

    A tile that sees nothing visits the last block nevertheless, as a partial one: the same block as in the lists by
    which mask bits are computed.
    """

    num_blocks: Any  # int32 [B | 1, heads | 1, tiles]
    block_indices: Any  # int32 [B | 1, heads | 1, tiles, blocks]: entries as above
    run_lengths: Any  # int32, of the same shape: of the run that begins, or goes on, at an entry

    @classmethod
    def from_classes(cls, classes: Any) -> "OrderedBlockMask":
        """Return the lists of classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp, blocks = array_namespace(classes), classes.shape[-1]
        block = np.arange(blocks, dtype=np.int32).reshape(1, 1, 1, -1)
        sees_nothing = xp.all(classes == EMPTY, -1, keepdims=True)
        classes = xp.where(sees_nothing & (block == blocks - 1), np.int32(PARTIAL), classes)
        visited = (classes != EMPTY).astype(np.int32)
        rank = xp.flip(xp.cumsum(xp.flip(visited, -2), -2, dtype=np.int32), -2) - visited
        entries = (1 - visited) << np.int32(EMPTY_BIT) | block << np.int32(BLOCK_BIT)
        entries |= rank << np.int32(RANK_BIT) | (classes == FULL).astype(np.int32)
        lists = xp.sort(entries, -1)
        listed = lists < np.int32(1 << EMPTY_BIT)
        full = listed & (lists & 1 == 1)
        partial_end = _first_index_from(~(listed & ~full), xp)
        full_end = xp.take_along_axis(
            _first_index_from(~full, xp), xp.minimum(partial_end, blocks - 1), -1
        )
        full_end = xp.where(partial_end < blocks, full_end, blocks)
        runs = (full_end - partial_end) << np.int32(FULL_BIT) | (partial_end - block)
        return cls(xp.sum(listed, -1, dtype=np.int32), lists, runs)


def _first_index_from(condition: Any, xp: Any) -> Any:
    """Return the first index on the last axis, from each one on, where a condition holds, or the size of the axis."""
    size = condition.shape[-1]
    index = np.arange(size, dtype=np.int32).reshape(1, 1, 1, -1)
    indices = xp.where(condition, index, np.int32(size))
    if xp is np:
        return np.flip(np.minimum.accumulate(np.flip(indices, -1), -1), -1)
    return lax.cummin(indices, indices.ndim - 1, reverse=True)


class OrderedSchedule(BackwardSchedule):
    """The order in which CTAs take tiles: all heads of an L2 group together, from the last keys to the first."""

    @classmethod
    def choose(cls, spec: KernelSpec, config: BackwardConfig, classes: Any = None) -> Self:
        """Return the schedule; under a mask with a tile for each head of a group, as the longest may come last."""
        if spec.mask is not None:
            return cls(spec, config, spec.group)
        return super().choose(spec, config)

    @property
    def order(self) -> raster.RasterOrder:
        # from the last tile of a head to the first, whichever is the longest
        return dataclasses.replace(super().order, longest_first=True)

    def coordinates(self, tile_id: IntOrArray) -> tuple[IntOrArray, IntOrArray, IntOrArray]:
        return self.order.coordinates(tile_id)

    def block_mask(self, classes: Any) -> OrderedBlockMask:
        return OrderedBlockMask.from_classes(self.classes_by_kv_tile(classes))

    def tile_scheduler(self, block_mask: OrderedBlockMask | None) -> DynamicTileScheduler:
        """Return the scheduler from which CTAs claim tiles in order, with how many blocks each visits under a mask."""
        tile_ids = np.arange(self.order.count, dtype=np.int32)
        counts = 0 * tile_ids
        if block_mask is not None:
            counts, shape = block_mask.num_blocks, (self.spec.batch, self.heads, self.kv_tiles)
            counts = array_namespace(counts).broadcast_to(counts, shape)
            counts = counts[self.coordinates(tile_ids)]
        return DynamicTileScheduler.build(
            tile_ids, counts, self.num_workers, static_first_tile=False
        )

    def decode_q_block(self, list_entry: IntOrArray) -> IntOrArray:
        return list_entry >> I32(BLOCK_BIT) & I32((1 << (EMPTY_BIT - BLOCK_BIT)) - 1)

    def compute_dq_rank(self, step: Step) -> Scalar:
        """Compute how many tiles add to the step's row of dQ before."""
        tile = step.tile
        if tile.block_mask is not None:
            entry = tile.load_list_entry(step.global_step)
            return entry >> I32(RANK_BIT) & I32(MAX_TILES - 1)
        first_query = arithmetic.rem(step.dq_block, self.q_blocks) * self.config.block_q
        return self.last_kv_tile(first_query) - tile.compute_coordinates()[2]


@dataclasses.dataclass(frozen=True)
class OrderedTile(KvTile):
    """A tile whose list has its blocks in order, partial and full ones mixed."""

    def compute_next_step(self) -> Scalar:
        return super().compute_next_step() if self.counts is None else self.first_step + self.counts

    def each_step(self, body: Callable, carry: Any = None, by_class: bool = False) -> Any:
        """Return the carry after body(step, carry) -> carry for each query block; with `by_class` in two loops for each
        run."""
        if self.block_mask is None or not by_class:
            return super().each_step(body, carry)
        state = self.first_step, self.compute_first_dq_block(), carry
        run = functools.partial(self._each_step_of_run, body)
        return lax.while_loop(lambda state: state[0] < self.compute_next_step(), run, state)[2]

    def _each_step_of_run(self, body: Callable, state: tuple) -> tuple:
        """Run the steps of the run that begins at step t, and return the step after it."""
        t, *carried = state
        runs = layouts.index_broadcast(self.block_mask.run_lengths, *self.compute_coordinates())
        counts = runs[t - self.first_step]
        first_full = t + (counts & I32((1 << FULL_BIT) - 1))
        end = first_full + (counts >> I32(FULL_BIT))
        partial, full = (
            functools.partial(self.run_step, functools.partial(self._rematerialized, body), masked)
            for masked in (True, False)
        )
        carried = lax.fori_loop(t, first_full, partial, tuple(carried))
        return end, *lax.fori_loop(first_full, end, full, carried)

    def _rematerialized(self, body: Callable, step: Step, carry: Any) -> Any:
        """Run a step with a tile that LLVM knows nothing of: it would keep what follows from the id in registers, that
        of both loops in both."""
        tile_id, counts, first_step, k = rematerialize(
            [self.tile_id, self.counts, self.first_step, self.k]
        )
        tile = dataclasses.replace(self, tile_id=tile_id, counts=counts, first_step=first_step, k=k)
        return body(step._replace(tile=tile), carry)
