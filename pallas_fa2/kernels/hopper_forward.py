"""FlashAttention-2, Algorithm 1, on Hopper: persistent CTAs, one block of query rows after another.

One warpgroup streams keys and values through rings of buffers by TMA, and the next block's queries;
the others own 64 query rows each and follow FlashAttention-3 (arXiv:2407.08608), Algorithm 2: the
scores of a block and the output of the block before are multiplied together, and the softmax runs
while the latter is in flight. Key blocks go from the last to the first, so that those that need the
mask come first.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic
from pallas_fa2.kernels.mosaic import I32, LOG2E, ROWS, TILE, Problem, Ring, Turns

# Below any score, but finite: a row that has seen no key yet gives p = 0 rather than NaN.
NO_MAXIMUM = -1e30

# A row's maximum is kept until scores exceed it by a factor of 2^8: probabilities then reach 2^8, as
# exact as those below 1, and most blocks rescale nothing.
STALE_MAXIMUM = 8.0


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one forward kernel."""

    head_dim: int  # of queries, keys and values: 64, 128 or 256
    warpgroups: int  # that multiply; each owns 64 query rows
    block_kv: int
    stages: int
    registers: tuple[int, int]  # of a thread in a multiplying and in the loading warpgroup
    # Whether Q is read into registers once a tile: less shared memory traffic (16 of 80 KB a block at
    # H = 128) where there are 32 registers for it.
    q_in_registers: bool = False
    # Whether a warp asks first if any maximum grew: no shuffles where none did, but exponentials
    # cannot begin before the answer.
    vote_first: bool = False
    # Whether the wait for P V must stay behind the exponentials (see `mosaic.pin`).
    pinned: bool = True
    ctas: int = 132  # persistent, one a multiprocessor
    # Keys and values of the heads that run at the same time: about half of the 60 MB of L2.
    section_bytes: int = 32 << 20

    rows: ClassVar[int] = mosaic.ROWS_PER_WARPGROUP

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def separate_output(self) -> bool:
        """Whether the output has a buffer of its own: Q's is then free while the store goes on."""
        row_bytes = 2 * self.head_dim
        needed = row_bytes * (2 * self.block_q + 2 * self.stages * self.block_kv)
        return needed + 4096 <= mosaic.SHARED_MEMORY_BYTES  # 4 KB for lse and barriers


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which query tiles a CTA takes, and which key blocks a tile visits."""

    problem: Problem
    config: Config

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def order(self) -> mosaic.Order:
        p = self.problem
        kv_bytes = 2 * 2 * p.kv_len * self.config.head_dim
        section = mosaic.section_of(p.kv_heads, kv_bytes, self.config.section_bytes) * p.group
        return mosaic.Order(p.batch, p.q_heads, self.q_tiles, section, p.causal)

    def table(self) -> np.ndarray:
        _, _, tile = self.order.place(np.arange(self.order.count))
        ctas = min(self.config.ctas, self.order.count)
        # A tile's beginning and end cost about as much as a block.
        return mosaic.deal(self.blocks(tile)[0], ctas, 1.0)

    def blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """How many key blocks a tile visits, and how many of them, the last ones, are cut."""
        p, c = self.problem, self.config
        whole = p.kv_len // c.block_kv
        if p.offset is None:
            return 0 * q_tile + self.kv_blocks, 0 * q_tile + (self.kv_blocks - whole)
        first_row = q_tile * c.block_q
        end = first_row + (c.block_q + p.offset + c.block_kv - 1)
        visited = mosaic.minimum(mosaic.div(end, c.block_kv), self.kv_blocks)
        full = mosaic.minimum(mosaic.div(first_row + (p.offset + 1), c.block_kv), whole)
        return visited, visited - full


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA."""

    q: Any  # [warpgroups, 1, 64, H]
    k: Any  # [stages, block_kv, H]
    v: Any
    out: Any  # [warpgroups, 64, H]; None where Q's buffer serves
    lse: Any  # [warpgroups, 64]
    full: Any  # of Q, K and V in one array: each array costs a register for its phases
    q_free: Any
    kv_free: Any
    done: list[Any]

    @property
    def warpgroups(self) -> int:
        return self.q.shape[0]

    @property
    def stages(self) -> int:
        return self.k.shape[0]

    @property
    def keys(self) -> Ring:
        return Ring((self.k,), self.full, self.kv_free, self.warpgroups)

    @property
    def values(self) -> Ring:
        first = self.warpgroups + self.stages
        return Ring((self.v,), self.full, self.kv_free, first, self.stages)

    def queries(self, warpgroup: Any) -> Ring:
        return Ring((self.q.at[warpgroup],), self.full, self.q_free, warpgroup, warpgroup)


def attention(
    problem: Problem, config: Config, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T8, N, H]` and natural `lse [B, N, T']`; T8 and T' are T rounded up (8, tile).

    q is `[B, T8, N, H]`, k and v `[B, S8, K, H]`, bfloat16 or float16, lengths multiples of 8.
    """
    schedule = Schedule(problem, config)
    dtype, dim, groups = q.dtype, config.head_dim, config.warpgroups
    rows, stages = config.rows, config.stages
    memory = Memory(
        q=mosaic.operand(groups, 1, rows, dim, dtype=dtype),
        k=mosaic.operand(stages, config.block_kv, dim, dtype=dtype),
        v=mosaic.operand(stages, config.block_kv, dim, dtype=dtype),
        out=mosaic.operand(groups, rows, dim, dtype=dtype) if config.separate_output else None,
        lse=plgpu.SMEM((groups, rows), jnp.float32),
        full=mosaic.barriers(groups + 2 * stages),
        q_free=mosaic.barriers(groups),
        kv_free=mosaic.barriers(2 * stages, groups),
        done=[plgpu.Barrier(num_arrivals=groups + 1) for _ in range(2)],
    )
    flat, tree = jax.tree.flatten(memory)
    table = schedule.table()
    lse_shape = (problem.batch, problem.q_heads, schedule.q_tiles * config.block_q)

    def body(*refs: Any) -> None:
        arrays, memory = Arrays(*refs[:6]), jax.tree.unflatten(tree, refs[6:])
        warpgroup = lax.axis_index("warpgroup")
        roles = (
            lambda: _multiply(schedule, arrays, memory, warpgroup),
            lambda: _load(schedule, arrays, memory),
        )
        mosaic.assign_roles(warpgroup, *[roles[0]] * groups, roles[1])

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        scratch_types=flat,
        grid=(len(table),),
        grid_names=("cta",),
        num_threads=groups + 1,
        thread_name="warpgroup",
        compiler_params=mosaic.COMPILER_PARAMS,
    )
    return kernel(jnp.asarray(table), q, k, v)


class Arrays(NamedTuple):
    """In device memory."""

    table: Any
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


def _load(schedule: Schedule, arrays: Arrays, memory: Memory) -> None:
    """The loading warpgroup: queries, keys and values of one tile after another."""
    config = schedule.config
    plgpu.set_max_registers(config.registers[1], action="decrease")

    def tile(n: Any, number: Any, first_step: Any) -> Any:
        batch, head, q_tile = schedule.order.place(number)
        kv_head = mosaic.div(head, schedule.problem.group)
        visited, _ = schedule.blocks(q_tile)

        def fill(ring: Ring, source: Any, step: Any) -> None:
            rows = pl.ds((visited - 1 - step) * config.block_kv, config.block_kv)
            ring.fill(first_step + step, source.at[batch, rows, kv_head])

        def load(step: Any, _: Any) -> None:
            fill(memory.keys, arrays.k, step)
            fill(memory.values, arrays.v, step - 1)

        fill(memory.keys, arrays.k, I32(0))
        for g in range(config.warpgroups):
            rows = pl.ds(q_tile * config.block_q + g * config.rows, config.rows)
            memory.queries(g).fill(n, arrays.q.at[batch, rows, head])
        lax.fori_loop(I32(1), visited, load, None)
        fill(memory.values, arrays.v, visited - 1)
        return first_step + visited

    mosaic.each_tile(arrays.table, tile, I32(0))
    memory.keys.drain()
    memory.values.drain()
    for g in range(config.warpgroups):
        memory.queries(g).drain()
    mosaic.leave_together(memory.done, 1)


def _multiply(schedule: Schedule, arrays: Arrays, memory: Memory, warpgroup: Any) -> None:
    """A multiplying warpgroup: 64 rows of one tile after another."""
    config = schedule.config
    plgpu.set_max_registers(config.registers[0], action="increase")
    queries, turns = memory.queries(warpgroup), Turns(warpgroup, config.warpgroups)

    def tile(n: Any, number: Any, first_step: Any) -> Any:
        """The CTA's n-th tile; the rings have been through `first_step` steps before it."""
        _, _, q_tile = schedule.order.place(number)
        visited, cut = schedule.blocks(q_tile)
        (q,) = queries.wait(n)
        if config.q_in_registers:
            q = plgpu.load(q, layout=TILE, optimized=False)
        first_row = q_tile * config.block_q + warpgroup * config.rows
        block = RowBlock(schedule, memory, turns, q, first_row, first_step)
        result = block.attend(visited, cut)
        if config.separate_output:
            queries.release(n)
        # What only the end of a tile needs is computed there: 25 registers less in the loops.
        number, me = lax.optimization_barrier((number, warpgroup))
        store(number, me, *result)
        if not config.separate_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            queries.release(n)
        return first_step + visited

    def store(number: Any, me: Any, acc: jax.Array, maximum: jax.Array, total: jax.Array) -> None:
        batch, head, q_tile = schedule.order.place(number)
        rows = pl.ds(q_tile * config.block_q + me * config.rows, config.rows)
        out = memory.out.at[me] if config.separate_output else memory.q.at[me, 0]
        lse = memory.lse.at[me]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the buffers
        out[...] = (acc * mosaic.over_rows(1 / total, acc.shape)).astype(out.dtype)
        lse[...] = maximum * schedule.problem.scale + jnp.log(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, arrays.out.at[batch, rows, head], commit_group=False)
        plgpu.copy_smem_to_gmem(lse, arrays.lse.at[batch, head, rows], commit_group=False)
        plgpu.commit_smem_to_gmem_group()

    memory.keys.open()
    memory.values.open()
    queries.open()
    turns.open()
    mosaic.each_tile(arrays.table, tile, I32(0))
    turns.close()
    plgpu.wait_smem_to_gmem(0)
    mosaic.leave_together(memory.done, 0)


class Statistics(NamedTuple):
    """Of the softmax of 64 rows so far."""

    maximum: jax.Array  # [64], of the scores before they are scaled
    total: jax.Array  # [64, 8], the sum of each thread's columns


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """64 query rows against all the key blocks that they see, by one warpgroup."""

    schedule: Schedule
    memory: Memory
    turns: Turns
    q: Any  # [64, H], in shared memory or registers
    first_row: Any
    first_step: Any  # of this tile, in the rings of keys and values

    @property
    def shape(self) -> tuple[int, int]:
        return mosaic.ROWS_PER_WARPGROUP, self.schedule.config.block_kv

    @property
    def scale(self) -> float:
        """In base 2: the scores' factor in exp2."""
        return self.schedule.problem.scale * LOG2E

    @property
    def dtype(self) -> Any:
        return self.q.dtype

    def attend(self, visited: Any, cut: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The unnormalized output, the row maximum and the row sum."""
        problem = self.schedule.problem
        first_key = (visited - 1) * self.schedule.config.block_kv
        state = self.first_block(first_key)

        def step(masked: bool) -> Any:
            return lambda t, state: self.next_block(t, first_key, masked, *state)

        first_whole = I32(
            1
        )  # of full attention only the first block, the last of the keys, can be cut
        if problem.causal:
            first_whole = jnp.maximum(cut, 1)
            state = lax.fori_loop(I32(1), first_whole, step(True), state)
        acc, statistics, p = lax.fori_loop(first_whole, visited, step(False), state)
        acc = self.last_output(visited - 1, acc, p)
        return acc, statistics.maximum, statistics.total.sum(axis=1)

    def multiply_scores(self, s_acc: Any, k: Any) -> None:
        q = self.q
        if not self.schedule.config.q_in_registers:
            # Descriptors of Q are computed here: 32 registers less outside the loops.
            q = self.memory.q.at[lax.optimization_barrier(self.turns.me), 0]
        plgpu.wgmma(s_acc, q, k.transpose((1, 0)))

    def first_block(self, first_key: Any) -> tuple[jax.Array, Statistics, jax.Array]:
        """Scores and softmax of the first block; there is no output to update yet."""
        problem, (rows, _) = self.schedule.problem, self.shape
        keys = self.memory.keys
        (k,) = keys.wait(self.first_step)
        self.turns.take()

        def multiply(s_acc: Any) -> Any:
            self.multiply_scores(s_acc, k)
            self.turns.give()
            return s_acc[...]

        s = pl.run_scoped(multiply, mosaic.accumulator(*self.shape))
        keys.release(self.first_step)
        if problem.causal or problem.kv_len % self.shape[1]:
            s = self.hide(s, first_key)
        statistics = Statistics(
            mosaic.constant(NO_MAXIMUM, (rows,), ROWS), mosaic.constant(0.0, (rows, 8), TILE)
        )
        _, _, statistics, p = self.softmax(s, statistics)
        acc = mosaic.constant(0.0, (rows, self.schedule.config.head_dim), TILE)
        return acc, statistics, p.astype(self.dtype)

    def next_block(
        self, t: Any, first_key: Any, masked: bool, acc: Any, statistics: Any, p: Any
    ) -> tuple[jax.Array, Statistics, jax.Array]:
        """Scores of block t and output of block t - 1, multiplied together; softmax of block t."""
        keys, values, step = self.memory.keys, self.memory.values, self.first_step + t
        (k,) = keys.wait(step)
        self.turns.take()

        # The scores' accumulator is allocated just before its first product, so that ptxas starts
        # it from zero in the instruction itself and not by 64 moves.
        def multiply(s_acc: Any) -> tuple:
            self.multiply_scores(s_acc, k)
            (v,) = values.wait(step - 1)

            def update(o_acc: Any) -> tuple:
                o_acc[...] = acc
                plgpu.wgmma(o_acc, p, v)
                self.turns.give()
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                keys.release(step)
                if masked:
                    s = self.hide(s, first_key - t * self.shape[1])
                softmax = self.softmax(s, statistics)
                if self.schedule.config.pinned:
                    mosaic.pin(softmax[2].total)
                return o_acc[...], *softmax

            return pl.run_scoped(update, mosaic.accumulator(*acc.shape))

        accumulator = mosaic.accumulator(*self.shape)
        out, grew, factor, statistics, p = pl.run_scoped(multiply, accumulator)
        values.release(step - 1)
        # P's conversion comes last: its registers are being read while P V is in flight.
        out = lax.cond(grew, lambda: out * mosaic.over_rows(factor, out.shape), lambda: out)
        return out, statistics, p.astype(self.dtype)

    def last_output(self, t: Any, acc: jax.Array, p: jax.Array) -> jax.Array:
        values, step = self.memory.values, self.first_step + t
        (v,) = values.wait(step)
        self.turns.take()

        def update(o_acc: Any) -> jax.Array:
            o_acc[...] = acc
            plgpu.wgmma(o_acc, p, v)
            self.turns.give()
            return o_acc[...]

        acc = pl.run_scoped(update, mosaic.accumulator(*acc.shape))
        values.release(step)
        return acc

    def hide(self, s: jax.Array, first_key: Any) -> jax.Array:
        """-inf where a row does not see a key."""
        problem, rows = self.schedule.problem, self.shape[:1]
        if problem.offset is None:
            last = plgpu.layout_cast(jnp.full(rows, problem.kv_len - 1), ROWS)
        else:
            row = mosaic.index(self.shape, 0, self.first_row + problem.offset)
            last = jnp.minimum(row, problem.kv_len - 1)
        return mosaic.hide_columns(s, last - first_key, "<=")

    def softmax(
        self, s: jax.Array, before: Statistics
    ) -> tuple[jax.Array, jax.Array, Statistics, jax.Array]:
        """Whether maxima grew, the factor of what came before, the new statistics, and p.

        One multiply-add a score: exp2(s * scale - maximum * scale).
        """
        highest = mosaic.by_eights(jnp.maximum, s)
        limit = before.maximum + STALE_MAXIMUM / self.scale

        def update() -> tuple[jax.Array, Statistics]:
            maximum = jnp.maximum(before.maximum, highest.max(axis=1))
            if not self.schedule.config.vote_first:
                maximum = jnp.where(maximum > limit, maximum, before.maximum)
            factor = jnp.exp2((before.maximum - maximum) * self.scale)
            total = before.total * mosaic.over_rows(factor, before.total.shape)
            return factor, Statistics(maximum, total)

        def keep() -> tuple[jax.Array, Statistics]:
            return mosaic.constant(1.0, limit.shape, ROWS), before

        grew = mosaic.any_above(highest, limit)
        if self.schedule.config.vote_first:
            factor, after = lax.cond(grew, update, keep)
        else:
            factor, after = update()
        p = jnp.exp2(s * self.scale - mosaic.over_rows(after.maximum * self.scale, s.shape))
        total = after.total + mosaic.by_eights(jnp.add, p)
        return grew, factor, Statistics(after.maximum, total), p
