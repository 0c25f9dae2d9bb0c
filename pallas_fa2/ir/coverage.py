"""Whether a mask leaves no query without a key and no key without a query, by its code.

If so, there is nothing whose values a kernel must keep from spreading. As many queries as keys: if every
token sees itself. The code is followed with one token in both places. What is computed twice from the
same values has the same name, and is equal; for all else there are the `intervals`. Otherwise,
where a mask reads positions alone, some pairs are tried. What the code does not say, the data may, on the
device (`some_see_not_themselves`).
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
    """A value's range, and a name that it shares with values that are surely equal to it."""

    name: Any
    range: Interval


@functools.lru_cache(maxsize=512)
def mask_covers_every_token(spec: CallSpec) -> bool:
    """False where the code does not say so."""
    if spec.mask is None or spec.has_explicit_positions or not (spec.q_len and spec.kv_len):
        return False
    if spec.q_len == spec.kv_len and _every_token_sees_itself(spec):
        return True
    return len(spec.mask.jaxpr.in_avals) == 2 and _every_token_has_a_witness(spec)


def batch_entries_without_self_attention(spec: CallSpec, operands: Operands) -> jax.Array:
    """Of each batch entry 0 where every token surely sees itself, by the mask's data, else 1; int32 `[B]`.

    It is 1 where queries and keys are not the same tokens, or the mask reads data of pairs.
    """
    assert spec.mask is not None
    nodes = jax.tree.leaves(operands.mask, is_leaf=_is_data)
    if spec.q_len != spec.kv_len or any(node.pairwise for node in nodes):
        return jnp.ones(spec.batch, jnp.int32)

    def of_queries(arrays: Any) -> Any:
        return jax.tree.map(lambda x: x.swapaxes(Q_AXIS, K_AXIS), arrays)

    def same_token(node: AuxArrays) -> AuxArrays:
        return dataclasses.replace(
            node, k_tokens=of_queries(node.k_tokens), pairwise_k=of_queries(node.pairwise_k)
        )

    data = jax.tree.map(same_token, operands.mask, is_leaf=_is_data)
    if operands.q_index is None:
        q_index = k_index = default_positions(spec.q_len, Q_AXIS)
    else:
        q_index, k_index = operands.q_index, of_queries(operands.k_index)
    sees = jnp.all(spec.mask.on_leading_axes(q_index, k_index, data), range(1, NUM_LEADING_AXES))
    return jnp.broadcast_to(~sees, spec.batch).astype(jnp.int32)


def _is_data(node: Any) -> bool:
    return isinstance(node, AuxArrays)


def _every_token_has_a_witness(spec: CallSpec) -> bool:
    """Against the token of its own index, or with the same distance to the end; or the nearest there
    is."""
    lengths = spec.q_len, spec.kv_len
    assert spec.mask is not None
    sees = jax.vmap(jaxpr_as_fun(spec.mask.jaxpr))

    def takes_part(side: int) -> jax.Array:
        own, others = lengths[side], lengths[1 - side]
        index = jnp.arange(own, dtype=jnp.int32)
        found = []
        for shift in (0, others - own):
            pair = index, jnp.clip(index + shift, 0, others - 1)
            found += sees(*(pair if side == 0 else pair[::-1]))
        return jnp.all(found[0] | found[1])

    return bool(block_classes.eval_at_trace_time(lambda: takes_part(0) & takes_part(1)))


def _every_token_sees_itself(spec: CallSpec) -> bool:
    assert spec.mask is not None
    code, names = spec.mask.jaxpr, _argument_names(spec)

    def sees_itself() -> jax.Array:
        args = [
            NumberedValue(name, intervals.top(SCALAR, aval.dtype))
            for name, aval in zip(names, cast(list[ShapedArray], code.in_avals), strict=True)
        ]
        (out,) = interpret_jaxpr(code.jaxpr, code.consts, args, _constant, _apply)
        return out.range.lo

    return bool(block_classes.eval_at_trace_time(sees_itself).all())


def _argument_names(spec: CallSpec) -> list[int]:
    """Numbers; an index of a key is that of its query, and so are data that they share."""
    assert spec.mask is not None
    _, structure = spec.mask.key
    q_index, k_index, data = jax.tree.unflatten(structure, range(structure.num_leaves))
    same = {k_index: q_index}
    for node in jax.tree.leaves(data, is_leaf=_is_data):
        same |= {node.k_tokens[name]: node.q_tokens[name] for name in node.shared}
    return [same.get(i, i) for i in range(structure.num_leaves)]


def _constant(x: Any) -> NumberedValue:
    x = np.asarray(x)
    return NumberedValue(_constant_name(x), Interval(*[jnp.asarray(x).reshape(SCALAR)] * 2))


def _constant_name(x: np.ndarray) -> tuple:
    return x.dtype.name, x.tobytes()


def _is_at_most(a: Any, b: Any) -> bool:
    """By these names: a is the smaller of b and something else, or b the larger of a and something else."""

    def is_one_of(operation: str, name: Any, other: Any) -> bool:
        return isinstance(name, tuple) and name[0] == operation and other in name[2:-1]

    return is_one_of("min", a, b) or is_one_of("max", b, a)


def _apply(eqn: Any, ins: list[NumberedValue]) -> list[NumberedValue]:
    inner = inner_jaxpr(eqn)
    if inner is not None and not intervals.is_jnp_call(eqn):
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
