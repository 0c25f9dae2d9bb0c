"""FlashAttention-2, Algorithm 2, by mma.sync: a CTA for each block of keys of a head.

The products are transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave registers as left operands of dV
and dK. dS goes through shared memory once, for dQ, which is added up in float32 in device memory. Heads of a group have
dK and dV of their own, which are added up afterwards: with all heads in one CTA, Q and dO of more heads than L2 holds
are in use at a time (a call with gradients took 1.19 of the time, llama8b_8k).

From H = 128 on (`divides_columns`) the warpgroups divide the columns of dK, dV and dQ, each forms the scores of half of
the queries, and P goes through shared memory as dS does. Where shared memory has no room for that, dK and dV have a
kernel each (`apart`), and dQ another one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import accumulate, launch, register_io, swizzle
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.key_block import KeyBlock
from pallas_fa2.backends.sm80.backward.memory import Inputs, Outputs, SharedStorage, shared_storage
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy


def gradients(
    spec: KernelSpec, config: BackwardConfig, inputs: Inputs, like: tuple[Any, Any, Any]
) -> tuple[jax.Array | None, jax.Array, jax.Array, AuxGrads | None]:
    """Return dq, dk and dv, like q `[B, T, N, H]`, k `[B, S, K, H]` and v `[B, S, K, Hv]`, which are `like`, and
    gradients of aux inputs.

    Under a mask, `inputs.tiles` lists the blocks of keys and the blocks of queries of each. dq is None where it has a
    kernel of its own (`dq_kernel`).
    """
    (q, k, v), aux = like, inputs.aux
    schedule, sums = BackwardSchedule(spec, config), None
    if config.adds_dq:
        shape = tiles_shape(spec, schedule.q_blocks, config.head_dim, config.warpgroups)
        sums = jnp.zeros(shape, jnp.float32)
    dk, dv = lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype)
    if spec.group > 1:
        blocks = schedule.kv_tiles * (config.block_kv // 64)
        dk, dv = (
            lax.empty(tiles_shape(spec, blocks, dim, config.column_shares), jnp.float32)
            for dim in (config.head_dim, config.value_dim)
        )
    aux_grads = None
    if aux is not None:
        aux = aux.with_index_row(*config.tile)
        if spec.score is not None:
            lengths = schedule.q_blocks * config.block_q, schedule.kv_tiles * config.block_kv
            aux_grads = AuxGrads.zeros(spec, q.dtype, lengths, aux)
    inputs = inputs._replace(aux=aux)
    outputs = Outputs(sums, dk, dv, aux_grads)
    if config.apart:
        dk_config, dv_config = config.launches
        of_keys = launch_key_blocks(spec, dk_config, inputs, outputs._replace(dv=None))
        of_values = launch_key_blocks(spec, dv_config, inputs, Outputs(None, None, dv, None))
        outputs = of_keys._replace(dv=of_values.dv)
    else:
        outputs = launch_key_blocks(spec, config, inputs, outputs)
    dq, dk, dv, aux_grads = outputs
    if config.adds_dq:
        dq = convert_tiles(dq, q, spec.scale, config.vector_atomics)
    if spec.group > 1:
        dk = convert_tiles(dk, k, spec.scale, vectors=True)
        dv = convert_tiles(dv, v, spec.dropout_scale, vectors=True)
    return dq, dk, dv, aux_grads


def launch_key_blocks(
    spec: KernelSpec, config: BackwardConfig, inputs: Inputs, outputs: Outputs
) -> Outputs:
    """Return the outputs after a kernel with a CTA for each block of keys has stored and added to those that are
    given."""
    schedule = BackwardSchedule(spec, config)

    def run(inputs: Inputs, outputs: Outputs, memory: SharedStorage) -> None:
        KeyBlock.start(schedule, inputs, outputs, memory).differentiate()

    return launch.run_in_place(
        "attention_gradients",
        run,
        shared_storage(config, inputs.q.dtype),
        inputs,
        outputs,
        {"cta": schedule.raster_order.count},
        config.warpgroups,
    )


def tiles_shape(spec: KernelSpec, blocks: int, dim: int, shares: int) -> tuple[int, ...]:
    """Return the shape of float32 tiles of all heads, `[B, N, blocks of 64 rows, shares of columns, a share's
    tile]`."""
    return spec.batch, spec.q_heads, blocks, shares, 64 * dim // shares


def convert_tiles(tiles: jax.Array, like: jax.Array, scale: float, vectors: bool) -> jax.Array:
    """Return dQ, dK or dV like q, k or v `[B, T, K, H]` from float32 tiles, `[B, N, blocks, shares, a share's tile]`,
    of which those of a group's heads are added up."""
    batch, length, heads, _ = like.shape
    _, q_heads, blocks, shares, size = tiles.shape
    columns, group = size // 64, q_heads // heads

    def run(refs: tuple, memory: list[Any]) -> None:
        tiles, target = refs
        entry, head, block = arithmetic.unravel(lax.axis_index("cta"), (batch, heads, blocks))
        share = lax.axis_index("warpgroup") if shares > 1 else I32(0)
        each = (tiles.at[entry, head * group + i, block, share] for i in range(group))
        loaded = (accumulate.load_tile(x, columns, vectors) for x in each)
        total = functools.reduce(jnp.add, loaded) * scale
        if not memory:  # float32
            rows = target.at[entry, pl.ds(block * 64, 64), head]
            register_io.store_rows(rows, total, share * columns, length - block * 64)
            return
        (buffer,) = memory
        buffer.at[:, pl.ds(share * columns, columns)][...] = total.astype(like.dtype)
        async_copy.sync_cta(shares)
        rows = target.at[entry, pl.ds(block * 64, 64), head]
        async_copy.store_rows(buffer, rows, shares, length - block * 64)

    memory = []
    if like.dtype != jnp.float32:
        panel = 64 if columns % 64 == 0 else 32
        memory = [swizzle.swizzled_smem(64, shares * columns, dtype=like.dtype, panel=panel)]
    out_type = jax.ShapeDtypeStruct(like.shape, like.dtype)
    kernel = launch.build_kernel(
        "convert", run, memory, out_type, {"cta": batch * heads * blocks}, shares
    )
    return kernel(tiles)
