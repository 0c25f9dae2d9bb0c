"""What a function reads beside its arguments, as a key: equal keys of one function mean equal code.

A mask or score may read globals, closure cells, defaults and attributes. A notebook changes them between two
calls, and what was traced before must then be traced again. What cannot be followed (arrays, properties,
imports within the function) has no key, and such a function is traced at every call.
"""

import builtins
import dis
import functools
import types
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

# Functions of these packages read nothing that a program changes.
STATELESS_PACKAGES = {"jax", "jaxlib", "numpy", "math", "operator", "builtins", "pallas_fa2"}
# Builtins that reach what the names in a function's code do not tell.
REFLECTIVE = {"breakpoint", "eval", "exec", "getattr", "globals", "input", "locals", "open", "vars"}
# A container with more elements costs more to compare than a function to trace.
MAX_ELEMENTS = 64


class _Unknown(Exception):
    """What a value is cannot be told by a key."""


class _Names(NamedTuple):
    """The names in a function's code, those of functions within it included."""

    globals: tuple[str, ...]
    all: frozenset[str]  # attributes among them
    is_opaque: bool  # it imports modules or assigns globals


def fingerprint(value: Any) -> Hashable | None:
    """A key of what a function (or a value that one reads) is now; None where there is none."""
    names: set[str] = set()
    try:
        while True:  # until no function that is reached reads a name that was not known
            known = len(names)
            key = _Reader(names).key(value)
            if len(names) == known:
                return key
    except _Unknown:
        return None


class _Reader:
    """Follows what functions read; of modules, classes and objects the attributes `names` alone."""

    def __init__(self, names: set[str]):
        self.names = names
        self.visited: dict[int, int] = {}

    def key(self, value: Any) -> Hashable:
        if value is None or isinstance(value, bool | int | str | bytes | np.dtype):
            return type(value), value
        if isinstance(value, float | complex):
            return type(value), repr(value)  # tells -0.0 from 0.0, and NaN is itself
        if isinstance(value, np.generic):
            return type(value), value.tobytes()
        if _is_stateless(value):
            return value
        if id(value) in self.visited:
            return "again", self.visited[id(value)]
        self.visited[id(value)] = len(self.visited)
        if isinstance(value, tuple | list | dict):
            return type(value), self._elements(value)
        if isinstance(value, functools.partial):
            return functools.partial, self._keys(value.func, value.args, value.keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType, self._keys(value.__self__, value.__func__)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            return value.__name__, self._attributes(vars(value))
        return self._object(value)

    def _keys(self, *values: Any) -> tuple:
        return tuple(self.key(x) for x in values)

    def _elements(self, value: Any) -> tuple:
        if len(value) > MAX_ELEMENTS:
            raise _Unknown
        return self._keys(*(value if not isinstance(value, dict) else (*value, *value.values())))

    def _attributes(self, fields: Mapping[str, Any]) -> tuple:
        return tuple((n, self.key(fields[n])) for n in sorted(self.names & fields.keys()))

    def _object(self, value: Any) -> Hashable:
        """Of an object whose attributes are those in its dictionary and its class's."""
        cls = type(value)
        if isinstance(value, type) or cls.__getattribute__ is not object.__getattribute__:
            raise _Unknown
        if not hasattr(value, "__dict__"):  # an object of a class written in C
            raise _Unknown
        mro = [c for c in cls.__mro__ if c is not object]
        if any("__getattr__" in vars(c) or "__slots__" in vars(c) for c in mro):
            raise _Unknown
        if any(isinstance(vars(c).get("__call__"), types.FunctionType) for c in mro):
            self.names.add("__call__")
        return cls, self._attributes(vars(value)), tuple(self._attributes(vars(c)) for c in mro)

    def _function(self, fn: types.FunctionType) -> Hashable:
        names = _names(fn.__code__)
        if names.is_opaque:
            raise _Unknown
        self.names |= names.all
        values: list = [fn.__defaults__, fn.__kwdefaults__]
        for cell in fn.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # it holds nothing yet
                values.append(None)
        for name in names.globals:
            if name not in fn.__globals__ and not hasattr(builtins, name):
                raise _Unknown  # and calling it raises NameError
            values.append(fn.__globals__.get(name, getattr(builtins, name, None)))
        return fn.__code__, self._keys(*values)


def _is_stateless(value: Any) -> bool:
    """Whether it is a module, function or class of a package that keeps no state, or an object of its classes."""
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in STATELESS_PACKAGES
    if isinstance(value, np.ufunc):
        return True
    if not callable(value) or isinstance(value, types.MethodType | functools.partial):
        return False
    if getattr(value, "__name__", "") in REFLECTIVE:
        raise _Unknown
    module = getattr(value, "__module__", None)
    known = isinstance(module, str) and module.split(".")[0] in STATELESS_PACKAGES
    return known and type(value).__hash__ is not None


@functools.lru_cache(maxsize=512)
def _names(code: types.CodeType) -> _Names:
    read, opaque = [], False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.append(instruction.argval)
        opaque |= instruction.opname in ("IMPORT_NAME", "STORE_GLOBAL")
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return _Names(
        tuple(dict.fromkeys([*read, *(n for i in inner for n in i.globals)])),
        frozenset(code.co_names).union(*(i.all for i in inner)),
        opaque or any(i.is_opaque for i in inner),
    )
