"""`CachedSpec`, the frozen description of one call of `cached_attention`, and its `CachedOperands`."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.ir.affine import DistanceRange, distance_range
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.quantized import Scales


@dataclasses.dataclass(frozen=True)
class CachedSpec:
    """One call against a cache: the equivalent call on contiguous keys, and how queries and keys lie in memory.

    Attributes:
      call: the call of B sequences on keys `[B, S, K, H]`, where S is the capacity of a sequence. Positions are
        explicit, and `call.mask` does not say which keys exist: those before a sequence's length do. `call.causal` is
        None.
      page_size: tokens of a page, where keys are `[P, page, K, H]` and S is a multiple of it; None for contiguous keys.
      is_packed: whether queries are `[tokens, N, H]`; then `call.q_len` is the number of tokens. Without, they are
        `[B, T, N, H]`, the last T tokens of each sequence.
      has_given_positions: whether the caller gave the queries' positions. Without, they follow from lengths and starts.
      has_sequence_data: whether queries are packed, and the mask or a score reads arrays with a value for each sequence
        that all its tokens share.
      split_size: the keys of a split of a sequence, where results must not depend on the other
        sequences of the batch; None where the kernel may choose its splits.
      quantized: the dtype of keys and values of 8 bits, which have scales; None where theirs is that of queries.
    """

    call: CallSpec
    page_size: int | None = None
    is_packed: bool = False
    has_given_positions: bool = False
    has_sequence_data: bool = False
    split_size: int | None = None
    quantized: str | None = None

    @property
    def distances(self) -> DistanceRange | None:
        """The range of `k.index - q.index` that the mask is, exactly; None for a mask that is no such range.

        It is (None, 0) for a causal mask, (1 - size, 0) for a causal window and (None, None) without a mask.
        """
        mask = self.call.mask
        return DistanceRange() if mask is None else distance_range(mask)

    @property
    def is_causal(self) -> bool:
        """Whether the mask is exactly `k.index <= q.index`."""
        return self.distances == DistanceRange(None, 0)

    @property
    def contiguous_bytes(self) -> int:
        """The size of keys and values `[B, S, K, H]` and `[B, S, K, Hv]` in the queries' dtype."""
        call = self.call
        per_key = (call.head_dim + call.value_dim) * call.dtype.itemsize
        return call.batch * call.kv_len * call.kv_heads * per_key

    @property
    def text(self) -> str:
        """A text that differs wherever the call does, the same in every process (`CallSpec.text`)."""
        others = [getattr(self, x.name) for x in dataclasses.fields(self) if x.name != "call"]
        return f"{self.call.text}\n{others}"

    def __str__(self) -> str:
        fields = [str(self.call)]
        if self.page_size is not None:
            fields.append(f"pages of {self.page_size} tokens")
        if self.quantized is not None:
            fields.append(f"keys and values of {self.quantized} with scales")
        if self.is_packed:
            fields.append("packed queries")
        if self.split_size is not None:
            fields.append(f"splits of {self.split_size} keys")
        return ", ".join(fields)


class CachedOperands(NamedTuple):
    """The arrays of a call beside query, key and value.

    Query i of a packed call belongs to request r where `starts[r] <= i < starts[r + 1]`; where there is none, its
    output is 0 and its lse -inf.
    """

    lengths: jax.Array  # int32 [B], any: below 0 means 0, and beyond S means S
    # Mask and score data with the leading axes [B, K, G, T, S]. `q_index` is [B, 1, 1, T, 1], or [1, 1, 1, tokens, 1]
    # for packed queries, whose other per-query data have no batch axis either. `k_index` is [1, 1, 1, 1, S]: 0, 1, 2,
    # ...
    call: Operands
    # int32 [B, S / page], any: a page out of range is the first or the last one
    table: jax.Array | None = None
    starts: jax.Array | None = None  # int32 [B + 1], not falling, 0 to tokens
    scales: Scales | None = None  # of keys and values of 8 bits


def requests_of(starts: jax.Array, tokens: int) -> jax.Array:
    """Return the request of each row of packed queries, and R for rows of none: int32 `[tokens]`."""
    rows = jnp.arange(tokens, dtype=jnp.int32)
    # One kernel compares all; a binary search is a loop of several for each bit of R.
    compared = jnp.searchsorted(starts, rows, side="right", method="compare_all")
    request = compared.astype(jnp.int32) - 1
    return jnp.where(request < 0, starts.shape[0] - 1, request)
