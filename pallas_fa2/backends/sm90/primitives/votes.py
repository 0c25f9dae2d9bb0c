"""Votes of a warp or a warpgroup on its elements."""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.named_barriers import FIRST_QUESTION
from pallas_fa2.backends.sm90.primitives.thread_values import SCALAR_I32, i32, scalars, splat


def warp_any_gt(tile: jax.Array, limit: float) -> jax.Array:
    """Whether a warp's own 16 rows of `[64, 8]`, or of `[64]`, exceed the limit anywhere.

    Each warp gets its own answer, so a branch on it must not synchronize.
    """

    def found(_: Any, tile: Any) -> Any:
        bound = arith.constant(ir.F32Type.get(), limit)
        above = [arith.cmpf(arith.CmpFPredicate.OGT, x, bound) for x in scalars(tile)]
        vote = "vote.sync.any.pred p, p, -1;"
        return splat(_vote(above, vote, []))

    layout = ACC_LAYOUT if tile.ndim == 2 else ROW_LAYOUT
    return inline_op(f"any_above {limit}", found, SCALAR_I32, layout)(tile) != 0


def warp_any_abs_ge_2(tile: jax.Array) -> jax.Array:
    """Whether |x| >= 2, or NaN, anywhere in a warp's own 16 rows: bit 30 is set then, and half an
    instruction a value finds out. Each warp gets its own answer."""
    return _any_from_two(tile) != 0  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(ACC_LAYOUT,), return_type=SCALAR_I32)
def _any_from_two(_: Any, tile: Any) -> Any:
    word = ir.IntegerType.get_signless(32)
    bits = functools.reduce(arith.ori, [arith.bitcast(word, x) for x in scalars(tile)])
    exponent = arith.andi(bits, i32(1 << 30))
    above = arith.cmpi(arith.CmpIPredicate.ne, exponent, i32(0))
    return splat(_vote([above], "vote.sync.any.pred p, p, -1;", []))


def warpgroup_any_nonfinite(rows: jax.Array, warpgroup: Any) -> jax.Array:
    """1 if a value is infinite or NaN in any row of a warpgroup, else 0; all of it must ask."""
    return _any_infinite(rows, FIRST_QUESTION + warpgroup)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(ROW_LAYOUT, plgpu.Layout.WG_SPLAT), return_type=SCALAR_I32)
def _any_infinite(_: Any, rows: Any, barrier: Any) -> Any:
    infinity = arith.constant(ir.F32Type.get(), math.inf)
    not_below = arith.CmpFPredicate.UGE  # holds for NaN
    found = [arith.cmpf(not_below, x, infinity) for x in scalars(rows)]
    together = "barrier.cta.red.or.pred p, $2, 128, p;"
    answer = _vote(found, together, [barrier.registers[()]])
    # This shuffle changes nothing, but ptxas learns that a branch on the answer is uniform; it would
    # otherwise serialize every WGMMA in the branch (C7520).
    code = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return splat(llvm.inline_asm(answer.type, [answer], code, "=r,r", has_side_effects=True))


def _vote(mine: list[Any], question: str, operands: list[Any]) -> Any:
    """1 if `question`, PTX on the predicate p, answers yes; p is whether any of `mine` holds."""
    word = ir.IntegerType.get_signless(32)
    any_of_mine = arith.extui(word, functools.reduce(arith.ori, mine))
    code = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; {question} selp.s32 $0, 1, 0, p; }}"
    constraints = ",".join(["=r", "r", *["r"] * len(operands)])
    return llvm.inline_asm(word, [any_of_mine, *operands], code, constraints, has_side_effects=True)
