"""Named barriers of PTX, and the turns of warpgroups at the tensor cores."""

import dataclasses
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.control_flow import cond

# Of PTX's 16 named barriers, Mosaic has 0 and one for each of up to four warpgroups.
FIRST_TURN = 5
FIRST_QUESTION = 9
NEVER_USED = 15


@dataclasses.dataclass(frozen=True)
class WarpgroupTurns:
    """Warpgroups take turns at the tensor cores: one multiplies while the others exponentiate.

    FlashAttention-3 (arXiv:2407.08608), section 3.1. Turns order no memory, only time: they use
    PTX's named barriers, which answer sooner than mbarriers, and mean nothing to the interpreter.
    """

    warpgroup: Any
    count: int

    def prime(self) -> None:
        """The last warpgroup opens the first one's turn."""
        cond(self.warpgroup == self.count - 1, self.arrive, lambda: None)

    def sync(self) -> None:
        _turn_sync(FIRST_TURN + self.warpgroup)  # pyright: ignore[reportCallIssue]

    def arrive(self) -> None:
        _turn_arrive(FIRST_TURN + lax.rem(self.warpgroup + 1, I32(self.count)))  # pyright: ignore[reportCallIssue]

    def finish(self) -> None:
        """The first warpgroup takes the turn that the last one has given."""
        cond(self.warpgroup == 0, self.sync, lambda: None)


def _turn(operation: str, barrier: Any) -> None:
    """One warpgroup arrives at a named barrier and another waits: 256 threads."""
    void, code = ir.Type.parse("!llvm.void"), f"bar.{operation} $0, 256;"
    llvm.inline_asm(void, [barrier.registers[()]], code, "r", has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
def _turn_sync(_: Any, barrier: Any) -> None:
    _turn("sync", barrier)


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
def _turn_arrive(_: Any, barrier: Any) -> None:
    _turn("arrive", barrier)
