"""FlashAttention-2, Algorithm 1, by mma.sync: a CTA for each block of query rows of a head.

One source for every GPU from Ampere on: mma.sync, ldmatrix and cp.async exist on all of them. 4 or 8 warps own 16 or 32
query rows each and share the blocks of K and V. With one buffer of each, K and V are loaded in turns, V_j behind S_j =
Q K_j^T and K_j+1 behind O += P_j V_j, as in FlashAttention-2's own kernels; two CTAs on a multiprocessor then hide each
other's softmax.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.schedule import ForwardSchedule
from pallas_fa2.backends.sm80.primitives import async_copy, mma
from pallas_fa2.backends.sm90.primitives import launch, layouts, masking, pipeline, thread_values
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.control_flow import cond, when

# Below any score, but finite: a row that has seen no key yet gives p = 0 rather than NaN.
NO_MAXIMUM = -1e30


class SharedStorage(NamedTuple):
    """Shared memory of a CTA."""

    q: Any  # [block_q, H]: the output leaves through it, as Hv <= H
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]


class Softmax(NamedTuple):
    """Algorithm 1's statistics of 64 rows, in base 2, and their unnormalized output."""

    maximum: jax.Array  # m, [64], of scores that are not scaled
    row_sum: jax.Array  # l, [64, 8]: a thread's share of each row
    out: jax.Array  # O, [64, Hv]


def attention(
    spec: KernelSpec, config: ForwardConfig, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `out [B, T, N, Hv]` in q's dtype and natural `lse [B, N, T]` in float32.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, bfloat16 or float16; head dims are the config's or less.
    """
    schedule = ForwardSchedule(spec, config)
    operand = functools.partial(pipeline.swizzled_smem, dtype=q.dtype)
    panel, v_panel = (64 if dim % 64 == 0 else 32 for dim in (config.head_dim, config.value_dim))
    memory = SharedStorage(
        q=operand(config.block_q, config.head_dim, panel=panel),
        k=operand(config.stages, config.block_kv, config.head_dim, panel=panel),
        v=operand(config.stages, config.block_kv, config.value_dim, panel=v_panel),
    )
    out_type = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct((spec.batch, spec.q_heads, spec.q_len), jnp.float32),
    )

    def run(refs: tuple, memory: SharedStorage) -> None:
        RowBlock.start(schedule, refs, memory).attend()

    grid = {"cta": schedule.raster_order.count}
    return launch.build_kernel("attention", run, memory, out_type, grid, config.warpgroups)(q, k, v)


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """A block of query rows of one head, and the blocks of keys that it visits."""

    schedule: ForwardSchedule
    q: Any  # in device memory
    k: Any
    v: Any
    out: Any
    lse: Any
    memory: SharedStorage
    batch: Any
    head: Any
    kv_head: Any
    first_row: Any
    num_blocks: Any
    num_full: Any
    warpgroup: Any

    @classmethod
    def start(cls, schedule: ForwardSchedule, refs: tuple, memory: SharedStorage) -> "RowBlock":
        config = schedule.config
        batch, head, tile = schedule.raster_order.coordinates(lax.axis_index("cta"))
        warpgroup = lax.axis_index("warpgroup") if config.warpgroups > 1 else I32(0)
        kv_head = arithmetic.div(head, schedule.spec.group)
        counts = schedule.block_counts(tile)
        first_row = tile * config.block_q
        return cls(schedule, *refs, memory, batch, head, kv_head, first_row, *counts, warpgroup)

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> ForwardConfig:
        return self.schedule.config

    def attend(self) -> None:
        """Computes the block's output and lse: Algorithm 1, lines 4-15."""
        self.load_queries()
        self.load_block(self.k, self.memory.k, I32(0))
        if self.config.stages > 1:
            self.load_block(self.v, self.memory.v, I32(0))
        queries = self.query_fragments()
        state = [self.initial_state() for _ in range(self.config.row_tiles)]  # line 5
        state = lax.fori_loop(I32(0), self.num_blocks, functools.partial(self.kv_block, queries), state)
        self.store(state)

    def kv_block(self, queries: list | None, j: Any, states: list[Softmax]) -> list[Softmax]:
        """Adds block j of keys to the statistics and the output: Algorithm 1, lines 7-10."""
        one_stage = self.config.stages == 1
        self.wait_for_copies(0 if one_stage else 1)  # K_j is there, and everyone has read block j - 1
        if one_stage:
            self.load_block(self.v, self.memory.v, j)
        else:
            self.load_block(self.k, self.memory.k, j + 1)
        scores = self.scores(queries, j)  # line 8
        if one_stage:
            self.wait_for_copies(0)  # V_j is there, and everyone has read K_j
            self.load_block(self.k, self.memory.k, j + 1)
        if self.schedule.has_partial_blocks:
            mask = functools.partial(self.apply_mask, scores, j)
            scores = cond(j >= self.num_full, mask, lambda: scores)
        updates = [self.update(s, state) for s, state in zip(scores, states, strict=True)]  # line 9
        if not one_stage:
            self.wait_for_copies(1)  # V_j is there
            self.load_block(self.v, self.memory.v, j + 1)
        return self.accumulate(updates, j)  # line 10

    def scores(self, queries: list | None, j: Any) -> list[jax.Array]:
        """Returns S = Q K_j^T of each tile of rows, `[64, block_kv]`, not scaled."""
        tiles = range(self.config.row_tiles)
        scores = [thread_values.zero_accumulator((64, self.config.block_kv)) for _ in tiles]
        k = self.memory.k.at[self.stage(j)]
        for i, columns in enumerate(mma.panel_slices(k)):
            left = queries[i] if queries else [self.load_query_fragment(n, columns) for n in tiles]
            right = mma.load_right(k.at[:, columns], transposed=True)
            scores = [plgpu.mma(s, q, right) for s, q in zip(scores, left, strict=True)]
        return scores

    def update(self, s: jax.Array, state: Softmax) -> tuple[jax.Array, Softmax]:
        """Returns P as a left operand, and m, l and O rescaled to the new maximum."""
        scale = self.spec.scale * LOG2E
        maximum = jnp.maximum(state.maximum, layouts.fold_octets(jnp.maximum, s).max(axis=1))
        factor = jnp.exp2((state.maximum - maximum) * scale)
        p = jnp.exp2(s * scale - layouts.broadcast_rows(maximum * scale, s.shape))
        row_sum = state.row_sum * layouts.broadcast_rows(factor, state.row_sum.shape)
        row_sum += layouts.fold_octets(jnp.add, p)
        out = state.out * layouts.broadcast_rows(factor, state.out.shape)
        return mma.as_left(p.astype(self.q.dtype)), Softmax(maximum, row_sum, out)

    def accumulate(self, updates: list[tuple[jax.Array, Softmax]], j: Any) -> list[Softmax]:
        """Adds P V_j to the output of each tile of rows, which share the fragments of V."""
        v, states = self.memory.v.at[self.stage(j)], [state for _, state in updates]
        for start in range(0, self.config.block_kv, mma.K_STEP):
            right = mma.load_right(v.at[pl.ds(start, mma.K_STEP)])
            states = [
                state._replace(out=plgpu.mma(state.out, p[:, start : start + mma.K_STEP], right))
                for (p, _), state in zip(updates, states, strict=True)
            ]
        return states

    def apply_mask(self, scores: list[jax.Array], j: Any) -> list[jax.Array]:
        """Sets to -inf the scores of keys that a row does not see, or that do not exist."""
        p, block_kv = self.spec, self.config.block_kv
        last_key = (p.kv_len - 1) - j * block_kv
        masked = []
        for n, s in enumerate(scores):
            if p.causal_offset is None:
                last = plgpu.layout_cast(jnp.full((64,), last_key), ROW_LAYOUT)
            else:
                first = self.tile_row(n) + p.causal_offset - j * block_kv
                last = jnp.minimum(layouts.index((64, block_kv), 0, first), last_key)
            masked.append(masking.mask_after(s, last))
        return masked

    def store(self, states: list[Softmax]) -> None:
        """Stores O = diag(l)^-1 O and lse = m + log l: Algorithm 1, lines 12-15."""
        # Everyone has read Q: its buffer takes the output.
        limit = self.spec.q_len - self.first_row
        for n, state in enumerate(states):
            total = plgpu.layout_cast(state.row_sum.sum(axis=1), ROW_LAYOUT)
            empty = total == 0
            share = jnp.where(empty, 0.0, 1 / total)
            lse = state.maximum * self.spec.scale + jnp.log(total)
            out = state.out * layouts.broadcast_rows(share, state.out.shape)
            own = self.own_rows(self.memory.q, n).at[:, pl.ds(0, self.config.value_dim)]
            own[...] = out.astype(self.out.dtype)
            row = self.tile_row(n)
            async_copy.store_row_values(
                jnp.where(empty, -jnp.inf, lse),
                self.lse.at[self.batch, self.head, pl.ds(row, 64)],
                self.spec.q_len - row,
            )
        async_copy.sync_cta(self.config.warpgroups)
        rows = pl.ds(self.first_row, self.config.block_q)
        target = self.out.at[self.batch, rows, self.head]
        async_copy.store_rows(self.memory.q, target, self.config.warpgroups, limit)

    def initial_state(self) -> Softmax:
        return Softmax(
            layouts.splat_constant(NO_MAXIMUM, (64,), ROW_LAYOUT),
            layouts.splat_constant(0.0, (64, 8), ACC_LAYOUT),
            thread_values.zero_accumulator((64, self.config.value_dim)),
        )

    def load_queries(self) -> None:
        rows = pl.ds(self.first_row, self.config.block_q)
        limit = None if self.spec.q_len % self.config.block_q == 0 else self.spec.q_len - self.first_row
        source = self.q.at[self.batch, rows, self.head]
        async_copy.load_rows(source, self.memory.q, self.config.warpgroups, limit)

    def load_block(self, source: Any, buffers: Any, j: Any) -> None:
        """Begins to copy block j of keys or values, if there is one, and makes a group of the copies so far."""
        block_kv = self.config.block_kv

        def load() -> None:
            limit = None if self.spec.kv_len % block_kv == 0 else self.spec.kv_len - j * block_kv
            rows = source.at[self.batch, pl.ds(j * block_kv, block_kv), self.kv_head]
            async_copy.load_rows(rows, buffers.at[self.stage(j)], self.config.warpgroups, limit)

        when(j < self.num_blocks)(load)
        async_copy.commit_group()

    def wait_for_copies(self, pending: int) -> None:
        """Waits until all but the last `pending` groups have landed, and for all threads of the CTA."""
        async_copy.wait_groups(pending)
        async_copy.sync_cta(self.config.warpgroups)

    def query_fragments(self) -> list[list[jax.Array]] | None:
        """Returns Q's fragments of each panel of columns and tile of rows, if they are kept in registers."""
        if not self.config.q_in_registers:
            return None
        self.wait_for_copies(self.config.stages - 1)
        tiles = range(self.config.row_tiles)
        panels = mma.panel_slices(self.memory.q)
        return [[self.load_query_fragment(n, columns) for n in tiles] for columns in panels]

    def load_query_fragment(self, n: int, columns: Any) -> jax.Array:
        return mma.load_left(self.own_rows(self.memory.q, n).at[:, columns])

    def own_rows(self, buffer: Any, n: int) -> Any:
        """Returns the rows of the warpgroup's n-th tile."""
        start = self.warpgroup * self.config.rows_per_warpgroup + 64 * n
        return buffer.at[pl.ds(start, 64)]

    def tile_row(self, n: int) -> Any:
        """Returns the first row of the warpgroup's n-th tile, in the sequence."""
        return self.first_row + self.warpgroup * self.config.rows_per_warpgroup + 64 * n

    def stage(self, j: Any) -> Any:
        return arithmetic.rem(j, self.config.stages) if self.config.stages > 1 else 0
