"""The columns of a tile: the queries of a few tokens and of the heads that share a key head."""

from typing import NamedTuple

import jax

from pallas_fa2.arithmetic import div, rem
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import layouts
from pallas_fa2.backends.common.primitives.types import Scalar


class QueryColumns(NamedTuple):
    """Which token of an entry and which head of the group each column is, int32 `[columns]` both."""

    token: jax.Array
    member: jax.Array

    @classmethod
    def compute(cls, spec: DecodeSpec) -> "QueryColumns":
        column = layouts.index((64, spec.columns), 1, 0)
        return cls(div(column, spec.padded_group), rem(column, spec.padded_group))

    def are_queries(self, spec: DecodeSpec, entry: Entry) -> jax.Array:
        """Return which columns are queries: others pad a group, or an entry of fewer tokens."""
        return (self.token < entry.num_queries) & (self.member < spec.group)

    def compute_index(self, spec: DecodeSpec, entry: Entry, head: Scalar) -> jax.Array:
        """Return the index of each column's query in an array `[tokens * N]`; `head` is that of keys."""
        row = (entry.first_query + self.token) * spec.kv_heads + head
        return row * spec.group + self.member
