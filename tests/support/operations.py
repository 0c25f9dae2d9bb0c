"""What the interpreter's equations do to memory, one at a time, on the host."""

import inspect
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_fa2.kernels import tma
from tests.support import inline, meetings, shared
from tests.support.callbacks import inline_code, locate, row_of, the_memory


class LoadTask(gpu_callbacks.AsyncCopyGmemToSmemTask):
    """A TMA load whose write to shared memory is judged by both proxies' clocks."""

    def post_read(self, tma_thread_id: int, memory: shared.Memory) -> None:
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            gpu_callbacks.get_races().check_write(
                self.thread,
                self.clock.async_smem_clock.copy(),
                self.dst_allocation_key,
                self.dst_access,
                self.source_info,
                generic=self.clock.generic_clock.copy(),
            )


class _LoadRowsTask(LoadTask):
    """One of `tma.Rows`: the thread's next arrival at a barrier brings it, with those before."""

    def __init__(self, *where: Any, clock: Any):
        gpu_callbacks.AsyncCopyTask.__init__(self, *where)
        self.clock = clock

    def post_write(self, tma_thread_id: int, memory: shared.Memory) -> None:
        if memory.detect_races:
            landed = self.clock.copy()
            if (before := shared.current.landing.get(self.thread)) is not None:
                landed.update(before)
            shared.current.landing[self.thread] = landed


_ATOMIC = threading.Lock()


def _update(thread: Any, place: tuple, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Stores change(what is there), as one operation."""
    memory = the_memory()
    with _ATOMIC:
        old, _, _ = memory.get_buffer_content(*place, thread)
        memory.store_buffer_content(*place, change(old), thread)


class _ReduceTask(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that combines with what is there, atomically per element."""

    OPERATIONS = types.MappingProxyType({"add": np.add, "min": np.minimum, "max": np.maximum})
    operation: Callable[[np.ndarray, np.ndarray], np.ndarray]

    def __call__(self, tma_thread_id: int) -> None:
        memory = the_memory()
        self.pre_read(tma_thread_id, memory)
        value, _, _ = memory.get_buffer_content(
            self.src_allocation_key, self.src_access, self.thread
        )
        self.post_read(tma_thread_id, memory)
        shape = tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        inside = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if inside is not None:
            access, value = inside
            target = (self.dst_allocation_key, access)
            _update(self.thread, target, lambda old: self.operation(old, value))
        self.post_write(tma_thread_id, memory)

    def post_read(self, tma_thread_id: int, memory: shared.Memory) -> None:
        if memory.detect_races:
            self.clock.inc(tma_thread_id)
            self.write_clock = self.clock.copy()
            gpu_callbacks.get_races().check_add(
                self.thread,
                self.clock.async_smem_clock.copy(),
                self.dst_allocation_key,
                self.dst_access,
                self.source_info,
            )


@gpu_callbacks.fail_on_exception
def copy_smem_to_gmem(
    *,
    token,
    mesh_location,
    thread,
    src_allocation_key_as_array,
    src_transforms,
    dst_allocation_key_as_array,
    dst_transforms,
    predicate,
    source_info,
    commit_group,
    reduction_op,
):
    memory = the_memory()
    if predicate is None or bool(predicate):
        src_key, src_access = locate((src_allocation_key_as_array, src_transforms))
        dst_key, dst_access = locate((dst_allocation_key_as_array, dst_transforms))
        make = gpu_callbacks.AsyncCopySmemToGmemTask if reduction_op is None else _ReduceTask
        task = make(
            mesh_location,
            thread,
            src_key,
            src_access,
            dst_key,
            dst_access,
            source_info,
            clock=memory.incr_clock(thread) if memory.detect_races else None,
        )
        if reduction_op is not None:
            task.operation = _ReduceTask.OPERATIONS[reduction_op]
        memory.execute_async_task(task)
    if commit_group and memory.detect_races:
        memory.commit_stores(thread)
    return token


def _end(size: int, unit: int) -> float:
    """Where what a view in whole units shows is not all that there is; of one unit, it is."""
    return size // unit * unit if size > unit and size % unit else math.inf


@inline_code
def copy_rows(thread, mesh_location, buffer, *operands, way, view, panel, source_info):
    """`tma.Rows` by inline code. TMA clips at the end of an array, but a view of whole units before."""
    memory, arrays = the_memory(), [x for x in operands if isinstance(x, tuple)]
    _, batch, first, head, column, *which = map(int, operands[len(arrays) :])
    array = arrays[which[0] if which else 0]
    inside = locate(buffer)
    rows, columns = inside[1].shape
    array = shared.Key.from_array(array[0])
    _, length, _, dim = memory.buffer_shape_and_dtype(array).shape
    if view == "whole" and first + rows > _end(length, tma.GROUP):
        raise IndexError(f"rows {first} to {first + rows} of {length} are not all in whole groups")
    if view != "panels" and column + columns > _end(dim, panel):
        raise IndexError(f"{column + columns} of {dim} columns are not all in whole panels")
    if column > 0 and columns == panel >= dim:
        raise IndexError(
            f"{column + columns} of {dim} columns, which TMA takes for the first {panel}"
        )
    window = batch, slice(first, first + rows, 1), head, slice(column, column + columns, 1)
    outside = array, interpret_utils.Access(window)
    clock = memory.incr_clock(thread) if memory.detect_races else None
    common = mesh_location, thread
    if way == "load":
        task = _LoadRowsTask(*common, *outside, *inside, source_info, clock=clock)
    else:
        task = gpu_callbacks.AsyncCopySmemToGmemTask(
            *common, *inside, *outside, source_info, clock=clock
        )
    memory.execute_async_task(task)


@inline_code
def add_to_gmem(thread, target, value, *, source_info):
    """Adds from registers, atomically per element."""
    memory, place = the_memory(), locate(target)
    memory.turns.wait(thread, row_of(place))
    _update(thread, place, lambda old: old + value)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_add(thread, clock, *place, source_info)


@inline_code
def _put_fragments(thread, target, tile, anew, *, source_info):
    """Stores, or adds atomically."""
    memory, place = the_memory(), locate(target)
    numbers = np.asarray(inline.to_fragments(tile))
    _update(thread, place, lambda old: numbers if int(anew) else old + numbers)
    if memory.detect_races:
        clock, races = memory.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
        if int(anew):
            races.check_write(thread, clock, *place, source_info)
        else:
            told = shared.current.told.get(row_of(place))
            races.check_add(thread, clock, *place, source_info, follows=told)


@inline_code
def _take_fragments(thread, source, there, *, source_info):
    """Zeros if nothing is `there`."""
    memory, place = the_memory(), locate(source)
    found, _, _ = memory.get_buffer_content(*place, thread)
    if not int(there):
        return [np.asarray(inline.from_fragments(np.zeros_like(found)))]
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *place, source_info)
    return [np.asarray(inline.from_fragments(found))]


@inline_code
def _store_rows(thread, target, tile, first_column, rows, *, source_info):
    """Those rows and columns that there are."""
    memory, (key, access) = the_memory(), locate(target)
    (axis,) = (i for i, x in enumerate(access.range[:-1]) if isinstance(x, slice))
    first, rows = access.range[axis].start, min(int(rows), len(tile))
    start = int(first_column)
    end = min(start + tile.shape[1], memory.buffer_shape_and_dtype(key).shape[-1])
    if rows <= 0 or end <= start:
        return
    window = list(access.range)
    window[axis], window[-1] = slice(first, first + rows, 1), slice(start, end, 1)
    access = interpret_utils.Access(tuple(window))
    memory.store_buffer_content(key, access, np.asarray(tile)[:rows, : end - start], thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, key, access, source_info)


@inline_code
def _gather(thread, source, places, *, source_info):
    """For each thread the number at its place of a row; 0 where there is no such place."""
    memory = the_memory()
    key, row = locate(source)
    found, _, _ = memory.get_buffer_content(key, row, thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_read(thread, clock, key, row, source_info)
    inside = np.asarray(places) < len(found)
    return [np.where(inside, found[np.where(inside, places, 0)], 0).astype(found.dtype)]


@inline_code
def _scatter(thread, target, places, *values, source_info):
    """Each thread's values side by side, to its place of a row; what has no place there is dropped."""
    key, row = locate(target)
    *outer, inside = row.range
    there = (np.asarray(places)[:, None] * len(values) + np.arange(len(values))).reshape(-1)
    assert np.all(there >= 0)
    kept = there < inside.stop - inside.start

    def place_each(numbers: np.ndarray) -> np.ndarray:
        numbers[there[kept]] = np.stack(values, -1).reshape(-1)[kept]
        return numbers

    _update(thread, (key, row), place_each)
    if the_memory().detect_races:
        written = [(*outer, inside.start + place) for place in there[kept].tolist()]
        gpu_callbacks.get_races().check_scatter(thread, key, written, source_info)


# Of inline code, by its name.
OPERATIONS = {
    **meetings.OPERATIONS,
    "_gather": _gather,
    "_scatter": _scatter,
    "_scatter_pairs": _scatter,
    "_put_fragments": _put_fragments,
    "_store_rows": _store_rows,
    "take_fragments": _take_fragments,
}


@gpu_callbacks.fail_on_exception
def commit_stores(token, thread):
    memory = the_memory()
    if memory.detect_races:
        memory.commit_stores(thread)
    return token


_upstream_wgmma = inspect.unwrap(gpu_callbacks.wgmma)


@gpu_callbacks.fail_on_exception
def execute_wgmma(*, token, thread, source_info=None, **operands):
    with np.errstate(all="ignore"):  # what is poisoned is multiplied as well
        _upstream_wgmma(token=token, thread=thread, source_info=source_info, **operands)
    memory = the_memory()
    if memory.detect_races:
        accumulator = shared.Key.from_array(operands["acc_allocation_key_as_array"])
        clock = memory.start_wgmma(thread, accumulator)
        for name in "ab":
            where = (operands[f"{name}_allocation_key_as_array"], operands[f"{name}_transforms"])
            gpu_callbacks.get_races().check_read(thread, clock, *locate(where), source_info)
    return token


@gpu_callbacks.fail_on_exception
def wait_wgmma(token, thread, *, in_flight):
    the_memory().wait_wgmma(thread, in_flight)
    return token


@gpu_callbacks.fail_on_exception
def check_accumulator(token, thread, accumulator, *, use, source_info):
    the_memory().check_accumulator(
        thread, shared.Key.from_array(accumulator), use, shared.where_of(source_info)
    )
    return token
