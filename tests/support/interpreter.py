"""Run Mosaic GPU kernels on a CPU, with the parts of JAX's interpret mode that attention needs.

JAX's interpreter executes the warpgroups of a block as host threads and orders their memory
accesses by vector clocks. This module adds, without touching JAX's files:

* `pl.run_state` over accumulators, `acc[...] = value`, wgmma with its left operand in registers;
* `copy_smem_to_gmem` with a predicate, a reduction, or a commit of its own;
* wgmma as the asynchronous operation it is: until a wait retires it, its SMEM operands are being
  read and its accumulator is being written;
* one rule of ordering for every access (`_Access.happens_before`), which lets an mbarrier alone
  release a slot that was read into registers, and lets no block of the grid order another;
* a limit on every barrier wait, so that a deadlock is an exception.

    out = interpreter.run(kernel, q, k, v)      # RaceDetected, TimeoutError, or the values
"""

import collections
import dataclasses
import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, core, dispatch, source_info_util, xla_bridge
from jax._src.pallas.mosaic.interpret import race_detection_state as upstream_races
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic.interpret import vector_clock
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state
from jax.experimental.pallas import mosaic_gpu as plgpu

# A warpgroup that waits holds a thread of XLA's CPU pool. When all are held, the warpgroups that
# could go on never do, which looks like a deadlock: a pool of two starves three consumers and a
# producer (three threads suffice them, and the four warps of a `warp_map`). The pool has a thread
# for each core, or NPROC, or one for each CPU device if those are more. It is made when JAX first
# touches the CPU, so import this module before that.
_POOL_THREADS_WANTED = 32
_POOL_THREADS_NEEDED = 8
if not xla_bridge.backends_are_initialized():
    os.environ.setdefault("NPROC", str(_POOL_THREADS_WANTED))
_POOL_THREADS = int(os.environ.get("NPROC") or os.cpu_count() or 1)

# Every asynchronous operation gets the next of these positions in the vector clocks, round robin.
# Two operations that share a position can hide a race between them, so there are many, and a
# prime number lest a loop's operations come round in step.
_ASYNC_POSITIONS = 61

_REGISTERS = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
_GLOBAL = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM)

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
class _Run:
    """What the callbacks of one `run` leave for it to find."""

    barrier_timeout: float
    races: list[str] = dataclasses.field(default_factory=list)
    failure: Exception | None = None  # the first: the others only say that a thread was aborted


_run = _Run(barrier_timeout=30.0)


def run(
    fn: Callable[..., Any],
    *args: Any,
    detect_races: bool = True,
    barrier_timeout: float = 30.0,
) -> Any:
    """`jax.jit(fn)(*args)` with every Mosaic GPU kernel interpreted.

    Raises:
        RaceDetected: two accesses conflict and nothing orders them.
        TimeoutError: a thread waited `barrier_timeout` seconds for a barrier to complete.
        Exception: whatever else stopped a kernel, as it was raised there.
    """
    global _run
    install()
    _require_pool_threads()
    _run = _Run(barrier_timeout)
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races, num_tma_threads_per_device=_ASYNC_POSITIONS
    )
    try:
        with plgpu.force_gpu_interpret_mode(params):
            result = jax.block_until_ready(jax.jit(fn)(*args))
            jax.effects_barrier()
    except Exception as error:
        if _run.races:
            raise RaceDetected(_run.races) from (_run.failure or error)
        if _run.failure is None:
            raise
        raise _run.failure from None  # all that XLA keeps of it is its text
    finally:
        _reset()
    if _run.races:
        raise RaceDetected(_run.races)
    return result


def install() -> None:
    """Put this module's classes in the place of the interpreter's. Calling it again is harmless."""
    jaxpr_interpret.JaxprInterpreter = _Interpreter
    shared_memory.GPUSharedMemory = _Memory
    shared_memory.Barrier = _Barrier
    gpu_callbacks.GPURaceDetectionState = _Races
    gpu_callbacks.AsyncCopyGmemToSmemTask = _LoadTask
    gpu_callbacks.wgmma = _wgmma
    gpu_callbacks.copy_smem_to_gmem = _copy_smem_to_gmem


def _reset() -> None:
    """Forget the last kernel, whether it ended, failed or was interrupted."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    # A kernel that was launched before its arguments were there leaves its failure in a token,
    # which the next one would take as an input and the exit handler would wait for.
    dispatch.runtime_tokens.clear()


def _require_pool_threads() -> None:
    threads = max(_POOL_THREADS, jax.local_device_count("cpu"))
    if threads < _POOL_THREADS_NEEDED:
        raise RuntimeError(
            f"XLA's CPU pool has {threads} threads, the interpreter needs {_POOL_THREADS_NEEDED}: "
            "import tests.support.interpreter before JAX is first used, or set "
            f"NPROC={_POOL_THREADS_WANTED} in the environment"
        )


# ------------------------------------------------------------------------------------- races


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Access:
    kind: Literal["read", "write", "add"]
    key: Key
    range: tuple[slice | int, ...]
    alias: int | None  # the group of a RefUnion that `key` belongs to
    thread: Thread
    clock: Clock  # of the proxy that makes the access: generic, or asynchronous
    generic: Clock | None  # a TMA load's view through the generic proxy
    cluster: int
    where: str

    def happens_before(self, later: "_Access") -> bool:
        """Is this access ordered with one that was made after it?"""
        if self.cluster != later.cluster:
            return False  # nothing orders the blocks of a grid
        if self.clock.ordered(later.clock):
            return True
        # An mbarrier alone lets TMA refill what was only read: no data crosses between proxies.
        return (
            self.kind == "read" and later.generic is not None and self.clock.ordered(later.generic)
        )

    def overlaps(self, other: "_Access") -> bool:
        if self.key == other.key:
            return upstream_races._ranges_overlap(self.range, other.range)
        return self.alias != other.alias  # one union; members of one group lie side by side

    def __str__(self) -> str:
        space = list(gpu_core.MemorySpace)[self.key.memory_space_id].name
        index = ", ".join(
            f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.range
        )
        buffer = f"{space} {self.key.buffer_id}[{index}]"
        return f"{self.kind} of {buffer} by {_name(self.thread)}, {self.where}"


_CONFLICTS = {"read": ("write", "add"), "write": ("read", "write", "add"), "add": ("read", "write")}


class _Races:
    """Takes the place of JAX's race detector; reports to the current `run`."""

    def __init__(self, **_: Any):
        self.lock = threading.Lock()
        self.cluster = 0
        self.union_of: dict[Key, tuple[Key, int]] = {}
        self.history: dict[Key, dict[str, list[_Access]]] = {}

    @property
    def races_found(self) -> bool:
        return bool(_run.races)

    def tag_ref_union_member(self, key: Key, union: Key, alias: int) -> None:
        with self.lock:
            self.union_of[key] = (union, alias)

    def check_read(self, thread, clock, key, access, source_info=None) -> None:
        self._check("read", thread, clock, key, access, source_info)

    def check_write(self, thread, clock, key, access, source_info=None, generic=None) -> None:
        self._check("write", thread, clock, key, access, source_info, generic)

    def check_add(self, thread, clock, key, access, source_info=None) -> None:
        self._check("add", thread, clock, key, access, source_info)

    def next_cluster(self) -> None:
        """The blocks so far are done. Only what they did to global memory still matters."""
        with self.lock:
            self.cluster += 1
            self.history = {k: h for k, h in self.history.items() if k.memory_space_id == _GLOBAL}

    def _check(self, kind, thread, clock, key, access, source_info, generic=None) -> None:
        if key.memory_space_id == _REGISTERS:
            return  # a thread's own; see _Memory.check_accumulator
        storage, alias = self.union_of.get(key, (key, None))
        now = _Access(
            kind=kind,
            key=key,
            range=access.range,
            alias=alias,
            thread=thread,
            clock=clock,
            generic=generic,
            cluster=self.cluster,
            where=_where(source_info),
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
                _report(f"{now}\n  is not ordered after the\n  {before}")
                return
        if stale is not None and stale.alias != now.alias:
            _report(f"{now}\n  reads through another alias than the\n  {stale}")


def _forget_superseded(history: dict[str, list[_Access]], write: _Access) -> None:
    # What races with an access ordered before this write races with the write as well. Without
    # this the history of a ring's slots grows with every step, and the checks with its square.
    for kind, accesses in history.items():
        history[kind] = [
            before
            for before in accesses
            if (before.key, before.range) != (write.key, write.range)
            or not before.happens_before(write)
        ]


def _report(text: str) -> None:
    _run.races.append(text)


def _name(thread: Thread) -> str:
    warp = f" warp {thread.warp_id}" if isinstance(thread, shared_memory.Warp) else ""
    return f"block {thread.block_id} warpgroup {thread.warpgroup_id}{warp}"


def _where(source_info: source_info_util.SourceInfo | None) -> str:
    return source_info_util.summarize(source_info) if source_info is not None else "kernel call"


# ------------------------------------------------------------------------- memory and barriers


class _Memory(shared_memory.GPUSharedMemory):
    """Knows, for each thread, its wgmmas in flight and its TMA stores by commit group."""

    def reset_per_cluster_state(self) -> None:
        super().reset_per_cluster_state()
        # (clock, accumulator) of every wgmma not waited for, oldest first
        self.wgmmas = collections.defaultdict(collections.deque)
        # (read clock, write clock) of every store not yet in a group
        self.uncommitted_stores = collections.defaultdict(list)
        gpu_callbacks.get_races().next_cluster()

    def set_failed(self, exception: Exception, *args: Any, **kwargs: Any) -> None:
        _run.failure = _run.failure or exception
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
            _report(f"accumulator {use} by {_name(thread)} while a wgmma writes it, {where}")

    def deallocate_buffer(self, key: Key, logging_info=None) -> None:
        if key.memory_space_id == _REGISTERS and logging_info is not None:
            where = _where(logging_info.source_info)
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
            raise ValueError(f"{_name(thread)} finished with a store in no commit group")
        super().kernel_thread_finished(thread)


class _LimitedCondition(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(timeout or _run.barrier_timeout):
            raise TimeoutError
        return True


class _Barrier(shared_memory.Barrier):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.cv = _LimitedCondition()

    def wait(self, thread, logging_info=None) -> None:
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            where = _where(logging_info.source_info) if logging_info is not None else "?"
            raise TimeoutError(
                f"{_name(thread)} waited {_run.barrier_timeout:g} s for a barrier that has "
                f"{self.arrivals_count} of {self.num_arrivals} arrivals, {where}"
            ) from None


# ---------------------------------------------------------------------------------- callbacks


def _memory() -> _Memory:
    memory = gpu_callbacks._get_shared_memory()
    assert isinstance(memory, _Memory), "install() was called while a kernel was running"
    return memory


def _locate(key_as_array: np.ndarray, transforms: Any) -> tuple[Key, interpret_utils.Access]:
    key = Key.from_array(key_as_array)
    indexing = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, _memory().access(key, indexing)


class _LoadTask(gpu_callbacks.AsyncCopyGmemToSmemTask):
    """A TMA load whose write to shared memory is judged by both proxies' clocks."""

    def post_read(self, tma_thread_id: int, memory: _Memory) -> None:
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


class _ReduceTask(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A TMA store that combines with what is there, atomically per element."""

    OPERATIONS = types.MappingProxyType({"add": np.add, "min": np.minimum, "max": np.maximum})
    operation: Callable[[np.ndarray, np.ndarray], np.ndarray]
    atomic = threading.Lock()

    def __call__(self, tma_thread_id: int) -> None:
        memory = _memory()
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

    def post_read(self, tma_thread_id: int, memory: _Memory) -> None:
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
def _copy_smem_to_gmem(
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
    memory = _memory()
    if predicate is None or bool(predicate):
        src_key, src_access = _locate(src_allocation_key_as_array, src_transforms)
        dst_key, dst_access = _locate(dst_allocation_key_as_array, dst_transforms)
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


@gpu_callbacks.fail_on_exception
def _commit_stores(token, thread):
    memory = _memory()
    if memory.detect_races:
        memory.commit_stores(thread)
    return token


_upstream_wgmma = inspect.unwrap(gpu_callbacks.wgmma)


@gpu_callbacks.fail_on_exception
def _wgmma(*, token, thread, source_info=None, **operands):
    _upstream_wgmma(token=token, thread=thread, source_info=source_info, **operands)
    memory = _memory()
    if memory.detect_races:
        accumulator = Key.from_array(operands["acc_allocation_key_as_array"])
        clock = memory.start_wgmma(thread, accumulator)
        for name in "ab":
            where = (operands[f"{name}_allocation_key_as_array"], operands[f"{name}_transforms"])
            gpu_callbacks.get_races().check_read(thread, clock, *_locate(*where), source_info)
    return token


@gpu_callbacks.fail_on_exception
def _wait_wgmma(token, thread, *, in_flight):
    _memory().wait_wgmma(thread, in_flight)
    return token


@gpu_callbacks.fail_on_exception
def _check_accumulator(token, thread, accumulator, *, use, source_info):
    _memory().check_accumulator(thread, Key.from_array(accumulator), use, _where(source_info))
    return token


# -------------------------------------------------------------------------------- interpreter


class _Interpreter(jaxpr_interpret.JaxprInterpreter):
    """Interprets the equations that JAX's interpreter cannot, and hands it the others."""

    def interpret(self, jaxpr, token, *args):
        env = interpret_utils.JaxprEnv(vars=jaxpr.constvars + jaxpr.invars, values=args)
        for eqn in jaxpr.eqns:
            values = env.read_many(eqn.invars)
            rule = _RULES.get(eqn.primitive, _Interpreter._upstream)
            token, outs = rule(self, eqn, token, values)
            env.write_many(eqn.outvars, outs)
        return token, env.read_many(jaxpr.outvars)

    def _upstream(self, eqn, token, values):
        inputs = {
            var: value
            for var, value in zip(eqn.invars, values, strict=True)
            if not isinstance(var, core.Literal)
        }
        alone = types.SimpleNamespace(
            constvars=[], invars=list(inputs), outvars=eqn.outvars, eqns=[eqn]
        )
        return super().interpret(alone, token, *inputs.values())

    def _call(self, function, token, *args, **static):
        function = functools.partial(function, **static)
        return callback.io_callback(
            function, gpu_callbacks.TOKEN_SHAPE_DTYPE, token, self.thread, *args
        )

    def _run_state(self, eqn, token, values):
        """Accumulators become registers; references from outside pass through."""
        body = eqn.params["jaxpr"]
        owned = [not isinstance(var.aval, state.AbstractRef) for var in eqn.invars]
        refs = []
        for value, own in zip(values, owned, strict=True):
            if own:
                token, value = self._allocate_registers(token, value, eqn.source_info)
            refs.append(value)
        token, _ = self.interpret(body, token, *refs)
        token = self._call(_wait_wgmma, token, in_flight=0)  # the compiled run_state waits too
        outs = []
        for ref, own, var in zip(refs, owned, body.invars, strict=True):
            out = ref
            if own:
                token, out = self._read_registers(token, ref, var.aval.inner_aval)
                token = self._free_registers(token, ref, eqn.source_info)
            outs.append(out)
        return token, outs

    def _wgmma(self, eqn, token, values):
        accumulator, a, *rest = values
        in_registers = not isinstance(eqn.invars[1].aval, state.AbstractRef)
        if in_registers:
            token, a = self._allocate_registers(token, a, eqn.source_info)
        token, outs = self._interpret_wgmma_ref_p(eqn, token, lambda: [accumulator, a, *rest])
        if in_registers:
            token = self._free_registers(token, a, eqn.source_info)
        return token, outs

    def _wgmma_wait(self, eqn, token, values):
        return self._call(_wait_wgmma, token, in_flight=eqn.params["n"]), []

    def _accumulator_load(self, eqn, token, values):
        if eqn.params["wait_n"] is not None:
            token = self._call(_wait_wgmma, token, in_flight=eqn.params["wait_n"])
        token = self._check_use(eqn, token, values[0], "read")
        token, out = self._interpret_wgmma_accumulator_deref_p(eqn, token, lambda: values)
        return token, [out]

    def _accumulator_store(self, eqn, token, values):
        accumulator, value = values
        token = self._check_use(eqn, token, accumulator, "overwritten")
        token, _ = gpu_callbacks.call_swap(
            token=token,
            result_shape_and_dtype=eqn.invars[1].aval,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=accumulator,
            transforms=(),
            val=value,
            mask=None,
            source_info=eqn.source_info,
        )
        return token, [value]

    def _commit_group(self, eqn, token, values):
        return self._call(_commit_stores, token), []

    def _inline(self, eqn, token, values):
        """What the library's inline code means, by its name and the parameters after it."""
        name, *parameters = eqn.params["mgpu_fn"].__name__.split()
        out = INLINE[name](*values, *parameters)
        return token, [] if out is None else [out]

    def _check_use(self, eqn, token, accumulator, use):
        return self._call(
            _check_accumulator, token, accumulator, use=use, source_info=eqn.source_info
        )

    def _allocate_registers(self, token, value, source_info):
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token, compute_unit=self.thread, memory_space_id=_REGISTERS
        )
        return gpu_callbacks.call_allocate_buffer(
            token, self.mesh_location, self.thread, request, value, source_info
        )

    def _read_registers(self, token, ref, aval):
        return gpu_callbacks.call_get(
            token=token,
            result_shape_and_dtype=aval,
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=ref,
            transforms=(),
        )

    def _free_registers(self, token, ref, source_info):
        return gpu_callbacks.call_deallocate_buffer(
            token, self.mesh_location, self.thread, ref, source_info
        )


# A warpgroup is one thread here: its four warps share their answers.
INLINE: dict[str, Callable[..., Any]] = {
    "any_above": lambda tile, limit: jnp.any(tile > float(limit)).astype("int32"),
    "_any_infinite": lambda rows, _: jnp.any(~(rows < jnp.inf)).astype("int32"),
    "_pin": lambda _: None,
    "_turn_sync": lambda _: None,
    "_turn_arrive": lambda _: None,
    "hide_columns": lambda s, last: jnp.where(
        jnp.arange(s.shape[1])[None] <= last[:, None], s, -jnp.inf
    ),
}


_RULES = {
    discharge.run_state_p: _Interpreter._run_state,
    gpu.wgmma_ref_p: _Interpreter._wgmma,
    gpu.wgmma_wait_p: _Interpreter._wgmma_wait,
    gpu.wgmma_accumulator_deref_p: _Interpreter._accumulator_load,
    gpu.wgmma_accumulator_store_p: _Interpreter._accumulator_store,
    gpu.commit_group_p: _Interpreter._commit_group,
    gpu.inline_mgpu_p: _Interpreter._inline,
}
