"""Kernels by mma.sync: copies by cp.async, and warps that nothing orders but a meeting of their whole CTA.

Elsewhere the four warps of a warpgroup are one thread here, as mbarriers and WGMMA order them together. In a kernel
that calls `sync_cta` nothing does: what one warp has stored, copied or read in shared memory is ordered with what
another does only by a meeting in between, within a warpgroup as well. So each access gets a position of its own in the
vector clocks, like an asynchronous operation, and joins the clock of its warpgroup at the next meeting; a copy, at the
next meeting after the wait for its group.
"""

import collections
import threading
from typing import Any

import numpy as np
from jax._src import core
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from tests.support import shared
from tests.support.shared import the_memory


class Accesses:
    """The accesses to shared memory of a CTA's warpgroups since its last meeting, and their copies."""

    def __init__(self, warpgroups: int, timeout: float):
        self._since_meeting = collections.defaultdict(list)  # the clocks of a warpgroup's accesses
        self._copies = collections.defaultdict(list)  # of copies in no group yet
        self._groups = collections.defaultdict(collections.deque)
        self._barrier = threading.Barrier(warpgroups, timeout=timeout)
        self._merged: list[Any] = []

    def abort(self) -> None:
        self._barrier.abort()

    def clock(self, thread: Any) -> Any:
        """Return the clock of an access, which the thread's next meeting orders."""
        clock = _next_clock(thread)
        self._since_meeting[thread].append(clock)
        return clock

    def copy_clock(self, thread: Any) -> Any:
        """Return the clock of a copy, which a meeting after the wait for its group orders."""
        clock = _next_clock(thread)
        self._copies[thread].append(clock)
        return clock

    def commit_group(self, thread: Any) -> None:
        self._groups[thread].append(self._copies.pop(thread, []))

    def wait_groups(self, thread: Any, pending: int) -> None:
        while len(self._groups[thread]) > pending:
            self._since_meeting[thread] += self._groups[thread].popleft()

    def meet(self, thread: Any) -> None:
        memory = the_memory()
        with memory.lock:
            for clock in self._since_meeting.pop(thread, ()):
                memory.clocks[thread].update(clock)
            self._merged.append(memory.clocks[thread].copy())
        try:
            self._barrier.wait()
            with memory.lock:
                for clock in self._merged:
                    memory.clocks[thread].update(clock)
            if self._barrier.wait() == 0:
                self._merged.clear()
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise TimeoutError(
                f"{shared.name(thread)} met nobody at a barrier of its CTA"
            ) from None


def _next_clock(thread: Any) -> Any:
    memory = the_memory()
    clock = memory.incr_clock(thread)
    clock.inc(memory.get_next_tma_thread_id())
    return clock


def _rows(place: Any, count: int, columns: int) -> tuple[Any, int]:
    """Return the place of the rows, of so many that are meant, that the array has, and how many these are."""
    key, access = place
    shape, window = the_memory().buffer_shape_and_dtype(key).shape, list(access.range)
    axis = next(i for i, x in enumerate(window[:-1]) if isinstance(x, slice))
    start = window[axis].start
    count = max(0, min(count, window[axis].stop - start))
    if count and start + count > shape[axis]:
        raise IndexError(f"rows {start} to {start + count} of {shape[axis]}")
    for size, x in zip(shape, window, strict=False):
        if count and not isinstance(x, slice) and not 0 <= x < size:
            raise IndexError(f"rows at index {x} of {size}")
    window[axis] = slice(start, start + count, 1)
    return (key, interpret_utils.Access(tuple(window))), count


def _load_rows(thread, array, buffer, limit=None, *, source_info):
    memory = the_memory()
    rows, columns = buffer[1].shape[-2:]
    place, count = _rows(array, rows if limit is None else int(limit), columns)
    copied = np.zeros((rows, columns), memory.buffer_shape_and_dtype(buffer[0]).dtype)
    if count:
        source = memory.get_buffer_content(*place, thread)[0]
        copied[:count, : source.shape[1]] = source
    _copy(thread, buffer, copied.reshape(buffer[1].shape), source_info)


def _load_vector(thread, vector, buffer, *, source_info):
    _copy(thread, buffer, the_memory().get_buffer_content(*vector, thread)[0], source_info)


def _copy(thread: Any, buffer: Any, value: np.ndarray, source_info: Any) -> None:
    """Copy what all warpgroups copy together: like additions, their copies are not ordered with each other."""
    memory = the_memory()
    memory.store_buffer_content(*buffer, value, thread)
    if memory.detect_races:
        clock = memory.bulk.copy_clock(thread).generic_clock
        gpu_callbacks.get_races().check_add(thread, clock, *buffer, source_info)


def _zero_rows(thread, buffer, kept, *, source_info):
    memory = the_memory()
    value = memory.get_buffer_content(*buffer, thread)[0]
    memory.store_buffer_content(
        *buffer, np.where(kept[:, None] != 0, value, 0).astype(value.dtype), thread
    )
    if memory.detect_races:
        clock = memory.bulk.clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, *buffer, source_info)


def _store_rows(thread, buffer, array, limit, *, source_info):
    memory = the_memory()
    value = memory.get_buffer_content(*buffer, thread)[0]
    if memory.detect_races:
        clock = memory.bulk.clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *buffer, source_info)
    place, count = _rows(array, int(limit), value.shape[1])
    if not count:
        return
    columns = place[1].shape[-1]
    memory.store_buffer_content(*place, value[:count, :columns], thread)
    # All warpgroups store their share of the rows together: the first stands for all.
    if memory.detect_races and thread.warpgroup_id == 0:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, *place, source_info)


# By the names of inline operations.
OPERATIONS = {
    "load_rows": _load_rows,
    "load_vector": _load_vector,
    "store_smem_rows": _store_rows,
    "sync_cta": lambda thread, **_: the_memory().bulk.meet(thread),
    "zero_rows": _zero_rows,
}


def only_meetings_order(jaxpr: Any) -> bool:
    """Return whether a kernel's warps are ordered by meetings of their CTA alone: whether it has operations of
    these."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is gpu.inline_mgpu_p and eqn.params["mgpu_fn"].op.name in OPERATIONS:
            return True
        if any(map(only_meetings_order, core.jaxprs_in_params(eqn.params))):
            return True
    return False
