"""What masks and scores read of tokens that other devices have: positions and token data, which are small and
gathered."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.distributed.collectives import AxisName
from pallas_fa2.distributed.zigzag import Layout, positions
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, AuxArrays
from pallas_fa2.ir.call_spec import Operands


def map_aux(fn: Callable[[AuxArrays], AuxArrays], operands: Operands) -> Operands:
    """Apply a function to the arrays of each mask and score."""
    mask, scores = jax.tree.map(
        fn, (operands.mask, operands.scores), is_leaf=lambda node: isinstance(node, AuxArrays)
    )
    return operands._replace(mask=mask, scores=scores)


def gather_key_data(
    operands: Operands, kv_len: int, gather: Callable[[jax.Array], jax.Array]
) -> Operands:
    """Gather what masks and scores read of keys, of which each device has `kv_len`, by a function of such an array."""

    def gather_array(x: jax.Array) -> jax.Array:
        return gather(x) if x.shape[K_AXIS] == kv_len else x

    def gather_node(node: AuxArrays) -> AuxArrays:
        # Queries and keys are no longer the same tokens.
        k_tokens = jax.tree.map(gather_array, node.k_tokens)
        return dataclasses.replace(node, k_tokens=k_tokens, shared=())

    k_index = None if operands.k_index is None else gather_array(operands.k_index)
    return map_aux(gather_node, operands)._replace(k_index=k_index)


def own_positions(layout: Layout, length: int, axis_name: AxisName) -> jax.Array:
    """Return the positions of this device's tokens, int32 `[length]`."""
    table = jnp.asarray(positions(layout, length, lax.axis_size(axis_name)))
    return lax.dynamic_index_in_dim(table, lax.axis_index(axis_name), keepdims=False)


def with_positions(operands: Operands, q_index: jax.Array, k_index: jax.Array) -> Operands:
    """Add the positions of this device's queries and of the keys that it attends to, int32 `[T/n]` and `[keys]`."""
    ones = (1,) * (NUM_LEADING_AXES - 2)
    return operands._replace(
        q_index=q_index.reshape(*ones, -1, 1), k_index=k_index.reshape(*ones, 1, -1)
    )
