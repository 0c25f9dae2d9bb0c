"""Barriers of one array, addressed by name."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.sm90.primitives.pipeline import Barriers


def test_names_have_consecutive_barriers() -> None:
    barriers = Barriers.allocate(2, q=3, k=2, tile=1)
    assert barriers.array == plgpu.Barrier(num_arrivals=2, num_barriers=6)
    assert [barriers.offset(name) for name in ("q", "k", "tile")] == [0, 3, 5]


def test_names_outlive_the_flattening_of_a_kernels_memory() -> None:
    leaves, tree = jax.tree.flatten(Barriers.allocate(q=3, k=2))
    assert len(leaves) == 1
    restored = jax.tree.unflatten(tree, ["reference"])
    assert restored.array == "reference"
    assert restored.offset("k") == 3
