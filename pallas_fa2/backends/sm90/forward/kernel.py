"""The forward on Hopper: FlashAttention-2, Algorithm 1, in persistent CTAs (docs/design/forward.md).

One warpgroup, the producer, streams K and V through ring buffers by TMA, and the next tile's Q (of 8 bits, one or two
do so by their threads); the consumers own 64 query rows each.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.decode.mods import NO_MODS, ModArrays
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.scheduler import (
    DynamicTileScheduler,
    StaticTileScheduler,
    launch_persistent,
)
from pallas_fa2.backends.sm90.forward.cached_tiles import (
    CachedPlan,
    CachedTiles,
    kernel_spec,
    pack_head_inputs,
)
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.consumer import consume
from pallas_fa2.backends.sm90.forward.eight_bit_producer import eight_bit_producers
from pallas_fa2.backends.sm90.forward.memory import Arrays, Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm90.forward.producer import produce
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule
from pallas_fa2.backends.sm90.primitives import roles
from pallas_fa2.ir.quantized import Scales


def attention(
    spec: KernelSpec,
    config: ForwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    block_mask: BlockMask | None = None,
    aux: AuxInputs | None = None,
    mask_bits: jax.Array | None = None,
    cached: CachedPlan | None = None,
    table: jax.Array | None = None,
    scales: Scales | None = None,
    outputs: Outputs | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` and natural `lse [B, N, T']`; T' is T rounded up to whole tiles.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, bfloat16 or float16; head dims are `config`'s or
    less. Under a mask, `block_mask` lists the key blocks of every tile; `aux` is what masks and scores read,
    and `mask_bits` the bits of a mask that is precomputed.

    `cached` plans the tiles of a cache: k and v are `[requests, S, K, H]` and `[requests, S, K, Hv]`, or pages that
    `table` lists for each request, of 8 bits with `scales` or of 16, B is 1, T the rows of all requests, and lse is
    `[B, T, N]`. Rows that have no tile stay as they are in `outputs`, if these are given.
    """
    key_rows = aux.k.shape[1] + 1 if aux is not None and spec.loads_key_aux() else 0
    if not spec.pairwise_inputs():
        config = config.with_double_buffered_q(key_rows)
    schedule = ForwardSchedule(spec, config)
    tiles = schedule.tile_scheduler(block_mask) if cached is None else cached.scheduler
    inputs = Inputs(q, k, v, mask_bits=mask_bits)
    if block_mask is not None:
        inputs = inputs._replace(block_indices=jnp.asarray(block_mask.block_indices))
    if aux is not None:
        inputs = inputs._replace(aux=aux.with_index_row(config.block_q, config.block_kv))
    lse_shape = spec.batch, spec.q_heads, schedule.q_tiles * config.block_q
    if cached is not None:
        inputs = inputs._replace(cached=CachedTiles(cached.entries, table, scales))
        lse_shape = spec.batch, q.shape[1], spec.q_heads
    if outputs is None:
        outputs = Outputs(
            lax.empty((*q.shape[:3], v.shape[3]), q.dtype), lax.empty(lse_shape, jnp.float32)
        )

    def run(
        tiles: StaticTileScheduler | DynamicTileScheduler,
        inputs: Inputs,
        outputs: Outputs,
        memory: SharedStorage,
    ) -> None:
        arrays, warpgroup = Arrays(tiles, inputs, outputs), lax.axis_index("warpgroup")
        consumer = functools.partial(consume, schedule, arrays, memory, warpgroup)
        producers = [functools.partial(produce, schedule, arrays, memory)]
        if arrays.has_eight_bits:
            producers = eight_bit_producers(config, schedule, arrays, memory)
        roles.dispatch_warpgroups(warpgroup, *[consumer] * config.warpgroups, *producers)

    memory = SharedStorage.allocate(spec, config, q, v, key_rows)
    out, lse = launch_persistent(
        "attention",
        run,
        memory,
        tiles,
        inputs,
        outputs,
        len(config.registers_per_warpgroup),
    )
    return out, lse


def attention_on_cache(
    spec: DecodeSpec,
    config: ForwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plan: CachedPlan,
    table: jax.Array | None = None,
    mods: ModArrays = NO_MODS,
    scales: Scales | None = None,
    others: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [tokens, N, Hv]` and natural `lse [tokens, N]`, float32, as the decode kernel does.

    q is `[tokens, N, H]`; k and v are `[B, S, K, H]` and `[B, S, K, Hv]`, or pages `[P, page size, K, H]` and `[P, page
    size, K, Hv]` that `table`, int32 `[B, W]`, lists for each request; of 8 bits with `scales`, or of 16. `mods` are
    what scores read of heads, `others` out and lse of the rows that have no tile, which otherwise are anything.
    """
    launch, aux = kernel_spec(spec, config), pack_head_inputs(spec, config, mods)
    outputs = None if others is None else Outputs(*(x[None] for x in others))
    out, lse = attention(
        launch,
        config,
        q[None],
        k,
        v,
        aux=aux,
        cached=plan,
        table=table,
        scales=scales,
        outputs=outputs,
    )
    return out[0], lse[0]
