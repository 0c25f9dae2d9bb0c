"""FlashAttention-2, Algorithm 2, by mma.sync: a CTA for each block of keys of a head.

The products are transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave registers as left operands of dV and
dK. dS goes through shared memory once, for dQ, which is added up in float32 in device memory.

Beyond H = 128 (`split_columns`) the warpgroups divide the columns of dK, dV and dQ, each forms the scores of half of the
queries, and P goes through shared memory as dS does.
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
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import accumulate, async_copy, mma
from pallas_fa2.backends.sm90.primitives import launch, layouts, masking, pipeline, thread_values
from pallas_fa2.control_flow import cond, when


class SharedStorage(NamedTuple):
    """Shared memory of a CTA."""

    k: Any  # [block_kv, H]
    v: Any  # [block_kv, Hv]
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    ds: Any  # [block_kv, block_q]
    lse: Any  # [stages, block_q]
    delta: Any  # [stages, block_q]
    p: Any  # [block_kv, block_q] where columns are divided


class Arrays(NamedTuple):
    """Arrays in device memory."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # -lse in base 2, float32 [B, N, T'], -inf in rows that do not exist or see nothing
    delta: Any  # -delta
    dq: Any  # float32 [B, N, blocks of queries, warpgroups, a warpgroup's tile], added to
    dk: Any
    dv: Any


def gradients(
    spec: KernelSpec,
    config: BackwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk and dv, like q `[B, T, N, H]`, k `[B, S, K, H]` and v `[B, S, K, Hv]`.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of 64, both negated: -lse in base 2, -inf where a row does not
    exist, so that its probabilities are 0; and -rowsum(dO O).
    """
    schedule = BackwardSchedule(spec, config)
    blocks = spec.batch, spec.q_heads, schedule.q_blocks, config.warpgroups
    sums = jnp.zeros((*blocks, config.dq_size // config.warpgroups), jnp.float32)
    outputs = sums, lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype)
    inputs = q, k, v, dout, lse, delta

    def run(refs: tuple, memory: SharedStorage) -> None:
        KeyBlock.start(schedule, Arrays(*refs), memory).differentiate()

    grid, memory = {"cta": schedule.raster_order.count}, shared_storage(config, q.dtype)
    kernel = launch.build_kernel("attention_gradients", run, memory, (), grid, config.warpgroups)

    @launch.isolate_from_fusion
    def add_up(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        inputs, outputs = arrays[:-3], arrays[-3:]
        return pl.run_state(lambda refs: kernel(*inputs, *refs))(outputs)

    sums, dk, dv = add_up(*inputs, *outputs)
    return convert_dq(spec, config, sums, q), dk, dv


def shared_storage(config: BackwardConfig, dtype: Any) -> SharedStorage:
    operand = functools.partial(pipeline.swizzled_smem, dtype=dtype)
    split = config.split_columns
    k_panel = config.panel(config.head_dim, shared=True)  # for dQ
    q_panel, v_panel = (config.panel(dim, split) for dim in (config.head_dim, config.value_dim))
    tile = operand(config.block_kv, config.block_q, panel=config.score_columns)
    rows = plgpu.SMEM((config.stages, config.block_q), jnp.float32)
    return SharedStorage(
        k=operand(config.block_kv, config.head_dim, panel=k_panel),
        v=operand(config.block_kv, config.value_dim, panel=v_panel),
        q=operand(config.stages, config.block_q, config.head_dim, panel=q_panel),
        dout=operand(config.stages, config.block_q, config.value_dim, panel=v_panel),
        ds=tile,
        lse=rows,
        delta=rows,
        p=tile if split else None,
    )


@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """A block of keys of one head, and the blocks of queries of its group that see it."""

    schedule: BackwardSchedule
    arrays: Arrays
    memory: SharedStorage
    batch: Any
    kv_head: Any
    first_key: Any
    first_block: Any  # of queries that see a key
    first_full: Any  # block of queries that see all keys
    is_last_tile: Any
    warpgroup: Any

    @classmethod
    def start(cls, schedule: BackwardSchedule, arrays: Arrays, memory: SharedStorage) -> "KeyBlock":
        batch, head, tile = schedule.coordinates(lax.axis_index("cta"))
        warpgroup = lax.axis_index("warpgroup") if schedule.config.warpgroups > 1 else I32(0)
        first_key = tile * schedule.config.block_kv
        is_last = tile == schedule.kv_tiles - 1
        return cls(
            schedule, arrays, memory, batch, head, first_key, *schedule.q_range(tile), is_last, warpgroup
        )

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    @property
    def steps_per_head(self) -> Any:
        return self.schedule.q_blocks - self.first_block

    def differentiate(self) -> None:
        """Computes dK and dV of the block, and adds to dQ: Algorithm 2, lines 6-21."""
        self.load_keys()
        self.load_block(I32(0))
        v_fragments = None
        if self.config.v_in_registers:
            self.wait_for_copies()
            v_fragments = self.left_panels(self.memory.v)
        state = tuple(
            thread_values.zero_accumulator((64, self.config.share(dim, 0).size if self.config.split_columns else dim))
            for dim in (self.config.head_dim, self.config.value_dim)
        )  # line 7
        steps = self.steps_per_head * self.spec.group
        state = lax.fori_loop(I32(0), steps, functools.partial(self.step, v_fragments, steps), state)
        self.store(*state)  # line 20

    def step(self, v_fragments: list | None, steps: Any, t: Any, state: tuple) -> tuple:
        """Adds what one block of queries gives: Algorithm 2, lines 9-18."""
        dk, dv = state
        head, block = self.q_coordinates(t)
        q, dout, lse, delta = self.buffers(t)
        self.wait_for_copies()  # the block is there, and everyone has read the one before
        if self.config.stages > 1:
            when(t + 1 < steps)(lambda: self.load_block(t + 1))
        columns = self.score_columns
        s = self.multiply_keys(self.memory.k, q.at[columns], None)  # line 11
        s = self.apply_mask(s, block)
        scale = self.spec.scale * LOG2E
        exponent = s * scale + self.query_values(lse.at[columns], s)
        p = jnp.exp2(exponent)  # line 12
        dp = self.multiply_keys(self.memory.v, dout.at[columns], v_fragments)  # line 14
        ds = (p * (dp + self.query_values(delta.at[columns], s))).astype(q.dtype)  # line 15
        p = p.astype(q.dtype)
        self.memory.ds.at[self.score_rows, columns][...] = ds
        if self.config.split_columns:
            self.memory.p.at[:, columns][...] = p
            async_copy.sync_cta(self.config.warpgroups)
            dv = self.multiply_shared(dv, self.memory.p, dout.at[:, self.share(self.config.value_dim)])
            dk = self.multiply_shared(dk, self.memory.ds, q.at[:, self.share(self.config.head_dim)])
        else:
            dv = mma.multiply_rows(dv, mma.as_left(p), dout)  # line 13
            dk = mma.multiply_rows(dk, mma.as_left(ds), q)  # line 18
        async_copy.sync_cta(self.config.warpgroups)  # dS is there; Q and dO have been read
        if self.config.stages == 1:
            when(t + 1 < steps)(lambda: self.load_block(t + 1))
        self.add_dq(head, block)  # line 17
        return dk, dv

    def multiply_keys(self, keys: Any, queries: Any, fragments: list | None) -> jax.Array:
        """Returns keys @ queries^T of the warpgroup's rows of keys: S^T or dP^T."""
        acc = thread_values.zero_accumulator((64, self.config.score_columns))
        for i, columns in enumerate(mma.panel_slices(keys)):
            left = fragments[i] if fragments else mma.load_left(keys.at[self.score_rows, columns])
            acc = plgpu.mma(acc, left, mma.load_right(queries.at[:, columns], transposed=True))
        return acc

    def multiply_shared(self, acc: jax.Array, left: Any, right: Any) -> jax.Array:
        """Returns acc + left @ right, both in shared memory."""
        for panel in mma.panel_slices(left):
            fragment = mma.load_left(left.at[:, panel])
            acc = mma.multiply_rows(acc, fragment, right.at[panel])
        return acc

    def add_dq(self, head: Any, block: Any) -> None:
        """Adds dQ_i = dS K, of the warpgroup's columns, to device memory."""
        columns = self.share(self.config.head_dim)
        dq = thread_values.zero_accumulator((self.config.block_q, columns.size))
        for start in range(0, self.config.block_kv, mma.K_STEP):
            rows = pl.ds(start, mma.K_STEP)
            left = mma.load_left(self.memory.ds.at[rows], transposed=True)
            dq = plgpu.mma(dq, left, mma.load_right(self.memory.k.at[rows, columns]))
        target = self.arrays.dq.at[self.batch, head, block, self.warpgroup]
        accumulate.add_tile(target, dq, self.config.vector_atomics)

    def apply_mask(self, s: jax.Array, block: Any) -> jax.Array:
        """Sets to -inf the scores of queries before the first that sees a key.

        Keys past the end are zeros: what they add to dQ is 0, and their dK and dV are not stored.
        """
        if self.spec.causal_offset is None:
            return s

        def mask() -> jax.Array:
            first_query = block * self.config.block_q + self.score_columns.start
            shift = self.first_key + self.score_rows.start - first_query - self.spec.causal_offset
            return masking.mask_before(s, layouts.index(s.shape, 0, shift))

        return cond(block < self.first_full, mask, lambda: s)

    def query_values(self, values: Any, s: jax.Array) -> jax.Array:
        """Returns a value of each query, broadcast over the keys."""
        return layouts.broadcast_columns(layouts.load_row(1, values, jnp.float32), s.shape)

    @property
    def score_rows(self) -> Any:
        """Returns the keys, within the block, whose scores the warpgroup forms."""
        return pl.ds(0, 64) if self.config.split_columns else pl.ds(self.warpgroup * 64, 64)

    @property
    def score_columns(self) -> Any:
        """Returns the queries, within a block, whose scores the warpgroup forms."""
        size = self.config.score_columns
        return pl.ds(self.warpgroup * size, size) if self.config.split_columns else pl.ds(0, size)

    def share(self, dim: int) -> Any:
        return self.config.share(dim, self.warpgroup)

    def left_panels(self, keys: Any) -> list[jax.Array]:
        return [mma.load_left(keys.at[self.score_rows, x]) for x in mma.panel_slices(keys)]

    def q_coordinates(self, t: Any) -> tuple[Any, Any]:
        """Returns the head and the block of queries of step t."""
        if self.spec.group == 1:
            return self.kv_head, self.first_block + t
        member = lax.div(t, self.steps_per_head)
        block = t - member * self.steps_per_head + self.first_block
        return self.kv_head * self.spec.group + member, block

    def buffers(self, t: Any) -> tuple[Any, ...]:
        stage = arithmetic.rem(t, self.config.stages) if self.config.stages > 1 else 0
        m = self.memory
        return tuple(x.at[stage] for x in (m.q, m.dout, m.lse, m.delta))

    def load_block(self, t: Any) -> None:
        """Begins to copy the queries of step t, and makes a group of the copies so far."""
        head, block = self.q_coordinates(t)
        first, size = block * self.config.block_q, self.config.block_q
        limit = None if self.spec.q_len % size == 0 else self.spec.q_len - first
        q, dout, lse, delta = self.buffers(t)
        for array, buffer in ((self.arrays.q, q), (self.arrays.dout, dout)):
            rows = array.at[self.batch, pl.ds(first, size), head]
            async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)
        for array, buffer in ((self.arrays.lse, lse), (self.arrays.delta, delta)):
            async_copy.load_vector(array.at[self.batch, head, pl.ds(first, size)], buffer)
        async_copy.commit_group()

    def load_keys(self) -> None:
        size = self.config.block_kv
        limit = None if self.spec.kv_len % size == 0 else self.spec.kv_len - self.first_key
        for array, buffer in ((self.arrays.k, self.memory.k), (self.arrays.v, self.memory.v)):
            rows = array.at[self.batch, pl.ds(self.first_key, size), self.kv_head]
            async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)

    def wait_for_copies(self) -> None:
        async_copy.wait_groups(0)
        async_copy.sync_cta(self.config.warpgroups)

    def store(self, dk: jax.Array, dv: jax.Array) -> None:
        """Stores dK and dV through the buffers of K and V."""
        async_copy.sync_cta(self.config.warpgroups)  # everyone has read K and V
        limit = self.spec.kv_len - self.first_key
        rows = pl.ds(self.first_key, self.config.block_kv)
        stores = (self.memory.k, dk * self.spec.scale, self.arrays.dk), (self.memory.v, dv, self.arrays.dv)
        for buffer, gradient, _ in stores:
            own = buffer.at[self.score_rows]
            if self.config.split_columns:
                own = buffer.at[:, self.share(buffer.shape[1])]
            own[...] = gradient.astype(buffer.dtype)
        async_copy.sync_cta(self.config.warpgroups)
        for buffer, _, target in stores:
            target = target.at[self.batch, rows, self.kv_head]
            async_copy.store_rows(buffer, target, self.config.warpgroups, limit)


def convert_dq(
    spec: KernelSpec, config: BackwardConfig, sums: jax.Array, q: jax.Array
) -> jax.Array:
    """Returns dQ like q, from the float32 tiles that CTAs have added up."""
    size = config.block_q
    blocks = sums.shape[2]

    def run(refs: tuple, memory: list[Any]) -> None:
        (sums, dq), (buffer,) = refs, memory
        batch, head, block = arithmetic.unravel(lax.axis_index("cta"), sums.shape[:3])
        warpgroup = lax.axis_index("warpgroup") if config.warpgroups > 1 else I32(0)
        columns = config.share(config.head_dim, warpgroup)
        tile = accumulate.load_tile(sums.at[batch, head, block, warpgroup], columns.size, config.vector_atomics)
        buffer.at[:, columns][...] = (tile * spec.scale).astype(q.dtype)
        async_copy.sync_cta(config.warpgroups)
        rows = pl.ds(block * size, size)
        async_copy.store_rows(buffer, dq.at[batch, rows, head], config.warpgroups, spec.q_len - block * size)

    panel = config.panel(config.head_dim, shared=True)
    memory = [pipeline.swizzled_smem(size, config.head_dim, dtype=q.dtype, panel=panel)]
    out_type = jax.ShapeDtypeStruct(q.shape, q.dtype)
    grid = {"cta": spec.batch * spec.q_heads * blocks}
    return launch.build_kernel("convert_dq", run, memory, out_type, grid, config.warpgroups)(sums)
