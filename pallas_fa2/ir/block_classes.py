"""EMPTY, PARTIAL or FULL: the class of each block of scores under a mask."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray, Tracer

from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.interpret import inner_jaxpr
from pallas_fa2.ir.intervals import Interval, evaluate, top
from pallas_fa2.ir.mesh import without_mesh
from pallas_fa2.ir.trace import TracedFn

EMPTY, PARTIAL, FULL = 0, 1, 2


# Up to so many at once are no reduction to XLA, which would be a kernel of its own.
MAX_UNROLLED_REDUCTION = 4


def _tile_minmax(x: jax.Array, axis: int, size: int, pick: str) -> jax.Array:
    """Minimum or maximum over the tiles of one axis; the last tile may be short."""
    if x.shape[axis] == 1:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, mode="edge")
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    x = x.reshape(shape)
    if size <= MAX_UNROLLED_REDUCTION:
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
            found = _tile_minmax(
                _tile_minmax(found, axis, common, pick), axis, block // common, pick
            )
        return found

    return Interval(over_both("min"), over_both("max"))


def _positions(n: int, axis: int, block: int) -> Interval:
    """Positions 0, 1, 2, ... of one side, tile by tile."""
    start = np.arange(0, n, block, dtype=np.int32)
    shape = [1] * NUM_LEADING_AXES
    shape[axis] = start.size
    last = np.minimum(start + block, n).astype(np.int32) - 1
    return Interval(jnp.asarray(start.reshape(shape)), jnp.asarray(last.reshape(shape)))


def eval_at_trace_time(compute: Callable[..., jax.Array], *args: Any) -> np.ndarray:
    """At trace time, what depends on no traced array: a static mask costs nothing later."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX was told to use another platform alone
        host = None
    with without_mesh(), jax.default_device(host), jax.disable_jit(False):
        # One program: `ensure_compile_time_eval` would compile one for each operation.
        return np.asarray(jax.jit(compute).lower(*args).compile()(*args))


def block_classes(
    spec: CallSpec, operands: Operands, block_q: int, block_kv: int
) -> jax.Array | np.ndarray:
    """EMPTY, PARTIAL or FULL for every tile: int32 `[B | 1, K | 1, G | 1, T tiles, S tiles]`.

    A NumPy array where the mask reads no traced data: the caller can decide at trace time.
    """
    if spec.mask is None:
        return np.full(_shape(spec, block_q, block_kv), FULL, np.int32)

    def classes(q_given: Any, k_given: Any, data: Any) -> jax.Array:
        def over_tiles(x: Any) -> Interval:
            return _tile_range(x, block_q, block_kv)

        index = (over_tiles(q_given), over_tiles(k_given)) if spec.has_explicit_positions else None
        ranges = [over_tiles(x) for x in jax.tree.leaves(data)]
        return _classes(spec, block_q, block_kv, index, ranges)

    read = _read_by_mask(operands)
    return classes(*read) if is_traced(operands) else eval_at_trace_time(classes, *read)


def _shape(spec: CallSpec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Of the classes of all tiles, where batch entries and heads have the same."""
    return 1, 1, 1, -(-spec.q_len // block_q), -(-spec.kv_len // block_kv)


def _classes(
    spec: CallSpec,
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
def data_independent_classes(spec: CallSpec, block_q: int, block_kv: int) -> np.ndarray:
    """PARTIAL for every tile of which something may be seen, whatever the mask's data, else EMPTY: int32
    `[1, 1, 1, T tiles, S tiles]`, at trace time."""
    if (
        spec.mask is None
        or spec.has_explicit_positions
        or not _names(spec.mask.jaxpr.jaxpr) & {*DISTANCES}
    ):
        return np.full(_shape(spec, block_q, block_kv), PARTIAL, np.int32)
    avals = cast(list[ShapedArray], spec.mask.jaxpr.in_avals[2:])

    def classes() -> jax.Array:
        data = [top((1,) * NUM_LEADING_AXES, aval.dtype) for aval in avals]
        return _classes(spec, block_q, block_kv, None, data)

    return np.minimum(eval_at_trace_time(classes), PARTIAL)


def _names(jaxpr: Any) -> set[str]:
    """Of all operations."""
    inner = (found[0] for eqn in jaxpr.eqns if (found := inner_jaxpr(eqn)) is not None)
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(_names, inner))


def is_traced(operands: Operands) -> bool:
    """Whether it is known only later which tiles a mask empties, fills or cuts."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(_read_by_mask(operands)))


def _read_by_mask(operands: Operands) -> tuple:
    return operands.q_index, operands.k_index, operands.mask


def block_classes_all_heads(
    spec: CallSpec, operands: Operands, block_q: int, block_kv: int
) -> jax.Array | np.ndarray:
    """One class a tile for all batch entries and heads together: int32 `[T tiles, S tiles]`.

    A NumPy array where the mask reads no traced data: the caller can decide at trace time.
    """
    table = block_classes(spec, operands, block_q, block_kv)
    xp = np if isinstance(table, np.ndarray) else jnp
    if table.size == 0:  # no batch entry
        return np.full(table.shape[Q_AXIS:], EMPTY)
    low, high = xp.min(table, (0, 1, 2)), xp.max(table, (0, 1, 2))
    return xp.where(low == high, low, PARTIAL)


def _run(code: TracedFn, args: list[Interval]) -> list[Interval]:
    return evaluate(code.jaxpr.jaxpr, code.jaxpr.consts, args)
