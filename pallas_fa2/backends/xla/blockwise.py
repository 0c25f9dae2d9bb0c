"""FlashAttention-2 in `lax.scan`: exact, O(T) memory, on any device.

The forward goes over blocks of query rows and, for each, over blocks of key columns (Algorithm 1);
the backward over blocks of key columns and, for each, over blocks of query rows (Algorithm 2).
Tiles that the mask empties cost nothing, tiles that it fills run no mask code.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.protocol import Backend, Configuration, KernelDescription
from pallas_fa2.backends.xla import tile
from pallas_fa2.device import Device
from pallas_fa2.ir import block_classes, call_spec
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS, add_to_tile
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.mesh import match_varying_axes


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Whole tiles. The last token repeats: a score function may not be finite at 0."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, pad, mode="edge") if pad[axis][1] else x


def _pad_operands(operands: Operands, block_q: int, block_kv: int) -> Operands:
    def pad(x: jax.Array) -> jax.Array:
        for axis, block in ((Q_AXIS, block_q), (K_AXIS, block_kv)):
            x = _pad(x, axis, block) if x.shape[axis] > 1 else x
        return x

    return jax.tree.map(pad, operands._replace(seed=None))._replace(seed=operands.seed)


def _count(n: int) -> jax.Array:
    """0, 1, 2, ... in the dtype of positions, whatever JAX's default is."""
    return lax.iota(jnp.int32, n)


def _rows(x: jax.Array, start: Any, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _classes(spec: CallSpec, operands: Operands, block_q: int, block_kv: int) -> Any:
    """The class of every tile; tiles over the end of the keys are cut at least."""
    table = block_classes.block_classes_all_heads(spec, operands, block_q, block_kv)
    if spec.kv_len % block_kv == 0:
        return table
    xp = np if isinstance(table, np.ndarray) else jnp
    last = np.arange(table.shape[1]) == table.shape[1] - 1
    return xp.where(last[None] & (table == block_classes.FULL), block_classes.PARTIAL, table)


def _by_class(classes: Any, i: Any, j: Any, take: Any, state: Any) -> Any:
    """Skips an empty tile, takes a cut one with its mask and a full one without."""
    if isinstance(classes, np.ndarray) and np.all(classes == block_classes.FULL):
        return take(False)(state)
    branches = (lambda state: state, take(True), take(False))
    return lax.switch(jnp.asarray(classes)[i, j], branches, state)


def backward(
    spec: CallSpec,
    blocks: tuple[int, int],
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    operands: Operands,
    wanted: tuple[bool, ...],
    sums: tile.RowSums | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple]:
    """Gradients of q, k, v and of the floating-point score data (its leaves, in order), wanted or not.

    `dlse`, if there is one, and the rows' sums are `[B, N, T]`. Where another implementation's forward has run
    there are none, and `lse` stands for them.
    """
    sums = tile.sums_of(lse) if sums is None else sums
    delta = tile.row_delta(out, dout, dlse, spec.accumulator)
    block_q, block_kv = blocks
    dtype = spec.accumulator
    classes = _classes(spec, operands, block_q, block_kv)
    data = call_spec.split_floats(operands.scores)[0]
    operands = _pad_operands(operands, block_q, block_kv)
    heads = (spec.kv_heads, spec.group)
    q, dout = (_pad(x.reshape(*x.shape[:2], *heads, -1), 1, block_q) for x in (q, dout))
    k, v = _pad(k, 1, block_kv), _pad(v, 1, block_kv)
    # Rows of padding have no key, and a total of 0.
    pad_rows = [(0, 0)] * 3 + [(0, -spec.q_len % block_q)]
    sums, delta = jax.tree.map(
        lambda x: jnp.pad(x.reshape(spec.batch, *heads, -1), pad_rows), (sums, delta)
    )
    q_tiles, k_tiles = classes.shape

    def column_block(carry: tuple, j: jax.Array) -> tuple[tuple, tuple]:
        k_j, v_j = (_rows(x, j * block_kv, block_kv) for x in (k, v))

        def step(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
            def take(masked: bool) -> Any:
                def branch(carry: tuple) -> tuple:
                    dq, ddata, dk, dv = carry
                    at = (i * block_q, j * block_kv)
                    t = tile.tile_at(spec, operands, *at, block_q, block_kv)
                    q_i, dout_i = (_rows(x, at[0], block_q) for x in (q, dout))
                    sums_i, delta_i = jax.tree.map(
                        lambda x: _rows(x, at[0], block_q, 3), (sums, delta)
                    )
                    g = tile.backward(t, q_i, k_j, v_j, dout_i, sums_i, delta_i, masked)
                    dq = lax.dynamic_update_slice_in_dim(
                        dq, _rows(dq, at[0], block_q) + g.q, at[0], 1
                    )
                    ddata = [
                        add_to_tile(a, b.astype(a.dtype), *at)
                        for a, b in zip(ddata, g.scores, strict=True)
                    ]
                    return dq, ddata, dk + g.k, dv + g.v

                return branch

            return _by_class(classes, i, j, take, carry), None

        zeros = (jnp.zeros(k_j.shape, dtype), jnp.zeros(v_j.shape, dtype))
        (dq, ddata, dk, dv), _ = lax.scan(
            step, (*carry, *match_varying_axes(zeros, q)), _count(q_tiles)
        )
        return (dq, ddata), (dk, dv)

    # Data of 16 bits too: their gradients are sums over tiles.
    ddata = [
        jnp.zeros(x.shape, x.dtype if x.dtype.itemsize > 2 else dtype)
        for x in call_spec.split_floats(operands.scores)[0]
    ]
    carry = match_varying_axes((jnp.zeros(q.shape, dtype), ddata), q)
    (dq, ddata), (dk, dv) = lax.scan(column_block, carry, _count(k_tiles))
    dk, dv = (jnp.moveaxis(x, 0, 1).reshape(spec.batch, -1, *x.shape[3:]) for x in (dk, dv))
    dq = dq.reshape(spec.batch, -1, spec.q_heads, spec.head_dim)
    ddata = [
        lax.slice(x, [0] * x.ndim, like.shape).astype(like.dtype)  # without the padding
        for x, like in zip(ddata, data, strict=True)
    ]
    return (
        dq[:, : spec.q_len].astype(spec.dtype),
        dk[:, : spec.kv_len].astype(spec.dtype),
        dv[:, : spec.kv_len].astype(spec.dtype),
        tuple(ddata),
    )


def forward(
    spec: CallSpec, blocks: tuple[int, int], q: Any, k: Any, v: Any, operands: Operands
) -> tuple[jax.Array, jax.Array, tile.RowSums]:
    """`out [B, T, N, Hv]` in the accumulators' dtype, natural `lse [B, N, T]`, and rows' sums."""
    block_q, block_kv = blocks
    classes = _classes(spec, operands, block_q, block_kv)
    operands = _pad_operands(operands, block_q, block_kv)
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    q, k, v = _pad(q, 1, block_q), _pad(k, 1, block_kv), _pad(v, 1, block_kv)
    q_tiles, k_tiles = classes.shape

    def row_block(i: jax.Array) -> tuple[jax.Array, jax.Array, tile.RowSums]:
        q_i = _rows(q, i * block_q, block_q)

        def step(state: tile.Running, j: jax.Array) -> tuple[tile.Running, None]:
            def take(masked: bool) -> Any:
                def branch(state: tile.Running) -> tile.Running:
                    at = (i * block_q, j * block_kv, block_q, block_kv)
                    k_j, v_j = (_rows(x, j * block_kv, block_kv) for x in (k, v))
                    t = tile.tile_at(spec, operands, *at)
                    return tile.forward(t, state, q_i, k_j, v_j, masked)

                return branch

            return _by_class(classes, i, j, take, state), None

        state, _ = lax.scan(step, match_varying_axes(tile.start(spec, block_q), q), _count(k_tiles))
        return tile.finish(state)

    # [tiles, B, t, ...], [tiles, B, K, G, t]
    out, *rows = lax.map(row_block, _count(q_tiles))
    out = jnp.moveaxis(out, 0, 1).reshape(spec.batch, -1, spec.q_heads, spec.value_dim)

    def joined(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 3).reshape(spec.batch, spec.q_heads, -1)[..., : spec.q_len]

    lse, sums = jax.tree.map(joined, rows)
    return out[:, : spec.q_len], lse, sums


def describe(
    spec: CallSpec, forward: tuple[int, int], backward: tuple[int, int], operands: Operands
) -> KernelDescription:
    """Describes the scans, whose backward holds dQ and delta in float32, and S, P, dP and dS of a tile."""
    (q, k), heads = backward, spec.batch * spec.q_heads
    return KernelDescription(
        forward,
        f"XLA's operations in scans over tiles of {forward[0]} queries x {forward[1]} keys",
        f"XLA's operations in scans over tiles of {k} keys x {q} queries, sums in one order",
        heads * (spec.q_len * (spec.head_dim + 1) + 4 * q * k) * spec.accumulator.itemsize,
    )


# A blockwise tile of scores is held several times over (scores, probabilities, their gradients);
# this bounds one copy, so that memory stays O(T) with a modest constant.
TILE_BYTES = 64 << 20


def block_sizes(spec: CallSpec) -> tuple[int, int]:
    """Square tiles, the largest of 512, 256, 128, 64 whose scores stay within `TILE_BYTES`."""
    heads = spec.batch * spec.q_heads
    known = isinstance(heads, int)  # and no symbol of `jax.export`
    scores = max(heads, 1) * spec.accumulator.itemsize if known else TILE_BYTES
    fits = (b for b in (512, 256, 128, 64) if scores * b * b <= TILE_BYTES)
    block = next(fits, 64)
    return min(block, round_up(spec.q_len, 8)), min(block, round_up(spec.kv_len, 8))


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    for name, length in (("T", spec.q_len), ("S", spec.kv_len)):
        if not isinstance(length, int):
            return f"its tiles are of lengths that are known, and here {name} is {length}"
    return None


def configure(spec: CallSpec, device: Device) -> Configuration:
    blocks = block_sizes(spec)
    return Configuration(blocks, blocks)


BACKEND = Backend(
    name="blockwise",
    unsupported_reason=unsupported_reason,
    configure=configure,
    forward=forward,
    backward=backward,
    describe=describe,
)
