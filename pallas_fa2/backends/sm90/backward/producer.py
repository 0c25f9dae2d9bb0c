"""The producer warpgroup of the backward, up to H = 128."""

import dataclasses
from collections.abc import Callable
from typing import Any

from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.backward.cta import WarpgroupRole
from pallas_fa2.backends.sm90.backward.dq.strategy import DqProducer
from pallas_fa2.backends.sm90.backward.kv_tile import KvTile, Step
from pallas_fa2.backends.sm90.backward.loader import Loader
from pallas_fa2.control_flow import when


@dataclasses.dataclass(frozen=True)
class Producer(WarpgroupRole):
    """The warpgroup that loads K and V of one tile after another, line 6, and Q and dO of its steps, line 9."""

    dq: DqProducer

    def open(self) -> Any:
        self.cta.scheduler.prime()
        return self.dq.open()

    def visit(self, tile: KvTile, state: Any, prefetch: Callable) -> tuple[Any, Any]:
        return tile.each_step(self.step, state), prefetch()

    def step(self, step: Step, state: Any) -> Any:
        """Load what a step reads, and claim the next tile in the last step of one: not sooner, as another CTA may be
        free before."""
        loader = Loader(self.cta)
        self.cta.scheduler.request_next(step.tile.k + 1, step.is_last())
        when(step.is_first())(lambda: loader.load_k(step.tile))
        loader.load_q(step)
        when(step.is_first())(lambda: loader.load_v(step.tile))
        loader.load_dout(step)
        loader.load_pairwise(step)
        return self.dq.step(step, state)

    def close(self, steps: Scalar, tiles: Scalar, state: Any) -> None:
        self.dq.close(steps, state)
        for pipeline in self.memory.pipelines:
            pipeline.producer_tail()
