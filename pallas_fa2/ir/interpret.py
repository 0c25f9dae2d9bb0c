"""Abstract interpretation of a jaxpr."""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import Literal

# Equations that only call their jaxpr. (A loop has one too.)
CALL_PRIMITIVES = {"pjit", "jit", "closed_call", "custom_jvp_call", "remat2", "checkpoint"}


def inner_jaxpr(eqn: Any) -> tuple[Any, Any] | None:
    """Return the jaxpr that an equation calls, and its constants; None if it is no call."""
    if eqn.primitive.name not in CALL_PRIMITIVES:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def interpret_jaxpr(
    jaxpr: Any, consts: Any, args: list, constant: Callable, apply: Callable
) -> list:
    """Return the abstract results of a jaxpr: `constant(array)` for a constant, `apply(eqn, ins)` for an equation."""
    env: dict[Any, Any] = {}

    def read(v: Any) -> Any:
        aval = v.aval
        return constant(np.asarray(v.val, aval.dtype)) if isinstance(v, Literal) else env[v]

    env.update(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        env.update(zip(eqn.outvars, apply(eqn, ins), strict=True))
    return [read(v) for v in jaxpr.outvars]
