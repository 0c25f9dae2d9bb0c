"""Decoding by mma.sync: FlashAttention-2, Algorithm 1, of few queries over splits of a cache (docs/design/decode.md).

Persistent CTAs of four warps, which load and multiply, have equal shares of the blocks of keys of all tiles.
"""

from typing import NamedTuple

import jax
from jax import lax

from pallas_fa2.arithmetic import I32, rem
from pallas_fa2.backends.common.decode.arrays import Cta, Inputs
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.cursor import Tile
from pallas_fa2.backends.common.decode.launch import launch
from pallas_fa2.backends.common.decode.merge import DEAL, TileVisit, merge_splits, note_no_splits
from pallas_fa2.backends.common.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.common.decode.schedule import DecodePlan
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm80.decode.epilogue import TileOutput
from pallas_fa2.backends.sm80.decode.loader import KvLoader, Loads
from pallas_fa2.backends.sm80.decode.memory import SharedStorage
from pallas_fa2.backends.sm80.decode.tile import Split
from pallas_fa2.backends.sm80.primitives import async_copy
from pallas_fa2.control_flow import as_carry


def decode(
    spec: DecodeSpec,
    config: DecodeConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: DecodePlan,
    table: jax.Array | None = None,
    mods: ModArrays = NO_MODS,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [tokens, N, Hv]` and natural `lse [tokens, N]`, float32.

    q is `[tokens, N, H]`, bfloat16 or float16; k and v are `[B, S, K, H]` and `[B, S, K, Hv]`, or pages `[P, page size,
    K, H]` and `[P, page size, K, Hv]` that `table`, int32 `[B, W]`, lists for each request. `mods` are what masks and
    scores read.
    """
    grouped = q.reshape(spec.num_tokens * spec.kv_heads, spec.group, spec.head_dim)
    inputs = Inputs(grouped, k, v, plan, table, mods)
    out_type = jax.ShapeDtypeStruct((*q.shape[:2], spec.value_dim), q.dtype)
    memory = SharedStorage.allocate(spec, config, q.dtype)
    return launch(spec, config, inputs, out_type, memory, visit_share)


class ShareState(NamedTuple):
    """Where a CTA is in its share, before a tile."""

    num_tiles: Scalar  # that it has visited
    step: Scalar  # the blocks that it has visited
    tile: Tile
    first_index: Scalar  # of the tile's blocks, the first that the CTA visits
    loads: Loads


def visit_share(cta: Cta[SharedStorage]) -> None:
    """Visit the blocks of one CTA, a tile after another."""
    share = cta.inputs.plan.load_share(cta.spec, cta.config, lax.axis_index("cta"))
    num_steps = share.end - share.begin
    loader = KvLoader(cta, share, num_steps)
    tile, first_index = Tile(share.entry, share.head), share.begin - share.tile_begin
    share.store_deal(cta.memory.notes.at[DEAL])
    note_no_splits(cta)
    # No slower warp takes back what another notes. On Hopper the barriers between a note and the merge are enough.
    async_copy.sync_cta(1)
    first_visit = TileVisit.of(cta, tile, share.first_entry, first_index, I32(0), num_steps)
    first_visit.prepare_word()
    loads = loader.fill_ring(loader.line.start(tile, first_index, share.first_entry.key_blocks))

    def visit_tile(state: ShareState) -> ShareState:
        num_tiles, step, tile, first_index, loads = state
        entry = cta.load_entry(tile.entry)
        visit = TileVisit.of(cta, tile, entry, first_index, step, num_steps)
        visit.note()
        split = Split(visit, loader, rem(num_tiles, cta.config.stages))
        softmax, loads = split.attend(loads)
        acc, lse = softmax.finish(cta.spec.no_key_threshold)
        visit.store((acc, lse), TileOutput(cta, entry, tile.head).store)
        next_tile = loader.line.next_tile(tile)
        return ShareState(num_tiles + 1, step + visit.num_blocks, next_tile, I32(0), loads)

    state = as_carry(ShareState(I32(0), I32(0), tile, first_index, loads))
    lax.while_loop(lambda state: state.step < num_steps, visit_tile, state)
    async_copy.sync_cta(1)  # the notes of splits are there for all warps then
    merge_splits(cta, lambda entry, head: TileOutput(cta, entry, head).store)
