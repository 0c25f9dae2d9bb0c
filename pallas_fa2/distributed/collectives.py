"""XLA's collectives on the tokens and heads of a sequence that is divided over devices; all run inside `shard_map`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.ir.call_spec import accumulator_dtype
from pallas_fa2.ir.mesh import match_varying_axes

AxisName = Any  # the name of a mesh axis, or a tuple of names
TOKENS, HEADS = -3, -2  # the axes of q, k, v and out


def shift(arrays: Any, axis_name: AxisName, by: int) -> Any:
    """Send a pytree of arrays from device i to device i + by, around the ring."""
    size = lax.axis_size(axis_name)
    if by % size == 0:
        return arrays
    ring = [(i, (i + by) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, ring), arrays)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def gather(x: jax.Array, axis_name: AxisName, axis: int) -> jax.Array:
    """Concatenate the arrays of all devices along an axis; gradients are summed over the devices in float32."""
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


@gather.defjvp
def _gather_jvp(axis_name: AxisName, axis: int, primals: tuple, tangents: tuple) -> tuple:
    """Gather the tangents in the accumulator dtype, in which the transpose then scatters the sums."""
    (x,), (dx,) = primals, tangents
    wide = dx.astype(accumulator_dtype(dx.dtype))
    wide = lax.all_gather(wide, axis_name, axis=axis, tiled=True)
    return gather(x, axis_name, axis), wide.astype(dx.dtype)


def gather_any(x: jax.Array, axis_name: AxisName, axis: int) -> jax.Array:
    """Concatenate arrays of any dtype, which are made to vary over the mesh axis."""
    x = match_varying_axes(x, lax.axis_index(axis_name))
    if jnp.issubdtype(x.dtype, jnp.floating):
        return gather(x, axis_name, axis)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def all_to_all(x: jax.Array, axis_name: AxisName, split: int, concat: int) -> jax.Array:
    """Divide one axis over the devices and concatenate another one of all devices."""
    axes = {"split_axis": split % x.ndim, "concat_axis": concat % x.ndim}
    return lax.all_to_all(x, axis_name, **axes, tiled=True)
