"""Masks of positions: causal, windows, chunks, prefixes and lengths."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_fa2.ir.arrays import AuxArrays
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.masks.base import Mask
from pallas_fa2.masks.fields import as_position, check_integer, take_data, take_size
from pallas_fa2.pytree_fn import is_static


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query attends to keys at its own position and before.

    Where there are more keys than queries, their alignment is an argument of the call (`align` of `flash_attention`).
    """

    def __init__(self, *args: Any, **options: Any):
        if args or options:
            raise TypeError(
                f"Causal must be made without arguments, but got {[*args, *options.values()]}; the alignment of "
                'queries and keys is an argument of the call: flash_attention(..., is_causal=True, align="end")'
            )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return q.index >= k.index


class _AsLeft:
    """The default of `Window.right`, which `help` shows as "left"."""

    def __repr__(self) -> str:
        return "left"


AS_LEFT = _AsLeft()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query attends to `left` keys before its own position, itself, and `right` keys after.

    `right` is `left` by default (a symmetric window, as an integer `local_window_size` of `jax.nn`). -1 and None are
    unlimited on that side, as in FlashAttention. Integers are static: each is a program of its own. Scalar arrays are
    run-time data (one window for each layer in a `scan`), and negative ones are unlimited. `SlidingWindow(size)` is
    the causal window that counts the query's own key.

    Raises:
      TypeError, ValueError: a side is no integer, or is less than -1 or more than 2^31 - 1.
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
        inside: Any = True
        # Differences of positions do not overflow, whatever the sizes of the window.
        if self.left is not None:
            inside &= q.index - k.index <= (self.left if is_static(self.left) else c.left)
        if self.right is not None:
            inside &= k.index - q.index <= (self.right if is_static(self.right) else c.right)
        return inside


def _unlimited_from(size: Any) -> Any:
    """Return the size of a window as int32, the largest one for a negative size."""
    size = as_position(size)
    if not jnp.issubdtype(size.dtype, jnp.integer):
        return size  # tracing the mask raises the error
    return jnp.where(size < 0, jnp.iinfo(jnp.int32).max, size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SlidingWindow(Mask):
    """A query attends to the `size` keys that end with its own (arXiv:2310.06825, section 2).

    It is `Causal() & Window(size - 1, 0)`, as Mistral, Hugging Face and tokamax count. An integer is static, a
    scalar array is run-time data.

    Raises:
      TypeError, ValueError: the size is no integer, or is less than 1.
    """

    size: int | Int[Array, ""]

    def __post_init__(self) -> None:
        check_integer(self, "size", least=1)

    def data(self) -> AuxArrays:
        return AuxArrays(params={} if is_static(self.size) else {"size": as_position(self.size)})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        size = self.size if is_static(self.size) else c.size
        return (q.index >= k.index) & (q.index - k.index < size)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """A query attends to the keys of its own chunk of `size` positions, a static integer (1 or more)."""

    size: int

    def __post_init__(self) -> None:
        take_size(
            self,
            "size",
            "for a size that is run-time data write mask_fn(lambda q, k, c: q.index // c.size == "
            "k.index // c.size)(params={'size': size})",
        )

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return q.index // self.size == k.index // self.size


def _per_batch(**lengths: Any) -> AuxArrays:
    return AuxArrays(per_batch={n: as_position(x) for n, x in lengths.items() if x is not None})


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Padded batches: only the first `q` queries and the first `kv` keys of each batch entry exist.

    `q` and `kv` are integers or integer arrays `[*B]`, in tokens; without one, all tokens of that side exist. For
    self-attention on padded sequences `Lengths(kv=n)` is enough; the rows of padding queries are then meaningless, and
    `Lengths(n, n)` makes them 0. Python integers are run-time data as arrays are: no program is compiled for another
    one.
    """

    q: int | Int[Array, "*B"] | None = None
    kv: int | Int[Array, "*B"] | None = None

    def __post_init__(self) -> None:
        take_data(self, "q")
        take_data(self, "kv")

    def data(self) -> AuxArrays:
        return _per_batch(q=self.q, kv=self.kv)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        def exists(token: Token, name: str) -> Any:
            length = getattr(self, name)
            if length is None:
                return True
            return token.index < getattr(c, name)

        return exists(q, "q") & exists(k, "kv")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `length` keys, visible to all queries: `Prefix(n) | Causal()` is a prefix language model.

    `length` is an integer or an integer array `[*B]`, in tokens. A Python integer is run-time data as an array is: no
    program is compiled for another one.
    """

    length: int | Int[Array, "*B"]

    def __post_init__(self) -> None:
        take_data(self, "length")

    def data(self) -> AuxArrays:
        return _per_batch(length=self.length)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return k.index < c.length
