"""FlashAttention-2, Algorithm 2, on Hopper: persistent CTAs, one block of key columns after another.

dK and dV stay in registers over all the queries that see the block, of all heads of the group; dQ
is added up in float32 in device memory, straight from registers. The products are transposed: the
probabilities P^T (keys x queries) are then register operands of dV and dK, and only dS passes through
shared memory, whose bandwidth bounds this kernel.

Two warpgroups divide the work of a tile. Up to H = 128 each owns half of the block's 128 keys
(`KeyHalf`), five products in all. At H = 256 the dK and dV of 64 keys fill both register files: one
owns dK, the other dV and dQ (`KeyGradient`, `ValueGradient`); each forms the scores, six products.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic, ptx
from pallas_fa2.kernels.mosaic import COLUMNS, I32, LOG2E, Problem, Ring
from pallas_fa2.kernels.tma import Rows

WARPGROUPS = 2
# A block's dQ is formed and added in tiles of 64 x 64: an accumulator of 32 registers.
DQ_TILE = 64
# dS lies in panels of 64 queries, the width of a swizzled row.
PANEL = 64


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one backward kernel."""

    head_dim: int  # of queries, keys and values: 64, 128 or 256
    # of a thread in a multiplying and in the loading warpgroup: 2 * 240 + 24 <= 512
    registers: tuple[int, int] = (240, 24)
    ctas: int = 132  # persistent, one a multiprocessor
    # Q, dO and float32 dQ of the heads that run at the same time, of 60 MB of L2.
    section_bytes: int = 40 << 20

    @property
    def by_gradient(self) -> bool:
        """Whether the warpgroups own a gradient each, rather than half of the keys."""
        return self.head_dim > 128

    @property
    def block_q(self) -> int:
        """At H = 64 twice as many, or shared memory could not keep up: keys are read once a block."""
        return 128 if self.head_dim == 64 else 64

    @property
    def block_kv(self) -> int:
        return 64 if self.by_gradient else 128

    @property
    def stages(self) -> tuple[int, int]:
        """Of Q and dO."""
        return 2, 2

    @property
    def kv_stages(self) -> tuple[int, int]:
        """Of K and V. Up to H = 128, the last dQ of a tile is formed in the first step of the next."""
        return 1 if self.by_gradient else 2, 1

    @property
    def ds_stages(self) -> int:
        """One to be written, one to be read by this warpgroup and one by the other; at H = 256 one
        hands it to the other."""
        return 2 if self.by_gradient else 3

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


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which key blocks a CTA takes, and which query blocks of which heads each visits."""

    problem: Problem
    config: Config

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
        section = mosaic.section_of(p.kv_heads, q_bytes, self.config.section_bytes)
        return mosaic.Order(p.batch, p.kv_heads, self.kv_tiles, section, p.causal)

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """Batch entry, key head and key block of a tile; the first block of a head is the longest."""
        batch, kv_head, tile = self.order.place(number)
        return batch, kv_head, self.kv_tiles - 1 - tile if self.problem.causal else tile

    def table(self) -> np.ndarray:
        _, _, kv_tile = self.place(np.arange(self.order.count))
        ctas = min(self.config.ctas, self.order.count)
        return mosaic.deal(self.steps(kv_tile), ctas, 0.5)

    def first_q_block(self, kv_tile: Any) -> Any:
        """The first whose queries see the block's first key."""
        if self.problem.offset is None:
            return 0 * kv_tile
        first_key = kv_tile * self.config.block_kv
        first_query = mosaic.maximum(first_key - self.problem.offset, 0)
        return mosaic.div(first_query, self.config.block_q)

    def steps(self, kv_tile: Any) -> Any:
        """At least one."""
        return (self.q_blocks - self.first_q_block(kv_tile)) * self.problem.group

    @property
    def dq_shape(self) -> tuple[int, int, int]:
        """A row for each block of queries of each head, and one for what is no gradient."""
        blocks = self.problem.batch * self.problem.q_heads * self.q_blocks
        return blocks + 1, self.config.dq_parts, DQ_TILE**2

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
    schedule = Schedule(problem, config)
    dtype, dim = q.dtype, config.head_dim
    block_q, block_kv = config.block_q, config.block_kv
    (q_stages, do_stages), (k_stages, v_stages) = config.stages, config.kv_stages
    rings = q_stages + do_stages + k_stages + v_stages
    memory = Memory(
        k=mosaic.operand(k_stages, block_kv, dim, dtype=dtype),
        v=mosaic.operand(v_stages, block_kv, dim, dtype=dtype),
        q=mosaic.operand(q_stages, block_q, dim, dtype=dtype),
        dout=mosaic.operand(do_stages, block_q, dim, dtype=dtype),
        lse=plgpu.SMEM((q_stages, block_q), jnp.float32),
        delta=plgpu.SMEM((do_stages, block_q), jnp.float32),
        ds=mosaic.operand(config.ds_stages, block_q // PANEL, block_kv, PANEL, dtype=dtype),
        # All that complete by two arrivals in one array: each array costs a register for its phases,
        # and at H = 128 those make the difference to spilling.
        full=mosaic.barriers(rings + 2, 2),
        free=mosaic.barriers(rings, WARPGROUPS),
        ds_full=mosaic.barriers(2) if config.by_gradient else None,
        ds_free=mosaic.barriers(2) if config.by_gradient else None,
        done=[plgpu.Barrier(num_arrivals=WARPGROUPS + 1) for _ in range(WARPGROUPS + 1)],
    )
    table = schedule.table()

    def run(refs: tuple, memory: Memory) -> None:
        _body(schedule, Inputs(*refs[:7]), Outputs(*refs[7:]), memory)

    kernel = mosaic.launch(run, memory, (), {"cta": len(table)}, WARPGROUPS + 1)
    outputs = (
        jnp.zeros(schedule.dq_shape, jnp.float32),
        lax.empty(k.shape, dtype),
        lax.empty(v.shape, dtype),
    )
    inputs = (jnp.asarray(table), q, k, v, dout, lse, delta)
    dq, dk, dv = pl.run_state(lambda refs: kernel(*inputs, *refs))(outputs)
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
    dk: Any
    dv: Any


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Any  # [1, block_kv, H]
    v: Any
    q: Any  # [stages, block_q, H]
    dout: Any
    lse: Any  # [stages, block_q]
    delta: Any
    ds: Any  # [stages, panels, block_kv, PANEL]
    full: Any
    free: Any
    ds_full: Any
    ds_free: Any
    done: list[Any]

    @property
    def queries(self) -> Ring:
        return Ring((self.q, self.lse), self.full, self.free)

    @property
    def douts(self) -> Ring:
        first = self.queries.stages
        return Ring((self.dout, self.delta), self.full, self.free, first, first)

    @property
    def keys(self) -> Ring:
        first = self.queries.stages + self.douts.stages
        return Ring(_halves(self.k), self.full, self.free, first, first)

    @property
    def values(self) -> Ring:
        first = self.queries.stages + self.douts.stages + self.keys.stages
        return Ring(_halves(self.v), self.full, self.free, first, first)

    @property
    def rings(self) -> list[Ring]:
        return [self.queries, self.douts, self.keys, self.values]

    @property
    def ds_ring(self) -> Ring:
        return Ring((self.ds,), self.ds_full, self.ds_free)

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
        """Batch entry, key head and key block."""
        return self.schedule.place(self.number)

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
        batch, kv_head, kv_tile = self.place
        head = batch * problem.q_heads + kv_head * problem.group
        return head * blocks + self.schedule.first_q_block(kv_tile)

    def row_after(self, row: Any) -> Any:
        problem, blocks = self.schedule.problem, self.schedule.q_blocks
        if problem.group == 1 or not problem.causal:
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
    def head(self) -> tuple[Any, Any]:
        """Batch entry and query head."""
        schedule = self.tile.schedule
        head, heads = mosaic.div(self.row, schedule.q_blocks), schedule.problem.q_heads
        return mosaic.div(head, heads), mosaic.rem(head, heads)

    @property
    def first_query(self) -> Any:
        schedule, tile = self.tile.schedule, self.tile
        if schedule.problem.group == 1:  # no division, whose numbers would hold registers
            block = self.t - tile.first_step + schedule.first_q_block(tile.place[2])
        else:
            block = mosaic.rem(lax.optimization_barrier(self.row), schedule.q_blocks)
        return lax.optimization_barrier(block) * schedule.config.block_q


def _body(schedule: Schedule, inputs: Inputs, outputs: Outputs, memory: Memory) -> None:
    config = schedule.config

    def multiply(me: int) -> None:
        plgpu.set_max_registers(config.registers[0], action="increase")
        for ring in memory.rings:
            ring.open()
        kind = KeyHalf if not config.by_gradient else (KeyGradient, ValueGradient)[me]
        role = kind(schedule, memory, outputs, me)

        def visit(k: Any, number: Any, state: tuple) -> tuple:
            first_step, dq_row = state
            tile = Tile(schedule, k, number, first_step)
            memory.keys.wait(k)
            memory.values.wait(k)
            return tile.next_step, role.visit(tile, dq_row)

        role.open()
        state = I32(0), I32(schedule.dq_shape[0] - 1)
        steps, dq_row = mosaic.each_tile(inputs.table, visit, state, prefetch=False)
        role.close(steps, inputs.table[lax.axis_index("cta"), 0], dq_row)
        plgpu.wait_smem_to_gmem(0)
        mosaic.leave_together(memory.done, me)

    roles = [functools.partial(multiply, me) for me in range(WARPGROUPS)]
    load = functools.partial(_load, schedule, inputs, memory)
    mosaic.assign_roles(lax.axis_index("warpgroup"), *roles, load)


def _load(schedule: Schedule, inputs: Inputs, memory: Memory) -> None:
    """The loading warpgroup: keys and values of one tile after another, and the queries they meet."""
    config = schedule.config
    plgpu.set_max_registers(config.registers[1], action="decrease")

    def load(step: Step, _: Any) -> None:
        tile = step.tile
        _, kv_head, _ = tile.place
        batch, head = step.head

        def fill(ring: Ring, source: Any) -> None:
            half = config.block_kv // 2
            first = [tile.first_key + i * half for i in range(2)]
            ring.fill(
                tile.k,
                *(Rows(source, batch, pl.ds(row, half), kv_head, by_pieces=True) for row in first),
            )

        rows = pl.ds(step.first_query, config.block_q)
        at, row_at = (batch, rows, head), (batch, head, rows)
        pl.when(step.first)(lambda: fill(memory.keys, inputs.k))
        memory.queries.fill(step.t, Rows(inputs.q, *at), inputs.lse.at[*row_at])
        pl.when(step.first)(lambda: fill(memory.values, inputs.v))
        memory.douts.fill(step.t, Rows(inputs.dout, *at), inputs.delta.at[*row_at])

    def visit(k: Any, number: Any, first_step: Any) -> Any:
        tile = Tile(schedule, k, number, first_step)
        tile.each_step(load)
        return tile.next_step

    mosaic.each_tile(inputs.table, visit, I32(0))
    for ring in memory.rings:
        ring.drain()
    mosaic.leave_together(memory.done, -1)


@dataclasses.dataclass(frozen=True)
class ColumnBlock:
    """One warpgroup's part of a block of keys, against all the queries that see the block.

    Its tiles are transposed: 64 keys (rows) by `block_q` queries (columns).
    """

    schedule: Schedule
    memory: Memory
    outputs: Outputs
    me: int

    @property
    def config(self) -> Config:
        return self.schedule.config

    @property
    def shape(self) -> tuple[int, int]:
        return 64, self.config.block_q

    @property
    def keys(self) -> Any:
        """The keys of the block whose scores this warpgroup forms."""
        return pl.ds(0 if self.config.by_gradient else self.me * 64, 64)

    @property
    def scale(self) -> float:
        return self.schedule.problem.scale

    def accumulator(self, columns: int) -> Any:
        return mosaic.accumulator(64, columns)

    def open(self) -> None:
        """Before the first tile."""

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """After the last."""

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
        first_key = step.tile.first_key + self.keys.start
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

    def multiply_dq(self, dq_acc: Any, ds: Any, k: Any, columns: Any) -> None:
        """A part of dQ from dS^T of all keys of the CTA's k-th tile and a panel of queries."""
        dq_acc[...] = ptx.zeros((DQ_TILE, DQ_TILE))
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), self.keys_of(k).at[:, columns])

    def release(self, step: Step) -> None:
        """Q and dO; of a tile's last step, `store` releases one, when it has used it."""
        rings = [self.memory.queries, self.memory.douts]
        own = rings.pop(self.me)
        rings[0].release(step.t)
        pl.when(jnp.logical_not(step.last))(lambda: own.release(step.t))

    def store(self, tile: Tile, **gradients: jax.Array) -> None:
        """dK or dV of this warpgroup's keys, at the end of a tile: through the buffers of its last Q
        and dO, one a warpgroup."""
        batch, kv_head, _ = tile.place
        last_step = tile.next_step - 1
        rows = pl.ds(tile.first_key + self.keys.start, 64)
        mosaic.meet(self.memory.met)  # nobody reads Q and dO any more
        ring = (self.memory.queries, self.memory.douts)[self.me]
        buffer, _ = ring.at(last_step)
        parts = self.config.block_q // 64
        for i, (name, gradient) in enumerate(gradients.items()):
            part = buffer.at[pl.ds(64 * (i % parts), 64)]
            if i and i % parts == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # By panels, as dS: their addresses differ by constants, and hold fewer registers.
            for start in range(0, self.config.head_dim, PANEL):
                piece = gradient[:, start : start + PANEL]
                part.at[:, pl.ds(start, PANEL)][...] = piece.astype(buffer.dtype)
            plgpu.commit_smem()
            Rows(getattr(self.outputs, name), batch, rows, kv_head, by_pieces=True).store(part)
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ring.release(last_step)


class KeyHalf(ColumnBlock):
    """All the gradients of 64 keys, up to H = 128; and half of the block's dQ.

    dQ of a step is formed in the next, with dV and dK of that one: by then the other warpgroup's dS is
    there. Nothing is in flight when P and dS become operands, as ptxas serializes all products if
    registers that one reads change while another is in flight.
    """

    def open(self) -> None:
        plgpu.barrier_arrive(self.memory.ds_there)  # as if there were a step before the first

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        """`dq_row` is where dQ of the step before goes; returns it for the last step."""

        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
            last = tile.each_step(functools.partial(self.step, dk_acc, dv_acc), dq_row)
            return dk_acc[...], dv_acc[...], last

        wide = self.accumulator(self.config.head_dim)
        dk, dv, last = pl.run_scoped(accumulate, wide, wide)
        self.memory.values.release(tile.k)
        self.store(tile, dv=dv, dk=dk * self.scale)
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
        self.multiply_dq(dq_acc, self.ds(t).at[rows.start // PANEL], jnp.maximum(k, 0), columns)

    def add_dq(self, dq: jax.Array, row: Any) -> None:
        ptx.add_fragments(self.outputs.dq.at[row, self.me], dq)


class KeyGradient(ColumnBlock):
    """dK of 64 keys at H = 256; hands dS on to `ValueGradient`."""

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        def accumulate(dk_acc: Any) -> jax.Array:
            tile.each_step(functools.partial(self.step, dk_acc))
            return dk_acc[...]

        dk = pl.run_scoped(accumulate, self.accumulator(self.config.head_dim))
        self.memory.keys.release(tile.k)
        self.memory.values.release(tile.k)
        self.store(tile, dk=dk * self.scale)
        return dq_row

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        self.memory.ds_ring.drain()

    def step(self, dk_acc: Any, step: Step, _: Any) -> None:
        memory, t = self.memory, step.t
        [(_, ds)] = self.scores(step)
        q, _ = memory.queries.at(t)
        (ds_smem,) = memory.ds_ring.acquire(t)
        ds_smem.at[0][...] = ds
        plgpu.wgmma(dk_acc, ds, q)
        memory.ds_ring.publish(t)
        plgpu.wgmma_wait(0)
        self.release(step)


class ValueGradient(ColumnBlock):
    """dV of 64 keys at H = 256, and their dQ."""

    def open(self) -> None:
        self.memory.ds_ring.open()

    def visit(self, tile: Tile, dq_row: Any) -> Any:
        def accumulate(dv_acc: Any) -> jax.Array:
            tile.each_step(functools.partial(self.step, dv_acc))
            return dv_acc[...]

        dv = pl.run_scoped(accumulate, self.accumulator(self.config.head_dim))
        self.memory.keys.release(tile.k)
        self.memory.values.release(tile.k)
        self.store(tile, dv=dv)
        return dq_row

    def step(self, dv_acc: Any, step: Step, _: Any) -> None:
        memory, t = self.memory, step.t
        q, lse = memory.queries.wait(t)

        def with_scores(s_acc: Any) -> jax.Array:
            self.multiply_scores(s_acc, q, step.tile.k)
            [panel] = self.panels
            return self.probabilities(s_acc[...], lse, step, panel).astype(memory.k.dtype)

        p = pl.run_scoped(with_scores, self.accumulator(self.config.block_q))
        dout, _ = memory.douts.wait(t)
        plgpu.wgmma(dv_acc, p, dout)
        (ds,) = memory.ds_ring.wait(t)
        target = self.outputs.dq.at[step.row]

        def add_part(part: Any, _: Any) -> None:
            columns = pl.ds(part * DQ_TILE, DQ_TILE)

            def product(dq_acc: Any) -> jax.Array:
                self.multiply_dq(dq_acc, ds.at[0], step.tile.k, columns)
                return dq_acc[...]

            dq = pl.run_scoped(product, self.accumulator(DQ_TILE))
            ptx.add_fragments(target.at[part], dq)

        # Unrolled, ptxas gives the parts registers of their own, and has not enough.
        plgpu.wgmma_wait(0)
        lax.fori_loop(I32(0), I32(self.config.dq_parts), add_part, None)
        memory.ds_ring.release(t)
        self.release(step)
