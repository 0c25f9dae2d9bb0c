"""`x // n` and `x % n` for integers in one operation (for ptxas, up to four) instead of jax.numpy's eight.

Masks apply them to indices: rows of an image, chunks, every n-th token.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.ir.comparisons import INT32_MAX
from pallas_fa2.ir.jnp_calls import DIVIDE, jnp_call
from pallas_fa2.ir.tile_values import TargetOps, TileValue, bind


def simplify_floor_division(
    eqn: Any, ins: Sequence[TileValue], shape: tuple[int, ...], ops: TargetOps
) -> TileValue | None:
    """Evaluate int32 `//` or `%` by a known power of two, or of a nonnegative dividend by a known positive divisor.

    Return None for any other equation.
    """
    if (name := jnp_call(eqn)) is None:
        return None
    if any(v.aval.shape or v.aval.dtype != jnp.int32 for v in (eqn.invars[0], *eqn.outvars)):
        return None
    x, n = ins
    if isinstance(x.array, np.ndarray) or not isinstance(n.array, np.ndarray):
        return None
    if not 1 <= (divisor := int(n.array)) <= INT32_MAX:
        return None
    divides = name == DIVIDE
    if divisor.bit_count() == 1:  # for a dividend of any sign
        primitive = lax.shift_right_arithmetic_p if divides else lax.and_p
        operand = divisor.bit_length() - 1 if divides else divisor - 1
    elif x.nonnegative:  # the primitives round towards 0
        primitive, operand = lax.div_p if divides else lax.rem_p, divisor
    else:
        return None
    # The result gets no `max_abs`: comparisons of sums of bounded values take more predicate registers than there are.
    result = bind(primitive, [x, TileValue(np.int32(operand))], shape, ops)
    return result._replace(nonnegative=x.nonnegative or not divides)
