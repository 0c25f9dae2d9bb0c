"""The derivative of attention: a `custom_vjp` whose residuals are q, k, v, out and rows' statistics alone.

FlashAttention-2 (arXiv:2307.08691), section 3.1: the backward forms the probabilities again from
the logsumexp, or where an implementation keeps them from the two numbers that it is the sum of. The logsumexp is itself an output, and its cotangent enters through
delta = rowsum(dO ∘ O) - dlse.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.xla.tile import RowSums
from pallas_fa2.ir.call_spec import CallSpec, Operands, split_floats
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.planning.plan import Plan

Out = tuple[jax.Array, jax.Array]
Results = tuple[jax.Array, jax.Array, RowSums | None]

# For policies of `jax.checkpoint`: what the backward reads and only the forward can make.
CHECKPOINT_NAMES = ("attention_out", "attention_lse")

log = logging.getLogger("pallas_fa2")


@functools.partial(jax.jit, static_argnums=(0, 1))
def attention(
    spec: CallSpec, plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> Out:
    """`out [*B, T, N, Hv]` and `lse [*B, N, T]`, differentiable in q, k, v and the score data.

    `q, k, v` have any number of batch axes, and `operands` one of `spec.batch` entries.
    """
    log.info("%s", plan.summary(spec))  # when it is traced: once for each kind of call
    q, k, v, operands = match_varying_axes((q, k, v, operands))
    if BACKENDS[plan.implementation].backward is None:
        operands = operands._replace(mask=jax.lax.stop_gradient(operands.mask))
        out, lse, _ = _run_forward(spec, plan, q, k, v, operands)
    else:
        # JAX's error about forward mode under `jit` is raised later and shows this line, with its cure.
        results = _attention_vjp(
            spec, plan, q, k, v, operands
        )  # forward mode: implementation="reference"
        out, lse, _ = cast(Results, results)
    return out.astype(spec.dtype), lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention_vjp(
    spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands
) -> Results:
    return _run_forward(spec, plan, q, k, v, operands)


def _run_forward(spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands) -> Results:
    implementation = BACKENDS[plan.implementation]

    def run(arrays: tuple, operands: Operands) -> tuple:
        q, k, v = arrays
        results = implementation.forward(spec, plan.forward, q, k, v, operands)
        out, lse, sums = (*results, None)[:3]
        # a kernel does not say that its results vary over a mesh
        return _mapped_alike(*match_varying_axes((out, lse, sums), q)), ()

    *batch, length, heads, _ = jax.typeof(q).sharding.spec
    rows = PartitionSpec(*batch, heads, length)
    specs = (PartitionSpec(*batch, length, heads, None), rows, rows), ()
    run = _with_any_mesh(spec, q, run, specs)
    mesh = jax.typeof(q).sharding.mesh
    if implementation.backward is None and mesh.explicit_axes and mesh.manual_axes:
        # What JAX would keep for its own backward are residuals of the partitioner's, as `_with_any_mesh` says.
        run = jax.checkpoint(run)
    return run((q, k, v), operands)[0]


def _with_any_mesh(spec: CallSpec, q: Any, fn: Callable, specs: Any) -> Callable:
    """`fn(arrays, operands) -> arrays, rest` for arrays with all of `q`'s batch axes, on a mesh of any kind.

    If that has explicit axes, the partitioner divides `fn`, and results lie as `specs` say. Forward and backward
    do so each for itself: JAX cannot take residuals of the partitioner's out of `shard_map`.
    """
    batch, mesh = q.shape[:-3], jax.typeof(q).sharding.mesh

    def merged(arrays: Any, operands: Operands) -> tuple:
        arrays = jax.tree.map(lambda x: x.reshape(spec.batch, *x.shape[len(batch) :]), arrays)
        results, rest = fn(arrays, operands)
        return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), results), rest

    if not mesh.explicit_axes:
        return merged

    def run(*args: Any) -> Any:
        # Arrays may lie on a mesh that nobody has set, and `auto_axes` asks for the one that is.
        with jax.sharding.use_abstract_mesh(mesh):
            # in `shard_map` over some axes, the others
            divided = jax.sharding.auto_axes(merged, axes=mesh.explicit_axes, out_sharding=specs)
            return divided(*args)

    return run


def _mapped_alike(out: jax.Array, lse: jax.Array, sums: RowSums | None) -> Results:
    """The same, but `vmap` over v or dropout's key alone maps rows' statistics as well.

    Of an output that is not mapped, JAX sums the cotangents of all entries, and a custom backward
    that runs for each entry would count that sum once for each.
    """
    mapped = jnp.isnan(out[:, :1, :1, 0])
    return out, *jax.tree.map(lambda x: jnp.where(mapped, x, x), (lse, sums))


@jax.tree_util.register_static
class NeedsGrad(tuple[bool, ...]):
    """Of each float that scores read, whether its gradient is asked for."""


def _forward(
    spec: CallSpec, plan: Plan, q: Any, k: Any, v: Any, operands: Operands
) -> tuple[Results, tuple]:
    """Of arrays with `value` and `perturbed`."""
    args = jax.tree.map(_value, (q, k, v, operands), is_leaf=_is_primal)
    scores = jax.tree.leaves(operands.scores, is_leaf=_is_primal)
    wanted = NeedsGrad(x.perturbed for x in scores if jnp.issubdtype(x.value.dtype, jnp.floating))
    out, *rows = cast(Results, _attention_vjp(spec, plan, *args))
    out = checkpoint_name(out, CHECKPOINT_NAMES[0])
    lse, sums = jax.tree.map(lambda x: checkpoint_name(x, CHECKPOINT_NAMES[1]), rows)
    *qkv, operands = args
    rows = (lse, None) if sums is None else (None, sums)
    return (out, lse, sums), (*qkv, out, *rows, operands, wanted)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _value(x: Any) -> jax.Array:
    return x.value


def _backward(spec: CallSpec, plan: Plan, residuals: tuple, cotangents: Results) -> tuple:
    q, k, v, out, lse, sums, operands, wanted = residuals
    dout, dlse, dsums = cotangents
    dout = jnp.zeros_like(out) if _is_zero(dout) else dout
    dlse = None if _is_zero(dlse) else dlse
    if sums is not None and dsums is not None and not _is_zero(dsums.total):
        # Of second derivatives. The maximum is a constant that cancels: dtotal = total * dlse.
        through_total = dsums.total * sums.total
        dlse = through_total if dlse is None else dlse + through_total
    name, config = plan.backward_for(any(wanted))
    backward = BACKENDS[name].backward
    assert backward is not None, "an implementation that JAX differentiates never comes here"

    def run(arrays: tuple, operands: Operands) -> tuple:
        *kept, sums = arrays
        exact = {} if sums is None else {"sums": sums}
        results = backward(spec, config, *kept, operands, wanted, **exact)
        *gradients, dscores = match_varying_axes(results, kept[0])
        return tuple(gradients), dscores

    arrays = q, k, v, out, lse, dout.astype(q.dtype), dlse, sums
    floats = tuple(split_floats(operands.scores)[0])
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, ((q, k, v), floats))
    (dq, dk, dv), dscores = _with_any_mesh(spec, q, run, specs)(arrays, operands)
    return dq, dk, dv, _cotangents(operands, dscores)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _cotangents(operands: Operands, dscores: tuple) -> Operands:
    """Gradients of the score data; the mask, positions and seed have none."""
    floats = iter(dscores)
    leaves, tree = jax.tree.flatten(operands.scores)
    scores = [next(floats) if jnp.issubdtype(x.dtype, jnp.floating) else None for x in leaves]
    return Operands(scores=jax.tree.unflatten(tree, scores))


_attention_vjp.defvjp(_forward, _backward, symbolic_zeros=True)
