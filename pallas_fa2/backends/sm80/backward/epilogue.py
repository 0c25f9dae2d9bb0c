"""dK and dV of a block of keys, from registers to device memory."""

import dataclasses
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.primitives import register_io
from pallas_fa2.backends.sm80.backward.memory import Outputs, SharedStorage
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy


@dataclasses.dataclass(frozen=True)
class KeyEpilogue:
    """The stores of dK and dV of a block of keys, or of one of them."""

    schedule: BackwardSchedule
    outputs: Outputs
    memory: SharedStorage
    coordinates: tuple[Any, Any, Any]  # batch entry, head and block of keys
    warpgroup: Any

    def store(self, dk: list[jax.Array], dv: list[jax.Array], score_rows: list[Any]) -> None:
        """Store the tiles of keys of those that are formed: through shared memory; from registers if they are float32; or
        of a head of a group as they lie in registers."""
        (batch, head, block), spec = self.coordinates, self.schedule.spec
        config = self.schedule.config
        if spec.group > 1:
            for target, tiles in ((self.outputs.dk, dk), (self.outputs.dv, dv)):
                for n, tile in enumerate(tiles):
                    self._store_share(target, n, tile)
            return
        if config.is_split:
            self._store_float_rows(self.outputs.dk, dk, spec.scale, score_rows)
            self._store_float_rows(self.outputs.dv, dv, spec.dropout_scale, score_rows)
            return
        if config.adds_dq or config.stages > 1:
            async_copy.sync_cta(config.warpgroups)  # everyone has read K and V
        memory, outputs, first_key = self.memory, self.outputs, block * config.block_kv
        dv_buffer = memory.dout.at[0] if memory.v is None else memory.v
        stores = (
            (memory.k, dk, spec.scale, outputs.dk),
            (dv_buffer, dv, spec.dropout_scale, outputs.dv),
        )
        stores = [store for store in stores if store[1]]
        for buffer, tiles, scale, _ in stores:
            columns = pl.ds(0, buffer.shape[1])
            if config.divides_columns:
                columns = config.share(buffer.shape[1], self.warpgroup)
            for rows, tile in zip(score_rows, tiles, strict=True):
                buffer.at[rows, columns][...] = (tile * scale).astype(buffer.dtype)
        async_copy.sync_cta(config.warpgroups)
        kv_head = arithmetic.div(head, spec.group)
        for buffer, _, _, target in stores:
            target = target.at[batch, pl.ds(first_key, config.block_kv), kv_head]
            async_copy.store_rows(buffer, target, config.warpgroups, spec.kv_len - first_key)

    def _store_float_rows(
        self, target: Any, tiles: list[jax.Array], scale: float, score_rows: list[Any]
    ) -> None:
        """Store float32 tiles of keys from registers."""
        (batch, head, block), spec = self.coordinates, self.schedule.spec
        share = self.warpgroup if self.schedule.config.divides_columns else 0
        # not strict: where dK or dV is not formed, it has no tiles
        for rows, tile in zip(score_rows, tiles, strict=False):
            key = block * self.schedule.config.block_kv + rows.start
            keys = target.at[batch, pl.ds(key, 64), arithmetic.div(head, spec.group)]
            register_io.store_rows(keys, tile * scale, tile.shape[1] * share, spec.kv_len - key)

    def _store_share(self, target: Any, n: int, tile: jax.Array) -> None:
        """Store the n-th tile of keys of a head of a group."""
        (batch, head, block), config = self.coordinates, self.schedule.config
        first, share = block * (config.block_kv // 64), self.warpgroup
        if not config.divides_columns:
            first, share = first + self.warpgroup * config.key_tiles, 0
        register_io.store_fragments(target.at[batch, head, first + n, share], tile)
