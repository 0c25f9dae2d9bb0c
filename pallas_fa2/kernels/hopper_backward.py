"""FlashAttention-2, Algorithm 2, on Hopper: persistent CTAs, one block of key columns after another.

dK and dV stay in registers over all the queries that see the block, of all heads of the group; dQ
is added up in float32 in device memory, straight from registers. The products are transposed: the
probabilities P^T (keys x queries) are then register operands of dV and dK, and only dS passes through
shared memory, whose bandwidth bounds this kernel.

Up to H = 128 two warpgroups divide the work of a tile, each owns half of the block's 128 keys
(`KeyHalf`). At H = 256 dK and dV of 64 keys alone take half of the register file: a warpgroup
owns one (`KeyGradient`, `ValueGradient`), and a third, which also loads, forms the scores for both
(`Scores`). A block then is a pair of CTAs' (a cluster), that send each other their dS: each forms half
of dQ's columns over all of the block's keys, as what bounds this kernel otherwise is how fast L2 adds.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic, ptx
from pallas_fa2.kernels.mosaic import COLUMNS, I32, LOG2E, Problem, Ring
from pallas_fa2.kernels.tma import Rows

# A block's dQ is formed and added in tiles of 64 x 64: an accumulator of 32 registers.
DQ_TILE = 64
# dS lies in panels of 64 queries, the width of a swizzled row.
PANEL = 64
# The axis of the two CTAs that share a block of keys.
PAIR = "pair"


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one backward kernel."""

    head_dim: int  # of queries, keys and values: 64, 128 or 256
    ctas: int = 132  # persistent, one a multiprocessor
    # Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2.
    section_bytes: int = 40 << 20

    @property
    def paired(self) -> bool:
        """Whether two CTAs share a block of keys."""
        return self.head_dim > 128

    @property
    def registers(self) -> tuple[int, ...]:
        """Of a thread in each warpgroup, the loading one last: 512 in all, with 24 for none."""
        return (192, 192, 120) if self.paired else (240, 240, 24)

    @property
    def block_q(self) -> int:
        """At H = 64 twice as many, or shared memory could not keep up: keys are read once a block."""
        return 128 if self.head_dim == 64 else 64

    block_kv: ClassVar[int] = 128

    @property
    def kv_rows(self) -> int:
        """Of a block's keys, those in one CTA."""
        return 64 if self.paired else 128

    @property
    def stages(self) -> tuple[int, int]:
        """Of Q and dO. At H = 256 dV is formed a good while before dP of the next step."""
        return (2, 1) if self.paired else (2, 2)

    @property
    def kv_stages(self) -> tuple[int, int]:
        """Of K and V. Up to H = 128, the last dQ of a tile is formed in the first step of the next."""
        return 1 if self.paired else 2, 1

    @property
    def ds_stages(self) -> int:
        """One to be written, one to be read by this warpgroup and one by the other; at H = 256 each
        is read by others than its writer."""
        return 2 if self.paired else 3

    @property
    def dq_parts(self) -> int:
        """How many tiles of dQ a block of queries has."""
        return self.block_q * self.head_dim // DQ_TILE**2

    def dq_place(self, part: int) -> tuple[Any, Any]:
        """The rows and columns of a part, within the block: side by side, or at H = 64 in turn."""
        part_of, first = pl.ds(part * DQ_TILE, DQ_TILE), pl.ds(0, DQ_TILE)
        return (part_of, first) if self.head_dim == DQ_TILE else (first, part_of)

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv


# How much later than an even division the last CTA may be done, before tiles are divided.
UNEVEN = 1.05


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which key blocks a CTA takes, and which query blocks of which heads each visits.

    A group's query heads may be divided into parts, with a tile for each: otherwise few key heads would
    leave CTAs idle.
    """

    problem: Problem
    config: Config
    parts: int = 1

    @classmethod
    def of(cls, problem: Problem, config: Config) -> "Schedule":
        """With the fewest parts that keep all CTAs busy."""
        group = problem.group
        schedules = [cls(problem, config, n) for n in range(1, group + 1) if group % n == 0]
        return next((s for s in schedules if s._unevenness <= UNEVEN), schedules[-1])

    @property
    def group(self) -> int:
        """The query heads of a tile."""
        return self.problem.group // self.parts

    @property
    def heads(self) -> int:
        """Key heads, counted once for each part of their groups."""
        return self.problem.kv_heads * self.parts

    @property
    def kv_tiles(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.problem.q_len // self.config.block_q)

    @property
    def order(self) -> mosaic.Order:
        p = self.problem
        # Q, dO and the float32 dQ of a head: the group's heads follow each other.
        q_bytes = p.q_len * self.config.head_dim * (2 + 2 + 4)
        section = mosaic.section_of(self.heads, q_bytes, self.config.section_bytes)
        return mosaic.Order(p.batch, self.heads, self.kv_tiles, section, p.causal)

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch entry, head and key block of a tile; the first block of a head is the longest."""
        batch, head, tile = self.order.place(number)
        return batch, head, self.kv_tiles - 1 - tile if self.problem.causal else tile

    def table(self) -> np.ndarray:
        return mosaic.deal(self._costs, min(self._hands, self.order.count))

    @property
    def _hands(self) -> int:
        return self.config.ctas // (2 if self.config.paired else 1)

    @property
    def _costs(self) -> np.ndarray:
        """Of the tiles; their beginnings and ends cost about half a step."""
        _, _, kv_tile = self.place(np.arange(self.order.count))
        return self.steps(kv_tile) + 0.5

    @property
    def _unevenness(self) -> float:
        """When the last CTA is done, by when all would be if they could share everything."""
        _, last = mosaic.share(self._costs, self._hands)
        return last * self._hands / sum(self._costs)

    def first_q_block(self, kv_tile: Any) -> Any:
        """The first whose queries see the block's first key."""
        if self.problem.offset is None:
            return 0 * kv_tile
        first_key = kv_tile * self.config.block_kv
        first_query = mosaic.maximum(first_key - self.problem.offset, 0)
        return mosaic.div(first_query, self.config.block_q)

    def steps(self, kv_tile: Any) -> Any:
        """At least one."""
        return (self.q_blocks - self.first_q_block(kv_tile)) * self.group

    @property
    def dq_shape(self) -> tuple[int, int, int]:
        """A row for each block of queries of each head, and one for what is no gradient."""
        blocks = self.problem.batch * self.problem.q_heads * self.q_blocks
        return blocks + 1, self.config.dq_parts, DQ_TILE**2

    def join(self, gradient: list[jax.Array]) -> jax.Array:
        """`[B, S, K, H]` from the numbers that make up dK or dV, and the parts of each group."""
        if self.parts == 1:
            return gradient[0]
        batch, length, _, dim = gradient[0].shape
        total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in gradient))
        total = total.reshape(batch, length, self.problem.kv_heads, self.parts, dim).sum(3)
        return total.astype(gradient[0].dtype)

    def assemble(self, dq: jax.Array) -> jax.Array:
        """`[B, T', N, H]` from the parts of all blocks, which `ptx.add_fragments` has added up."""
        p, c = self.problem, self.config
        # rows of a tile are (warp, half, group), columns (eight, thread, element)
        fragments = "eight", "warp", "group", "thread", "half", "element"
        axes = "batch", "head", "block", "part", *fragments
        sizes = p.batch, p.q_heads, self.q_blocks, c.dq_parts, 8, 4, 8, 4, 2, 2
        rows, columns = ("warp", "half", "group"), ("eight", "thread", "element")
        if c.head_dim == DQ_TILE:
            order = "batch", "block", "part", *rows, "head", *columns
        else:
            order = "batch", "block", *rows, "head", "part", *columns
        dq = dq[:-1].reshape(sizes).transpose([axes.index(name) for name in order])
        return dq.reshape(p.batch, self.q_blocks * c.block_q, p.q_heads, c.head_dim)


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
    """dQ / scale in float32 `[B, T, N, H]`, dK and dV `[B, S, K, H]` in the inputs' dtype.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of `block_q`, both negated: -lse in base
    2, -inf where a row does not exist so that its probabilities are 0; and -delta. The sums of dQ
    come in any order: it is not bitwise reproducible.
    """
    schedule = Schedule.of(problem, config)
    table = schedule.table()

    def run(refs: tuple, memory: Memory) -> None:
        dq, *dkv = refs[7:]
        _body(schedule, Inputs(*refs[:7]), Outputs(dq, dkv[0::2], dkv[1::2]), memory)

    kernel = mosaic.launch(
        run,
        _memory(config, q.dtype),
        (),
        {"cta": len(table)},
        len(config.registers),
        {PAIR: 2} if config.paired else {},
    )
    # Of a part of a group, a gradient leaves as two numbers whose sum is as good as in float32.
    shape = (*k.shape[:2], schedule.heads, k.shape[3])
    count = 2 if schedule.parts == 1 else 4
    # one each: of one for all, XLA may let two share their memory
    empty = (lax.empty(shape, k.dtype) for _ in range(count))
    outputs = (jnp.zeros(schedule.dq_shape, jnp.float32), *empty)
    inputs = (jnp.asarray(table), q, k, v, dout, lse, delta)
    dq, *dkv = pl.run_state(lambda refs: kernel(*inputs, *refs))(outputs)
    dk, dv = (schedule.join(dkv[i::2]) for i in range(2))
    return schedule.assemble(dq)[:, : q.shape[1]], dk, dv


class Inputs(NamedTuple):
    """In device memory."""

    table: Any
    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any


class Outputs(NamedTuple):
    dq: Any  # [blocks of queries, parts, a tile in the order of registers]
    dk: list[Any]  # an array for each number that a gradient is made of
    dv: list[Any]


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Any  # [stages, kv_rows, H]
    v: Any
    q: Any  # [stages, block_q, H]
    dout: Any
    lse: Any  # [stages, block_q]
    delta: Any
    ds: Any  # [stages, panels, kv_rows, PANEL]
    full: Any
    free: Any
    done: list[Any]
    # at H = 256
    p: Any = None  # as dS
    ds_of_other: Any = None
    k_of_other: Any = None  # [1, kv_rows, H / 2]
    arrived: Any = None
    once: Any = None
    used: Any = None

    @property
    def queries(self) -> Ring:
        return Ring((self.q, self.lse), self.full, self._rows_free)

    @property
    def douts(self) -> Ring:
        first = self.queries.stages
        delta = self.lse.at[pl.ds(first, self.dout.shape[0])] if self.delta is None else self.delta
        return Ring((self.dout, delta), self.full, self._rows_free, first, first)

    @property
    def _rows_free(self) -> Any:
        """At H = 256 one warpgroup alone uses Q last, and one dO."""
        return self.free if self.once is None else self.once

    @property
    def keys(self) -> Ring:
        first = self.queries.stages + self.douts.stages
        buffers = _halves(self.k) if self.k_of_other is None else (self.k, self.k_of_other)
        return Ring(buffers, self.full, self.free, first, first)

    @property
    def values(self) -> Ring:
        first = self.queries.stages + self.douts.stages + self.keys.stages
        return Ring(_halves(self.v), self.full, self.free, first, first)

    @property
    def rings(self) -> list[Ring]:
        return [self.queries, self.douts, self.keys, self.values]

    @property
    def scores(self) -> list[Ring]:
        """P^T and dS^T. A stage is free when four warpgroups have used it, here and in the other CTA."""
        first, stages = self.queries.stages + self.douts.stages, self.ds.shape[0]
        buffers = enumerate((self.p, self.ds))
        return [Ring((x,), self.once, self.used, first + i * stages) for i, x in buffers]

    @property
    def mail(self) -> ptx.Mail:
        """The other CTA's dS^T, in the same stage."""
        return ptx.Mail(self.ds_of_other, self.arrived, self.ds.dtype)

    def barrier(self, i: int) -> Any:
        return self.full.at[sum(ring.stages for ring in self.rings) + i]

    @property
    def met(self) -> Any:
        """Where the two multiplying warpgroups wait for each other at the end of a tile."""
        return self.barrier(0)

    @property
    def ds_there(self) -> Any:
        """Completed when the dS of a step is there."""
        return self.barrier(1)


def _memory(config: Config, dtype: Any) -> Memory:
    dim, block_q, kv_rows = config.head_dim, config.block_q, config.kv_rows
    (q_stages, do_stages), (k_stages, v_stages) = config.stages, config.kv_stages
    rings, warpgroups = q_stages + do_stages + k_stages + v_stages, len(config.registers)

    def scores(columns: int) -> Any:
        shape = config.ds_stages, columns // PANEL, kv_rows, PANEL
        return mosaic.operand(*shape, dtype=dtype)

    memory = Memory(
        k=mosaic.operand(k_stages, kv_rows, dim, dtype=dtype),
        v=mosaic.operand(v_stages, kv_rows, dim, dtype=dtype),
        q=mosaic.operand(q_stages, block_q, dim, dtype=dtype),
        dout=mosaic.operand(do_stages, block_q, dim, dtype=dtype),
        lse=plgpu.SMEM((q_stages, block_q), jnp.float32),
        delta=plgpu.SMEM((do_stages, block_q), jnp.float32),
        ds=scores(block_q),
        # All that complete by two arrivals in one array: each array costs a register for its phases,
        # and at H = 128 those make the difference to spilling.
        full=mosaic.barriers(rings + 2, 2),
        free=mosaic.barriers(rings, 2),
        done=[plgpu.Barrier(num_arrivals=warpgroups) for _ in range(warpgroups)],
    )
    if not config.paired:
        return memory
    return memory._replace(
        # in one array, as each begins at a multiple of 1024 bytes
        lse=plgpu.SMEM((q_stages + do_stages, block_q), jnp.float32),
        delta=None,
        p=scores(block_q),
        ds_of_other=mosaic.operand(config.ds_stages, kv_rows, block_q, dtype=dtype),
        arrived=plgpu.SMEM((config.ds_stages, 2), jnp.uint32),
        k_of_other=mosaic.operand(k_stages, kv_rows, dim // 2, dtype=dtype),
        once=mosaic.barriers(q_stages + do_stages + 2 * config.ds_stages),
        used=plgpu.ClusterBarrier(
            collective_axes=(PAIR,), num_barriers=config.ds_stages, num_arrivals=2
        ),
    )


def _halves(ref: Any) -> tuple[Any, Any]:
    """Two copies, and so two arrivals, as for all that is loaded."""
    half = ref.shape[1] // 2
    return ref.at[:, pl.ds(0, half)], ref.at[:, pl.ds(half, half)]


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block of keys, and the query blocks that see it, of all heads of its group."""

    schedule: Schedule
    k: Any  # of the CTA's tiles, this one
    number: Any
    first_step: Any  # steps count through all tiles of a CTA

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Batch entry, head and key block."""
        return self.schedule.place(self.number)

    @property
    def kv_head(self) -> Any:
        return mosaic.div(self.place[1], self.schedule.parts)

    @property
    def first_key(self) -> Any:
        return self.place[2] * self.schedule.config.block_kv

    @property
    def next_step(self) -> Any:
        """Of the next tile, the first."""
        return self.first_step + self.schedule.steps(self.place[2])

    @property
    def first_row(self) -> Any:
        """Of dQ; blocks of queries are numbered through all heads of all batch entries."""
        problem, blocks = self.schedule.problem, self.schedule.q_blocks
        batch, head, kv_tile = self.place
        head = batch * problem.q_heads + head * self.schedule.group
        return head * blocks + self.schedule.first_q_block(kv_tile)

    @property
    def last_row(self) -> Any:
        batch, head, _ = self.place
        after = batch * self.schedule.problem.q_heads + (head + 1) * self.schedule.group
        return after * self.schedule.q_blocks - 1

    def row_after(self, row: Any) -> Any:
        blocks = self.schedule.q_blocks
        if self.schedule.group == 1 or not self.schedule.problem.causal:
            return row + 1
        hidden = self.schedule.first_q_block(self.place[2])  # of the next head
        return row + 1 + jnp.where(mosaic.rem(row, blocks) == blocks - 1, hidden, 0)

    def each_step(self, body: Any, carry: Any = None) -> Any:
        """carry = body(step, carry), over the group's heads and their blocks."""

        def step(t: Any, state: tuple) -> tuple:
            row, carry = state
            return self.row_after(row), body(Step(self, t, row), carry)

        state = self.first_row, carry
        return lax.fori_loop(self.first_step, self.next_step, step, state)[1]


class Step(NamedTuple):
    """One block of queries against one block of keys."""

    tile: Tile
    t: Any
    row: Any  # of dQ

    @property
    def first(self) -> Any:
        return self.t == self.tile.first_step

    @property
    def last(self) -> Any:
        return self.t == self.tile.next_step - 1

    @property
    def next(self) -> "Step":
        """Of the same tile."""
        return Step(self.tile, self.t + 1, self.tile.row_after(self.row))

    @property
    def head(self) -> tuple[Any, Any]:
        """Batch entry and query head."""
        schedule = self.tile.schedule
        head, heads = mosaic.div(self.row, schedule.q_blocks), schedule.problem.q_heads
        return mosaic.div(head, heads), mosaic.rem(head, heads)

    @property
    def first_query(self) -> Any:
        schedule, tile = self.tile.schedule, self.tile
        if schedule.group == 1:  # no division, whose numbers would hold registers
            block = self.t - tile.first_step + schedule.first_q_block(tile.place[2])
        else:
            block = mosaic.rem(lax.optimization_barrier(self.row), schedule.q_blocks)
        return lax.optimization_barrier(block) * schedule.config.block_q


def _body(schedule: Schedule, inputs: Inputs, outputs: Outputs, memory: Memory) -> None:
    config = schedule.config

    def run(me: int) -> None:
        mosaic.set_registers(config.registers, me)
        role = kinds[me](schedule, inputs, outputs, memory, me)

        def visit(k: Any, number: Any, state: tuple) -> tuple:
            first_step, dq_row = state
            tile = Tile(schedule, k, number, first_step)
            return tile.next_step, role.visit(tile, dq_row)

        role.open()
        state = I32(0), I32(schedule.dq_shape[0] - 1)
        steps, dq_row = mosaic.each_tile(inputs.table, visit, state, prefetch=False)
        role.close(steps, inputs.table[lax.axis_index("cta"), 0], dq_row)
        mosaic.leave_together(memory.done, me)

    kinds = (KeyGradient, ValueGradient, Scores) if config.paired else (KeyHalf, KeyHalf, Loader)
    roles = [functools.partial(run, me) for me in range(len(kinds))]
    mosaic.assign_roles(lax.axis_index("warpgroup"), *roles)


@dataclasses.dataclass(frozen=True)
class Role:
    """What a warpgroup does."""

    schedule: Schedule
    inputs: Inputs
    outputs: Outputs
    memory: Memory
    me: int

    @property
    def config(self) -> Config:
        return self.schedule.config

    def first_row(self, tile: Tile) -> Any:
        """Of the block's keys, the CTA's first."""
        return tile.first_key + (64 * lax.axis_index(PAIR) if self.config.paired else 0)

    def open(self) -> None:
        """Before the first tile."""

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        """A tile. `dq_row` is where dQ of the step before goes; returns it for the last step."""
        raise NotImplementedError

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """After the last tile."""


class Loader(Role):
    """Keys and values of one tile after another, and the queries that they meet."""

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        def load(step: Step, _: Any) -> None:
            pl.when(step.first)(lambda: self.load_keys(tile))
            self.load_queries(step)
            pl.when(step.first)(lambda: self.load_values(tile))
            self.load_douts(step)

        tile.each_step(load)
        return dq_row

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        for ring in self.memory.rings:
            ring.drain()

    def load_queries(self, step: Step) -> None:
        self._load_rows(self.memory.queries, step, self.inputs.q, self.inputs.lse)

    def load_douts(self, step: Step) -> None:
        self._load_rows(self.memory.douts, step, self.inputs.dout, self.inputs.delta)

    def load_keys(self, tile: Tile) -> None:
        self._load_halves(self.memory.keys, tile, self.inputs.k)

    def load_values(self, tile: Tile) -> None:
        self._load_halves(self.memory.values, tile, self.inputs.v)

    def _load_rows(self, ring: Ring, step: Step, source: Any, row_data: Any) -> None:
        (batch, head), rows = step.head, pl.ds(step.first_query, self.config.block_q)
        ring.fill(step.t, Rows(source, batch, rows, head), row_data.at[batch, head, rows])

    def _load_halves(self, ring: Ring, tile: Tile, source: Any) -> None:
        batch, kv_head = tile.place[0], tile.kv_head
        half = self.config.kv_rows // 2
        parts = [pl.ds(self.first_row(tile) + i * half, half) for i in range(2)]
        ring.fill(tile.k, *(Rows(source, batch, x, kv_head, by_pieces=True) for x in parts))


class ColumnBlock(Role):
    """One warpgroup's part of a block of keys, against all the queries that see the block.

    Its tiles are transposed: 64 keys (rows) by `block_q` queries (columns).
    """

    @property
    def shape(self) -> tuple[int, int]:
        return 64, self.config.block_q

    @property
    def keys(self) -> Any:
        """Of the CTA's keys, those whose scores this warpgroup forms or whose gradient it owns."""
        return pl.ds(0 if self.config.paired else self.me * 64, 64)

    @property
    def scale(self) -> float:
        return self.schedule.problem.scale

    def accumulator(self, columns: int) -> Any:
        return mosaic.accumulator(64, columns)

    def open(self) -> None:
        for ring in self.memory.rings:
            ring.open()

    def wait_for_keys(self, tile: Tile) -> None:
        self.memory.keys.wait(tile.k)
        self.memory.values.wait(tile.k)

    def keys_of(self, k: Any) -> Any:
        return self.memory.k.at[lax.optimization_barrier(self.memory.keys.slot(k))]

    @property
    def panels(self) -> list[Any]:
        """The queries of a block, so many at a time that their probabilities take 32 registers."""
        return [pl.ds(start, PANEL) for start in range(0, self.config.block_q, PANEL)]

    def rows_of(self, row_data: Any, panel: Any) -> jax.Array:
        """A value of each query, in every row."""
        vector = plgpu.load(row_data.at[panel], layout=COLUMNS, optimized=False)
        return mosaic.over_columns(vector, (64, PANEL))

    def multiply_scores(self, s_acc: Any, q: Any, k: Any) -> None:
        """S^T."""
        s_acc[...] = ptx.zeros(self.shape)
        plgpu.wgmma(s_acc, self.keys_of(k).at[self.keys], q.transpose((1, 0)))

    def multiply_dp(self, dp_acc: Any, dout: Any) -> None:
        """dP^T."""
        dp_acc[...] = ptx.zeros(self.shape)
        v = self.memory.v.at[lax.optimization_barrier(I32(0))]
        plgpu.wgmma(dp_acc, v.at[self.keys], dout.transpose((1, 0)))

    def probabilities(self, s: jax.Array, lse: Any, step: Step, panel: Any) -> jax.Array:
        """P^T in float32, from S^T of a panel."""
        problem = self.schedule.problem
        exponent = s * (problem.scale * LOG2E) + self.rows_of(lse, panel)
        if problem.causal:
            exponent = self.hide(exponent, step, panel)
        if problem.kv_len % self.config.block_kv:
            # Keys past the end are zeros that nothing hides. Their part of dQ is 0 and their dK and
            # dV are cut off, as long as p stays finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def hide(self, s: jax.Array, step: Step, panel: Any) -> jax.Array:
        """-inf where a query (column) comes before the first that sees a key (row)."""
        first_key = self.first_row(step.tile) + self.keys.start
        shift = first_key - step.first_query - panel.start - self.schedule.problem.offset
        return ptx.hide_before(s, mosaic.index((64, PANEL), 0, shift))

    def scores(self, step: Step) -> list[tuple[jax.Array, jax.Array]]:
        """P^T and dS^T of a step, panel by panel, in the input dtype."""
        q, lse = self.memory.queries.wait(step.t)
        dout, delta = self.memory.douts.wait(step.t)

        def products(s_acc: Any, dp_acc: Any) -> list:
            self.multiply_scores(s_acc, q, step.tile.k)
            self.multiply_dp(dp_acc, dout)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            def of(panel: Any) -> tuple[jax.Array, jax.Array]:
                columns = slice(panel.start, panel.start + PANEL)
                p = self.probabilities(s[:, columns], lse, step, panel)
                ds = p * (dp_acc[...][:, columns] + self.rows_of(delta, panel))
                return p.astype(dout.dtype), ds.astype(dout.dtype)

            return lax.optimization_barrier([of(panel) for panel in self.panels])

        square = self.accumulator(self.config.block_q)
        return pl.run_scoped(products, square, square)

    def release(self, step: Step) -> None:
        """Q and dO; of a tile's last step, `store` releases one, when it has used it."""
        rings = [self.memory.queries, self.memory.douts]
        own = rings.pop(self.me)
        rings[0].release(step.t)
        pl.when(jnp.logical_not(step.last))(lambda: own.release(step.t))

    def store(self, tile: Tile, *gradients: tuple[list[Any], jax.Array]) -> None:
        """(dK or dV, of this warpgroup's keys), at the end of a tile: through the buffers of its last Q
        and dO, one a warpgroup."""
        batch, head, _ = tile.place
        last_step = tile.next_step - 1
        rows = pl.ds(self.first_row(tile) + self.keys.start, 64)
        mosaic.meet(self.memory.met)  # nobody reads Q and dO any more
        ring = (self.memory.queries, self.memory.douts)[self.me]
        buffer, _ = ring.at(last_step)
        places = self.config.block_q // 64
        numbers = [x for targets, gradient in gradients for x in _numbers(targets, gradient)]
        for i, (target, number) in enumerate(numbers):
            place = buffer.at[pl.ds(64 * (i % places), 64)]
            if i and i % places == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # By panels, as dS: their addresses differ by constants, and hold fewer registers.
            for start in range(0, self.config.head_dim, PANEL):
                place.at[:, pl.ds(start, PANEL)][...] = number(start)
            plgpu.commit_smem()
            Rows(target, batch, rows, head, by_pieces=True).store(place)
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(last_step)


def _numbers(targets: list[Any], gradient: jax.Array) -> list[tuple[Any, Callable]]:
    """For each target, its panel of columns from a start on: the gradient as rounded, and the rest."""

    def rounded(start: int) -> jax.Array:
        return gradient[:, start : start + PANEL].astype(targets[0].dtype)

    def rest(start: int) -> jax.Array:
        # rounded once more: LLVM would keep what was rounded before in registers
        panel = lax.optimization_barrier(gradient[:, start : start + PANEL])
        return (panel - panel.astype(targets[0].dtype).astype(jnp.float32)).astype(targets[0].dtype)

    return list(zip(targets, (rounded, rest), strict=False))


class KeyHalf(ColumnBlock):
    """All the gradients of 64 keys, up to H = 128; and half of the block's dQ.

    dQ of a step is formed in the next, with dV and dK of that one: by then the other warpgroup's dS is
    there. Nothing is in flight when P and dS become operands, as ptxas serializes all products if
    registers that one reads change while another is in flight.
    """

    def open(self) -> None:
        super().open()
        plgpu.barrier_arrive(self.memory.ds_there)  # as if there were a step before the first

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
            last = tile.each_step(functools.partial(self.step, dk_acc, dv_acc), dq_row)
            return dk_acc[...], dv_acc[...], last

        self.wait_for_keys(tile)
        wide = self.accumulator(self.config.head_dim)
        dk, dv, last = pl.run_scoped(accumulate, wide, wide)
        self.memory.values.release(tile.k)
        self.store(tile, (self.outputs.dv, dv), (self.outputs.dk, dk * self.scale))
        return last

    def step(self, dk_acc: Any, dv_acc: Any, step: Step, dq_row: Any) -> Any:
        """dV and dK of a step, and dQ of the step before."""
        memory, t, k = self.memory, step.t, step.tile.k
        panels = list(zip(self.panels, self.scores(step), strict=True))
        (q, _), (dout, _) = memory.queries.at(t), memory.douts.at(t)
        plgpu.barrier_wait(memory.ds_there)
        for i, (_, (_, ds)) in enumerate(panels):
            self.ds(t).at[i, self.keys][...] = ds

        def products(dq_acc: Any) -> None:
            self.multiply_dq_of(dq_acc, t - 1, jnp.where(step.first, k - 1, k))
            for panel, (p, ds) in panels:
                plgpu.wgmma(dv_acc, p, dout.at[panel])
                plgpu.wgmma(dk_acc, ds, q.at[panel])
            plgpu.commit_smem()
            plgpu.barrier_arrive(memory.ds_there)
            dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=2 * len(panels))
            self.add_dq(dq, dq_row)
            plgpu.wgmma_wait(0)

        pl.run_scoped(products, self.accumulator(DQ_TILE))
        pl.when(step.first & (t > 0))(lambda: memory.keys.release(k - 1))
        self.release(step)
        return step.row

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """dQ of the last step."""
        plgpu.barrier_wait(self.memory.ds_there)

        def product(dq_acc: Any) -> jax.Array:
            self.multiply_dq_of(dq_acc, steps - 1, tiles - 1)
            return dq_acc[...]

        self.add_dq(pl.run_scoped(product, self.accumulator(DQ_TILE)), dq_row)
        self.memory.keys.release(tiles - 1)

    def ds(self, t: Any) -> Any:
        """dS of a step; there is one before the first, whose dQ goes nowhere."""
        stages = self.config.ds_stages
        return self.memory.ds.at[lax.rem(t + stages, I32(stages))]

    def multiply_dq_of(self, dq_acc: Any, t: Any, k: Any) -> None:
        """This warpgroup's part of dQ of step t, of the CTA's k-th tile."""
        rows, columns = self.config.dq_place(self.me)
        ds = self.ds(t).at[rows.start // PANEL]
        dq_acc[...] = ptx.zeros((DQ_TILE, DQ_TILE))
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), self.keys_of(jnp.maximum(k, 0)).at[:, columns])

    def add_dq(self, dq: jax.Array, row: Any) -> None:
        ptx.add_fragments(self.outputs.dq.at[row, self.me], dq)


class Scores(ColumnBlock, Loader):
    """P and dS of 64 keys at H = 256, for the warpgroups that own the gradients.

    It also loads: the next Q behind P, the next dO behind dS. What it has read is released by those who
    wait for its P and dS.
    """

    def open(self) -> None:
        """It releases nothing."""

    def load_keys(self, tile: Tile) -> None:
        """The CTA's, and those columns of the other's that meet its half of dQ."""
        batch, kv_head = tile.place[0], tile.kv_head
        rank, columns = lax.axis_index(PAIR), self.config.head_dim // 2
        mine, others = (pl.ds(tile.first_key + 64 * i, 64) for i in (rank, 1 - rank))
        rows = functools.partial(Rows, self.inputs.k, batch, head=kv_head, by_pieces=True)
        half = pl.ds(columns * rank, columns)
        self.memory.keys.fill(tile.k, rows(rows=mine), rows(rows=others, columns=half))

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        first = Step(tile, tile.first_step, tile.first_row)
        self.load_queries(first)
        self.load_keys(tile)
        self.load_values(tile)
        self.load_douts(first)
        self.wait_for_keys(tile)
        tile.each_step(self.step)
        return dq_row

    def step(self, step: Step, _: Any) -> None:
        memory, t, square = self.memory, step.t, self.accumulator(self.config.block_q)
        (p_smem,), (ds_smem,) = (ring.at(t) for ring in memory.scores)
        [panel] = self.panels
        q, lse = memory.queries.wait(t)

        def load_next(load: Callable) -> None:
            pl.when(jnp.logical_not(step.last))(lambda: load(step.next))

        def form_p(s_acc: Any) -> jax.Array:
            self.multiply_scores(s_acc, q, step.tile.k)
            return self.probabilities(s_acc[...], lse, step, panel)

        p = pl.run_scoped(form_p, square)
        memory.scores[0].acquire(t)
        memory.mail.expect(t)
        p_smem.at[0][...] = p.astype(p_smem.dtype)
        load_next(self.load_queries)
        dout, delta = memory.douts.wait(t)
        memory.scores[0].publish(t)  # and with P, dO

        def form_ds(dp_acc: Any) -> jax.Array:
            self.multiply_dp(dp_acc, dout)
            return p * (dp_acc[...] + self.rows_of(delta, panel))

        ds_smem.at[0][...] = pl.run_scoped(form_ds, square).astype(ds_smem.dtype)
        memory.scores[1].publish(t)
        memory.mail.send(t, ds_smem.at[0], 1 - lax.axis_index(PAIR))
        load_next(self.load_douts)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        Loader.close(self, steps, tiles, dq_row)
        self.memory.scores[0].drain()


class WideGradient(ColumnBlock):
    """A gradient of 64 keys at H = 256, and a quarter of the columns of dQ."""

    @property
    def rows(self) -> Ring:
        """Of what this warpgroup multiplies P or dS by."""
        raise NotImplementedError

    @property
    def left(self) -> Ring:
        """P^T or dS^T."""
        raise NotImplementedError

    def open(self) -> None:
        if self.me == 0:
            self.memory.mail.open()
        for ring in (self.rows, self.memory.keys, self.memory.values, self.memory.scores[0]):
            ring.open()

    def gradient(self, tile: Tile) -> jax.Array:
        def accumulate(acc: Any) -> jax.Array:
            tile.each_step(functools.partial(self.step, acc), tile.first_row)
            return acc[...]

        self.wait_for_keys(tile)
        gradient = pl.run_scoped(accumulate, self.accumulator(self.config.head_dim))
        self.add_dq(tile, tile.next_step - 1, tile.last_row)
        self.memory.keys.release(tile.k)
        self.memory.values.release(tile.k)
        return gradient

    def step(self, acc: Any, step: Step, row_before: Any) -> Any:
        """The gradient of a step, and dQ of the step before: by then the other CTA's dS is there."""
        (left,), (right, _) = self.left.wait(step.t), self.rows.at(step.t)
        plgpu.wgmma(acc, left.at[0], right)

        def release(in_flight: int) -> None:
            plgpu.wgmma_wait(in_flight)
            pl.when(jnp.logical_not(step.last))(lambda: self.rows.release(step.t))

        lax.cond(
            step.first,
            lambda: release(0),
            lambda: self.add_dq(step.tile, step.t - 1, row_before, release),
        )
        return step.row

    def add_dq(self, tile: Tile, t: Any, row: Any, then: Any = None) -> None:
        """This warpgroup's part of dQ of step t: two products, and `then` while they are in flight."""
        part = 2 * lax.axis_index(PAIR) + self.me
        (ds,) = self.memory.scores[1].at(t) if self.me == 0 else self.memory.scores[1].wait(t)
        ds_of_other = self.memory.mail.wait(t)

        def products(dq_acc: Any) -> jax.Array:
            dq_acc[...] = ptx.zeros((DQ_TILE, DQ_TILE))
            k = self.keys_of(tile.k).at[:, pl.ds(part * DQ_TILE, DQ_TILE)]
            k_of_other = self.memory.k_of_other.at[0, :, pl.ds(self.me * DQ_TILE, DQ_TILE)]
            plgpu.wgmma(dq_acc, ds.at[0].transpose((1, 0)), k)
            plgpu.wgmma(dq_acc, ds_of_other.transpose((1, 0)), k_of_other)
            if then is not None:
                then(2)
            return dq_acc[...]

        dq = pl.run_scoped(products, self.accumulator(DQ_TILE))
        plgpu.commit_smem()  # all warps are done with P and dS: one arrives for all
        self.memory.scores[0].release(t)
        ptx.add_fragments(self.outputs.dq.at[row, part], dq)


class KeyGradient(WideGradient):
    @property
    def rows(self) -> Ring:
        return self.memory.queries

    @property
    def left(self) -> Ring:
        return self.memory.scores[1]

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        self.store(tile, (self.outputs.dk, self.gradient(tile) * self.scale))
        return dq_row


class ValueGradient(WideGradient):
    @property
    def rows(self) -> Ring:
        return self.memory.douts

    @property
    def left(self) -> Ring:
        return self.memory.scores[0]

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        self.store(tile, (self.outputs.dv, self.gradient(tile)))
        return dq_row
