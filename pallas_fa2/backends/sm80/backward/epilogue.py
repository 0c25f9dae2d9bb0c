"""dK and dV of a block of keys, from registers to device memory."""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_fa2.backends.common.primitives import register_io
from pallas_fa2.backends.sm80.backward.key_tile import KeyTile
from pallas_fa2.backends.sm80.backward.memory import Outputs, SharedStorage
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy


@dataclasses.dataclass(frozen=True)
class KeyEpilogue:
    """The stores of dK and dV of a block of keys, or of one of them."""

    keys: KeyTile
    outputs: Outputs
    memory: SharedStorage

    @property
    def schedule(self) -> BackwardSchedule:
        return self.keys.schedule

    def store(self, dk: list[jax.Array], dv: list[jax.Array]) -> None:
        """Store the warpgroup's tiles of keys of dK and of dV, of which one may have none.

        The heads of a group have sums of their own, which are stored as they lie in registers. Otherwise float32 is
        stored from registers, and 16 bits through shared memory.
        """
        spec, config = self.schedule.spec, self.schedule.config
        if spec.group > 1:
            for target, tiles in ((self.outputs.dk, dk), (self.outputs.dv, dv)):
                for n, tile in enumerate(tiles):
                    self._store_share(target, n, tile)
            return
        if config.is_split:
            self._store_float_rows(self.outputs.dk, dk, spec.scale)
            self._store_float_rows(self.outputs.dv, dv, spec.dropout_scale)
            return
        if config.adds_dq or config.stages > 1:
            async_copy.sync_cta(config.warpgroups)  # everyone has read K and V
        memory, outputs, first_key = self.memory, self.outputs, self.keys.compute_first_key()
        dv_buffer = memory.dout.at[0] if memory.v is None else memory.v
        stores = (
            (memory.k, dk, spec.scale, outputs.dk),
            (dv_buffer, dv, spec.dropout_scale, outputs.dv),
        )
        stores = [store for store in stores if store[1]]
        for buffer, tiles, scale, _ in stores:
            columns = pl.ds(0, buffer.shape[1])
            if config.divides_columns:
                columns = config.share(buffer.shape[1], self.keys.warpgroup)
            for rows, tile in zip(self.keys.slice_score_rows(), tiles, strict=True):
                buffer.at[rows, columns][...] = (tile * scale).astype(buffer.dtype)
        async_copy.sync_cta(config.warpgroups)
        batch, kv_head = self.keys.head[0], self.keys.compute_kv_head()
        for buffer, _, _, target in stores:
            target = target.at[batch, pl.ds(first_key, config.block_kv), kv_head]
            async_copy.store_rows(buffer, target, config.warpgroups, spec.kv_len - first_key)

    def _store_float_rows(self, target: Any, tiles: list[jax.Array], scale: float) -> None:
        """Store float32 tiles of keys from registers."""
        spec, batch = self.schedule.spec, self.keys.head[0]
        share = self.keys.warpgroup if self.schedule.config.divides_columns else 0
        # not strict: where dK or dV is not formed, it has no tiles
        for rows, tile in zip(self.keys.slice_score_rows(), tiles, strict=False):
            key = self.keys.compute_first_key() + rows.start
            keys = target.at[batch, pl.ds(key, 64), self.keys.compute_kv_head()]
            register_io.store_rows(keys, tile * scale, tile.shape[1] * share, spec.kv_len - key)

    def _store_share(self, target: Any, n: int, tile: jax.Array) -> None:
        """Store the warpgroup's n-th tile of keys of a head of a group."""
        (batch, head, block), config = self.keys.coordinates, self.schedule.config
        first, share = block * (config.block_kv // 64), self.keys.warpgroup
        if not config.divides_columns:
            first, share = first + share * config.key_tiles, 0
        register_io.store_fragments(target.at[batch, head, first + n, share], tile)
