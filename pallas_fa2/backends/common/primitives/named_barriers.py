"""PTX's named barriers, and the turns of warpgroups at the tensor cores."""

import dataclasses
import enum

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives.types import Registers, Scalar
from pallas_fa2.control_flow import cond


class NamedBarrier(enum.IntEnum):
    """The 16 named barriers of a CTA (PTX ISA, bar). Mosaic has 0, and one for each of up to four warpgroups."""

    TURN = 5  # and the three after it: a warpgroup's turn at the tensor cores
    VOTE = 9  # and the three after it: a vote of a warpgroup
    CTA = 13  # a meeting of all threads of a CTA, in kernels by mma.sync
    NEVER_USED = 15


@dataclasses.dataclass(frozen=True)
class WarpgroupTurns:
    """The turns of consumer warpgroups at the tensor cores: one multiplies while the others exponentiate.

    FlashAttention-3 (arXiv:2407.08608), section 3.1. Turns order no memory, only time: they use
    PTX's named barriers, which answer sooner than mbarriers, and mean nothing to the interpreter.
    """

    warpgroup: Scalar
    count: int

    def prime(self) -> None:
        """Give the first warpgroup its turn; the last one does it."""
        cond(self.warpgroup == self.count - 1, self.arrive, lambda: None)

    def sync(self) -> None:
        """Wait for this warpgroup's turn."""
        _sync(NamedBarrier.TURN + self.warpgroup)

    def arrive(self) -> None:
        """Give the next warpgroup its turn."""
        _arrive(NamedBarrier.TURN + lax.rem(self.warpgroup + 1, I32(self.count)))

    def finish(self) -> None:
        """Take the turn that the last warpgroup has given; the first one does it."""
        cond(self.warpgroup == 0, self.sync, lambda: None)


# One warpgroup arrives and another waits: 256 threads.
@inline_op("named_barrier_sync", plgpu.Layout.WG_SPLAT)
def _sync(_, barrier: Registers) -> None:
    asm("bar.sync $0, 256;", "r", barrier.registers[()])


@inline_op("named_barrier_arrive", plgpu.Layout.WG_SPLAT)
def _arrive(_, barrier: Registers) -> None:
    asm("bar.arrive $0, 256;", "r", barrier.registers[()])
