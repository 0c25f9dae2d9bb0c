"""The derivative of attention: a `custom_vjp` whose residuals are q, k, v, out and the statistics of rows.

FlashAttention-2 (arXiv:2307.08691), section 3.1: the backward recomputes P from the logsumexp, or from the row maximum
and sum that it is formed of, where a backend returns these. The logsumexp is itself an output, and its cotangent
enters through delta = rowsum(dO ∘ O) - dlse.
"""

import functools
import logging
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.distributed.under_jit import divided_backward, divided_forward
from pallas_fa2.fallback import check_gradients
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.passes import NeedsGrad, Results, run_backward, run_forward
from pallas_fa2.planning.plan import Plan

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


_attention_vjp = jax.custom_vjp(
    functools.partial(run_forward, compute=divided_forward), nondiff_argnums=(0, 1)
)


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
    check_gradients(spec, plan, needs_grad)
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
    dq, dk, dv, dscores = run_backward(
        spec, plan, arrays, operands, needs_grad, compute=divided_backward
    )
    return dq, dk, dv, Operands(scores=as_cotangent(operands.scores, dscores))


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
