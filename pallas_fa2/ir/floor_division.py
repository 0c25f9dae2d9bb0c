"""`x // n` and `x % n` of integers, which jnp rounds down by eight operations, in one (for ptxas, up to four).

Masks have them of indices: rows of an image, chunks, every n-th token.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.ir.comparisons import INT32_MAX
from pallas_fa2.ir.tile_values import TargetOps, TileValue, bind

# As jnp calls them.
DIVIDE, REMAINDER = "floor_divide", "remainder"


def simplify_floor_division(
    eqn: Any, ins: Sequence[TileValue], shape: tuple[int, ...], functions: TargetOps
) -> TileValue | None:
    """The result, if the equation is one of the two, its divisor a known power of two, or a known number above 0 and
    what it divides natural."""
    name = eqn.params.get("name")
    if name not in (DIVIDE, REMAINDER) or not _is_jnp_call(name, eqn):
        return None
    x, n = ins
    if isinstance(x.array, np.ndarray) or not isinstance(n.array, np.ndarray):
        return None
    if not 1 <= (divisor := int(n.array)) <= INT32_MAX:
        return None
    divides = name == DIVIDE
    if divisor.bit_count() == 1:  # whatever the sign
        primitive = lax.shift_right_arithmetic_p if divides else lax.and_p
        number = divisor.bit_length() - 1 if divides else divisor - 1
    elif x.nonnegative:  # towards 0
        primitive, number = lax.div_p if divides else lax.rem_p, divisor
    else:
        return None
    # No bound of it: what compares sums of bounded numbers takes more predicates than there are.
    found = bind(primitive, [x, TileValue(np.int32(number))], shape, functions)
    return found._replace(nonnegative=x.nonnegative or not divides)


def _is_jnp_call(name: str, eqn: Any) -> bool:
    """Whether it calls jnp's function, of int32, and none of a user's that has its name."""
    if (len(eqn.invars), len(eqn.outvars)) != (2, 1):
        return False
    # Under x64, Python's integers are 64 bits wide.
    args = [x.aval for x in eqn.invars]
    dtypes = [x.aval.dtype.name for x in (*eqn.outvars, *eqn.invars)]
    scalars = all(x.shape == () for x in args)
    if not scalars or dtypes not in (["int32"] * 3, ["int32", "int32", "int64"]):
        return False
    return str(eqn.params["jaxpr"]) == _code(name, dtypes[2], *(x.weak_type for x in args))


@functools.cache
def _code(name: str, divisor: str, *weak: bool) -> str:
    dtypes = zip(("int32", divisor), weak, strict=True)
    args = [jax.ShapeDtypeStruct((), dtype, weak_type=x) for dtype, x in dtypes]
    (eqn,) = jax.make_jaxpr(getattr(jnp, name))(*args).eqns
    return str(eqn.params["jaxpr"])
