"""Scalar functions of two tokens on a tile in registers.

A tile's rows are the tokens of one side, its columns those of the other. What depends on one side alone
is computed once a row or a column; only what depends on both takes a value for each element.
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
from pallas_fa2.ir.comparisons import FLIPPED, ComparisonSimplifier, with_sum
from pallas_fa2.ir.floor_division import simplify_floor_division
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.legality import NARROW
from pallas_fa2.ir.tile_values import DEFAULT_OPS, TargetOps, TileValue, bind, broadcast_to_tile

# That float32 holds.
EXACT_INTEGERS = 2.0**24


def evaluate(
    code: ClosedJaxpr,
    args: Sequence[TileValue],
    shape: tuple[int, ...],
    functions: TargetOps = DEFAULT_OPS,
) -> list[TileValue]:
    """The results of the code."""
    comparisons = ComparisonSimplifier(shape, functions)

    def apply(eqn: Any, ins: list[TileValue]) -> list[TileValue]:
        if (inner := inner_jaxpr(eqn)) is not None:
            found = simplify_floor_division(eqn, ins, shape, functions)
            return [found] if found is not None else interpret_jaxpr(*inner, ins, _constant, apply)
        if _converts_a_constant(eqn, ins):
            return [_constant(np.asarray(ins[0].array, eqn.params["new_dtype"]))]
        axes = tuple(sorted({axis for x in ins for axis in x.axes}))
        dtypes = {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)}
        rule = _RULES.get(eqn.primitive.name) if dtypes <= {"float32", *NARROW} else None
        if ins[0].as_float is not None and _becomes_real(eqn):
            return [ins[0].as_float]
        if rule is not None:
            found = rule(_RuleContext(shape, axes, functions), *ins, **eqn.params)
            return [found if isinstance(found, TileValue) else TileValue(found, axes)]
        if (joined := _simplify_comparison(eqn, ins, comparisons)) is not None:
            return [joined]
        found = bind(eqn.primitive, ins, shape, functions, **eqn.params)
        if eqn.outvars[0].aval.dtype == jnp.int32:
            found = _track_bounds(found, eqn.primitive, _RuleContext(shape, axes, functions), ins)
        return [found]

    return interpret_jaxpr(code.jaxpr, code.consts, list(args), _constant, apply)


def _converts_a_constant(eqn: Any, ins: list[TileValue]) -> bool:
    """Under x64, Python's integers are 64 bits wide until then."""
    found = eqn.primitive.name == "convert_element_type" and isinstance(ins[0].array, np.ndarray)
    return found and ins[0].factor == 1.0


def _becomes_real(eqn: Any) -> bool:
    return eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.float32


def _simplify_comparison(
    eqn: Any, ins: list[TileValue], comparisons: ComparisonSimplifier
) -> TileValue | None:
    """A comparison of integers, or several, in fewer instructions than one at a time."""
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    if name in FLIPPED and dtype == jnp.int32:
        return comparisons.compare(name, *ins)
    if name == "and" and dtype == jnp.bool_:
        return comparisons.and_(*ins)
    return comparisons.or_(*ins) if name == "or" else None


def _track_bounds(
    found: TileValue, primitive: Any, tile: "_RuleContext", ins: list[TileValue]
) -> TileValue:
    """With the float as well, if it is exact, and what a sum consists of."""
    most = sum(x.max_abs for x in ins)
    if primitive.name not in ("add", "sub", "neg", "abs") or most > EXACT_INTEGERS:
        return found
    reals = [tile.materialize(x.as_float) for x in ins if x.as_float is not None]
    if len(reals) < len(ins):
        return found
    found = found._replace(as_float=TileValue(primitive.bind(*reals), found.axes), max_abs=most)
    if primitive.name == "abs" and ins[0].affine is not None:
        return found._replace(abs_of=ins[0])
    return with_sum(found, primitive.name, *ins) if primitive.name in ("add", "sub") else found


def _constant(x: np.ndarray) -> TileValue:
    if x.dtype == np.int32:
        return TileValue(x, as_float=TileValue(x.astype(np.float32)), max_abs=abs(float(x)))
    return TileValue(x.astype(np.float32) if x.dtype.name in NARROW else x)


class _RuleContext(NamedTuple):
    """Of which a rule computes a value."""

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
        for constant, other in ((x, y), (y, x)):
            if constant.axes == () and isinstance(constant.array, np.ndarray):
                factor = constant.factor * float(constant.array)
                return other._replace(factor=other.factor * factor)
        factor = x.factor * y.factor
        x, y = x._replace(factor=1.0), y._replace(factor=1.0)
        return TileValue(self.materialize(x) * self.materialize(y), self.axes, factor)

    def div(self, x: TileValue, y: TileValue) -> TileValue:
        if y.axes == () and isinstance(y.array, np.ndarray):
            return self.mul(x, TileValue(np.float32(1.0) / (y.array * np.float32(y.factor))))
        of_y = self._replace(axes=y.axes)
        return self.mul(x, TileValue(of_y.invert(of_y.materialize(y)), y.axes))

    def tanh(self, x: TileValue, scale: float = 1.0) -> Any:
        """tanh(scale x). tanh.approx.f32 is off by 5e-4, which a cap of 50 makes 2.5 % of a probability.

        By its exponential it takes two results of the multi-function unit, whose speed bounds attention;
        so near 0, where scores that are capped mostly are, it is a polynomial, as precise.
        """

        def by_exponential(array: Any, factor: float) -> Any:
            return 1 - 2 * self.invert(1 + jnp.exp2(array * (factor * 2 * LOG2E)))

        if self.axes != (0, 1) or self.ops.any_abs_ge_2 is None:
            return by_exponential(self.materialize(x, scale), 1.0)
        array = self.materialize(x, scale * 2 / TANH_POLY_LIMIT)

        def by_polynomial() -> Any:
            square = array * array
            powers = [c * (TANH_POLY_LIMIT / 2) ** (2 * i + 1) for i, c in enumerate(TANH_POLY)]
            return array * functools.reduce(lambda sum, c: sum * square + c, reversed(powers))

        far = self.ops.any_abs_ge_2(array)
        return cond(far, lambda: by_exponential(array, TANH_POLY_LIMIT / 2), by_polynomial)

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
        """Of an angle near 0, as sin.approx.f32 wants it; 2 pi in two parts (Cody and Waite)."""
        high = 6.28125  # of 8 bits: its product with a number of turns up to 65,536 is exact
        low = 2 * math.pi - high
        angle = self.materialize(x)
        turns = lax.round(angle * (0.5 / math.pi), lax.RoundingMethod.TO_NEAREST_EVEN)
        return function(angle - turns * high - turns * low)


# tanh(x) / x by powers of x^2, fitted: relative error 6e-7 up to |x| = NEAR.
TANH_POLY_LIMIT = 0.5
TANH_POLY = (0.9999995, -0.33326313, 0.13190280, -0.04440216)

# What Mosaic computes too roughly or slowly, or not at all.
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
    """Without what its results do not need, and which arguments are left."""
    jaxpr, used = dce_jaxpr(code.jaxpr, [True] * len(code.jaxpr.outvars))
    return ClosedJaxpr(jaxpr, code.consts), used
