"""Masks: which pairs of tokens attend to each other.

A mask is a pytree. Its arrays are leaves, its code and Python numbers are static, and it holds no
shape, so that one object serves any length. Masks compose with `&`, `|` and `~`.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_fa2.functions import Node, UserFunction, call_with_context, is_static, show
from pallas_fa2.tokens import Context, Data, Dims, Token


class Mask(Node):
    """A boolean function of two tokens, True where the query attends to the key."""

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        """The mask of one pair of tokens, as a scalar."""
        raise NotImplementedError

    def data(self) -> Data:
        """The arrays that `visible` reads."""
        return Data()

    def place(self, dims: Dims) -> Any:
        """The arrays of the whole tree, laid out for one call."""
        return self.data().place(repr(self), dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: Dims) -> Any:
        return self.visible(*data.views(q_index, k_index, dims))

    def __and__(self, other: "Mask | Callable") -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: "Mask | Callable") -> "Mask":
        return Or(self, as_mask(other))

    # With the mask on the right. NumPy would join its arrays element by element.
    __array_ufunc__ = None

    def __rand__(self, other: Any) -> "Mask":
        return And(as_mask(other), self)

    def __ror__(self, other: Any) -> "Mask":
        return Or(as_mask(other), self)

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with &, | and ~, not and/or/not")


def _take(mask: Mask, field: str) -> Any:
    """A field; lists are arrays."""
    value = getattr(mask, field)
    if isinstance(value, list):
        value = np.asarray(value)
    if isinstance(value, tuple):
        name, numbers = type(mask).__name__, ", ".join(map(str, value))
        raise TypeError(
            f"{name}.{field} must be one number or array, but it is a tuple; write "
            f"{name}({numbers}), or {name}(jnp.array({list(value)}))"
        )
    object.__setattr__(mask, field, value)
    return value


def _check_number(mask: Mask, field: str, least: int = -(2**31)) -> None:
    """Positions are int32, and so must be what they are compared with."""
    n = _take(mask, field)
    if isinstance(n, int) and not least <= n < 2**31:
        low = "-2^31" if least < 0 else least
        raise ValueError(
            f"{type(mask).__name__}.{field} must be an integer from {low} to 2^31 - 1, but it is "
            f"{n}; leave the mask out where it is not to limit anything"
        )


def _take_size(mask: Mask, field: str, cure: str) -> None:
    """A static integer."""
    if isinstance(getattr(mask, field), np.integer):
        object.__setattr__(mask, field, int(getattr(mask, field)))
    _check_number(mask, field, least=1)
    if not is_static(size := getattr(mask, field)):
        raise TypeError(
            f"{type(mask).__name__}.{field} must be an integer, but it is {show(size)}; {cure}"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query attends to keys at its own position and before.

    With `align="start"` query i sees keys 0 .. i (as `jax.nn`); with `align="end"` the last query
    sees every key, for prefill and decoding against a longer cache: query i sees keys
    0 .. i + S - T.
    """

    align: Literal["start", "end"] = "start"

    def __post_init__(self) -> None:
        if self.align not in ("start", "end"):
            raise ValueError(
                f"Causal.align must be 'start' or 'end', but it is {self.align!r}; 'end' lets the "
                "last query see every key"
            )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        shift = k.length - q.length if self.align == "end" else 0
        return q.index + shift >= k.index


def _as_position(n: Any) -> Any:
    """Integers as int32, to be compared with positions; no position is beyond its limits."""
    n = n if hasattr(n, "dtype") else jnp.asarray(n)
    if n.dtype == jnp.int32 or not jnp.issubdtype(n.dtype, jnp.integer):
        return n
    limits = jnp.iinfo(jnp.int32)
    wide = n.dtype.itemsize > 4 or n.dtype == jnp.uint32
    xp = jnp if isinstance(n, jax.Array) else np  # which alone keeps 64 bits
    return (xp.clip(n, None, limits.max) if wide else n).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query attends to `left` keys before its own position, itself, and `right` keys after.

    `right` defaults to `left` (a symmetric window, as an integer `local_window_size` of `jax.nn`).
    Integers are compiled in; scalar arrays are run-time data (one window a layer in a `scan`).
    """

    left: int | Int[Array, ""]
    right: int | Int[Array, ""] | None = None

    def __post_init__(self) -> None:
        _check_number(self, "left")
        _check_number(self, "right")

    def data(self) -> Data:
        sides = {"left": self.left, "right": self.right}
        return Data(params={n: _as_position(v) for n, v in sides.items() if not is_static(v)})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        left = self.left if is_static(self.left) else c.left
        right = self.right if is_static(self.right) else c.right
        right = left if right is None else right
        # Differences of positions do not overflow, whatever the sizes of the window.
        return (q.index - k.index <= left) & (k.index - q.index <= right)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed documents: a query attends to keys with its own segment id.

    `ids` is `[*B, T]`; `kv_ids` `[*B, S]` is needed only where keys are other tokens than queries.
    """

    ids: Int[Array, "*B T"]
    kv_ids: Int[Array, "*B S"] | None = None

    def __post_init__(self) -> None:
        _take(self, "ids")
        _take(self, "kv_ids")
        if self.kv_ids is self.ids:  # as two leaves, under `jit` they would be two arrays
            object.__setattr__(self, "kv_ids", None)

    def data(self) -> Data:
        kv_ids = self.ids if self.kv_ids is None else self.kv_ids
        return Data(q={"segment": self.ids}, k={"segment": kv_ids})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return q.segment == k.segment


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents that lie one after another: a query attends to the keys of its own.

    `starts` is `[*B, T]`, of each query the index of its document's first key; `ends`, of the key after its last
    one, is needed only where no `Causal` hides what follows. Of positions that begin again in each document,
    `starts` are `jnp.arange(T) - positions`. With as many queries as keys, each sees at least its own.

    As `Segments` of documents that lie so, but what a query sees is a range by code: the forward takes 0.92 to
    0.98 of the time. `longest`, a Python integer, promises that no document has more tokens (beyond that many
    none is seen): with up to 512 the backward takes 0.88 of the time (docs/performance.md).
    """

    starts: Int[Array, "*B T"]
    ends: Int[Array, "*B T"] | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        _take(self, "starts")
        _take(self, "ends")
        _take_size(self, "longest", "leave it out where lengths are run-time data")

    def data(self) -> Data:
        ends = {} if self.ends is None else {"end": _as_position(self.ends)}
        return Data(q={"start": _as_position(self.starts), **ends})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        # The same tokens: that each sees itself, `diagonal` finds in the code.
        same = q.length == k.length
        seen = k.index >= (jnp.minimum(q.start, q.index) if same else q.start)
        if self.longest is not None and same:
            seen &= Window(self.longest - 1).visible(q, k, c)
        if self.ends is None:
            return seen
        # by the last one, as a key's index is compared with what does not overflow
        last = q.end - 1
        return seen & (k.index <= (jnp.maximum(last, q.index) if same else last))


def _one_an_entry(**numbers: Any) -> Data:
    """Of `[*B]` each; static ones are in the code."""
    traced = {name: n for name, n in numbers.items() if not is_static(n)}
    return Data(entries={name: _as_position(n) for name, n in traced.items()})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Padded batches: only the first `q` queries and the first `kv` keys of each row exist.

    Padding of one sequence that attends to itself is `Lengths(kv=n)`; the rows of its last queries are
    then of no use, and `Lengths(n, n)` makes them 0.
    """

    q: int | Int[Array, "*B"] | None = None
    kv: int | Int[Array, "*B"] | None = None

    def __post_init__(self) -> None:
        _check_number(self, "q")
        _check_number(self, "kv")

    def data(self) -> Data:
        return _one_an_entry(q=self.q, kv=self.kv)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        def exists(token: Token, name: str) -> Any:
            length = getattr(self, name)
            if length is None:
                return True
            return token.index < (length if is_static(length) else getattr(c, name))

        return exists(q, "q") & exists(k, "kv")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `length` keys, visible to all: `Prefix(n) | Causal()` is a prefix language model."""

    length: int | Int[Array, "*B"]

    def __post_init__(self) -> None:
        _check_number(self, "length")

    def data(self) -> Data:
        return _one_an_entry(length=self.length)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return k.index < (self.length if is_static(self.length) else c.length)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """A query attends to the keys of its own chunk of `size` positions."""

    size: int

    def __post_init__(self) -> None:
        _take_size(
            self,
            "size",
            "for one of run-time data write mask_fn(lambda q, k, c: q.index // c.size == "
            "k.index // c.size)(params={'size': size})",
        )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return q.index // self.size == k.index // self.size


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean array that broadcasts to `[*B, N, T, S]`; it costs its memory and its traffic."""

    array: Bool[Array, "..."]

    def __post_init__(self) -> None:
        _take(self, "array")

    def data(self) -> Data:
        return Data(pairs={"mask": self.array})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return c.mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Pair(Mask):
    """Two masks joined by an operator."""

    left: Mask
    right: Mask

    symbol: ClassVar[str]
    join: ClassVar[Callable]

    def place(self, dims: Dims) -> Any:
        return self.left.place(dims), self.right.place(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: Dims) -> Any:
        sides = zip((self.left, self.right), data, strict=True)
        return self.join(*(mask.evaluate(q_index, k_index, d, dims) for mask, d in sides))

    def __repr__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


class And(Pair):
    symbol, join = "&", staticmethod(operator.and_)


class Or(Pair):
    symbol, join = "|", staticmethod(operator.or_)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    mask: Mask

    def place(self, dims: Dims) -> Any:
        return self.mask.place(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: Dims) -> Any:
        return ~jnp.asarray(self.mask.evaluate(q_index, k_index, data, dims))

    def __repr__(self) -> str:
        return f"~{self.mask}"


class FunctionMask(UserFunction, Mask):
    """A user's mask (see `mask_fn`)."""

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return call_with_context(self.fn, (q, k), c)


def mask_fn(fn: Callable) -> FunctionMask:
    """Makes a mask of a scalar function `fn(q, k)` or `fn(q, k, c)` of two tokens.

    `q.index` and `k.index` are positions; other fields are declared when the mask is made::

        @mask_fn
        def image_text(q, k):
            return (q.index >= k.index) | ((q.image == k.image) & (q.image >= 0))

        mask = image_text(tokens={"image": image_ids})        # [*B, T]

    Data by kind: `tokens=` (or `q_tokens=`, `k_tokens=`) `[*B, T]`; `heads=` `[N, ...]`; `params=`
    of any shape; `pairs=` broadcasting to `[*B, N, T, S]`; the last three are read from `c`.
    A mask has no gradient. It may capture Python numbers but no arrays. As an argument of `jit`, make it
    once, outside the step: a new function is a new program there.
    """
    return FunctionMask(fn)


def as_mask(mask: Any) -> Mask:
    """A mask from a mask, a function of two tokens, or a boolean array."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, type):
        raise TypeError(
            f"mask must be a mask object, but it is the class {mask.__name__}; write {mask.__name__}()"
        )
    if hasattr(mask, "dtype") and hasattr(mask, "shape"):
        if mask.dtype != jnp.bool_:
            raise TypeError(
                f"mask must be boolean, but it has dtype {mask.dtype}; pass mask.astype(bool), or "
                "score=bias(array) if it is to be added to the scores"
            )
        return Dense(mask)
    if callable(mask) and not isinstance(mask, UserFunction):
        return FunctionMask(mask)
    raise TypeError(
        f"mask must be a mask object, a function of two tokens or a boolean array, but it is "
        f"{type(mask).__name__}; pass score functions as score="
    )
