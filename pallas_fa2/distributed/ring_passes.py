"""The two passes of ring attention (arXiv:2310.01889): keys and values go around the devices, queries stay.

The forward merges the results of blocks by their logsumexps. The backward is that of FlashAttention-2
(arXiv:2307.08691, Algorithm 2) for each block, with the logsumexp of all keys; the sums dK and dV go around with their
keys, in float32.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.distributed.collectives import TOKENS, AxisName, shift
from pallas_fa2.distributed.ring_schedule import Step
from pallas_fa2.distributed.ring_steps import (
    Block,
    Turn,
    blocks_of,
    end_step,
    make_turns,
    repeat,
    send_first,
)
from pallas_fa2.ir.arrays import add_to_tile
from pallas_fa2.ir.call_spec import Operands, accumulator_dtype, split_floats
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.merging import merge
from pallas_fa2.passes import NeedsGrad, run_backward, run_forward


class Ring(NamedTuple):
    """The static part of a call: the mesh axis around which keys go, and the steps."""

    axis_name: AxisName
    steps: tuple[Step, ...]


class Rows(NamedTuple):
    """Results for a device's queries so far: `out [*B, T/n, N, Hv]` and `lse [*B, N, T/n]` in the accumulator dtype."""

    out: jax.Array
    lse: jax.Array


def _no_keys(rows: Rows) -> Rows:
    """Return the results on no keys, of these shapes."""
    return Rows(
        jnp.zeros(rows.out.shape, rows.out.dtype),
        jnp.full(rows.lse.shape, -jnp.inf, rows.lse.dtype),
    )


def forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Return `out [*B, T/n, N, Hv]` in q's dtype and `lse [*B, N, T/n]` of this device's queries.

    `operands` hold what masks and scores read of these and of the keys of all devices (see `RingSchedule`).
    """
    dtype = accumulator_dtype(q.dtype)
    rows = Rows(
        jnp.zeros((*q.shape[:-1], v.shape[-1]), dtype),
        jnp.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -jnp.inf, dtype),
    )

    def visit(turn: Turn, carry: Any, shift_by: Any) -> Any:
        (k, v), rows = carry
        following, k, v = send_first(shift((k, v), ring.axis_name, turn.stride), k, v)
        blocks = list(blocks_of(ring.axis_name, turn.step, shift_by, operands, k.shape[TOKENS]))
        parts = []
        for block in blocks:

            def compute(block: Block = block) -> Rows:
                q_block, k_block, v_block = block.slice_qkv(q, k, v)
                spec, plan = block.call.spec, block.call.plan
                out, lse, _ = run_forward(spec, plan, q_block, k_block, v_block, block.operands)
                return Rows(out, lse)

            parts.append(block.run(compute, _no_keys, q))
        following, parts = end_step((following, parts))
        for block, part in zip(blocks, parts, strict=True):
            before = Rows(block.queries(rows.out), block.queries(rows.lse, -1))
            part = part._replace(out=part.out.astype(before.out.dtype))
            after = Rows(*merge(before, part))
            rows = Rows(
                block.replace_queries(rows.out, after.out),
                block.replace_queries(rows.lse, after.lse, -1),
            )
        return following, rows

    turns = make_turns(ring.steps)
    carry = shift((k, v), ring.axis_name, turns[0].step.shift if turns else 0), rows
    carry = match_varying_axes(carry, q)
    # The forward does not differ between the steps that `arrival` tells apart.
    for _, same in itertools.groupby(turns, lambda turn: (turn.step.calls, turn.stride)):
        carry = repeat(list(same), visit, carry)
    rows = carry[1]
    return rows.out.astype(q.dtype), rows.lse


def _zeros(tree: Any) -> Any:
    """Return zeros in the accumulator dtype, to which gradients like these arrays are added."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, accumulator_dtype(x.dtype)), tree)


def _zeros_like(tree: Any) -> Any:
    """Return zeros in the dtypes of these arrays: the gradients of a block that a device does not compute."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


class Sums(NamedTuple):
    """The gradients of q and of the score data so far, in the accumulator dtype."""

    dq: jax.Array
    dscores: list[jax.Array]


def backward(
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    operands: Operands,
    needs_grad: NeedsGrad,
) -> tuple:
    """Return the gradients of q, k, v and of the floating-point leaves of the score data."""

    def add(total: jax.Array, x: jax.Array) -> jax.Array:
        return total + x.astype(total.dtype)

    def visit(turn: Turn, carry: Any, shift_by: Any) -> Any:
        (k, v), traveling, (dq, dscores) = carry
        following = shift((k, v), ring.axis_name, turn.stride)
        if turn.arrival is not None:  # the sums of the steps before
            traveling = shift(traveling, ring.axis_name, turn.arrival)
        (following, traveling), k, v = send_first((following, traveling), k, v)
        blocks = list(blocks_of(ring.axis_name, turn.step, shift_by, operands, k.shape[TOKENS]))
        parts = []
        for block in blocks:

            def compute(block: Block = block) -> tuple:
                arrays = *block.slice_qkv(q, k, v), block.queries(out), block.queries(lse, -1)
                cotangents = block.queries(dout), dlse if dlse is None else block.queries(dlse, -1)
                arrays = *arrays, *cotangents, None
                return run_backward(*block.call[:2], arrays, block.operands, needs_grad)

            parts.append(block.run(compute, _zeros_like, q))
        following, traveling, parts = end_step((following, traveling, parts))
        dkv = match_varying_axes(_zeros((k, v)), q) if turn.arrival is None else traveling
        for block, (dq_part, *dkv_part, dscores_part) in zip(blocks, parts, strict=True):
            dq = block.replace_queries(dq, add(block.queries(dq), dq_part))
            dkv = tuple(
                block.replace_keys(total, add(block.keys(total), x))
                for total, x in zip(dkv, dkv_part, strict=True)
            )
            dscores = [
                add_to_tile(total, x.astype(total.dtype), block.q_start, block.first_key)
                for total, x in zip(dscores, dscores_part, strict=True)
            ]
        return following, dkv, Sums(dq, dscores)

    # Keys are sent anew, after the forward: otherwise XLA would keep what its first step sent, or send both at once.
    k, v, dout, out, lse = lax.optimization_barrier((k, v, dout, out, lse))
    turns = make_turns(ring.steps)
    floats = split_floats(operands.scores)[0]
    kv = shift((k, v), ring.axis_name, turns[0].step.shift if turns else 0)
    sums = match_varying_axes(Sums(_zeros(q), _zeros(floats)), q)
    # dK and dV of a device's own keys are at home. Those of other devices' keys travel with these, and return at the
    # end.
    home, traveling = [], None
    for turn, same in itertools.groupby(turns):
        kv, traveling, sums = repeat(list(same), visit, (kv, traveling, sums))
        if turn.step.shift == 0:
            home, traveling = [traveling], None
    if traveling is not None:
        home.append(shift(traveling, ring.axis_name, -turns[-1].step.shift))
    dk, dv = jax.tree.map(lambda *x: sum(x[1:], x[0]), *home) if home else _zeros((k, v))
    dscores = [dx.astype(x.dtype) for dx, x in zip(sums.dscores, floats, strict=True)]
    return sums.dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), dscores
