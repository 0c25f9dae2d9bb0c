"""Run Mosaic GPU kernels on a CPU, with the parts of JAX's interpret mode that attention needs.

JAX's interpreter executes the warpgroups of a block as host threads and orders their memory
accesses by vector clocks. This module adds, without touching JAX's files:

* `pl.run_state` over accumulators, `acc[...] = value`, wgmma with its left operand in registers;
* `copy_smem_to_gmem` with a predicate, a reduction, or a commit of its own;
* wgmma as the asynchronous operation it is: until a wait retires it, its SMEM operands are being
  read and its accumulator is being written;
* `ptx.Mail`, copies to another block of the cluster;
* one rule of ordering for every access (`shared.Access.happens_before`), which lets an mbarrier alone
  release a slot that was read into registers, and lets no block of the grid order another;
* a limit on every barrier wait, so that a deadlock is an exception.

    out = interpreter.run(kernel, q, k, v)      # RaceDetected, TimeoutError, or the values
"""

import dataclasses
import functools
import inspect
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import callback, core, dispatch, xla_bridge
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import dropout, tma
from tests.support import shared

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
    install()
    _require_pool_threads()
    shared.current = shared.Run(barrier_timeout)
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races, num_tma_threads_per_device=_ASYNC_POSITIONS
    )
    try:
        with plgpu.force_gpu_interpret_mode(params):
            result = jax.block_until_ready(jax.jit(fn)(*args))
            jax.effects_barrier()
    except Exception as error:
        if shared.current.races:
            raise shared.RaceDetected(shared.current.races) from (shared.current.failure or error)
        if shared.current.failure is None:
            raise
        raise shared.current.failure from None  # all that XLA keeps of it is its text
    finally:
        _reset()
    if shared.current.races:
        raise shared.RaceDetected(shared.current.races)
    return result


def install() -> None:
    """Put this module's classes in the place of the interpreter's. Calling it again is harmless."""
    jaxpr_interpret.JaxprInterpreter = _Interpreter
    shared_memory.GPUSharedMemory = shared.Memory
    shared_memory.Barrier = shared.Barrier
    gpu_callbacks.GPURaceDetectionState = shared.Races
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


def _memory() -> shared.Memory:
    memory = gpu_callbacks._get_shared_memory()
    assert isinstance(memory, shared.Memory), "install() was called while a kernel was running"
    return memory


def _locate(key_as_array: np.ndarray, transforms: Any) -> tuple[shared.Key, interpret_utils.Access]:
    key = shared.Key.from_array(key_as_array)
    indexing = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, _memory().access(key, indexing)


class _LoadTask(gpu_callbacks.AsyncCopyGmemToSmemTask):
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


class _LoadRowsTask(_LoadTask):
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
def _copy_rows(
    *, token, mesh_location, thread, name, array, buffer, transforms, place, source_info
):
    """`tma.Rows` by inline code. TMA clips at the length, but its view of `whole` groups before."""
    way, view = name.split()
    memory = _memory()
    batch, first, head, column = map(int, place)
    inside = _locate(buffer, transforms)
    rows, columns = inside[1].shape
    array = shared.Key.from_array(array)
    length = memory.buffer_shape_and_dtype(array).shape[1]
    if view == "whole" and first + rows > length // tma.GROUP * tma.GROUP:
        raise IndexError(f"rows {first} to {first + rows} of {length} are not all in whole groups")
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
    return token


@gpu_callbacks.fail_on_exception
def _add_to_gmem(*, token, thread, target, transforms, value, source_info):
    """Adds from registers, atomically per element."""
    memory = _memory()
    place = _locate(target, transforms)
    with _ReduceTask.atomic:
        old, _, _ = memory.get_buffer_content(*place, thread)
        memory.store_buffer_content(*place, old + value, thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_add(thread, clock, *place, source_info)
    return token


@gpu_callbacks.fail_on_exception
def _send_mail(*, token, thread, source, target, arrived, transforms, block, source_info):
    """Copies to the same place in another block of the cluster, which finds mail there."""
    memory = _memory()
    source, target, (letterbox, at) = map(_locate, (source, target, arrived), transforms)
    value, _, _ = memory.get_buffer_content(*source, thread)
    target = dataclasses.replace(target[0], block_id=int(block)), target[1]
    memory.store_buffer_content(*target, value, thread)
    clock = None
    if memory.detect_races:
        races, clock = gpu_callbacks.get_races(), memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        races.check_read(thread, clock.async_smem_clock.copy(), *source, source_info)
        races.check_write(thread, clock.async_smem_clock.copy(), *target, source_info)
    letterbox = dataclasses.replace(letterbox, block_id=int(block))
    memory.mail.deliver((letterbox, str(at.range)), clock)
    return token


@gpu_callbacks.fail_on_exception
def _wait_for_mail(*, token, thread, arrived, transforms):
    memory = _memory()
    letterbox, at = _locate(arrived, transforms)
    clock = memory.mail.wait(thread, (letterbox, str(at.range)))
    if clock is not None:
        with memory.lock:
            memory.clocks[thread].update(clock)
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
        accumulator = shared.Key.from_array(operands["acc_allocation_key_as_array"])
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
    _memory().check_accumulator(
        thread, shared.Key.from_array(accumulator), use, shared.where_of(source_info)
    )
    return token


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
        if name in LOADED:
            meaning = functools.partial(LOADED[name], parameters)
            return self._load(eqn, token, meaning, *values)
        if name in ADDED:
            return self._add(eqn, token, ADDED[name], *values), []
        if name == "_send_mail":
            return self._mail(_send_mail, eqn, token, values, block=values[3]), []
        if name == "_wait_for_mail":
            return self._mail(_wait_for_mail, eqn, token, values), []
        if name in ("load", "store"):
            return self._copy_rows(eqn, token, *values), []
        out = INLINE[name](*values, *parameters)
        return token, [] if out is None else [out]

    def _load(self, eqn, token, meaning, ref, *leaves):
        aval, (out,) = eqn.invars[0].aval, eqn.outvars
        (transforms,) = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
        ref, transforms = jaxpr_interpret.resolve_ref(aval, ref, transforms)
        shape, convert = meaning(out.aval.shape)
        token, found = gpu_callbacks.call_get(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(shape, aval.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=ref,
            transforms=transforms,
            source_info=eqn.source_info,
        )
        return token, [convert(found)]

    def _add(self, eqn, token, meaning, target, tile, *leaves):
        transforms, _ = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], leaves)
        target, transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, target, transforms)
        function = functools.partial(_add_to_gmem, source_info=eqn.source_info)
        return callback.io_callback(
            function,
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            thread=self.thread,
            target=target,
            transforms=transforms,
            value=meaning(tile),
        )

    def _mail(self, function, eqn, token, values, **others):
        refs = [var.aval for var in eqn.invars if isinstance(var.aval, state.AbstractRef)]
        numbers = eqn.params["pytree_args"].num_leaves
        transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], values[numbers:])
        keys, indices = zip(
            *(jaxpr_interpret.resolve_ref(*x) for x in zip(refs, values, transforms, strict=False)),
            strict=True,
        )
        if function is _send_mail:
            names = dict(zip(("source", "target", "arrived"), keys, strict=True))
            others = names | others | {"transforms": indices}
            function = functools.partial(function, source_info=eqn.source_info)
        else:
            others = {"arrived": keys[0], "transforms": indices[0]}
        return callback.io_callback(
            function, gpu_callbacks.TOKEN_SHAPE_DTYPE, token=token, thread=self.thread, **others
        )

    def _copy_rows(self, eqn, token, array, buffer, *scalars_and_leaves):
        *place, _ = scalars_and_leaves[:5]
        transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], scalars_and_leaves[5:])
        array, _ = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, array, transforms[0])
        buffer, inner = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, buffer, transforms[1])
        function = functools.partial(
            _copy_rows, name=eqn.params["mgpu_fn"].__name__, source_info=eqn.source_info
        )
        return callback.io_callback(
            function,
            gpu_callbacks.TOKEN_SHAPE_DTYPE,
            token=token,
            mesh_location=self.mesh_location,
            thread=self.thread,
            array=array,
            buffer=buffer,
            transforms=inner,
            place=place,
        )

    def _check_use(self, eqn, token, accumulator, use):
        return self._call(
            _check_accumulator, token, accumulator, use=use, source_info=eqn.source_info
        )

    def _allocate_registers(self, token, value, source_info):
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token, compute_unit=self.thread, memory_space_id=shared.REGISTERS
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


def _columns(tile: jax.Array) -> jax.Array:
    return jnp.arange(tile.shape[1])[None]


def _fragments(tile: jax.Array) -> jax.Array:
    """(warp, half, group) x (eight, thread, element) -> the order of a thread's registers."""
    return tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(-1)


def _row(parameters, shape):
    (dtype,) = parameters
    return shape, lambda row: jax.lax.bitcast_convert_type(row, dtype)


def _pairs(parameters, _):
    orientation, queries, keys, start, count, dtype = parameters
    columns = slice(int(start), int(start) + int(count))

    def convert(tile):
        tile = tile.T if orientation == "transposed" else tile
        return tile[:, columns].astype(dtype)

    return (int(queries), int(keys)), convert


# What is loaded: of the operation's parameters and the result's shape, the shape of what lies in memory
# and what becomes of it.
LOADED: dict[str, Callable] = {"load_row": _row, "load_pairs": _pairs}

# What is added to device memory from registers.
ADDED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "_add_fragments": _fragments,
    "_add_row_sums": lambda tile: tile.sum(1),
    "_add_column_sums": lambda tile: tile.sum(0),
}


def _negate_dropped(p, first, second, columns, key_axis, threshold, _):
    keys = dropout.RowKeys(*(x.astype("uint32")[:, None] for x in (first, second)))
    bits = dropout.bits(keys, columns[None])
    return jnp.where((bits if key_axis == "1" else bits.T) < int(threshold), -p, p)


# A warpgroup is one thread here: its four warps share their answers.
INLINE: dict[str, Callable[..., Any]] = {
    "any_above": lambda tile, limit: jnp.any(tile > float(limit)).astype("int32"),
    "_any_from_two": lambda tile: jnp.any(~(jnp.abs(tile) < 2)).astype("int32"),
    "_any_infinite": lambda rows, _: jnp.any(~(rows < jnp.inf)).astype("int32"),
    "_pin": lambda _: None,
    "_open_mail": lambda *_: None,
    "_expect_mail": lambda *_: None,
    "over": lambda x, axis, *shape: jax.lax.broadcast_in_dim(
        x, tuple(map(int, shape)), [int(axis)]
    ),
    "reciprocal": jnp.reciprocal,
    "zeros": lambda *shape: jnp.zeros(tuple(map(int, shape)), "float32"),
    "_turn_sync": lambda _: None,
    "_turn_arrive": lambda _: None,
    "column_numbers": lambda start, count: start + jnp.arange(int(count), dtype="int32"),
    "negate_dropped": _negate_dropped,
    "hide_after": lambda s, last: jnp.where(_columns(s) <= last[:, None], s, -jnp.inf),
    "hide_before": lambda s, first: jnp.where(_columns(s) >= first[:, None], s, -jnp.inf),
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
