"""What a CTA of the backward has in memory: arrays outside, and its shared memory."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.split_float32 import GradientScales
from pallas_fa2.backends.sm80.backward.config import BackwardConfig, DqConfig
from pallas_fa2.backends.sm80.tile_list import TileList


class StoredTile(NamedTuple):
    """A tile of keys by queries, P or dS, in shared memory, between registers and a product."""

    tile: Any  # [block_kv, block_q]
    power: Any  # float32 [pieces of block_q, block_kv] of a split tile: what multiplies products of a piece and a row


class SharedStorage(NamedTuple):
    """Shared memory of a CTA; split operands have columns for each term. Buffers that a configuration does not have are
    None.

    Every buffer of split operands begins at a multiple of 1024 bytes, so those of a kind are one.
    """

    k: Any  # [block_kv, H]
    v: Any  # [block_kv, Hv] where dK and dV are formed together
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    ds_tile: Any  # [block_kv, block_q], dS of dQ; where columns are divided, also of dK unless it is split
    lse: Any  # [stages, block_q]; of split operands one of `vectors`
    delta: Any
    p_tile: Any  # [block_kv, block_q] where columns are divided
    dk_ds_tile: Any  # [block_kv, block_q], split dS of dK where columns are divided
    vectors: Any = None  # float32 [4, stages, block_q]: lse, delta and the powers of q and dO
    powers: Any = None  # float32 [stored tiles, pieces, block_kv]: of P, dS of dK and dS of dQ, as far as there are such

    @property
    def p(self) -> Any:
        return self._stored(self.p_tile, 0)

    @property
    def dk_ds(self) -> Any:
        """The dS that the product of dK reads where columns are divided."""
        return self.ds if self.dk_ds_tile is None else self._stored(self.dk_ds_tile, 1)

    @property
    def ds(self) -> Any:
        """The dS that the product of dQ reads."""
        last = 0 if self.powers is None else self.powers.shape[0] - 1
        return self._stored(self.ds_tile, last)

    def _stored(self, tile: Any, index: int) -> Any:
        """Return the `StoredTile` of a tile, with the powers of that index, or None where the kernel has none."""
        if tile is None:
            return None
        return StoredTile(tile, None if self.powers is None else self.powers.at[index])


class DqStorage(NamedTuple):
    """Shared memory of a CTA of the kernel of dQ alone; split operands have columns for each term."""

    q: Any  # [block_q, H]: dQ leaves through it
    dout: Any  # [block_q, Hv] if it is not kept in registers
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    powers: Any = None  # float32 [2, stages, block_kv], of split K and V


class Inputs(NamedTuple):
    """Arrays in device memory that are read; split operands have columns for each term."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]
    # Of whole blocks of rows, T' >= T of them. -lse in base 2, float32 [B, N, T'], is -inf in rows that do not exist or
    # see nothing, so that their P is 0.
    lse: Any
    delta: Any  # -delta of the glossary: dlse - rowsum(dO ∘ O), float32 [B, N, T']
    tiles: TileList | None = None  # under a mask
    aux: AuxInputs | None = None  # what masks, scores and dropout read
    mask_bits: Any = None  # of a mask that is precomputed
    scales: GradientScales | None = None  # of split operands


class Outputs(NamedTuple):
    """Arrays in device memory that are written or added to."""

    dq: Any  # float32 [B, N, blocks of 64 queries, warpgroups, a warpgroup's tile], added to; or None
    dk: Any  # like k, or of each head of a group float32 [B, N, blocks of 64 keys, shares of columns, a share's tile]
    dv: Any
    aux_grads: AuxGrads | None


def shared_storage(config: BackwardConfig, dtype: Any) -> SharedStorage:
    """Return the shared memory that a kernel with a CTA for each block of keys allocates."""
    operand = functools.partial(swizzle.swizzled_smem, dtype=dtype)
    divides, is_split, terms = config.divides_columns, config.is_split, config.terms
    k_panel = config.panel(config.head_dim, divided=True)  # warpgroups divide the columns of dQ
    q_panel, v_panel = (config.panel(dim, divides) for dim in (config.head_dim, config.value_dim))
    columns, v_columns = terms * config.head_dim, terms * config.value_dim
    tile = operand(config.block_kv, terms * config.block_q, panel=config.score_columns)
    tile_powers = config.stored_tiles, config.pieces, config.block_kv
    rows = plgpu.SMEM((config.stages, config.block_q), jnp.float32)
    return SharedStorage(
        k=operand(config.block_kv, columns, panel=k_panel),
        v=operand(config.block_kv, v_columns, panel=v_panel) if all(config.formed) else None,
        q=operand(config.stages, config.block_q, columns, panel=q_panel),
        dout=operand(config.stages, config.block_q, v_columns, panel=v_panel),
        ds_tile=tile if config.adds_dq or (divides and not is_split) else None,
        lse=None if is_split else rows,
        delta=None if is_split else rows,
        p_tile=tile if divides else None,
        dk_ds_tile=tile if divides and is_split else None,
        vectors=plgpu.SMEM((4, *rows.shape), jnp.float32) if is_split else None,
        powers=plgpu.SMEM(tile_powers, jnp.float32) if is_split and config.stored_tiles else None,
    )


def dq_storage(config: DqConfig, dtype: Any) -> DqStorage:
    """Return the shared memory that the kernel of dQ alone allocates."""
    operand = functools.partial(swizzle.swizzled_smem, dtype=dtype)
    panel, v_panel = (
        min(64 if dim % 64 == 0 else 32, config.panel_columns)
        for dim in (config.head_dim, config.value_dim)
    )
    columns, v_columns = config.terms * config.head_dim, config.terms * config.value_dim
    dout = operand(config.block_q, v_columns, panel=v_panel)
    powers = None
    if config.is_split:
        powers = plgpu.SMEM((2, config.stages, config.block_kv), jnp.float32)
    return DqStorage(
        q=operand(config.block_q, columns, panel=panel),
        dout=None if config.dout_in_registers else dout,
        k=operand(config.stages, config.block_kv, columns, panel=panel),
        v=operand(config.stages, config.block_kv, v_columns, panel=v_panel),
        powers=powers,
    )
