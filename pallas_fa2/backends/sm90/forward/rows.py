"""The 64 query rows of a tile that one consumer warpgroup owns."""

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.named_barriers import WarpgroupTurns
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, PipelinePosition, QueryTile


@dataclasses.dataclass(frozen=True)
class WarpgroupRows:
    """64 query rows of a tile, and the memory and pipelines through which a warpgroup works on them.

    Methods `compute_...` and `load_...` emit instructions at each call (as in `QueryTile`).
    """

    tile: QueryTile
    arrays: Arrays
    memory: SharedStorage
    q: Any  # [64, H], in shared memory or in registers
    q_slot: Scalar  # the index of Q's buffer among those of all warpgroups
    position: PipelinePosition

    @property
    def schedule(self) -> ForwardSchedule:
        return self.tile.schedule

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> ForwardConfig:
        return self.schedule.config

    @property
    def score_shape(self) -> tuple[int, int]:
        return layouts.ROWS_PER_WARPGROUP, self.config.block_kv

    def compute_warpgroup(self) -> Scalar:
        """Compute the warpgroup from `q_slot`: one number that ptxas knows nothing of holds fewer registers
        through the loops than two."""
        return arithmetic.div(self.q_slot, self.config.q_stages)

    def compute_turns(self) -> WarpgroupTurns:
        return WarpgroupTurns(self.compute_warpgroup(), self.config.warpgroups)

    def compute_first_row(self) -> Scalar:
        first_row = self.tile.compute_first_row()
        return first_row + self.compute_warpgroup() * self.config.rows_per_warpgroup

    def compute_row_range(self) -> Slice:
        return pl.ds(self.compute_first_row(), layouts.ROWS_PER_WARPGROUP)

    def load_first_query(self) -> Scalar:
        """Load the index of the first row in Q and O, in a cache; it has no other one elsewhere."""
        first_row = self.arrays.load_first_row(self.tile)
        return first_row + self.compute_warpgroup() * self.config.rows_per_warpgroup

    def load_first_position(self) -> Scalar:
        """Load the position of the first row in its sequence, in a cache; its index is that elsewhere."""
        cached = self.arrays.inputs.cached
        if cached is None:
            return self.compute_first_row()
        first = cached.load(self.tile.compute_coordinates()[2], "first_position")
        return first + self.compute_warpgroup() * self.config.rows_per_warpgroup

    def load_entry_field(self, field: str) -> Scalar:
        """Load a field of the tile's entry, in a cache."""
        cached = self.arrays.inputs.cached
        assert cached is not None
        return cached.load(self.tile.compute_coordinates()[2], field)

    def load_kv_block_index(self, t: Scalar) -> Scalar:
        """Load the index of the key block that is visited as the t-th, a while before it is needed."""
        return self.arrays.load_kv_block_index(self.tile, t)

    def load_first_key(self, t: Scalar) -> Scalar:
        """Load the index of the first key of the block that is visited as the t-th."""
        return self.load_kv_block_index(t) * self.config.block_kv

    def compute_q(self) -> Ref:
        """Return Q in registers, or compute where it lies in shared memory.

        Descriptors of Q are computed where they are used: 32 registers less outside the loops.
        """
        stages = self.config.q_stages
        if self.config.q_in_registers:
            return self.q
        slot = lax.optimization_barrier(self.q_slot)
        return self.memory.q.at[arithmetic.div(slot, stages), arithmetic.rem(slot, stages)]

    def advance(self) -> PipelinePosition:
        """Compute the position of the pipelines after this tile."""
        return self.tile.advance(self.position)

    def rematerialized(self, zero: Scalar) -> "WarpgroupRows":
        """Return the same rows. `zero` is 0 wherever this is used, which ptxas does not know: what only the end of
        a tile needs is then computed there, not before the loops, where it would hold 25 registers."""
        q_slot = self.q_slot + zero
        position = PipelinePosition(*(step + zero for step in self.position))
        return dataclasses.replace(
            self, tile=self.tile.rematerialized(zero), q_slot=q_slot, position=position
        )
