"""Warp specialization: the roles of warpgroups, and how many registers each has."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives.types import Barrier, Scalar
from pallas_fa2.control_flow import rematerialize

REGISTERS_PER_THREAD_SLOT = 512  # of a multiprocessor, for one thread of each warpgroup


def set_max_registers(shares: Sequence[int], warpgroup: int) -> None:
    """Give each thread of a warpgroup its share of registers. Warpgroups share what they begin with; one that asked for
    more would wait forever."""
    equal = REGISTERS_PER_THREAD_SLOT // len(shares) // 8 * 8
    assert sum(shares) <= equal * len(shares), shares
    share = shares[warpgroup]
    plgpu.set_max_registers(share, action="increase" if share > equal else "decrease")


def dispatch_warpgroups(warpgroup: Scalar, *roles: Callable[[], None]) -> None:
    """Run roles[i] in warpgroup i; neighbors with the same role share its code.

    One switch, not an if after another: a warpgroup's registers then hold nothing for the others. The
    last role, which only loads, is the first branch, as Pallas lowers that twice (see `control_flow`).
    """
    *leading, last = (i for i, role in enumerate(roles) if i == 0 or role is not roles[i - 1])
    if not leading:
        return roles[last]()
    branch = I32(1)
    for first in leading[1:]:
        branch += jnp.where(warpgroup >= first, I32(1), I32(0))
    branch = jnp.where(warpgroup >= last, I32(0), branch)
    lax.switch(branch, [roles[last], *(roles[i] for i in leading)])


def sync_before_exit(done: Sequence[Barrier], branch: int) -> None:
    """Wait for all warpgroups at the end of a kernel: one must not exit while another still issues WGMMA.

    (An illegal instruction otherwise.) Each branch of the code waits on a barrier of its own: the
    phase of a shared one would hold a register through the loops of all of them.
    """
    # Addresses are computed here: they would hold registers too.
    own = [barrier.at[rematerialize(I32(0))] for barrier in done]
    for barrier in own:
        plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(own[branch])
