"""The query tiles of a call on a cache, which lengths and starts say on the device (docs/design/paged-forward.md).

A tile is a query head and an entry: up to `block_q` consecutive queries of one request. XLA makes the table of entries
and the order of tiles, once for all layers whose lengths are the same.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.aux_inputs import AuxInputs, HeadScalars
from pallas_fa2.backends.common.block_mask_kernel import FULL_BIT
from pallas_fa2.backends.common.decode.entries import Entry, packed_entries
from pallas_fa2.backends.common.decode.mods import K_INDEX, Q_POSITIONS, DecodeMods, ModArrays
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, tile_table
from pallas_fa2.backends.common.tile_mods import TileScore
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.primitives.tma import HeadRows, RowPieces
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.quantized import Scales
from pallas_fa2.ir.tile_functions import ArgSource
from pallas_fa2.schedule import raster

# The columns of the table of entries: those of `Entry`, and the first block of which all of its queries attend to all
# keys.
FIELDS = (*Entry._fields, "first_full")


class CachedTiles(NamedTuple):
    """What says whose rows and keys a tile has: arrays in device memory."""

    entries: Any  # int32 [E, 8]: `FIELDS`
    table: Any = None  # int32 [B, pages of a request], if the cache is paged
    scales: Scales | None = None  # if keys and values have 8 bits

    def load(self, entry: Scalar, field: str) -> Scalar:
        """Load a field of an entry."""
        return self.entries[entry, FIELDS.index(field)]

    def eight_bit_rows(
        self,
        source: Ref,
        scales: Ref,
        entry: Scalar,
        request: Scalar,
        keys: Slice,
        head: Scalar,
        columns: Slice | None,
    ) -> EightBitRows:
        """Return where keys of 8 bits lie, those that exist for queries of an entry."""
        pages = None if self.table is None else self.table.at[request]
        end = self.load(entry, "kv_len")
        return EightBitRows(source, scales, pages, request, keys, end, head, columns)

    def kv_rows(
        self, source: Ref, request: Scalar, keys: Slice, head: Scalar, columns: Slice | None
    ) -> HeadRows | RowPieces:
        """Return where keys of 16 bits of a request lie, of which pages have each an equal part or all. Page numbers
        are loaded here.

        Whatever the table has, they are pages that exist.
        """
        if self.table is None:
            return HeadRows(source, request, keys, head, columns)
        pages, page_size = source.shape[:2]
        size, last_entry = math.gcd(page_size, keys.size), self.table.shape[1] - 1

        def piece(first: Scalar) -> HeadRows:
            page = self.table[request, jnp.minimum(div(first, page_size), last_entry)]
            rows = pl.ds(rem(first, page_size), size)
            return HeadRows(source, jnp.clip(page, 0, pages - 1), rows, head, columns)

        return RowPieces(tuple(piece(keys.start + i) for i in range(0, keys.size, size)))


class CachedPlan(NamedTuple):
    """The tiles of a launch, in the order in which CTAs claim them."""

    scheduler: DynamicTileScheduler
    entries: Any  # int32 [E, 8]: `FIELDS`


def plan_tiles(
    spec: DecodeSpec, config: ForwardConfig, lengths: jax.Array, starts: jax.Array
) -> CachedPlan:
    """Return the plan of requests of these lengths, integers `[B]`, of which r has the queries from `starts[r]` to
    `starts[r + 1]`, integers `[B + 1]`: the last tokens of its sequence.

    Heads that have their keys in L2 together come together, and of these the longest tiles first.
    """
    lengths, starts = lengths.astype(I32), starts.astype(I32)
    entries, num_entries = packed_entries(spec, lengths, starts, config.block_kv)
    index = jnp.arange(spec.max_entries, dtype=I32)
    exists = index < num_entries
    first_full, full = _find_full_blocks(spec, config, entries)
    counts = entries.num_blocks | full << FULL_BIT
    by_length = jnp.argsort(jnp.where(exists, -entries.num_blocks, 1), stable=True).astype(I32)
    group = _heads_per_l2_group(spec, config)
    claim = jnp.arange(spec.max_entries * spec.q_heads, dtype=I32)
    of_group = jnp.maximum(num_entries * group, 1)
    in_group = lax.rem(claim, of_group)
    entry = by_length[lax.div(in_group, I32(group))]
    head = lax.div(claim, of_group) * group + lax.rem(in_group, I32(group))
    # what is no tile's ends the work of a CTA
    tile_id = jnp.where(
        claim < num_entries * spec.q_heads, head * spec.max_entries + entry, claim.size
    )
    table = jnp.stack([jnp.broadcast_to(x, index.shape) for x in (*entries, first_full)], 1)
    num_ctas = min(config.num_ctas, claim.size)
    header = DynamicTileScheduler.header_rows(num_ctas)
    order = tile_table(tile_id, counts[entry], header)
    return CachedPlan(DynamicTileScheduler(order, num_ctas), table)


def _find_full_blocks(
    spec: DecodeSpec, config: ForwardConfig, entries: Entry
) -> tuple[jax.Array, jax.Array]:
    """Return the first block of each entry of whose keys all of its queries attend to all, and how many such blocks
    follow each other."""
    (least, most), block_kv = spec.distances, I32(config.block_kv)
    first, end = entries.first_block, entries.kv_len
    if most is not None:
        end = jnp.minimum(end, entries.first_position + (most + 1))
    if least is not None:
        oldest = entries.first_position + entries.num_queries - 1 + least
        before = jnp.maximum(oldest + (config.block_kv - 1), 0)
        first = jnp.maximum(first, lax.div(before, block_kv))
    return first, jnp.maximum(lax.div(jnp.maximum(end, 0), block_kv) - first, 0)


def _heads_per_l2_group(spec: DecodeSpec, config: ForwardConfig) -> int:
    itemsize = 1 if config.subtile_kv else 2
    kv_bytes = itemsize * spec.kv_len * (config.head_dim + config.value_dim)
    return raster.heads_per_l2_group(spec.kv_heads, kv_bytes, config.l2_budget) * spec.group


def tiles_spec(
    spec: CachedSpec,
    config: ForwardConfig,
    tokens: int,
    requests: int,
    kv_heads: int,
    least: int,
) -> DecodeSpec:
    """Return the launch of requests with `least` new tokens or more of a call, whose entries are tiles."""
    call, distances = spec.call, spec.distances
    assert distances is not None, "`unsupported_tiles` says so"
    partial_tiles = min(requests + 2, tokens // max(least, 1))
    return DecodeSpec(
        max_entries=max(1, min(tokens, tokens // config.block_q + partial_tiles)),
        q_len=config.block_q,
        num_tokens=tokens,
        kv_len=call.kv_len,
        q_heads=kv_heads * call.group,
        kv_heads=kv_heads,
        head_dim=call.head_dim,
        value_dim=call.value_dim,
        scale=call.scale,
        distances=distances,
        mods=DecodeMods.compile(spec),
        taken_queries=(least, tokens) if least else None,
    )


def kernel_spec(spec: DecodeSpec, config: ForwardConfig) -> KernelSpec:
    """Return what the forward kernel is specialized on: one batch entry, with a tile for each entry."""
    return KernelSpec(
        batch=1,
        q_len=spec.max_entries * config.block_q,
        kv_len=spec.kv_len,
        q_heads=spec.q_heads,
        kv_heads=spec.kv_heads,
        scale=spec.scale,
        causal_offset=spec.distances.most,
        window_offset=spec.distances.least,
        score=_score_of_indices(spec),
        in_cache=True,
    )


def reads_tokens(mods: DecodeMods) -> bool:
    """Return whether masks or scores read more of tokens than their positions."""
    return bool(set(mods.sources("q", "k", "pair")) - {Q_POSITIONS, K_INDEX})


def _score_of_indices(spec: DecodeSpec) -> TileScore | None:
    """Return the score functions, which read the index of a row in its sequence as the query's position."""
    if spec.mods is None or spec.mods.score is None:
        return None
    score, q_index = spec.mods.score, ArgSource("q", None, "int32")
    sources = tuple(q_index if s == Q_POSITIONS else s for s in score.value.sources)
    return dataclasses.replace(score, value=dataclasses.replace(score.value, sources=sources))


def pack_head_inputs(spec: DecodeSpec, config: ForwardConfig, mods: ModArrays) -> AuxInputs | None:
    """Return what scores read of heads, of each request if they differ, as the forward reads it."""
    if spec.mods is None:
        return None

    def of_heads(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else x.reshape(x.shape[0], spec.q_heads, -1)

    scalars = HeadScalars(of_heads(mods.integers), of_heads(mods.floats))
    q, k = (jnp.zeros((1, 0, n), I32) for n in config.tile)
    return AuxInputs(q, k, scalars, None, ())
