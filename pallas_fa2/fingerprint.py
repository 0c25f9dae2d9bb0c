"""Keys of what a function reads beside its arguments: with equal keys, one function has equal jaxprs.

A mask or score may read globals, closure cells, defaults and attributes. A notebook may change them between two calls,
and the function must then be traced again. Keys include plain values and containers, functions, methods, modules, and
objects of classes that are written in Python and have no metaclass. Anything else (arrays, properties, imports within
the function) has no key, and such a function is traced at every call.
"""

import builtins
import dis
import functools
import sys
import types
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

# Functions of these packages read no state that a program changes.
STATELESS_PACKAGES = {"jax", "jaxlib", "numpy", "math", "operator", "builtins", "pallas_fa2"}
# Builtins that read values which the names in a function's code do not reveal.
REFLECTIVE = {"breakpoint", "eval", "exec", "getattr", "globals", "input", "locals", "open", "vars"}
# Attributes of a class that neither its code reads nor its operators call.
PASSIVE = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__orig_bases__"),
    *("__init_subclass__", "__class_getitem__", "__parameters__"),
    *("__dataclass_fields__", "__dataclass_params__", "__match_args__", "__replace__"),
    *("__firstlineno__", "__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"),
    *("__abstractmethods__", "_abc_impl"),
}  # fmt: skip
# It takes longer to compare a container with more elements than to trace a function.
MAX_ELEMENTS = 64


class _Unknown(Exception):
    """A value that has no key."""


class _Names(NamedTuple):
    """The names in a function's code, including those of functions within it."""

    globals: tuple[str, ...]
    all: frozenset[str]  # including attributes
    is_opaque: bool  # it imports modules or assigns globals


def fingerprint(value: Any) -> Hashable | None:
    """Return a key of the current state of a function (or of a value that one reads), or None if there is none."""
    names: set[str] = set()
    try:
        while True:  # until no function that is reached reads a new name
            known = len(names)
            key = _Reader(names).key(value)
            if len(names) == known:
                return key
    except _Unknown:
        return None


class _Reader:
    """The traversal of what functions read; of modules, classes and objects only the attributes `names`."""

    def __init__(self, names: set[str]):
        self.names = names
        self.visited: dict[int, int] = {}

    def key(self, value: Any) -> Hashable:
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes) or isinstance(value, np.dtype):
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)  # tells -0.0 from 0.0, and NaN is itself
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if _is_stateless(value):
            return value
        if id(value) in self.visited:
            return "again", self.visited[id(value)]
        self.visited[id(value)] = len(self.visited)
        if kind in (tuple, list, dict):
            return kind, self._elements(value)
        if kind in (staticmethod, classmethod):
            return kind, self._keys(value.__func__)
        if kind is functools.partial:
            return kind, self._keys(value.func, value.args, value.keywords, vars(value))
        if kind is types.MethodType:
            return kind, self._keys(value.__self__, value.__func__)
        if kind is types.FunctionType:
            return self._function(value), self._attributes(vars(value))
        if kind is types.ModuleType and "__getattr__" not in vars(value):
            return value.__name__, self._attributes(vars(value))
        if kind is type:
            return value, self._class(value)
        return value.__class__, self._object(value)

    def _keys(self, *values: Any) -> tuple:
        return tuple(self.key(x) for x in values)

    def _elements(self, value: Any) -> tuple:
        if len(value) > MAX_ELEMENTS:
            raise _Unknown
        return self._keys(*(value if not isinstance(value, dict) else (*value, *value.values())))

    def _attributes(self, fields: Mapping[str, Any]) -> tuple:
        return tuple((n, self.key(fields[n])) for n in sorted(self.names & fields.keys()))

    def _object(self, value: Any) -> Hashable:
        """Return the key of an object whose attributes are those in its dictionary and its class's."""
        if type(type(value)) is not type or not hasattr(value, "__dict__"):
            raise _Unknown
        return self._attributes(vars(value)), self._class(type(value))

    def _class(self, cls: type) -> Hashable:
        """Return the key of a class and its bases: the attributes that code names, and operators, which it calls
        without their names. Operators of a class that is written in C have no key."""
        mro = cls.__mro__[:-1]
        for c in mro:
            own = {n: x for n, x in vars(c).items() if n not in PASSIVE}
            if type(c) is not type or {"__getattr__", "__getattribute__"} & own.keys():
                raise _Unknown
            self.names |= {n for n in own if n.startswith("__") and n.endswith("__")}
        return tuple(self._attributes(vars(c)) for c in mro)

    def _function(self, fn: types.FunctionType) -> Hashable:
        names = _names(fn.__code__)
        if names.is_opaque:
            raise _Unknown
        self.names |= names.all
        values: list = [fn.__defaults__, fn.__kwdefaults__]
        for cell in fn.__closure__ or ():
            try:
                values.append(cell.cell_contents)
            except ValueError:  # the cell is empty
                values.append(None)
        for name in names.globals:
            if name not in fn.__globals__ and not hasattr(builtins, name):
                raise _Unknown  # a call raises NameError
            values.append(fn.__globals__.get(name, getattr(builtins, name, None)))
        return fn.__code__, self._keys(*values)


def _is_stateless(value: Any) -> bool:
    """Return whether a value is a module of a package that keeps no state, or its attribute by its own name.

    A closure around a user's function is neither.
    """
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in STATELESS_PACKAGES
    if not callable(value) or isinstance(value, types.MethodType | functools.partial):
        return False
    name = getattr(value, "__name__", "")
    if name in REFLECTIVE:
        raise _Unknown
    if isinstance(value, np.ufunc | jnp.ufunc):
        return value in (getattr(np, name, None), getattr(jnp, name, None))
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or module.split(".")[0] not in STATELESS_PACKAGES:
        return False
    return named(module, getattr(value, "__qualname__", name)) is value


def named(module: str | None, qualified_name: str | None) -> Any:
    """Return what an imported module has by this name, or None."""
    value: Any = sys.modules.get(module or "")
    for name in (qualified_name or "").split("."):
        value = getattr(value, name, None)
    return value


@functools.lru_cache(maxsize=512)
def _names(code: types.CodeType) -> _Names:
    global_names, opaque = [], False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            global_names.append(instruction.argval)
        opaque |= instruction.opname in ("IMPORT_NAME", "STORE_GLOBAL")
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return _Names(
        tuple(dict.fromkeys([*global_names, *(n for i in inner for n in i.globals)])),
        frozenset(code.co_names).union(*(i.all for i in inner)),
        opaque or any(i.is_opaque for i in inner),
    )
