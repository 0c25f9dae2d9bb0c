"""The producers of the forward on a cache of 8 bits: one warpgroup for K and one for V, or one for both.

Numbers come to shared memory by cp.async, are multiplied by their scales, and are stored in the ring in 16 bits.
docs/decisions/0093-tiles-of-8-bits.md says why by these.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives.swizzle import swizzle_columns
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.scheduler import for_each_tile
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.forward.memory import Arrays, KeysOrValues, SharedStorage
from pallas_fa2.backends.sm90.forward.producer import TileLoads
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, PipelinePosition, QueryTile
from pallas_fa2.backends.sm90.forward.staging import ROOMS
from pallas_fa2.backends.sm90.primitives import roles

# What producers load if there is one, or two; the last one has keys.
EIGHT_BIT_PRODUCERS: dict[int, list[tuple[KeysOrValues, ...]]] = {
    1: [("k", "v")],
    2: [("v",), ("k",)],
}
type Scales = dict[KeysOrValues, jax.Array]  # of rows of a block, one of each thread


class _Blocks(NamedTuple):
    """The blocks of K, of V, or of both of one query tile. `ROOMS` parts of each are under way."""

    names: tuple[KeysOrValues, ...]
    loads: TileLoads

    @property
    def parts(self) -> int:
        """In how many parts a block comes."""
        config = self.loads.tile.schedule.config
        return config.block_kv // config.part_keys

    def stage_first(self) -> Scales:
        """Begin to load the first parts of the first block; return its scales, which are under way as well."""
        for part in range(ROOMS):
            for name in self.names:
                self._stage(name, I32(0), part)
        return {name: self._rows(name, I32(0)).load_scales() for name in self.names}

    def store(self, t: Scalar, scales: Scales, load_others: Callable[[], None]) -> Scales:
        """Store the t-th block, of which the first parts are staged, and stage those of the next block; given the scales of both."""
        memory, step = self.loads.memory, self.loads.position.kv_step + t
        dtype = jnp.dtype(self.loads.arrays.inputs.k.dtype).name
        following = dict(scales)
        for part in range(self.parts):
            for name in self.names:
                pipeline, staging = memory.kv_pipeline(name), memory.staging[name]
                if part == 0:
                    staging.share(scales[name])
                    if name == self.names[0]:
                        load_others()
                    pipeline.producer_acquire(step)
                staging.wait(ROOMS * len(self.names) - 1)
                (buffer,) = pipeline.buffers_at(step)
                size = buffer.shape[0] // self.parts
                staging.store(part, buffer.at[pl.ds(part * size, size)], dtype)
                if part + 1 == self.parts:
                    pipeline.producer_commit(step)
                later, next_part = divmod(part + ROOMS, self.parts)
                self._stage(name, t + later, next_part)
                if later and next_part == 0:
                    following[name] = self._rows(name, t + 1).load_scales()
        return following

    def wait(self) -> None:
        """Wait until nothing is under way."""
        self.loads.memory.staging[self.names[0]].wait(0)

    def _stage(self, name: KeysOrValues, t: Scalar, part: int) -> None:
        """Begin to load part of the t-th block."""
        memory = self.loads.memory
        rows = self._rows(name, t, part, self.parts)
        rows.stage(memory.staging[name], part, swizzle_columns(memory.buffer(name)))

    def _rows(self, name: KeysOrValues, t: Scalar, part: int = 0, parts: int = 1) -> EightBitRows:
        """Return where part of the t-th block lies; behind the tile's last block are no rows."""
        loads, num_blocks = self.loads, self.loads.tile.compute_num_kv_blocks()
        keys = loads.key_range(jnp.minimum(t, num_blocks - 1))
        size = keys.size // parts
        rows = loads.kv_rows(name, pl.ds(keys.start + part * size, size))
        return rows._replace(end=jnp.where(t < num_blocks, rows.end, 0))


def produce_eight_bits(
    names: tuple[KeysOrValues, ...],
    schedule: ForwardSchedule,
    arrays: Arrays,
    memory: SharedStorage,
) -> None:
    """Run a producer of K, of V, or of both. That of K loads Q and claims tiles as well."""
    config, has_keys = schedule.config, "k" in names
    roles.set_max_registers(config.registers_per_warpgroup, -1)
    if has_keys:
        arrays.scheduler.prime()

    def produce_tile(
        n: Scalar, work: Sequence[Scalar], position: PipelinePosition, prefetch: Callable
    ) -> tuple[PipelinePosition, Any]:
        """Load what the CTA's n-th tile needs; return the pipelines' position after it, and what is known of the
        next tile."""
        tile = QueryTile(schedule, *work)
        load = TileLoads.of(tile, arrays, memory, position)
        blocks = _Blocks(names, load)

        def store_block(t: Scalar, scales: Scales) -> Scales:
            def load_others() -> None:
                if has_keys:
                    load.claim_next(n, t)
                    load.key_aux(t)

            return blocks.store(t, scales, load_others)

        scales = blocks.stage_first()
        if has_keys:
            load.q(n)
        lax.fori_loop(I32(0), tile.compute_num_kv_blocks(), store_block, scales)
        blocks.wait()
        return tile.advance(position), prefetch()

    for_each_tile(arrays.scheduler, produce_tile, PipelinePosition(I32(0), I32(0)), early=True)
    for name in names:
        memory.kv_pipeline(name).producer_tail()
    if has_keys:
        if memory.key_aux is not None:
            memory.key_aux_pipeline.producer_tail()
        for g in range(config.warpgroups):
            memory.q_pipeline(g).producer_tail()
    roles.sync_before_exit(memory.exit_barriers, 1 if has_keys else 2)
