"""`context_parallel_attention`: attention of sequences that are divided over the devices of a mesh axis."""

import functools
from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.api import (
    Lse,
    as_run_time_data,
    naming_the_cure_of_forward_mode,
)
from pallas_fa2.autodiff import CHECKPOINT_NAMES, attention
from pallas_fa2.check_args import check_arrays
from pallas_fa2.device import device_of
from pallas_fa2.distributed.aux_shards import gather_key_data, own_positions, with_positions
from pallas_fa2.distributed.collectives import HEADS, TOKENS, AxisName, gather, gather_any
from pallas_fa2.distributed.device_calls import call_on_keys, plan_ring
from pallas_fa2.distributed.reach import gather_reach, key_reach, operands_in_reach
from pallas_fa2.distributed.ring import ring_attention
from pallas_fa2.distributed.ring_schedule import split_conjuncts
from pallas_fa2.distributed.ulysses import Ulysses
from pallas_fa2.distributed.zigzag import Layout, positions
from pallas_fa2.fallback import warn_of_fallback
from pallas_fa2.ir.arrays import K_AXIS
from pallas_fa2.ir.call_spec import CallSpec, Operands, accumulator_dtype
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.masks import as_mask
from pallas_fa2.options import Key, Options, Out, Query, Value
from pallas_fa2.parse_call import CheckedCall, check_call
from pallas_fa2.planning.plan import Plan, make_plan
from pallas_fa2.scores import as_scores
from pallas_fa2.sinks import add_sinks

Strategy = Literal["ring", "all_gather", "ulysses"]


@overload
def context_parallel_attention(
    query: Query, key: Key, value: Value, *, axis_name: AxisName, strategy: Strategy = ..., layout: Layout = ...,
    return_lse: Literal[False] = False, **options: Unpack[Options],
) -> Out: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Query, key: Key, value: Value, *, axis_name: AxisName, strategy: Strategy = ..., layout: Layout = ...,
    return_lse: Literal[True], **options: Unpack[Options],
) -> tuple[Out, Lse]: ...  # fmt: skip
@overload
def context_parallel_attention(
    query: Query, key: Key, value: Value, *, axis_name: AxisName, strategy: Strategy = ..., layout: Layout = ...,
    return_lse: bool = ..., **options: Unpack[Options],
) -> Out | tuple[Out, Lse]: ...  # fmt: skip
def context_parallel_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    axis_name: AxisName,
    strategy: Strategy = "ring",
    layout: Layout = "contiguous",
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Any:
    """Compute exact attention inside `jax.shard_map`, where sequences are divided over the n devices of a mesh axis.

    The result is that of `flash_attention` on the whole sequences, dropout included, for this device's queries. Call
    the `shard_map` inside `jax.jit`, which `"ring"` requires.

    Args:
      query: `[*B, T/n, N, H]`, the queries of this device; dtypes as in `flash_attention`.
      key: `[*B, S/n, K, H]`, the keys of this device.
      value: `[*B, S/n, K, Hv]`, their values.
      axis_name: the mesh axis over which the tokens of both sequences are divided, or a tuple of axes.
      strategy: what moves between devices. `"ring"`: keys and values go around, and a device holds those that it
        computes with and the next ones (Ring Attention, arXiv:2310.01889); the backward sends the sums of dK and dV
        around as well, in float32. Keys that a static mask or window excludes on all devices are not sent.
        `"all_gather"`: keys and values of all devices, or those that a window reaches, are gathered, in the backward
        again; one call computes all, and the sums of dK and dV are scattered in float32. `"ulysses"`: tokens are
        exchanged for heads and back (arXiv:2309.14509); n must divide N, and divide K or be a multiple of it.
      layout: which tokens are this device's: `"contiguous"`, the next T/n of the sequence, or `"zigzag"`, chunks i and
        2n - 1 - i of 2n (see `zigzag`), by which devices compute equally much under a causal mask.
      return_lse: also return the natural logsumexp of the scores.
      options: those of `flash_attention`. Positions and token data of masks and scores are those of this device's
        tokens (positions by default those of the layout); pairwise arrays have this device's queries and the keys of
        all devices, in the order of the layout, `[*B, N, T/n, S]`; data of heads and batch entries are whole.

    Returns:
      `[*B, T/n, N, Hv]` in query's dtype; with `return_lse` also `[*B, N, T/n]` in float32 (float64 for float64
      inputs). Both are differentiable in query, key, value, sinks and score data, as in `flash_attention`.

    Raises:
      ValueError, TypeError: before anything is compiled, as in `flash_attention`; there is no such mesh axis, a zigzag
        layout has an odd number of tokens on a device, or heads cannot be divided.
      NotImplementedError: strategy `"ring"` is called outside of `jax.jit`.

    Example:
      >>> import functools, jax, numpy as np, pallas_fa2 as fa
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> mesh = Mesh(np.array(jax.devices()), ("sequence",))
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
      >>> attend = functools.partial(
      ...     fa.context_parallel_attention, axis_name="sequence", is_causal=True
      ... )
      >>> spec = P(None, "sequence")
      >>> cp = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
      >>> jax.jit(cp)(q, k, v).shape
      (2, 128, 8, 64)
    """
    if unknown := sorted(options.keys() - Options.__annotations__.keys()):
        raise TypeError(
            f"context_parallel_attention has no argument {unknown[0]!r}; it has those of flash_attention"
        )
    check_arrays(query, key, value)
    shards = _check_arguments(axis_name, strategy, layout, query, key)
    arrays = tuple(jnp.asarray(x) for x in (query, key, value))
    implementation, sinks = options.pop("implementation", None), options.get("sinks")
    arguments: dict[str, Any] = {**options, "shards": shards}
    mask = arguments.pop("mask", None)
    arguments["mask"], arguments["score"] = as_run_time_data(
        (None if mask is None else as_mask(mask), as_scores(arguments.pop("score", None)))
    )
    _complete_positions(arguments, layout, axis_name, arrays)
    call = check_call(*arrays, **arguments)
    if 0 in call.dims.batch:
        run = _no_entries
    elif strategy == "ulysses":
        run = _ulysses
    else:
        run = _ring if strategy == "ring" or shards == 1 else _all_gather
    with naming_the_cure_of_forward_mode(implementation):
        out, lse = run(call, arrays, axis_name, layout, implementation)
    if sinks is not None:
        out, lse = add_sinks(out, lse, jnp.asarray(sinks))
    return (out, lse) if return_lse else out


def _check_arguments(axis_name: Any, strategy: Any, layout: Any, query: Any, key: Any) -> int:
    """Check the arguments that `flash_attention` does not have; return the number of devices of the mesh axis."""
    for name, value, type_ in (("strategy", strategy, Strategy), ("layout", layout, Layout)):
        if value not in get_args(type_):
            names = ", ".join(map(repr, get_args(type_)))
            raise ValueError(f"{name} must be one of {names}, but it is {value!r}")
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"axis_name must be one axis or a tuple of different ones, but it is {axis_name!r}; name those over which the "
            "sequence is divided, in the order of the mesh"
        )
    try:
        shards = lax.axis_size(axis_name)
    except NameError:
        here = ", ".join(map(repr, jax.sharding.get_abstract_mesh().manual_axes))
        remedy = f"those here are {here}" if here else "call it inside jax.shard_map"
        raise ValueError(
            f"axis_name must be an axis over which jax.shard_map divides arrays, but it is {axis_name!r}, and "
            f"context_parallel_attention is called where there is none of this name; {remedy}"
        ) from None
    if layout == "zigzag" and shards > 1:
        for name, x in (("T", query), ("S", key)):
            if len(x.shape) >= 3 and x.shape[TOKENS] % 2:
                raise ValueError(
                    f"layout 'zigzag' needs an even number of tokens on each device, but {name}/n is {x.shape[TOKENS]}; "
                    f"pad the sequences to a multiple of {2 * shards} tokens"
                )
    return shards


def _complete_positions(
    arguments: dict, layout: Layout, axis_name: AxisName, arrays: tuple
) -> None:
    """Add the positions of the layout on one side where the user gives those of the other side alone."""
    names = ("q_positions", "kv_positions")
    given = [arguments.get(name) is not None for name in names]
    if any(given) and not all(given):
        length = arrays[given[0]].shape[TOKENS]
        arguments[names[given[0]]] = own_positions(layout, length, axis_name)


def _plan(arrays: tuple, implementation: Any, spec: CallSpec) -> Plan:
    """Choose the backend of a call; on a GPU warn where it is not fused."""
    device = device_of(arrays[0])
    plan = make_plan(spec, device, implementation)
    if implementation is None:
        warn_of_fallback(spec, plan.implementation, plan.rejected, device)
    return plan


def _shard_operands(call: CheckedCall, axis_name: AxisName, layout: Layout) -> Operands:
    """Return what is read of this device's queries and of all keys; the mask's data are a tuple, by conjuncts."""
    dims, operands = call.dims, _by_conjuncts(call)
    gather_array = functools.partial(gather_any, axis_name=axis_name, axis=K_AXIS)
    operands = gather_key_data(operands, dims.kv_len, gather_array)
    if call.has_explicit_positions:
        return operands
    q_index = own_positions(layout, dims.q_len, axis_name) + np.int32(call.first_position)
    k_index = jnp.asarray(positions(layout, dims.kv_len, lax.axis_size(axis_name)))
    return with_positions(operands, q_index, k_index)


def _by_conjuncts(call: CheckedCall) -> Operands:
    """Return the operands with the mask's data as a tuple, by conjuncts."""
    return call.operands._replace(mask=split_conjuncts(call.mask, call.operands.mask)[1])


def _no_entries(
    call: CheckedCall, arrays: tuple, axis_name: AxisName, layout: Layout, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Return `out [*B, T/n, N, Hv]` and `lse [*B, N, T/n]` where an axis of B has length 0, which backends cannot
    divide."""
    q, _, v = arrays
    out = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = jnp.zeros((*q.shape[:-3], q.shape[HEADS], q.shape[TOKENS]), accumulator_dtype(q.dtype))
    return match_varying_axes((out, lse), (arrays, lax.axis_index(axis_name)))


def _ring(
    call: CheckedCall, arrays: tuple, axis_name: AxisName, layout: Layout, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of this device's queries, of blocks of keys that go around."""
    operands = _shard_operands(call, axis_name, layout)
    plan = functools.partial(_plan, arrays, implementation)
    ring, operands = plan_ring(call, operands, axis_name, layout, plan)
    q, k, v = arrays
    return ring_attention(ring, q, k, v, operands)


def _all_gather(
    call: CheckedCall, arrays: tuple, axis_name: AxisName, layout: Layout, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of this device's queries by one call, on all keys or on those in reach."""
    reach, kv_len = None, call.dims.lengths[1]
    if layout == "contiguous":
        reach = key_reach(call, lax.axis_size(axis_name))
    if reach is None:
        operands = _shard_operands(call, axis_name, layout)
    else:
        operands = operands_in_reach(_by_conjuncts(call), reach, axis_name, call.dims.kv_len)
        kv_len = reach.before + call.dims.kv_len + reach.after
    spec, operands = call_on_keys(call, operands, kv_len)
    plan = _plan(arrays, implementation, spec)

    def attend(q: jax.Array, k: Any, v: Any, operands: Operands) -> Any:
        kv: Any = [
            gather(x, axis_name, TOKENS % x.ndim) if reach is None else jnp.concatenate(x, TOKENS)
            for x in (k, v)
        ]
        return attention(spec, plan, q, *kv, operands)

    # The backward gathers all keys and values again: to keep them would take n times the memory. Those in reach are
    # kept.
    policy = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
    q, k, v = arrays
    if reach is not None:
        k, v = (gather_reach(x, axis_name, TOKENS % x.ndim, reach) for x in (k, v))
    inputs = match_varying_axes((q, k, v, operands), lax.axis_index(axis_name))
    return jax.checkpoint(attend, policy=policy)(*inputs)


def _ulysses(
    call: CheckedCall, arrays: tuple, axis_name: AxisName, layout: Layout, implementation: Any
) -> tuple[jax.Array, jax.Array]:
    """Return out and lse of this device's queries, by way of all queries of its share of the heads."""
    ulysses = Ulysses(call, axis_name, layout)
    ulysses.check_heads()
    on_heads = ulysses.head_call()
    spec = on_heads.spec()
    plan = _plan(arrays, implementation, spec)
    return ulysses.attend(spec, plan, arrays, on_heads.operands)
