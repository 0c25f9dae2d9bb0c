"""The keys of other devices to which a mask may let a device attend, where this is known when a call is traced.

A window reaches the last keys of the device before. These are gathered instead of all keys: one call then computes a
device's queries on its own keys and on those in reach.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.distributed.aux_shards import gather_key_data, with_positions
from pallas_fa2.distributed.collectives import AxisName, shift
from pallas_fa2.distributed.ring_schedule import split_conjuncts
from pallas_fa2.ir.arrays import K_AXIS, AuxArrays
from pallas_fa2.ir.block_classes import EMPTY
from pallas_fa2.ir.call_spec import Operands, accumulator_dtype
from pallas_fa2.ir.mesh import match_varying_axes
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


def key_reach(call: CheckedCall, shards: int) -> Reach | None:
    """Return the reach of a mask in contiguous layout, or None where all keys are as well gathered.

    Keys in reach come by a transfer for each device that has some, which use fewer links than a gather does: so they are
    at most half of the other devices' keys. Pairwise arrays would have to be copied.
    """
    length, operands = call.dims.kv_len, call.operands
    conjuncts, data_of_conjuncts = split_conjuncts(call.mask, operands.mask)
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
    for mask, data in zip(conjuncts, data_of_conjuncts, strict=True):
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
    """Gather what masks and scores read of the keys in reach of a device, which has `length` queries and keys.

    Before the first key of all come the last ones: the mask excludes them, because they are farther than its reach.
    """

    def gather(x: jax.Array) -> jax.Array:
        x, axis = match_varying_axes(x, lax.axis_index(axis_name)), K_AXIS % x.ndim
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        parts: Any = (gather_reach if is_float else _all_in_reach)(x, axis_name, axis, reach)
        return jnp.concatenate(parts, axis)

    distance = jnp.arange(-reach.before, length + reach.after, dtype=jnp.int32)
    index = lax.axis_index(axis_name) * length + distance
    total = lax.axis_size(axis_name) * length
    own = index[reach.before : reach.before + length]
    operands = gather_key_data(operands, length, gather)
    return with_positions(operands, own, jnp.mod(index, total))


def _all_in_reach(
    x: jax.Array, axis_name: AxisName, axis: int, reach: Reach
) -> tuple[jax.Array, ...]:
    """Return a device's own array between those of the keys before and behind, in their order."""
    before = reversed(list(_sent(x, axis_name, axis, reach.before, 1)))
    return *before, x, *_sent(x, axis_name, axis, reach.after, -1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def gather_reach(
    x: jax.Array, axis_name: AxisName, axis: int, reach: Reach
) -> tuple[jax.Array, ...]:
    """Return the arrays of keys in reach, in their order, of which a device's own are one.

    Gradients are summed over the devices in float32.
    """
    return _all_in_reach(x, axis_name, axis, reach)


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
