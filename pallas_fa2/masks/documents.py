"""Masks of packed documents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pallas_fa2.ir.arrays import AuxArrays
from pallas_fa2.ir.tokens import Context, Token
from pallas_fa2.masks.base import Mask
from pallas_fa2.masks.fields import (
    as_integers,
    as_position,
    is_known,
    take_field,
    take_integer,
    take_size,
)
from pallas_fa2.masks.positional import Window


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Packed documents: a query attends to keys with its own segment id.

    `ids` are integers `[*B, T]`; `kv_ids` `[*B, S]` is needed only where keys are not the same tokens as queries (in
    decoding, `ids` are those of the new tokens and `kv_ids` those of the cache). `padding`, a static integer, is the id
    of tokens that attend to nothing and to which nothing attends; without one, padding attends to padding.

    Ids that increase along the sequence are fastest: blocks are skipped by the least and the greatest id in them, so
    that documents whose ids are in random order take 1.3 to 1.4 times as long.
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
    """Contiguous packed documents: a query attends to the keys of its own document.

    `starts` `[*B, T]` is the index of the first key of each query's document, `ends` `[*B, T]` the index after its last
    key, which is needed only without a `Causal`. Where positions begin again in each document, `starts` are
    `jnp.arange(T) - positions`. With as many queries as keys, each query attends to its own key at least.

    The result is that of `Segments`, but the keys of a query are an interval by the code: the forward takes 0.92 to
    0.98 of the time. `longest`, a static integer, promises that no document has more tokens (a query attends to no key
    at a greater distance): with up to 512 the backward takes 0.88 of the time (docs/decisions/0029, 0054).
    """

    starts: Int[Array, "*B T"]
    ends: Int[Array, "*B T"] | None = None
    longest: int | None = None

    @classmethod
    def from_lengths(cls, lengths: Any, length: int, *, longest: int | None = None) -> "Documents":
        """Make the mask from the `lengths` `[*B, D]` of documents (0 for none) in rows of `length` tokens T.

        Tokens after the last document are a document of their own.

        Raises:
          TypeError, ValueError: lengths are no integers, or known and negative or longer than a row in sum.
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
        """Make the mask from the cumulative lengths `[*B, D + 1]`, which begin with 0, as in FlashAttention.

        Document d is tokens `cu_seqlens[d]` to `cu_seqlens[d + 1] - 1` of a row of `length` tokens T. Tokens after the
        last document are a document of their own.

        Raises:
          TypeError, ValueError: cu_seqlens are no integers, or known and not such sums.
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

        def starts_and_ends(limits: Any) -> Any:
            following = jnp.searchsorted(limits, tokens, side="right").astype(jnp.int32)
            return limits[jnp.maximum(following - 1, 0)], limits[following]

        for _ in range(limits.ndim - 1):
            starts_and_ends = jax.vmap(starts_and_ends)
        return cls(*starts_and_ends(limits), longest=longest)

    @classmethod
    def from_positions(cls, positions: Any, *, longest: int | None = None) -> "Documents":
        """Make the mask from positions `[*B, T]` that begin again at 0 in each document."""
        positions = jnp.asarray(as_integers("Documents.from_positions: positions", positions))
        size = positions.shape[-1]
        tokens = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), positions.shape)
        starts = tokens - positions
        # The next token, if any, at which a document begins.
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
        # Queries and keys are the same tokens: that each attends to itself, `coverage` infers from the code.
        same = q.length == k.length
        inside = k.index >= (jnp.minimum(q.start, q.index) if same else q.start)
        if self.longest is not None and same:
            inside &= Window(self.longest - 1).visible(q, k, c)
        if self.ends is None:
            return inside
        # Key indices are compared with the last key, which does not overflow.
        last = q.end - 1
        return inside & (k.index <= (jnp.maximum(last, q.index) if same else last))
