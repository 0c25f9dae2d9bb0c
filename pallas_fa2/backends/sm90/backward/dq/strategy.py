"""The interface of ways to sum dQ: line 15 of Algorithm 2, where tiles of several CTAs add to one row.

A strategy is three classes: a `DqStrategy`, which knows before the launch when it suits, its schedule, arrays and
memory, and what consumer and producer warpgroups do in the kernel, a `DqConsumer` and a `DqProducer`.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np
from jax import lax

from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Scratch
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, BackwardConfig, DqTile
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.postprocess import convert_dq
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray


class DqRequest(NamedTuple):
    """The launch for which a strategy of dQ is chosen."""

    spec: KernelSpec
    config: BackwardConfig
    # Under a mask, the classes of tiles `[B | 1, N | 1, T tiles, S tiles]`: in NumPy if known when traced.
    classes: Any = None
    # Returns classes by the mask's code alone: not EMPTY wherever some data may make them so.
    possible_classes: Callable[[], np.ndarray] | None = None
    visits_empty_blocks: bool = True  # whether tiles may visit blocks that nobody sees


@dataclasses.dataclass(frozen=True)
class DqConsumer:
    """A consumer warpgroup's part in summing dQ, of which it forms one tile each step: by default only to `add` it."""

    cta: Cta
    warpgroup: WarpgroupIndex

    def compute_tile(self) -> DqTile:
        """Compute which tile of a query block's dQ the warpgroup forms."""
        config = self.cta.config
        if not config.two_cta:
            return config.dq_tile(self.warpgroup)
        assert isinstance(self.warpgroup, int)
        return config.dq_tile_2cta(lax.axis_index(CLUSTER_AXIS), self.warpgroup)

    def compute_target(self, dq_block: Scalar, tile: DqTile) -> Ref:
        """Compute where a tile of a query block's dQ is in device memory."""
        return self.cta.outputs.dq.at[dq_block, self.cta.config.dq_range(tile)]

    def init(self) -> None:
        """Initialize shared memory."""

    def open(self) -> Any:
        """Return the destination of dQ of the step before the first one, which is no gradient."""
        return self.cta.no_dq_block()

    def begin(self, step: Step) -> Any:
        """Start what takes long before dQ of a step can be added, and return what `publish` needs."""

    def publish(self, t: Scalar, begun: Any) -> None:
        """Let the other warpgroup see what step t has begun; a barrier follows."""

    def compute_destination(self, step: Step) -> Any:
        """Compute where dQ of a step goes, for `add`, as the loop carries it."""
        return step.dq_block

    def add(self, t: Scalar, destination: Any, dq: Callable[[], jax.Array]) -> None:
        """Add the tile of dQ of step t. dq() returns it, float32, once its product is done."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DqProducer:
    """The producer warpgroup's part in summing dQ: by default none."""

    cta: Cta

    def open(self) -> Any:
        """Return the state of the first step."""

    def step(self, step: Step, state: Any) -> Any:
        """Act behind the loads of a step, and return the state of the next one."""
        return state

    def close(self, steps: Scalar, state: Any) -> None:
        """Act after so many steps."""


@dataclasses.dataclass(frozen=True)
class DqStrategy:
    """A way to sum dQ: by default in float32, added to zeros that another kernel has written."""

    schedule: BackwardSchedule

    summary: ClassVar[str]  # for `explain`
    needs_zeros: ClassVar[bool] = True
    schedule_type: ClassVar[type[BackwardSchedule]] = BackwardSchedule
    tile_type: ClassVar[type[KvTile]] = KvTile

    @classmethod
    def suits(cls, request: DqRequest) -> bool:
        """Return whether the strategy is right and faster than those after it in `dq.STRATEGIES`."""
        raise NotImplementedError

    @classmethod
    def choose(cls, request: DqRequest) -> Self:
        """Return the strategy with its schedule."""
        return cls(cls.schedule_type.choose(request.spec, request.config, request.classes))

    def consumer(self, cta: Cta, warpgroup: WarpgroupIndex) -> DqConsumer:
        """Return a consumer warpgroup's part in the kernel."""
        raise NotImplementedError

    def producer(self, cta: Cta) -> DqProducer:
        """Return the producer warpgroup's part in the kernel."""
        return DqProducer(cta)

    @property
    def smem(self) -> Scratch | None:
        """Return the array that it has in shared memory, `SharedStorage.dq`."""
        return None

    @property
    def barriers(self) -> Mapping[str, int]:
        """Return names and counts of its barriers, which complete by two arrivals."""
        return {}

    @property
    def accumulator_shape(self) -> tuple[int, int]:
        """Return the shape of the float32 array in device memory where dQ is summed."""
        return self.schedule.dq_shape

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of float32 arrays beside inputs and gradients: dQ, delta and lse. (Terms of dK and dV, lists
        of tiles and words by which CTAs wait for each other come to less, and are left out.)"""
        rows = self.schedule.num_q_blocks * self.schedule.config.block_q
        return 4 * (math.prod(self.accumulator_shape) + 2 * rows)

    def allocate(
        self, q: jax.Array | SanitizedArray, zeros: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return `Outputs.dq` and `Outputs.dq_workspace` before the kernel; `zeros`, if needed, have `dq_shape`."""
        assert zeros is not None
        return zeros, None

    def finish(
        self, dq: jax.Array, workspace: jax.Array | None, q: jax.Array | SanitizedArray
    ) -> jax.Array:
        """Return dQ like q from the arrays of `allocate` after the kernel."""
        return convert_dq(self.schedule, dq, q)
