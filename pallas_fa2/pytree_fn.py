"""Pytrees of code and arrays: the base classes of masks, scores and users' functions of two tokens."""

import dataclasses
import importlib
import inspect
import operator
from collections.abc import Callable, Hashable
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_fa2.fingerprint import fingerprint, named
from pallas_fa2.ir.arrays import AuxArrays
from pallas_fa2.ir.tokens import Arrays, Context, Token, TokenMisuse


def is_static(value: Any) -> bool:
    if isinstance(value, StaticPytree):
        return False
    return value is None or isinstance(value, int | float | str) or callable(value)


def short_repr(value: Any) -> str:
    """Describe a value: arrays by dtype and shape, functions by name."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {short_repr(v)}" for k, v in value.items()) + "}"
    if hasattr(value, "shape"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return getattr(value, "__name__", repr(value))


class StaticPytree:
    """A frozen dataclass as a pytree: numbers, strings and functions are static, other fields are leaves.

    Two are equal if they have the same code and the same objects as leaves, so that `jit` does not trace an equal
    static argument, or field of a Flax module, again.
    """

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(cls, cls._flatten, cls._unflatten)  # pyright: ignore[reportArgumentType]

    def _flatten(self) -> tuple[list, tuple]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        # A leaf stays one, whatever a transformation has replaced it by (an axis, None).
        names = getattr(self, "_leaves", None)
        if names is None:
            names = tuple(n for n, v in fields.items() if not is_static(v))
        static = tuple((n, v) for n, v in fields.items() if n not in names)
        return [fields[n] for n in names], (names, static)

    @classmethod
    def _unflatten(cls, aux: tuple, children: Any) -> "StaticPytree":
        names, static = aux
        node = object.__new__(cls)
        object.__setattr__(node, "_leaves", names)
        for name, value in (*zip(names, children, strict=True), *static):
            object.__setattr__(node, name, value)
        return node

    def fingerprint(self) -> Hashable | None:
        """Return a key of what its code reads beside its arguments, or None if there is none (`fingerprint.py`)."""
        if type(self).__module__.split(".")[0] != __package__:
            return None  # a user's class
        keys = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, StaticPytree):
                keys.append(value.fingerprint())
            elif callable(value):
                keys.append(fingerprint(value))
        return None if None in keys else tuple(keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StaticPytree):
            return NotImplemented
        (leaves, tree), (other_leaves, other_tree) = jax.tree.flatten(self), jax.tree.flatten(other)
        return tree == other_tree and all(map(operator.is_, leaves, other_leaves))

    def __hash__(self) -> int:
        leaves, tree = jax.tree.flatten(self)
        return hash((tree, *map(id, leaves)))

    def __repr__(self) -> str:
        fields = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        text = (
            f"{n}={short_repr(v)}"
            for n, v in fields
            if not (v is None or (isinstance(v, dict) and not v))
        )
        return f"{type(self).__name__}({', '.join(text)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class UserFn(StaticPytree):
    """A user's function and its data, by kind; calling it returns a copy with more data."""

    fn: Callable
    # Data of queries and keys: one leaf, so that a transformed function knows that they are the same.
    tokens: Arrays = dataclasses.field(default_factory=dict)
    q_tokens: Arrays = dataclasses.field(default_factory=dict)
    k_tokens: Arrays = dataclasses.field(default_factory=dict)
    heads: Arrays = dataclasses.field(default_factory=dict)
    params: Arrays = dataclasses.field(default_factory=dict)
    pairs: Arrays = dataclasses.field(default_factory=dict)
    entries: Arrays = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        *,
        tokens: Arrays | None = None,
        q_tokens: Arrays | None = None,
        k_tokens: Arrays | None = None,
        heads: Arrays | None = None,
        params: Arrays | None = None,
        pairs: Arrays | None = None,
        entries: Arrays | None = None,
    ) -> Self:
        kinds = [f.name for f in dataclasses.fields(self)][1:]
        new = tokens, q_tokens, k_tokens, heads, params, pairs, entries
        data = {}
        for kind, arrays in zip(kinds, new, strict=True):
            old = getattr(self, kind).items()
            is_side = kind in ("q_tokens", "k_tokens")
            kept = {n: x for n, x in old if not (is_side and n in (tokens or {}))}
            added = (arrays or {}).items()
            data[kind] = kept | {n: x if hasattr(x, "shape") else jnp.asarray(x) for n, x in added}
        return dataclasses.replace(self, **data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a decorated function by its name, by which its module has an object like this one instead."""
        name = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", None)
        decorated = named(*name)
        if not isinstance(decorated, UserFn) or decorated.fn is not self.fn:
            return super().__reduce_ex__(protocol)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del fields["fn"]
        return _unpickle_decorated, (type(self), *name, fields)

    def data(self) -> AuxArrays:
        q, k = ({**self.tokens, **side} for side in (self.q_tokens, self.k_tokens))
        return AuxArrays(q, k, self.heads, self.params, self.pairs, self.entries)


def _unpickle_decorated(cls: type, module: str, name: str, fields: dict[str, Any]) -> Any:
    importlib.import_module(module)
    return cls(named(module, name).fn, **fields)


def call_with_context(fn: Callable, args: tuple, c: Context) -> Any:
    """Call `fn(*args, c)`, or `fn(*args)` if it requires no further argument."""
    signature = inspect.signature(fn)
    for fn_args in (args, (*args, c)):
        try:
            signature.bind(*fn_args)
        except TypeError:
            continue
        return _call_user_fn(fn, fn_args)
    names = "q, k" if len(args) == 2 else "s, q, k"
    raise TypeError(
        f"a function of two tokens must take ({names}) or ({names}, c), but {short_repr(fn)} takes "
        f"{signature}; positions are q.index and k.index, and the number of a head is data: "
        "heads={'head': jnp.arange(N)}"
    )


def _call_user_fn(fn: Callable, args: tuple) -> Any:
    """Call a user's function; errors of Python and JAX about tokens and traced values name it and the remedy."""
    try:
        result = fn(*args)
    except jax.errors.TracerBoolConversionError as e:
        raise TypeError(
            f"{short_repr(fn)} takes the truth of a traced value, by if, and, or, not, a chain of comparisons or a "
            "loop, but it is one program for all pairs of tokens; write &, | and ~ (with brackets around "
            "comparisons), and jnp.where(condition, a, b) for if"
        ) from e
    except (*NEEDS_VALUES, jax.errors.ConcretizationTypeError) as e:
        raise TypeError(
            f"{short_repr(fn)} needs the value of a traced one, by int(), float(), range(), an index into a list or a "
            "function of NumPy, but it is one program for all pairs of tokens; compute with jax.numpy, and cast by "
            ".astype(...)"
        ) from e
    except TokenMisuse as e:
        raise TypeError(f"{short_repr(fn)}: {e}") from None
    except TypeError as e:
        if f"{Token.__module__}.{Token.__name__}" not in str(e):
            raise
        # This is jax.numpy's error about an argument that is no array.
        raise TypeError(
            f"{short_repr(fn)}: a token has no value of its own; write q.index or k.index"
        ) from e
    if result is None:
        raise TypeError(
            f"{short_repr(fn)} must return its result, but it returns None; write return"
        )
    return result


NEEDS_VALUES = jax.errors.TracerIntegerConversionError, jax.errors.TracerArrayConversionError
