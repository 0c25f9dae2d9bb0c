"""Partitions a kernel under `jit` on several devices: each device computes the batch entries and heads of its shard.

Batch entries and heads are independent, which XLA's partitioner cannot know of a kernel: it would gather all arguments
on every device.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxlib.mlir import ir

from pallas_fa2.ir.mesh import without_mesh

# The factors of axes that may be divided over devices, as a sharding rule of `custom_partitioning` names them.
ENTRIES, HEADS = "entries", "heads"
# Query heads of one key head stay together.
IN_GROUP = "in_group"


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a kernel's arguments and results: trees with a string for each array, or for all of a subtree.

    A letter stands for an axis: `b` for batch entries, `n` for query heads, `k` for key heads, and `.` for any other.
    An array that entries or heads share has an axis of length 1, or none.
    """

    arguments: Any
    results: Any


def sharded(kernel: Callable, axes: Axes, on_device: Callable | None = None) -> Callable:
    """Return the kernel, partitioned over devices as its first argument is sharded.

    `on_device` takes its place wherever the arrays are those of one device for certain.

    A result that has no axis of entries or heads, the gradient of what they share, is summed over the devices. Inside
    `shard_map` and on one device the kernel is called as it is: partitioned, it takes a quarter more time to lower.
    """
    on_device = kernel if on_device is None else on_device
    if jax.device_count() == 1:
        return on_device

    def call(*args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return on_device(*args)
        letters = jax.tree.leaves((jax.tree.broadcast(axes.arguments, args), axes.results))

        def rule(_: Any, *types: list[ir.Type]) -> tuple[str, dict[str, Any]]:
            shapes = [tuple(ir.RankedTensorType(x).shape) for side in types for x in side]
            return _ShardedArgs(letters, shapes).rule(len(types[0]))

        def partition(mesh: Any, *trees: Any) -> tuple[Any, Callable, Any, Any]:
            leaves, tree = jax.tree.flatten(trees)
            specs = _ShardedArgs(letters, [x.shape for x in leaves]).specs(mesh, leaves[0].sharding)
            arg_shardings, result_shardings = tree.unflatten(
                [NamedSharding(mesh, x) for x in specs]
            )
            num_args = tree.children()[0].num_leaves
            psum_axes = [_mesh_axes(*specs[0]) - _mesh_axes(*spec) for spec in specs[num_args:]]

            def on_shard(*args: Any) -> Any:
                with without_mesh():  # without explicit axes: here arrays are those of one device
                    results, tree = jax.tree.flatten(on_device(*args))
                    return tree.unflatten(map(_psum, results, psum_axes))

            return mesh, on_shard, result_shardings, arg_shardings

        # `custom_partitioning` takes no constants; `jit` keeps those of the kernel.
        partitioned = custom_partitioning(jax.jit(kernel))
        partitioned.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        return partitioned(*args)

    return call


@dataclasses.dataclass(frozen=True)
class _ShardedArgs:
    """The arguments of a call, with or without its results after them."""

    letters: Sequence[str]
    shapes: Sequence[tuple[int, ...]]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Map each letter to the length of its axis where that is not shared."""
        sizes: dict[str, int] = {}
        for letters, shape in zip(self.letters, self.shapes, strict=True):
            for letter, size in zip(letters, shape, strict=True):
                sizes[letter] = max(sizes.get(letter, 1), size)
        return sizes

    @functools.cached_property
    def factors(self) -> list[list[tuple[str, ...]]]:
        """List the factors of each axis of each array: none for an axis that is never divided."""
        grouped = 1 < self.sizes["k"] < self.sizes["n"]
        heads = (HEADS, IN_GROUP) if grouped else (HEADS,)
        by_letter = {"b": (ENTRIES,), "n": heads, "k": (HEADS,)}

        def factors(letter: str, size: int) -> tuple[str, ...]:
            return by_letter.get(letter, ()) if size == self.sizes[letter] > 1 else ()

        return [
            [factors(*axis) for axis in zip(*array, strict=True)]
            for array in zip(self.letters, self.shapes, strict=True)
        ]

    def rule(self, num_args: int) -> tuple[str, dict[str, Any]]:
        """Return the sharding rule and its options for `custom_partitioning`; the first `num_args` arrays are arguments."""
        undivided = (f"whole{i}" for i in itertools.count())
        named = [[x or (next(undivided),) for x in array] for array in self.factors]
        arrays = [" ".join(f"({' '.join(x)})" if x[1:] else x[0] for x in array) for array in named]
        text = f"{', '.join(arrays[:num_args])} -> {', '.join(arrays[num_args:])}"
        # In the order in which they appear.
        names = dict.fromkeys(name for array in named for axis in array for name in axis)
        replicated = tuple(name for name in names if name not in (ENTRIES, HEADS))
        sizes = {IN_GROUP: self.sizes["n"] // self.sizes["k"]} if IN_GROUP in names else {}
        return text, {"need_replication_factors": replicated, **sizes}

    def specs(self, mesh: Mesh, sharding: Sharding) -> list[PartitionSpec]:
        """Return the `PartitionSpec` of each array where the first one has this sharding."""
        mesh_axes: dict[str, tuple[str, ...]] = {}
        heads = self.sizes["k"] if self.sizes["k"] > 1 else self.sizes["n"]
        counts = {ENTRIES: self.sizes.get("b", 1), HEADS: heads}
        for axis, factors in enumerate(self.factors[0]):
            names = _divided_over(mesh, sharding, self.shapes[0], axis)
            if factors and counts[factors[0]] % math.prod(mesh.shape[x] for x in names) == 0:
                mesh_axes[factors[0]] = names
        return [
            PartitionSpec(*(mesh_axes.get(x[0]) if x else None for x in array))
            for array in self.factors
        ]


def _divided_over(
    mesh: Mesh, sharding: Sharding, shape: tuple[int, ...], axis: int
) -> tuple[str, ...]:
    """Return the mesh axes over which an axis of an array is divided, in the order of a `PartitionSpec`.

    There are none where it is divided over a fraction of a mesh axis: such a sharding has no `PartitionSpec`.
    """
    if mesh.empty:
        return ()
    indices = sharding.devices_indices_map(shape)
    starts = np.vectorize(lambda device: indices[device][axis].start or 0, otypes=[int])(
        mesh.devices
    )
    # The start on the second device along each mesh axis; the first device's is 0.
    steps = {
        name: starts[tuple(int(i == along) for i in range(starts.ndim))]
        for along, name in enumerate(mesh.axis_names)
        if mesh.shape[name] > 1
    }
    names = sorted(filter(steps.get, steps), key=lambda name: -steps[name])
    covers_mesh_axes = math.prod(mesh.shape[name] for name in names) == len(np.unique(starts))
    return tuple(names) if covers_mesh_axes else ()


def _mesh_axes(*entries: Any) -> set[str]:
    """Return the mesh axes in some entries of a `PartitionSpec`."""
    return set(jax.tree.leaves(entries))


def _psum(x: jax.Array, names: set[str]) -> jax.Array:
    """Sum over these mesh axes in float32."""
    if not names:
        return x
    return lax.psum(x.astype(jnp.float32), tuple(sorted(names))).astype(x.dtype)
