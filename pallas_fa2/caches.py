"""Caches of keys and values, contiguous (`Cache`) and paged (`Pages`), and queries that requests share (`Packed`).

Slot i of a sequence holds the key at position i. Lengths, tables and starts are run-time data: a program that was
compiled for some values runs for any others. Where they are known, wrong ones raise a ValueError; where they are
traced, what is outside of the cache is neither read nor written.
"""

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Num

from pallas_fa2.check_caches import check_append, check_cache, check_sizes
from pallas_fa2.ir.cached_spec import requests_of
from pallas_fa2.ir.quantized import SCALE_DTYPE, dequantize, is_quantized, quantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """Queries of several requests in one array: those of request r are rows `starts[r]` to `starts[r + 1] - 1`.

    They are the last tokens of its sequence; a request may have none. Rows from `starts[R]` on belong to no request.

    Attributes:
      starts: int32 `[R + 1]`, 0 first and never falling, as FlashAttention's `cu_seqlens_q`.
    """

    starts: Int[Array, " R+1"]

    def locate(self, lengths: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array]:
        """Return the request of each row, R if there is none, and its position: int32 `[tokens]` both.

        `lengths` `[R]` are those of the sequences with these tokens.
        """
        starts = jnp.asarray(self.starts, jnp.int32)
        request = requests_of(starts, tokens)
        # The last token of a request is the last one of its sequence; a row of no request gets any position.
        from_end = jnp.arange(tokens, dtype=jnp.int32) - jnp.take(starts, request + 1, mode="clip")
        return request, jnp.take(lengths, request, mode="clip") + from_end

    def counts(self) -> jax.Array:
        """Return the number of tokens of each request, int32 `[R]`."""
        return jnp.diff(jnp.asarray(self.starts, jnp.int32))


class _Appends:
    """What both kinds of caches do with new tokens."""

    key: Any
    value: Any
    lengths: Any
    k_scale: Any
    v_scale: Any

    def append(
        self,
        key: Float[Array, "B T K H"] | Float[Array, "tokens K H"],
        value: Float[Array, "B T K Hv"] | Float[Array, "tokens K Hv"],
        new: Int[Array, " B"] | None = None,
        *,
        queries: Packed | None = None,
    ) -> Self:
        """Return the cache with new tokens behind each sequence, longer by their number.

        Under `jit` with the cache donated it is written in place. Traced lengths may exceed the capacity: tokens beyond
        it are dropped, and `jnp.any(cache.lengths > cache.capacity)` tells. Those that a page out of range would hold
        are dropped too.

        Args:
          key, value: `[B, T, K, H]` and `[B, T, K, Hv]` in the cache's dtype, T tokens for each sequence; with
            `queries`, `[tokens, K, H]` and `[tokens, K, Hv]`. For a cache of 8 bits they are floats, and each token of
            each head is divided by its scale and rounded.
          new: integers `[B]`, 0 to T: how many tokens each sequence gets, T by default. They are the last ones of its
            row, as queries are (prompts are padded on the left).
          queries: the `Packed` rows of requests, one request for each sequence.

        Raises:
          ValueError, TypeError: shapes and dtypes do not fit; known lengths would exceed the capacity; a known table
            has no page for a new token, or one in which another sequence has a token in the same slot.
        """
        check_append(self, key, value, new, queries)
        key, value, lengths = jnp.asarray(key), jnp.asarray(value), jnp.asarray(self.lengths)
        if queries is not None:
            queries = clamp_starts(queries, key.shape[0])
            new = queries.counts()
            request, position = queries.locate(lengths.astype(jnp.int32) + new, key.shape[0])
            is_new = request < lengths.shape[0]
        else:
            tokens = key.shape[1]
            new = jnp.full_like(lengths, tokens) if new is None else jnp.asarray(new)
            new = jnp.clip(new.astype(jnp.int32), 0, tokens)
            request = jnp.arange(lengths.shape[0], dtype=jnp.int32)[:, None]
            before_end = jnp.arange(-tokens, 0, dtype=jnp.int32)[None]
            token = before_end + new.astype(jnp.int32)[:, None]
            is_new, position = token >= 0, lengths.astype(jnp.int32)[:, None] + token
        arrays = {"lengths": lengths + new.astype(lengths.dtype)}
        for name, x in (("key", key), ("value", value)):
            cached, where = getattr(self, name), (request, position, is_new & (position >= 0))
            if is_quantized(cached.dtype):
                x, scale = quantize(x, cached.dtype)
                scales = f"{name[0]}_scale"
                arrays[scales] = self._write(getattr(self, scales), scale, *where)
            arrays[name] = self._write(cached, x, *where)
        return dataclasses.replace(self, **arrays)  # pyright: ignore

    def dequantize(self, dtype: Any = jnp.bfloat16) -> Self:
        """Return the cache of `key * k_scale` and `value * v_scale` in this dtype, which a cache of 8 bits stands
        for."""
        check_cache(self)
        if not is_quantized(self.key.dtype):
            return self
        arrays: dict[str, Any] = {"k_scale": None, "v_scale": None}
        for name, scale in (("key", self.k_scale), ("value", self.v_scale)):
            numbers = jnp.asarray(getattr(self, name))
            arrays[name] = dequantize(numbers, jnp.asarray(scale), dtype)
        return dataclasses.replace(self, **arrays)  # pyright: ignore

    @property
    def capacity(self) -> int:
        raise NotImplementedError

    def _write(self, cached: Any, x: Any, request: Any, position: Any, is_new: Any) -> jax.Array:
        """Write the tokens that are new at their requests and positions, without a copy if `cached` is donated.

        Tokens at positions beyond the capacity are dropped. `cached` are keys, values or scales.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache(_Appends):
    """Keys and values of B sequences, each in S consecutive slots of which the first `lengths` are used.

    Attributes:
      key: `[B, S, K, H]`; of 8 bits (float8_e4m3fn or int8), it stands for `key * k_scale`.
      value: `[B, S, K, Hv]`; unused slots may hold anything, NaN too.
      lengths: integers `[B]`, the tokens in each sequence.
      k_scale, v_scale: bfloat16 `[B, K, S]`, a scale for each token and head of a cache of 8 bits; None otherwise.

    Example:
      >>> import jax.numpy as jnp
      >>> cache = Cache.zeros(2, 64, kv_heads=4, head_dim=16, dtype=jnp.float32)
      >>> cache = cache.append(jnp.ones((2, 3, 4, 16)), jnp.ones((2, 3, 4, 16)))
      >>> cache.lengths
      Array([3, 3], dtype=int32)
    """

    key: Num[Array, "B S K H"]
    value: Num[Array, "B S K Hv"]
    lengths: Int[Array, " B"]
    k_scale: Float[Array, "B K S"] | None = None
    v_scale: Float[Array, "B K S"] | None = None

    @classmethod
    def zeros(
        cls,
        batch: int,
        capacity: int,
        *,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.bfloat16,
    ) -> "Cache":
        """Make an empty cache for `batch` sequences of up to `capacity` tokens; `value_dim` is `head_dim` by default.

        With `dtype` float8_e4m3fn or int8, it has scales.

        Raises:
          ValueError, TypeError: a size is no integer or too small, or the dtype is none that a cache may have.
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": (batch, 0), "capacity": (capacity, 0)}
        sizes |= _sizes_of_heads(kv_heads, head_dim, value_dim)
        check_sizes("Cache.zeros", sizes, dtype)
        key, value = (
            jnp.zeros((batch, capacity, kv_heads, dim), dtype) for dim in (head_dim, value_dim)
        )
        scales: list = [None, None]
        if is_quantized(dtype):
            scales = [jnp.zeros((batch, kv_heads, capacity), SCALE_DTYPE) for _ in scales]
        return cls(key, value, jnp.zeros(batch, jnp.int32), *scales)

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence, S."""
        return self.key.shape[1]

    def _write(self, cached: Any, x: Any, request: Any, position: Any, is_new: Any) -> jax.Array:
        # A scatter drops slots that are negative or beyond the last. All differ, as it is promised.
        slot = jnp.where(is_new, position, jnp.arange(-position.shape[-1], 0, dtype=jnp.int32))
        cached = jnp.asarray(cached)
        write = functools.partial(_scatter, is_scale=cached.ndim == 3)
        if position.ndim == 1:
            return write(cached, x, jnp.where(is_new, request, 0), slot)
        # As batching axes of a scatter, sequences stay divided over devices.
        return jax.vmap(write)(cached, x, slot)


def _scatter(cached: jax.Array, x: jax.Array, *index: jax.Array, is_scale: bool) -> jax.Array:
    if is_scale:
        return _scatter_scales(cached, x, *index, are_unique=True)
    return cached.at[index].set(x, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _sizes_of_heads(kv_heads: int, head_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
    """Return the sizes of a cache that heads have, with the least of each."""
    return {"kv_heads": (kv_heads, 1), "head_dim": (head_dim, 1), "value_dim": (value_dim, 1)}


def _scatter_scales(
    cached: jax.Array, x: jax.Array, *index: jax.Array, are_unique: bool
) -> jax.Array:
    """Set scales `[..., K, slots]` to those of tokens `x [..., K]`, at an index of a token but for its heads.

    Heads are a batching axis where they lie, which `vmap` would move: they stay divided over devices, and XLA
    transposes nothing, as it would for a slice in the middle.
    """
    heads = cached.ndim - 2
    indexed = (*range(heads), heads + 1)
    places = jnp.stack(jnp.broadcast_arrays(*index), -1)
    updates = jnp.moveaxis(x, -1, 0)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=indexed,
        scatter_dims_to_operand_dims=indexed,
        operand_batching_dims=(heads,),
        scatter_indices_batching_dims=(0,),
    )
    places = jnp.broadcast_to(places, (updates.shape[0], *places.shape))
    return lax.scatter(
        cached, places, updates, dimensions,
        unique_indices=are_unique, mode=lax.GatherScatterMode.FILL_OR_DROP,
    )  # fmt: skip


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Pages(_Appends):
    """Keys and values of B sequences in pages of a pool; page i of a sequence holds its tokens from `i * page` on.

    Which sequence has which pages is the caller's decision. Several may share those that no tokens are appended to:
    where two would write to one slot, one token is lost. A known table with such a page is an error.

    Attributes:
      key: `[P, page, K, H]`, P pages of `page` tokens; of 8 bits, as in a `Cache`.
      value: `[P, page, K, Hv]`.
      table: integers `[B, W]`, the pages of each sequence, 0 to P - 1; entries that no token needs may be anything. An
        entry out of range, where it is traced, is read as the nearest page.
      lengths: integers `[B]`, the tokens in each sequence.
      k_scale, v_scale: bfloat16 `[P, K, page]`, a scale for each token and head of pages of 8 bits; None otherwise.

    Example:
      >>> import jax.numpy as jnp
      >>> pages = Pages.zeros(
      ...     8, 16, kv_heads=4, head_dim=64, table=jnp.array([[5, 2], [7, -1]])
      ... )
      >>> pages.capacity
      32
    """

    key: Num[Array, "P page K H"]
    value: Num[Array, "P page K Hv"]
    table: Int[Array, "B W"]
    lengths: Int[Array, " B"]
    k_scale: Float[Array, "P K page"] | None = None
    v_scale: Float[Array, "P K page"] | None = None

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        page_size: int,
        *,
        kv_heads: int,
        head_dim: int,
        table: Any,
        value_dim: int | None = None,
        dtype: Any = jnp.bfloat16,
    ) -> "Pages":
        """Make a pool of `num_pages` pages of `page_size` tokens, and empty sequences of which `table` `[B, W]` has the
        pages.

        A sequence that has no pages yet has a row of -1. All arrays are new ones, a copy of the table too, so that the
        result can be donated. `value_dim` and `dtype` are those of `Cache.zeros`.

        Raises:
          ValueError, TypeError: as `Cache.zeros`, and for a table that has another shape or dtype.
        """
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"num_pages": (num_pages, 0), "page_size": (page_size, 0)}
        sizes |= _sizes_of_heads(kv_heads, head_dim, value_dim)
        check_sizes("Pages.zeros", sizes, dtype)
        pool = Cache.zeros(
            num_pages,
            page_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            dtype=dtype,
        )
        table = jnp.array(table)
        lengths = jnp.zeros(table.shape[:1], jnp.int32)
        pages = cls(pool.key, pool.value, table, lengths, pool.k_scale, pool.v_scale)
        check_cache(pages)
        return pages

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.key.shape[1]

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence, W pages."""
        return self.table.shape[1] * self.page_size

    def _write(self, cached: Any, x: Any, request: Any, position: Any, is_new: Any) -> jax.Array:
        # A column beyond the table has page -1.
        table, column = jnp.asarray(self.table).astype(jnp.int32), position // self.page_size
        page = table.at[request, column].get(mode="fill", fill_value=-1)
        is_new &= (page >= 0) & (page < cached.shape[0])
        index = jnp.where(is_new, page, cached.shape[0]), position % self.page_size
        cached = jnp.asarray(cached)
        # Not promised to be unique: a table may name a page twice.
        if cached.ndim == 3:
            return _scatter_scales(cached, x, *index, are_unique=False)
        return cached.at[index].set(x, mode="drop")


def as_int32(x: Any) -> jax.Array:
    """Return integers as int32: bounds would wrap around in a narrower dtype."""
    return jnp.asarray(x).astype(jnp.int32)


def clamp_lengths(cache: Cache | Pages) -> jax.Array:
    """Return the lengths as int32 `[B]`, 0 to the capacity."""
    return jnp.clip(as_int32(cache.lengths), 0, cache.capacity)


def clamp_starts(queries: Packed, tokens: int) -> Packed:
    """Return the starts as int32 that never fall, 0 to the number of rows."""
    starts = jnp.clip(as_int32(queries.starts), 0, tokens)
    return Packed(jax.lax.cummax(starts))
