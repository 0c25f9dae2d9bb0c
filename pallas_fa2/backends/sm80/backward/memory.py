"""What a CTA of the backward has in memory: arrays outside, and its shared memory."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.sm80.backward.config import BackwardConfig, DqConfig


class SharedStorage(NamedTuple):
    """Shared memory of a CTA."""

    k: Any  # [block_kv, H]
    v: Any  # [block_kv, Hv] where dK and dV are formed together
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    ds: Any  # [block_kv, block_q] where it goes through shared memory
    lse: Any  # [stages, block_q]
    delta: Any  # [stages, block_q]
    p: Any  # [block_kv, block_q] where columns are divided


class DqStorage(NamedTuple):
    """Shared memory of a CTA of the kernel of dQ alone."""

    q: Any  # [block_q, H]: dQ leaves through it
    dout: Any  # [block_q, Hv] if it is not kept in registers
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]


class Inputs(NamedTuple):
    """Arrays in device memory that are read."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]
    # Of whole blocks of rows, T' >= T of them. -lse in base 2, float32 [B, N, T'], is -inf in rows that do not exist or see
    # nothing, so that their P is 0.
    lse: Any
    delta: Any  # dlse - rowsum(dO ∘ O), float32 [B, N, T']
    block_mask: BlockMask | None = None  # of each tile, under a mask
    aux: AuxInputs | None = None  # what masks, scores and dropout read
    mask_bits: Any = None  # of a mask that is precomputed


class Outputs(NamedTuple):
    """Arrays in device memory that are written or added to."""

    dq: Any  # float32 [B, N, blocks of 64 queries, warpgroups, a warpgroup's tile], added to; or None
    dk: Any  # like k, or of each head of a group float32 [B, N, blocks of 64 keys, shares of columns, a share's tile]
    dv: Any
    aux_grads: AuxGrads | None


def shared_storage(config: BackwardConfig, dtype: Any) -> SharedStorage:
    operand = functools.partial(swizzle.swizzled_smem, dtype=dtype)
    split = config.split_columns
    k_panel = config.panel(config.head_dim, shared=True)  # for dQ
    q_panel, v_panel = (config.panel(dim, split) for dim in (config.head_dim, config.value_dim))
    tile = operand(config.block_kv, config.block_q, panel=config.score_columns)
    rows = plgpu.SMEM((config.stages, config.block_q), jnp.float32)
    return SharedStorage(
        k=operand(config.block_kv, config.head_dim, panel=k_panel),
        v=operand(config.block_kv, config.value_dim, panel=v_panel) if all(config.formed) else None,
        q=operand(config.stages, config.block_q, config.head_dim, panel=q_panel),
        dout=operand(config.stages, config.block_q, config.value_dim, panel=v_panel),
        ds=tile if config.stored_tiles else None,
        lse=rows,
        delta=rows,
        p=tile if split else None,
    )


def dq_storage(config: DqConfig, dtype: Any) -> DqStorage:
    operand = functools.partial(swizzle.swizzled_smem, dtype=dtype)
    panel, v_panel = (64 if dim % 64 == 0 else 32 for dim in (config.head_dim, config.value_dim))
    dout = operand(config.block_q, config.value_dim, panel=v_panel)
    return DqStorage(
        q=operand(config.block_q, config.head_dim, panel=panel),
        dout=None if config.dout_in_registers else dout,
        k=operand(config.stages, config.block_kv, config.head_dim, panel=panel),
        v=operand(config.stages, config.block_kv, config.value_dim, panel=v_panel),
    )
