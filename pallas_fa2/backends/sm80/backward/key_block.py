"""Algorithm 2 for a block of keys, line by line."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.block_mask import reversed_block_id
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.key_mods import KeyMods
from pallas_fa2.backends.common.mask_bits import load_bits
from pallas_fa2.backends.common.primitives import accumulate, layouts, thread_values
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.epilogue import KeyEpilogue
from pallas_fa2.backends.sm80.backward.memory import Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy, mma
from pallas_fa2.control_flow import cond, when


@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """A block of keys for one query head, and the blocks of that head's queries that see it."""

    schedule: BackwardSchedule
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage
    coordinates: tuple[Any, Any, Any]  # batch entry, head and block of keys
    first_block: Any  # of queries that see a key, without a general mask
    num_steps: Any
    num_full: Any  # under a general mask: the first of them
    warpgroup: Any

    @classmethod
    def start(
        cls, schedule: BackwardSchedule, inputs: Inputs, outputs: Outputs, memory: SharedStorage
    ) -> "KeyBlock":
        coordinates = schedule.coordinates(lax.axis_index("cta"))
        warpgroup = lax.axis_index("warpgroup") if schedule.config.warpgroups > 1 else I32(0)
        first_block, num_full = I32(0), I32(0)
        if inputs.block_mask is None:
            first_block = schedule.first_q_block(coordinates[2])
            num_steps = schedule.q_blocks - first_block
        else:
            num_steps, num_full = inputs.block_mask.load_counts(coordinates)
        counts = first_block, num_steps, num_full, warpgroup
        return cls(schedule, inputs, outputs, memory, coordinates, *counts)

    @property
    def batch(self) -> Any:
        return self.coordinates[0]

    @property
    def head(self) -> Any:
        return self.coordinates[1]

    def compute_kv_head(self) -> Any:
        return arithmetic.div(self.head, self.spec.group)

    def compute_first_key(self) -> Any:
        return self.coordinates[2] * self.config.block_kv

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    def differentiate(self) -> None:
        """Compute dK and dV of the block, and add to dQ if it has no kernel of its own: Algorithm 2, lines 6-18."""
        first = self.load_q_block(I32(0))
        v = self.load_keys()
        self.load_block(I32(0), first)
        split = self.config.split_columns
        dims = (self.config.head_dim, self.config.value_dim)
        columns = (self.config.share(dim, 0).size if split else dim for dim in dims)
        counts = (self.config.key_tiles * formed for formed in self.config.formed)
        dk, dv = (
            [thread_values.zero_accumulator((64, n)) for _ in range(count)]
            for n, count in zip(columns, counts, strict=True)
        )  # line 7
        body = functools.partial(self.step, v)
        _, dk, dv = lax.fori_loop(I32(0), self.num_steps, body, (first, dk, dv))
        arrays = self.outputs, self.memory
        epilogue = KeyEpilogue(self.schedule, *arrays, self.coordinates, self.warpgroup)
        epilogue.store(dk, dv, self.slice_score_rows())  # line 18 at the end of the loop

    def step(self, v: list, t: Any, carry: tuple) -> tuple:
        """Add what the t-th block of queries that is visited, i, gives: Algorithm 2, lines 9-16.

        `v` are the fragments of V, if they are kept in registers.
        """
        i, dk, dv = carry
        next_i = self.load_q_block(t + 1)
        q, dout, lse, delta = self.buffers(t)
        self.wait_for_copies()  # the block is there, and everyone has read the one before
        if self.config.stages > 1:
            self.load_block(t + 1, next_i)
        for columns in self.slice_score_columns():
            rows = self.slice_score_rows()
            mods = [self.load_mods(i, x, columns, masked=False) for x in rows]
            s = self.multiply_keys(self.memory.k, q.at[columns])  # line 10
            column_lse = layouts.load_row(1, lse.at[columns], jnp.float32)
            exponents = [m.exponents(x, column_lse) for m, x in zip(mods, s, strict=True)]
            exponents = self.mask(exponents, t, i, columns)
            tiles = zip(mods, exponents, strict=True)
            p = [m.apply_dropout(m.probabilities(x)) for m, x in tiles]  # line 11
            ds = []
            if dk:
                dp = self.multiply_keys(self.memory.v, dout.at[columns], v)  # line 13
                column_delta = layouts.load_row(1, delta.at[columns], jnp.float32)
                tiles = zip(mods, zip(p, s, dp, strict=True), strict=True)
                ds = [m.ds(*x, column_delta).astype(q.dtype) for m, x in tiles]  # line 14
            p = [m.zero_dropped(x).astype(q.dtype) for m, x in zip(mods, p, strict=True)]
            if self.config.stored_tiles:
                self.store_tiles(self.memory.ds, columns, ds)
            if self.config.split_columns:
                self.store_tiles(self.memory.p, columns, p)
                continue
            if dv:
                dv = mma.multiply_rows(dv, list(map(mma.as_left, p)), dout.at[columns])  # line 12
            if dk:
                dk = mma.multiply_rows(dk, list(map(mma.as_left, ds)), q.at[columns])  # line 16
        if self.config.split_columns:
            async_copy.sync_cta(self.config.warpgroups)
            own_dout = dout.at[:, self.share(self.config.value_dim)]
            dv = self.multiply_shared(dv, self.memory.p, own_dout)  # line 12
            own_q = q.at[:, self.share(self.config.head_dim)]
            dk = self.multiply_shared(dk, self.memory.ds, own_q)  # line 16
        if self.config.adds_dq or self.config.stages == 1:
            async_copy.sync_cta(self.config.warpgroups)  # dS is there; Q and dO have been read
        if self.config.stages == 1:
            self.load_block(t + 1, next_i)
        if self.config.adds_dq:
            self.add_dq(i)  # line 15
        return next_i, dk, dv

    def multiply_keys(self, keys: Any, queries: Any, fragments: Sequence = ()) -> list[jax.Array]:
        """Return keys @ queries^T of each of the warpgroup's tiles of keys: S^T or dP^T. `fragments` are those of the keys,
        of each panel of columns, if they are in registers."""
        tiles = self.slice_score_rows()
        accs = [thread_values.zero_accumulator((64, queries.shape[0])) for _ in tiles]
        for i, columns in enumerate(mma.panel_slices(queries)):
            lefts = fragments[i] if fragments else self.left_fragments(keys, columns)
            right = mma.load_right(queries.at[:, columns], transposed=True)
            accs = [plgpu.mma(acc, left, right) for acc, left in zip(accs, lefts, strict=True)]
        return accs

    def multiply_shared(self, accs: list[jax.Array], left: Any, right: Any) -> list[jax.Array]:
        """Return acc + left @ right of each tile of keys, both in shared memory."""
        for panel in mma.panel_slices(left):
            accs = mma.multiply_rows(accs, self.left_fragments(left, panel), right.at[panel])
        return accs

    def left_fragments(self, keys: Any, columns: Any) -> list[jax.Array]:
        return [mma.load_left(keys.at[rows, columns]) for rows in self.slice_score_rows()]

    def store_tiles(self, buffer: Any, columns: Any, tiles: list[jax.Array]) -> None:
        for rows, tile in zip(self.slice_score_rows(), tiles, strict=True):
            buffer.at[rows, columns][...] = tile

    def add_dq(self, i: Any) -> None:
        """Add dQ_i = dS K, of the warpgroup's columns, to device memory."""
        columns = self.share(self.config.head_dim)
        dq = thread_values.zero_accumulator((self.config.block_q, columns.size))
        for start in range(0, self.config.block_kv, mma.K_STEP):
            rows = pl.ds(start, mma.K_STEP)
            left = mma.load_left(self.memory.ds.at[rows], transposed=True)
            dq = plgpu.mma(dq, left, mma.load_right(self.memory.k.at[rows, columns]))
        target = self.outputs.dq.at[self.batch, self.head, i, self.warpgroup]
        accumulate.add_tile(target, dq, self.config.vector_atomics)

    def mask(self, exponents: list[jax.Array], t: Any, i: Any, columns: Any) -> list[jax.Array]:
        """Set to -inf where a query does not see a key, if the step is partial.

        Keys past the end are zeros: what they add to dQ is 0, and their dK and dV are not stored.
        """
        if self.spec.mask is not None:
            is_partial = t >= self.num_full
        elif self.spec.causal:
            is_partial = i < self.schedule.first_full_q_block(self.coordinates[2])
        else:
            return exponents

        def mask() -> list[jax.Array]:
            masked = []
            for n, (rows, exponent) in enumerate(
                zip(self.slice_score_rows(), exponents, strict=True)
            ):
                bits = self.load_mask_bits(i, n, columns)
                mods = self.load_mods(i, rows, columns, masked=True)
                masked.append(mods.apply_mask(exponent, bits))
            return masked

        return cond(is_partial, mask, lambda: exponents)

    def load_mask_bits(self, i: Any, n: int, columns: Any) -> list[jax.Array]:
        """Load the bits of the n-th tile of keys, those of the first of these columns as the highest ones."""
        if not self.spec.uses_mask_bits:
            return []
        first = 0 if self.config.split_columns else self.warpgroup * self.config.key_tiles
        index = self.batch, self.coordinates[2], i, first + n
        bits = load_bits(self.inputs.mask_bits, *index)
        # A thread has half a bit a column: 4 values in 8 columns.
        return [word << (columns.start // 2) for word in bits]

    def load_mods(self, i: Any, rows: Any, columns: Any, masked: bool) -> KeyMods:
        """Load what scores and dropout, and the mask if `masked`, read of a tile of keys."""
        head, arrays = (self.batch, self.head), (self.inputs.aux, self.outputs.aux_grads)
        first_key = self.compute_first_key() + rows.start
        tile = first_key, i * self.config.block_q + columns.start
        ragged = self.spec.kv_len % self.config.block_kv != 0
        return KeyMods.load(self.spec, *arrays, head, *tile, masked, ragged)

    def slice_score_rows(self) -> list[Any]:
        """Return the tiles of keys, within the block, whose scores the warpgroup forms."""
        first = 0 if self.config.split_columns else self.warpgroup * (64 * self.config.key_tiles)
        return [pl.ds(first + 64 * n, 64) for n in range(self.config.key_tiles)]

    def slice_score_columns(self) -> list[Any]:
        """Return the queries, within a block, whose scores the warpgroup forms, so many at once."""
        size = self.config.score_columns
        if self.config.split_columns:
            return [pl.ds(self.warpgroup * size, size)]
        return layouts.slices(self.config.block_q, size)

    def share(self, dim: int) -> Any:
        return self.config.share(dim, self.warpgroup)

    def load_q_block(self, t: Any) -> Any:
        """Return the block of queries that is visited as the t-th; of the one after the last, whatever follows there."""
        if self.inputs.block_mask is None:
            return self.first_block + t
        entry = self.inputs.block_mask.load_entry(self.coordinates, t)
        return reversed_block_id(entry, self.schedule.q_blocks)

    def buffers(self, t: Any) -> tuple[Any, ...]:
        stage = arithmetic.rem(t, self.config.stages) if self.config.stages > 1 else 0
        m = self.memory
        return tuple(x.at[stage] for x in (m.q, m.dout, m.lse, m.delta))

    def load_block(self, t: Any, i: Any) -> None:
        """Begin to copy block i of queries, the t-th, if there is one, and make a group of the copies so far."""
        first, size = i * self.config.block_q, self.config.block_q
        limit = None if self.spec.q_len % size == 0 else self.spec.q_len - first

        def load() -> None:
            q, dout, lse, delta = self.buffers(t)
            for array, buffer in ((self.inputs.q, q), (self.inputs.dout, dout)):
                rows = array.at[self.batch, pl.ds(first, size), self.head]
                async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)
            for array, buffer in ((self.inputs.lse, lse), (self.inputs.delta, delta)):
                values = array.at[self.batch, self.head, pl.ds(first, size)]
                async_copy.load_vector(values, buffer)

        when(t < self.num_steps)(load)
        async_copy.commit_group()

    def load_keys(self) -> list[list[jax.Array]]:
        """Begin to copy K and V; return V's fragments of each panel of columns, if they are kept in registers."""
        size, v = self.config.block_kv, self.memory.v
        if self.config.v_in_registers:
            v = self.memory.dout.at[0]  # until dO is copied there
        limit = (
            None if self.spec.kv_len % size == 0 else self.spec.kv_len - self.compute_first_key()
        )
        keys = self.batch, pl.ds(self.compute_first_key(), size), self.compute_kv_head()
        for array, buffer in ((self.inputs.k, self.memory.k), (self.inputs.v, v)):
            if buffer is not None:
                async_copy.load_rows(array.at[keys], buffer, self.config.warpgroups, limit)
        if not self.config.v_in_registers:
            return []
        async_copy.commit_group()
        self.wait_for_copies()
        fragments = [self.left_fragments(v, columns) for columns in mma.panel_slices(v)]
        async_copy.sync_cta(self.config.warpgroups)  # everyone has its rows of V
        return fragments

    def wait_for_copies(self) -> None:
        async_copy.wait_groups(0)
        async_copy.sync_cta(self.config.warpgroups)
