"""Evaluates scalar functions of two tokens on a tile in registers.

The rows of a tile are the tokens of one side, its columns those of the other. A value that depends on one side alone
is computed once for each row or column, and only one that depends on both for each element.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.control_flow import cond
from pallas_fa2.ir.comparisons import FLIPPED, ComparisonSimplifier, with_terms
from pallas_fa2.ir.floor_division import simplify_floor_division
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.legality import NARROW
from pallas_fa2.ir.tile_values import DEFAULT_OPS, TargetOps, TileValue, bind, broadcast_to_tile

# float32 holds integers exactly up to this.
EXACT_INTEGERS = 2.0**24


def evaluate(
    code: ClosedJaxpr,
    args: Sequence[TileValue],
    shape: tuple[int, ...],
    ops: TargetOps = DEFAULT_OPS,
) -> list[TileValue]:
    """Return the results of the code on a tile of this shape, by the operations of the target."""
    comparisons = ComparisonSimplifier(shape, ops)

    def apply(eqn: Any, ins: list[TileValue]) -> list[TileValue]:
        if (inner := inner_jaxpr(eqn)) is not None:
            if (result := simplify_floor_division(eqn, ins, shape, ops)) is not None:
                return [result]
            return interpret_jaxpr(*inner, ins, _constant, apply)
        if _converts_constant(eqn, ins):
            return [_constant(np.asarray(ins[0].array, eqn.params["new_dtype"]))]
        name, dtype = eqn.primitive.name, eqn.outvars[0].aval.dtype
        axes = tuple(sorted({axis for x in ins for axis in x.axes}))
        dtypes = {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)}
        rule = _RULES.get(name) if dtypes <= {"float32", *NARROW} else None
        if ins[0].as_float is not None and (name, dtype) == ("convert_element_type", jnp.float32):
            return [ins[0].as_float]
        if rule is not None:
            result = rule(_RuleContext(shape, axes, ops), *ins, **eqn.params)
            return [result if isinstance(result, TileValue) else TileValue(result, axes)]
        if (simplified := _simplify_comparison(eqn, ins, comparisons)) is not None:
            return [simplified]
        result = bind(eqn.primitive, ins, shape, ops, **eqn.params)
        if dtype == jnp.int32:
            result = _track_bounds(result, eqn.primitive, _RuleContext(shape, axes, ops), ins)
        return [result]

    return interpret_jaxpr(code.jaxpr, code.consts, list(args), _constant, apply)


def _converts_constant(eqn: Any, ins: list[TileValue]) -> bool:
    # Under x64, Python's integers are 64 bits wide until such a conversion.
    is_constant = isinstance(ins[0].array, np.ndarray) and ins[0].factor == 1.0
    return eqn.primitive.name == "convert_element_type" and is_constant


def _simplify_comparison(
    eqn: Any, ins: list[TileValue], comparisons: ComparisonSimplifier
) -> TileValue | None:
    """Evaluate a comparison of integers, or a conjunction or disjunction of some, if it can be simplified."""
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    if name in FLIPPED and dtype == jnp.int32:
        return comparisons.compare(name, *ins)
    if name == "and" and dtype == jnp.bool_:
        return comparisons.and_(*ins)
    return comparisons.or_(*ins) if name == "or" else None


def _track_bounds(
    result: TileValue, primitive: Any, tile: "_RuleContext", ins: list[TileValue]
) -> TileValue:
    """Record an integer's bound, its value as a float if that is exact, and the terms of a sum."""
    name, max_abs = primitive.name, sum(x.max_abs for x in ins)
    if name not in ("add", "sub", "neg", "abs") or max_abs > EXACT_INTEGERS:
        return result
    floats = [tile.materialize(x.as_float) for x in ins if x.as_float is not None]
    if len(floats) < len(ins):
        return result
    as_float = TileValue(primitive.bind(*floats), result.axes)
    result = result._replace(as_float=as_float, max_abs=max_abs)
    if name == "abs" and ins[0].affine is not None:
        return result._replace(abs_of=ins[0])
    return with_terms(result, name, *ins) if name in ("add", "sub") else result


def _constant(x: np.ndarray) -> TileValue:
    if x.dtype == np.int32:
        return TileValue(x, as_float=TileValue(x.astype(np.float32)), max_abs=abs(float(x)))
    return TileValue(x.astype(np.float32) if x.dtype.name in NARROW else x)


class _RuleContext(NamedTuple):
    """The shape of the tile, the axes over which a rule's result varies, and the operations of the target."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    ops: TargetOps

    def materialize(self, x: TileValue, factor: float = 1.0) -> Any:
        factor *= x.factor
        array = broadcast_to_tile(x._replace(factor=1.0), self.axes, self.shape, self.ops)
        return array if factor == 1.0 else array * factor

    def invert(self, array: Any) -> Any:
        return self.ops.reciprocal(array) if self.axes == (0, 1) else 1 / array

    def mul(self, x: TileValue, y: TileValue) -> TileValue:
        for constant, value in ((x, y), (y, x)):
            if constant.axes == () and isinstance(constant.array, np.ndarray):
                factor = constant.factor * float(constant.array)
                return value._replace(factor=value.factor * factor)
        factor = x.factor * y.factor
        x, y = x._replace(factor=1.0), y._replace(factor=1.0)
        return TileValue(self.materialize(x) * self.materialize(y), self.axes, factor)

    def div(self, x: TileValue, y: TileValue) -> TileValue:
        if y.axes == () and isinstance(y.array, np.ndarray):
            return self.mul(x, TileValue(np.float32(1.0) / (y.array * np.float32(y.factor))))
        y_context = self._replace(axes=y.axes)
        return self.mul(x, TileValue(y_context.invert(y_context.materialize(y)), y.axes))

    def tanh(self, x: TileValue, scale: float = 1.0) -> Any:
        """Return tanh(scale x), with a relative error of 6e-7 near 0.

        tanh.approx.f32 has an error of 5e-4, which a soft cap of 50 makes 2.5 % of a probability. By exponentials, tanh
        takes two results of the multi-function unit, whose speed bounds attention. So near 0, where most capped scores
        are, it is a polynomial, which is as precise.
        """

        def exponential_form(array: Any, factor: float) -> Any:
            return 1 - 2 * self.invert(1 + jnp.exp2(array * (factor * 2 * LOG2E)))

        if self.axes != (0, 1) or self.ops.any_abs_ge_2 is None:
            return exponential_form(self.materialize(x, scale), 1.0)
        array = self.materialize(x, scale * 2 / TANH_POLY_LIMIT)

        def polynomial() -> Any:
            x2 = array * array
            coefficients = [
                c * (TANH_POLY_LIMIT / 2) ** (2 * i + 1) for i, c in enumerate(TANH_POLY)
            ]
            return array * functools.reduce(lambda sum, c: sum * x2 + c, reversed(coefficients))

        far = self.ops.any_abs_ge_2(array)
        return cond(far, lambda: exponential_form(array, TANH_POLY_LIMIT / 2), polynomial)

    def logistic(self, x: TileValue) -> Any:
        return 0.5 + 0.5 * self.tanh(x, 0.5)

    def exp(self, x: TileValue) -> Any:
        return jnp.exp2(self.materialize(x, LOG2E))

    def integer_pow(self, x: TileValue, y: int) -> Any:
        powers, array, n = [], self.materialize(x), abs(y)
        while n:
            powers += [array] if n % 2 else []
            array, n = array * array, n // 2
        result = functools.reduce(operator.mul, powers) if powers else jnp.ones_like(array)
        return self.invert(result) if y < 0 else result

    def range_reduced(self, x: TileValue, function: Callable) -> Any:
        """Apply a function to the angle modulo 2 pi: sin.approx.f32 is precise near 0 (Cody and Waite's reduction)."""
        high = 6.28125  # has 8 bits: its product with up to 65,536 turns is exact
        low = 2 * math.pi - high
        angle = self.materialize(x)
        turns = lax.round(angle * (0.5 / math.pi), lax.RoundingMethod.TO_NEAREST_EVEN)
        return function(angle - turns * high - turns * low)


# The coefficients of tanh(x) / x in powers of x^2, fitted: the relative error is 6e-7 up to |x| = TANH_POLY_LIMIT.
TANH_POLY_LIMIT = 0.5
TANH_POLY = (0.9999995, -0.33326313, 0.13190280, -0.04440216)

# For what Mosaic computes with too little precision, or slowly, or not at all.
_RULES: dict[str, Callable] = {
    "mul": lambda tile, x, y, **_: tile.mul(x, y),
    "div": lambda tile, x, y, **_: tile.div(x, y),
    "neg": lambda tile, x, **_: x._replace(factor=-x.factor),
    "tanh": lambda tile, x, **_: tile.tanh(x),
    "logistic": lambda tile, x, **_: tile.logistic(x),
    "exp": lambda tile, x, **_: tile.exp(x),
    "exp2": lambda tile, x, **_: jnp.exp2(tile.materialize(x)),
    "expm1": lambda tile, x, **_: tile.exp(x) - 1,
    "log1p": lambda tile, x, **_: jnp.log(1 + tile.materialize(x)),
    "sin": lambda tile, x, **_: tile.range_reduced(x, lax.sin),
    "cos": lambda tile, x, **_: tile.range_reduced(x, lax.cos),
    "square": lambda tile, x, **_: tile.integer_pow(x, 2),
    "one_minus_square": lambda tile, x, **_: 1 - tile.integer_pow(x, 2),
    "integer_pow": lambda tile, x, y, **_: tile.integer_pow(x, y),
    "add_any": lambda tile, x, y, **_: tile.materialize(x) + tile.materialize(y),
    "convert_element_type": lambda tile, x, **_: x,
    "stop_gradient": lambda tile, x, **_: x,
    "copy": lambda tile, x, **_: x,
}


def dce(code: ClosedJaxpr) -> tuple[ClosedJaxpr, list[bool]]:
    """Remove the code that no result needs; return it and which arguments are still used."""
    jaxpr, used = dce_jaxpr(code.jaxpr, [True] * len(code.jaxpr.outvars))
    return ClosedJaxpr(jaxpr, code.consts), used
