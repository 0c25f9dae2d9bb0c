"""The equivalent call of `flash_attention` for a call on a cache: the definition of that call, on any backend.

Contiguous keys are those of a call with explicit positions, under a mask of lengths; pages are gathered first. Packed
queries `[tokens, N, H]` become one batch entry against the slots of all sequences in a row, under a mask of requests,
like packed documents. That is linear in the size of the cache, where a batch entry for each request would have R times
the queries, and for each query its own copy of the keys; blocks of other requests are EMPTY. Keys and values of 8 bits
are multiplied by their scales, in the dtype of the queries.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS, AuxArrays
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec, requests_of
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.quantized import Scales, dequantize
from pallas_fa2.ir.trace import TracedFn, trace


def equivalent_spec(spec: CachedSpec) -> CallSpec:
    """Return the spec of the equivalent call."""
    call = dataclasses.replace(
        spec.call, mask=_with_existing_keys(spec.call.mask, spec.is_packed), source=None
    )
    if not spec.is_packed:
        return call
    return dataclasses.replace(call, batch=1, kv_len=call.batch * call.kv_len)


@functools.lru_cache(maxsize=512)
def _with_existing_keys(mask: TracedFn | None, is_packed: bool) -> TracedFn:
    """Join to a mask that a key exists and, of packed queries, that it is the same request's."""

    def visible(q_index: Any, k_index: Any, data: tuple[AuxArrays, Any]) -> Any:
        keys, mask_data = data
        length = keys.k_tokens["length"] if is_packed else keys.per_batch["length"]
        result = k_index < length
        if is_packed:
            q_request, k_request = keys.q_tokens["request"], keys.k_tokens["request"]
            result &= q_request == k_request
        return result if mask is None else result & mask(q_index, k_index, mask_data)

    index = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.int32)
    mask_data = ()
    if mask is not None:
        # as what they are: kernels take arrays by the names of `AuxArrays`
        _, structure = mask.key
        types = [
            jax.ShapeDtypeStruct(index.shape + x.shape, x.dtype)  # pyright: ignore
            for x in mask.jaxpr.in_avals
        ]
        *_, mask_data = jax.tree.unflatten(structure, types)
    keys = _existing_keys(is_packed, index, index, index)
    name = "existing keys" if mask is None else f"({mask} & existing keys)"
    return trace(name, visible, index, index, (keys, mask_data))


def _existing_keys(is_packed: bool, lengths: Any, q_request: Any, k_request: Any) -> AuxArrays:
    """Return what says which keys exist for a query: lengths of sequences, or of packed queries those of keys."""
    if not is_packed:
        return AuxArrays(per_batch={"length": lengths})
    return AuxArrays(
        q_tokens={"request": q_request}, k_tokens={"length": lengths, "request": k_request}
    )


def equivalent_arrays(
    spec: CachedSpec, q: Any, k: Any, v: Any, operands: CachedOperands
) -> tuple[jax.Array, jax.Array, jax.Array, Operands]:
    """Return q, k, v with a batch axis and the operands of the equivalent call."""
    call = operands.call
    k, v = contiguous_keys(k, v, operands.table, operands.scales, spec.call.dtype)
    if not spec.is_packed:
        keys = _existing_keys(False, _on_axis(operands.lengths, 0), None, None)
        return q, k, v, call._replace(mask=(keys, call.mask))
    assert operands.starts is not None
    batch, capacity = spec.call.batch, spec.call.kv_len
    request = requests_of(operands.starts, spec.call.q_len)
    requests = _on_axis(request, Q_AXIS), _on_axis(jnp.repeat(jnp.arange(batch), capacity), K_AXIS)
    lengths = _on_axis(jnp.repeat(operands.lengths, capacity), K_AXIS)
    flatten = functools.partial(_in_one_row, spec, jnp.minimum(request, batch - 1))
    mask, scores = jax.tree.map(flatten, (call.mask, call.scores))
    assert call.k_index is not None
    k_index = jnp.tile(call.k_index, (1, 1, 1, 1, batch))
    data = _existing_keys(True, lengths, *requests), mask
    k, v = (x.reshape(1, batch * capacity, *x.shape[2:]) for x in (k, v))
    return q[None], k, v, call._replace(mask=data, scores=scores, k_index=k_index)


def contiguous_keys(
    k: jax.Array, v: jax.Array, table: jax.Array | None, scales: Scales | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values of a cache or of pages as `[B, S, K, H]` and `[B, S, K, Hv]`: with scales, what 8 bits
    stand for in `dtype`."""
    if table is not None:
        k, v = (_gather_pages(x, table) for x in (k, v))
        scales = scales and Scales(*(_gather_scales(x, table) for x in scales))
    if scales is None:
        return k, v
    return dequantize(k, scales.key, dtype), dequantize(v, scales.value, dtype)


def _gather_pages(pool: jax.Array, table: jax.Array) -> jax.Array:
    """Return `[B, W * page, K, H]`, the pages of each sequence in a row."""
    pages = jnp.take(pool, table, axis=0, mode="clip")
    return pages.reshape(pages.shape[0], -1, *pages.shape[3:])


def _gather_scales(pool: jax.Array, table: jax.Array) -> jax.Array:
    """Return `[B, K, W * page]`, the scales of each sequence in a row."""
    scales = jnp.swapaxes(jnp.take(pool, table, axis=0, mode="clip"), 1, 2)
    return scales.reshape(*scales.shape[:2], -1)


def _on_axis(x: jax.Array, axis: int) -> jax.Array:
    shape = [1] * NUM_LEADING_AXES
    shape[axis] = x.shape[0]
    return x.astype(jnp.int32).reshape(shape)


def _in_one_row(spec: CachedSpec, request: jax.Array, x: jax.Array) -> jax.Array:
    """Return data of B sequences as data of one: with the axis of keys B times as long, or that of queries alone."""
    batch, capacity = x.shape[0], x.shape[K_AXIS]
    if capacity > 1:  # the keys of all sequences in a row
        x = jnp.broadcast_to(x, (spec.call.batch, *x.shape[1:]))
        x = jnp.moveaxis(x, 0, K_AXIS - 1)
        return x.reshape(1, *x.shape[: K_AXIS - 1], -1, *x.shape[NUM_LEADING_AXES:])
    if batch == 1:
        return x
    # One value a sequence: that of each query's.
    return jnp.moveaxis(jnp.take(x, request, axis=0), 0, Q_AXIS).reshape(
        1, *x.shape[1:Q_AXIS], request.size, 1, *x.shape[NUM_LEADING_AXES:]
    )
