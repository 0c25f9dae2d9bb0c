"""Entries: up to `q_len` consecutive queries of one request, and the blocks of keys that they visit.

The functions take scalars or arrays, of XLA's or of a kernel's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec


class KeyBlocks(NamedTuple):
    """The blocks of keys that an entry visits, each an int32 scalar or an array of all entries."""

    num_blocks: Any  # at least 1
    first_block: Any
    request: Any


class Entry(NamedTuple):
    """Up to `q_len` consecutive queries of one request. The first fields are those of `KeyBlocks`."""

    num_blocks: Any
    first_block: Any
    request: Any
    kv_len: Any  # keys from here on exist for none of its queries
    first_position: Any  # of its first query in the sequence; negative if the sequence has fewer tokens than queries
    first_query: Any  # the row of its first query in Q
    num_queries: Any

    @property
    def key_blocks(self) -> KeyBlocks:
        return KeyBlocks(*self[: len(KeyBlocks._fields)])


def request_of(spec: DecodeSpec, index: Any) -> Any:
    """Return the request of an entry, where all requests have as many queries."""
    return div(index, spec.entries_per_request)


def step_entry(spec: DecodeSpec, index: Any, length: Any) -> Entry:
    """Return an entry, given the length of its request, where all requests have as many queries.

    A length beyond the capacity is cut off.
    """
    queries, request = spec.queries_of_request, request_of(spec, index)
    before = rem(index, spec.entries_per_request) * spec.q_len
    length = jnp.clip(length, 0, spec.kv_len)
    # with less of the entry in registers
    if spec.entries_per_request > 1 and queries % spec.q_len == 0:
        num_queries, first_query = jnp.full_like(index, spec.q_len), index * spec.q_len
    else:
        num_queries = jnp.minimum(queries - before, spec.q_len)
        first_query = request * queries + before
    entry = Entry(0, 0, request, length, length - queries + before, first_query, num_queries)
    return visit_blocks(spec, entry)


def step_entries(spec: DecodeSpec, lengths: jax.Array) -> Entry:
    """Return all entries, by XLA, where all requests have as many queries; `lengths`, int32 `[B]`, are those of
    requests."""
    index = jnp.arange(spec.max_entries, dtype=I32)
    return step_entry(spec, index, jnp.repeat(lengths, spec.entries_per_request))


def visit_blocks(spec: DecodeSpec, entry: Entry, block_kv: int = BLOCK_KV) -> Entry:
    """Return an entry with the keys that exist for its queries and the blocks of `block_kv` keys that it visits: one at
    least, which may have no key that exists."""
    least, most = spec.distances
    if most is not None:
        last = entry.first_position + entry.num_queries - 1
        entry = entry._replace(kv_len=jnp.maximum(jnp.minimum(entry.kv_len, last + (most + 1)), 0))
    end = lax.div(entry.kv_len + (block_kv - 1), I32(block_kv))
    first = jnp.zeros_like(end)
    if least is not None:
        oldest = jnp.maximum(entry.first_position + least, 0)
        first = jnp.minimum(lax.div(oldest, I32(block_kv)), jnp.maximum(end - 1, 0))
    return entry._replace(num_blocks=jnp.maximum(end - first, 1), first_block=first)


def packed_entries(
    spec: DecodeSpec, lengths: jax.Array, starts: jax.Array, block_kv: int = BLOCK_KV
) -> tuple[Entry, jax.Array]:
    """Return the entries of packed queries, by XLA, and how many there are; blocks have `block_kv` keys."""
    requests, q_len = lengths.shape[0], spec.q_len
    # one request of no keys before all, and one after
    bounds = jnp.concatenate([jnp.array([0]), starts, jnp.array([spec.num_tokens])]).astype(I32)
    lengths = jnp.pad(jnp.clip(lengths, 0, spec.kv_len), 1)
    counts = bounds[1:] - bounds[:-1]
    num_entries = lax.div(counts + (q_len - 1), I32(q_len))
    if spec.taken_queries is not None:
        least, most = spec.taken_queries
        num_entries = jnp.where((counts >= least) & (counts <= most), num_entries, 0)
    ends = jnp.cumsum(num_entries, dtype=I32)
    index = jnp.arange(spec.max_entries, dtype=I32)
    owner = jnp.minimum((ends[None] <= index[:, None]).sum(1, dtype=I32), requests + 1)
    before = (index - (ends - num_entries)[owner]) * q_len  # queries of the request
    first_query, length = bounds[owner] + before, lengths[owner]
    num_queries = jnp.clip(bounds[owner + 1] - first_query, 0, q_len)
    first_position = length - (bounds[owner + 1] - bounds[owner]) + before
    request = jnp.clip(owner - 1, 0, requests - 1)
    entries = Entry(0, 0, request, length, first_position, first_query, num_queries)
    return visit_blocks(spec, entries, block_kv), ends[-1]
