"""Tracing without a mesh, and the mesh axes over which arrays in `shard_map` vary."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import lax


def without_mesh() -> AbstractContextManager:
    """Around what is the same on a mesh, also inside `shard_map`, as without one."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def varying_axes(x: Any) -> frozenset:
    """The mesh axes over which an array inside `shard_map` varies."""
    return jax.typeof(x).manual_axis_type.varying


def match_varying_axes(tree: Any, like: Any = ()) -> Any:
    """Inside `shard_map`, arrays that all vary over the same axes of the mesh, as primitives want.

    An array that varies over fewer is the same on some devices; its gradient is summed over them.
    """
    axes = frozenset().union(*map(varying_axes, jax.tree.leaves((tree, like))))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - varying_axes(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)
