"""A call under `jit` on several devices: each computes its batch entries, heads and queries.

Queries stay where they lie. Where keys are divided over the same mesh axes, they go around these devices in a ring, as
inside `shard_map` by `context_parallel_attention`, and so do dK and dV; where each device has all keys, it computes one
call, and dK and dV are summed over the devices. What masks and scores read of queries is divided with them; of keys
each device has all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.xla.tile import lse_from_sums, sums_from_lse
from pallas_fa2.distributed import ring_passes
from pallas_fa2.distributed.aux_shards import map_aux, own_positions
from pallas_fa2.distributed.device_calls import call_on_keys, plan_ring
from pallas_fa2.distributed.ring_schedule import split_conjuncts
from pallas_fa2.distributed.sharding import Axes, Division, partitioned
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS, CallShape, default_positions
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats
from pallas_fa2.parse_call import CheckedCall
from pallas_fa2.passes import NeedsGrad, Results, backend_backward, backend_forward
from pallas_fa2.planning.plan import Plan, plan_shard

QUERY, KEY, ROWS = "btn.", "bsk.", "bnt"  # the axes of q and out, of k and v, and of lse


def divided_forward(
    spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands
) -> Results:
    """Return what `backend_forward` does, with batch entries, heads and queries divided over devices as q is."""
    if _is_on_one_device(spec, plan, operands):
        return backend_forward(spec, plan, q, k, v, operands)

    def unpartitioned(q: Any, k: Any, v: Any, operands: Operands) -> Results:
        return backend_forward(spec, plan, q, k, v, operands._replace(head_index=None))

    def on_shard(division: Division, like: Results) -> Callable:
        def compute(q: Any, k: Any, v: Any, operands: Operands) -> Results:
            operands = _own_heads(division, operands)
            if not division.queries:
                return backend_forward(_shard_spec(spec, q, k), plan, q, k, v, operands)
            shard = _Shard(spec, plan, division)
            if division.keys:
                ring, operands = shard.ring(q, k, operands)
                out, lse = ring_passes.forward(ring, q, k, v, operands)
                sums = None
            else:
                own, own_plan, operands = shard.on_all_keys(q, k, operands)
                out, lse, sums = backend_forward(own, own_plan, q, k, v, operands)
            if like[2] is None:
                sums = None
            elif sums is None:
                sums = sums_from_lse(lse)
            return out.astype(like[0].dtype), lse, sums

        return compute

    operands = _with_head_index(spec, operands)
    axes = Axes((QUERY, KEY, KEY, _axes_of(operands)), (QUERY, ROWS, ROWS))
    return _with_vmap(unpartitioned, axes, on_shard)(q, k, v, operands)


def divided_backward(
    spec: CallSpec, plan: Plan, arrays: tuple, operands: Operands, needs_grad: NeedsGrad
) -> tuple:
    """Return what `backend_backward` does, divided over devices as the forward is."""
    if _is_on_one_device(spec, plan, operands):
        return backend_backward(spec, plan, arrays, operands, needs_grad)
    q, k, *rest = arrays

    def unpartitioned(q: Any, k: Any, rest: list, operands: Operands) -> tuple:
        operands = operands._replace(head_index=None)
        return backend_backward(spec, plan, (q, k, *rest), operands, needs_grad)

    def on_shard(division: Division, _: Any) -> Callable:
        def compute(q: Any, k: Any, rest: list, operands: Operands) -> tuple:
            operands = _own_heads(division, operands)
            arrays = q, k, *rest
            if not division.queries:
                return backend_backward(_shard_spec(spec, q, k), plan, arrays, operands, needs_grad)
            shard = _Shard(spec, plan, division)
            if not division.keys:
                own, own_plan, operands = shard.on_all_keys(q, k, operands)
                return backend_backward(own, own_plan, arrays, operands, needs_grad)
            ring, operands = shard.ring(q, k, operands)
            v, out, lse, dout, dlse, sums = rest
            if lse is None:
                lse = lse_from_sums(sums)
            arrays = q, k, v, out.astype(q.dtype), lse, dout, dlse
            *dqkv, dscores = ring_passes.backward(ring, *arrays, operands, needs_grad)
            return *dqkv, tuple(dscores)

        return compute

    operands = _with_head_index(spec, operands)
    others = [KEY, QUERY, ROWS, QUERY, ROWS, ROWS]  # v, out, lse, dout, dlse and the row sums
    others = [None if x is None else axes for x, axes in zip(rest, others, strict=True)]
    data = tuple(map(_axes_of, split_floats(operands.scores)[0]))
    axes = Axes((QUERY, KEY, others, _axes_of(operands)), (QUERY, KEY, KEY, data))
    call = _with_vmap(unpartitioned, axes, on_shard)
    return _differentiable(call, unpartitioned)(q, k, rest, operands)


def _is_on_one_device(spec: CallSpec, plan: Plan, operands: Operands) -> bool:
    """Return whether arrays are those of one device, or XLA is left to divide the operations of the backend."""
    return (
        jax.device_count() == 1
        or bool(jax.sharding.get_abstract_mesh().manual_axes)
        or BACKENDS[plan.implementation].backward is None
        or spec.source is None
        or operands.head_index is not None  # these heads are a device's already
    )


def _with_vmap(unpartitioned: Callable, axes: Axes, on_shard: Callable) -> Callable:
    """Return the partitioned function; under `vmap` its kernels are partitioned, by batch entries and heads."""
    call = custom_vmap(partitioned(unpartitioned, axes, on_shard))

    @call.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        in_axes = jax.tree.map(lambda mapped: 0 if mapped else None, tuple(batched))
        results = jax.vmap(unpartitioned, in_axes, axis_size=size)(*args)
        return results, jax.tree.map(lambda _: True, results)

    return call


def _differentiable(call: Callable, unpartitioned: Callable) -> Callable:
    """Return `call` with the derivative of `unpartitioned`: the partitioner has none, and second derivatives need
    one."""
    call = jax.custom_jvp(call)

    @call.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        return jax.jvp(unpartitioned, primals, tangents)

    return call


def _axes_of(data: Any) -> Any:
    """Return the axes of what masks and scores read; with the leading axes, a device has all keys."""

    def axes(x: Any) -> str:
        return "." if x.ndim < NUM_LEADING_AXES else "bkgt".ljust(x.ndim, ".")

    return jax.tree.map(axes, data)


def _with_head_index(spec: CallSpec, operands: Operands) -> Operands:
    """Add the indices of heads among those of all batch entries, where a device must know its own for dropout."""
    if not spec.dropout_rate:
        return operands
    index = lax.iota(jnp.int32, spec.batch * spec.q_heads)
    return operands._replace(head_index=index.reshape(spec.batch, spec.kv_heads, spec.group, 1, 1))


def _own_heads(division: Division, operands: Operands) -> Operands:
    """Drop the indices of heads where a device has all: kernels then count them."""
    divided = division.entries or division.heads
    return operands if divided else operands._replace(head_index=None)


def _shard_spec(spec: CallSpec, q: Any, k: Any) -> CallSpec:
    """Return the call on a device's batch entries and heads."""
    return dataclasses.replace(
        spec, batch=q.shape[0], q_heads=q.shape[2], kv_heads=k.shape[2], source=None
    )


@dataclasses.dataclass(frozen=True)
class _Shard:
    """What a device computes whose queries are some of a sequence's."""

    spec: CallSpec
    plan: Plan
    division: Division

    def ring(self, q: Any, k: Any, operands: Operands) -> tuple[ring_passes.Ring, Operands]:
        call, operands = self._call(q, k, operands)
        plan = functools.partial(plan_shard, self.plan)
        return plan_ring(call, operands, self.division.queries, "contiguous", plan)

    def on_all_keys(self, q: Any, k: Any, operands: Operands) -> tuple[CallSpec, Plan, Operands]:
        call, operands = self._call(q, k, operands)
        spec, operands = call_on_keys(call, operands, call.dims.lengths[1])
        return spec, plan_shard(self.plan, spec), operands

    def _call(self, q: Any, k: Any, operands: Operands) -> tuple[CheckedCall, Operands]:
        """Return the call, and what it reads of its queries and of all keys; the mask's data are a tuple, by
        conjuncts."""
        source: CheckedCall = self.spec.source
        # Queries and keys are no longer the same tokens.
        operands = map_aux(lambda node: dataclasses.replace(node, shared=()), operands)
        group = q.shape[2] // k.shape[2]
        dims = CallShape(
            (q.shape[0],), q.shape[1], k.shape[1], k.shape[2], group,
            (self.spec.q_len, self.spec.kv_len),
        )  # fmt: skip
        call = source._replace(dims=dims, operands=operands)
        operands = operands._replace(mask=split_conjuncts(call.mask, operands.mask)[1])
        if call.has_explicit_positions:
            return call, operands
        own = own_positions("contiguous", q.shape[1], self.division.queries)
        first = np.int32(call.first_position)
        q_index = jnp.expand_dims(own + first, [i for i in range(NUM_LEADING_AXES) if i != Q_AXIS])
        k_index = default_positions(self.spec.kv_len, K_AXIS)
        return call, operands._replace(q_index=q_index, k_index=k_index)
