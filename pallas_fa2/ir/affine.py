"""Affine forms of positions, by which the code of a causal mask is recognized: kernels then need not evaluate it."""

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
    """The integer `q * q.index + k * k.index + shift`; for a boolean, it is true where that is 0 or more."""

    q: int
    k: int
    shift: int

    def __neg__(self) -> "AffineForm":
        return AffineForm(-self.q, -self.k, -self.shift)


@functools.lru_cache(maxsize=512)
def causal_offset(mask: TracedFn) -> int | None:
    """Return n if by its code query i attends to keys 0 to i + n and to no others, otherwise None."""
    num_data = len(mask.jaxpr.in_avals) - 2
    args = [AffineForm(1, 0, 0), AffineForm(0, 1, 0), *[None] * num_data]
    (form,) = interpret_jaxpr(mask.jaxpr.jaxpr, mask.jaxpr.consts, args, _constant, _apply)
    return form.shift if form is not None and (form.q, form.k) == (1, -1) else None


def _constant(x: Any) -> AffineForm | None:
    x = np.asarray(x)
    return _small(AffineForm(0, 0, int(x))) if x.shape == () and x.dtype == np.int32 else None


def _small(x: AffineForm) -> AffineForm | None:
    return x if abs(x.q) <= 1 and abs(x.k) <= 1 and abs(x.shift) <= MAX_SAFE_INT else None


def _sum(x: AffineForm, y: AffineForm) -> AffineForm:
    return AffineForm(*map(operator.add, x, y))


def _at_least(x: AffineForm, y: AffineForm, by: int = 0) -> AffineForm:
    return AffineForm(x.q - y.q, x.k - y.k, x.shift - y.shift - by)


def _same_slope(pick: Callable) -> Callable:
    def rule(x: AffineForm, y: AffineForm) -> AffineForm | None:
        return x._replace(shift=pick(x.shift, y.shift)) if x[:2] == y[:2] else None

    return rule


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
    "and": _same_slope(min),
    "or": _same_slope(max),
    "not": lambda x: (-x)._replace(shift=-x.shift - 1),
}


def _apply(eqn: Any, ins: list[AffineForm | None]) -> list[AffineForm | None]:
    if (inner := inner_jaxpr(eqn)) is not None:
        return interpret_jaxpr(*inner, ins, _constant, _apply)
    dtypes = {cast(ShapedArray, x.aval).dtype for x in eqn.invars}
    rules = {np.dtype(np.int32): _INTEGER_RULES, np.dtype(bool): _BOOLEAN_RULES}
    rule = rules.get(dtypes.pop(), {}).get(eqn.primitive.name) if len(dtypes) == 1 else None
    if rule is None or any(x is None for x in ins):
        return [None] * len(eqn.outvars)
    form = rule(*ins)
    return [form and _small(form)]
