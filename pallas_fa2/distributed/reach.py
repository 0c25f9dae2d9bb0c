"""The keys of other devices to which a mask may let a device attend, where this is known when a call is traced.

A window reaches the last keys of the device before. These are gathered instead of all keys: one call then computes a
device's queries on its own keys and on those in reach.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.distributed.aux_shards import map_aux
from pallas_fa2.distributed.collectives import AxisName, shift
from pallas_fa2.distributed.ring_schedule import split_conjuncts
from pallas_fa2.ir.arrays import K_AXIS, AuxArrays
from pallas_fa2.ir.block_classes import EMPTY
from pallas_fa2.ir.call_spec import Operands, accumulator_dtype
from pallas_fa2.ir.translation import (
    classes_at_distances,
    is_translation_invariant,
    reads_positions,
)
from pallas_fa2.parse_call import CheckedCall
from pallas_fa2.trace_mods import trace_mod

# Reaches are multiples of a block of keys, so that the blocks of own keys start where they do on one device.
KEYS_OF_A_BLOCK = 128


class Reach(NamedTuple):
    """How many keys before a device's first one, and behind its last one, its queries may attend to."""

    before: int
    after: int


def key_reach(call: CheckedCall, operands: Operands, shards: int) -> Reach | None:
    """Return the reach of a mask in contiguous layout, or None where all keys are as well gathered.

    Keys in reach come by a transfer for each device that has some, which use fewer links than a gather does: so they are
    at most half of the other devices' keys. Pairwise arrays would have to be copied.
    """
    length, conjuncts = call.dims.kv_len, split_conjuncts(call.mask, call.operands.mask)[0]
    nodes = jax.tree.leaves(
        (operands.mask, operands.scores), is_leaf=lambda x: isinstance(x, AuxArrays)
    )
    if call.dims.q_len != length or call.has_explicit_positions or call.first_position != 0:
        return None
    if any(node.pairwise for node in nodes):
        return None
    step = min(KEYS_OF_A_BLOCK, length)
    steps = np.arange(1, -(-length * shards // step) + 1)
    before, after = np.ones(steps.size, bool), np.ones(steps.size, bool)  # which some query reaches
    for mask, data in zip(conjuncts, operands.mask, strict=True):
        code = trace_mod(mask, data, call.dims, 0)
        if reads_positions(code) and is_translation_invariant(code):
            for reached, distance in (
                (before, steps * step),
                (after, -length - (steps - 1) * step),
            ):
                reached &= classes_at_distances(code, distance, distance, length, step) != EMPTY
    reach = Reach(*(int(np.max(steps * step, where=x, initial=0)) for x in (before, after)))
    return reach if sum(reach) <= (shards - 1) * length // 2 else None


def operands_in_reach(
    operands: Operands, reach: Reach, axis_name: AxisName, length: int
) -> Operands:
    """Select what masks and scores read of the keys in reach of a device, which has `length`, from that of all keys."""
    keys, first = reach.before + length + reach.after, lax.axis_index(axis_name) * length
    total = lax.axis_size(axis_name) * length

    def select(x: jax.Array) -> jax.Array:
        if x.shape[K_AXIS] != total:
            return x
        # Before the first key come the last ones: which the mask excludes, because they are farther than its reach.
        parts = x[..., total - reach.before :], x, x[..., : reach.after]
        return lax.dynamic_slice_in_dim(jnp.concatenate(parts, K_AXIS), first, keys, K_AXIS)

    def select_node(node: AuxArrays) -> AuxArrays:
        k_tokens, pairwise_k = jax.tree.map(select, (node.k_tokens, node.pairwise_k))
        return dataclasses.replace(node, k_tokens=k_tokens, pairwise_k=pairwise_k)

    k_index = None if operands.k_index is None else select(operands.k_index)
    return map_aux(select_node, operands)._replace(k_index=k_index)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def gather_reach(
    x: jax.Array, axis_name: AxisName, axis: int, reach: Reach
) -> tuple[jax.Array, ...]:
    """Return the arrays of keys in reach, in their order, of which a device's own are one.

    Gradients are summed over the devices in float32.
    """
    before = reversed(list(_sent(x, axis_name, axis, reach.before, 1)))
    return *before, x, *_sent(x, axis_name, axis, reach.after, -1)


@gather_reach.defjvp
def _gather_reach_jvp(
    axis_name: AxisName, axis: int, reach: Reach, primals: tuple, tangents: tuple
) -> tuple:
    (x,), (dx,) = primals, tangents
    wide: jax.Array = dx.astype(accumulator_dtype(dx.dtype))
    parts: Any = gather_reach(wide, axis_name, axis, reach)
    return gather_reach(x, axis_name, axis, reach), tuple(part.astype(dx.dtype) for part in parts)


def _sent(
    x: jax.Array, axis_name: AxisName, axis: int, reach: int, direction: int
) -> Iterator[jax.Array]:
    """Yield the keys of the devices 1, 2, ... before this one (direction 1), or behind it (-1)."""
    length = x.shape[axis]
    for devices in range(1, -(-reach // length) + 1):
        size = min(length, reach - (devices - 1) * length)
        start = length - size if direction > 0 else 0
        part = lax.slice_in_dim(x, start, start + size, axis=axis)
        yield shift(part, axis_name, direction * devices)
