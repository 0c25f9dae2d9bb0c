"""The derivative of attention: a `custom_vjp` whose residuals are q, k, v, out and the statistics of rows.

FlashAttention-2 (arXiv:2307.08691), section 3.1: the backward recomputes P from the logsumexp, or from the row maximum
and sum that it is formed of, where a backend returns these. The logsumexp is itself an output, and its cotangent
enters through delta = rowsum(dO ∘ O) - dlse.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.xla.tile import RowSums
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.planning.plan import Plan

Results = tuple[jax.Array, jax.Array, RowSums | None]

# For policies of `jax.checkpoint`: what the backward reads and only the forward can make.
CHECKPOINT_NAMES = ("attention_out", "attention_lse")

log = logging.getLogger("pallas_fa2")


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention(
    spec: CallSpec, plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Return `out [*B, T, N, Hv]` and `lse [*B, N, T]`, differentiable in q, k, v and the score data.

    `q, k, v` have any number of batch axes, and `operands` one of `spec.batch` entries.
    """
    log.info("%s", plan.summary(spec))  # when it is traced: once for each kind of call
    q, k, v, operands = match_varying_axes((q, k, v, operands))
    if BACKENDS[plan.implementation].backward is None:
        operands = operands._replace(mask=jax.lax.stop_gradient(operands.mask))
        out, lse, _ = run_forward(spec, plan, q, k, v, operands)
    else:
        # JAX's error about forward mode under `jit` is raised later and shows this line, with the remedy.
        results = _attention_vjp(
            spec, plan, q, k, v, operands
        )  # forward mode: implementation="reference"
        out, lse, _ = cast(Results, results)
    return out.astype(spec.dtype), lse


# The primal function and the forward rule share one trace, which takes a fifth of the time to trace and lower a call
# with its gradients. Inlined, it leaves nothing in the program.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run_forward(spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands) -> Results:
    """Return `out [*B, T, N, Hv]` in the backend's dtype, `lse [*B, N, T]` and the row sums, if it returns them."""
    backend, batch, mesh = BACKENDS[plan.implementation], q.shape[:-3], jax.typeof(q).sharding.mesh

    def run(q: Any, k: Any, v: Any, operands: Operands) -> Results:
        q, k, v = _merge_batch(spec, batch, (q, k, v))
        results = backend.forward(spec, plan.forward, q, k, v, operands)
        out, lse, sums = (*results, None)[:3]
        # A kernel does not say that its results vary over the axes of a mesh.
        results = _map_statistics_like_out(*match_varying_axes((out, lse, sums), q))
        return _split_batch(batch, results)

    *axes, length, heads, _ = jax.typeof(q).sharding.spec
    rows = PartitionSpec(*axes, heads, length)
    run = _on_mesh(run, mesh, (PartitionSpec(*axes, length, heads, None), rows, rows))
    if backend.backward is None and mesh.explicit_axes and mesh.manual_axes:
        # What JAX would keep for its own backward are residuals of the partitioner's, as `_on_mesh` says.
        run = jax.checkpoint(run)
    return run(q, k, v, operands)


_attention_vjp = jax.custom_vjp(run_forward, nondiff_argnums=(0, 1))


def _on_mesh(run: Callable, mesh: Any, specs: Any) -> Callable:
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


@jax.tree_util.register_static
class NeedsGrad(tuple[bool, ...]):
    """For each floating-point leaf of the score data, whether its gradient is needed."""


def split_primals(args: Any, scores: Any) -> tuple[Any, NeedsGrad]:
    """Return the values of the arguments of a `custom_vjp`'s forward rule, and which score data need a gradient."""

    def is_primal(x: Any) -> bool:
        return hasattr(x, "perturbed")

    values = jax.tree.map(lambda x: x.value, args, is_leaf=is_primal)
    leaves = jax.tree.leaves(scores, is_leaf=is_primal)
    return values, NeedsGrad(
        x.perturbed for x in leaves if jnp.issubdtype(x.value.dtype, jnp.floating)
    )


def _fwd_rule(
    spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands
) -> tuple[Results, tuple]:
    """Return the results and the residuals; arguments are `custom_vjp`'s, with `value` and `perturbed`."""
    (*qkv, values), needs_grad = split_primals((q, k, v, operands), operands.scores)
    out, *rows = cast(Results, _attention_vjp(spec, plan, *qkv, values))
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse, sums = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[1]), rows)
    saved_rows = (lse, None) if sums is None else (None, sums)
    return (out, lse, sums), (*qkv, out, *saved_rows, values, needs_grad)


def _bwd_rule(spec: CallSpec, plan: Plan, residuals: tuple, cotangents: Results) -> tuple:
    """Return the cotangents of q, k, v and the operands: None for the mask, the positions and the seed."""
    q, k, v, out, lse, sums, operands, needs_grad = residuals
    dout, dlse, dsums = cotangents
    dout = jnp.zeros_like(out) if is_zero(dout) else dout
    dlse = None if is_zero(dlse) else dlse
    if sums is not None and dsums is not None and not is_zero(dsums.total):
        # In second derivatives. The maximum is a constant that cancels: dtotal = total * dlse.
        through_total = dsums.total * sums.total
        dlse = through_total if dlse is None else dlse + through_total
    arrays = q, k, v, out, lse, dout.astype(q.dtype), dlse, sums
    dq, dk, dv, dscores = run_backward(spec, plan, arrays, operands, needs_grad)
    return dq, dk, dv, Operands(scores=as_cotangent(operands.scores, dscores))


def run_backward(
    spec: CallSpec, plan: Plan, arrays: tuple, operands: Operands, needs_grad: NeedsGrad
) -> tuple:
    """Return the gradients of q, k, v and of the floating-point leaves of the score data, by the backend.

    `arrays` are q, k, v, out, lse, dout, dlse and the row sums: either lse or these may be None, and so may dlse.
    """
    q, k, v = arrays[:3]
    name, config = plan.backward_for(any(needs_grad))
    backward, batch = BACKENDS[name].backward, q.shape[:-3]
    assert backward is not None, "JAX differentiates such a backend's forward itself"

    def run(arrays: tuple, operands: Operands) -> tuple:
        *saved, sums = _merge_batch(spec, batch, arrays)
        exact = {} if sums is None else {"sums": sums}
        results = backward(spec, config, *saved, operands, needs_grad, **exact)
        *dqkv, dscores = match_varying_axes(results, saved[0])
        return *_split_batch(batch, dqkv), dscores

    floats = tuple(split_floats(operands.scores)[0])
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, (q, k, v, floats))
    run = _on_mesh(run, jax.typeof(q).sharding.mesh, specs)
    return run(arrays, operands)


def as_cotangent(scores: tuple, gradients: Any) -> tuple:
    """Return the cotangent of score data, None for leaves of integers, from the gradients of the others."""
    leaves, tree = jax.tree.flatten(scores)
    remaining = iter(gradients)
    return jax.tree.unflatten(
        tree,
        [next(remaining) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in leaves],
    )


def is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, SymbolicZero)


_attention_vjp.defvjp(_fwd_rule, _bwd_rule, symbolic_zeros=True)
