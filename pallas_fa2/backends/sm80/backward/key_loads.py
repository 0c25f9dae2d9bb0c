"""What a CTA of the backward copies to shared memory for a block of keys, and blocks of queries in turn."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common.mask_bits import load_bits
from pallas_fa2.backends.common.primitives import layouts
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

    schedule: BackwardSchedule
    inputs: Inputs
    memory: SharedStorage
    coordinates: tuple[Any, Any, Any]  # batch entry, head and block of keys
    num_steps: Any

    def compute_kv_head(self) -> Any:
        return arithmetic.div(self.coordinates[1], self.schedule.spec.group)

    def load_block(self, t: Any, i: Any) -> None:
        """Begin to copy block i of queries, the t-th, if there is one, and make a group of the copies so far."""
        config, q_len = self.schedule.config, self.schedule.spec.q_len
        first, size = i * config.block_q, config.block_q
        limit = None if q_len % size == 0 else q_len - first
        batch, head, _ = self.coordinates

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

        when(t < self.num_steps)(load)
        async_copy.commit_group()

    def load_keys(self) -> None:
        """Begin to copy K and V; a V that is kept in registers to where dO will be."""
        config, kv_len = self.schedule.config, self.schedule.spec.kv_len
        size, v = config.block_kv, self.memory.v
        if config.v_in_registers:
            v = self.memory.dout.at[0]
        batch, _, block = self.coordinates
        first = block * size
        limit = None if kv_len % size == 0 else kv_len - first
        keys = batch, pl.ds(first, size), self.compute_kv_head()
        for array, buffer in ((self.inputs.k, self.memory.k), (self.inputs.v, v)):
            if buffer is not None:
                async_copy.load_rows(array.at[keys], buffer, config.warpgroups, limit)

    def load_mask_bits(self, i: Any, tile: Any, columns: Any) -> list[jax.Array]:
        """Load the bits of a tile of keys and block i of queries, those of the first of these columns as the highest ones."""
        if not self.schedule.spec.uses_mask_bits:
            return []
        batch, _, block = self.coordinates
        bits = load_bits(self.inputs.mask_bits, batch, block, i, tile)
        # A thread has half a bit a column: 4 values in 8 columns.
        return [word << (columns.start // 2) for word in bits]

    def load_key_powers(self, score_rows: list[Any]) -> list[KeyPowers]:
        """Load the powers of two of each tile of keys of split operands."""
        scales, powers = self.inputs.scales, []
        batch, _, block = self.coordinates
        if scales is None:
            return powers
        for rows in score_rows:
            keys = pl.ds(block * self.schedule.config.block_kv + rows.start, 64)
            place = batch, self.compute_kv_head(), keys
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
