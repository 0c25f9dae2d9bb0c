"""What the warpgroups of a CTA share, and what a warpgroup does."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, BackwardConfig
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile
from pallas_fa2.backends.sm90.backward.memory import Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule

# The index of a warpgroup: an int, or traced where two warpgroups run the same code (`shared_consumer_code`). What
# differs by its type is decided in `SharedStorage.row_pipeline_to_release` and `store_gradients`.
type WarpgroupIndex = Scalar


class Cta(NamedTuple):
    """The schedule, arrays, shared memory and barriers of a CTA."""

    schedule: BackwardSchedule
    scheduler: StaticTileScheduler | DynamicTileScheduler
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    def compute_first_key(self, tile: KvTile) -> Scalar:
        """Compute the CTA's first key of a tile."""
        first = tile.compute_first_key()
        return first + (64 * lax.axis_index(CLUSTER_AXIS) if self.config.two_cta else 0)

    def no_dq_block(self) -> Scalar:
        """Return the row of dQ to which no gradient belongs: that of the step before the first one."""
        return I32(self.schedule.num_q_blocks)


@dataclasses.dataclass(frozen=True)
class WarpgroupRole:
    """A role of a warpgroup: it visits the tiles of its CTA one after another, with a state between them."""

    cta: Cta
    warpgroup: WarpgroupIndex

    @property
    def config(self) -> BackwardConfig:
        return self.cta.config

    @property
    def memory(self) -> SharedStorage:
        return self.cta.memory

    def open(self) -> Any:
        """Prime barriers, and return the state of the first visit."""
        raise NotImplementedError

    def visit(self, tile: KvTile, state: Any, prefetch: Callable) -> tuple[Any, Any]:
        """Process a tile, and return the state after it and prefetch(), which reads the CTA's next tile."""
        raise NotImplementedError

    def close(self, steps: Scalar, tiles: Scalar, state: Any) -> None:
        """Finish after so many steps and tiles."""
