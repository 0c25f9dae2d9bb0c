"""Affine forms of positions, by which the code of a causal mask or a window is recognized: kernels then need not
evaluate it."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from jax.core import ShapedArray

from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.trace import TracedFn

# Up to this, the sum of two indices and a constant fits int32.
MAX_SAFE_INT = 2**29


class AffineForm(NamedTuple):
    """The integer `q * q.index + k * k.index + shift`."""

    q: int
    k: int
    shift: int

    def __neg__(self) -> "AffineForm":
        return AffineForm(-self.q, -self.k, -self.shift)


class DistanceRange(NamedTuple):
    """The pairs with `least <= k.index - q.index <= most`; None is unlimited on that side."""

    least: int | None = None
    most: int | None = None


@functools.lru_cache(maxsize=512)
def distance_range(mask: TracedFn) -> DistanceRange | None:
    """Return the range of distances whose pairs a mask lets attend, and no others; None if its code is no such range.

    It is (None, 0) for a causal mask, (-left, right) for a window, (1 - size, 0) for a causal one.
    """
    num_data = len(mask.jaxpr.in_avals) - 2
    args = [AffineForm(1, 0, 0), AffineForm(0, 1, 0), *[None] * num_data]
    (result,) = interpret_jaxpr(mask.jaxpr.jaxpr, mask.jaxpr.consts, args, _constant, _apply)
    return result


def causal_offset(mask: TracedFn) -> int | None:
    """Return n if by its code query i attends to keys 0 to i + n and to no others, otherwise None."""
    distances = distance_range(mask)
    return distances.most if distances is not None and distances.least is None else None


def _constant(x: Any) -> AffineForm | DistanceRange | None:
    x = np.asarray(x)
    if x.shape == () and x.dtype == bool:
        return DistanceRange() if x else None
    return _small(AffineForm(0, 0, int(x))) if x.shape == () and x.dtype == np.int32 else None


def _small(x: AffineForm) -> AffineForm | None:
    return x if abs(x.q) <= 1 and abs(x.k) <= 1 and abs(x.shift) <= MAX_SAFE_INT else None


def _sum(x: AffineForm, y: AffineForm) -> AffineForm:
    return AffineForm(*map(operator.add, x, y))


def _at_least(x: AffineForm, y: AffineForm, by: int = 0) -> DistanceRange | None:
    """Return where `x - y >= by`, an inequality of `k.index - q.index`."""
    q, k, shift = x.q - y.q, x.k - y.k, x.shift - y.shift - by
    if abs(shift) > MAX_SAFE_INT:
        return None
    return {(1, -1): DistanceRange(most=shift), (-1, 1): DistanceRange(least=-shift)}.get((q, k))


def _intersection(x: DistanceRange, y: DistanceRange) -> DistanceRange:
    def pick(choose: Callable, *limits: int | None) -> int | None:
        return choose((n for n in limits if n is not None), default=None)

    return DistanceRange(pick(max, x.least, y.least), pick(min, x.most, y.most))


def _union(x: DistanceRange, y: DistanceRange) -> DistanceRange | None:
    """Return the union of two ranges that are limited on the same side and not on the other."""
    outside = _complement(x), _complement(y)
    return None if None in outside else _complement(_intersection(*outside))  # pyright: ignore


def _complement(x: DistanceRange) -> DistanceRange | None:
    """Return the complement of a range that is limited on one side alone."""
    match x:
        case (None, int(most)):
            return DistanceRange(least=most + 1)
        case (int(least), None):
            return DistanceRange(most=least - 1)
    return None


_INTEGER_RULES: dict[str, Callable] = {
    "add": _sum,
    "sub": lambda x, y: _sum(x, -y),
    "neg": operator.neg,
    "ge": _at_least,
    "gt": lambda x, y: _at_least(x, y, 1),
    "le": lambda x, y: _at_least(y, x),
    "lt": lambda x, y: _at_least(y, x, 1),
}
_BOOLEAN_RULES: dict[str, Callable] = {
    "and": _intersection,
    "or": _union,
    "not": _complement,
}


def _apply(eqn: Any, ins: list) -> list:
    if (inner := inner_jaxpr(eqn)) is not None:
        return interpret_jaxpr(*inner, ins, _constant, _apply)
    dtypes = {cast(ShapedArray, x.aval).dtype for x in eqn.invars}
    rules = {np.dtype(np.int32): _INTEGER_RULES, np.dtype(bool): _BOOLEAN_RULES}
    rule = rules.get(dtypes.pop(), {}).get(eqn.primitive.name) if len(dtypes) == 1 else None
    if rule is None or any(x is None for x in ins):
        return [None] * len(eqn.outvars)
    result = rule(*ins)
    return [_small(result) if isinstance(result, AffineForm) else result]
