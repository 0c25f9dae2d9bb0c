"""A kernel's call under `jit` on several devices: each takes the batch entries and heads that lie there.

Entries and heads have nothing to do with each other, which the partitioner cannot know of a kernel: it
would gather all arguments on every device.
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

# What may lie on several devices, as `custom_partitioning` names the factors of an axis.
ENTRIES, HEADS = "entries", "heads"
# Query heads of one key head stay together.
IN_GROUP = "in_group"


@dataclasses.dataclass(frozen=True)
class Axes:
    """What the axes of arguments and results are, a string for each array, in trees of these.

    A letter stands for an axis: `b` of batch entries, `n` of query heads, `k` of key heads, and `.` of
    anything else. Arrays that entries or heads share have an axis of length 1, or none.
    """

    arguments: Any  # a string may stand for all arrays of a subtree
    results: Any


def sharded(kernel: Callable, axes: Axes) -> Callable:
    """The same kernel, a part of it on each device, as its first argument lies.

    What a result has no axis of is summed over the devices: the gradient of what is shared. Inside
    `shard_map` a kernel is called as it is, and where there is one device: to lower it takes a quarter more
    time here.
    """

    def call(*args: Any) -> Any:
        if jax.sharding.get_abstract_mesh().manual_axes or jax.device_count() == 1:
            return kernel(*args)
        letters = jax.tree.leaves((jax.tree.broadcast(axes.arguments, args), axes.results))

        def rule(_: Any, *types: list[ir.Type]) -> tuple[str, dict[str, Any]]:
            shapes = [tuple(ir.RankedTensorType(x).shape) for side in types for x in side]
            return _ShardedArgs(letters, shapes).rule(len(types[0]))

        def partition(mesh: Any, *trees: Any) -> tuple[Any, Callable, Any, Any]:
            leaves, tree = jax.tree.flatten(trees)
            arrays = _ShardedArgs(letters, [x.shape for x in leaves])
            specs = arrays.specs(mesh, leaves[0].sharding)
            of_args, of_results = tree.unflatten([NamedSharding(mesh, spec) for spec in specs])
            over = [
                _names(*specs[0]) - _names(*spec) for spec in specs[tree.children()[0].num_leaves :]
            ]

            def part(*args: Any) -> Any:
                with without_mesh():  # of explicit axes: here arrays are those of one device
                    found, tree = jax.tree.flatten(kernel(*args))
                    return tree.unflatten(map(_summed, found, over))

            return mesh, part, of_results, of_args

        # It takes no constants, and those of an inner `jit` are its own.
        divided = custom_partitioning(jax.jit(kernel))
        divided.def_partition(partition, sharding_rule=rule, decode_shardings=False)
        return divided(*args)

    return call


@dataclasses.dataclass(frozen=True)
class _ShardedArgs:
    """The arguments of a call, with or without its results after them."""

    letters: Sequence[str]
    shapes: Sequence[tuple[int, ...]]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Of the axis that a letter stands for, where it is not shared."""
        found: dict[str, int] = {}
        for letters, shape in zip(self.letters, self.shapes, strict=True):
            for letter, size in zip(letters, shape, strict=True):
                found[letter] = max(found.get(letter, 1), size)
        return found

    @functools.cached_property
    def factors(self) -> list[list[tuple[str, ...]]]:
        """Of each axis of each array: none if it is whole on every device."""
        grouped = 1 < self.sizes["k"] < self.sizes["n"]
        heads = (HEADS, IN_GROUP) if grouped else (HEADS,)
        of = {"b": (ENTRIES,), "n": heads, "k": (HEADS,)}

        def factors(letter: str, size: int) -> tuple[str, ...]:
            return of.get(letter, ()) if size == self.sizes[letter] > 1 else ()

        return [
            [factors(*axis) for axis in zip(*array, strict=True)]
            for array in zip(self.letters, self.shapes, strict=True)
        ]

    def rule(self, arguments: int) -> tuple[str, dict[str, Any]]:
        """As `custom_partitioning` takes it, where so many of the arrays are arguments."""
        whole = (f"whole{i}" for i in itertools.count())
        named = [[x or (next(whole),) for x in array] for array in self.factors]
        arrays = [" ".join(f"({' '.join(x)})" if x[1:] else x[0] for x in array) for array in named]
        text = f"{', '.join(arrays[:arguments])} -> {', '.join(arrays[arguments:])}"
        # in the order in which they appear
        found = dict.fromkeys(name for array in named for axis in array for name in axis)
        replicated = tuple(name for name in found if name not in (ENTRIES, HEADS))
        sizes = {IN_GROUP: self.sizes["n"] // self.sizes["k"]} if IN_GROUP in found else {}
        return text, {"need_replication_factors": replicated, **sizes}

    def specs(self, mesh: Mesh, sharding: Sharding) -> list[PartitionSpec]:
        """How all arrays lie if the first does so."""
        lies: dict[str, tuple[str, ...]] = {}
        heads = self.sizes["k"] if self.sizes["k"] > 1 else self.sizes["n"]
        counts = {ENTRIES: self.sizes["b"], HEADS: heads}
        for axis, factors in enumerate(self.factors[0]):
            names = _divided_over(mesh, sharding, self.shapes[0], axis)
            if factors and counts[factors[0]] % math.prod(mesh.shape[x] for x in names) == 0:
                lies[factors[0]] = names
        return [
            PartitionSpec(*(lies.get(x[0]) if x else None for x in array)) for array in self.factors
        ]


def _divided_over(
    mesh: Mesh, sharding: Sharding, shape: tuple[int, ...], axis: int
) -> tuple[str, ...]:
    """The axes of the mesh over which an axis of an array is divided, as `PartitionSpec` has them.

    None where it is divided over a part of one: such a sharding has no `PartitionSpec`.
    """
    if mesh.empty:
        return ()
    places = sharding.devices_indices_map(shape)
    starts = np.vectorize(lambda device: places[device][axis].start or 0, otypes=[int])(
        mesh.devices
    )
    # of the second place along each axis of the mesh
    steps = {
        name: starts[tuple(int(i == along) for i in range(starts.ndim))]
        for along, name in enumerate(mesh.axis_names)
        if mesh.shape[name] > 1
    }
    names = sorted(filter(steps.get, steps), key=lambda name: -steps[name])
    whole = math.prod(mesh.shape[name] for name in names) == len(np.unique(starts))
    return tuple(names) if whole else ()


def _names(*entries: Any) -> set[str]:
    """The axes of the mesh in some entries of a `PartitionSpec`."""
    return set(jax.tree.leaves(entries))


def _summed(x: jax.Array, names: set[str]) -> jax.Array:
    """Over the devices along these axes of the mesh, in float32."""
    if not names:
        return x
    return lax.psum(x.astype(jnp.float32), tuple(sorted(names))).astype(x.dtype)
