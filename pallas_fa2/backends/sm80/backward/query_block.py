"""dQ of a block of query rows, line by line: Algorithm 2 with its loops exchanged.

The block stays and keys pass, as in Algorithm 1. So dQ is summed in registers, in the order of the blocks of keys, and
nothing is added in device memory. S, P, dP and dS are formed a second time, which costs two products more than dQ of
the kernel of dK and dV.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import copy_groups, layouts, register_io, thread_values
from pallas_fa2.backends.common.row_mods import RowMods
from pallas_fa2.backends.sm80.backward import products
from pallas_fa2.backends.sm80.backward.config import DqConfig
from pallas_fa2.backends.sm80.backward.memory import DqStorage, Inputs
from pallas_fa2.backends.sm80.primitives import async_copy
from pallas_fa2.backends.sm80.row_schedule import RowSchedule, RowTile
from pallas_fa2.control_flow import cond, when


class RowStatistics(NamedTuple):
    """What the forward and XLA know of 64 query rows, float32 `[64]` each."""

    lse: jax.Array  # -lse in base 2
    delta: jax.Array  # -delta
    q_power: jax.Array | None = None  # powers of two, of split operands
    dout_power: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """A block of query rows of one head, and the blocks of keys that it visits."""

    schedule: RowSchedule[DqConfig]
    inputs: Inputs
    dq: Any  # in device memory, like q
    memory: DqStorage
    tile: RowTile[DqConfig]

    @classmethod
    def start(
        cls, schedule: RowSchedule[DqConfig], inputs: Inputs, dq: Any, memory: DqStorage
    ) -> "QueryBlock":
        return cls(schedule, inputs, dq, memory, RowTile.load(schedule, inputs.tiles))

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> DqConfig:
        return self.schedule.config

    def differentiate(self) -> None:
        """Compute dQ of the block: Algorithm 2, lines 8-17, for one i and all j."""
        first, tiles = self.tile.load_block_index(I32(0)), range(self.config.row_tiles)
        dout = self.load_rows()
        self.load_block(I32(0), first)
        statistics = [self.load_statistics(n) for n in tiles]
        shape = 64, self.config.head_dim
        dq = [thread_values.zero_accumulator(shape) for _ in tiles]
        body = functools.partial(self.step, statistics, dout)
        _, dq = lax.fori_loop(I32(0), self.tile.num_blocks, body, (first, dq))
        self.store(dq)

    def step(self, statistics: list[RowStatistics], dout: list, t: Any, carry: tuple) -> tuple:
        """Add what the t-th block of keys that is visited, j, gives: Algorithm 2, lines 10, 11 and 13-15.

        `dout` are the fragments of dO, if they are kept in registers.
        """
        j, dq = carry
        next_j = self.tile.load_block_index(t + 1)
        k, v, *_ = self.buffers(t)
        self.wait_for_copies()  # K_j and V_j are there, and everyone has read the block before
        if self.config.stages > 1:
            self.load_block(t + 1, next_j)
        for keys in layouts.slices(self.config.block_kv, self.config.score_keys):
            k_power, v_power = self.load_key_powers(t, keys)
            s = self.multiply_rows(self.memory.q, k.at[keys])  # line 10
            s = products.scale(s, [x.q_power for x in statistics], k_power)
            p = self.probabilities(s, statistics, t, j, keys)  # line 11
            dp = self.multiply_rows(self.memory.dout, v.at[keys], dout)  # line 13
            dp = products.scale(dp, [x.dout_power for x in statistics], v_power)
            ds = self.score_gradients(p, s, dp, statistics, j, keys, k_power)  # line 14
            columns = pl.ds(0, self.config.head_dim)
            panel = self.config.panel_columns
            dq = products.add_rows(dq, ds, k.at[keys], columns, panel)  # line 15
        if self.config.stages == 1:
            async_copy.sync_cta(self.config.warpgroups)  # everyone has read K_j and V_j
            self.load_block(t + 1, next_j)
        return next_j, dq

    def multiply_rows(self, rows: Any, keys: Any, fragments: Sequence = ()) -> list[jax.Array]:
        """Return rows @ keys^T of each of the warpgroup's tiles of rows: S or dP."""
        config = self.config
        lefts = fragments or self.load_left_panels(rows)
        sizes = config.terms, config.panel_columns
        return products.multiply_scores(config.row_tiles, lefts, keys, *sizes)

    def load_left_panels(self, rows: Any) -> Iterator[list[list[jax.Array]]]:
        """Load the warpgroup's tiles of a buffer with a row for each query as left operands, a panel after another."""
        tiles = [self.tile.own_rows(rows, n) for n in range(self.config.row_tiles)]
        return products.load_left_panels(tiles, self.config.terms, self.config.panel_columns)

    def probabilities(
        self, s: list[jax.Array], statistics: list[RowStatistics], t: Any, j: Any, keys: Any
    ) -> list[jax.Array]:
        """Return P of each tile of rows, 0 where a row does not see a key, negative where it is dropped."""
        exponents, p = [], []
        for n, tile in enumerate(s):
            value, factor = self.load_mods(n, j, keys, masked=False).apply_score(tile)
            lse = layouts.broadcast_rows(statistics[n].lse, tile.shape)
            exponents.append(value * factor + lse)
        if self.schedule.has_partial_blocks:

            def mask() -> list[jax.Array]:
                # behind lse, which may be NaN in a row that sees nothing
                return [self.mask(n, x, j, keys) for n, x in enumerate(exponents)]

            exponents = cond(t >= self.tile.num_full, mask, lambda: exponents)
        for n, exponent in enumerate(exponents):
            mods = self.load_mods(n, j, keys, masked=False)
            p.append(mods.mark_dropped(jnp.exp2(exponent), pl.ds(0, keys.size)))
        return p

    def mask(self, n: int, exponent: jax.Array, j: Any, keys: Any) -> jax.Array:
        """Set to -inf the exponents of keys that the n-th tile's rows do not see, or that do not exist."""
        bits = []
        if self.spec.uses_mask_bits:
            words = self.tile.load_mask_bits(self.inputs.mask_bits, n, j)
            # A thread has half a bit a column: 4 values in 8 columns.
            bits = [word << (keys.start // 2) for word in words]
        return self.load_mods(n, j, keys, masked=True).apply_mask(exponent, bits)

    def score_gradients(
        self,
        p: list,
        s: list,
        dp: list,
        statistics: list[RowStatistics],
        j: Any,
        keys: Any,
        k_power: jax.Array | None,
    ) -> list[products.RowOperand]:
        """Return dS of each tile of rows as a left operand; of split operands it is contracted over keys, and so their
        powers are in it."""
        ds = []
        for n, tiles in enumerate(zip(p, s, dp, strict=True)):
            mods = self.load_mods(n, j, keys, masked=False)
            gradient = mods.ds(*tiles, statistics[n].delta)
            ds.append(products.round_rows(gradient, self.inputs.q.dtype, k_power).as_left())
        return ds

    def load_mods(self, n: int, j: Any, keys: Any, masked: bool) -> RowMods:
        """Load what scores and dropout, and the mask if `masked`, read of the n-th tile of rows and of keys of block j.

        It is loaded wherever it is used, as it would hold registers in between.
        """
        block_kv = self.config.block_kv
        tile = self.tile.compute_row(n), pl.ds(j * block_kv + keys.start, keys.size), block_kv
        return RowMods.load(self.spec, self.inputs.aux, self.tile.head, *tile, masked)

    def load_statistics(self, n: int) -> RowStatistics:
        rows = (*self.tile.head, pl.ds(self.tile.compute_row(n), 64))
        arrays, scales = [self.inputs.lse, self.inputs.delta], self.inputs.scales
        if scales is not None:
            arrays += [scales.q, scales.dout]
        return RowStatistics(*(layouts.load_row(0, x.at[rows], jnp.float32) for x in arrays))

    def load_rows(self) -> list[list[list[jax.Array]]]:
        """Begin to copy Q and dO of the block; return dO's fragments of each panel of columns, if they are kept in
        registers."""
        size, dout = self.config.block_q, self.memory.dout
        if self.config.dout_in_registers:
            dout = self.memory.v.at[0]  # until V is copied there
        first = self.tile.compute_first_row()
        limit = None if self.spec.q_len % size == 0 else self.spec.q_len - first
        batch, head = self.tile.head
        for array, buffer in ((self.inputs.q, self.memory.q), (self.inputs.dout, dout)):
            rows = array.at[batch, pl.ds(first, size), head]
            async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)
        if not self.config.dout_in_registers:
            return []
        copy_groups.commit_group()
        self.wait_for_copies()
        fragments = list(self.load_left_panels(dout))
        async_copy.sync_cta(self.config.warpgroups)  # everyone has its own rows of dO
        return fragments

    def load_block(self, t: Any, j: Any) -> None:
        """Begin to copy block j of keys and values, the t-th, if there is one, and make a group of the copies so
        far."""
        size, (batch, _) = self.config.block_kv, self.tile.head

        def load() -> None:
            kv_head, first = self.tile.compute_kv_head(), j * size
            limit = None if self.spec.kv_len % size == 0 else self.spec.kv_len - first
            k, v, *powers = self.buffers(t)
            for array, buffer in ((self.inputs.k, k), (self.inputs.v, v)):
                rows = array.at[batch, pl.ds(first, size), kv_head]
                async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)
            if (scales := self.inputs.scales) is not None:
                for array, buffer in zip((scales.k, scales.v), powers, strict=True):
                    async_copy.load_vector(array.at[batch, kv_head, pl.ds(first, size)], buffer)

        when(t < self.tile.num_blocks)(load)
        copy_groups.commit_group()

    def wait_for_copies(self) -> None:
        copy_groups.wait_groups(0)
        async_copy.sync_cta(self.config.warpgroups)

    def store(self, dq: list[jax.Array]) -> None:
        """Store dQ, through Q's buffer, or float32 from registers."""
        first, (batch, head) = self.tile.compute_first_row(), self.tile.head
        if self.config.is_split:
            for n, tile in enumerate(dq):
                row = self.tile.compute_row(n)
                target, limit = self.dq.at[batch, pl.ds(row, 64), head], self.spec.q_len - row
                register_io.store_rows(target, tile * self.spec.scale, 0, limit)
            return
        if self.config.stages > 1:
            async_copy.sync_cta(self.config.warpgroups)  # everyone has read Q
        for n, tile in enumerate(dq):
            own = self.tile.own_rows(self.memory.q, n)
            own[...] = (tile * self.spec.scale).astype(self.dq.dtype)
        async_copy.sync_cta(self.config.warpgroups)
        target = self.dq.at[batch, pl.ds(first, self.config.block_q), head]
        limit = self.spec.q_len - first
        async_copy.store_rows(self.memory.q, target, self.config.warpgroups, limit)

    def load_key_powers(self, t: Any, keys: Any) -> list[jax.Array | None]:
        """Load the powers of two of some keys and of their values, of split operands."""
        if not self.config.is_split:
            return [None, None]
        _, _, *powers = self.buffers(t)
        return [layouts.load_row(1, x.at[keys], jnp.float32) for x in powers]

    def buffers(self, t: Any) -> tuple[Any, ...]:
        """Return where the t-th block of K and V and their powers lie."""
        stages, m = self.config.stages, self.memory
        stage = arithmetic.rem(t, stages) if stages > 1 else 0
        powers = [m.powers.at[i, stage] for i in range(2)] if self.config.is_split else []
        return m.k.at[stage], m.v.at[stage], *powers
