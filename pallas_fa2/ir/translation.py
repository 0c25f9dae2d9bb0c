"""How a mask's or score's value changes where all positions move by one distance.

A shard of a sequence can then count its own tokens from 0: causal masks, windows and ALiBi read differences of
positions alone, and their code is that of one device with an offset between queries and keys.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa2.ir import intervals
from pallas_fa2.ir.arrays import NUM_LEADING_AXES
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL, eval_at_trace_time
from pallas_fa2.ir.call_spec import reads_argument
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.intervals import Interval
from pallas_fa2.ir.trace import TracedFn


def reads_positions(code: TracedFn) -> bool:
    """Return whether the code of a mask or a score reads `q.index` or `k.index`."""
    first = _first_position_argument(code)
    return reads_argument(code, first) or reads_argument(code, first + 1)


@functools.lru_cache(maxsize=512)
def is_translation_invariant(code: TracedFn) -> bool:
    """Return whether the code proves that a mask or score is the same where all positions are greater by any one
    number.

    Each value v has a degree d: where positions grow by t, v grows by d t. It is None where there is none.
    """
    degrees: list[int | None] = [0] * len(code.jaxpr.in_avals)
    first = _first_position_argument(code)
    degrees[first] = degrees[first + 1] = 1
    (degree,) = interpret_jaxpr(
        code.jaxpr.jaxpr, code.jaxpr.consts, degrees, lambda x: 0, _apply_to_degrees
    )
    return degree == 0


def _first_position_argument(code: TracedFn) -> int:
    """Return 0 for a mask, whose arguments are (q.index, k.index, data), and 1 for a score, whose first is the
    score."""
    return 0 if code.jaxpr.out_avals[0].dtype == jnp.bool_ else 1  # pyright: ignore


def _same(*degrees: int | None) -> int | None:
    return degrees[0] if len(set(degrees)) == 1 else None


def _compared(a: int, b: int) -> int | None:
    return 0 if a == b else None


def _selected(which: int, *cases: int) -> int | None:
    return _same(*cases) if which == 0 else None


_DEGREE_RULES: dict[str, Callable] = {
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
    "max": _same,
    "min": _same,
    "select_n": _selected,
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compared),
}


def _apply_to_degrees(eqn: Any, ins: list[int | None]) -> list[int | None]:
    if (inner := inner_jaxpr(eqn)) is not None:
        return interpret_jaxpr(*inner, ins, lambda x: 0, _apply_to_degrees)
    if all(degree == 0 for degree in ins):
        return [0] * len(eqn.outvars)
    integers = all(np.issubdtype(v.aval.dtype, np.integer) for v in eqn.invars[-1:])
    rule = _DEGREE_RULES.get(eqn.primitive.name)
    if rule is None or not integers or None in ins:
        return [None] * len(eqn.outvars)
    return [rule(*ins)]


def classes_at_distances(
    mask: TracedFn, lowest: np.ndarray, highest: np.ndarray, q_len: int, kv_len: int
) -> np.ndarray:
    """Return EMPTY, PARTIAL or FULL for blocks of queries and keys, whatever the data: an array as `lowest`.

    The position of a block's first query less that of its first key is between `lowest` and `highest`. The mask must be
    translation invariant.
    """
    shape = (1, 1, 1, lowest.size, 1)
    assert len(shape) == NUM_LEADING_AXES

    def classes() -> Any:
        first, last = (jnp.asarray(x.reshape(shape), jnp.int32) for x in (lowest, highest))
        zero = jnp.zeros((1,) * NUM_LEADING_AXES, jnp.int32)
        index = (
            Interval(first, last + np.int32(q_len - 1)),
            Interval(zero, zero + np.int32(kv_len - 1)),
        )
        data = [
            intervals.top((1,) * NUM_LEADING_AXES, aval.dtype)  # pyright: ignore
            for aval in mask.jaxpr.in_avals[2:]
        ]
        (out,) = intervals.evaluate(mask.jaxpr.jaxpr, mask.jaxpr.consts, [*index, *data])
        table = jnp.where(out.lo, FULL, jnp.where(out.hi, PARTIAL, EMPTY)).astype(jnp.int32)
        return jnp.broadcast_to(table, shape)

    return eval_at_trace_time(classes).reshape(lowest.shape)
