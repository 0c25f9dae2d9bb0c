"""Masks: which pairs of tokens attend to each other.

A mask is a pytree. Its arrays are leaves, its code and Python numbers are static, and it holds no
shape, so that one object serves any length. Masks compose with `&`, `|` and `~`.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_fa2.ir.arrays import (
    K_AXIS,
    Q_AXIS,
    AuxArrays,
    CallShape,
    check_align,
    vmap_over_leading_axes,
)
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.mask_fields import (
    as_integers,
    as_position,
    check_integer,
    is_known,
    take_data,
    take_field,
    take_integer,
    take_size,
)
from pallas_fa2.pytree_fn import StaticPytree, UserFn, call_with_context, is_static


class Mask(StaticPytree):
    """A boolean function of two tokens, True where the query attends to the key."""

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        """The mask of one pair of tokens, as a scalar."""
        raise NotImplementedError

    def data(self) -> AuxArrays:
        """The arrays that `visible` reads."""
        return AuxArrays()

    def place(self, dims: CallShape) -> Any:
        """The arrays of the whole tree, laid out for one call."""
        return self.data().to_leading_axes(repr(self), dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
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

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in ("ndim", "shape", "dtype"):
            message += (
                ": a mask object is no array. Where Flax's own layers join masks as arrays (decode=True), use "
                "pallas_fa2.linen.MultiHeadAttention or pallas_fa2.nnx.MultiHeadAttention, or pass an array"
            )
        raise AttributeError(message)

    def dense(
        self,
        q_len: int,
        kv_len: int | None = None,
        *,
        batch: tuple[int, ...] = (),
        heads: int = 1,
        align: str = "start",
    ) -> jax.Array:
        """The mask as a boolean array `[*batch, heads, q_len, kv_len]`, to look at.

        `kv_len` is `q_len` by default, `align` as in `flash_attention`. `batch` and `heads` are those of the call
        that the mask's data are made for.

        Example:
          >>> SlidingWindow(2).dense(3).astype(int)
          Array([[[1, 0, 0],
                  [1, 1, 0],
                  [0, 1, 1]]], dtype=int32)
        """
        dims = CallShape(batch, q_len, q_len if kv_len is None else kv_len, heads, 1)
        offset = check_align(align, dims)
        q_positions, k_positions = (
            jax.lax.broadcasted_iota(jnp.int32, [n if i == axis else 1 for i in range(5)], axis)
            for n, axis in ((dims.q_len, Q_AXIS), (dims.kv_len, K_AXIS))
        )

        def visible(q_index: Any, k_index: Any, data: Any) -> Any:
            return jnp.asarray(self.evaluate(q_index, k_index, data, dims))

        seen = vmap_over_leading_axes(
            visible, q_positions + np.int32(offset), k_positions, self.place(dims)
        )
        shape = math.prod(batch), heads, 1, dims.q_len, dims.kv_len
        return jnp.broadcast_to(seen, shape).reshape(*batch, heads, dims.q_len, dims.kv_len)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query attends to keys at its own position and before.

    Where the queries lie among more keys is an argument of the call (`align` of `flash_attention`).
    """

    def __init__(self, *args: Any, **options: Any):
        if args or options:
            raise TypeError(
                f"Causal must be made without arguments, but got {[*args, *options.values()]}; where the queries "
                'lie among the keys is an argument of the call: flash_attention(..., is_causal=True, align="end")'
            )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return q.index >= k.index


class _AsLeft:
    def __repr__(self) -> str:
        return "left"


AS_LEFT = _AsLeft()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query attends to `left` keys before its own position, itself, and `right` keys after.

    `right` is `left` where it is left out (a symmetric window, as an integer `local_window_size` of `jax.nn`).
    -1 and None are unlimited on that side, as in FlashAttention. Integers are static: each is a program of its
    own. Scalar arrays are run-time data (one window a layer in a `scan`), and what is negative in them is
    unlimited. `SlidingWindow(size)` is the causal one that counts the query's own key.
    """

    left: int | Int[Array, ""] | None
    right: int | Int[Array, ""] | None = AS_LEFT  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        if self.right is AS_LEFT:
            object.__setattr__(self, "right", self.left)
        for side in ("left", "right"):
            check_integer(self, side, optional=True)
            size = getattr(self, side)
            if isinstance(size, int | np.integer) and size < -1:
                raise ValueError(
                    f"Window.{side} must be a number of keys, or -1 or None for all of them, but it is "
                    f"{size}; leave out Window's side by None"
                )
            if is_static(size) and size == -1:
                object.__setattr__(self, side, None)

    def data(self) -> AuxArrays:
        sides = {"left": self.left, "right": self.right}
        return AuxArrays(
            params={n: _unlimited_from(v) for n, v in sides.items() if not is_static(v)}
        )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        seen: Any = True
        # Differences of positions do not overflow, whatever the sizes of the window.
        if self.left is not None:
            seen &= q.index - k.index <= (self.left if is_static(self.left) else c.left)
        if self.right is not None:
            seen &= k.index - q.index <= (self.right if is_static(self.right) else c.right)
        return seen


def _unlimited_from(size: Any) -> Any:
    """Sizes of windows as int32; negative ones are beyond every position."""
    size = as_position(size)
    if not jnp.issubdtype(size.dtype, jnp.integer):
        return size  # what is no integer is refused where the mask is traced
    return jnp.where(size < 0, jnp.iinfo(jnp.int32).max, size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """A query attends to the `size` keys that end with its own (arXiv:2310.06825, section 2).

    It is `Causal() & Window(size - 1, 0)`; Mistral, Hugging Face and tokamax count so. An integer is static, a
    scalar array is run-time data.
    """

    size: int | Int[Array, ""]

    def __post_init__(self) -> None:
        check_integer(self, "size", least=1)

    def data(self) -> AuxArrays:
        return (
            AuxArrays()
            if is_static(self.size)
            else AuxArrays(params={"size": as_position(self.size)})
        )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        size = self.size if is_static(self.size) else c.size
        return (q.index >= k.index) & (q.index - k.index < size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed documents: a query attends to keys with its own segment id.

    `ids` is `[*B, T]`; `kv_ids` `[*B, S]` is needed only where keys are other tokens than queries (in decoding,
    `ids` are those of the new tokens and `kv_ids` the cache's). `padding`, a static integer, is the id of tokens
    that attend to nothing and to which nothing attends; without one, padding attends to padding.
    """

    ids: Int[Array, "*B T"]
    kv_ids: Int[Array, "*B S"] | None = None
    padding: int | None = None

    def __post_init__(self) -> None:
        take_field(self, "ids")
        take_field(self, "kv_ids")
        take_integer(self, "padding", optional=True)
        if self.kv_ids is self.ids:  # as two leaves, under `jit` they would be two arrays
            object.__setattr__(self, "kv_ids", None)

    def data(self) -> AuxArrays:
        kv_ids = self.ids if self.kv_ids is None else self.kv_ids
        return AuxArrays(q_tokens={"segment": self.ids}, k_tokens={"segment": kv_ids})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        same = q.segment == k.segment
        return same if self.padding is None else same & (q.segment != self.padding)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed documents that lie one after another: a query attends to the keys of its own.

    `starts` is `[*B, T]`, of each query the index of its document's first key; `ends`, of the key after its last
    one, is needed only where no `Causal` hides what follows. Of positions that begin again in each document,
    `starts` are `jnp.arange(T) - positions`. With as many queries as keys, each sees at least its own.

    As `Segments` of documents that lie so, but what a query sees is a range by code: the forward takes 0.92 to
    0.98 of the time. `longest`, a Python integer, promises that no document has more tokens (beyond that many
    none is seen): with up to 512 the backward takes 0.88 of the time (docs/decisions/0029, 0054).
    """

    starts: Int[Array, "*B T"]
    ends: Int[Array, "*B T"] | None = None
    longest: int | None = None

    @classmethod
    def from_lengths(cls, lengths: Any, length: int, *, longest: int | None = None) -> "Documents":
        """Of documents with `lengths` `[*B, D]` (0 for none) in rows of `length` tokens T.

        What follows the last document is one of its own.
        """
        lengths = as_integers("Documents.from_lengths: lengths", lengths)
        if is_known(lengths) and (
            np.min(lengths, initial=0) < 0 or np.max(np.sum(lengths, -1)) > length
        ):
            raise ValueError(
                "Documents.from_lengths: lengths must be 0 or more, and their sum at most the length of a row, "
                f"{length}, but they are {lengths}; cut the last document"
            )
        limits = jnp.pad(jnp.cumsum(lengths, -1), [(0, 0)] * (lengths.ndim - 1) + [(1, 0)])
        return cls._from_limits(limits, length, longest)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Any, length: int, *, longest: int | None = None
    ) -> "Documents":
        """Of documents d that are tokens `cu_seqlens[d]` to `cu_seqlens[d + 1] - 1`, as in FlashAttention.

        `cu_seqlens` is `[*B, D + 1]` and begins with 0; rows have `length` tokens T. What follows the last
        document is one of its own.
        """
        limits = as_integers("Documents.from_cu_seqlens: cu_seqlens", cu_seqlens)
        if is_known(limits):
            ends = np.concatenate([limits, np.full_like(limits[..., :1], length)], -1)
            if np.any(limits[..., :1] != 0) or np.any(np.diff(ends) < 0):
                raise ValueError(
                    "Documents.from_cu_seqlens: cu_seqlens must begin with 0 and not fall, and end at most at the length "
                    f"of a row, {length}, but they are {limits}; they are the sums of the documents' lengths"
                )
        return cls._from_limits(limits, length, longest)

    @classmethod
    def _from_limits(cls, limits: Any, length: int, longest: int | None) -> "Documents":
        limits = jnp.concatenate([limits, jnp.full_like(limits[..., :1], length)], -1)
        tokens = jnp.arange(length, dtype=jnp.int32)

        def each(limits: Any) -> Any:
            number = jnp.searchsorted(limits, tokens, side="right").astype(jnp.int32)
            return limits[jnp.maximum(number - 1, 0)], limits[number]

        for _ in range(limits.ndim - 1):
            each = jax.vmap(each)
        return cls(*each(limits), longest=longest)

    @classmethod
    def from_positions(cls, positions: Any, *, longest: int | None = None) -> "Documents":
        """Of positions `[*B, T]` that begin again from 0 in each document."""
        positions = jnp.asarray(as_integers("Documents.from_positions: positions", positions))
        size = positions.shape[-1]
        tokens = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), positions.shape)
        starts = tokens - positions
        # of each token the next one, if any, at which a document begins
        begins = jnp.where(positions == 0, tokens, size)
        following = jax.lax.cummin(begins, begins.ndim - 1, reverse=True)
        ends = jnp.concatenate([following[..., 1:], jnp.full_like(following[..., :1], size)], -1)
        return cls(starts, ends, longest=longest)

    def __post_init__(self) -> None:
        take_field(self, "starts")
        take_field(self, "ends")
        take_size(self, "longest", "leave it out where lengths are run-time data", optional=True)

    def data(self) -> AuxArrays:
        ends = {} if self.ends is None else {"end": as_position(self.ends)}
        return AuxArrays(q_tokens={"start": as_position(self.starts), **ends})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        # The same tokens: that each sees itself, `coverage` finds in the code.
        same = q.length == k.length
        seen = k.index >= (jnp.minimum(q.start, q.index) if same else q.start)
        if self.longest is not None and same:
            seen &= Window(self.longest - 1).visible(q, k, c)
        if self.ends is None:
            return seen
        # by the last one, as a key's index is compared with what does not overflow
        last = q.end - 1
        return seen & (k.index <= (jnp.maximum(last, q.index) if same else last))


def _per_batch_entry(**numbers: Any) -> AuxArrays:
    """Of `[*B]` each, where there are any."""
    given = {name: n for name, n in numbers.items() if n is not None}
    return AuxArrays(per_batch={name: as_position(n) for name, n in given.items()})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Padded batches: only the first `q` queries and the first `kv` keys of each row exist.

    Padding of one sequence that attends to itself is `Lengths(kv=n)`; the rows of its last queries are
    then of no use, and `Lengths(n, n)` makes them 0. Python integers are data as arrays are: another one
    compiles nothing.
    """

    q: int | Int[Array, "*B"] | None = None
    kv: int | Int[Array, "*B"] | None = None

    def __post_init__(self) -> None:
        take_data(self, "q")
        take_data(self, "kv")

    def data(self) -> AuxArrays:
        return _per_batch_entry(q=self.q, kv=self.kv)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        def exists(token: Token, name: str) -> Any:
            length = getattr(self, name)
            if length is None:
                return True
            return token.index < getattr(c, name)

        return exists(q, "q") & exists(k, "kv")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `length` keys, visible to all: `Prefix(n) | Causal()` is a prefix language model.

    A Python integer is data as an array is: another one compiles nothing.
    """

    length: int | Int[Array, "*B"]

    def __post_init__(self) -> None:
        take_data(self, "length")

    def data(self) -> AuxArrays:
        return _per_batch_entry(length=self.length)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return k.index < c.length


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """A query attends to the keys of its own chunk of `size` positions, a static integer."""

    size: int

    def __post_init__(self) -> None:
        take_size(
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
        take_field(self, "array")

    def data(self) -> AuxArrays:
        return AuxArrays(pairwise={"mask": self.array})

    def place(self, dims: CallShape) -> Any:
        return self.data().to_leading_axes(repr(self), dims, {"mask": "mask"})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return c.mask


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BinaryMask(Mask):
    """Two masks joined by an operator."""

    left: Mask
    right: Mask

    symbol: ClassVar[str]
    join: ClassVar[Callable]

    def place(self, dims: CallShape) -> Any:
        return self.left.place(dims), self.right.place(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
        sides = zip((self.left, self.right), data, strict=True)
        return self.join(*(mask.evaluate(q_index, k_index, d, dims) for mask, d in sides))

    def __repr__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


class And(BinaryMask):
    symbol, join = "&", staticmethod(operator.and_)


class Or(BinaryMask):
    symbol, join = "|", staticmethod(operator.or_)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    mask: Mask

    def place(self, dims: CallShape) -> Any:
        return self.mask.place(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
        return ~jnp.asarray(self.mask.evaluate(q_index, k_index, data, dims))

    def __repr__(self) -> str:
        return f"~{self.mask}"


class FunctionMask(UserFn, Mask):
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

    Data by kind: `tokens=` (or `q_tokens=`, `k_tokens=`) `[*B, T]`; `heads=` `[N, ...]`; `entries=` `[*B]`;
    `params=` of any shape; `pairs=` broadcasting to `[*B, N, T, S]`; the last four are read from `c`.
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
    if callable(mask) and not isinstance(mask, UserFn):
        return FunctionMask(mask)
    raise TypeError(
        f"mask must be a mask object, a function of two tokens or a boolean array, but it is "
        f"{type(mask).__name__}; pass score functions as score="
    )
