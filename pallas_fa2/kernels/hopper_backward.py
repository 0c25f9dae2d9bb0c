"""FlashAttention-2, Algorithm 2, on Hopper: one CTA for each block of key columns.

dK and dV stay in registers over all the queries that see the block, of all heads of the group; dQ
is added up in float32 in device memory by TMA. The products are transposed: the probabilities P^T
(keys x queries) are then register operands of dV and dK, and only dS passes through shared memory.

Two warpgroups divide the work of a tile. Up to H = 128 each owns half of the block's 128 keys
(`KeyHalf`), five products in all. At H = 256 the dK and dV of 64 keys fill both register files: one
owns dK, the other dV and dQ (`KeyGradient`, `ValueGradient`); each forms the scores, six products.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic
from pallas_fa2.kernels.mosaic import COLUMNS, I32, LOG2E, Problem, Ring

WARPGROUPS = 2
BLOCK_Q = 64
# Columns of dQ that a warpgroup stages at a time: 64 x 64 float32 take 16 KB and 32 registers.
DQ_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one backward kernel."""

    head_dim: int  # of queries, keys and values: 64, 128 or 256
    stages: int = 2
    # of a thread in a multiplying and in the loading warpgroup: 2 * 240 + 24 <= 512
    registers: tuple[int, int] = (240, 24)
    # Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2.
    section_bytes: int = 40 << 20

    @property
    def by_gradient(self) -> bool:
        """Whether the warpgroups own a gradient each, rather than half of the keys."""
        return self.head_dim > 128

    @property
    def exchange(self) -> bool:
        """At H = 128 each forms half the columns of dQ, from the dS of both; at H = 64, 32 columns
        are less than the 64 of a swizzled tile, and each adds the dQ of its own keys."""
        return self.head_dim == 128

    @property
    def unrolled(self) -> bool:
        """One copy of the code for each warpgroup: ptxas spills at H = 128 if its index is dynamic."""
        return self.head_dim >= 128

    @property
    def block_kv(self) -> int:
        return 64 if self.by_gradient else 128

    @property
    def dq_stages(self) -> int:
        return 1 if self.by_gradient else WARPGROUPS

    @property
    def tile(self) -> tuple[int, int]:
        return BLOCK_Q, self.block_kv


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which key block a CTA takes, and which query blocks of which heads it visits."""

    problem: Problem
    config: Config

    @property
    def kv_tiles(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.problem.q_len // BLOCK_Q)

    @property
    def grid(self) -> mosaic.Grid:
        p = self.problem
        section = None
        if p.causal:
            # Q, dO and the float32 dQ of a group
            q_bytes = p.group * p.q_len * self.config.head_dim * (2 + 2 + 4)
            section = mosaic.section_of(p.kv_heads, q_bytes, self.config.section_bytes)
        return mosaic.Grid(p.batch, p.kv_heads, self.kv_tiles, section)

    def first_q_block(self, first_key: Any) -> Any:
        if self.problem.offset is None:
            return I32(0)
        return lax.div(jnp.maximum(first_key - self.problem.offset, 0), I32(BLOCK_Q))


def gradients(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dQ / scale in float32 `[B, T8, N, H]`, dK and dV `[B, S8, K, H]` in the inputs' dtype.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of 64, and both are what accumulators
    start from: -lse / scale (natural), -inf where a row does not exist so that its probabilities are
    0; and -delta. The sums of dQ come in any order: it is not bitwise reproducible.
    """
    schedule = Schedule(problem, config)
    dtype, dim, block_kv = q.dtype, config.head_dim, config.block_kv
    # Two of dS: one a warpgroup, or one to write while the other is still read.
    ds_rows = block_kv if config.exchange else 64
    branches = WARPGROUPS + 1 if config.unrolled else 2
    memory = Memory(
        k=mosaic.operand(block_kv, dim, dtype=dtype),
        v=mosaic.operand(block_kv, dim, dtype=dtype),
        q=mosaic.operand(config.stages, BLOCK_Q, dim, dtype=dtype),
        dout=mosaic.operand(config.stages, BLOCK_Q, dim, dtype=dtype),
        lse=plgpu.SMEM((config.stages, BLOCK_Q), jnp.float32),
        delta=plgpu.SMEM((config.stages, BLOCK_Q), jnp.float32),
        ds=mosaic.operand(2, ds_rows, BLOCK_Q, dtype=dtype),
        dq=mosaic.operand(config.dq_stages, BLOCK_Q, DQ_COLUMNS, dtype=jnp.float32),
        # All that complete by two arrivals in one array: each array costs a register for its phases,
        # and at H = 128 those make the difference to spilling.
        full=mosaic.barriers(2 * config.stages + 3, 2),
        q_free=mosaic.barriers(config.stages, WARPGROUPS),
        dout_free=mosaic.barriers(config.stages, WARPGROUPS),
        ds_full=mosaic.barriers(2),
        ds_free=mosaic.barriers(2),
        done=[plgpu.Barrier(num_arrivals=WARPGROUPS + 1) for _ in range(branches)],
    )

    def run(refs: tuple, memory: Memory) -> None:
        _body(schedule, Inputs(*refs[:6]), Outputs(*refs[6:]), memory)

    kernel = mosaic.launch(run, memory, (), schedule.grid.axes, WARPGROUPS + 1)
    outputs = (
        jnp.zeros(q.shape, jnp.float32),
        lax.empty(k.shape, dtype),
        lax.empty(v.shape, dtype),
    )
    return pl.run_state(lambda refs: kernel(q, k, v, dout, lse, delta, *refs))(outputs)


class Inputs(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any


class Outputs(NamedTuple):
    dq: Any
    dk: Any
    dv: Any


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Any  # [block_kv, H]
    v: Any
    q: Any  # [stages, BLOCK_Q, H]
    dout: Any
    lse: Any  # [stages, BLOCK_Q]
    delta: Any
    ds: Any  # [2, keys, BLOCK_Q]
    dq: Any  # [dq stages, BLOCK_Q, DQ_COLUMNS]
    full: Any
    q_free: Any
    dout_free: Any
    ds_full: Any
    ds_free: Any
    done: list[Any]

    @property
    def stages(self) -> int:
        return self.q.shape[0]

    @property
    def queries(self) -> Ring:
        return Ring((self.q, self.lse), self.full, self.q_free)

    @property
    def douts(self) -> Ring:
        return Ring((self.dout, self.delta), self.full, self.dout_free, self.stages)

    @property
    def ds_ring(self) -> Ring:
        return Ring((self.ds,), self.ds_full, self.ds_free)

    @property
    def kv_full(self) -> Any:
        return self.full.at[2 * self.stages]

    @property
    def met(self) -> Any:
        """Where the two multiplying warpgroups wait for each other."""
        return self.full.at[2 * self.stages + 1]

    @property
    def results(self) -> Any:
        """Completed when dK and dV lie in the buffers of K and V."""
        return self.full.at[2 * self.stages + 2]


def _body(schedule: Schedule, inputs: Inputs, outputs: Outputs, memory: Memory) -> None:
    config, problem = schedule.config, schedule.problem
    warpgroup = lax.axis_index("warpgroup")
    batch, kv_head, kv_tile = schedule.grid.place()  # the first tile is longest
    first_key = kv_tile * config.block_kv
    keys = pl.ds(first_key, config.block_kv)

    def each_step(body: Any) -> None:
        """body(step, query head, first query row), over the group's heads and their blocks."""
        first = schedule.first_q_block(first_key)
        steps = (schedule.q_blocks - first) * problem.group  # at least one

        def step(t: Any, place: tuple) -> tuple:
            head, block = place
            body(t, head, block * BLOCK_Q)
            last = block == schedule.q_blocks - 1
            return jnp.where(last, head + 1, head), jnp.where(last, first, block + 1)

        lax.fori_loop(I32(0), steps, step, (kv_head * problem.group, first))

    def multiply(me: Any, branch: int) -> None:
        plgpu.set_max_registers(config.registers[0], action="increase")
        role = KeyHalf if not config.by_gradient else (KeyGradient, ValueGradient)[me]
        block = role(schedule, memory, outputs.dq.at[batch], me, first_key)
        memory.queries.open()
        memory.douts.open()
        plgpu.barrier_wait(memory.kv_full)
        block.visit(each_step)
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory.results)  # in the buffers of K and V
        mosaic.leave_together(memory.done, branch)

    def load_all() -> None:
        plgpu.set_max_registers(config.registers[1], action="decrease")

        def load(step: Any, head: Any, row: Any) -> None:
            at = (batch, pl.ds(row, BLOCK_Q), head)
            row_at = (batch, head, pl.ds(row, BLOCK_Q))
            memory.queries.fill(step, inputs.q.at[*at], inputs.lse.at[*row_at])
            memory.douts.fill(step, inputs.dout.at[*at], inputs.delta.at[*row_at])

        for source, smem in ((inputs.k, memory.k), (inputs.v, memory.v)):
            plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], smem, memory.kv_full)
        each_step(load)
        memory.queries.drain()
        memory.douts.drain()
        plgpu.barrier_wait(memory.results)
        for smem, out in ((memory.k, outputs.dk), (memory.v, outputs.dv)):
            plgpu.copy_smem_to_gmem(smem, out.at[batch, keys, kv_head])
        plgpu.wait_smem_to_gmem(0)
        mosaic.leave_together(memory.done, -1)

    roles = [functools.partial(multiply, me, me) for me in range(WARPGROUPS)]
    if not config.unrolled:
        roles = [functools.partial(multiply, warpgroup, 0)] * WARPGROUPS
    mosaic.assign_roles(warpgroup, *roles, load_all)


@dataclasses.dataclass(frozen=True)
class ColumnBlock:
    """One warpgroup's part of a block of keys, against all the queries that see the block.

    Its tiles are transposed: 64 keys (rows) by 64 queries (columns).
    """

    schedule: Schedule
    memory: Memory
    dq: Any  # [T8, N, H] of the batch entry, in device memory
    me: Any
    first_key: Any

    shape = (64, BLOCK_Q)

    @property
    def config(self) -> Config:
        return self.schedule.config

    @property
    def keys(self) -> Any:
        """The keys of the block whose scores this warpgroup forms."""
        return pl.ds(0 if self.config.by_gradient else self.me * 64, 64)

    def accumulator(self, columns: int) -> Any:
        return mosaic.accumulator(64, columns)

    def start_from(self, acc: Any, row_data: Any) -> None:
        """-lse / scale or -delta into an accumulator: the statistics then hold no register of their
        own while scores and dP are both in flight, where registers are scarcest. All before the
        first product, or ptxas waits for that."""
        vector = plgpu.load(row_data, layout=COLUMNS, optimized=False)
        acc[...] = mosaic.over_columns(vector, self.shape)

    def multiply_scores(self, s_acc: Any, q: Any) -> None:
        """S^T - lse / scale."""
        plgpu.wgmma(s_acc, self.memory.k.at[self.keys], q.transpose((1, 0)))

    def dscores(self, t: Any, row: Any, s_acc: Any, dp_acc: Any) -> tuple[jax.Array, jax.Array]:
        """P^T and dS^T in the input dtype."""
        q, lse = self.memory.queries.wait(t)
        dout, delta = self.memory.douts.wait(t)
        self.start_from(s_acc, lse)
        self.start_from(dp_acc, delta)
        self.multiply_scores(s_acc, q)
        plgpu.wgmma(dp_acc, self.memory.v.at[self.keys], dout.transpose((1, 0)))
        p = self.probabilities(plgpu.wgmma_accumulator_load(s_acc, wait_n=1), row)
        ds = p * dp_acc[...]
        return p.astype(q.dtype), ds.astype(q.dtype)

    def probabilities(self, s: jax.Array, row: Any) -> jax.Array:
        """P^T in float32, from S^T - lse / scale."""
        problem = self.schedule.problem
        exponent = (self.hide(s, row) if problem.causal else s) * (problem.scale * LOG2E)
        if problem.kv_len % self.config.block_kv:
            # Keys past the end are zeros that nothing hides. Their part of dQ is 0 and their dK and
            # dV are cut off, as long as p stays finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def hide(self, s: jax.Array, row: Any) -> jax.Array:
        """-inf where a query (column) comes before the first that sees a key (row)."""
        shift = self.first_key + self.keys.start - row - self.schedule.problem.offset
        first = mosaic.over_rows(mosaic.index(self.shape, 0, shift), self.shape)
        column = mosaic.over_columns(mosaic.index(self.shape, 1, 0), self.shape)
        return jnp.where(column >= first, s, -jnp.inf)

    def multiply_dq(self, dq_acc: Any, ds: Any, keys: Any, columns: Any) -> None:
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), self.memory.k.at[keys, columns])

    def add_dq(self, value: jax.Array, stage: Any, head: Any, row: Any, columns: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stage's last piece has been read
        stage[...] = value
        plgpu.commit_smem()
        target = self.dq.at[pl.ds(row, BLOCK_Q), head, columns]
        plgpu.copy_smem_to_gmem(stage, target, reduction_op="add")


class KeyHalf(ColumnBlock):
    """All the gradients of 64 keys, up to H = 128."""

    def visit(self, each_step: Any) -> None:
        """Adds to dQ; leaves dK and dV in the buffers of K and V."""

        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array]:
            each_step(functools.partial(self.step, dk_acc, dv_acc))
            plgpu.wait_smem_to_gmem(0)
            return dk_acc[...], dv_acc[...]

        accumulator = self.accumulator(self.config.head_dim)
        dk, dv = pl.run_scoped(accumulate, accumulator, accumulator)
        mosaic.meet(self.memory.met)  # nobody reads K and V any more
        k, v = self.memory.k.at[self.keys], self.memory.v.at[self.keys]
        k[...] = (dk * self.schedule.problem.scale).astype(k.dtype)
        v[...] = dv.astype(v.dtype)

    def step(self, dk_acc: Any, dv_acc: Any, t: Any, head: Any, row: Any) -> None:
        square = self.accumulator(BLOCK_Q)
        p, ds = pl.run_scoped(functools.partial(self.dscores, t, row), square, square)
        q, _ = self.memory.queries.at(t)
        dout, _ = self.memory.douts.at(t)
        if self.config.exchange:
            ds_smem, dq_keys = self.memory.ds.at[lax.rem(t, I32(2))], pl.ds(0, self.config.block_kv)
            ds_smem.at[self.keys][...] = ds
            columns = pl.ds(self.me * DQ_COLUMNS, DQ_COLUMNS)
        else:
            ds_smem, dq_keys = self.memory.ds.at[self.me], self.keys
            ds_smem[...] = ds
            columns = pl.ds(0, DQ_COLUMNS)
        plgpu.commit_smem()
        plgpu.wgmma(dv_acc, p, dout)
        if self.config.exchange:
            mosaic.meet(self.memory.met)  # dS of all the block's keys is there

        def with_dq(dq_acc: Any) -> None:
            self.multiply_dq(dq_acc, ds_smem, dq_keys, columns)
            # From shared memory, though it is in registers too: 16 of them that ptxas needs.
            plgpu.wgmma(dk_acc, ds_smem.at[self.keys] if self.config.exchange else ds, q)
            plgpu.wgmma_wait(2)  # dV has retired
            self.memory.douts.release(t)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)
            self.add_dq(dq, self.memory.dq.at[self.me], head, row, columns)

        pl.run_scoped(with_dq, self.accumulator(DQ_COLUMNS))
        plgpu.wgmma_wait(0)  # dK has retired
        self.memory.queries.release(t)


class KeyGradient(ColumnBlock):
    """dK of 64 keys at H = 256; hands dS on to `ValueGradient`."""

    def visit(self, each_step: Any) -> None:
        def accumulate(dk_acc: Any) -> jax.Array:
            each_step(functools.partial(self.step, dk_acc))
            return dk_acc[...]

        dk = pl.run_scoped(accumulate, self.accumulator(self.config.head_dim))
        self.memory.ds_ring.drain()
        mosaic.meet(self.memory.met)  # nobody reads K and V any more
        self.memory.k[...] = (dk * self.schedule.problem.scale).astype(self.memory.k.dtype)

    def step(self, dk_acc: Any, t: Any, head: Any, row: Any) -> None:
        square = self.accumulator(BLOCK_Q)
        _, ds = pl.run_scoped(functools.partial(self.dscores, t, row), square, square)
        self.memory.douts.release(t)
        q, _ = self.memory.queries.at(t)
        plgpu.wgmma(dk_acc, ds, q)
        (ds_smem,) = self.memory.ds_ring.acquire(t)
        ds_smem[...] = ds
        self.memory.ds_ring.publish(t)
        plgpu.wgmma_wait(0)
        self.memory.queries.release(t)


class ValueGradient(ColumnBlock):
    """dV of 64 keys at H = 256, and their part of dQ."""

    def visit(self, each_step: Any) -> None:
        self.memory.ds_ring.open()

        def accumulate(dv_acc: Any) -> jax.Array:
            each_step(functools.partial(self.step, dv_acc))
            plgpu.wait_smem_to_gmem(0)
            return dv_acc[...]

        dv = pl.run_scoped(accumulate, self.accumulator(self.config.head_dim))
        mosaic.meet(self.memory.met)  # nobody reads K and V any more
        self.memory.v[...] = dv.astype(self.memory.v.dtype)

    def step(self, dv_acc: Any, t: Any, head: Any, row: Any) -> None:
        q, lse = self.memory.queries.wait(t)

        def with_scores(s_acc: Any) -> jax.Array:
            self.start_from(s_acc, lse)
            self.multiply_scores(s_acc, q)
            return self.probabilities(s_acc[...], row).astype(self.memory.k.dtype)

        p = pl.run_scoped(with_scores, self.accumulator(BLOCK_Q))
        self.memory.queries.release(t)
        dout, _ = self.memory.douts.wait(t)
        plgpu.wgmma(dv_acc, p, dout)
        (ds,) = self.memory.ds_ring.wait(t)
        for start in range(0, self.config.head_dim, DQ_COLUMNS):
            columns = pl.ds(start, DQ_COLUMNS)

            def with_dq(dq_acc: Any, columns: Any = columns) -> None:
                self.multiply_dq(dq_acc, ds, self.keys, columns)
                self.add_dq(dq_acc[...], self.memory.dq.at[0], head, row, columns)

            pl.run_scoped(with_dq, self.accumulator(DQ_COLUMNS))
        plgpu.wgmma_wait(0)  # dV and the last dQ have retired
        self.memory.douts.release(t)
        self.memory.ds_ring.release(t)
