"""The effects of the interpreter's equations on memory, one at a time, on the host.

Operations are called as those of `meetings`.
"""

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_fa2.backends.common.primitives import swizzle
from tests.support import accesses, bulk, eight_bits, inline, meetings, shared
from tests.support.shared import row_of, the_memory


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
    """A load of `tma.HeadRows`: the thread's next arrival at a barrier brings it, with those before."""

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
    """Store change(what is there), as one operation."""
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


def copy_to_smem(thread, mesh_location, source, target, barrier, *, source_info):
    memory = the_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None
    where = *source, *target, barrier, source_info, clock
    memory.execute_async_task(LoadTask(mesh_location, thread, *where))


def copy_to_gmem(thread, mesh_location, source, target, reduction, *, source_info):
    memory = the_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None
    make = gpu_callbacks.AsyncCopySmemToGmemTask if reduction is None else _ReduceTask
    task = make(mesh_location, thread, *source, *target, source_info, clock=clock)
    if reduction is not None:
        task.operation = _ReduceTask.OPERATIONS[reduction]
    memory.execute_async_task(task)


def _end(size: int, unit: int) -> float:
    """Return where a view in whole units ends before the array does; a view of one unit does not."""
    return size // unit * unit if size > unit and size % unit else math.inf


def copy_rows(thread, mesh_location, buffer, *operands, direction, view, panel, source_info):
    """Copy `tma.HeadRows` by inline code. TMA clips at the end of an array, but a view of whole units before."""
    memory, arrays = the_memory(), [x for x in operands if isinstance(x, tuple)]
    _, batch, first, head, column, *which = map(int, operands[len(arrays) :])
    array = arrays[which[0] if which else 0]
    rows, columns = buffer[1].shape
    array, _ = array
    _, length, _, dim = memory.buffer_shape_and_dtype(array).shape
    if view == "whole" and first + rows > _end(length, swizzle.SWIZZLE_ROWS):
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
    if direction == "load":
        task = _LoadRowsTask(*common, *outside, *buffer, source_info, clock=clock)
    else:
        task = gpu_callbacks.AsyncCopySmemToGmemTask(
            *common, *buffer, *outside, source_info, clock=clock
        )
    memory.execute_async_task(task)


def add_to_gmem(thread, place, value, *, source_info):
    """Add from registers, atomically per element."""
    memory = the_memory()
    memory.turns.wait(thread, row_of(place))
    _update(thread, place, lambda old: old + value)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_add(thread, clock, *place, source_info)


def _put_fragments(thread, place, tile, overwrite, *, source_info):
    """Store, or add atomically."""
    memory, numbers = the_memory(), inline.to_fragments(tile)
    _update(thread, place, lambda old: numbers if int(overwrite) else old + numbers)
    if memory.detect_races:
        clock, races = memory.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
        if int(overwrite):
            races.check_write(thread, clock, *place, source_info)
        else:
            told = shared.current.told.get(row_of(place))
            races.check_add(thread, clock, *place, source_info, follows=told)


def _take_fragments(thread, place, exists, *, source_info):
    """Load, or return zeros if the tile does not exist."""
    memory = the_memory()
    found, _, _ = memory.get_buffer_content(*place, thread)
    if not int(exists):
        return [inline.from_fragments(np.zeros_like(found))]
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *place, source_info)
    return [inline.from_fragments(found)]


def _store_rows(thread, target, tile, first_column, rows, *, source_info):
    """Store the rows and columns that exist."""
    memory, (key, access) = the_memory(), target
    (axis,) = (i for i, x in enumerate(access.range[:-1]) if isinstance(x, slice))
    first, rows = access.range[axis].start, min(int(rows), len(tile))
    start = int(first_column)
    end = min(start + tile.shape[1], memory.buffer_shape_and_dtype(key).shape[-1])
    if rows <= 0 or end <= start:
        return
    window = list(access.range)
    window[axis], window[-1] = slice(first, first + rows, 1), slice(start, end, 1)
    access = interpret_utils.Access(tuple(window))
    memory.store_buffer_content(key, access, tile[:rows, : end - start], thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, key, access, source_info)


def _store_row_values(thread, values, vector, limit, *, source_info):
    memory = the_memory()
    key, access = vector
    window, count = list(access.range), max(0, min(len(values), int(limit)))
    if not count:
        return
    (axis,) = (i for i, x in enumerate(window) if isinstance(x, slice))
    window[axis] = slice(window[axis].start, window[axis].start + count, 1)
    access = interpret_utils.Access(tuple(window))
    memory.store_buffer_content(key, access, values[:count], thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, key, access, source_info)


def _gather(thread, source, places, *, source_info):
    """Return for each thread the element at its index of a row; 0 where there is none."""
    found = accesses.read_from_device(thread, source, source_info)
    inside = places < len(found)
    return [np.where(inside, found[np.where(inside, places, 0)], 0).astype(found.dtype)]


def _scatter(thread, target, places, *values, source_info):
    """Store each thread's values side by side at its index of a row; an index beyond it is dropped."""
    key, row = target
    *outer, inside = row.range
    there = (places[:, None] * len(values) + np.arange(len(values))).reshape(-1)
    assert np.all(there >= 0)
    kept = there < inside.stop - inside.start

    def place_each(numbers: np.ndarray) -> np.ndarray:
        numbers[there[kept]] = np.stack(values, -1).reshape(-1)[kept]
        return numbers

    _update(thread, (key, row), place_each)
    if the_memory().detect_races:
        written = [(*outer, inside.start + place) for place in there[kept].tolist()]
        gpu_callbacks.get_races().check_scatter(thread, key, written, source_info)


def _scatter_columns(thread, target, values, indices, *, source_info):
    """Store the value of each column at its index of a row; an index beyond it is dropped."""
    memory, (key, row) = the_memory(), target
    (inside,) = row.range
    for value, index in zip(values, indices, strict=True):
        assert index >= 0
        if index < inside.stop - inside.start:
            access = interpret_utils.Access((slice(int(index), int(index) + 1, 1),))
            memory.store_buffer_content(key, access, value[None], thread)
            if memory.detect_races:
                clock = memory.incr_clock(thread).generic_clock
                gpu_callbacks.get_races().check_write(thread, clock, key, access, source_info)


def _store_columns(thread, target, values, *, source_info):
    """Store the value of each column in a row."""
    memory, (key, row) = the_memory(), target
    _update(thread, target, lambda _: values)
    if memory.detect_races:
        *outer, inside = row.range
        written = [(*outer, inside.start + i) for i in range(len(values))]
        gpu_callbacks.get_races().check_scatter(thread, key, written, source_info)


def _scatter_outer(thread, target, tile, rows, columns, *, source_info):
    """Store each element at the sum of its row's and its column's index in the array as it lies in memory."""
    memory, (key, place) = the_memory(), target
    index = rows[:, None] + columns[None]
    there = (rows[:, None] >= 0) & (columns[None] >= 0)
    content, _, _ = memory.get_buffer_content(key, place, thread)
    assert index[there].max(initial=-1) < content.size

    def place_each(numbers: np.ndarray) -> np.ndarray:
        flat = numbers.reshape(-1)
        flat[index[there]] = tile[there]
        return flat.reshape(numbers.shape)

    _update(thread, target, place_each)
    if memory.detect_races:
        gpu_callbacks.get_races().check_scatter(thread, key, index[there].tolist(), source_info)


def _gather_elements(thread, source, index, *, source_info):
    """Return the elements at these indices of an array as it lies in memory, as the bits of 32."""
    found = accesses.read_from_device(thread, source, source_info)
    values = found.reshape(-1)[np.minimum(index.astype(np.uint32), found.size - 1)]
    if values.dtype.itemsize == 2:
        values = values.astype(np.float32)
    return [values.astype(np.int32) if values.dtype.itemsize == 1 else values.view(np.int32)]


def _largest_exponent(thread, place, first, end, *, source_info):
    """Return the exponent's bits of the largest finite scale of a range of keys."""
    memory = the_memory()
    found, _, clock = memory.get_buffer_content(*place, thread)
    if memory.detect_races:
        generic = memory.clock_of_access(thread, place[0], clock).generic_clock
        gpu_callbacks.get_races().check_read(thread, generic, *place, source_info)
    scales = inline.LOADED["load_scales"](found)
    exponents = scales.view(np.uint32) & 0x7F800000
    key = np.arange(len(scales))
    counts = (key >= first) & (key < end) & (exponents < 0x7F800000)
    return [np.max(exponents[counts], initial=0).astype(np.int32)]


def _order_queries(thread, queries, scale, *, dtype, source_info):
    """Make the bits of queries an operand in their place, and store what its rows were divided by."""
    memory = the_memory()
    found, _, _ = memory.get_buffer_content(*queries, thread)
    with np.errstate(invalid="ignore"):
        results = inline.order_queries(found.view(dtype))
    for place, value in zip((queries, scale), results, strict=True):
        accesses.write(thread, place, value, source_info)


def _zero_byte_rows(thread, place, kept, *, source_info):
    """Store zeros in the rows that are not kept."""
    memory = the_memory()
    found, _, _ = memory.get_buffer_content(*place, thread)
    value = np.where(kept[:, None] != 0, found, np.zeros((), found.dtype))
    accesses.write(thread, place, value, source_info)


# By the names of inline operations.
OPERATIONS = {
    **bulk.OPERATIONS,
    **meetings.OPERATIONS,
    **eight_bits.OPERATIONS,
    "gather": _gather,
    "gather_elements": _gather_elements,
    "largest_exponent": _largest_exponent,
    "order_queries": _order_queries,
    "scatter": _scatter,
    "scatter_columns": _scatter_columns,
    "store_columns": _store_columns,
    "scatter_outer": _scatter_outer,
    "put_fragments": _put_fragments,
    "store_row_values": _store_row_values,
    "store_rows": _store_rows,
    "take_fragments": _take_fragments,
    "zero_byte_rows": _zero_byte_rows,
}


def multiply(thread, accumulator, a, b, *, source_info):
    """Add a product to an accumulator. An operand that is an array comes from registers."""
    memory = the_memory()
    factors = [
        x if isinstance(x, np.ndarray) else memory.get_buffer_content(*x, thread)[0] for x in (a, b)
    ]
    total, _, _ = memory.get_buffer_content(*accumulator, thread)
    product = np.matmul(*(x.astype(total.dtype) for x in factors))
    memory.store_buffer_content(*accumulator, total + product, thread)
    if memory.detect_races:
        clock = memory.start_wgmma(thread, accumulator[0])
        for x in (a, b):
            if not isinstance(x, np.ndarray):
                gpu_callbacks.get_races().check_read(thread, clock, *x, source_info)


def commit_stores(thread):
    memory = the_memory()
    if memory.detect_races:
        memory.commit_stores(thread)
