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

# A reach is a multiple of the largest block of keys of the kernels: a device's own keys then begin with a block.
KEYS_OF_A_BLOCK = 128


class Reach(NamedTuple):
    """How many keys before a device's first one, and behind its last one, its queries may attend to."""

    before: int
    after: int


def key_reach(call: CheckedCall, shards: int) -> Reach | None:
    """Return the reach of a mask in contiguous layout, or None where the keys of all devices are gathered.

    That is where more than half of the other devices' keys are in reach: these come by a transfer for each device that
    has some, which uses fewer links than a gather does. It is also where positions are not those of the layout, or a
    mask or score has pairwise arrays, which would have to be copied.
    """
    length, operands = call.dims.kv_len, call.operands
    if call.dims.q_len != length or call.has_explicit_positions or call.first_position != 0:
        return None
    nodes = jax.tree.leaves(
        (operands.mask, operands.scores), is_leaf=lambda x: isinstance(x, AuxArrays)
    )
    if any(node.pairwise for node in nodes):
        return None
    size = min(KEYS_OF_A_BLOCK, length)
    # The n-th blocks of keys before a device's first key, and behind its last one, and how far these lie before its
    # first query.
    n = np.arange(1, -(-length * shards // size) + 1)
    distances = n * size, -length - (n - 1) * size
    in_reach = [
        np.ones(n.size, bool) for _ in distances
    ]  # whether some query may attend to some key of a block
    for mask, data in zip(*split_conjuncts(call.mask, operands.mask), strict=True):
        code = trace_mod(mask, data, call.dims, 0)
        if reads_positions(code) and is_translation_invariant(code):
            for blocks, distance in zip(in_reach, distances, strict=True):
                blocks &= classes_at_distances(code, distance, distance, length, size) != EMPTY
    reach = Reach(*(int(np.max(n * size, where=blocks, initial=0)) for blocks in in_reach))
    return reach if sum(reach) <= (shards - 1) * length // 2 else None


def operands_in_reach(
    operands: Operands, reach: Reach, axis_name: AxisName, length: int
) -> Operands:
    """Gather what masks and scores read of the keys in reach of a device, which has `length` queries and keys.

    The ring of devices is closed: before the first key of all come the last ones, and behind the last one the first.
    The mask excludes them by their positions, which are farther than its reach.
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
