"""What the interpreter's equations do to memory, one at a time, on the host."""

import dataclasses
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_fa2.kernels import backward_first, tma
from tests.support import inline, shared


def the_memory() -> shared.Memory:
    memory = gpu_callbacks._get_shared_memory()
    assert isinstance(memory, shared.Memory), "install() was called while a kernel was running"
    return memory


def _locate(ref: tuple[np.ndarray, Any]) -> tuple[shared.Key, interpret_utils.Access]:
    key_as_array, transforms = ref
    key = shared.Key.from_array(key_as_array)
    indexing = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, the_memory().access(key, indexing)


def _inline(operation: Callable) -> Callable:
    """operation(thread, operands) -> results, as a callback that hands its token on. References come with
    their transforms (`_locate`)."""

    @gpu_callbacks.fail_on_exception
    def call(token: Any, thread: Any, *operands: Any, **static: Any) -> tuple:
        return token, *(operation(thread, *operands, **static) or ())

    return call


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
    """One of `tma.Rows`: the thread's next arrival at a barrier brings it."""

    def __init__(self, *where: Any, clock: Any):
        gpu_callbacks.AsyncCopyTask.__init__(self, *where)
        self.clock = clock

    def post_write(self, tma_thread_id: int, memory: shared.Memory) -> None:
        if memory.detect_races:
            shared.current.landing[self.thread] = self.clock.copy()


class _ReduceTask(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that combines with what is there, atomically per element."""

    OPERATIONS = types.MappingProxyType({"add": np.add, "min": np.minimum, "max": np.maximum})
    operation: Callable[[np.ndarray, np.ndarray], np.ndarray]
    atomic = threading.Lock()

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
            with self.atomic:
                old, _, _ = memory.get_buffer_content(*target, self.thread)
                memory.store_buffer_content(*target, self.operation(old, value), self.thread)
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
        src_key, src_access = _locate((src_allocation_key_as_array, src_transforms))
        dst_key, dst_access = _locate((dst_allocation_key_as_array, dst_transforms))
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


@_inline
def copy_rows(thread, mesh_location, buffer, *operands, way, view, panel, source_info):
    """`tma.Rows` by inline code. TMA clips at the end of an array, but a view of whole units before."""
    memory, arrays = the_memory(), [x for x in operands if isinstance(x, tuple)]
    _, batch, first, head, column, *which = map(int, operands[len(arrays) :])
    array = arrays[which[0] if which else 0]
    inside = _locate(buffer)
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


@_inline
def add_to_gmem(thread, target, value, *, source_info):
    """Adds from registers, atomically per element."""
    memory, place = the_memory(), _locate(target)
    memory.turns.wait(thread, _row(place))
    with _ReduceTask.atomic:
        old, _, _ = memory.get_buffer_content(*place, thread)
        memory.store_buffer_content(*place, old + value, thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_add(thread, clock, *place, source_info)


@_inline
def _put_fragments(thread, target, tile, anew, *, source_info):
    """Stores, or adds atomically."""
    memory, place = the_memory(), _locate(target)
    numbers = np.asarray(inline.to_fragments(tile))
    with _ReduceTask.atomic:
        if not int(anew):
            numbers = numbers + memory.get_buffer_content(*place, thread)[0]
        memory.store_buffer_content(*place, numbers, thread)
    if memory.detect_races:
        clock, races = memory.incr_clock(thread).generic_clock, gpu_callbacks.get_races()
        if int(anew):
            races.check_write(thread, clock, *place, source_info)
        else:
            told = shared.current.told.get(_row(place))
            races.check_add(thread, clock, *place, source_info, follows=told)


@_inline
def _take_fragments(thread, source, there, *, source_info):
    """Zeros if nothing is `there`."""
    memory, place = the_memory(), _locate(source)
    found, _, _ = memory.get_buffer_content(*place, thread)
    if not int(there):
        return [np.asarray(inline.from_fragments(np.zeros_like(found)))]
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *place, source_info)
    return [np.asarray(inline.from_fragments(found))]


@_inline
def _store_rows(thread, target, tile, first_column, rows, *, source_info):
    """Those rows and columns that there are."""
    memory, (key, access) = the_memory(), _locate(target)
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


@_inline
def _gather(thread, source, places, *, source_info):
    """For each thread the number at its place of a row; 0 where there is no such place."""
    memory = the_memory()
    key, row = _locate(source)
    found, _, _ = memory.get_buffer_content(key, row, thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_read(thread, clock, key, row, source_info)
    inside = np.asarray(places) < len(found)
    return [np.where(inside, found[np.where(inside, places, 0)], 0).astype(found.dtype)]


@_inline
def _scatter(thread, target, places, *values, source_info):
    """Each thread's values side by side, to its place of a row; what has no place there is dropped."""
    memory = the_memory()
    key, row = _locate(target)
    *outer, inside = row.range
    each = np.arange(len(values))
    there = (np.asarray(places)[:, None] * len(values) + each).reshape(-1)
    for place, value in zip(there.tolist(), np.stack(values, -1).reshape(-1), strict=True):
        if place < inside.stop - inside.start:
            access = interpret_utils.Access((*outer, inside.start + place))
            memory.store_buffer_content(key, access, value, thread)
            if memory.detect_races:
                gpu_callbacks.get_races().check_scatter(thread, key, access, source_info)


def _counter(place, thread):
    """What an integer in memory is, whenever it is asked."""
    return lambda: np.int32(the_memory().get_buffer_content(*place, thread)[0])


@_inline
def _await_turn(thread, target, ordinal, **_):
    place = _locate(target)
    told = _counter(place, thread)
    the_memory().turns.promise(thread, _row(place), int(ordinal), told)


@_inline
def _take_turn(thread, target, ordinal, **_):
    """By who adds: nothing else depends on the thread then."""
    place = _locate(target)
    told = _counter(place, thread)
    the_memory().turns.wait_for(lambda: told() >= ordinal)
    shared.current.added.append((_row(place), int(ordinal), told()))


@_inline
def _end_turn(thread, target, *, warps=1, **_):
    memory, place = the_memory(), _locate(target)

    def add() -> None:
        old, _, _ = memory.get_buffer_content(*place, thread)
        memory.store_buffer_content(*place, old + warps, thread)

    memory.turns.tell(add)


@_inline
def _draw(thread, row, **_):
    """A ticket: how many there were before, and who of the others has stored."""
    memory, place, found = the_memory(), _locate(row), []

    def draw() -> None:
        old, _, _ = memory.get_buffer_content(*place, thread)
        memory.store_buffer_content(*place, old + 1, thread)
        found.append(np.int32(old))

    memory.turns.tell(draw)
    return found


@_inline
def _show(thread, slot, ticket, *, source_info):
    memory, place = the_memory(), _locate(slot)
    memory.store_buffer_content(*place, np.int32(ticket), thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, *place, source_info)


@_inline
def _use(thread, row, slot, *, source_info):
    memory, row, slot = the_memory(), _locate(row), _locate(slot)
    told, ticket = _counter(row, thread), _counter(slot, thread)()
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *slot, source_info)
    if ticket == 0:
        return [np.int32(1)]
    if ticket < backward_first.ALL_STORED:
        memory.turns.wait_for(lambda: told() >= backward_first.ALL_STORED)
        shared.current.added.append((_row(row), int(ticket), told()))
    with memory.lock:
        for clock in memory.turns.stored[_row(row)]:
            memory.clocks[thread].update(clock)
    return [np.int32(0)]


@_inline
def _tell(thread, row, first, **_):
    memory, place = the_memory(), _locate(row)

    def add() -> None:
        old, _, _ = memory.get_buffer_content(*place, thread)
        stored = np.int32(4 << backward_first.STORED_BIT)
        memory.store_buffer_content(*place, old + stored, thread)
        if memory.detect_races:
            memory.turns.stored[_row(place)].append(memory.incr_clock(thread).copy())
            shared.current.told[_row(place)] = gpu_callbacks.get_races().cluster

    if int(first):
        memory.turns.tell(add)


@_inline
def _claim_tile(thread, last, entries, place, already, count, number, together, **_):
    memory = the_memory()
    last, entries, place = map(_locate, (last, entries, place))

    def read(place: tuple) -> np.ndarray:
        return memory.get_buffer_content(*place, thread)[0]

    def claim() -> None:
        claims = read(last)[0]
        memory.store_buffer_content(*last, read(last) + np.array([1, 0], np.int32), thread)
        key, first = entries
        claimed = min(int(claims + already), int(count)) * int(together)
        at = (_row(entries) + claimed, *first.range[1:])
        entry = read((key, dataclasses.replace(first, range=at))).copy()
        entry[0] |= np.int32(-1 << 31) if number & 1 else 0
        memory.store_buffer_content(*place, entry, thread)

    memory.turns.tell(claim)


@_inline
def _look(thread, place, **_):
    """What is claimed there, or was a round ago."""
    return tuple(the_memory().get_buffer_content(*_locate(place), thread)[0])


@_inline
def _settle(thread, place, number, counts, turn, **_):
    """An entry, or what is claimed there if it is of another round, by its last bit."""
    memory, place = the_memory(), _locate(place)
    found = np.array([number, counts])

    def is_of_the_round() -> bool:
        return (found[0] < 0) == (turn & 1 == 1)

    def look_again() -> bool:
        found[:] = memory.get_buffer_content(*place, thread)[0]
        return is_of_the_round()

    if not is_of_the_round():
        memory.turns.wait_for(look_again)
    return found[0] & np.int32(2**31 - 1), found[1]


def _row(place: tuple) -> int:
    row = place[1].range[0]
    return row.start if isinstance(row, slice) else int(row)


@_inline
def _send_mail(thread, source, target, arrived, block, *, source_info):
    """Copies to the same place in another block of the cluster, which finds mail there."""
    memory = the_memory()
    source, target, (letterbox, at) = map(_locate, (source, target, arrived))
    value, _, _ = memory.get_buffer_content(*source, thread)
    block = thread.block_id // 2 * 2 + int(block)  # of a cluster that may hold several pairs
    target = dataclasses.replace(target[0], block_id=block), target[1]
    memory.store_buffer_content(*target, value, thread)
    clock = None
    if memory.detect_races:
        races, clock = gpu_callbacks.get_races(), memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        races.check_read(thread, clock.async_smem_clock.copy(), *source, source_info)
        races.check_write(thread, clock.async_smem_clock.copy(), *target, source_info)
    letterbox = dataclasses.replace(letterbox, block_id=block)
    memory.mail.deliver((letterbox, str(at.range)), clock)


@_inline
def _wait_for_mail(thread, arrived, _turn, **_):
    memory = the_memory()
    letterbox, at = _locate(arrived)
    clock = memory.mail.wait(thread, (letterbox, str(at.range)))
    if clock is not None:
        with memory.lock:
            memory.clocks[thread].update(clock)


# Of inline code, by its name.
OPERATIONS = {
    "_await_turn": _await_turn,
    "_claim_tile": _claim_tile,
    "_draw": _draw,
    "_end_turn": _end_turn,
    "_gather": _gather,
    "_give_turn": functools.partial(_end_turn, warps=4),
    "_look": _look,
    "_scatter": _scatter,
    "_scatter_pairs": _scatter,
    "_show": _show,
    "_put_fragments": _put_fragments,
    "_send_mail": _send_mail,
    "_settle": _settle,
    "_store_rows": _store_rows,
    "_take_turn": _take_turn,
    "_tell": _tell,
    "_use": _use,
    "take_fragments": _take_fragments,
    "_wait_for_mail": _wait_for_mail,
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
            gpu_callbacks.get_races().check_read(thread, clock, *_locate(where), source_info)
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
