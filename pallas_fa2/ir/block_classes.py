"""The class of each block of scores under a mask: EMPTY, PARTIAL or FULL."""

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

EMPTY, PARTIAL, FULL = 0, 1, 2

# Reductions of up to this size are unrolled: to XLA a reduction would be a kernel of its own.
MAX_UNROLLED_REDUCTION = 4


def tile_minmax(x: jax.Array, axis: int, size: int, pick: str) -> jax.Array:
    """Return the minimum or maximum ("min" or "max") over each tile of one axis; the last tile may be short."""
    if x.shape[axis] == 1:
        return x
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad, mode="edge")
    shape = (*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    x = x.reshape(shape)
    if size <= MAX_UNROLLED_REDUCTION:
        slices = [lax.index_in_dim(x, i, axis + 1, keepdims=False) for i in range(size)]
        return functools.reduce(jnp.minimum if pick == "min" else jnp.maximum, slices)
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis + 1) if pick == "min" else jnp.any(x, axis + 1)
    return jnp.min(x, axis + 1) if pick == "min" else jnp.max(x, axis + 1)


def _tile_range(x: jax.Array, block_q: int, block_kv: int) -> Interval:
    # XLA reduces an array that both sides share, such as document ids, to common blocks once.
    common = math.gcd(block_q, block_kv)

    def reduce(pick: str) -> jax.Array:
        extremes = x
        for axis, block in ((Q_AXIS, block_q), (K_AXIS, block_kv)):
            extremes = tile_minmax(extremes, axis, common, pick)
            extremes = tile_minmax(extremes, axis, block // common, pick)
        return extremes

    return Interval(reduce("min"), reduce("max"))


def tile_positions(n: int, axis: int, block: int) -> Interval:
    """Return the range of positions in each tile of `n` tokens."""
    start = np.arange(0, n, block, dtype=np.int32)
    shape = [1] * NUM_LEADING_AXES
    shape[axis] = start.size
    last = np.minimum(start + block, n).astype(np.int32) - 1
    return Interval(jnp.asarray(start.reshape(shape)), jnp.asarray(last.reshape(shape)))


def eval_at_trace_time(compute: Callable[..., jax.Array], *args: Any) -> np.ndarray:
    """Compute what depends on no traced array at trace time: a static mask costs nothing later."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS excludes the CPU
        host = None
    with without_mesh(), jax.default_device(host), jax.disable_jit(False):
        # One program: `ensure_compile_time_eval` would compile one for each operation.
        return np.asarray(jax.jit(compute).lower(*args).compile()(*args))


def block_classes(
    spec: CallSpec, operands: Operands, block_q: int, block_kv: int
) -> jax.Array | np.ndarray:
    """Return EMPTY, PARTIAL or FULL for every tile: int32 `[B | 1, K | 1, G | 1, T tiles, S tiles]`.

    It is a NumPy array where the mask reads no traced data, so that the caller can decide at trace time.
    """
    if spec.mask is None:
        return np.full(_shape(spec, block_q, block_kv), FULL, np.int32)

    def classes(q_index: Any, k_index: Any, data: Any) -> jax.Array:
        def tile_range(x: Any) -> Interval:
            return _tile_range(x, block_q, block_kv)

        index = (tile_range(q_index), tile_range(k_index)) if spec.has_explicit_positions else None
        ranges = [tile_range(x) for x in jax.tree.leaves(data)]
        return _classes(spec, block_q, block_kv, index, ranges)

    inputs = _mask_inputs(operands)
    return classes(*inputs) if is_traced(operands) else eval_at_trace_time(classes, *inputs)


def _shape(spec: CallSpec, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Return the shape of the table of classes where all batch entries and heads share it."""
    return 1, 1, 1, -(-spec.q_len // block_q), -(-spec.kv_len // block_kv)


def _classes(
    spec: CallSpec,
    block_q: int,
    block_kv: int,
    index: tuple[Interval, Interval] | None,
    data: list[Interval],
) -> jax.Array:
    """Classify the tiles by the ranges of the data in each, and of explicit positions of queries and keys."""
    assert spec.mask is not None
    if index is None:
        q_index = tile_positions(spec.q_len, Q_AXIS, block_q)
        index = q_index, tile_positions(spec.kv_len, K_AXIS, block_kv)
    (out,) = evaluate(spec.mask.jaxpr.jaxpr, spec.mask.jaxpr.consts, [*index, *data])
    table = jnp.where(out.lo, FULL, jnp.where(out.hi, PARTIAL, EMPTY)).astype(jnp.int32)
    shape = *table.shape[:Q_AXIS], *_shape(spec, block_q, block_kv)[Q_AXIS:]
    return jnp.broadcast_to(table, shape)


# A mask without any of these compares positions with each other and with data alone, and no distances.
DISTANCES = "sub", "div", "rem", "shift_right_arithmetic", "shift_right_logical"


@functools.lru_cache(maxsize=512)
def data_independent_classes(spec: CallSpec, block_q: int, block_kv: int) -> np.ndarray:
    """Return PARTIAL for every tile that is not EMPTY for all data of the mask: int32 `[1, 1, 1, T tiles, S tiles]`."""
    if (
        spec.mask is None
        or spec.has_explicit_positions
        or not _primitives(spec.mask.jaxpr.jaxpr) & {*DISTANCES}
    ):
        return np.full(_shape(spec, block_q, block_kv), PARTIAL, np.int32)
    avals = cast(list[ShapedArray], spec.mask.jaxpr.in_avals[2:])

    def classes() -> jax.Array:
        data = [top((1,) * NUM_LEADING_AXES, aval.dtype) for aval in avals]
        return _classes(spec, block_q, block_kv, None, data)

    return np.minimum(eval_at_trace_time(classes), PARTIAL)


def _primitives(jaxpr: Any) -> set[str]:
    inner = (call[0] for eqn in jaxpr.eqns if (call := inner_jaxpr(eqn)) is not None)
    return {eqn.primitive.name for eqn in jaxpr.eqns}.union(*map(_primitives, inner))


def is_traced(operands: Operands) -> bool:
    """Return whether the classes of tiles depend on traced data."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(_mask_inputs(operands)))


def _mask_inputs(operands: Operands) -> tuple:
    return operands.q_index, operands.k_index, operands.mask


def block_classes_all_heads(
    spec: CallSpec, operands: Operands, block_q: int, block_kv: int
) -> jax.Array | np.ndarray:
    """Return one class of each tile for all batch entries and heads together: int32 `[T tiles, S tiles]`.

    It is a NumPy array where the mask reads no traced data.
    """
    table = block_classes(spec, operands, block_q, block_kv)
    xp = np if isinstance(table, np.ndarray) else jnp
    if table.size == 0:  # no batch entry
        return np.full(table.shape[Q_AXIS:], EMPTY)
    low, high = xp.min(table, (0, 1, 2)), xp.max(table, (0, 1, 2))
    return xp.where(low == high, low, PARTIAL)
