"""FlashAttention-2 by `lax.scan` over tiles: exact, in O(T) memory, on any device.

The forward loops over blocks of query rows and, for each, over blocks of key columns (Algorithm 1);
the backward over blocks of key columns and, for each, over blocks of query rows (Algorithm 2).
EMPTY tiles are skipped, FULL tiles evaluate no mask.
"""

import functools
from collections.abc import Callable
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
    """Pad an axis to whole blocks with copies of the last token: a score function may not be finite at 0."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, pad, mode="edge") if pad[axis][1] else x


def _pad_operands(operands: Operands, block_q: int, block_kv: int) -> Operands:
    def pad(x: jax.Array) -> jax.Array:
        for axis, block in ((Q_AXIS, block_q), (K_AXIS, block_kv)):
            x = _pad(x, axis, block) if x.shape[axis] > 1 else x
        return x

    return jax.tree.map(pad, operands._replace(seed=None))._replace(seed=operands.seed)


def _rows(x: jax.Array, start: Any, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _classes(spec: CallSpec, operands: Operands, block_q: int, block_kv: int) -> Any:
    """Classify every tile; tiles that extend beyond the last key are PARTIAL or EMPTY."""
    table = block_classes.block_classes_all_heads(spec, operands, block_q, block_kv)
    if spec.kv_len % block_kv == 0:
        return table
    xp = np if isinstance(table, np.ndarray) else jnp
    last = np.arange(table.shape[1]) == table.shape[1] - 1
    return xp.where(last[None] & (table == block_classes.FULL), block_classes.PARTIAL, table)


def _visit(classes: Any, i: Any, j: Any, step: Callable, state: Any) -> Any:
    """Apply `step(state, masked)` to one tile by its class: not at all if EMPTY, without the mask if FULL."""
    unmasked, masked = (functools.partial(step, masked=masked) for masked in (False, True))
    if isinstance(classes, np.ndarray) and np.all(classes == block_classes.FULL):
        return unmasked(state)
    branches = (lambda state: state, masked, unmasked)
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
    needs_grad: tuple[bool, ...],
    sums: tile.RowSums | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, tuple]:
    """Return the gradients of q, k, v and of all floating-point leaves of the score data, in order.

    `dlse` (or None) and the row sums are `[B, N, T]`. Where the forward of another backend has run there are no sums,
    and they are formed of `lse`.
    """
    sums = tile.sums_from_lse(lse) if sums is None else sums
    delta = tile.row_delta(out, dout, dlse, spec.accumulator)
    block_q, block_kv = blocks
    dtype = spec.accumulator
    classes = _classes(spec, operands, block_q, block_kv)
    data = call_spec.split_floats(operands.scores)[0]
    operands = _pad_operands(operands, block_q, block_kv)
    heads = (spec.kv_heads, spec.group)
    q, dout = (_pad(x.reshape(*x.shape[:2], *heads, -1), 1, block_q) for x in (q, dout))
    k, v = _pad(k, 1, block_kv), _pad(v, 1, block_kv)
    # Rows of padding are empty: their total is 0.
    pad_rows = [(0, 0)] * 3 + [(0, -spec.q_len % block_q)]
    sums, delta = jax.tree.map(
        lambda x: jnp.pad(x.reshape(spec.batch, *heads, -1), pad_rows), (sums, delta)
    )
    q_tiles, k_tiles = classes.shape

    def column_block(carry: tuple, j: jax.Array) -> tuple[tuple, tuple]:
        k_j, v_j = (_rows(x, j * block_kv, block_kv) for x in (k, v))

        def row_block(carry: tuple, i: jax.Array) -> tuple[tuple, None]:
            start = (i * block_q, j * block_kv)

            def step(carry: tuple, masked: bool) -> tuple:
                dq, ddata, dk, dv = carry
                t = tile.tile_at(spec, operands, *start, block_q, block_kv)
                q_i, dout_i = (_rows(x, start[0], block_q) for x in (q, dout))
                sums_i, delta_i = jax.tree.map(
                    lambda x: _rows(x, start[0], block_q, 3), (sums, delta)
                )
                g = tile.backward(t, q_i, k_j, v_j, dout_i, sums_i, delta_i, masked)
                dq_i = _rows(dq, start[0], block_q) + g.q
                dq = lax.dynamic_update_slice_in_dim(dq, dq_i, start[0], 1)
                ddata = [
                    add_to_tile(total, dx.astype(total.dtype), *start)
                    for total, dx in zip(ddata, g.scores, strict=True)
                ]
                return dq, ddata, dk + g.k, dv + g.v

            return _visit(classes, i, j, step, carry), None

        zeros = (jnp.zeros(k_j.shape, dtype), jnp.zeros(v_j.shape, dtype))
        (dq, ddata, dk, dv), _ = lax.scan(
            row_block, (*carry, *match_varying_axes(zeros, q)), lax.iota(jnp.int32, q_tiles)
        )
        return (dq, ddata), (dk, dv)

    # Gradients of 16-bit data are sums over tiles, and have the accumulator dtype until the end.
    ddata = [
        jnp.zeros(x.shape, x.dtype if x.dtype.itemsize > 2 else dtype)
        for x in call_spec.split_floats(operands.scores)[0]
    ]
    carry = match_varying_axes((jnp.zeros(q.shape, dtype), ddata), q)
    (dq, ddata), (dk, dv) = lax.scan(column_block, carry, lax.iota(jnp.int32, k_tiles))
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
    """Return `out [B, T, N, Hv]` in the accumulator dtype, the natural `lse [B, N, T]`, and the row sums."""
    block_q, block_kv = blocks
    classes = _classes(spec, operands, block_q, block_kv)
    operands = _pad_operands(operands, block_q, block_kv)
    q = q.reshape(spec.batch, spec.q_len, spec.kv_heads, spec.group, spec.head_dim)
    q, k, v = _pad(q, 1, block_q), _pad(k, 1, block_kv), _pad(v, 1, block_kv)
    q_tiles, k_tiles = classes.shape

    def row_block(i: jax.Array) -> tuple[jax.Array, jax.Array, tile.RowSums]:
        q_i = _rows(q, i * block_q, block_q)

        def column_block(state: tile.Running, j: jax.Array) -> tuple[tile.Running, None]:
            start = (i * block_q, j * block_kv)

            def step(state: tile.Running, masked: bool) -> tile.Running:
                k_j, v_j = (_rows(x, start[1], block_kv) for x in (k, v))
                t = tile.tile_at(spec, operands, *start, block_q, block_kv)
                return tile.forward(t, state, q_i, k_j, v_j, masked)

            return _visit(classes, i, j, step, state), None

        state, _ = lax.scan(
            column_block,
            match_varying_axes(tile.start(spec, block_q), q),
            lax.iota(jnp.int32, k_tiles),
        )
        return tile.finish(state)

    # [tiles, B, t, ...], [tiles, B, K, G, t]
    out, *rows = lax.map(row_block, lax.iota(jnp.int32, q_tiles))
    out = jnp.moveaxis(out, 0, 1).reshape(spec.batch, -1, spec.q_heads, spec.value_dim)

    def concatenate(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 3).reshape(spec.batch, spec.q_heads, -1)[..., : spec.q_len]

    lse, sums = jax.tree.map(concatenate, rows)
    return out[:, : spec.q_len], lse, sums


def describe(
    spec: CallSpec, forward: tuple[int, int], backward: tuple[int, int], operands: Operands
) -> KernelDescription:
    """Describe the scans, whose backward holds dQ and delta in float32, and S, P, dP and dS of a tile."""
    (q, k), heads = backward, spec.batch * spec.q_heads
    return KernelDescription(
        forward,
        f"XLA's operations in scans over tiles of {forward[0]} queries x {forward[1]} keys",
        f"XLA's operations in scans over tiles of {k} keys x {q} queries, sums in one order",
        heads * (spec.q_len * (spec.head_dim + 1) + 4 * q * k) * spec.accumulator.itemsize,
    )


# The bound on the scores of one tile, of which there are several copies (scores, probabilities, their gradients), so
# that memory is O(T) with a modest constant.
TILE_BYTES = 64 << 20


def block_sizes(spec: CallSpec) -> tuple[int, int]:
    """Return the largest square tile of 512, 256, 128 or 64 whose scores take at most `TILE_BYTES`."""
    heads = spec.batch * spec.q_heads
    known = isinstance(heads, int)  # otherwise it is a symbol of `jax.export`
    bytes_per_pair = max(heads, 1) * spec.accumulator.itemsize if known else TILE_BYTES
    block = next((b for b in (512, 256, 128, 64) if bytes_per_pair * b * b <= TILE_BYTES), 64)
    return min(block, round_up(spec.q_len, 8)), min(block, round_up(spec.kv_len, 8))


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    for name, length in (("T", spec.q_len), ("S", spec.kv_len)):
        if not isinstance(length, int):
            return f"its tiles are of lengths that are known, and here {name} is {length}"
    return None


BACKEND = Backend(
    name="blockwise",
    unsupported_reason=unsupported_reason,
    configure=lambda spec, device: Configuration(block_sizes(spec), block_sizes(spec)),
    forward=forward,
    backward=backward,
    describe=describe,
)
