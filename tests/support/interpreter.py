"""Run Mosaic GPU kernels on a CPU, with the parts of JAX's interpret mode that attention needs.

A function is traced once, and what was traced is run with NumPy (`programs`): nothing is compiled. JAX's interpreter
has what a kernel's operations do to memory, and orders accesses to it by vector clocks; it executes the warpgroups of a
block as host threads. This module adds, without touching JAX's files:

* `pl.run_state` over accumulators, `acc[...] = value`, wgmma with its left operand in registers;
* `copy_smem_to_gmem` with a predicate, a reduction, or a commit of its own;
* wgmma as the asynchronous operation it is: until a wait retires it, its SMEM operands are being
  read and its accumulator is being written;
* `cluster.ClusterCopy`, copies to another block of the cluster;
* one rule of ordering for every access (`shared.Access.happens_before`), which lets an mbarrier alone
  release a slot that was read into registers, and lets no block of the grid order another;
* a limit on every barrier wait, so that a deadlock is an exception.

`custom_partitioning` is not in effect: all entries and heads are of one device.

    out = interpreter.run(kernel, q, k, v)      # RaceDetected, TimeoutError, or the values
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.support import launches, programs, shared, warpgroups

# Every asynchronous operation gets the next of these positions in the vector clocks, round robin.
# Two operations that share a position can hide a race between them, so there are many, and a
# prime number lest a loop's operations come round in step.
_ASYNC_POSITIONS = 61


def run(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`jit(fn, **options)(*args)`."""
    return jit(fn, **options)(*args)


def jit(
    fn: Callable[..., Any], *, detect_races: bool = True, barrier_timeout: float = 30.0
) -> Callable[..., Any]:
    """`jax.jit(fn)` with every Mosaic GPU kernel interpreted and all else run by NumPy. It is traced in its first call,
    so the others are of arrays of the same shapes and dtypes.

    Raises:
        RaceDetected: two accesses conflict and nothing orders them.
        TimeoutError: a thread waited `barrier_timeout` seconds for a barrier to complete.
        Exception: whatever else stopped a kernel, as it was raised there.
    """
    traced: list[_Traced] = []

    def call(*args: Any) -> Any:
        if not traced:
            traced.append(_Traced(fn, *args))
        return traced[0](args, detect_races, barrier_timeout)

    return call


class _Traced:
    def __init__(self, fn: Callable[..., Any], *args: Any):
        jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        self._avals = jaxpr.in_avals
        self._out = jax.tree.structure(out)
        self._program = programs.Programs(launches.HOST_RULES).of(jaxpr)

    def __call__(self, args: tuple, detect_races: bool, barrier_timeout: float) -> Any:
        _install()
        shared.current = shared.Run(barrier_timeout)
        params = plgpu.InterpretGPUParams(
            detect_races=detect_races, num_tma_threads_per_device=_ASYNC_POSITIONS
        )
        leaves = zip(jax.tree.leaves(args), self._avals, strict=True)
        values = [programs.to_numpy(x, aval.dtype) for x, aval in leaves]
        assert [x.shape for x in values] == [aval.shape for aval in self._avals]
        try:
            with np.errstate(all="ignore"):
                found = self._program(launches.Host(params), values)
        except Exception:
            if not shared.current.races:
                raise
        if shared.current.races:
            raise shared.RaceDetected(shared.current.races) from shared.current.failure
        assert not shared.current.counting, "words still count arrivals after the last one"
        assert not any(map(any, shared.current.copies.values())), (
            "a warpgroup left copies under way"
        )
        return jax.tree.unflatten(self._out, found)


class _AtOnce:
    """In the place of the module that has JAX's callbacks."""

    io_callback = staticmethod(warpgroups.call_at_once)


def _install() -> None:
    """Put this package's classes in the place of the interpreter's. Calling it again is harmless."""
    shared_memory.GPUSharedMemory = shared.Memory
    shared_memory.Barrier = shared.Barrier
    shared_memory._to_int = int
    gpu_callbacks.GPURaceDetectionState = shared.Races
    gpu_callbacks.HostAllocationKey = shared.Key
    gpu_callbacks.callback = jaxpr_interpret.callback = _AtOnce
    jaxpr_interpret.jnp = np
    interpret_utils.get_uninitialized_array = warpgroups.uninitialized
