"""The sequences that `benchmarks.context_parallel` measures, and how they are divided over the GPUs of a host."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

import pallas_fa2 as fa
from benchmarks import packing

SEQUENCE, HEAD_AXIS = "sequence", "heads"  # axes of the mesh
IN_SHARD_MAP = "ring", "all_gather", "ulysses"
STRATEGIES = *IN_SHARD_MAP, "jit", "heads"
MEAN_DOCUMENT = 4096  # tokens


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask on a sequence of `length` tokens: none ("full"), causal, or causal within documents of 4096 tokens on
    average.

    The layout "balanced" is contiguous, of documents in an order by which devices compute equally much, whose greatest
    length is known. With `layers`, it is a training step of a model (`llama_step`) and not attention alone.
    """

    mask: Literal["full", "causal", "documents"]
    length: int
    layout: Literal["contiguous", "zigzag", "balanced"] = "zigzag"
    layers: int = 0

    def ids(self) -> np.ndarray:
        """Return the document of each token, int32 `[1, length]`; lengths are exponential, as if cuts were random."""
        starts = np.random.default_rng(0).random(self.length) < 1 / MEAN_DOCUMENT
        return np.cumsum(starts, dtype=np.int32)[None]

    def ids_at(self, positions: np.ndarray) -> np.ndarray:
        """Return the documents of the tokens at these positions, in the order in which devices have them."""
        ids = self.ids()[:, positions]
        if self.layout != "balanced":
            return ids
        # A packer counts documents in the order in which it packs them.
        return np.cumsum(np.diff(ids, prepend=ids[:, :1]) != 0, axis=1, dtype=np.int32)

    @property
    def device_layout(self) -> Literal["contiguous", "zigzag"]:
        """The layout as `context_parallel_attention` has it."""
        return "contiguous" if self.layout == "balanced" else self.layout

    def order(self, shards: int) -> np.ndarray:
        """Return the positions of the tokens in the order in which devices have them."""
        if self.layout == "zigzag":
            return fa.zigzag(self.length, shards).permutation
        if self.layout == "balanced":
            return packing.balanced_order(np.unique_counts(self.ids()).counts, shards)
        return np.arange(self.length, dtype=np.int32)


CASES = {  # in the order in which they are measured
    "causal_128k": Case("causal", 131_072),
    "causal_512k": Case("causal", 524_288),
    "llama_256k": Case("causal", 262_144, layers=2),
    "causal_32k": Case("causal", 32_768),
    "documents_128k_contiguous": Case("documents", 131_072, "contiguous"),
    "documents_128k": Case("documents", 131_072),
    "documents_128k_balanced": Case("documents", 131_072, "balanced"),
    "full_128k_contiguous": Case("full", 131_072, "contiguous"),
    "full_32k_contiguous": Case("full", 32_768, "contiguous"),
}


class Division(NamedTuple):
    """How a strategy divides a call: the number of devices along the sequence and along heads."""

    strategy: str
    sequence: int = 1
    heads: int = 1

    @property
    def devices(self) -> int:
        return self.sequence * self.heads

    @property
    def name(self) -> str:
        """The name of a row: the strategy and the numbers of GPUs."""
        if self == ONE:
            return self.strategy
        return f"{self.strategy} {self.gpus.replace(' ', '')}"

    @property
    def gpus(self) -> str:
        """The number of devices, or along the sequence and heads where both are divided."""
        if self.sequence > 1 and self.heads > 1:
            return f"{self.sequence} x {self.heads}"
        return str(self.devices)

    def mesh(self) -> Mesh:
        """Return the mesh of the first devices, with both axes, of which one may have length 1."""
        devices = np.array(jax.devices()[: self.devices])
        return Mesh(devices.reshape(self.sequence, self.heads), (SEQUENCE, HEAD_AXIS))

    def shardings(self, specs: Any) -> Any:
        """Return where arrays of these partition specs lie."""
        if self == ONE:
            return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), specs)
        return jax.tree.map(functools.partial(NamedSharding, self.mesh()), specs)


ONE = Division("one")


def divisions(case: Case, strategies: tuple[str, ...], counts: list[int]) -> Iterator[Division]:
    """Yield one device, then each strategy on these numbers of devices, most first, then those on meshes of two axes.

    A model is divided along the sequence alone, in `shard_map`.
    """
    in_shard_map = tuple(x for x in strategies if x in IN_SHARD_MAP)
    counts = sorted(counts, reverse=True)
    yield ONE
    for n, strategy in itertools.product(counts, in_shard_map if case.layers else strategies):
        yield Division(strategy, heads=n) if strategy == "heads" else Division(strategy, n)
    if case.layers:
        return
    for n in counts:
        for sequence in [x for x in range(2, n) if n % x == 0]:
            for strategy in in_shard_map:
                yield Division(strategy, sequence, n // sequence)
