"""What masks and scores read of a tile of S^T, from device memory into registers.

Rows of the tile are keys, and columns are the query heads of a group, one token after another: what differs between
heads differs between columns.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.mods import Q_POSITIONS, DecodeMods, ModArrays
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives import gather_scatter, layouts, thread_values
from pallas_fa2.backends.common.primitives.layouts import ROWS_PER_WARPGROUP
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.control_flow import rematerialize
from pallas_fa2.ir.tile_functions import ArgSource, AxisInputs, TileInputs


@dataclasses.dataclass(frozen=True)
class TileMods:
    """The masks and scores of 64 keys against the queries of a tile.

    Columns that pad a group, or an entry, read what there is at some index; no result of theirs is stored.
    """

    spec: DecodeSpec
    mods: DecodeMods
    arrays: ModArrays
    entry: Entry
    head: Scalar
    first_key: Scalar

    def inputs_at(self, columns: Slice) -> TileInputs:
        """Load what the code reads of some columns of the tile; a slice may end past the last one."""
        spec = self.spec
        start = cast(int, columns.start)
        count = min(cast(int, columns.size), spec.columns - start)
        column = thread_values.column_iota(count, rematerialize(I32(start)))
        token, member = div(column, spec.padded_group), rem(column, spec.padded_group)
        key = layouts.index((ROWS_PER_WARPGROUP, count), 0, self.first_key)
        heads = self._load_head_scalars(member)
        pairs = self._load_pairs(token, member, key)
        q, k = (self._load_queries(token), self._load_keys(key))
        return TileInputs(AxisInputs(1, None, q), AxisInputs(0, key, k), heads, pairs)

    def _load_queries(self, token: jax.Array) -> Mapping[ArgSource, jax.Array]:
        rows, loaded = self.arrays.q, {}
        for source, position in self.mods.sources("q").items():
            if source == Q_POSITIONS and not self.mods.has_given_positions:
                loaded[source] = self.entry.first_position + token
                continue
            first = position * rows.shape[1] + self.entry.first_query
            loaded[source] = _load(rows, first + token, (1,), source.dtype)
        return loaded

    def _load_keys(self, key: jax.Array) -> Mapping[ArgSource, jax.Array]:
        rows, loaded = self.arrays.k, {}
        for source, position in self.mods.sources("k").items():
            _, count, length = rows.shape
            row = self._batch(rows) * count + (position - 1)
            index = row * length + jnp.minimum(key, length - 1)
            loaded[source] = _load(rows, index, (0,), source.dtype)
        return loaded

    def _load_head_scalars(self, member: jax.Array) -> Mapping[ArgSource, jax.Array]:
        loaded = {}
        for source, position in self.mods.sources("integer", "real").items():
            fields = self.arrays.floats if source.side == "real" else self.arrays.integers
            key_head, member_of_group = self._locate(member)
            _, kv_heads, group, count = fields.shape
            head = (self._batch(fields) * kv_heads + key_head) * group
            index = (head + member_of_group) * count + position
            loaded[source] = _load(fields, index, (1,), source.dtype)
        return loaded

    def _load_pairs(
        self, token: jax.Array, member: jax.Array, key: jax.Array
    ) -> Mapping[ArgSource, jax.Array]:
        """Load arrays of pairs, whose index is one of a column plus one of a key."""
        loaded, shape = {}, (key.size, token.size)
        key_head, member = self._locate(member)
        query = self.entry.first_query + token if self.mods.is_packed else token
        if not self.mods.is_packed and self.spec.entries_per_request > 1:
            query += self.entry.first_query - self.entry.request * self.spec.queries_of_request
        for source, position in self.mods.sources("pair").items():
            array = self.arrays.pairwise[position]
            strides = [
                math.prod(array.shape[i + 1 :]) if n > 1 else 0 for i, n in enumerate(array.shape)
            ]
            of_query = self.entry.request, key_head, member, query
            column = functools.reduce(jnp.add, map(jnp.multiply, of_query, strides[:-1]))
            row = jnp.minimum(key, array.shape[-1] - 1) * strides[-1]
            index = layouts.broadcast_columns(column, shape) + layouts.broadcast_rows(row, shape)
            loaded[source] = _load(array, index, (0, 1), source.dtype)
        return loaded

    def _locate(self, member: jax.Array) -> tuple[Scalar, jax.Array]:
        """Return the head of keys, and the place in its group of each query head. Heads that pad the last part of a
        group are as its last one, so that they attend to nothing that it does not."""
        spec = self.spec
        if spec.parts == 1:
            return self.head, member
        first = rem(self.head, spec.parts) * spec.group
        last = spec.parts * spec.group - spec.missing_heads - 1
        return spec.key_head(self.head), jnp.minimum(first + member, last)

    def _batch(self, array: Ref) -> Scalar | int:
        """Return the index of the tile's request in an array that all may share."""
        return self.entry.request if array.shape[0] > 1 else 0


def _load(array: Ref, index: jax.Array, axes: tuple[int, ...], dtype: str) -> jax.Array:
    """Load the elements at these indices of an array as it lies in memory, for the axes of a tile."""
    bits = gather_scatter.gather_elements(array, index, axes)
    if dtype == "bool":
        return bits != 0
    return bits if dtype == "int32" else lax.bitcast_convert_type(bits, _register_dtype(dtype))


def _register_dtype(dtype: str) -> Any:
    """Return the dtype in which registers hold values: floats of 16 bits as float32."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else dtype
