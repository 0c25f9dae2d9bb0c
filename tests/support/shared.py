"""What interpreted warpgroups share: memory, the order of accesses to it, and barriers.

The classes take the places of those of JAX's interpreter (`interpreter.install`).
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from tests.support import turns

REGISTERS = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
GLOBAL = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM)

Clock = vector_clock.NpVectorClock
Thread = shared_memory.Thread


class Key(NamedTuple):
    """Of an allocation: that of JAX's interpreter, but found at once in a table."""

    memory_space_id: int
    device_id: int
    block_id: int
    thread_id: int
    initial_ref_count: int
    buffer_id: int

    @classmethod
    def from_array(cls, array: np.ndarray) -> "Key":
        return cls(*array.tolist())

    @property
    def as_np_array(self) -> np.ndarray:
        return np.array(self, np.int32)

    @classmethod
    def shape_and_dtype(cls) -> jax.ShapeDtypeStruct:
        return _KEY_AS_ARRAY


_KEY_AS_ARRAY = jax.ShapeDtypeStruct((len(Key._fields),), np.int32)


class RaceDetected(Exception):
    """The kernel's accesses to some memory are not ordered. `reports` describes each pair."""

    def __init__(self, reports: Sequence[str]):
        self.reports = tuple(reports)
        shown = "\n".join(self.reports[:5])
        more = f"\n... and {len(self.reports) - 5} more" if len(self.reports) > 5 else ""
        super().__init__(f"{len(self.reports)} unordered pair(s) of accesses:\n{shown}{more}")


@dataclasses.dataclass
class Run:
    """What the callbacks of one `run` leave for it to find."""

    barrier_timeout: float
    races: list[str] = dataclasses.field(default_factory=list)
    # of loads by inline code, until their thread arrives at the barrier that says they are there
    landing: dict[Thread, Clock] = dataclasses.field(default_factory=dict)
    # groups of a thread's copies by cp.async, until it waits for them; the last one grows
    copies: dict[Thread, collections.deque[list]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: collections.deque([[]]))
    )
    # (row, how many additions come before, how many there were) of each that has its turn
    added: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    # the cluster that has told that the first dQ of a row is stored
    told: dict[int, int] = dataclasses.field(default_factory=dict)
    # by word in device memory, the clocks with which clusters have arrived there (`meetings._arrive_last`)
    released: dict[Any, dict[int, Clock]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(dict)
    )
    # by thread, those of the clusters that had arrived before it
    acquired: dict[Thread, dict[int, Clock]] = dataclasses.field(default_factory=dict)
    # the words that count arrivals: all of them have had their last one when a launch ends
    counting: set = dataclasses.field(default_factory=set)
    failure: Exception | None = None  # the first: the others only say that a thread was aborted


current = Run(barrier_timeout=30.0)


@dataclasses.dataclass(slots=True, eq=False)
class Access:
    kind: Literal["read", "write", "add"]
    key: Key
    range: tuple[slice | int, ...]
    alias: int | None  # the group of a RefUnion that `key` belongs to
    thread: Thread
    clock: Clock  # of the proxy that makes the access: generic, or asynchronous
    generic: Clock | None  # a TMA load's view through the generic proxy
    cluster: int
    follows: int | None  # another cluster, whose accesses come before
    acquired: Mapping[int, Clock]  # other clusters, whose accesses before these clocks come before
    source_info: Any

    def happens_before(self, later: "Access") -> bool:
        """Is this access ordered with one that was made after it?"""
        if self.cluster != later.cluster:  # nothing else orders the blocks of a grid
            released = later.acquired.get(self.cluster)
            return self.cluster == later.follows or (
                released is not None and self.clock.lt(released)
            )
        if self.clock.ordered(later.clock):
            return True
        # An mbarrier alone lets TMA refill what was only read: no data crosses between proxies.
        return (
            self.kind == "read" and later.generic is not None and self.clock.ordered(later.generic)
        )

    def overlaps(self, other: "Access") -> bool:
        if self.key == other.key:
            return all(map(meet, self.range, other.range))
        return self.alias != other.alias  # one union; members of one group lie side by side

    def __str__(self) -> str:
        space = list(gpu_core.MemorySpace)[self.key.memory_space_id].name
        index = ", ".join(
            f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.range
        )
        buffer = f"{space} {self.key.buffer_id}[{index}]"
        return f"{self.kind} of {buffer} by {name(self.thread)}, {where_of(self.source_info)}"


def meet(one: slice | int, other: slice | int) -> bool:
    """Return whether two ranges along an axis, in steps of one, have an element in common."""
    first, end = (one.start, one.stop) if isinstance(one, slice) else (one, one + 1)
    start, stop = (other.start, other.stop) if isinstance(other, slice) else (other, other + 1)
    return first <= start < end or start <= first < stop


_CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}


class Races:
    """Takes the place of JAX's race detector; reports to the current `run`."""

    def __init__(self, **_: Any):
        self.lock = threading.Lock()
        self.cluster = 0
        self.union_of: dict[Key, tuple[Key, int]] = {}
        self.history: dict[Key, dict[str, list[Access]]] = {}
        self.scattered: dict[tuple[Key, tuple[slice | int, ...]], str] = {}

    @property
    def races_found(self) -> bool:
        return bool(current.races)

    def tag_ref_union_member(self, key: Key, union: Key, alias: int) -> None:
        with self.lock:
            self.union_of[key] = (union, alias)

    def check_read(self, thread, clock, key, access, source_info=None) -> None:
        self._check("read", thread, clock, key, access, source_info)

    def check_write(self, thread, clock, key, access, source_info=None, generic=None) -> None:
        self._check("write", thread, clock, key, access, source_info, generic)

    def check_add(self, thread, clock, key, access, source_info=None, follows=None) -> None:
        self._check("add", thread, clock, key, access, source_info, follows=follows)

    def check_scatter(self, thread, key, places, source_info=None) -> None:
        """Of elements by one of the threads each, which nothing orders: no other may write them."""
        now = f"{name(thread)}, {where_of(source_info)}"
        with self.lock:
            for place in places:
                before = self.scattered.get((key, place))
                self.scattered[key, place] = now
                if before is not None:
                    report(f"{place} is written twice, by {before} and {now}")

    def next_cluster(self) -> None:
        """The blocks so far are done. Only what they did to global memory still matters."""
        with self.lock:
            self.cluster += 1
            current.acquired = {}
            self.history = {k: h for k, h in self.history.items() if k.memory_space_id == GLOBAL}

    def _check(self, kind, thread, clock, key, access, source_info, generic=None, follows=None):
        if key.memory_space_id == REGISTERS:
            return  # a thread's own; see Memory.check_accumulator
        storage, alias = self.union_of.get(key, (key, None))
        acquired = current.acquired.get(thread, {})
        of_whom = alias, thread, clock, generic, self.cluster, follows, acquired, source_info
        now = Access(kind, key, access.range, *of_whom)
        with self.lock:
            history = self.history.setdefault(storage, {"read": [], "write": [], "add": []})
            rivals = [before for other in _CONFLICTS[kind] for before in history[other]]
            writes = history["write"]
            stale = writes[-1] if kind == "read" and writes else None
            if kind == "write":
                _forget_superseded(history, now)
            history[kind].append(now)
        for before in rivals:
            if before.overlaps(now) and not before.happens_before(now):
                report(f"{now}\n  is not ordered after the\n  {before}")
                return
        if stale is not None and stale.alias != now.alias:
            report(f"{now}\n  reads through another alias than the\n  {stale}")


def _forget_superseded(history: dict[str, list[Access]], write: Access) -> None:
    # What races with an access ordered before this write races with the write as well. Without
    # this the history of a ring's slots grows with every step, and the checks with its square.
    for kind, accesses in history.items():
        history[kind] = [
            before
            for before in accesses
            if (before.key, before.range) != (write.key, write.range)
            or not before.happens_before(write)
        ]


def the_memory() -> "Memory":
    memory = gpu_callbacks._get_shared_memory()
    assert isinstance(memory, Memory)
    return memory


def row_of(place: tuple) -> int:
    row = place[1].range[0]
    return row.start if isinstance(row, slice) else int(row)


def report(text: str) -> None:
    current.races.append(text)


def name(thread: Thread) -> str:
    warp = f" warp {thread.warp_id}" if isinstance(thread, shared_memory.Warp) else ""
    return f"block {thread.block_id} warpgroup {thread.warpgroup_id}{warp}"


def where_of(source_info: source_info_util.SourceInfo | None) -> str:
    return source_info_util.summarize(source_info) if source_info is not None else "kernel call"


def _inside(window: Sequence[slice | int], shape: Sequence[int]) -> bool:
    ends = [part.stop if isinstance(part, slice) else part + 1 for part in window]
    return all(map(int.__le__, ends, shape))


class Memory(shared_memory.GPUSharedMemory):
    """Knows, for each thread, its wgmmas in flight and its TMA stores by commit group."""

    # Makes a CTA's `bulk.Accesses` where only meetings order its warps.
    make_bulk: Callable[[], Any] | None = None
    bulk: Any = None

    # JAX's own ways of access are for what may lie outside of an array in part, as hardly anything does.

    def _buffer(self, key: Key):
        """A buffer that is there: another CTA of a cluster has none before it begins, and none after it has ended."""
        if key not in self.mem:
            raise RaceDetected([f"{key} is used before its CTA begins, or after it has ended"])
        return self.mem[key]

    def get_buffer_content(self, key, access, thread, increment_clock=True, logging_info=None):
        content = self._buffer(key).content
        if not _inside(access.range, content.shape):
            return super().get_buffer_content(key, access, thread, increment_clock, logging_info)
        with self.lock:
            clock = self._count(thread) if increment_clock else None
            found = content[access.range].copy()
        if access.permutation is not None:
            found = found.transpose(access.permutation)
        return found, (content.shape, content.dtype), clock

    def store_buffer_content(
        self, key, access, value, thread, increment_clock=True, logging_info=None
    ):
        content = self._buffer(key).content
        if not _inside(access.range, content.shape):
            return super().store_buffer_content(
                key, access, value, thread, increment_clock, logging_info
            )
        if access.permutation is not None:
            value = value.transpose(access.inverse_permutation)
        assert (value.shape, value.dtype) == (content[access.range].shape, content.dtype)
        with self.lock:
            clock = self._count(thread) if increment_clock else None
            content[access.range] = value
        return True, (content.shape, content.dtype), clock

    def _count(self, thread: Thread | None) -> Any:
        """With the lock held: the thread's clock after one more operation."""
        if not self.detect_races or thread is None:
            return None
        return self.incr_clock(thread, take_lock=False)

    def clock_of_access(self, thread: Thread, key: Key, clock: Any) -> Any:
        """The clock by which an access is judged: the thread's own, but in shared memory where meetings order warps."""
        if not self.bulk or key.memory_space_id in (REGISTERS, GLOBAL):
            return clock
        return self.bulk.clock(thread)

    def reset_per_cluster_state(self) -> None:
        super().reset_per_cluster_state()
        # (clock, accumulator) of every wgmma not waited for, oldest first
        self.wgmmas = collections.defaultdict(collections.deque)
        # (read clock, write clock) of every store not yet in a group
        self.uncommitted_stores = collections.defaultdict(list)
        self.mail = turns.Letterboxes(current.barrier_timeout)
        self.turns = turns.Turns(current.barrier_timeout, current.added)
        self.bulk = self.make_bulk() if self.make_bulk else None
        gpu_callbacks.get_races().next_cluster()

    def set_failed(self, exception: Exception, *args: Any, **kwargs: Any) -> None:
        current.failure = current.failure or exception
        super().set_failed(exception, *args, **kwargs)
        self.mail.abort()
        self.turns.abort()
        if self.bulk:
            self.bulk.abort()

    def start_wgmma(self, thread: Thread, accumulator: Key) -> Clock:
        """Returns the clock with which the tensor core reads shared memory."""
        clock = self.incr_clock(thread)
        clock.inc(self.get_next_tma_thread_id())
        self.wgmmas[thread].append((clock, accumulator))
        return clock.async_smem_clock.copy()

    def wait_wgmma(self, thread: Thread, in_flight: int) -> None:
        with self.lock:
            while len(self.wgmmas[thread]) > in_flight:
                clock, _ = self.wgmmas[thread].popleft()
                self.clocks[thread].update(clock)

    def check_accumulator(self, thread: Thread, accumulator: Key, use: str, where: Any) -> None:
        if any(accumulator == other for _, other in self.wgmmas[thread]):
            where = where_of(where)
            report(f"accumulator {use} by {name(thread)} while a wgmma writes it, {where}")

    def deallocate_buffer(self, key: Key, logging_info=None) -> None:
        if key.memory_space_id == REGISTERS and logging_info is not None:
            where = logging_info.source_info
            self.check_accumulator(logging_info.thread, key, "freed", where)
        super().deallocate_buffer(key, logging_info)
        self.deallocated_bytes = 0  # many would make it look for cycles, of which there are none

    def add_copy_smem_to_gmem_clocks(self, thread, read_clock, write_clock) -> None:
        self.uncommitted_stores[thread].append((read_clock, write_clock))

    def commit_stores(self, thread: Thread) -> None:
        """Close a group, which may be empty: a wait counts groups."""
        reads, writes = (self.VectorClock(self.vector_clock_size) for _ in range(2))
        for read, write in self.uncommitted_stores.pop(thread, ()):
            reads.update(read)
            writes.update(write)
        super().add_copy_smem_to_gmem_clocks(thread, reads, writes)

    def kernel_thread_finished(self, thread: Thread) -> None:
        if self.uncommitted_stores[thread]:
            raise ValueError(f"{name(thread)} finished with a store in no commit group")
        if thread in current.landing:
            raise ValueError(f"{name(thread)} finished with a load that no barrier waits for")
        super().kernel_thread_finished(thread)


class _LimitedCondition(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(timeout or current.barrier_timeout):
            raise TimeoutError
        return True


class Barrier(shared_memory.Barrier):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cv = _LimitedCondition()

    def arrive(self, thread, clock, logging_info=None) -> None:
        landed = current.landing.pop(thread, None)
        if landed is not None:
            clock = clock.copy()
            clock.update(landed)
        super().arrive(thread, clock, logging_info)

    def wait(self, thread, logging_info=None) -> None:
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            where = where_of(logging_info.source_info) if logging_info is not None else "?"
            raise TimeoutError(
                f"{name(thread)} waited {current.barrier_timeout:g} s for a barrier that has "
                f"{self.arrivals_count} of {self.num_arrivals} arrivals, {where}"
            ) from None
