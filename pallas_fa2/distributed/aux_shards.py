"""What masks and scores read of tokens that other devices have: positions and token data, which are small and gathered."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.distributed.collectives import AxisName, gather_any
from pallas_fa2.distributed.zigzag import Layout, positions
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, AuxArrays
from pallas_fa2.ir.call_spec import Operands


def map_aux(fn: Callable[[AuxArrays], AuxArrays], operands: Operands) -> Operands:
    """Apply a function to the arrays of each mask and score."""
    mask, scores = jax.tree.map(
        fn, (operands.mask, operands.scores), is_leaf=lambda node: isinstance(node, AuxArrays)
    )
    return operands._replace(mask=mask, scores=scores)


def gather_key_data(operands: Operands, axis_name: AxisName, kv_len: int) -> Operands:
    """Gather what masks and scores read of keys, of which each device has `kv_len`, in the order of the devices."""

    def gather(x: jax.Array) -> jax.Array:
        return gather_any(x, axis_name, K_AXIS) if x.shape[K_AXIS] == kv_len else x

    def gather_node(node: AuxArrays) -> AuxArrays:
        # Queries and keys are no longer the same tokens.
        return dataclasses.replace(node, k_tokens=jax.tree.map(gather, node.k_tokens), shared=())

    k_index = None if operands.k_index is None else gather(operands.k_index)
    return map_aux(gather_node, operands)._replace(k_index=k_index)


def own_positions(layout: Layout, length: int, axis_name: AxisName) -> jax.Array:
    """Return the positions of this device's tokens, int32 `[length]`."""
    table = jnp.asarray(positions(layout, length, lax.axis_size(axis_name)))
    return lax.dynamic_index_in_dim(table, lax.axis_index(axis_name), keepdims=False)


def with_positions(
    operands: Operands,
    layout: Layout,
    lengths: tuple[int, int],
    axis_name: AxisName,
    first_position: int,
) -> Operands:
    """Add the positions of this device's queries and of all keys; `lengths` are those of a device."""
    q_index = own_positions(layout, lengths[0], axis_name) + np.int32(first_position)
    k_index = jnp.asarray(positions(layout, lengths[1], lax.axis_size(axis_name)))
    ones = (1,) * (NUM_LEADING_AXES - 2)
    return operands._replace(
        q_index=q_index.reshape(*ones, -1, 1), k_index=k_index.reshape(*ones, 1, -1)
    )
