"""Shared memory, barriers, and pipelines of buffers between a producer and consumers.

Memory is ordered by mbarriers alone, through the functions below, so that JAX's interpreter can run
every kernel and look for races."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar, Scratch
from pallas_fa2.backends.sm90.primitives import tma
from pallas_fa2.control_flow import rematerialize

SHARED_MEMORY_BYTES = 232_448  # of one CTA on sm_90


def accumulator(rows: int, columns: int) -> Scratch:
    """Allocate registers for a warpgroup's products, with `run_scoped`."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def barriers(count: int, arrivals: int = 1) -> Scratch:
    """Allocate an array of mbarriers that complete by so many arrivals of warpgroups or of TMA."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["offsets"])
@dataclasses.dataclass(frozen=True)
class Barriers:
    """Barriers that complete by the same number of arrivals, in one array, addressed by name.

    Each array costs a register for its phases, so a kernel has few of them. A pytree: `array` is a
    `plgpu.Barrier` where memory is allocated and a reference inside the kernel.
    """

    array: Barrier
    offsets: tuple[tuple[str, int], ...]

    @classmethod
    def allocate(cls, arrivals: int = 1, **counts: int) -> "Barriers":
        """Lay out `counts[name]` barriers for each name, in this order."""
        starts = itertools.accumulate(counts.values(), initial=0)
        offsets = tuple(zip(counts, starts, strict=False))
        return cls(barriers(sum(counts.values()), arrivals), offsets)

    def offset(self, name: str) -> int:
        """Return the index in `array` of the first barrier of this name."""
        return dict(self.offsets)[name]

    def at(self, name: str, index: Scalar = 0) -> Barrier:
        """Return a reference to one barrier of this name."""
        return self.array.at[self.offset(name) + index]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Stages of shared memory that one producer fills, by TMA or itself, and consumers read.

    Every stage starts free: consumers release each once before the loop (`consumer_prime`), and the producer
    waits for the last releases after it (`producer_tail`), so that no barrier is left half-way.
    """

    buffers: tuple[Ref, ...]  # [stages, ...] each; filled and released together
    full: Barrier  # completed by TMA, one arrival a buffer, or by `producer_commit`
    empty: Barrier  # completed by the consumers
    full_offset: Scalar = 0  # where this pipeline's barriers begin in `full`
    empty_offset: Scalar = 0

    @property
    def stages(self) -> int:
        """Return the number of stages."""
        return self.buffers[0].shape[0]

    def stage(self, step: Scalar) -> jax.Array:
        """Return the stage of a step."""
        return lax.rem(jnp.asarray(step, I32), I32(self.stages))

    def full_at(self, step: Scalar) -> Barrier:
        """Return the barrier that completes when a step's buffers are filled."""
        return self.full.at[self.full_offset + self.stage(step)]

    def consumer_prime(self) -> None:
        """Release all stages, before the first step."""
        for s in range(self.stages):
            plgpu.barrier_arrive(self.empty.at[self.empty_offset + s])

    def producer_tail(self) -> None:
        """Wait until all stages are released, after the last step."""
        for s in range(self.stages):
            plgpu.barrier_wait(self.empty.at[self.empty_offset + s])

    def producer_acquire(self, step: Scalar) -> tuple[Ref, ...]:
        """Return the buffers of a step, once they may be written."""
        plgpu.barrier_wait(self.empty.at[self.empty_offset + self.stage(step)])
        return self.buffers_at(step)

    def producer_commit(self, step: Scalar) -> None:
        """Let consumers read what a warpgroup (not TMA) has written."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full_at(step))

    def tma_load(self, step: Scalar, *sources: tma.HeadRows | tma.RowPieces | Ref) -> None:
        """Fill the buffers of a step from device memory, once they may be written."""
        self.producer_acquire(step)
        s = self.stage(step)
        for source, buffer in zip(sources, self.buffers, strict=True):
            full = self.full_offset + s
            if isinstance(source, tma.HeadRows | tma.RowPieces):
                source.load(buffer.at[s], self.full, full)
            else:
                plgpu.copy_gmem_to_smem(source, buffer.at[s], self.full.at[full])

    def buffers_at(self, step: Scalar) -> tuple[Ref, ...]:
        """Return the buffers of a step, without waiting."""
        # LLVM would keep descriptors of the one stage in registers, through all loops.
        s = self.stage(step) if self.stages > 1 else rematerialize(I32(0))
        return tuple(buffer.at[s] for buffer in self.buffers)

    def consumer_wait(self, step: Scalar) -> tuple[Ref, ...]:
        """Return the buffers of a step, once they are filled."""
        plgpu.barrier_wait(self.full_at(step))
        return self.buffers_at(step)

    def consumer_release(self, step: Scalar) -> None:
        """Let the producer fill the buffers of a step again."""
        plgpu.barrier_arrive(self.empty.at[self.empty_offset + self.stage(step)])


def arrive_and_wait(barrier: Barrier) -> None:
    """Wait for all warpgroups that share the barrier."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
