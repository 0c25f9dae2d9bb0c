"""Algorithm 2 for a block of keys, line by line."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.key_mods import KeyMods
from pallas_fa2.backends.common.primitives import accumulate, copy_groups, layouts, thread_values
from pallas_fa2.backends.sm80.backward import products
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.epilogue import KeyEpilogue
from pallas_fa2.backends.sm80.backward.key_loads import KeyLoads, KeyPowers, QueryBuffers
from pallas_fa2.backends.sm80.backward.key_tile import KeyTile
from pallas_fa2.backends.sm80.backward.memory import Inputs, Outputs, SharedStorage, StoredTile
from pallas_fa2.backends.sm80.backward.products import RowOperand
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy, mma
from pallas_fa2.control_flow import cond


@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """A block of keys for one query head, and the blocks of that head's queries that see it."""

    schedule: BackwardSchedule
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage
    tile: KeyTile

    @classmethod
    def start(
        cls, schedule: BackwardSchedule, inputs: Inputs, outputs: Outputs, memory: SharedStorage
    ) -> "KeyBlock":
        return cls(schedule, inputs, outputs, memory, KeyTile.load(schedule, inputs.tiles))

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    def differentiate(self) -> None:
        """Compute dK and dV of the block, and add to dQ if it has no kernel of its own: Algorithm 2, lines 6-18."""
        config, rows = self.config, self.tile.slice_score_rows()
        first = self.tile.load_block_index(I32(0))
        v = self.load_keys()
        self.loads.load_block(I32(0), first)
        counts = (config.key_tiles * formed for formed in config.formed)
        dims = (dim // config.column_shares for dim in (config.head_dim, config.value_dim))
        dk, dv = (
            [thread_values.zero_accumulator((64, dim)) for _ in range(count)]
            for dim, count in zip(dims, counts, strict=True)
        )  # line 7
        body = functools.partial(self.step, v, self.loads.load_key_powers(rows))
        _, dk, dv = lax.fori_loop(I32(0), self.tile.num_blocks, body, (first, dk, dv))
        KeyEpilogue(self.tile, self.outputs, self.memory).store(dk, dv)  # line 18

    def step(self, v: list, powers: list[KeyPowers], t: Any, carry: tuple) -> tuple:
        """Add what the t-th block of queries that is visited, i, gives: Algorithm 2, lines 9-16.

        `v` are the fragments of V, if they are kept in registers; `powers` those of each tile of keys, if they are
        split.
        """
        i, dk, dv = carry
        config, memory = self.config, self.memory
        next_i = self.tile.load_block_index(t + 1)
        block = self.loads.buffers(t)
        self.wait_for_copies()  # the block is there, and everyone has read the one before
        if config.stages > 1:
            self.loads.load_block(t + 1, next_i)
        for columns in self.tile.slice_score_columns():
            p, ds = self.form_tiles(v, powers, block, t, i, columns)
            if config.divides_columns:
                self.store_tiles(memory.p, columns, p)
                continue
            if dv:
                dv = self.add_rows(dv, p, block.dout.at[columns])  # line 12
            if dk:
                dk = self.add_rows(dk, ds, block.q.at[columns])  # line 16
        if config.divides_columns:
            async_copy.sync_cta(config.warpgroups)  # P and dS are there
            dv = self.multiply_shared(dv, memory.p, block.dout)  # line 12
            dk = self.multiply_shared(dk, memory.dk_ds, block.q)  # line 16
        if config.adds_dq or config.stages == 1:
            async_copy.sync_cta(config.warpgroups)  # dS is there; Q and dO have been read
        if config.stages == 1:
            self.loads.load_block(t + 1, next_i)
        if config.adds_dq:
            self.add_dq(i)  # line 15
        return next_i, dk, dv

    def form_tiles(
        self, v: list, powers: list[KeyPowers], block: QueryBuffers, t: Any, i: Any, columns: Any
    ) -> tuple[list[RowOperand], list[RowOperand]]:
        """Return P^T and dS^T of each tile of keys and some columns, queries of the step's block, as dV and dK multiply
        them, and store the dS^T that products read from shared memory: Algorithm 2, lines 10, 11, 13 and 14.

        Without dK there is no dS^T.
        """
        q, dout, lse, delta, *_ = block
        mods = [self.load_mods(i, x, columns, masked=False) for x in self.tile.slice_score_rows()]
        q_power, dout_power = self.loads.load_query_powers(t, columns)
        s = self.multiply_keys(self.memory.k, q.at[columns])  # line 10
        s = products.scale(s, [x.k for x in powers], q_power)
        column_lse = layouts.load_row(1, lse.at[columns], jnp.float32)
        exponents = [m.exponents(x, column_lse) for m, x in zip(mods, s, strict=True)]
        exponents = self.mask(exponents, t, i, columns)
        tiles = zip(mods, exponents, strict=True)
        p = [m.apply_dropout(m.probabilities(x)) for m, x in tiles]  # line 11
        ds, ds_rows = [], []
        if self.config.forms_dk:
            dp = self.multiply_keys(self.memory.v, dout.at[columns], v)  # line 13
            dp = products.scale(dp, [x.v for x in powers], dout_power)
            column_delta = layouts.load_row(1, delta.at[columns], jnp.float32)
            for m, tile in zip(mods, zip(p, s, dp, strict=True), strict=True):
                ds.append(m.ds(*tile, column_delta))  # line 14
                ds_rows.append(products.round_rows(ds[-1], q.dtype, q_power))
        p = [m.zero_dropped(x) for m, x in zip(mods, p, strict=True)]
        p_rows = [products.round_rows(x, q.dtype, dout_power) for x in p]
        self.store_ds(columns, ds, ds_rows, powers, dout_power)
        return p_rows, ds_rows

    def multiply_keys(self, keys: Any, queries: Any, fragments: Sequence = ()) -> list[jax.Array]:
        """Return keys @ queries^T of each of the warpgroup's tiles of keys: S^T or dP^T."""
        config = self.config
        lefts = fragments or self.load_left_panels(keys)
        sizes = config.terms, config.panel_columns
        return products.multiply_scores(config.key_tiles, lefts, queries, *sizes)

    def load_left_panels(self, keys: Any) -> Iterator[list[list[jax.Array]]]:
        """Load the warpgroup's tiles of a buffer with a row for each key as left operands, a panel after another."""
        tiles = self.key_tiles(keys)
        return products.load_left_panels(tiles, self.config.terms, self.config.panel_columns)

    def key_tiles(self, keys: Any) -> list[Any]:
        """Return the warpgroup's tiles of a buffer with a row for each key."""
        return [keys.at[rows] for rows in self.tile.slice_score_rows()]

    def add_rows(
        self, accs: list[jax.Array], operands: list[RowOperand], right: Any
    ) -> list[jax.Array]:
        """Return acc + operand @ right of each tile of keys, from registers."""
        lefts = [x.as_left() for x in operands]
        columns = pl.ds(0, right.shape[1] // self.config.terms)
        return products.add_rows(accs, lefts, right, columns, self.config.panel_columns)

    def multiply_shared(
        self, accs: list[jax.Array], left: StoredTile, right: Any
    ) -> list[jax.Array]:
        """Return acc + left @ the warpgroup's columns of right of each tile of keys, both in shared memory."""
        config = self.config
        own = self.share(right.shape[1] // config.terms)
        pieces = mma.panel_slices(left.tile, config.terms, config.score_columns)
        for i, piece in enumerate(pieces):
            terms = products.load_left(self.key_tiles(left.tile), piece, config.terms)
            operands = list(map(RowOperand, terms))
            if config.is_split:
                powers = (left.power.at[i, rows] for rows in self.tile.slice_score_rows())
                powers = (layouts.load_row(0, x, jnp.float32) for x in powers)
                operands = [x._replace(power=y) for x, y in zip(operands, powers, strict=True)]
            accs = products.add_rows(accs, operands, right.at[piece], own, config.panel_columns)
        return accs

    def store_tiles(self, buffer: StoredTile, columns: Any, tiles: list[RowOperand]) -> None:
        """Store some columns of P or dS of each tile of keys."""
        piece = columns.start // columns.size
        if self.config.divides_columns:
            piece = self.tile.warpgroup
        products.store_rows(buffer, self.tile.slice_score_rows(), columns, piece, tiles)

    def store_ds(
        self,
        columns: Any,
        ds: list[jax.Array],
        ds_rows: list[RowOperand],
        powers: list[KeyPowers],
        dout_power: Any,
    ) -> None:
        """Store dS where products read it: split, that of dQ has the powers of keys, that of dK those of q."""
        if self.memory.dk_ds_tile is not None:
            self.store_tiles(self.memory.dk_ds, columns, ds_rows)
        of_dq = self.memory.ds
        if of_dq is None:
            return
        if self.config.is_split:
            tiles = zip(ds, powers, strict=True)
            dtype = of_dq.tile.dtype
            ds_rows = [products.split_warp_rows(x, dtype, own.k, dout_power) for x, own in tiles]
        self.store_tiles(of_dq, columns, ds_rows)

    def add_dq(self, i: Any) -> None:
        """Add dQ_i = dS K, of the warpgroup's columns, to device memory."""
        columns = self.share(self.config.head_dim)
        ds, terms = self.memory.ds, self.config.terms
        dq = products.multiply_transposed(ds.tile, ds.power, self.memory.k, columns, terms)
        if (scales := self.inputs.scales) is not None:
            queries = pl.ds(i * self.config.block_q, self.config.block_q)
            power = layouts.load_row(0, scales.dout.at[(*self.tile.head, queries)], jnp.float32)
            dq *= layouts.broadcast_rows(power, dq.shape)
        target = self.outputs.dq.at[(*self.tile.head, i, self.tile.warpgroup)]
        accumulate.add_tile(target, dq, self.config.vector_atomics)

    def mask(self, exponents: list[jax.Array], t: Any, i: Any, columns: Any) -> list[jax.Array]:
        """Set to -inf where a query does not see a key, if the step is partial.

        Keys past the end are zeros: what they add to dQ is 0, and their dK and dV are not stored.
        """
        is_partial = self.tile.is_partial(t, i)
        if is_partial is None:
            return exponents

        def mask() -> list[jax.Array]:
            masked = []
            tiles = zip(self.tile.slice_score_rows(), exponents, strict=True)
            for n, (rows, exponent) in enumerate(tiles):
                bits = self.tile.load_mask_bits(self.inputs.mask_bits, n, i, columns)
                mods = self.load_mods(i, rows, columns, masked=True)
                masked.append(mods.apply_mask(exponent, bits))
            return masked

        return cond(is_partial, mask, lambda: exponents)

    def load_mods(self, i: Any, rows: Any, columns: Any, masked: bool) -> KeyMods:
        """Load what scores and dropout, and the mask if `masked`, read of a tile of keys."""
        arrays = self.inputs.aux, self.outputs.aux_grads
        first_key = self.tile.compute_first_key() + rows.start
        tile = first_key, i * self.config.block_q + columns.start
        ragged = self.spec.kv_len % self.config.block_kv != 0
        return KeyMods.load(self.spec, *arrays, self.tile.head, *tile, masked, ragged)

    def share(self, dim: int) -> Any:
        """Return the warpgroup's columns of dQ, and where columns are divided, of dK or dV."""
        return self.config.share(dim, self.tile.warpgroup)

    @property
    def loads(self) -> KeyLoads:
        return KeyLoads(self.tile, self.inputs, self.memory)

    def load_keys(self) -> list[list[list[jax.Array]]]:
        """Begin to copy K and V; return V's fragments of each panel of columns, if they are kept in registers."""
        self.loads.load_keys()
        if not self.config.v_in_registers:
            return []
        copy_groups.commit_group()
        self.wait_for_copies()
        v = self.memory.dout.at[0]  # until dO is copied there
        fragments = list(self.load_left_panels(v))
        async_copy.sync_cta(self.config.warpgroups)  # everyone has its rows of V
        return fragments

    def wait_for_copies(self) -> None:
        copy_groups.wait_groups(0)
        async_copy.sync_cta(self.config.warpgroups)
