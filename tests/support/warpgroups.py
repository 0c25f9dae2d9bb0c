"""What a warpgroup does besides arithmetic: the rules by which its program reads and writes memory.

Of an equation they make a function of the warpgroup and of the values of the equation's inputs. JAX's interpreter has
what becomes of memory; it is made to be traced, and is called here with values, as are the callbacks that it makes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax._src import core
from jax._src.pallas import primitives as pallas
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.state import discharge
from jax._src.state import primitives as references
from jax._src.state import types as state

from tests.support import inline, operations, programs, shared
from tests.support.views import BarrierView, View, located, operands

# Where callbacks are not called by compiled code, nothing has to order them. This one is that of a block's threads.
TOKEN = thread_map.NESTED_TOKEN_VALUE


def call_at_once(
    function: Callable, _: Any, *args: Any, ordered: bool = True, **kwargs: Any
) -> Any:
    """In the place of `io_callback`."""
    return function(*args, **kwargs)


def uninitialized(shape: Sequence[int], dtype: Any, how: Any) -> np.ndarray:
    return np.full(shape, interpret_utils.get_uninitialized_value(dtype, how), dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warpgroup(jaxpr_interpret.JaxprInterpreter):
    programs: programs.Programs

    def interpret(self, jaxpr: Any, token: Any, *values: Any) -> tuple[Any, list]:
        return token, self.programs.of(jaxpr, closed=False)(self, values)

    def read(self, place: Any, source_info: Any) -> np.ndarray:
        memory, (key, access) = shared.the_memory(), place
        found, (shape, dtype), clock = memory.get_buffer_content(key, access, self.thread)
        if found is None or found.shape != access.shape:
            found = gpu_callbacks._handle_out_of_bounds_read(
                found, access.shape, shape, dtype, key, access, memory, source_info, *[None] * 3
            )
        if clock is not None:
            generic = memory.clock_of_access(self.thread, key, clock).generic_clock
            gpu_callbacks.get_races().check_read(self.thread, generic, key, access, source_info)
        return found

    def write(self, place: Any, value: np.ndarray, source_info: Any) -> None:
        memory = shared.the_memory()
        _, _, clock = memory.store_buffer_content(*place, value, self.thread)
        if clock is not None:
            generic = memory.clock_of_access(self.thread, place[0], clock).generic_clock
            gpu_callbacks.get_races().check_write(self.thread, generic, *place, source_info)

    def allocate_registers(self, value: Any, source_info: Any) -> Any:
        _, request = gpu_callbacks.call_make_allocation_request_array(
            token=TOKEN, compute_unit=self.thread, memory_space_id=shared.REGISTERS
        )
        where = self.mesh_location, self.thread, request, value, source_info
        return gpu_callbacks.call_allocate_buffer(TOKEN, *where)[1]

    def free_registers(self, ref: Any, source_info: Any) -> None:
        gpu_callbacks.call_deallocate_buffer(
            TOKEN, self.mesh_location, self.thread, ref, source_info
        )

    def barrier(self, key: shared.Key) -> tuple[Any, Any]:
        return shared.the_memory().get_barrier_and_increment_clock(key, self.thread)


def _upstream(method: Callable) -> programs.Rule:
    def make(eqn: Any) -> Callable:
        def run(warpgroup: Warpgroup, *values: Any) -> Sequence:
            _, found = method(warpgroup, eqn, TOKEN, lambda: values)
            return found if eqn.primitive.multiple_results else [found]

        return run

    return make


def _of_thread(operation: Callable) -> programs.Rule:
    """operation(the memory, thread, the equation's parameters)"""

    def make(eqn: Any) -> Callable:
        def run(warpgroup: Warpgroup, *_: Any) -> Sequence:
            operation(shared.the_memory(), warpgroup.thread, eqn.params)
            return ()

        return run

    return make


def _axis_index(eqn: Any) -> Callable:
    return lambda warpgroup: [warpgroup._interpret_axis_index_p(eqn)]


def _get(eqn: Any) -> Callable:
    view = View(eqn.invars[0].aval, eqn.params["tree"])

    def run(warpgroup: Warpgroup, ref: Any, *indices: Any) -> Sequence:
        return [warpgroup.read(view(ref, indices), eqn.source_info)]

    return run


def _swap(eqn: Any) -> Callable:
    view = View(eqn.invars[0].aval, eqn.params["tree"])
    unused = isinstance(eqn.outvars[0], core.DropVar)

    def run(warpgroup: Warpgroup, ref: Any, value: Any, *indices: Any) -> Sequence:
        place, before = view(ref, indices), value
        if not unused:
            before, _, _ = shared.the_memory().get_buffer_content(*place, None)
        warpgroup.write(place, value, eqn.source_info)
        return [before]

    return run


def _run_state(eqn: Any) -> Callable:
    """Accumulators become registers; references from outside pass through."""
    body, where = eqn.params["jaxpr"], eqn.source_info
    owned = [not isinstance(variable.aval, state.AbstractRef) for variable in eqn.invars]
    views = [View(variable.aval) for variable in body.all_invars]

    def run(warpgroup: Warpgroup, *values: Any) -> Sequence:
        refs = [
            warpgroup.allocate_registers(value, where) if own else value
            for value, own in zip(values, owned, strict=True)
        ]
        warpgroup.interpret(body, TOKEN, *refs)
        memory, outs = shared.the_memory(), list(refs)
        memory.wait_wgmma(warpgroup.thread, 0)  # the compiled run_state waits too
        for i, (ref, own, view) in enumerate(zip(refs, owned, views, strict=True)):
            if own:
                outs[i], _, _ = memory.get_buffer_content(*view(ref, ()), warpgroup.thread)
                warpgroup.free_registers(ref, where)
        return outs

    return run


def _wgmma(eqn: Any) -> Callable:
    trees = (eqn.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b"))
    views = (
        View(variable.aval, tree) if isinstance(variable.aval, state.AbstractRef) else None
        for variable, tree in zip(eqn.invars, trees, strict=False)
    )
    locate = located(*views)

    def run(warpgroup: Warpgroup, *values: Any) -> Sequence:
        operations.multiply(warpgroup.thread, *locate(values), source_info=eqn.source_info)
        return ()

    return run


def _mma(_: Any) -> Callable:
    def run(_: Warpgroup, acc: np.ndarray, left: np.ndarray, right: np.ndarray) -> Sequence:
        return [acc + left.astype(acc.dtype) @ right.astype(acc.dtype)]

    return run


def _load_accumulator(eqn: Any) -> Callable:
    view, in_flight = View(eqn.invars[0].aval), eqn.params["wait_n"]

    def run(warpgroup: Warpgroup, accumulator: Any) -> Sequence:
        memory, place = shared.the_memory(), view(accumulator, ())
        if in_flight is not None:
            memory.wait_wgmma(warpgroup.thread, in_flight)
        memory.check_accumulator(warpgroup.thread, place[0], "read", eqn.source_info)
        return [memory.get_buffer_content(*place, warpgroup.thread)[0]]

    return run


def _store_accumulator(eqn: Any) -> Callable:
    view, where = View(eqn.invars[0].aval), eqn.source_info

    def run(warpgroup: Warpgroup, accumulator: Any, value: Any) -> Sequence:
        place = view(accumulator, ())
        shared.the_memory().check_accumulator(warpgroup.thread, place[0], "overwritten", where)
        warpgroup.write(place, value, where)
        return [value]

    return run


def _arrive(eqn: Any) -> Callable:
    view = BarrierView(eqn.invars[0].aval, eqn.params["transforms_treedef"])
    predicated = eqn.params.get("has_user_predicate", False)

    def run(warpgroup: Warpgroup, ref: Any, *indices: Any) -> Sequence:
        if predicated:
            *indices, predicate = indices
            if not predicate:
                return ()
        barrier, clock = warpgroup.barrier(view(ref, indices))
        where = {"thread": warpgroup.thread, "clock": clock}
        if isinstance(barrier, gpu_callbacks.memory.ClusterBarrier):
            where["mesh_location"] = warpgroup.mesh_location
        barrier.arrive(**where)
        return ()

    return run


def _wait(eqn: Any) -> Callable:
    view = BarrierView(eqn.invars[0].aval, eqn.params["transforms_treedef"])

    def run(warpgroup: Warpgroup, ref: Any, *indices: Any) -> Sequence:
        barrier, _ = warpgroup.barrier(view(ref, indices))
        barrier.wait(warpgroup.thread, logging_info=eqn)
        return ()

    return run


def _copy_to_smem(eqn: Any) -> Callable:
    params, avals = eqn.params, [variable.aval for variable in eqn.invars]
    assert params["has_barrier"]
    locate = located(
        View(avals[0], params["src_transforms_treedef"]),
        View(avals[1], params["dst_transforms_treedef"]),
        BarrierView(avals[2], params["barrier_transforms_treedef"]),
    )

    def run(warpgroup: Warpgroup, *values: Any) -> Sequence:
        where = warpgroup.thread, warpgroup.mesh_location
        operations.copy_to_smem(*where, *locate(values), source_info=eqn.source_info)
        return ()

    return run


def _copy_to_gmem(eqn: Any) -> Callable:
    params, avals = eqn.params, [variable.aval for variable in eqn.invars]
    locate = located(
        View(avals[0], params["src_transforms_treedef"]),
        View(avals[1], params["dst_transforms_treedef"]),
    )

    def run(warpgroup: Warpgroup, *values: Any) -> Sequence:
        if not params["has_user_predicate"] or values[-1]:
            where = warpgroup.thread, warpgroup.mesh_location
            how = params["reduction_op"]
            operations.copy_to_gmem(*where, *locate(values), how, source_info=eqn.source_info)
        if params["commit_group"]:
            operations.commit_stores(warpgroup.thread)
        return ()

    return run


def _inline(eqn: Any) -> Callable:
    """Run what the library's inline code stands for, by the name and the parameters of its `InlineOp`."""
    op = eqn.params["mgpu_fn"].op
    locate, where = operands(eqn), eqn.source_info

    def load(warpgroup: Warpgroup, place: Any, *_: Any) -> Sequence:
        found = warpgroup.read(place, where)
        out = inline.LOADED[op.name](found, **op.params)
        aval = eqn.outvars[0].aval
        assert (out.shape, out.dtype) == (aval.shape, aval.dtype), (out.shape, out.dtype, aval)
        return [out]

    def store(warpgroup: Warpgroup, place: Any, tile: Any) -> None:
        warpgroup.write(place, inline.STORED[op.name](tile), where)

    def add(warpgroup: Warpgroup, place: Any, tile: Any) -> None:
        value = inline.ADDED[op.name](tile)
        operations.add_to_gmem(warpgroup.thread, place, value, source_info=where)

    def copy(warpgroup: Warpgroup, *operands: Any) -> None:
        threads = warpgroup.thread, warpgroup.mesh_location
        operations.copy_rows(*threads, *operands, **op.params, source_info=where)

    def operate(warpgroup: Warpgroup, *operands: Any) -> Sequence | None:
        return operations.OPERATIONS[op.name](
            warpgroup.thread, *operands, **op.params, source_info=where
        )

    def compute(_: Warpgroup, *values: Any) -> Sequence | None:
        out = inline.INLINE[op.name](*values, **op.params)
        return None if out is None else [out]

    kinds = (
        (inline.LOADED, load),
        (inline.STORED, store),
        (inline.ADDED, add),
        (operations.OPERATIONS, operate),
        (("copy_rows",), copy),
        (inline.INLINE, compute),
    )
    meaning = next((meaning for names, meaning in kinds if op.name in names), None)
    if meaning is None:
        raise KeyError(op.name)
    return lambda warpgroup, *values: meaning(warpgroup, *locate(values)) or ()


RULES: dict[Any, programs.Rule] = {
    discharge.run_state_p: _run_state,
    gpu.barrier_arrive_p: _arrive,
    gpu.barrier_wait_p: _wait,
    gpu.commit_group_p: _of_thread(lambda _, thread, params: operations.commit_stores(thread)),
    gpu.commit_smem_p: _of_thread(lambda memory, thread, params: memory.commit_smem(thread)),
    gpu.copy_gmem_to_smem_p: _copy_to_smem,
    gpu.copy_smem_to_gmem_p: _copy_to_gmem,
    gpu.inline_mgpu_p: _inline,
    gpu.load_p: _get,
    gpu.mma_p: _mma,
    gpu.set_max_registers_p: _of_thread(lambda *_: None),
    gpu.wait_smem_to_gmem_p: _of_thread(
        lambda memory, thread, params: memory.wait_smem_to_gmem(
            thread, params["n"], params["wait_read_only"]
        )
    ),
    gpu.wgmma_accumulator_deref_p: _load_accumulator,
    gpu.wgmma_accumulator_store_p: _store_accumulator,
    gpu.wgmma_ref_p: _wgmma,
    gpu.wgmma_wait_p: _of_thread(
        lambda memory, thread, params: memory.wait_wgmma(thread, params["n"])
    ),
    lax.axis_index_p: _axis_index,
    pallas.run_scoped_p: _upstream(Warpgroup._interpret_run_scoped_p),
    references.get_p: _get,
    references.swap_p: _swap,
}
