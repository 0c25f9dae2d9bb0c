"""What is outside of kernels, and how one is launched: its blocks one after another, a block's warpgroups as
threads."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax._src.lax import lax
from jax._src.pallas import mpmd
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import primitives as references

from tests.support import bulk, programs, shared
from tests.support.views import View
from tests.support.warpgroups import RULES, TOKEN, Warpgroup, uninitialized


@dataclasses.dataclass
class Reference:
    """To an array in device memory."""

    array: np.ndarray


@dataclasses.dataclass
class Host:
    """Runs a function's program and launches the kernels in it."""

    params: Any  # of the interpreter

    def uninitialized(self, aval: Any) -> np.ndarray:
        return uninitialized(aval.shape, aval.dtype, self.params.uninitialized_memory)


class _Kernel:
    def __init__(self, eqn: Any):
        (self._mesh,), (self._jaxpr,) = eqn.params["meshes"], eqn.params["jaxprs"]
        self._outs = [variable.aval for variable in eqn.outvars]
        arrays = len(eqn.invars) + len(eqn.outvars)
        if len(self._jaxpr.all_invars) != arrays or eqn.params["input_output_aliases"]:
            raise NotImplementedError("an argument of a kernel that is no array of its own")
        self._compiler_params = eqn.params["compiler_params"]
        self._programs = programs.Programs(RULES)
        self._only_meetings_order = bulk.only_meetings_order(self._jaxpr)

    def __call__(self, host: Host, *values: Any) -> list:
        arrays = [x.array if isinstance(x, Reference) else x for x in values]
        arrays += map(host.uninitialized, self._outs)
        try:
            found = self._launch(host.params, arrays)
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
        for value, array in zip(values, found, strict=False):
            if isinstance(value, Reference):
                value.array = array
        return found[len(values) :]

    def _launch(self, params: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        cluster, threads = tuple(self._mesh.cluster or ()), self._mesh.num_threads or 1
        gpu_callbacks.call_initialize_shared_memory(
            token=TOKEN,
            num_gpus=1,
            num_threads_per_block=threads,
            num_blocks_per_cluster=math.prod(cluster),
            interpret_params=params,
        )
        memory, device = shared.the_memory(), shared_memory.Device(0)
        if self._only_meetings_order:
            timeout = shared.current.barrier_timeout
            memory.make_bulk = functools.partial(bulk.Accesses, threads, timeout)
            memory.bulk = memory.make_bulk()
        keys = [_allocate(device, threads, array) for array in arrays]
        memory.update_clocks_for_device_barrier(device)
        common = {
            "cluster_dims": cluster,
            "mesh": self._mesh,
            "device_info": jaxpr_interpret.DeviceInfo(),
            "compiler_params": self._compiler_params,
            "interpret_params": dataclasses.replace(params, num_cores_or_threads=threads),
            "programs": self._programs,
        }
        for place in grid_order(self._mesh.grid):
            _run_together(self._jaxpr, keys, cluster, place, common)
            memory.reset_per_cluster_state()
        memory.update_clocks_for_device_barrier(device)
        memory.assert_no_barriers_allocated()
        views = [View(variable.aval) for variable in self._jaxpr.all_invars]
        places = (view(key, ()) for view, key in zip(views, keys, strict=True))
        return [memory.get_buffer_content(*place, None)[0] for place in places]


def grid_order(grid: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    """Return the clusters of a grid in the order in which they run, one after another."""
    return itertools.product(*map(range, grid))


def _allocate(device: Any, threads: int, array: np.ndarray) -> np.ndarray:
    """Global memory, for all threads."""
    _, request = gpu_callbacks.call_make_allocation_request_array(
        token=TOKEN,
        compute_unit=device,
        memory_space_id=shared.GLOBAL,
        initial_ref_count=threads,
    )
    where = None, device, request, array
    return gpu_callbacks.call_allocate_buffer_for_all_threads(TOKEN, *where)[1]


def _run_together(jaxpr: Any, keys: list, cluster: tuple, place: tuple, common: dict) -> None:
    memory = shared.the_memory()

    def run(thread: Any) -> None:
        block = interpret_utils.get_indices(cluster, thread.block_id)
        where = shared_memory.MeshLocation((), place, block, thread.warpgroup_id)
        try:
            with np.errstate(all="ignore"):
                Warpgroup(thread=thread, mesh_location=where, **common).interpret(
                    jaxpr, TOKEN, *keys
                )
            memory.kernel_thread_finished(thread)
        except Exception as error:
            memory.set_failed(error, thread, top_level=False)
            raise

    warpgroups = [
        thread
        for thread in memory.all_concurrent_threads
        if isinstance(thread, shared_memory.Warpgroup)
    ]
    with futures.ThreadPoolExecutor(len(warpgroups)) as pool:
        running = [pool.submit(run, thread) for thread in warpgroups]
    if any(future.exception() for future in running):
        # The first; others may only say that they were aborted.
        assert shared.current.failure is not None
        raise shared.current.failure


def _run_state(eqn: Any) -> Callable:
    """References to what are no references yet; returns what lies there in the end."""
    body, initialized = eqn.params["jaxpr"], eqn.params["is_initialized"]
    program = programs.Programs(HOST_RULES).of(body, closed=False)

    def run(host: Host, *values: Any) -> Sequence:
        given = iter(values)
        refs = [
            Reference(next(given) if known else host.uninitialized(variable.aval))
            for variable, known in zip(body.all_invars, initialized, strict=True)
        ]
        program(host, refs)
        return [ref.array for ref in refs]

    return run


def _get(eqn: Any) -> Callable:
    def run(_: Host, ref: Reference, *indices: Any) -> Sequence:
        transforms = jax.tree.map(int, jax.tree.unflatten(eqn.params["tree"], indices))
        return [ref.array[interpret_utils.to_access(transforms, ref.array.shape).range]]

    return run


HOST_RULES: dict[Any, programs.Rule] = {
    discharge.run_state_p: _run_state,
    lax.empty_p: lambda eqn: lambda host: [host.uninitialized(eqn.outvars[0].aval)],
    mpmd.mpmd_map_p: _Kernel,
    references.get_p: _get,
}
