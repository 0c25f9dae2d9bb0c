"""Traces scalar functions of two tokens, and gives each a cache key."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_fa2.ir.arrays import NUM_LEADING_AXES, vmap_over_leading_axes
from pallas_fa2.ir.mesh import varying_axes, without_mesh
from pallas_fa2.ir.ptxas_safe import eval_mask_ptxas_safe


@dataclasses.dataclass(frozen=True, eq=False)
class TracedFn:
    """A traced scalar function, equal to another if their jaxprs are: a new lambda of the same code does not
    recompile."""

    name: str
    jaxpr: ClosedJaxpr
    key: tuple
    fn: Callable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFn) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> jax.Array:
        """Evaluate it on scalars."""
        if self.jaxpr.out_avals[0].dtype == jnp.bool_:  # pyright: ignore[reportAttributeAccessIssue]
            return eval_mask_ptxas_safe(self.jaxpr, jax.tree.leaves(args))
        if any(map(varying_axes, jax.tree.leaves(args))):
            # Constants of the jaxpr vary over no mesh axis, and primitives do not take them with what does.
            return self.fn(*args)
        return jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args))[0]

    def on_leading_axes(self, *args: Any) -> jax.Array:
        """Evaluate it on arrays with the five leading axes, which broadcast against each other."""
        return vmap_over_leading_axes(self, *args)


def make_jaxpr_off_mesh(fn: Callable, *scalars: Any) -> ClosedJaxpr:
    with without_mesh():
        return jax.make_jaxpr(fn)(*scalars)


def trace(name: str, fn: Callable, *args: Any) -> TracedFn:
    """Trace `fn` on the element types of `args` (arrays with the five leading axes)."""
    scalars = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[NUM_LEADING_AXES:], x.dtype), args
    )
    jaxpr = make_jaxpr_off_mesh(fn, *scalars)
    for const in _captured(jaxpr):
        raise ValueError(
            f"{name} captures an array of shape {jnp.shape(const)}; a mask or score function may "
            "capture Python numbers only. Pass the array as tokens=, heads=, params= or pairs= and "
            "read it from q, k or c"
        )
    key = _key(jaxpr)
    if "custom_jvp_call" in key[0]:
        key = *key, _key(_derivative(fn, scalars))
    return TracedFn(name, jaxpr, (key, jax.tree.structure(args)), fn)


def _key(jaxpr: ClosedJaxpr) -> tuple:
    """Return the text of a jaxpr without addresses, and the objects that it shows by them, such as callbacks."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr)), *_shown_by_address(jaxpr.jaxpr)


def _shown_by_address(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _shown_by_address(getattr(inner, "jaxpr", inner))
                # The derivative tells what a custom rule for jvp computes.
                elif eqn.primitive.name != "custom_jvp_call" and " at 0x" in str(inner):
                    yield inner if isinstance(inner, Hashable) else object()


def _derivative(fn: Callable, scalars: Any) -> ClosedJaxpr:
    leaves, tree = jax.tree.flatten(scalars)
    is_float = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def call(leaves: list, *floats: Any) -> Any:
        merged = list(leaves)
        for i, x in zip(is_float, floats, strict=True):
            merged[i] = x
        return fn(*jax.tree.unflatten(tree, merged))

    def tangent(leaves: list, floats: list) -> Any:
        return jax.jvp(lambda *x: call(leaves, *x), floats, floats)

    return make_jaxpr_off_mesh(tangent, leaves, [leaves[i] for i in is_float])


def _captured(jaxpr: ClosedJaxpr) -> list:
    """Return the arrays that a traced function or a function that it calls captured."""
    inner = (p for e in jaxpr.jaxpr.eqns for p in e.params.values() if isinstance(p, ClosedJaxpr))
    return [*jaxpr.consts, *(const for p in inner for const in _captured(p))]
