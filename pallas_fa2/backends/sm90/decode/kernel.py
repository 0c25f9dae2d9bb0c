"""Decoding on Hopper: FlashAttention-2, Algorithm 1, of few queries over splits of a cache (docs/design/decode.md).

Persistent CTAs of one warpgroup, which loads and multiplies, have equal shares of the blocks of keys of all tiles.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, rem
from pallas_fa2.backends.common.decode.arrays import Cta, Inputs
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.cursor import KvCursor, Tile
from pallas_fa2.backends.common.decode.launch import launch
from pallas_fa2.backends.common.decode.merge import DEAL, TileVisit, merge_splits, note_no_splits
from pallas_fa2.backends.common.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.common.decode.schedule import DecodePlan
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.decode import eight_bit_tile
from pallas_fa2.backends.sm90.decode.eight_bits import OPERAND_DTYPE
from pallas_fa2.backends.sm90.decode.epilogue import TileOutput
from pallas_fa2.backends.sm90.decode.loader import KvLoader
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.backends.sm90.decode.tile import Split
from pallas_fa2.control_flow import as_carry, when
from pallas_fa2.ir.quantized import Scales


def decode(
    spec: DecodeSpec,
    config: DecodeConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: DecodePlan,
    table: jax.Array | None = None,
    mods: ModArrays = NO_MODS,
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [tokens, N, Hv]` and natural `lse [tokens, N]`, float32.

    q is `[tokens, N, H]`, bfloat16 or float16; k and v are `[B, S, K, H]` and `[B, S, K, Hv]`, or pages `[P, page size,
    K, H]` and `[P, page size, K, Hv]` that `table`, int32 `[B, W]`, lists for each request. `mods` are what masks and
    scores read. k and v of 8 bits have `scales`.
    """
    dtype = q.dtype
    if spec.quantized is not None:
        # The kernel loads Q's bits as they are, under the operand's dtype, and converts them in shared memory
        # (`query_operand.py`). This cast is no kernel of XLA's.
        q = lax.bitcast_convert_type(q, OPERAND_DTYPE)
    shape = spec.num_tokens * spec.kv_heads, spec.group, 1, spec.head_dim
    # Q is small: where TMA would load partial panels one by one, they are filled before.
    missing_columns = config.head_dim - spec.head_dim
    grouped = jnp.pad(q.reshape(shape), [(0, 0)] * 3 + [(0, missing_columns)])
    inputs = Inputs(grouped, k, v, plan, table, mods, scales)
    out_type = jax.ShapeDtypeStruct((*shape[:-1], config.value_dim), dtype)
    memory = SharedStorage.allocate(spec, config, dtype)
    out, lse = launch(spec, config, inputs, out_type, memory, visit_share)
    return out[..., : spec.value_dim].reshape(*q.shape[:2], spec.value_dim), lse


class ShareState(NamedTuple):
    """Where a CTA is in its share, before a tile."""

    num_tiles: Scalar  # that it has visited
    step: Scalar  # the blocks that it has visited
    tile: Tile
    first_index: Scalar  # of the tile's blocks, the first that the CTA visits
    cursor: KvCursor


def visit_share(cta: Cta[SharedStorage]) -> None:
    """Visit the blocks of one CTA, a tile after another."""
    share = cta.inputs.plan.load_share(cta.spec, cta.config, lax.axis_index("cta"))
    num_steps, first_entry = share.end - share.begin, share.first_entry
    loader = KvLoader(cta, share)
    tile, first_index = Tile(share.entry, share.head), share.begin - share.tile_begin

    @when(num_steps > 0)
    def load_first_q() -> None:
        loader.load_q(I32(0), first_entry.first_query, share.head)

    share.store_deal(cta.memory.notes.at[DEAL])
    note_no_splits(cta)
    first_visit = TileVisit.of(cta, tile, first_entry, first_index, I32(0), num_steps)
    first_visit.prepare_word()
    first_block = loader.line.start(tile, first_index, first_entry.key_blocks)
    cursor = loader.fill_ring(first_block, num_steps)

    def visit_tile(state: ShareState) -> ShareState:
        num_tiles, step, tile, first_index, cursor = state
        entry = cta.load_entry(tile.entry)
        visit = TileVisit.of(cta, tile, entry, first_index, step, num_steps)
        visit.note()
        next_tile = loader.line.next_tile(tile)

        @when(step + visit.num_blocks < num_steps)
        def load_next_q() -> None:
            loader.load_q(
                num_tiles + 1, cta.load_entry(next_tile.entry).first_query, next_tile.head
            )

        q_slot = rem(num_tiles, 2)
        plgpu.barrier_wait(cta.memory.q_full.at("q", q_slot))
        split = Split(visit, loader, num_steps, q_slot)
        is_plain = cta.spec.quantized is None
        attended = split.attend(cursor) if is_plain else eight_bit_tile.attend(split, cursor)
        softmax, cursor = attended
        acc, lse = softmax.finish(cta.spec.no_key_threshold)
        visit.store((acc, lse), TileOutput(cta, entry, tile.head).store)
        return ShareState(num_tiles + 1, step + visit.num_blocks, next_tile, I32(0), cursor)

    state = as_carry(ShareState(I32(0), I32(0), tile, first_index, cursor))
    lax.while_loop(lambda state: state.step < num_steps, visit_tile, state)
    merge_splits(cta, lambda entry, head: TileOutput(cta, entry, head).store)
    plgpu.wait_smem_to_gmem(0)
