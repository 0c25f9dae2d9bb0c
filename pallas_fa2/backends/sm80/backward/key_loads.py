"""What a CTA of the backward copies to shared memory for a block of keys, and blocks of queries in turn."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.primitives import copy_groups, layouts
from pallas_fa2.backends.sm80.backward.key_tile import KeyTile
from pallas_fa2.backends.sm80.backward.memory import Inputs, SharedStorage
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy
from pallas_fa2.control_flow import when


class QueryBuffers(NamedTuple):
    """A block of queries in shared memory."""

    q: Any
    dout: Any
    lse: Any
    delta: Any
    q_power: Any  # of split operands
    dout_power: Any


class KeyPowers(NamedTuple):
    """The powers of two of 64 keys of split operands, float32 `[64]`."""

    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True)
class KeyLoads:
    """The copies of a block of keys for one query head, and of blocks of that head's queries."""

    tile: KeyTile
    inputs: Inputs
    memory: SharedStorage

    @property
    def schedule(self) -> BackwardSchedule:
        return self.tile.schedule

    def load_block(self, t: Any, i: Any) -> None:
        """Begin to copy block i of queries, the t-th, if there is one, and make a group of the copies so far."""
        config, q_len = self.schedule.config, self.schedule.spec.q_len
        first, size = i * config.block_q, config.block_q
        limit = None if q_len % size == 0 else q_len - first
        batch, head = self.tile.head

        def load() -> None:
            block, inputs = self.buffers(t), self.inputs
            for array, buffer in ((inputs.q, block.q), (inputs.dout, block.dout)):
                rows = array.at[batch, pl.ds(first, size), head]
                async_copy.load_rows(rows, buffer, config.warpgroups, limit)
            vectors = [(inputs.lse, block.lse), (inputs.delta, block.delta)]
            if (scales := inputs.scales) is not None:
                vectors += [(scales.q, block.q_power), (scales.dout, block.dout_power)]
            for array, buffer in vectors:
                values = array.at[batch, head, pl.ds(first, size)]
                async_copy.load_vector(values, buffer)

        when(t < self.tile.num_blocks)(load)
        copy_groups.commit_group()

    def load_keys(self) -> None:
        """Begin to copy K and V; a V that is kept in registers to where dO will be."""
        config, kv_len = self.schedule.config, self.schedule.spec.kv_len
        size, v = config.block_kv, self.memory.v
        if config.v_in_registers:
            v = self.memory.dout.at[0]
        batch, _ = self.tile.head
        first = self.tile.compute_first_key()
        limit = None if kv_len % size == 0 else kv_len - first
        keys = batch, pl.ds(first, size), self.tile.compute_kv_head()
        for array, buffer in ((self.inputs.k, self.memory.k), (self.inputs.v, v)):
            if buffer is not None:
                async_copy.load_rows(array.at[keys], buffer, config.warpgroups, limit)

    def load_key_powers(self, score_rows: list[Any]) -> list[KeyPowers]:
        """Load the powers of two of each tile of keys of split operands."""
        scales, powers = self.inputs.scales, []
        if scales is None:
            return powers
        for rows in score_rows:
            keys = pl.ds(self.tile.compute_first_key() + rows.start, 64)
            place = self.tile.head[0], self.tile.compute_kv_head(), keys
            arrays = (x.at[place] for x in (scales.k, scales.v))
            powers.append(KeyPowers(*(layouts.load_row(0, x, jnp.float32) for x in arrays)))
        return powers

    def load_query_powers(self, t: Any, columns: Any) -> list[jax.Array | None]:
        """Load the powers of two of some queries' q and dO, of split operands, from the t-th block."""
        if not self.schedule.config.is_split:
            return [None, None]
        block = self.buffers(t)
        buffers = block.q_power, block.dout_power
        return [layouts.load_row(1, x.at[columns], jnp.float32) for x in buffers]

    def buffers(self, t: Any) -> QueryBuffers:
        """Return where the t-th block of queries lies."""
        stages, m = self.schedule.config.stages, self.memory
        stage = arithmetic.rem(t, stages) if stages > 1 else 0
        if self.schedule.config.is_split:
            vectors = [m.vectors.at[i, stage] for i in range(4)]
        else:
            vectors = [m.lse.at[stage], m.delta.at[stage], None, None]
        return QueryBuffers(m.q.at[stage], m.dout.at[stage], *vectors)
