"""Tracing without a mesh, and the mesh axes over which arrays inside `shard_map` vary."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax


def without_mesh() -> AbstractContextManager:
    """Hide the mesh, also inside `shard_map`, from code that does not depend on it."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def varying_axes(x: Any) -> frozenset:
    """Return the mesh axes over which an array inside `shard_map` varies."""
    return jax.typeof(x).manual_axis_type.varying


def match_varying_axes(tree: Any, like: Any = ()) -> Any:
    """Make arrays inside `shard_map` vary over the same mesh axes, as primitives require.

    An array that varies over fewer axes is the same on some devices, and its gradient is summed over them.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((tree, like))))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
