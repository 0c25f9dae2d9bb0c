"""Proves from a mask's code that every query attends to a key and every key is attended to.

If so, no token is masked in all its pairs, whose values (NaN, perhaps) a kernel must keep out of the result. With as
many queries as keys it is enough that every token attends to itself: the code is interpreted with one token as query
and as key, by value numbering (what is computed twice from the same values has the same name, and is equal) and by
`intervals`. Otherwise, where a mask reads positions alone, some pairs of tokens are tried. Where the code proves
nothing, the data may, on the device (`batch_entries_without_self_attention`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import jaxpr_as_fun

from pallas_fa2.ir import block_classes, intervals
from pallas_fa2.ir.arrays import K_AXIS, NUM_LEADING_AXES, Q_AXIS, AuxArrays, default_positions
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.intervals import Interval

SCALAR = (1,) * NUM_LEADING_AXES


class NumberedValue(NamedTuple):
    """The range of a value, and a name that only values share which are certainly equal."""

    name: Any
    range: Interval


@functools.lru_cache(maxsize=512)
def mask_covers_every_token(spec: CallSpec) -> bool:
    """Return whether the code proves that every query has a key and every key a query."""
    if spec.mask is None or spec.has_explicit_positions or not (spec.q_len and spec.kv_len):
        return False
    if spec.q_len == spec.kv_len and _every_token_attends_to_itself(spec):
        return True
    return len(spec.mask.jaxpr.in_avals) == 2 and _every_token_has_a_witness(spec)


def batch_entries_without_self_attention(spec: CallSpec, operands: Operands) -> jax.Array:
    """Return int32 `[B]`: 0 where by the mask's data every token of an entry attends to itself, otherwise 1.

    It is 1 where queries and keys are not the same tokens, or the mask reads pairwise arrays.
    """
    assert spec.mask is not None
    nodes = jax.tree.leaves(operands.mask, is_leaf=_is_aux)
    if spec.q_len != spec.kv_len or any(node.pairwise for node in nodes):
        return jnp.ones(spec.batch, jnp.int32)

    def to_query_axis(arrays: Any) -> Any:
        return jax.tree.map(lambda x: x.swapaxes(Q_AXIS, K_AXIS), arrays)

    def pair_with_itself(node: AuxArrays) -> AuxArrays:
        k_tokens, pairwise_k = to_query_axis(node.k_tokens), to_query_axis(node.pairwise_k)
        return dataclasses.replace(node, k_tokens=k_tokens, pairwise_k=pairwise_k)

    data = jax.tree.map(pair_with_itself, operands.mask, is_leaf=_is_aux)
    if operands.q_index is None:
        q_index = k_index = default_positions(spec.q_len, Q_AXIS)
    else:
        q_index, k_index = operands.q_index, to_query_axis(operands.k_index)
    visible = spec.mask.on_leading_axes(q_index, k_index, data)
    all_visible = jnp.all(visible, range(1, NUM_LEADING_AXES))
    return jnp.broadcast_to(~all_visible, spec.batch).astype(jnp.int32)


def _is_aux(node: Any) -> bool:
    return isinstance(node, AuxArrays)


def _every_token_has_a_witness(spec: CallSpec) -> bool:
    """Return whether every token attends to or from the token at its own index or at its own distance to the end.

    Where there is no such token, the nearest one is tried.
    """
    lengths = spec.q_len, spec.kv_len
    assert spec.mask is not None
    visible = jax.vmap(jaxpr_as_fun(spec.mask.jaxpr))

    def all_covered(side: int) -> jax.Array:
        length, partner_length = lengths[side], lengths[1 - side]
        index = jnp.arange(length, dtype=jnp.int32)
        covered = []
        for shift in (0, partner_length - length):
            pair = index, jnp.clip(index + shift, 0, partner_length - 1)
            covered += visible(*(pair if side == 0 else pair[::-1]))
        return jnp.all(covered[0] | covered[1])

    return bool(block_classes.eval_at_trace_time(lambda: all_covered(0) & all_covered(1)))


def _every_token_attends_to_itself(spec: CallSpec) -> bool:
    assert spec.mask is not None
    code, names = spec.mask.jaxpr, _argument_names(spec)

    def attends_to_itself() -> jax.Array:
        args = [
            NumberedValue(name, intervals.top(SCALAR, aval.dtype))
            for name, aval in zip(names, cast(list[ShapedArray], code.in_avals), strict=True)
        ]
        (out,) = interpret_jaxpr(code.jaxpr, code.consts, args, _constant, _apply)
        return out.range.lo

    return bool(block_classes.eval_at_trace_time(attends_to_itself).all())


def _argument_names(spec: CallSpec) -> list[int]:
    """Number the arguments of the mask's code; the key has the number of the query, and so have data that they
    share."""
    assert spec.mask is not None
    _, structure = spec.mask.key
    q_index, k_index, data = jax.tree.unflatten(structure, range(structure.num_leaves))
    same = {k_index: q_index}
    for node in jax.tree.leaves(data, is_leaf=_is_aux):
        same |= {node.k_tokens[name]: node.q_tokens[name] for name in node.shared}
    return [same.get(i, i) for i in range(structure.num_leaves)]


def _constant(x: Any) -> NumberedValue:
    x = np.asarray(x)
    return NumberedValue(_constant_name(x), Interval(*[jnp.asarray(x).reshape(SCALAR)] * 2))


def _constant_name(x: np.ndarray) -> tuple:
    return x.dtype.name, x.tobytes()


def _is_at_most(a: Any, b: Any) -> bool:
    """Return whether by its name a is a minimum of b and some value, or b a maximum of a and some value."""

    def is_operand(operation: str, name: Any, operand: Any) -> bool:
        return isinstance(name, tuple) and name[0] == operation and operand in name[2:-1]

    return is_operand("min", a, b) or is_operand("max", b, a)


def _apply(eqn: Any, ins: list[NumberedValue]) -> list[NumberedValue]:
    inner = inner_jaxpr(eqn)
    if inner is not None and intervals.jnp_rule(eqn) is None:
        return interpret_jaxpr(*inner, ins, _constant, _apply)
    operation, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    if len(ins) == 2 and jnp.issubdtype(dtype, jnp.integer):
        a, b = (x.name for x in ins)
        if operation in ("add", "sub") and b == _constant_name(np.zeros((), dtype)):
            return [ins[0]]
        if operation == "sub" and a == b:
            return [_constant(np.zeros((), dtype))]
        if a == b and operation in ("eq", "le", "ge"):
            return [_constant(np.ones((), bool))]
        least, most = (b, a) if operation == "ge" else (a, b)
        if operation in ("le", "ge") and _is_at_most(least, most):
            return [_constant(np.ones((), bool))]
    name = operation, str(eqn.params), *(x.name for x in ins)
    ranges = intervals.apply_rule(eqn, [x.range for x in ins])
    return [NumberedValue((*name, i), x) for i, x in enumerate(ranges)]
