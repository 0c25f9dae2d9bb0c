"""dQ by atomic additions to zeros, in any order: not bitwise reproducible."""

from collections.abc import Callable

import jax

from pallas_fa2.backends.common.primitives import register_io
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.dq.strategy import DqConsumer, DqRequest, DqStrategy


class AtomicConsumer(DqConsumer):
    """A consumer that adds its tiles of dQ without waiting for others."""

    def add(self, t: Scalar, destination: Scalar, dq: Callable[[], jax.Array]) -> None:
        value, tile = dq(), self.compute_tile()
        register_io.add_fragments(self.compute_target(destination, tile), value)


class AtomicDq(DqStrategy):
    """The strategy in which tiles add to a row in whatever order they come to it."""

    summary = "float32 dQ, atomic additions in any order"

    @classmethod
    def suits(cls, request: DqRequest) -> bool:
        """Return True: this is what all others are measured against."""
        return True

    def consumer(self, cta: Cta, warpgroup: WarpgroupIndex) -> DqConsumer:
        return AtomicConsumer(cta, warpgroup)
