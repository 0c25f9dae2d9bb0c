"""Warp specialization: which warpgroup does what, with how many registers."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32

REGISTERS_PER_THREAD_SLOT = 512  # of a multiprocessor, for one thread of each warpgroup


def set_max_registers(shares: Sequence[int], me: int) -> None:
    """Of a thread in warpgroup `me`. They share what they begin with; one that asked for more would
    wait forever."""
    equal = REGISTERS_PER_THREAD_SLOT // len(shares) // 8 * 8
    assert sum(shares) <= equal * len(shares), shares
    plgpu.set_max_registers(shares[me], action="increase" if shares[me] > equal else "decrease")


def dispatch_warpgroups(warpgroup: Any, *roles: Callable[[], None]) -> None:
    """Warpgroup i runs roles[i]; neighbours with the same role share its code.

    One switch, not an if after another: a warpgroup's registers then hold nothing for the others. The
    last role, which only loads, is the first branch, as Pallas lowers that twice (see `branches`).
    """
    *others, last = (i for i, role in enumerate(roles) if i == 0 or role is not roles[i - 1])
    if not others:
        return roles[last]()
    branch = I32(1)
    for first in others[1:]:
        branch += jnp.where(warpgroup >= first, I32(1), I32(0))
    branch = jnp.where(warpgroup >= last, I32(0), branch)
    lax.switch(branch, [roles[last], *(roles[i] for i in others)])


def sync_before_exit(done: list[Any], branch: int) -> None:
    """The end of a kernel: a warpgroup must not exit while another still issues WGMMA.

    (An illegal instruction otherwise.) Each branch of the code waits on a barrier of its own: the
    phase of a shared one would hold a register through the loops of all of them.
    """
    # Addresses are computed here: they would hold registers too.
    own = [barrier.at[lax.optimization_barrier(I32(0))] for barrier in done]
    for barrier in own:
        plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(own[branch])
