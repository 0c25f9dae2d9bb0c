"""`Mask` and its combinations, dense masks and masks by users' functions."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from pallas_fa2.ir.arrays import (
    K_AXIS,
    Q_AXIS,
    AuxArrays,
    CallShape,
    check_align,
    default_positions,
    vmap_over_leading_axes,
)
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.masks.fields import take_field
from pallas_fa2.pytree_fn import StaticPytree, UserFn, call_with_context


class Mask(StaticPytree):
    """A boolean function of two tokens, True where the query attends to the key.

    It composes with other masks, functions of two tokens and boolean arrays by `&`, `|` and `~`.
    """

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        """Return whether the query attends to the key, a boolean scalar."""
        raise NotImplementedError

    def data(self) -> AuxArrays:
        """Return the arrays that `visible` reads, in the shapes of the user."""
        return AuxArrays()

    def normalized_data(self, dims: CallShape) -> Any:
        """Return the arrays of the whole tree of masks with the five leading axes of one call."""
        return self.data().to_leading_axes(repr(self), dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
        return self.visible(*data.views(q_index, k_index, dims))

    def __and__(self, other: "Mask | Callable") -> "Mask":
        return And(self, as_mask(other))

    def __or__(self, other: "Mask | Callable") -> "Mask":
        return Or(self, as_mask(other))

    # NumPy would apply `array & mask` to each element of the array.
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
        """Evaluate the mask as a boolean array `[*batch, heads, q_len, kv_len]`, for inspection.

        `kv_len` is `q_len` by default, `align` is as in `flash_attention`. `batch` and `heads` are the batch shape and
        the number of query heads of the call that the mask's data are made for.

        Raises:
          ValueError: the data do not fit such a call.

        Example:
          >>> import pallas_fa2 as fa
          >>> fa.SlidingWindow(2).dense(3).astype(int)
          Array([[[1, 0, 0],
                  [1, 1, 0],
                  [0, 1, 1]]], dtype=int32)
        """
        dims = CallShape(batch, q_len, q_len if kv_len is None else kv_len, heads, 1)
        offset = check_align(align, dims)
        q_positions = default_positions(dims.q_len, Q_AXIS)
        k_positions = default_positions(dims.kv_len, K_AXIS)

        def visible(q_index: Any, k_index: Any, data: Any) -> Any:
            return jnp.asarray(self.evaluate(q_index, k_index, data, dims))

        try:
            data = self.normalized_data(dims)
        except ValueError as error:
            raise ValueError(
                f"{error}. Here batch= (= {batch}) and heads= (= {heads}) of dense must be those of the call that the data "
                "are made for: write dense(T, S, batch=(B,), heads=N)"
            ) from error
        mask = vmap_over_leading_axes(visible, q_positions + np.int32(offset), k_positions, data)
        shape = math.prod(batch), heads, 1, dims.q_len, dims.kv_len
        return jnp.broadcast_to(mask, shape).reshape(*batch, heads, dims.q_len, dims.kv_len)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BinaryMask(Mask):
    """Two masks and the operator that combines them."""

    left: Mask
    right: Mask

    symbol: ClassVar[str]
    join: ClassVar[Callable]

    def normalized_data(self, dims: CallShape) -> Any:
        return self.left.normalized_data(dims), self.right.normalized_data(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
        sides = zip((self.left, self.right), data, strict=True)
        return self.join(*(mask.evaluate(q_index, k_index, d, dims) for mask, d in sides))

    def __repr__(self) -> str:
        return f"({self.left} {self.symbol} {self.right})"


class And(BinaryMask):
    """The pairs that both masks let attend."""

    symbol, join = "&", staticmethod(operator.and_)


class Or(BinaryMask):
    """The pairs that one mask or both let attend."""

    symbol, join = "|", staticmethod(operator.or_)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Not(Mask):
    """The pairs that a mask does not let attend."""

    mask: Mask

    def normalized_data(self, dims: CallShape) -> Any:
        return self.mask.normalized_data(dims)

    def evaluate(self, q_index: Any, k_index: Any, data: Any, dims: CallShape) -> Any:
        return ~jnp.asarray(self.mask.evaluate(q_index, k_index, data, dims))

    def __repr__(self) -> str:
        return f"~{self.mask}"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """A boolean array that broadcasts to `[*B, N, T, S]`, True where a query attends to a key.

    It takes O(T S) memory, and the kernels read it.
    """

    array: Bool[Array, "..."]

    def __post_init__(self) -> None:
        take_field(self, "array")

    def data(self) -> AuxArrays:
        return AuxArrays(pairwise={"mask": self.array})

    def normalized_data(self, dims: CallShape) -> Any:
        return self.data().to_leading_axes(repr(self), dims, {"mask": "mask"})

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return c.mask


class FunctionMask(UserFn, Mask):
    """A mask by a user's function (see `mask_fn`)."""

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        return call_with_context(self.fn, (q, k), c)


def mask_fn(fn: Callable) -> FunctionMask:
    """Make a mask from a function `fn(q, k)` or `fn(q, k, c)` of two tokens that returns a boolean scalar.

    `q.index` and `k.index` are positions; other fields are declared when the mask is made::

        @mask_fn
        def image_text(q, k):
            return (q.index >= k.index) | ((q.image == k.image) & (q.image >= 0))

        mask = image_text(tokens={"image": image_ids})        # [*B, T]

    Its data are arrays of five kinds: `tokens=` `[*B, T]` (or `q_tokens=` `[*B, T]` and `k_tokens=` `[*B, S]`),
    `heads=` `[N, ...]`, `entries=` `[*B]`, `params=` of any shape, and `pairs=`, which broadcast to `[*B, N, T, S]`;
    all but tokens are read from `c`. A mask has no gradient. It may capture Python numbers but no arrays. If it is an
    argument of `jit`, make it once, outside the step: a new function is a new program there.

    Raises:
      TypeError, ValueError: when attention is called: the function captures an array, returns no boolean scalar, or
        its data do not fit the call.
    """
    return FunctionMask(fn)


def as_mask(mask: Any) -> Mask:
    """Return a mask object, a function of two tokens or a boolean array as a mask object."""
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
    remedy = "pass score functions as score="
    if isinstance(mask, tuple | list):
        remedy = "combine masks with &, as in Causal() & SlidingWindow(8)"
    raise TypeError(
        f"mask must be a mask object, a function of two tokens or a boolean array, but it is "
        f"{type(mask).__name__}; {remedy}"
    )
