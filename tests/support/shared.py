"""What interpreted warpgroups share: memory, the order of accesses to it, and barriers.

The classes take the places of those of JAX's interpreter (`interpreter.install`).
"""

import collections
import dataclasses
import threading
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state as upstream_races
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

REGISTERS = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
GLOBAL = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM)

Key = shared_memory.HostAllocationKey
Clock = vector_clock.NpVectorClock
Thread = shared_memory.Thread


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
    # (row, how many additions come before, how many there were) of each that has its turn
    added: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    # the cluster that has told that the first dQ of a row is stored
    told: dict[int, int] = dataclasses.field(default_factory=dict)
    failure: Exception | None = None  # the first: the others only say that a thread was aborted


current = Run(barrier_timeout=30.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    where: str

    def happens_before(self, later: "Access") -> bool:
        """Is this access ordered with one that was made after it?"""
        if self.cluster != later.cluster:
            return self.cluster == later.follows  # nothing else orders the blocks of a grid
        if self.clock.ordered(later.clock):
            return True
        # An mbarrier alone lets TMA refill what was only read: no data crosses between proxies.
        return (
            self.kind == "read" and later.generic is not None and self.clock.ordered(later.generic)
        )

    def overlaps(self, other: "Access") -> bool:
        if self.key == other.key:
            return upstream_races._ranges_overlap(self.range, other.range)
        return self.alias != other.alias  # one union; members of one group lie side by side

    def __str__(self) -> str:
        space = list(gpu_core.MemorySpace)[self.key.memory_space_id].name
        index = ", ".join(
            f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.range
        )
        buffer = f"{space} {self.key.buffer_id}[{index}]"
        return f"{self.kind} of {buffer} by {name(self.thread)}, {self.where}"


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
            self.history = {k: h for k, h in self.history.items() if k.memory_space_id == GLOBAL}

    def _check(self, kind, thread, clock, key, access, source_info, generic=None, follows=None):
        if key.memory_space_id == REGISTERS:
            return  # a thread's own; see Memory.check_accumulator
        storage, alias = self.union_of.get(key, (key, None))
        now = Access(
            kind=kind,
            key=key,
            range=access.range,
            alias=alias,
            thread=thread,
            clock=clock,
            generic=generic,
            cluster=self.cluster,
            follows=follows,
            where=where_of(source_info),
        )
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


def report(text: str) -> None:
    current.races.append(text)


def name(thread: Thread) -> str:
    warp = f" warp {thread.warp_id}" if isinstance(thread, shared_memory.Warp) else ""
    return f"block {thread.block_id} warpgroup {thread.warpgroup_id}{warp}"


def where_of(source_info: source_info_util.SourceInfo | None) -> str:
    return source_info_util.summarize(source_info) if source_info is not None else "kernel call"


class Letterboxes:
    """What has been copied to each place in another block, and who has waited for it how often."""

    def __init__(self):
        self.changed = threading.Condition()
        self.delivered = collections.defaultdict(list)
        self.taken = collections.Counter()

    def deliver(self, place: Hashable, clock: Any) -> None:
        with self.changed:
            self.delivered[place].append(clock)
            self.changed.notify_all()

    def wait(self, thread: Thread, place: Hashable) -> Any:
        with self.changed:
            number = self.taken[thread, place]
            self.taken[thread, place] += 1

            def there() -> bool:
                return len(self.delivered[place]) > number

            if not self.changed.wait_for(there, current.barrier_timeout):
                raise TimeoutError(f"{name(thread)} waited for mail that never came")
            return self.delivered[place][number]


class Turns:
    """Which additions to device memory must wait, and until how many have been told of.

    The four warps of a warpgroup that loads are one thread here, which cannot wait for a turn and pass
    others on at the same time. So what it waits for is put down, and whoever adds waits instead.
    """

    def __init__(self):
        self.changed = threading.Condition()
        self.promises = collections.defaultdict(list)
        self.kept = collections.Counter()
        self.stored = collections.defaultdict(list)  # by row, the clocks of who has stored there

    def promise(self, thread: Thread, row: int, ordinal: int, told: Any) -> None:
        """The block's next addition to a row comes after so many; `told()` says how many there were."""
        with self.changed:
            self.promises[thread.block_id, row].append((ordinal, told))

    def wait(self, thread: Thread, row: int) -> None:
        with self.changed:
            mine = self.promises.get((thread.block_id, row))
            if mine is None:
                return
            ordinal, told = mine[self.kept[thread, row]]
            self.kept[thread, row] += 1
            if not self.changed.wait_for(lambda: told() >= ordinal, current.barrier_timeout):
                raise TimeoutError(f"{name(thread)}: row {row} is at turn {told()}, not {ordinal}")
            current.added.append((row, ordinal, told()))

    def wait_for(self, there: Any) -> None:
        with self.changed:
            if not self.changed.wait_for(there, current.barrier_timeout):
                raise TimeoutError(
                    "waited for a turn that does not come, or a tile that nobody claims"
                )

    def tell(self, add: Any) -> None:
        with self.changed:
            add()
            self.changed.notify_all()


class Memory(shared_memory.GPUSharedMemory):
    """Knows, for each thread, its wgmmas in flight and its TMA stores by commit group."""

    def reset_per_cluster_state(self) -> None:
        super().reset_per_cluster_state()
        # (clock, accumulator) of every wgmma not waited for, oldest first
        self.wgmmas = collections.defaultdict(collections.deque)
        # (read clock, write clock) of every store not yet in a group
        self.uncommitted_stores = collections.defaultdict(list)
        self.mail = Letterboxes()
        self.turns = Turns()
        gpu_callbacks.get_races().next_cluster()

    def set_failed(self, exception: Exception, *args: Any, **kwargs: Any) -> None:
        current.failure = current.failure or exception
        super().set_failed(exception, *args, **kwargs)

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

    def check_accumulator(self, thread: Thread, accumulator: Key, use: str, where: str) -> None:
        if any(accumulator == other for _, other in self.wgmmas[thread]):
            report(f"accumulator {use} by {name(thread)} while a wgmma writes it, {where}")

    def deallocate_buffer(self, key: Key, logging_info=None) -> None:
        if key.memory_space_id == REGISTERS and logging_info is not None:
            where = where_of(logging_info.source_info)
            self.check_accumulator(logging_info.thread, key, "freed", where)
        super().deallocate_buffer(key, logging_info)

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
