"""Scalar functions of two tokens on a tile in registers.

A tile's rows are the tokens of one side, its columns those of the other. What depends on one side alone
is computed once a row or a column; only what depends on both takes a value for each element.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from pallas_fa2.tokens import Pointwise

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


def _inner(eqn: Any) -> tuple[Any, Any] | None:
    """The jaxpr that an equation calls, and its constants."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None:
        return None
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def refuses(jaxpr: Any) -> str | None:
    """What of a mask's code no kernel runs."""
    for eqn in jaxpr.eqns:
        if (inner := _inner(eqn)) is not None:
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
    (out,) = _run(code.jaxpr.jaxpr, code.jaxpr.consts, args, shape)
    return out


def _run(jaxpr: Any, consts: Any, args: list[Value], shape: tuple[int, int]) -> list[Value]:
    env: dict[Any, Value] = {}

    def read(v: Any) -> Value:
        aval = v.aval
        return Value(np.asarray(v.val, aval.dtype)) if isinstance(v, Literal) else env[v]

    env.update(zip(jaxpr.constvars, map(Value, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if (inner := _inner(eqn)) is not None:
            outs = _run(*inner, ins, shape)
        else:
            axes = tuple(sorted({axis for x in ins for axis in x.axes}))
            operands = [spread(x, axes, shape) for x in ins]
            outs = [Value(eqn.primitive.bind(*operands, **eqn.params), axes)]
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def spread(x: Value, axes: tuple[int, ...], shape: tuple[int, int]) -> Any:
    """As an array over these axes of the tile."""
    if x.axes == axes:
        return x.array if isinstance(x.array, jax.Array) else jnp.asarray(x.array)
    sizes = tuple(shape[axis] for axis in axes)
    return lax.broadcast_in_dim(x.array, sizes, [axes.index(axis) for axis in x.axes])
