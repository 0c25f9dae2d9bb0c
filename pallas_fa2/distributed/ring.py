"""Ring attention as a differentiable function: a `custom_vjp` around its two passes."""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_fa2.autodiff import CHECKPOINT_NAMES, as_cotangent, is_zero, split_primals
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.distributed.ring_passes import Ring, backward, forward
from pallas_fa2.fallback import check_gradients
from pallas_fa2.ir.call_spec import Operands
from pallas_fa2.ir.mesh import match_varying_axes


def ring_attention(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    """Return what `ring_passes.forward` does, differentiable in q, k, v and the score data."""
    q, k, v, operands = match_varying_axes((q, k, v, operands), lax.axis_index(ring.axis_name))
    plans = [call.plan for step in ring.steps for call in step.calls]
    if any(BACKENDS[plan.implementation].backward is None for plan in plans):
        operands = operands._replace(mask=lax.stop_gradient(operands.mask))
        return forward(ring, q, k, v, operands)
    with _naming_the_cure_outside_jit():
        # JAX's error about forward mode under `jit` is raised later and shows this line, with the remedy.
        results = _ring_vjp(ring, q, k, v, operands)  # forward mode: implementation="reference"
    return cast(tuple, results)


@contextlib.contextmanager
def _naming_the_cure_outside_jit() -> Iterator[None]:
    """Replace JAX's error about a `custom_vjp` in `shard_map` outside of `jit` by one that names `jit` as the
    remedy."""
    try:
        yield
    except NotImplementedError as error:
        if "symbolic_zeros" not in str(error):
            raise
        raise NotImplementedError(
            "strategy 'ring' (and 'all_gather' on one device, which runs as a ring) must be in a jax.shard_map that is inside "
            "jax.jit, but it is outside, where JAX has no custom_vjp with symbolic zeros; call jax.jit(jax.shard_map(...))"
        ) from error


_ring_vjp = jax.custom_vjp(forward, nondiff_argnums=(0,))


def _fwd_rule(ring: Ring, q: Any, k: Any, v: Any, operands: Operands) -> tuple:
    (*qkv, values), needs_grad = split_primals((q, k, v, operands), operands.scores)
    for step in ring.steps:
        for call in step.calls:
            check_gradients(call.spec, call.plan, needs_grad)
    results = _ring_vjp(ring, *qkv, values)
    out, lse = map(checkpoint_name, results, CHECKPOINT_NAMES)
    return (out, lse), (*qkv, out, lse, values, needs_grad)


def _bwd_rule(ring: Ring, residuals: tuple, cotangents: tuple) -> tuple:
    q, k, v, out, lse, operands, needs_grad = residuals
    dout, dlse = cotangents
    dout = jnp.zeros_like(out) if is_zero(dout) else dout
    dlse = None if is_zero(dlse) else dlse
    gradients = backward(ring, q, k, v, out, lse, dout, dlse, operands, needs_grad)
    dq, dk, dv, dscores = match_varying_axes(gradients, q)
    return dq, dk, dv, Operands(scores=as_cotangent(operands.scores, dscores))


_ring_vjp.defvjp(_fwd_rule, _bwd_rule, symbolic_zeros=True)
