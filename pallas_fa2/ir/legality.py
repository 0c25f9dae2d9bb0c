"""Which primitives masks and scores may use on register tiles."""

from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr

# These are exact and the same in every context, as masks require: a tile that is classified as empty or full must be.
# (The kernels divide approximately, and a product with a sum may be rounded once or twice.)
INTEGER = {
    *("add", "sub", "mul", "neg", "abs", "sign", "div", "rem", "max", "min", "clamp"),
    *("and", "or", "xor", "not", "shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type"),
}
EXACT = {
    *("add", "sub", "neg", "abs", "max", "min", "clamp"),
    *("eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type"),
}
# Scores may also compute these.
REAL = EXACT | {
    *("mul", "div", "sign", "integer_pow", "square", "one_minus_square", "sqrt", "rsqrt"),
    *("add_any", "stop_gradient", "copy"),
    *("exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "sin", "cos"),
}
DTYPES = ("bool", "int32", "uint32", "float32")
# Scores read these and convert them to float32, in which the kernels hold them; their gradients are not rounded either.
NARROW = ("bfloat16", "float16")


class AllowedPrimitives(NamedTuple):
    """The primitives that may read and write float32, and those that may read and write floats of 16 bits."""

    real: set[str]
    reads_narrow: set[str]
    writes_narrow: set[str]


_ON_NARROW = {"convert_element_type", "add_any", "neg", "select_n", "mul"}
MASK = AllowedPrimitives(EXACT, set(), set())
SCORE = AllowedPrimitives(REAL, {"convert_element_type"}, set())
GRADIENT = AllowedPrimitives(REAL, _ON_NARROW, _ON_NARROW)


def unsupported_reason(code: ClosedJaxpr, allowed: AllowedPrimitives, owner: str) -> str | None:
    """Return which operation of a mask's or score's code no kernel can run, or None."""
    reasons = []

    def apply(eqn: Any, constant: list[bool]) -> list[bool]:
        if (inner := inner_jaxpr(eqn)) is not None:
            return interpret_jaxpr(*inner, constant, lambda _: True, apply)
        name = eqn.primitive.name
        if name == "convert_element_type" and constant == [True]:
            return constant
        for v in (*eqn.invars, *eqn.outvars):
            dtype = v.aval.dtype.name
            if dtype in NARROW:
                names = allowed.writes_narrow if v in eqn.outvars else allowed.reads_narrow
            else:
                names = allowed.real if dtype == "float32" else INTEGER
            if v.aval.shape != () or dtype not in DTYPES + NARROW or name not in names:
                reasons.append(f"{owner} compute no {name} of {dtype}{list(v.aval.shape)}")
        return [False] * len(eqn.outvars)

    interpret_jaxpr(
        code.jaxpr, code.consts, [False] * len(code.jaxpr.invars), lambda _: True, apply
    )
    return next(iter(reasons), None)
