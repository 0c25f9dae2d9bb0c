"""Which tiles a mask empties, fills or cuts, by interval arithmetic on its jaxpr.

The fields of a tile's tokens are replaced by their range over the tile; the mask's scalar code then
runs on intervals. A boolean is an interval too: its lower bound says "true everywhere in the tile",
its upper bound "true somewhere". Every rule is sound: where nothing is known, the interval is the
whole range of its dtype. The cost is one evaluation a tile; no [T, S] array is ever built.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer

from pallas_fa2.spec import Operands, Spec
from pallas_fa2.tokens import (
    K_AXIS,
    LEADING,
    Q_AXIS,
    Pointwise,
    alike,
    called,
    follow,
    magnitude,
    negative,
    off_mesh,
    traced,
)

EMPTY, PARTIAL, FULL = 0, 1, 2


class Interval(NamedTuple):
    """Element-wise bounds. A bound that is NaN bounds nothing; comparisons respect that."""

    lo: jax.Array
    hi: jax.Array


Rule = Callable[..., Interval]


def whole(shape: tuple[int, ...], dtype: Any) -> Interval:
    if dtype == jnp.bool_:
        return Interval(jnp.zeros(shape, bool), jnp.ones(shape, bool))
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return Interval(jnp.full(shape, info.min, dtype), jnp.full(shape, info.max, dtype))
    return Interval(jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype))


def _unless(bad: jax.Array, x: Interval) -> Interval:
    """`x` where it can be trusted, the whole range of its dtype where `bad`."""
    unknown = whole(bad.shape, x.lo.dtype)
    return Interval(jnp.where(bad, unknown.lo, x.lo), jnp.where(bad, unknown.hi, x.hi))


def _monotone(f: Callable) -> Rule:
    return lambda *args: Interval(f(*(a.lo for a in args)), f(*(a.hi for a in args)))


def _exact_in_range(f: Callable, *bounds: tuple) -> tuple[Interval, jax.Array]:
    """`f` at each combination of bounds: the extremes, and whether an integer wrapped around."""
    lows_and_highs = [f(*c) for c in bounds]
    lo = _reduce(jnp.minimum, lows_and_highs)
    hi = _reduce(jnp.maximum, lows_and_highs)
    dtype = lo.dtype
    if not jnp.issubdtype(dtype, jnp.integer):
        # Infinities inside the tile may give NaN (inf - inf, 0 * inf).
        finite = _reduce(jnp.logical_and, [jnp.isfinite(x) for c in bounds for x in c])
        return Interval(lo, hi), ~jnp.broadcast_to(finite, lo.shape)
    # float32 holds 24 bits: stay four units of its last place below the dtype's limits
    margin = 1.0 - 2.0**-22
    limit = jnp.float32(float(jnp.iinfo(dtype).max) * margin)
    floor = jnp.float32(float(jnp.iinfo(dtype).min) * margin)
    rough = [f(*(x.astype(jnp.float32) for x in c)) for c in bounds]
    wrapped = _reduce(jnp.logical_or, [(x > limit) | (x < floor) for x in rough])
    return Interval(lo, hi), wrapped


def _reduce(op: Callable, xs: list) -> Any:
    out = xs[0]
    for x in xs[1:]:
        out = op(out, x)
    return out


def _add(a: Interval, b: Interval) -> Interval:
    x, bad = _exact_in_range(jnp.add, (a.lo, b.lo), (a.hi, b.hi))
    return _unless(bad, x)


def _sub(a: Interval, b: Interval) -> Interval:
    x, bad = _exact_in_range(jnp.subtract, (a.lo, b.hi), (a.hi, b.lo))
    return _unless(bad, x)


def _mul(a: Interval, b: Interval) -> Interval:
    corners = ((a.lo, b.lo), (a.lo, b.hi), (a.hi, b.lo), (a.hi, b.hi))
    x, bad = _exact_in_range(jnp.multiply, *corners)
    return _unless(bad, x)


def _neg(a: Interval) -> Interval:
    if jnp.issubdtype(a.lo.dtype, jnp.unsignedinteger):  # wraps
        return whole(a.lo.shape, a.lo.dtype)
    return _unless(_has_no_opposite(a.lo), Interval(negative(a.hi), negative(a.lo)))


def _abs(a: Interval) -> Interval:
    if jnp.issubdtype(a.lo.dtype, jnp.unsignedinteger):
        return a
    of_lo, of_hi = map(magnitude, a)
    lo = jnp.where((a.lo < 0) & (a.hi > 0), 0, jnp.minimum(of_lo, of_hi))
    return _unless(_has_no_opposite(a.lo), Interval(lo, jnp.maximum(of_lo, of_hi)))


def _has_no_opposite(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.zeros(x.shape, bool)
    return x == jnp.iinfo(x.dtype).min


def _positive_constant(b: Interval) -> jax.Array:
    return (b.lo == b.hi) & (b.lo > 0)


def _div(a: Interval, b: Interval) -> Interval:
    """Truncating for integers; known for a positive constant divisor."""
    if not jnp.issubdtype(a.lo.dtype, jnp.integer):
        ok = _positive_constant(b)
        return _unless(~ok, Interval(a.lo / b.lo, a.hi / b.hi))
    ok = _positive_constant(b)
    n = jnp.where(ok, b.lo, 1)
    quotients = (lax.div(*alike(jnp.broadcast_arrays(x, n))) for x in (a.lo, a.hi))
    return _unless(~ok, Interval(*quotients))


def _floor_divide(a: Interval, b: Interval) -> Interval:
    ok = _positive_constant(b)
    n = jnp.where(ok, b.lo, 1)
    return _unless(~ok, Interval(a.lo // n, a.hi // n))


def _remainder(a: Interval, b: Interval) -> Interval:
    """Python's remainder: exact while the tile stays inside one period of a positive constant."""
    ok = _positive_constant(b)
    n = jnp.where(ok, b.lo, 1)
    same = a.lo // n == a.hi // n
    x = Interval(jnp.where(same, a.lo % n, 0), jnp.where(same, a.hi % n, n - 1))
    return _unless(~ok, x)


def _rem(a: Interval, b: Interval) -> Interval:
    """C's remainder, with the dividend's sign."""
    ok = _positive_constant(b) & (a.lo >= 0)
    return _unless(~ok, _remainder(a, b))


def _integers_only(rule: Rule) -> Rule:
    def checked(a: Interval, b: Interval) -> Interval:
        if not jnp.issubdtype(a.lo.dtype, jnp.integer):
            return whole(jnp.broadcast_shapes(a.lo.shape, b.lo.shape), a.lo.dtype)
        return rule(a, b)

    return checked


# A comparison is "somewhere true" unless its opposite holds for sure: a NaN bound then says nothing.
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
        return _unless(~known, Interval(a.lo != b.lo, a.lo != b.lo))
    return _not(_eq(a, b))


def _and(a: Interval, b: Interval) -> Interval:
    if a.lo.dtype != jnp.bool_:
        return whole(jnp.broadcast_shapes(a.lo.shape, b.lo.shape), a.lo.dtype)
    return Interval(a.lo & b.lo, a.hi & b.hi)


def _or(a: Interval, b: Interval) -> Interval:
    if a.lo.dtype != jnp.bool_:
        return whole(jnp.broadcast_shapes(a.lo.shape, b.lo.shape), a.lo.dtype)
    return Interval(a.lo | b.lo, a.hi | b.hi)


def _not(a: Interval) -> Interval:
    if a.lo.dtype != jnp.bool_:
        return whole(a.lo.shape, a.lo.dtype)
    return Interval(~a.hi, ~a.lo)


def _select(which: Interval, *cases: Interval) -> Interval:
    if which.lo.dtype != jnp.bool_ or len(cases) != 2:
        return whole(which.lo.shape, cases[0].lo.dtype)
    on_false, on_true = cases

    def either(f: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(which.lo, y, jnp.where(~which.hi, x, f(x, y)))

    smaller, larger = (
        (jnp.logical_and, jnp.logical_or)
        if on_false.lo.dtype == jnp.bool_
        else (jnp.minimum, jnp.maximum)
    )
    return Interval(
        either(smaller, on_false.lo, on_true.lo), either(larger, on_false.hi, on_true.hi)
    )


def _clamp(lo: Interval, x: Interval, hi: Interval) -> Interval:
    return _monotone(jnp.minimum)(_monotone(jnp.maximum)(x, lo), hi)


RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "neg": _neg,
    "abs": _abs,
    "div": _div,
    "rem": _integers_only(_rem),
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
    "and": _and,
    "or": _or,
    "not": _not,
    "select_n": _select,
    "stop_gradient": lambda a: a,
    "copy": lambda a: a,
}

# Functions of jax.numpy whose jaxprs lose precision step by step.
NAMED_RULES: dict[str, Rule] = {
    "floor_divide": _integers_only(_floor_divide),
    "remainder": _integers_only(_remainder),
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
    return whole(a.lo.shape, dtype)


def evaluate(jaxpr: Any, consts: Any, args: list[Interval]) -> list[Interval]:
    """Runs a jaxpr of scalars on intervals whose arrays broadcast against each other."""

    def point(x: Any) -> Interval:
        x = jnp.asarray(x)
        x = x.reshape((1,) * LEADING) if x.ndim == 0 else x
        return Interval(x, x)

    return follow(jaxpr, consts, args, point, apply)


def is_jax_numpys(eqn: Any) -> bool:
    """Whether the call is really to jax.numpy's function: a user's may have the same name."""
    name = eqn.params.get("name")
    if name not in NAMED_RULES:
        return False
    avals = [v.aval for v in eqn.invars]
    if len(avals) != 2 or avals[0].dtype != avals[1].dtype:
        return False
    # A Python number is weakly typed, and the code then converts it.
    avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals]
    theirs = traced(getattr(jnp, name), *avals).eqns[0]
    return str(theirs.params.get("jaxpr")) == str(eqn.params["jaxpr"])


def apply(eqn: Any, ins: list[Interval]) -> list[Interval]:
    name = eqn.primitive.name
    scalar = all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars))
    if scalar and name in ("pjit", "jit") and is_jax_numpys(eqn):
        return [NAMED_RULES[eqn.params["name"]](*ins)]
    if scalar and (inner := called(eqn)) is not None:
        return evaluate(*inner, ins)
    if scalar and name == "convert_element_type":
        return [_convert(ins[0], eqn.params["new_dtype"])]
    if scalar and name in RULES:
        return [RULES[name](*ins)]
    shape = jnp.broadcast_shapes(*(x.lo.shape[:LEADING] for x in ins), (1,) * LEADING)
    return [whole(shape, v.aval.dtype) for v in eqn.outvars]


# Up to so many at once are no reduction to XLA, which would be a kernel of its own.
FEW = 4


def _over_tiles(x: jax.Array, axis: int, size: int, pick: str) -> jax.Array:
    """Minimum or maximum over the tiles of one axis; the last tile may be short."""
    if x.shape[axis] == 1:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, mode="edge")
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    x = x.reshape(shape)
    if size <= FEW:
        each = [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(size)]
        return functools.reduce(jnp.minimum if pick == "min" else jnp.maximum, each)
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis + 1) if pick == "min" else jnp.any(x, axis + 1)
    return jnp.min(x, axis + 1) if pick == "min" else jnp.max(x, axis + 1)


def _tile_range(x: jax.Array, block_q: int, block_kv: int) -> Interval:
    # What both sides share, as documents are, is reduced once for both.
    common = math.gcd(block_q, block_kv)

    def over_both(pick: str) -> jax.Array:
        found = x
        for axis, block in ((Q_AXIS, block_q), (K_AXIS, block_kv)):
            found = _over_tiles(_over_tiles(found, axis, common, pick), axis, block // common, pick)
        return found

    return Interval(over_both("min"), over_both("max"))


def _positions(n: int, axis: int, block: int) -> Interval:
    """Positions 0, 1, 2, ... of one side, tile by tile."""
    start = np.arange(0, n, block, dtype=np.int32)
    shape = [1] * LEADING
    shape[axis] = start.size
    last = np.minimum(start + block, n).astype(np.int32) - 1
    return Interval(jnp.asarray(start.reshape(shape)), jnp.asarray(last.reshape(shape)))


def evaluate_now(compute: Callable[..., jax.Array], *args: Any) -> np.ndarray:
    """At trace time, what depends on no traced array: a static mask costs nothing later."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to use another platform alone
        host = None
    with off_mesh(), jax.default_device(host), jax.disable_jit(False):
        # One program: `ensure_compile_time_eval` would compile one for each operation.
        return np.asarray(jax.jit(compute).lower(*args).compile()(*args))


def classify_each(
    spec: Spec, operands: Operands, block_q: int, block_kv: int
) -> jax.Array | np.ndarray:
    """EMPTY, PARTIAL or FULL for every tile: int32 `[B | 1, K | 1, G | 1, T tiles, S tiles]`.

    A NumPy array where the mask reads no traced data: the caller can decide at trace time.
    """
    if spec.mask is None:
        return np.full(_shape(spec, block_q, block_kv), FULL, np.int32)

    def classes(q_given: Any, k_given: Any, data: Any) -> jax.Array:
        def over_tiles(x: Any) -> Interval:
            return _tile_range(x, block_q, block_kv)

        index = (over_tiles(q_given), over_tiles(k_given)) if spec.positions else None
        ranges = [over_tiles(x) for x in jax.tree.leaves(data)]
        return _classes(spec, block_q, block_kv, index, ranges)

    read = _read_by_mask(operands)
    return classes(*read) if is_traced(operands) else evaluate_now(classes, *read)


def _shape(spec: Spec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Of the classes of all tiles, where batch entries and heads have the same."""
    return 1, 1, 1, -(-spec.q_len // block_q), -(-spec.kv_len // block_kv)


def _classes(
    spec: Spec,
    block_q: int,
    block_kv: int,
    index: tuple[Interval, Interval] | None,
    data: list[Interval],
) -> jax.Array:
    """By the ranges of all data in each tile, and of the positions of queries and keys, if those are given."""
    assert spec.mask is not None
    if index is None:
        q_index = _positions(spec.q_len, Q_AXIS, block_q)
        index = q_index, _positions(spec.kv_len, K_AXIS, block_kv)
    (out,) = _run(spec.mask, [*index, *data])
    table = jnp.where(out.lo, FULL, jnp.where(out.hi, PARTIAL, EMPTY)).astype(jnp.int32)
    shape = *table.shape[:Q_AXIS], *_shape(spec, block_q, block_kv)[Q_AXIS:]
    return jnp.broadcast_to(table, shape)


# Without any of these a mask compares positions with each other and with data alone, and no distance.
DISTANCES = "sub", "div", "rem", "shift_right_arithmetic", "shift_right_logical"


@functools.lru_cache(maxsize=512)
def possible(spec: Spec, block_q: int, block_kv: int) -> np.ndarray:
    """PARTIAL for every tile of which something may be seen, whatever the mask's data, else EMPTY: int32
    `[1, 1, 1, T tiles, S tiles]`, at trace time."""
    if spec.mask is None or spec.positions or not _names(spec.mask.jaxpr.jaxpr) & {*DISTANCES}:
        return np.full(_shape(spec, block_q, block_kv), PARTIAL, np.int32)
    avals = cast(list[ShapedArray], spec.mask.jaxpr.in_avals[2:])

    def classes() -> jax.Array:
        data = [whole((1,) * LEADING, aval.dtype) for aval in avals]
        return _classes(spec, block_q, block_kv, None, data)

    return np.minimum(evaluate_now(classes), PARTIAL)


def _names(jaxpr: Any) -> set[str]:
    """Of all operations."""
    inner = (found[0] for eqn in jaxpr.eqns if (found := called(eqn)) is not None)
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(_names, inner))


def is_traced(operands: Operands) -> bool:
    """Whether it is known only later which tiles a mask empties, fills or cuts."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(_read_by_mask(operands)))


def _read_by_mask(operands: Operands) -> tuple:
    return operands.q_index, operands.k_index, operands.mask


def classify(spec: Spec, operands: Operands, block_q: int, block_kv: int) -> jax.Array | np.ndarray:
    """One class a tile for all batch entries and heads together: int32 `[T tiles, S tiles]`.

    A NumPy array where the mask reads no traced data: the caller can decide at trace time.
    """
    table = classify_each(spec, operands, block_q, block_kv)
    xp = np if isinstance(table, np.ndarray) else jnp
    if table.size == 0:  # no batch entry
        return np.full(table.shape[Q_AXIS:], EMPTY)
    low, high = xp.min(table, (0, 1, 2)), xp.max(table, (0, 1, 2))
    return xp.where(low == high, low, PARTIAL)


def _run(code: Pointwise, args: list[Interval]) -> list[Interval]:
    return evaluate(code.jaxpr.jaxpr, code.jaxpr.consts, args)
