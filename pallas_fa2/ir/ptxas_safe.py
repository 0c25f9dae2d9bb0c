"""Negation and absolute value of integers in a form that ptxas does not miscompile."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr

from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.mesh import match_varying_axes


def neg_ptxas_safe(x: jax.Array) -> jax.Array:
    """Return -x, for integers as a product with a -1 that XLA does not know.

    Up to 13.3, ptxas computes max(max(a, -b), c) on Hopper by one VIMNMX3, without the minus
    (https://github.com/pytorch/pytorch/issues/190973).
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return -x
    return x * lax.optimization_barrier(jnp.asarray(-1, x.dtype))


def abs_ptxas_safe(x: jax.Array) -> jax.Array:
    """Return |x|, which XLA would write as max(x, -x), by `neg_ptxas_safe`."""
    return jnp.maximum(x, neg_ptxas_safe(x))


def eval_mask_ptxas_safe(code: ClosedJaxpr, args: list) -> jax.Array:
    """Evaluate a mask's code with the safe forms for integers."""
    rules = {"neg": neg_ptxas_safe, "abs": abs_ptxas_safe}

    def apply(eqn: Any, ins: list) -> list:
        if (inner := inner_jaxpr(eqn)) is not None:
            return interpret_jaxpr(*inner, ins, constant, apply)
        rule = rules.get(eqn.primitive.name)
        if rule is not None and jnp.issubdtype(ins[0].dtype, jnp.signedinteger):
            return [rule(*ins)]
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        return results if eqn.primitive.multiple_results else [results]

    def constant(x: Any) -> jax.Array:
        return match_varying_axes(jnp.asarray(x), args)

    (visible,) = interpret_jaxpr(code.jaxpr, code.consts, args, constant, apply)
    return visible
