"""Ulysses (arXiv:2309.14509): tokens are exchanged for heads, and each device attends over the whole sequence."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.autodiff import attention
from pallas_fa2.distributed.aux_shards import map_aux
from pallas_fa2.distributed.collectives import HEADS, TOKENS, AxisName, all_to_all, gather_any
from pallas_fa2.distributed.zigzag import Layout, to_sequence_order, to_zigzag_order
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS, AuxArrays, CallShape
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.parse_call import CheckedCall


@dataclasses.dataclass(frozen=True)
class Ulysses:
    """Attention of a device's share of the heads over the whole sequence, for a call with its share of the tokens."""

    call: CheckedCall
    axis_name: AxisName
    layout: Layout

    @property
    def shards(self) -> int:
        return lax.axis_size(self.axis_name)

    @property
    def key_copies(self) -> int:
        """On how many devices each key head is."""
        heads, shards = self.call.dims.kv_heads, self.shards
        return 1 if heads % shards == 0 else shards // heads

    def check_heads(self) -> None:
        """Raise a ValueError unless heads can be divided over the devices."""
        q_heads, kv_heads = self.call.dims.kv_heads * self.call.dims.group, self.call.dims.kv_heads
        shards = self.shards
        if q_heads % shards or (kv_heads % shards and shards % kv_heads):
            raise ValueError(
                f"strategy 'ulysses' divides heads over the {shards} devices of mesh axis {self.axis_name!r}: their number "
                f"must divide N (= {q_heads}), and must divide K (= {kv_heads}) or be a multiple of it; use strategy='ring'"
            )

    def attend(self, spec: CallSpec, plan: Any, arrays: tuple, operands: Operands) -> tuple:
        """Return `out [*B, T/n, N, Hv]` and `lse [*B, N, T/n]` from q, k and v of this device's tokens."""
        q, k, v = match_varying_axes(arrays, lax.axis_index(self.axis_name))
        k, v = (jnp.repeat(x, self.key_copies, HEADS) for x in (k, v))
        q, k, v = (
            self._in_sequence_order(all_to_all(x, self.axis_name, HEADS, TOKENS), TOKENS)
            for x in (q, k, v)
        )
        out, lse = attention(spec, plan, q, k, v, operands)
        if self.layout == "zigzag":
            out = to_zigzag_order(out, TOKENS % out.ndim, self.shards)
            lse = to_zigzag_order(lse, lse.ndim - 1, self.shards)
        out = all_to_all(out, self.axis_name, TOKENS, HEADS)
        return out, all_to_all(lse, self.axis_name, -1, -2)

    def head_call(self) -> CheckedCall:
        """Return the call that a device computes."""
        dims = self.call.dims
        kv_heads = max(dims.kv_heads // self.shards, 1)
        group = dims.kv_heads * dims.group // self.shards // kv_heads
        shape = CallShape(dims.batch, *dims.lengths, kv_heads, group)
        return self.call._replace(dims=shape, operands=self._operands(shape))

    def _operands(self, shape: CallShape) -> Operands:
        """Return what masks and scores read of all tokens and of the device's heads."""
        dims, operands = self.call.dims, self.call.operands

        def queries(x: jax.Array) -> jax.Array:
            return self._gather(x, Q_AXIS, dims.q_len)

        def keys(x: jax.Array) -> jax.Array:
            return self._gather(x, K_AXIS, dims.kv_len)

        def pairs(x: jax.Array) -> jax.Array:
            x = self._exchange_rows(x, shape)
            return x if x.shape[K_AXIS] == 1 else self._in_sequence_order(x, K_AXIS)

        pairwise = ("pairwise", "pairwise_q", "pairwise_k")

        def of_node(node: AuxArrays) -> AuxArrays:
            return dataclasses.replace(
                node,
                q_tokens=jax.tree.map(queries, node.q_tokens),
                k_tokens=jax.tree.map(keys, node.k_tokens),
                per_head=jax.tree.map(lambda x: self._own_heads(x, shape), node.per_head),
                **{name: jax.tree.map(pairs, getattr(node, name)) for name in pairwise},
            )

        return map_aux(of_node, operands)._replace(
            q_index=jax.tree.map(queries, operands.q_index),
            k_index=jax.tree.map(keys, operands.k_index),
            head_index=self._head_index(shape) if self.call.dropout_rate else None,
        )

    def _gather(self, x: jax.Array, axis: int, length: int) -> jax.Array:
        """Gather an axis of tokens; one of length 1 that all tokens share remains."""
        if x.shape[axis] != length:
            return x
        return self._in_sequence_order(gather_any(x, self.axis_name, axis), axis)

    def _exchange_rows(self, x: jax.Array, shape: CallShape) -> jax.Array:
        """Return all queries of the device's heads, of a pairwise array with all heads of its queries."""
        if x.shape[1:3] == (1, 1):
            return self._gather(x, Q_AXIS, self.call.dims.q_len)
        if x.shape[Q_AXIS] != self.call.dims.q_len:
            return self._own_heads(x, shape)
        x = match_varying_axes(x, lax.axis_index(self.axis_name))
        x = all_to_all(x.reshape(len(x), -1, *x.shape[3:]), self.axis_name, 1, 2)
        x = x.reshape(len(x), shape.kv_heads, shape.group, *x.shape[2:])
        return self._in_sequence_order(x, Q_AXIS)

    def _own_heads(self, x: jax.Array, shape: CallShape) -> jax.Array:
        """Return the device's heads of an array `[B | 1, K, G, ...]`, as `[B | 1, K', G', ...]`."""
        if x.shape[1:3] == (1, 1):
            return x
        heads, rest = shape.kv_heads * shape.group, x.shape[3:]
        x = match_varying_axes(x, lax.axis_index(self.axis_name)).reshape(len(x), -1, *rest)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(self.axis_name) * heads, heads, 1)
        return x.reshape(len(x), shape.kv_heads, shape.group, *rest)

    def _head_index(self, shape: CallShape) -> jax.Array:
        """Return the indices of the device's heads among those of all batch entries, `[B, K', G', 1, 1]`."""
        heads = shape.kv_heads * shape.group
        entries = jnp.arange(math.prod(shape.batch), dtype=jnp.int32) * (heads * self.shards)
        own = lax.axis_index(self.axis_name) * heads + jnp.arange(heads, dtype=jnp.int32)
        index = entries[:, None] + own[None]
        return index.reshape(-1, shape.kv_heads, shape.group, 1, 1)

    def _in_sequence_order(self, x: jax.Array, axis: int) -> jax.Array:
        return to_sequence_order(x, axis % x.ndim, self.shards) if self.layout == "zigzag" else x
