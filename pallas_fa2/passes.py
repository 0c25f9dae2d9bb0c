"""One pass of a backend, forward or backward, on arrays with any batch axes and on any mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.xla.tile import RowSums
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.planning.plan import Plan

Results = tuple[jax.Array, jax.Array, RowSums | None]


@jax.tree_util.register_static
class NeedsGrad(tuple[bool, ...]):
    """For each floating-point leaf of the score data, whether its gradient is needed."""


def backend_forward(
    spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands
) -> Results:
    """Return the results of the backend on arrays with one batch axis, with None where it returns no row sums."""
    forward: Callable[..., Any] = BACKENDS[plan.implementation].forward
    out, lse, *sums = forward(spec, plan.forward, q, k, v, operands)
    return out, lse, sums[0] if sums else None


def backend_backward(
    spec: CallSpec, plan: Plan, arrays: tuple, operands: Operands, needs_grad: NeedsGrad
) -> tuple:
    """Return the gradients by the backend on arrays with one batch axis (see `run_backward`)."""
    name, config = plan.backward_for(any(needs_grad))
    backward = BACKENDS[name].backward
    assert backward is not None, "JAX differentiates such a backend's forward itself"
    *saved, sums = arrays
    exact = {} if sums is None else {"sums": sums}
    return backward(spec, config, *saved, operands, needs_grad, **exact)


# The primal function and the forward rule share one trace, which takes a fifth of the time to trace and lower a call
# with its gradients. Inlined, it leaves nothing in the program.
@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="compute", inline=True)
def run_forward(
    spec: CallSpec,
    plan: Plan,
    q: Any,
    k: Any,
    v: Any,
    operands: Operands,
    *,
    compute: Callable = backend_forward,
) -> Results:
    """Return `out [*B, T, N, Hv]` in the backend's dtype, `lse [*B, N, T]` and the row sums, if it returns them.

    `compute` has the arguments and the results of `backend_forward`.
    """
    batch, mesh = q.shape[:-3], jax.typeof(q).sharding.mesh

    def run(q: Any, k: Any, v: Any, operands: Operands) -> Results:
        q, k, v = _merge_batch(spec, batch, (q, k, v))
        results = compute(spec, plan, q, k, v, operands)
        # A kernel does not say that its results vary over the axes of a mesh.
        results = _map_statistics_like_out(*match_varying_axes(results, q))
        return _split_batch(batch, results)

    of_out, of_lse = result_specs(q)
    run = on_mesh(run, mesh, (of_out, of_lse, of_lse))
    if BACKENDS[plan.implementation].backward is None and mesh.explicit_axes and mesh.manual_axes:
        # What JAX would keep for its own backward are residuals of the partitioner's, as `on_mesh` says.
        run = jax.checkpoint(run)
    return run(q, k, v, operands)


def run_backward(
    spec: CallSpec,
    plan: Plan,
    arrays: tuple,
    operands: Operands,
    needs_grad: NeedsGrad,
    *,
    compute: Callable = backend_backward,
) -> tuple:
    """Return the gradients of q, k, v and of the floating-point leaves of the score data, by the backend.

    `arrays` are q, k, v, out, lse, dout, dlse and the row sums: either lse or these may be None, and so may dlse.
    `compute` has the arguments and the results of `backend_backward`.
    """
    q, k, v = arrays[:3]
    batch = q.shape[:-3]

    def run(arrays: tuple, operands: Operands) -> tuple:
        merged = _merge_batch(spec, batch, arrays)
        results = compute(spec, plan, merged, operands, needs_grad)
        *dqkv, dscores = match_varying_axes(results, merged[0])
        return *_split_batch(batch, dqkv), dscores

    floats = tuple(split_floats(operands.scores)[0])
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (q, k, v, floats))
    run = on_mesh(run, jax.typeof(q).sharding.mesh, specs)
    return run(arrays, operands)


def result_specs(q: jax.Array) -> tuple[PartitionSpec, PartitionSpec]:
    """Return how out `[*B, T, N, Hv]` and lse `[*B, N, T]` are divided over a mesh where q is `[*B, T, N, H]`."""
    *axes, length, heads, _ = jax.typeof(q).sharding.spec
    return PartitionSpec(*axes, length, heads, None), PartitionSpec(*axes, heads, length)


def on_mesh(run: Callable, mesh: Any, specs: Any) -> Callable:
    """Return `run` with its arrays divided over the explicit axes of a mesh; results are laid out by `specs`.

    Forward and backward do so each for itself: JAX cannot take the partitioner's residuals out of `shard_map`.
    """
    if not mesh.explicit_axes:
        return run

    def partitioned(*args: Any) -> Any:
        # Arrays may be on a mesh that is not the current one, which `auto_axes` requires.
        with jax.sharding.use_abstract_mesh(mesh):
            # In `shard_map` over some axes, these are the others.
            return jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=specs)(*args)

    return partitioned


def _merge_batch(spec: CallSpec, batch: tuple[int, ...], arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(spec.batch, *x.shape[len(batch) :]), arrays)


def _split_batch(batch: tuple[int, ...], arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), arrays)


def _map_statistics_like_out(out: jax.Array, lse: jax.Array, sums: RowSums | None) -> Results:
    """Return the same arrays, the statistics mapped where out is, also by a `vmap` over v or dropout's key alone.

    JAX sums the cotangents of all entries of an output that is not mapped, and a custom backward that runs for each
    entry would count that sum once for each.
    """
    mapped = jnp.isnan(out[:, :1, :1, 0])
    return out, *jax.tree.map(lambda x: jnp.where(mapped, x, x), (lse, sums))
