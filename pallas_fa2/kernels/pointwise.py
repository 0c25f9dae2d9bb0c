"""Scalar functions of two tokens on a tile in registers.

A tile's rows are the tokens of one side, its columns those of the other. What depends on one side alone
is computed once a row or a column; only what depends on both takes a value for each element.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.tokens import Pointwise, called, follow

# Exact, and the same in every context: a tile that was found to be empty or full must be. (The kernels
# divide approximately, and a product with a sum may be rounded once or twice.)
INTEGER = {
    *("add", "sub", "mul", "neg", "abs", "sign", "div", "rem", "max", "min", "clamp"),
    *("and", "or", "xor", "not", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type"),
}
FLOAT = {
    *("add", "sub", "neg", "abs", "max", "min", "clamp"),
    *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type"),
}
DTYPES = ("bool", "int32", "uint32", "float32")


class Value(NamedTuple):
    """One number for a tile, one for each of its rows or columns, or one for each element."""

    array: Any
    axes: tuple[int, ...] = ()  # of the tile, that it varies over


def refuses(jaxpr: Any) -> str | None:
    """What of a mask's code no kernel runs."""
    for eqn in jaxpr.eqns:
        if (inner := called(eqn)) is not None:
            if reason := refuses(inner[0]):
                return reason
            continue
        name = eqn.primitive.name
        for v in (*eqn.invars, *eqn.outvars):
            dtype = v.aval.dtype.name
            allowed = FLOAT if dtype == "float32" else INTEGER
            if v.aval.shape != () or dtype not in DTYPES or name not in allowed:
                return f"its masks compute no {name} of {dtype}{list(v.aval.shape)}"
    return None


def evaluate(code: Pointwise, args: list[Value], shape: tuple[int, int]) -> Value:
    def apply(eqn: Any, ins: list[Value]) -> list[Value]:
        if (inner := called(eqn)) is not None:
            return follow(*inner, ins, Value, apply)
        axes = tuple(sorted({axis for x in ins for axis in x.axes}))
        operands = [spread(x, axes, shape) for x in ins]
        return [Value(eqn.primitive.bind(*operands, **eqn.params), axes)]

    (out,) = follow(code.jaxpr.jaxpr, code.jaxpr.consts, args, Value, apply)
    return out


def spread(x: Value, axes: tuple[int, ...], shape: tuple[int, int]) -> Any:
    """As an array over these axes of the tile."""
    if x.axes == axes:
        return x.array if isinstance(x.array, jax.Array) else jnp.asarray(x.array)
    sizes = tuple(shape[axis] for axis in axes)
    return lax.broadcast_in_dim(x.array, sizes, [axes.index(axis) for axis in x.axes])
