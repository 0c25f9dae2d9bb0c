"""Turns to add to a row of dQ: a word for each in device memory counts the tiles that have added, in PTX.

FlashAttention calls such words `dq_semaphore`.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.types import Ref, Registers, Scalar

WARPS = 4
# The warps of the producer warpgroup that wait for turns and that pass them on; the first one issues copies, and the
# last one claims tiles.
POLL_WARP, SIGNAL_WARP = 1, 2

_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


def take_dq_turn(word: Ref, rank: Scalar) -> None:
    """Wait in each warp of a warpgroup until so many tiles have added to what it will add to."""
    _take_turn(word, rank * WARPS)


@inline_op("take_dq_turn", _REF, _SCALAR)
def _take_turn(_, word: Ref, count: Registers) -> None:
    code = (
        "{ .reg .pred p; .reg .b32 v; poll: ld.acquire.gpu.global.b32 v, [$0]; "
        "setp.lt.s32 p, v, $1; @p bra poll; }"
    )
    asm(code, "l,r", thread_values.address(word), count.registers[()])


@inline_op("give_dq_turn", _REF)
def give_dq_turn(_, word: Ref) -> None:
    """Tell in each warp of a warpgroup that it has added."""
    thread_values.warp_release_add(word, 1)


@inline_op("wait_dq_turn", _REF, _SCALAR)
def wait_dq_turn(_, word: Ref, rank: Registers) -> None:
    """Wait in one warp of the producer until so many tiles have added to a row; in its others do nothing."""
    code = "poll: ld.acquire.gpu.global.b32 v, [$1]; setp.lt.s32 p, v, $2; @p bra poll;"
    thread_values.on_warp(POLL_WARP, code, "l,r", thread_values.address(word), rank.registers[()])


@inline_op("end_dq_turn", _REF)
def end_dq_turn(_, word: Ref) -> None:
    """Tell in one warp of the producer that a tile has added to a row: its CTA's additions come before.

    What orders them is the release of the one and the acquire of the other, through the barriers that either has
    passed.
    """
    code = "@leader red.release.gpu.global.add.s32 [$1], 1;"
    thread_values.on_warp(SIGNAL_WARP, code, "l", thread_values.address(word))


@inline_op("sync_producer_warps")
def sync_producer_warps(_) -> None:
    """Let the warps of the producer wait for each other."""
    asm(f"bar.sync {NamedBarrier.TURN}, 128;", "")
