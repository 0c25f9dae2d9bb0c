"""A jaxpr as a list of functions on NumPy's arrays, called one after another: what is traced need not be compiled.

`arithmetic` knows most primitives. What a primitive does besides, or to references, is a rule of the machine that runs
the program. What neither knows is JAX's own operation, compiled by itself.
"""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal

from tests.support import arithmetic

# rule(equation) -> a function of the machine and of the values of its inputs, which returns those of its outputs
Rule = Callable[[Any], Callable[..., Sequence]]

# Of those that only call: which parameter it is that they call.
CALLED = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_partitioning": "call",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "jit": "jaxpr",
}


# Of those that hand on their arguments, in whatever layout.
SAME = {"copy", "copy_p", "layout_cast", "name", "optimization_barrier", "stop_gradient"}


def to_numpy(x: Any, dtype: Any) -> Any:
    """Keys of random numbers have no form there."""
    return x if jnp.issubdtype(dtype, jax.dtypes.extended) else np.asarray(x, dtype)


class _Step(NamedTuple):
    """run(machine, *values) -> results. One that is `pure` is run only if someone needs its results."""

    run: Callable[..., Sequence]
    inputs: list[int]
    outputs: list[int]
    avals: list
    pure: bool


class Programs:
    """Those that a trace consists of; each is made once, by whichever thread needs it first."""

    def __init__(self, rules: Mapping[Any, Rule]):
        self.rules = rules
        self._made: dict[
            int, tuple[Any, Program]
        ] = {}  # with its jaxpr, whose id no other has then
        self._lock = threading.RLock()

    def of(self, jaxpr: Any, closed: bool = True) -> "Program":
        """A program's constants are its own, or, where it is not `closed`, among what it is given."""
        with self._lock:
            if id(jaxpr) not in self._made:
                self._made[id(jaxpr)] = jaxpr, Program(self, jaxpr, closed)
            return self._made[id(jaxpr)][1]


def evaluate(fn: Callable, *args: Any) -> Any:
    """`fn(*args)` by NumPy, where nothing needs a rule."""
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves = zip(jax.tree.leaves(args), jaxpr.in_avals, strict=True)
    with np.errstate(all="ignore"):
        found = Programs({}).of(jaxpr)(None, [to_numpy(x, aval.dtype) for x, aval in leaves])
    return jax.tree.unflatten(jax.tree.structure(out), found)


class Program:
    """program(machine, values of the jaxpr's inputs) -> those of its outputs"""

    def __init__(self, programs: Programs, jaxpr: Any, closed: bool):
        self._programs = programs
        self._values: list[Any] = []  # in each place; None where it is not known yet
        self._steps: list[_Step] = []
        consts = [
            self._constant(*x) for x in zip(jaxpr.constvars, jaxpr.consts, strict=True) if closed
        ]
        self._inputs = [self._new() for _ in jaxpr.all_invars[len(consts) :]]
        self._outputs = self._add(jaxpr, consts + self._inputs)
        self._drop_unused()
        self._checked = False

    def __call__(self, machine: Any, values: Sequence) -> list:
        found = self._values.copy()
        for place, value in zip(self._inputs, values, strict=True):
            found[place] = value
        for run, inputs, outputs, avals, _ in self._steps:
            results = run(machine, *[found[place] for place in inputs])
            if not self._checked:
                _check(results, avals)
            for place, result in zip(outputs, results, strict=True):
                found[place] = result
        self._checked = True
        return [found[place] for place in self._outputs]

    def _new(self, value: Any = None) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _constant(self, variable: Any, value: Any) -> int:
        return self._new(to_numpy(value, variable.aval.dtype))

    def _add(self, jaxpr: Any, inputs: list[int]) -> list[int]:
        """Its steps; returns the places of its outputs."""
        places = dict(zip(jaxpr.all_invars, inputs, strict=True))

        def place(variable: Any) -> int:
            if isinstance(variable, Literal):
                return self._constant(variable, variable.val)
            return places[variable]

        for eqn in jaxpr.eqns:
            inputs = [place(variable) for variable in eqn.invars]
            name = eqn.primitive.name
            if name in SAME:
                outputs = inputs
            elif name in CALLED:
                called = eqn.params[CALLED[name]]
                consts = map(self._constant, called.constvars, called.consts)
                outputs = self._add(called, [*consts, *inputs])
            else:
                outputs = self._add_step(eqn, inputs)
            places |= zip(eqn.outvars, outputs, strict=True)
        return [place(variable) for variable in jaxpr.outvars]

    def _add_step(self, eqn: Any, inputs: list[int]) -> list[int]:
        run, pure = self._function_of(eqn)
        values = [self._values[place] for place in inputs]
        if pure and all(value is not None for value in values):
            with np.errstate(all="ignore"):
                return [self._new(result) for result in run(None, *values)]
        outputs = [self._new() for _ in eqn.outvars]
        avals = [variable.aval for variable in eqn.outvars]
        self._steps.append(_Step(run, inputs, outputs, avals, pure))
        return outputs

    def _function_of(self, eqn: Any) -> tuple[Callable, bool]:
        """And whether all that it does is to compute its results."""
        primitive, params = eqn.primitive, eqn.params
        if (rule := self._programs.rules.get(primitive)) is not None:
            return rule(eqn), False
        if (control := CONTROL.get(primitive.name)) is not None:
            return control(self._programs.of, params), False
        if (make := arithmetic.FUNCTIONS.get(primitive.name)) is not None:
            function = make(**params)
            return lambda _, *values: (function(*values),), True
        return functools.partial(_by_jax, primitive, params), True

    def _drop_unused(self) -> None:
        needed, kept = set(self._outputs), []
        for step in reversed(self._steps):
            if not step.pure or not needed.isdisjoint(step.outputs):
                needed.update(step.inputs)
                kept.append(step)
        self._steps = kept[::-1]


def _check(results: Sequence, avals: Sequence) -> None:
    """A program has no branches: what holds when it is first run always does."""
    for result, aval in zip(results, avals, strict=True):
        if isinstance(aval, ShapedArray):
            found, traced = (result.dtype, result.shape), (aval.dtype, aval.shape)
            if found != traced:
                raise TypeError(f"{found} where {traced} was traced")


def _by_jax(primitive: Any, params: dict, _: Any, *values: Any) -> list:
    found = primitive.bind(*map(jnp.asarray, values), **primitive.get_bind_params(params))
    return [to_numpy(x, x.dtype) for x in (found if primitive.multiple_results else [found])]


def _branches(of: Callable, params: dict) -> Callable:
    branches = [of(jaxpr) for jaxpr in params["branches"]]

    def run(machine: Any, which: Any, *values: Any) -> list:
        return branches[min(max(int(which), 0), len(branches) - 1)](machine, values)

    return run


def _loop(of: Callable, params: dict) -> Callable:
    condition, body = of(params["cond_jaxpr"]), of(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def run(machine: Any, *values: Any) -> Sequence:
        asked, read, carry = values[:first], values[first:second], values[second:]
        while condition(machine, (*asked, *carry))[0]:
            carry = body(machine, (*read, *carry))
        return carry

    return run


def _scan(of: Callable, params: dict) -> Callable:
    body, length = of(params["jaxpr"]), params["length"]
    steps = range(length)[::-1] if params["reverse"] else range(length)
    inputs = params["ft_in"].update(params["jaxpr"].in_avals).unpack()
    consts, carried = (len(list(part)) for part in inputs[:2])

    def run(machine: Any, *values: Any) -> Sequence:
        read, carry, each = (
            values[:consts],
            values[consts : consts + carried],
            values[consts + carried :],
        )
        outs: list = [None] * length
        for step in steps:
            found = body(machine, (*read, *carry, *(x[step] for x in each)))
            carry, outs[step] = found[:carried], found[carried:]
        return [*carry, *map(np.stack, zip(*outs, strict=True))]

    return run


# of(jaxpr) is its program.
CONTROL: dict[str, Callable[[Callable, dict], Callable]] = {
    "cond": _branches,
    "while": _loop,
    "scan": _scan,
}
