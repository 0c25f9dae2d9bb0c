"""Votes of a warp or a warpgroup on the elements of an array in registers."""

import functools
import math
from collections.abc import Sequence

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.thread_values import SCALAR_I32, scalars, splat
from pallas_fa2.backends.common.primitives.types import MlirValue, Registers, Scalar

_WARP_ANY = "vote.sync.any.pred p, p, -1;"


def warp_any_gt(tile: jax.Array, limit: float) -> jax.Array:
    """Return whether a value of a warp's own 16 rows of `[64, 8]`, or of `[64]`, exceeds the limit.

    Each warp gets its own result, so a branch on it must not synchronize.
    """

    @inline_op(
        "warp_any_gt", ACC_LAYOUT if tile.ndim == 2 else ROW_LAYOUT, result=SCALAR_I32, limit=limit
    )
    def vote(_, tile: Registers) -> Registers:
        bound = arith.constant(ir.F32Type.get(), limit)
        above = [arith.cmpf(arith.CmpFPredicate.OGT, x, bound) for x in scalars(tile)]
        return splat(_vote(above, _WARP_ANY))

    return vote(tile) != 0


def warp_any_abs_ge_2(tile: jax.Array) -> jax.Array:
    """Return whether |x| >= 2, or NaN, for a value of a warp's own 16 rows.

    Bit 30 is set then, which takes half an instruction a value. Each warp gets its own result.
    """
    return _warp_any_abs_ge_2(tile) != 0


@inline_op("warp_any_abs_ge_2", ACC_LAYOUT, result=SCALAR_I32)
def _warp_any_abs_ge_2(_, tile: Registers) -> Registers:
    word = ir.IntegerType.get_signless(32)
    bits = functools.reduce(arith.ori, [arith.bitcast(word, x) for x in scalars(tile)])
    exponent = arith.andi(bits, i32(1 << 30))
    above = arith.cmpi(arith.CmpIPredicate.ne, exponent, i32(0))
    return splat(_vote([above], _WARP_ANY))


def warpgroup_any_nonfinite(rows: jax.Array, warpgroup: Scalar) -> jax.Array:
    """Return 1 if a value of `[64]`, the rows of a warpgroup, is infinity or NaN, else 0: not for -infinity. All of it
    must call this."""
    return _warpgroup_any_nonfinite(rows, NamedBarrier.VOTE + warpgroup)


@inline_op("warpgroup_any_nonfinite", ROW_LAYOUT, plgpu.Layout.WG_SPLAT, result=SCALAR_I32)
def _warpgroup_any_nonfinite(_, rows: Registers, barrier: Registers) -> Registers:
    infinity = arith.constant(ir.F32Type.get(), math.inf)
    not_below = arith.CmpFPredicate.UGE  # holds for NaN
    nonfinite = [arith.cmpf(not_below, x, infinity) for x in scalars(rows)]
    vote = _vote(nonfinite, "barrier.cta.red.or.pred p, $2, 128, p;", barrier.registers[()])
    # This shuffle changes nothing, but ptxas learns that a branch on the result is uniform; it would
    # otherwise serialize every WGMMA in the branch (C7520).
    return splat(asm("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", vote, result=vote.type))


def _vote(conditions: Sequence[MlirValue], instruction: str, *operands: MlirValue) -> MlirValue:
    """Emit 1 if any thread has a condition that holds, else 0, by an instruction on the predicate p."""
    word = ir.IntegerType.get_signless(32)
    any_own = arith.extui(word, functools.reduce(arith.ori, conditions))
    code = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; {instruction} selp.s32 $0, 1, 0, p; }}"
    constraints = ",".join(["=r", "r", *["r"] * len(operands)])
    return asm(code, constraints, any_own, *operands, result=word)
