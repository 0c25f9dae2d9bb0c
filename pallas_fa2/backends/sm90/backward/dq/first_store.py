"""A Hopper backward that stores the first of what makes up a row of dQ, and adds the others: no kernel
writes zeros before it.

Where few tiles visit a row (a block of queries), as under a short window, zeros take as long as dQ does.
For each step a CTA draws a ticket: who has a row's first one stores, and tells when it is done; who has
another adds, and waits for the first if need be. That is soon: tickets are drawn in the order of steps,
and the one who drew the first of all that anyone waits for waits for nobody.

A ticket comes from device memory, which takes most of a step. So it is drawn when a step begins, shown to
the other warpgroup when its dS is, and used with its dQ, in the next step.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import inline_op
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.primitives import thread_values
from pallas_fa2.ir.block_classes import EMPTY

# In a row's word, from this bit on, how many warps have stored their part; how many tickets there were, below.
STORED_BIT = 16
ALL_STORED = 8 << STORED_BIT
# Of steps whose tickets are kept: one warpgroup draws the next when the other has yet to use the last.
SLOTS = 4
# How many tiles may visit a row, on average: who stores waits until all can see it, for half a step. Where some
# of those that may visit it do not, by the mask's data, one more; at H = 64 that takes 1.006 of the time.
FEW, FEW_THAT_MAY = 4, 5


class FirstStoreSchedule(BackwardSchedule):
    """The tiles of any order."""

    NEEDS_ZEROS = False
    DQ_ACCUMULATION = (
        "float32 dQ, stored by the first tile of a row, then atomic additions in any order"
    )

    @property
    def turns_shape(self) -> tuple[int, ...]:
        """Of the rows' words."""
        return self.dq_shape[:1]

    @classmethod
    def suits(
        cls,
        problem: KernelSpec,
        config: BackwardConfig,
        classes: Any,
        possible: Callable[[], np.ndarray],
    ) -> bool:
        """Whether few tiles visit each row: by their classes, or if only the device has them, by which are
        `possible`."""
        if (
            config.two_cta
            or config.deterministic
            or problem.mask is None
            or problem.pairwise_inputs()
        ):
            return False
        if config.first_store is not None:
            return config.first_store
        known = isinstance(classes, np.ndarray)
        visits = np.sum((classes if known else possible()) != EMPTY, -1).mean()
        return bool(visits <= (FEW if known or config.head_dim == 64 else FEW_THAT_MAY))


class DqTickets(NamedTuple):
    """Those of the steps of a CTA."""

    rows: Any  # int32 [blocks of queries + 1], zeros at first
    slots: Any  # int32 [SLOTS], in shared memory

    def init(self) -> None:
        """By the first warpgroup: before the first step there is one whose dQ is added to nothing."""
        self.share(I32(-1), I32(ALL_STORED))

    def take(self, row: Any) -> Any:
        """By the first warpgroup."""
        return _draw(self.rows.at[row])  # pyright: ignore[reportCallIssue]

    def share(self, t: Any, ticket: Any) -> None:
        """By the first warpgroup, before it tells that its dS of step t is there."""
        _show(self._slot(t), ticket)  # pyright: ignore[reportCallIssue]

    def resolve(self, t: Any, row: Any) -> Any:
        """1 if a step has its row's first, else 0, when that has been stored."""
        return _use(self.rows.at[row], self._slot(t))  # pyright: ignore[reportCallIssue]

    def signal(self, row: Any, first: Any) -> None:
        """By all who have stored, if it was the first."""
        _tell(self.rows.at[row], first)  # pyright: ignore[reportCallIssue]

    def _slot(self, t: Any) -> Any:
        return self.slots.at[t + I32(SLOTS) & I32(SLOTS - 1)]


_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@inline_op("take_dq_ticket", _REF, result=thread_values.SCALAR_I32)
def _draw(_: Any, row: Any) -> Any:
    """By one thread, which need not wait for it."""
    thread = thread_values.warpgroup_thread_index()
    code = "setp.eq.s32 p, $1, 0; @p atom.relaxed.gpu.global.add.s32 $0, [$2], 1;"
    return thread_values.splat(_number(code, "r,l", thread, thread_values.address(row)))


@inline_op("share_dq_ticket", _REF, _SCALAR)
def _show(_: Any, slot: Any, ticket: Any) -> None:
    thread_values.elect_one(
        "@p st.shared.b32 [$1], $2;", thread_values.address(slot, 32), ticket.registers[()]
    )


@inline_op("resolve_dq_ticket", _REF, _REF, result=thread_values.SCALAR_I32)
def _use(_: Any, row: Any, slot: Any) -> Any:
    """What is stored is in L2 when its count is, and what is added after that goes there: the count need not be
    acquired, for which L1 would be emptied at every step."""
    code = (
        ".reg .b32 v; ld.shared.b32 v, [$2]; setp.eq.s32 p, v, 0; selp.b32 $0, 1, 0, p; @p bra seen; "
        f"look: setp.ge.s32 p, v, {ALL_STORED}; @p bra seen; "
        "ld.relaxed.gpu.global.b32 v, [$1]; bra look; seen:"
    )
    return thread_values.splat(
        _number(code, "l,r", thread_values.address(row), thread_values.address(slot, 32))
    )


@inline_op("signal_dq_stored", _REF, _SCALAR)
def _tell(_: Any, row: Any, first: Any) -> None:
    thread_values.warp_release_add(row, 1 << STORED_BIT, first.registers[()])


def _number(code: str, constraints: str, *operands: Any) -> Any:
    """What `code` leaves in $0, with a predicate p."""
    word, code = ir.IntegerType.get_signless(32), f"{{ .reg .pred p; {code} }}"
    return llvm.inline_asm(word, operands, code, f"=&r,{constraints}", has_side_effects=True)
