"""Interval arithmetic on the jaxpr of a mask.

The fields of a tile's tokens are replaced by their range over the tile; the mask's scalar code then
runs on intervals. A boolean is an interval too: its lower bound is "true everywhere in the tile",
its upper bound "true somewhere". Every rule is sound: where nothing is known, the interval is the
whole range of its dtype. The cost is one evaluation for each tile; no [T, S] array is ever built."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.ir.arrays import NUM_LEADING_AXES
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.jnp_calls import DIVIDE, REMAINDER, jnp_call
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.ir.ptxas_safe import abs_ptxas_safe, neg_ptxas_safe


class Interval(NamedTuple):
    """Element-wise lower and upper bounds. A NaN bound is no bound; comparisons respect that."""

    lo: jax.Array
    hi: jax.Array


Rule = Callable[..., Interval]


def top(shape: tuple[int, ...], dtype: Any) -> Interval:
    """Return the whole range of a dtype, the top of the lattice."""
    if dtype == jnp.bool_:
        return Interval(jnp.zeros(shape, bool), jnp.ones(shape, bool))
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return Interval(jnp.full(shape, info.min, dtype), jnp.full(shape, info.max, dtype))
    return Interval(jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype))


def _where_valid(invalid: jax.Array, x: Interval) -> Interval:
    """Replace an interval by the whole range of its dtype where it is `invalid`."""
    unknown = top(invalid.shape, x.lo.dtype)
    return Interval(jnp.where(invalid, unknown.lo, x.lo), jnp.where(invalid, unknown.hi, x.hi))


def _monotone(f: Callable) -> Rule:
    return lambda *args: Interval(f(*(a.lo for a in args)), f(*(a.hi for a in args)))


def _extremes(f: Callable, *bounds: tuple) -> Interval:
    """Return the extremes of `f` over combinations of bounds, or the whole range where an integer wraps around."""
    values = [f(*c) for c in bounds]
    lo, hi = functools.reduce(jnp.minimum, values), functools.reduce(jnp.maximum, values)
    dtype = lo.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        # Infinities inside the tile may give NaN (inf - inf, 0 * inf).
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(x) for c in bounds for x in c])
        return _where_valid(~jnp.broadcast_to(finite, lo.shape), Interval(lo, hi))
    # float32 has 24 bits of precision: the limits are four units in the last place inside the dtype's.
    margin = 1.0 - 2.0**-22
    limit = jnp.float32(float(jnp.iinfo(dtype).max) * margin)
    floor = jnp.float32(float(jnp.iinfo(dtype).min) * margin)
    rough = [f(*(x.astype(jnp.float32) for x in c)) for c in bounds]
    wrapped = functools.reduce(jnp.logical_or, [(x > limit) | (x < floor) for x in rough])
    return _where_valid(wrapped, Interval(lo, hi))


def _add(a: Interval, b: Interval) -> Interval:
    return _extremes(jnp.add, (a.lo, b.lo), (a.hi, b.hi))


def _sub(a: Interval, b: Interval) -> Interval:
    return _extremes(jnp.subtract, (a.lo, b.hi), (a.hi, b.lo))


def _mul(a: Interval, b: Interval) -> Interval:
    return _extremes(jnp.multiply, *itertools.product(a, b))


def _neg(a: Interval) -> Interval:
    if jnp.issubdtype(a.lo.dtype, jnp.unsignedinteger):  # wraps
        return top(a.lo.shape, a.lo.dtype)
    return _where_valid(
        _has_no_opposite(a.lo), Interval(neg_ptxas_safe(a.hi), neg_ptxas_safe(a.lo))
    )


def _abs(a: Interval) -> Interval:
    if jnp.issubdtype(a.lo.dtype, jnp.unsignedinteger):
        return a
    abs_lo, abs_hi = map(abs_ptxas_safe, a)
    lo = jnp.where((a.lo < 0) & (a.hi > 0), 0, jnp.minimum(abs_lo, abs_hi))
    return _where_valid(_has_no_opposite(a.lo), Interval(lo, jnp.maximum(abs_lo, abs_hi)))


def _has_no_opposite(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.zeros(x.shape, bool)
    return x == jnp.iinfo(x.dtype).min


def _positive_constant(b: Interval) -> jax.Array:
    return (b.lo == b.hi) & (b.lo > 0)


def _div(a: Interval, b: Interval) -> Interval:
    """Divide by a positive constant, truncating integers towards 0."""
    known = _positive_constant(b)
    if not jnp.issubdtype(a.lo.dtype, jnp.integer):
        return _where_valid(~known, Interval(a.lo / b.lo, a.hi / b.hi))
    n = jnp.where(known, b.lo, 1)
    quotients = (lax.div(*match_varying_axes(jnp.broadcast_arrays(x, n))) for x in (a.lo, a.hi))
    return _where_valid(~known, Interval(*quotients))


def _floor_divide(a: Interval, b: Interval) -> Interval:
    known = _positive_constant(b)
    n = jnp.where(known, b.lo, 1)
    return _where_valid(~known, Interval(a.lo // n, a.hi // n))


def _remainder(a: Interval, b: Interval) -> Interval:
    """Take Python's remainder by a positive constant, exactly while the tile stays inside one period."""
    known = _positive_constant(b)
    n = jnp.where(known, b.lo, 1)
    same = a.lo // n == a.hi // n
    x = Interval(jnp.where(same, a.lo % n, 0), jnp.where(same, a.hi % n, n - 1))
    return _where_valid(~known, x)


def _rem(a: Interval, b: Interval) -> Interval:
    """Take C's remainder of a nonnegative dividend: its sign is the dividend's."""
    known = _positive_constant(b) & (a.lo >= 0)
    return _where_valid(~known, _remainder(a, b))


def _only(kind: Any, rule: Rule) -> Rule:
    """Return a rule for operands of one kind of dtype; for others the result is the whole range."""

    def checked(*args: Interval) -> Interval:
        if jnp.issubdtype(args[0].lo.dtype, kind):
            return rule(*args)
        return top(jnp.broadcast_shapes(*(x.lo.shape for x in args)), args[0].lo.dtype)

    return checked


# A comparison is "true somewhere" unless its opposite certainly holds; a NaN bound proves neither.
def _lt(a: Interval, b: Interval) -> Interval:
    return Interval(a.hi < b.lo, ~(a.lo >= b.hi))


def _le(a: Interval, b: Interval) -> Interval:
    return Interval(a.hi <= b.lo, ~(a.lo > b.hi))


def _eq(a: Interval, b: Interval) -> Interval:
    if a.lo.dtype == jnp.bool_:
        return _not(_ne(a, b))
    point = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
    return Interval(point, ~((a.hi < b.lo) | (b.hi < a.lo)))


def _ne(a: Interval, b: Interval) -> Interval:
    if a.lo.dtype == jnp.bool_:
        known = (a.lo == a.hi) & (b.lo == b.hi)
        return _where_valid(~known, Interval(a.lo != b.lo, a.lo != b.lo))
    return _not(_eq(a, b))


def _not(a: Interval) -> Interval:
    return Interval(~a.hi, ~a.lo)


def _select(which: Interval, *cases: Interval) -> Interval:
    if which.lo.dtype != jnp.bool_ or len(cases) != 2:
        return top(which.lo.shape, cases[0].lo.dtype)
    on_false, on_true = cases

    def join(f: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(which.lo, y, jnp.where(~which.hi, x, f(x, y)))

    smaller, larger = (
        (jnp.logical_and, jnp.logical_or)
        if on_false.lo.dtype == jnp.bool_
        else (jnp.minimum, jnp.maximum)
    )
    return Interval(join(smaller, on_false.lo, on_true.lo), join(larger, on_false.hi, on_true.hi))


def _clamp(lo: Interval, x: Interval, hi: Interval) -> Interval:
    return _monotone(jnp.minimum)(_monotone(jnp.maximum)(x, lo), hi)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "div": _div,
    "rem": _only(jnp.integer, _rem),
    "max": _monotone(jnp.maximum),
    "min": _monotone(jnp.minimum),
    "sign": _monotone(jnp.sign),
    "floor": _monotone(jnp.floor),
    "ceil": _monotone(jnp.ceil),
    "clamp": _clamp,
    "lt": _lt,
    "le": _le,
    "gt": lambda a, b: _lt(b, a),
    "ge": lambda a, b: _le(b, a),
    "eq": _eq,
    "ne": _ne,
    "and": _only(jnp.bool_, _monotone(jnp.logical_and)),
    "or": _only(jnp.bool_, _monotone(jnp.logical_or)),
    "not": _only(jnp.bool_, _not),
    "select_n": _select,
    "stop_gradient": lambda a: a,
    "copy": lambda a: a,
}

# Functions of jax.numpy; the rules for each operation of their jaxprs would give wider intervals.
JNP_RULES: dict[str, Rule] = {
    DIVIDE: _only(jnp.integer, _floor_divide),
    REMAINDER: _only(jnp.integer, _remainder),
}


def _convert(a: Interval, dtype: Any) -> Interval:
    old = a.lo.dtype
    if old == dtype:
        return a
    if old == jnp.bool_:
        return Interval(a.lo.astype(dtype), a.hi.astype(dtype))
    if dtype == jnp.bool_:
        return _ne(a, Interval(jnp.zeros_like(a.lo), jnp.zeros_like(a.hi)))
    widening = jnp.issubdtype(dtype, jnp.floating) or (
        jnp.issubdtype(old, jnp.integer)
        and jnp.iinfo(dtype).min <= jnp.iinfo(old).min
        and jnp.iinfo(dtype).max >= jnp.iinfo(old).max
    )
    if widening:  # rounding is monotone
        return Interval(a.lo.astype(dtype), a.hi.astype(dtype))
    return top(a.lo.shape, dtype)


def evaluate(jaxpr: Any, consts: Any, args: list[Interval]) -> list[Interval]:
    """Evaluate a jaxpr of scalars on intervals whose arrays broadcast against each other."""

    def point(x: Any) -> Interval:
        x = jnp.asarray(x)
        x = x.reshape((1,) * NUM_LEADING_AXES) if x.ndim == 0 else x
        return Interval(x, x)

    return interpret_jaxpr(jaxpr, consts, args, point, apply_rule)


def jnp_rule(eqn: Any) -> Rule | None:
    """Return the rule for an equation that calls jax.numpy's `//` or `%` on operands of one dtype."""
    name = jnp_call(eqn)
    return JNP_RULES[name] if name and len({v.aval.dtype for v in eqn.invars}) == 1 else None


def apply_rule(eqn: Any, ins: list[Interval]) -> list[Interval]:
    """Return the intervals of an equation's results: the whole range of the dtype where there is no rule."""
    name = eqn.primitive.name
    scalar = all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars))
    if scalar and (rule := jnp_rule(eqn)) is not None:
        return [rule(*ins)]
    if scalar and (inner := inner_jaxpr(eqn)) is not None:
        return evaluate(*inner, ins)
    if scalar and name == "convert_element_type":
        return [_convert(ins[0], eqn.params["new_dtype"])]
    if scalar and name in RULES:
        return [RULES[name](*ins)]
    shape = jnp.broadcast_shapes(
        *(x.lo.shape[:NUM_LEADING_AXES] for x in ins), (1,) * NUM_LEADING_AXES
    )
    return [top(shape, v.aval.dtype) for v in eqn.outvars]
