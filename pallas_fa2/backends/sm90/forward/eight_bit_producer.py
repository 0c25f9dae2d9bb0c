"""The producers of the forward on a cache of 8 bits: one warpgroup for K and one for V, or one for both.

Numbers come to shared memory by cp.async, are multiplied by their scales, and are stored in the ring in 16 bits.
docs/decisions/0093-tiles-of-8-bits.md says why by these.
"""

import functools
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
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.forward.memory import Arrays, KeysOrValues, SharedStorage
from pallas_fa2.backends.sm90.forward.producer import TileLoads
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, PipelinePosition, QueryTile
from pallas_fa2.backends.sm90.forward.staging import ROOMS
from pallas_fa2.backends.sm90.primitives import roles

type Scales = dict[KeysOrValues, jax.Array]  # of rows of a block, one of each thread


class _Blocks(NamedTuple):
    """The blocks of K, of V, or of both of one query tile. `ROOMS` parts of each are under way."""

    names: tuple[KeysOrValues, ...]
    loads: TileLoads

    @property
    def parts(self) -> int:
        """In how many parts a block comes, which take turns in the rooms."""
        config = self.loads.tile.schedule.config
        assert config.block_kv % (config.part_keys * ROOMS) == 0
        return config.block_kv // config.part_keys

    def stage_first(self) -> Scales:
        """Begin to load the first parts of the first block; return its scales, which are under way as well."""
        for name in self.names:
            for part in range(ROOMS):
                self._stage(name, I32(0), part)
        if len(self.names) > 1:
            self.wait()  # there are fewer groups of copies behind them than `_store_part` takes for granted
        return {name: self._rows(name, I32(0)).load_scales() for name in self.names}

    def store(self, t: Scalar, scales: Scales, claim: Callable[[], None]) -> Scales:
        """Store the t-th block, of which the first parts are staged, and stage those of the next block; given the scales of both.

        `claim` has a branch, at which ptxas waits for loads to registers: it runs when scales are stored, and none is under way.
        """
        memory, step = self.loads.memory, self.loads.position.kv_step + t
        following = dict(scales)
        for name in self.names:
            pipeline = memory.kv_pipeline(name)
            memory.staging[name].share(scales[name])
            if name == self.names[0]:
                claim()
            pipeline.producer_acquire(step)
            for part in range(self.parts):
                self._store_part(name, step, part)
                if part + 1 == self.parts:
                    # a fence, which waits for all that is under way
                    pipeline.producer_commit(step)
                later, next_part = divmod(part + ROOMS, self.parts)
                self._stage(name, t + later, next_part)
                if next_part == 0:
                    following[name] = self._rows(name, t + 1).load_scales()
        return following

    def wait(self) -> None:
        """Wait until no copy is under way."""
        self.loads.memory.staging[self.names[0]].wait(0)

    def _store_part(self, name: KeysOrValues, step: Scalar, part: int) -> None:
        memory, arrays = self.loads.memory, self.loads.arrays
        # Groups of copies behind this part's: of the next part, and of a whole block of the other name if it came between.
        others = (len(self.names) - 1) * self.parts if part < ROOMS else 0
        memory.staging[name].wait(ROOMS - 1 + others)
        (buffer,) = memory.kv_pipeline(name).buffers_at(step)
        size = buffer.shape[0] // self.parts
        rows = buffer.at[pl.ds(part * size, size)]
        memory.staging[name].store(part, rows, jnp.dtype(arrays.inputs.k.dtype).name)

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
    exit_branch: int,
    schedule: ForwardSchedule,
    arrays: Arrays,
    memory: SharedStorage,
) -> None:
    """Run a producer of K, of V, or of both. That of K claims tiles, and that of V loads Q: a tile's first keys do not wait
    until the last tile has left Q's buffer."""
    config = schedule.config
    roles.set_max_registers(config.registers_per_warpgroup, -1)
    assert memory.key_aux is None, "`unsupported_tiles` says so"
    if "k" in names:
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
            return blocks.store(t, scales, lambda: load.claim_next(n, t) if "k" in names else None)

        scales = blocks.stage_first()
        if "v" in names:
            load.q(n)
        lax.fori_loop(I32(0), tile.compute_num_kv_blocks(), store_block, scales)
        blocks.wait()  # for zeros behind the last block
        return tile.advance(position), prefetch()

    for_each_tile(arrays.scheduler, produce_tile, PipelinePosition(I32(0), I32(0)), early=True)
    pipelines = [memory.kv_pipeline(name) for name in names]
    if "v" in names:
        pipelines += [memory.q_pipeline(g) for g in range(config.warpgroups)]
    for pipeline in pipelines:
        pipeline.producer_tail()
    roles.sync_before_exit(memory.exit_barriers, exit_branch)


def eight_bit_producers(config: ForwardConfig, *args: Any) -> list[Callable[[], None]]:
    """Return the producers of a configuration, given the rest of what `produce_eight_bits` takes."""
    of_each: list[tuple[KeysOrValues, ...]] = (
        [("k", "v")] if config.producers == 1 else [("v",), ("k",)]
    )
    return [
        functools.partial(produce_eight_bits, names, 1 + i, *args)
        for i, names in enumerate(of_each)
    ]
