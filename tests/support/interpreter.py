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
* a limit on every barrier wait, so that a deadlock is an exception;
* NumPy arrays for callbacks, and one compilation for all threads of a block: half of the time.

What the interpreter calls it calls in order, which `custom_partitioning` does not allow: all entries and
heads are of one device.

    out = interpreter.run(kernel, q, k, v)      # RaceDetected, TimeoutError, or the values
"""

import functools
import os
import threading
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback, core, dispatch, xla_bridge
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import partition
from tests.support import inline, operations, shared

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
        whole = mock.patch.object(partition, "custom_partitioning", _Whole)
        with plgpu.force_gpu_interpret_mode(params), whole:
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
    gpu_callbacks.AsyncCopyGmemToSmemTask = operations.LoadTask
    gpu_callbacks.wgmma = operations.execute_wgmma
    gpu_callbacks.copy_smem_to_gmem = operations.copy_smem_to_gmem
    callback.io_callback_impl = _call_with_numpy
    shared_memory._to_int = _to_int
    thread_map._run_jaxpr = _run_compiled_once


def _call_with_numpy(*args: Any, callback: Callable[..., Any], **_: Any) -> Any:
    """A callback gets JAX's arrays otherwise, and to index one is an operation that is compiled."""
    return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def _to_int(x: Any) -> Any:
    return x if isinstance(x, core.Tracer) else int(x)


_COMPILING = threading.Lock()
_RUN = jax.jit(thread_map._run, static_argnums=0)


def _run_compiled_once(jaxpr: Any, consts: Any, *args: Any) -> None:
    """All threads of a block come here at once, and each would compile what JAX's cache does not have yet."""
    with _COMPILING:
        compiled = _RUN.trace(jaxpr, consts, *args).lower().compile()
    compiled(consts, *args)


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


class _Whole:
    """A function that is not partitioned."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn

    def def_partition(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *args: Any) -> Any:
        return self._fn(*args)


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
        token = self._call(
            operations.wait_wgmma, token, in_flight=0
        )  # the compiled run_state waits too
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
        return self._call(operations.wait_wgmma, token, in_flight=eqn.params["n"]), []

    def _accumulator_load(self, eqn, token, values):
        if eqn.params["wait_n"] is not None:
            token = self._call(operations.wait_wgmma, token, in_flight=eqn.params["wait_n"])
        token = self._check_use(eqn, token, values[0], "read")
        token, out = self._interpret_wgmma_accumulator_deref_p(eqn, token, lambda: values)
        return token, [out]

    def _accumulator_store(self, eqn, token, values):
        accumulator, value = values
        token = self._check_use(eqn, token, accumulator, "overwritten")
        token = self._write(eqn, token, accumulator, (), value)
        return token, [value]

    def _commit_group(self, eqn, token, values):
        return self._call(operations.commit_stores, token), []

    def _inline(self, eqn, token, values):
        """What the library's inline code means, by its name and the parameters after it."""
        name, *parameters = eqn.params["mgpu_fn"].__name__.split()
        if name in inline.LOADED:
            meaning = functools.partial(inline.LOADED[name], parameters)
            return self._load(eqn, token, meaning, values)
        if name in inline.STORED:
            return self._store(eqn, token, inline.STORED[name], values), []
        if name in inline.ADDED:
            target, tile, *leaves = values
            values = target, inline.ADDED[name](tile), *leaves
            return self._operate(operations.add_to_gmem, eqn, token, values)
        if name in operations.OPERATIONS:
            return self._operate(operations.OPERATIONS[name], eqn, token, values)
        if name in ("load", "store"):
            view, panel = parameters
            copy = functools.partial(operations.copy_rows, way=name, view=view, panel=int(panel))
            return self._operate(copy, eqn, token, values, self.mesh_location)
        out = inline.INLINE[name](*values, *parameters)
        return token, [] if out is None else [out]

    def _operate(self, operation, eqn, token, values, *before):
        """operation(token, thread, *before, references with their transforms, all else)."""
        results = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        token, *found = callback.io_callback(
            functools.partial(operation, source_info=eqn.source_info),
            (gpu_callbacks.TOKEN_SHAPE_DTYPE, *results),
            token,
            self.thread,
            *before,
            *self._operands(eqn, values),
        )
        return token, found

    @staticmethod
    def _operands(eqn, values):
        """Of inline code: each reference with its transforms, then the others as they are."""
        count = eqn.params["pytree_args"].num_leaves
        transforms = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], values[count:])
        for var, value, of_value in zip(eqn.invars, values, transforms, strict=False):
            if isinstance(var.aval, state.AbstractRef):
                value = jaxpr_interpret.resolve_ref(var.aval, value, of_value)
            yield value

    def _load(self, eqn, token, meaning, values):
        (out,) = eqn.outvars
        (ref, transforms), *_ = self._operands(eqn, values)
        shape, convert = meaning(out.aval.shape)
        token, found = gpu_callbacks.call_get(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(shape, eqn.invars[0].aval.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=ref,
            transforms=transforms,
            source_info=eqn.source_info,
        )
        return token, [convert(found)]

    def _store(self, eqn, token, meaning, values):
        (target, transforms), tile = self._operands(eqn, values)
        return self._write(eqn, token, target, transforms, meaning(tile))

    def _write(self, eqn, token, target, transforms, value):
        token, _ = gpu_callbacks.call_swap(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(value.shape, value.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=target,
            transforms=transforms,
            val=value,
            mask=None,
            source_info=eqn.source_info,
        )
        return token

    def _check_use(self, eqn, token, accumulator, use):
        return self._call(
            operations.check_accumulator, token, accumulator, use=use, source_info=eqn.source_info
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


_RULES = {
    discharge.run_state_p: _Interpreter._run_state,
    gpu.wgmma_ref_p: _Interpreter._wgmma,
    gpu.wgmma_wait_p: _Interpreter._wgmma_wait,
    gpu.wgmma_accumulator_deref_p: _Interpreter._accumulator_load,
    gpu.wgmma_accumulator_store_p: _Interpreter._accumulator_store,
    gpu.commit_group_p: _Interpreter._commit_group,
    gpu.inline_mgpu_p: _Interpreter._inline,
}
