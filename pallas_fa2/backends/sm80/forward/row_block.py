"""Algorithm 1 for a block of query rows, line by line."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import copy_groups, layouts, register_io
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.row_mods import RowMods
from pallas_fa2.backends.sm80.forward import products
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.memory import Inputs, SharedStorage
from pallas_fa2.backends.sm80.forward.softmax import (
    NO_MAXIMUM,
    KeyScales,
    Softmax,
    log_sum,
    update,
)
from pallas_fa2.backends.sm80.primitives import async_copy, mma
from pallas_fa2.backends.sm80.row_schedule import RowSchedule, RowTile
from pallas_fa2.control_flow import cond, when
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """A block of query rows of one head, and the blocks of keys that it visits."""

    schedule: RowSchedule[ForwardConfig]
    inputs: Inputs
    out: Any  # in device memory
    lse: Any
    memory: SharedStorage
    tile: RowTile[ForwardConfig]

    @classmethod
    def start(
        cls,
        schedule: RowSchedule[ForwardConfig],
        inputs: Inputs,
        out: Any,
        lse: Any,
        memory: SharedStorage,
    ) -> "RowBlock":
        tile = RowTile.load(schedule, inputs.tiles)
        return cls(schedule, inputs, out, lse, memory, tile)

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> ForwardConfig:
        return self.schedule.config

    def attend(self) -> None:
        """Compute the block's output and lse: Algorithm 1, lines 4-15."""
        k, v, first = self.memory.k, self.memory.v, self.tile.load_block_index(I32(0))
        self.load_queries()
        self.load_block(self.inputs.k, k, I32(0), first)
        if self.config.stages > 1:
            self.load_block(self.inputs.v, v, I32(0), first)
        queries, row_powers = self.query_fragments(), self.load_row_powers()
        states = [self.initial_state() for _ in range(self.config.row_tiles)]  # line 5
        body = functools.partial(self.visit_block, queries, row_powers)
        _, states = lax.fori_loop(I32(0), self.tile.num_blocks, body, (first, states))
        self.store(states)

    def visit_block(self, queries: list | None, row_powers: list, t: Any, carry: tuple) -> tuple:
        """Add the t-th block of keys that is visited, j, to the statistics and the output: Algorithm 1, lines 7-10.

        `queries` are the fragments of Q, if they are kept in registers; `row_powers` those of each tile of rows, if Q
        is split.
        """
        (j, states), (k, v) = carry, (self.memory.k, self.memory.v)
        next_j = self.tile.load_block_index(t + 1)
        one_stage = self.config.stages == 1
        # K_j is there, and everyone has read the block before.
        self.wait_for_copies(0 if one_stage else 1)
        if one_stage:
            self.load_block(self.inputs.v, v, t, j)
        else:
            self.load_block(self.inputs.k, k, t + 1, next_j)
        scores = self.scores(queries, t)  # line 8
        if one_stage:
            self.wait_for_copies(0)  # V_j is there, and everyone has read K_j
            self.load_block(self.inputs.k, k, t + 1, next_j)
        keys = None
        if self.config.is_split:
            keys = KeyScales.load(self.memory.key_scales)
            scores = [
                s * layouts.outer_product(row_power, keys.power)
                for s, row_power in zip(scores, row_powers, strict=True)
            ]
        scaled = self.apply_mods(scores, t, j)
        updates = [
            update(*x, state, keys) for x, state in zip(scaled, states, strict=True)
        ]  # lines 9 and 10
        updates = self.apply_dropout(updates, j)
        if not one_stage:
            self.wait_for_copies(1)  # V_j is there
            self.load_block(self.inputs.v, v, t + 1, next_j)
        v = self.memory.v.at[self.stage(t)]
        return next_j, products.add_values(self.config, updates, v)  # line 10: O += P V_j

    def scores(self, queries: list | None, t: Any) -> list[jax.Array]:
        """Return S = Q K_j^T of each tile of rows, `[64, block_kv]`, not scaled."""

        def fragments(i: int, columns: Any) -> list[list[jax.Array]]:
            tiles = range(self.config.row_tiles)
            return queries[i] if queries else [self.load_query_fragment(n, columns) for n in tiles]

        return products.multiply_queries(self.config, fragments, self.memory.k.at[self.stage(t)])

    def apply_mods(self, scores: list[jax.Array], t: Any, j: Any) -> list[tuple[jax.Array, float]]:
        """Return the scores of each tile of rows after the score functions and the mask, and their factor to base 2."""
        scored = [self.load_mods(n, j, masked=False).apply_score(s) for n, s in enumerate(scores)]
        values = [s for s, _ in scored]
        if self.schedule.has_partial_blocks:

            def mask() -> list[jax.Array]:
                return [self.mask(n, s, j) for n, s in enumerate(values)]

            values = cond(t >= self.tile.num_full, mask, lambda: values)
        return [(s, scale) for s, (_, scale) in zip(values, scored, strict=True)]

    def mask(self, n: int, s: jax.Array, j: Any) -> jax.Array:
        """Set to -inf the scores of keys that the n-th tile's rows do not see, or that do not exist."""
        bits = ()
        if self.spec.uses_mask_bits:
            bits = self.tile.load_mask_bits(self.inputs.mask_bits, n, j)
        return self.load_mods(n, j, masked=True).apply_mask(s, bits)

    def apply_dropout(self, updates: list[tuple[jax.Array, Softmax]], j: Any) -> list[tuple]:
        """Return P of each tile of rows as the terms of a left operand, with 0 where it is dropped, and its
        statistics."""
        dropped = []
        for n, (p, state) in enumerate(updates):
            # Loaded anew: kept since the scores, the rows' keys spill 104 bytes more (H = 64, compute capability 8.0).
            mods = self.load_mods(n, j, masked=False)
            p = mods.apply_dropout(p, pl.ds(0, self.config.block_kv))
            terms = mma.split_left(p, self.inputs.q.dtype, self.config.terms)
            dropped.append((terms, state))
        return dropped

    def load_mods(self, n: int, j: Any, masked: bool) -> RowMods:
        """Load what scores and dropout, and the mask if `masked`, read of the n-th tile of rows."""
        first_row, block_kv = self.tile.compute_row(n), self.config.block_kv
        tile = first_row, pl.ds(j * block_kv, block_kv), block_kv
        return RowMods.load(self.spec, self.inputs.aux, self.tile.head, *tile, masked)

    def store(self, states: list[Softmax]) -> None:
        """Store O = diag(l)^-1 O and lse = m + log l: Algorithm 1, lines 12-15."""
        limit = self.spec.q_len - self.tile.compute_first_row()
        for n, state in enumerate(states):
            total = plgpu.layout_cast(state.row_sum.sum(axis=1), ROW_LAYOUT)
            empty = total == 0
            if self.spec.score is not None:
                empty |= state.maximum == self.no_key_threshold
            share = jnp.where(empty, 0.0, self.spec.dropout_scale / total)
            if self.config.is_split:
                lse = log_sum(state.maximum, total)
            else:
                lse = state.maximum * (1 / LOG2E) + jnp.log(total)
            self.store_tile(n, [x * layouts.broadcast_rows(share, x.shape) for x in state.out])
            row = self.tile.compute_row(n)
            register_io.store_row_values(
                jnp.where(empty, -jnp.inf, lse),
                self.lse.at[(*self.tile.head, pl.ds(row, 64))],
                self.spec.q_len - row,
            )
        if self.config.is_split:
            return
        async_copy.sync_cta(self.config.warpgroups)
        rows = pl.ds(self.tile.compute_first_row(), self.config.block_q)
        batch, head = self.tile.head
        target = self.out.at[batch, rows, head]
        async_copy.store_rows(self.memory.q, target, self.config.warpgroups, limit)

    def store_tile(self, n: int, out: list[jax.Array]) -> None:
        """Store O of the warpgroup's n-th tile: to the buffer of Q, or float32 to device memory.

        Everyone has read Q: warps have met after the scores of the last block.
        """
        if not self.config.is_split:
            (tile,) = out
            own = self.tile.own_rows(self.memory.q, n).at[:, pl.ds(0, self.config.value_dim)]
            own[...] = tile.astype(self.out.dtype)
            return
        batch, head = self.tile.head
        row = self.tile.compute_row(n)
        power = self.inputs.scales.heads[batch, self.tile.compute_kv_head()]
        target = self.out.at[batch, pl.ds(row, 64), head]
        for columns, x in zip(products.out_panels(self.config), out, strict=True):
            register_io.store_rows(target, x * power, columns.start, self.spec.q_len - row)

    @property
    def no_key_threshold(self) -> float:
        """A row whose scores in base 2 are all below it sees no key."""
        return NO_MAXIMUM if self.spec.score is None else MASKED_SCORE_THRESHOLD * LOG2E

    def initial_state(self) -> Softmax:
        """Return the state of a tile before its first block: line 5."""
        return Softmax(
            layouts.splat_constant(self.no_key_threshold, (64,), ROW_LAYOUT),
            layouts.splat_constant(0.0, (64, 8), ACC_LAYOUT),
            products.zero_out(self.config),
        )

    def load_queries(self) -> None:
        """Begin to copy Q of the CTA's rows, and zeros for those past the end."""
        size, (batch, head), limit = self.config.block_q, self.tile.head, None
        rows = pl.ds(self.tile.compute_first_row(), size)
        if self.spec.q_len % size != 0:
            limit = self.spec.q_len - self.tile.compute_first_row()
        source = self.inputs.q.at[batch, rows, head]
        async_copy.load_rows(source, self.memory.q, self.config.warpgroups, limit)

    def load_block(self, source: Any, buffers: Any, t: Any, j: Any) -> None:
        """Begin to copy block j of keys or values, the t-th, if there is one, and make a group of the copies so far."""
        block_kv, (batch, _) = self.config.block_kv, self.tile.head

        def load() -> None:
            limit = None if self.spec.kv_len % block_kv == 0 else self.spec.kv_len - j * block_kv
            keys, kv_head = pl.ds(j * block_kv, block_kv), self.tile.compute_kv_head()
            rows = source.at[batch, keys, kv_head]
            async_copy.load_rows(rows, buffers.at[self.stage(t)], self.config.warpgroups, limit)
            if self.config.is_split and source is self.inputs.v:
                scales = self.inputs.scales.keys.at[batch, self.tile.compute_kv_head(), j]
                async_copy.load_vector(scales, self.memory.key_scales)

        when(t < self.tile.num_blocks)(load)
        copy_groups.commit_group()

    def wait_for_copies(self, pending: int) -> None:
        """Wait until all but the last `pending` groups have landed, and for all threads of the CTA."""
        copy_groups.wait_groups(pending)
        async_copy.sync_cta(self.config.warpgroups)

    def query_fragments(self) -> list | None:
        """Return the terms of Q's fragments of each panel of columns and tile of rows, if they are kept in
        registers."""
        if not self.config.q_in_registers:
            return None
        self.wait_for_copies(self.config.stages - 1)
        tiles = range(self.config.row_tiles)
        panels = mma.panel_slices(self.memory.q, self.config.terms)
        return [[self.load_query_fragment(n, columns) for n in tiles] for columns in panels]

    def load_query_fragment(self, n: int, columns: Any) -> list[jax.Array]:
        """Load some columns of each term of the n-th tile."""
        q = self.tile.own_rows(self.memory.q, n)
        slices = mma.term_slices(self.memory.q, columns, self.config.terms)
        return [mma.load_left(q.at[:, x]) for x in slices]

    def load_row_powers(self) -> list[jax.Array]:
        """Load the powers of two of each tile's rows, if Q is split."""
        if not self.config.is_split:
            return []
        powers = self.inputs.scales.queries
        rows = [pl.ds(self.tile.compute_row(n), 64) for n in range(self.config.row_tiles)]
        return [layouts.load_row(0, powers.at[(*self.tile.head, x)], jnp.float32) for x in rows]

    def stage(self, t: Any) -> Any:
        """Return the buffer of the t-th block."""
        return arithmetic.rem(t, self.config.stages) if self.config.stages > 1 else 0
