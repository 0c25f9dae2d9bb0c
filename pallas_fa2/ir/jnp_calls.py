"""Recognizes calls of jax.numpy's `//` and `%`, whose jaxprs are several operations, in a mask's or score's code."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.ir.trace import make_jaxpr_off_mesh

# The names of jax.numpy's functions.
DIVIDE, REMAINDER = "floor_divide", "remainder"


def jnp_call(eqn: Any) -> str | None:
    """Return which of the two functions an equation calls, or None; a user's function may have the same name."""
    name = eqn.params.get("name")
    if name not in (DIVIDE, REMAINDER) or len(eqn.invars) != 2:
        return None
    x, y = (v.aval for v in eqn.invars)
    # Under x64, Python's integers are 64 bits wide and weakly typed.
    if x.dtype != y.dtype and not (x.dtype == jnp.int32 and y.dtype == jnp.int64 and y.weak_type):
        return None
    avals = tuple((v.shape, v.dtype.name, v.weak_type) for v in (x, y))
    code = _jaxpr_text(name, avals, jax.config.jax_enable_x64)  # pyright: ignore
    return name if str(eqn.params.get("jaxpr")) == code else None


@functools.lru_cache(maxsize=512)
def _jaxpr_text(name: str, avals: tuple, x64: bool) -> str:
    args = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
    return str(make_jaxpr_off_mesh(getattr(jnp, name), *args).eqns[0].params.get("jaxpr"))
