"""The producers of the forward on a cache of 8 bits: one warpgroup for K and one for V, or one for both.

Numbers come to shared memory by cp.async, are multiplied by their scales, and are stored in the ring in 16 bits.
docs/decisions/0093-tiles-of-8-bits.md says why by cp.async, and why by two warpgroups.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.primitives import copy_groups
from pallas_fa2.backends.common.primitives.swizzle import swizzle_columns
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.forward.memory import Arrays, KeysOrValues, SharedStorage
from pallas_fa2.backends.sm90.forward.producer import TileLoads, run_producer
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule
from pallas_fa2.backends.sm90.forward.staging import STAGES

type Scales = dict[KeysOrValues, jax.Array]  # of rows of a block, one of each thread


class _Blocks(NamedTuple):
    """The blocks of K, of V, or of both of one query tile. `STAGES` subtiles of each are under way."""

    names: tuple[KeysOrValues, ...]
    loads: TileLoads

    @property
    def subtiles(self) -> int:
        """How many subtiles a block has, which take turns in the stages."""
        config = self.loads.tile.schedule.config
        assert config.block_kv % (config.subtile_kv * STAGES) == 0
        return config.block_kv // config.subtile_kv

    def begin(self) -> Scales:
        """Begin to load the first subtiles of the first block; return its scales, which are under way as well."""
        for name in self.names:
            for subtile in range(STAGES):
                self._copy_async(name, I32(0), subtile)
        if len(self.names) > 1:
            # there are fewer groups of copies behind them than `_store_subtile` takes for granted
            copy_groups.wait_groups(0)
        return {name: self._rows(name, I32(0)).load_scales() for name in self.names}

    def store(self, t: Scalar, scales: Scales, claim: Callable[[], None]) -> Scales:
        """Store the t-th block, of which the first subtiles are under way, and begin to load those of the next block;
        given the block's scales, return the next one's.

        `claim` has a branch, at which ptxas waits for loads to registers: it runs when scales are stored, and none is
        under way.
        """
        memory, step = self.loads.memory, self.loads.position.kv_step + t
        following = dict(scales)
        for name in self.names:
            pipeline = memory.kv_pipeline(name)
            memory.staging[name].share(scales[name])
            if name == self.names[0]:
                claim()
            pipeline.producer_acquire(step)
            for subtile in range(self.subtiles):
                self._store_subtile(name, step, subtile)
                if subtile + 1 == self.subtiles:
                    # a fence, which waits for all that is under way
                    pipeline.producer_commit(step)
                later, next_subtile = divmod(subtile + STAGES, self.subtiles)
                self._copy_async(name, t + later, next_subtile)
                if next_subtile == 0:
                    following[name] = self._rows(name, t + 1).load_scales()
        return following

    def _store_subtile(self, name: KeysOrValues, step: Scalar, subtile: int) -> None:
        memory, arrays = self.loads.memory, self.loads.arrays
        # Groups of copies behind this one: of the next subtile, and of a block of K or V that came between.
        between = (len(self.names) - 1) * self.subtiles if subtile < STAGES else 0
        copy_groups.wait_groups(STAGES - 1 + between)
        (buffer,) = memory.kv_pipeline(name).buffers_at(step)
        size = buffer.shape[0] // self.subtiles
        rows = buffer.at[pl.ds(subtile * size, size)]
        memory.staging[name].store(subtile, rows, jnp.dtype(arrays.inputs.k.dtype).name)

    def _copy_async(self, name: KeysOrValues, t: Scalar, subtile: int) -> None:
        """Begin to copy a subtile of the t-th block."""
        memory = self.loads.memory
        rows = self._rows(name, t, subtile, self.subtiles)
        rows.copy_async(memory.staging[name], subtile, swizzle_columns(memory.buffer(name)))

    def _rows(
        self, name: KeysOrValues, t: Scalar, subtile: int = 0, subtiles: int = 1
    ) -> EightBitRows:
        """Return where the t-th block lies, or one of so many subtiles; behind the tile's last block are no rows."""
        loads, num_blocks = self.loads, self.loads.tile.compute_num_kv_blocks()
        keys = loads.key_range(jnp.minimum(t, num_blocks - 1))
        size = keys.size // subtiles
        rows = loads.kv_rows(name, pl.ds(keys.start + subtile * size, size))
        return rows._replace(end=jnp.where(t < num_blocks, rows.end, 0))


def produce_eight_bits(
    names: tuple[KeysOrValues, ...],
    exit_branch: int,
    schedule: ForwardSchedule,
    arrays: Arrays,
    memory: SharedStorage,
) -> None:
    """Run a producer of K, of V, or of both. That of K claims tiles, and that of V loads Q: a tile's first keys do not
    wait until the last tile has left Q's buffer."""
    assert memory.key_aux is None, "`unsupported_tiles` says so"
    claims = "k" in names

    def load_tile(n: Scalar, load: TileLoads, prefetch: Callable) -> Any:
        blocks = _Blocks(names, load)

        def store_block(t: Scalar, scales: Scales) -> Scales:
            return blocks.store(t, scales, lambda: load.claim_next(n, t) if claims else None)

        scales = blocks.begin()
        if "v" in names:
            load.q(n)
        lax.fori_loop(I32(0), load.tile.compute_num_kv_blocks(), store_block, scales)
        copy_groups.wait_groups(0)  # for zeros behind the last block
        return prefetch()

    pipelines = [memory.kv_pipeline(name) for name in names]
    if "v" in names:
        pipelines += [memory.q_pipeline(g) for g in range(schedule.config.warpgroups)]
    run_producer(schedule, arrays, memory, load_tile, pipelines, exit_branch, claims)


def eight_bit_producers(config: ForwardConfig, *args: Any) -> list[Callable[[], None]]:
    """Return the producers of a configuration, given the rest of what `produce_eight_bits` takes."""
    of_each: list[tuple[KeysOrValues, ...]] = (
        [("k", "v")] if config.producers == 1 else [("v",), ("k",)]
    )
    return [
        functools.partial(produce_eight_bits, names, 1 + i, *args)
        for i, names in enumerate(of_each)
    ]
