"""The mask of speculative decoding: drafted tokens form a tree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, UInt32

from pallas_fa2.ir.arrays import AuxArrays, CallShape
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.masks.base import Mask
from pallas_fa2.masks.fields import as_position, take_data, take_field

# The bits of a word of ancestors.
MAX_TOKENS = 32


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Tree(Mask):
    """A tree of new tokens, drafted for verification: each attends to what is before all of them, and to its ancestors.

    Bit j of `ancestors[..., t]` says whether new token t attends to new token j, and so its own bit t is set. There are
    at most 32 new tokens. Their keys are behind the context in the order of the bits: new token j is at position
    `context + j` as a key. As a query it has the same position unless `q_positions`, such as depths in the tree, are
    given.

    Attributes:
      ancestors: uint32 `[*B, T]`, or `[tokens]` for packed queries.
      context: integers `[*B]`, the tokens before the new ones. `cached_attention` knows it (`lengths - T`);
        `flash_attention` needs it.

    Raises:
      TypeError, ValueError: ancestors are not uint32; when attention is called: there are more than 32 new tokens (of
        packed queries, if their starts are known), or the context is not known.

    Example:
      >>> ancestors = jnp.array([0b001, 0b011, 0b101], jnp.uint32)  # tokens 1 and 2 follow token 0
      >>> Tree(ancestors, context=1).dense(3, 4).astype(int)
      Array([[[1, 1, 0, 0],
              [1, 1, 1, 0],
              [1, 1, 0, 1]]], dtype=int32)
    """

    ancestors: UInt32[Array, "*B T"]
    context: int | Int[Array, "*B"] | None = None

    def __post_init__(self) -> None:
        ancestors = take_field(self, "ancestors")
        if getattr(ancestors, "dtype", None) != jnp.uint32:
            raise TypeError(
                "Tree.ancestors must be an array of uint32 words, a bit for each new token, but it is "
                f"{getattr(ancestors, 'dtype', type(ancestors).__name__)}; cast it by jnp.asarray(words, jnp.uint32)"
            )
        take_data(self, "context")

    def data(self) -> AuxArrays:
        context = {} if self.context is None else {"context": as_position(self.context)}
        return AuxArrays(q_tokens={"ancestors": self.ancestors}, per_batch=context)

    def normalized_data(self, dims: CallShape) -> Any:
        if self.context is None:
            raise ValueError(
                "Tree.context must be given where keys are no cache, the number of tokens before the new ones; write "
                "Tree(ancestors, context=...)"
            )
        return super().normalized_data(dims)

    def visible(self, q: Token, k: Token, c: Context) -> Any:
        new = k.index - c.context
        # A shift by as many bits as a word has, or more, is undefined in LLVM's IR.
        shift = (new & (MAX_TOKENS - 1)).astype(jnp.uint32)
        bit = lax.shift_right_logical(q.ancestors, shift) & jnp.uint32(1)
        return (new < 0) | ((new < MAX_TOKENS) & (bit != 0))


def with_context(mask: Mask, context: Any) -> Mask:
    """Return the mask with the context `[*B]` in its trees that do not say theirs."""

    def fill(node: Any) -> Any:
        if isinstance(node, Tree) and node.context is None:
            return dataclasses.replace(node, context=context)
        return node

    return jax.tree.map(fill, mask, is_leaf=lambda node: isinstance(node, Tree))
