"""Partitions a function of arrays under `jit` on several devices: each computes the part that its arrays are for.

Batch entries, heads and queries are independent, which XLA's partitioner cannot know of a kernel: it would gather all
arguments on every device.
"""

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxlib.mlir import ir

from pallas_fa2.ir.call_spec import accumulator_dtype
from pallas_fa2.ir.mesh import without_mesh

# The factors of axes that may be divided over devices, as a sharding rule of `custom_partitioning` names them.
ENTRIES, HEADS, QUERIES, KEYS = "entries", "heads", "queries", "keys"
# Query heads of one key head stay together.
IN_GROUP = "in_group"
# An option of `jax.config`: how many frames of each operation's source lines are lowered.
LOCATIONS = "jax_traceback_in_locations_limit"


@dataclasses.dataclass(frozen=True)
class Axes:
    """The axes of a function's arguments and results: trees with a string for each array, or for all of a subtree.

    A letter stands for an axis: `b` for batch entries, `n` for query heads, `k` for key heads, `g` for the query heads
    of each key head, `t` for queries, `s` for keys, and `.` for any other, which is never divided. An array that
    entries, heads or queries share has an axis of length 1, or none.
    """

    arguments: Any
    results: Any


class Division(NamedTuple):
    """The mesh axes over which a call is divided. Those of keys are those of queries, or none: each device has all
    keys."""

    entries: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]


def sharded(kernel: Callable, axes: Axes, on_device: Callable | None = None) -> Callable:
    """Return the kernel, partitioned over devices as its first argument is sharded.

    `on_device` takes its place wherever the arrays are those of one device for certain.

    Inside `shard_map` and on one device the kernel is called as it is: partitioned, it takes a quarter more time to
    lower.
    """
    on_device = kernel if on_device is None else on_device
    if jax.device_count() == 1:
        return on_device

    def call(*args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return on_device(*args)
        return partitioned(kernel, axes, lambda *_: on_device)(*args)

    return call


def partitioned(function: Callable, axes: Axes, on_shard: Callable) -> Callable:
    """Return the function, partitioned over devices as its first argument is sharded, and keys as the second one.

    `on_shard(division, results)` returns what a device computes of its part; `results` are the shapes and dtypes of the
    whole results. Of a result without an axis that is divided, the gradient of what entries, heads or queries share, it
    returns the device's part, and these are summed over the devices.
    """

    def call(*args: Any) -> Any:
        letters = jax.tree.leaves(jax.tree.broadcast(axes.arguments, args))

        def rule(_: Any, *types: list[ir.Type]) -> tuple[str, dict[str, Any]]:
            shapes = [tuple(ir.RankedTensorType(x).shape) for side in types for x in side]
            return _ShardedArgs(letters, shapes).rule(len(types[0]))

        def partition(mesh: Any, *trees: Any) -> tuple[Any, Callable, Any, Any]:
            leaves, tree = jax.tree.flatten(trees)
            shards = _ShardedArgs(letters, [x.shape for x in leaves])
            division = shards.division(mesh, *(x.sharding for x in leaves[:2]))
            specs = shards.specs(division)
            arg_shardings, result_shardings = tree.unflatten(
                [NamedSharding(mesh, x) for x in specs]
            )
            num_args = tree.children()[0].num_leaves
            psum_axes = [_mesh_axes(*specs[0]) - _mesh_axes(*spec) for spec in specs[num_args:]]
            compute = on_shard(division, trees[1])

            def of_device(*args: Any) -> Any:
                with _as_in_shard_map(mesh):
                    results, tree = jax.tree.flatten(compute(*args))
                    return tree.unflatten(map(_psum, results, psum_axes))

            _lower_without_locations(of_device)
            return mesh, of_device, result_shardings, arg_shardings

        # `custom_partitioning` takes no constants; `jit` keeps those of the function.
        call = custom_partitioning(jax.jit(function))
        call.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        results = call(*args)  # traces the function; `rule` and `partition` are called later
        letters.extend(jax.tree.leaves(jax.tree.broadcast(axes.results, results)))
        return results

    return call


def _lower_without_locations(function: Callable) -> None:
    """Have JAX lower a function, which it does before it lets go of it, without the source lines of its operations.

    The table of lines is not part of the module that a partitioner returns, and XLA takes the numbers of lines for
    those of the whole program: it prints "Invalid stack_frame_id", or follows a cycle of frames and does not end (XLA
    of jaxlib 0.11, where it inlines a call or a loop of one iteration).
    """
    limit = getattr(jax.config, LOCATIONS)
    if limit != 0:
        jax.config.update(LOCATIONS, 0)
        weakref.finalize(function, jax.config.update, LOCATIONS, limit)


def _as_in_shard_map(mesh: Mesh) -> AbstractContextManager:
    """Say that arrays are those of one device, by a mesh whose axes are all manual."""
    if mesh.empty:
        return without_mesh()
    manual = dict.fromkeys(mesh.axis_names, AxisType.Manual)
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh.update_axis_types(manual))


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
        in_group = IN_GROUP if grouped else HEADS  # of one key head, query heads are divided
        by_letter = {"b": (ENTRIES,), "n": heads, "k": (HEADS,), "g": (in_group,)}
        by_letter |= {"t": (QUERIES,), "s": (KEYS,)}

        def factors(letter: str, size: int) -> tuple[str, ...]:
            return by_letter.get(letter, ()) if size == self.sizes[letter] > 1 else ()

        return [
            [factors(*axis) for axis in zip(*array, strict=True)]
            for array in zip(self.letters, self.shapes, strict=True)
        ]

    def rule(self, num_args: int) -> tuple[str, dict[str, Any]]:
        """Return the sharding rule and its options for `custom_partitioning`; the first `num_args` arrays are
        arguments."""
        undivided = (f"whole{i}" for i in itertools.count())
        named = [[x or (next(undivided),) for x in array] for array in self.factors]
        arrays = [" ".join(f"({' '.join(x)})" if x[1:] else x[0] for x in array) for array in named]
        text = f"{', '.join(arrays[:num_args])} -> {', '.join(arrays[num_args:])}"
        # In the order in which they appear.
        names = dict.fromkeys(name for array in named for axis in array for name in axis)
        replicated = tuple(name for name in names if name not in Division._fields)
        # The size of a factor is known where it is a whole axis.
        is_known = IN_GROUP not in names or any((IN_GROUP,) in array for array in named)
        sizes = {} if is_known else {IN_GROUP: self.sizes["n"] // self.sizes["k"]}
        return text, {"need_replication_factors": replicated, **sizes}

    def division(self, mesh: Mesh, *shardings: Sharding) -> Division:
        """Return over which mesh axes a call is divided where its first two arguments have these shardings.

        Where keys are not divided as queries are, each device gets all of them.
        """
        mesh_axes: dict[str, tuple[str, ...]] = dict.fromkeys(Division._fields, ())
        heads = self.sizes["k"] if self.sizes["k"] > 1 else self.sizes["n"]
        sizes = {
            name: self.sizes.get(letter, 1)
            for name, letter in zip(Division._fields, "b.ts", strict=True)
        }
        sizes[HEADS] = heads
        for argument, sharding in enumerate(shardings):
            for axis, factors in enumerate(self.factors[argument]):
                factor = factors[0] if factors else None
                # The first argument decides on all but keys.
                if factor is None or (factor == KEYS) == (argument == 0):
                    continue
                names = _divided_over(mesh, sharding, self.shapes[argument], axis)
                if sizes[factor] % math.prod(mesh.shape[x] for x in names) == 0:
                    mesh_axes[factor] = names
        if mesh_axes[KEYS] != mesh_axes[QUERIES]:
            mesh_axes[KEYS] = ()
        return Division(**mesh_axes)

    def specs(self, division: Division) -> list[PartitionSpec]:
        """Return the `PartitionSpec` of each array."""
        mesh_axes = division._asdict()
        return [
            PartitionSpec(
                *(mesh_axes[x[0]] or None if x and x[0] in mesh_axes else None for x in array)
            )
            for array in self.factors
        ]


def _divided_over(
    mesh: Mesh, sharding: Sharding, shape: tuple[int, ...], axis: int
) -> tuple[str, ...]:
    """Return the mesh axes over which an axis of an array is divided, in the order of a `PartitionSpec`.

    There are none where it is divided over a fraction of a mesh axis, as such a sharding has no `PartitionSpec`, nor
    where the devices do not divide its length.
    """
    if mesh.empty:
        return ()
    # On a shape that the devices divide in any case: JAX has no indices of one that they do not.
    divisible = tuple(size * mesh.size for size in shape)
    indices = sharding.devices_indices_map(divisible)
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
    parts = math.prod(mesh.shape[name] for name in names)
    return tuple(names) if parts == len(np.unique(starts)) and shape[axis] % parts == 0 else ()


def _mesh_axes(*entries: Any) -> set[str]:
    """Return the mesh axes in some entries of a `PartitionSpec`."""
    return set(jax.tree.leaves(entries))


def _psum(x: jax.Array, names: set[str]) -> jax.Array:
    """Sum over these mesh axes in the accumulator dtype."""
    if not names:
        return x
    return lax.psum(x.astype(accumulator_dtype(x.dtype)), tuple(sorted(names))).astype(x.dtype)
