"""FlashAttention-2, Algorithm 2, on Hopper: persistent CTAs, one block of key columns after another.

dK and dV stay in registers over all the queries that see the block, of all heads of the group; dQ
is added up in float32 in device memory, straight from registers. The products are transposed: the
probabilities P^T (keys x queries) are then register operands of dV and dK, and only dS passes through
shared memory, whose bandwidth bounds this kernel.

Up to H = 128 two warpgroups divide the work of a tile, each owns half of the block's 128 keys
(`KeyHalf`). Beyond, dK and dV of 64 keys alone take up to half of the register file: a warpgroup
owns one (`KeyGradient`, `ValueGradient`), and a third, which also loads, forms the scores for both
(`Scores`). A block then is a pair of CTAs' (a cluster), that send each other their dS: each forms half
of dQ's columns over all of the block's keys, as what bounds this kernel otherwise is how fast L2 adds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import fragments, mosaic, passes, ptx
from pallas_fa2.kernels.backward_config import DQ_TILE, PAIR, PANEL, Config
from pallas_fa2.kernels.backward_first import SLOTS, FirstSchedule, Tickets
from pallas_fa2.kernels.backward_heads import HeadSchedule, Visit
from pallas_fa2.kernels.backward_memory import Inputs, Memory, Outputs, memory_of
from pallas_fa2.kernels.backward_order import (
    OrderedLoader,
    OrderedSchedule,
    Turns,
)
from pallas_fa2.kernels.backward_pair import (
    KeyGradient,
    OrderedKeyGradient,
    OrderedValueGradient,
    Scores,
    ValueGradient,
)
from pallas_fa2.kernels.backward_roles import ColumnBlock, Loader, Role
from pallas_fa2.kernels.backward_schedule import Schedule, Step, Tile
from pallas_fa2.kernels.branches import cond, when
from pallas_fa2.kernels.mosaic import I32, Problem
from pallas_fa2.kernels.tiles import Claims, Dealt, each_tile, launch
from pallas_fa2.kernels.token_data import Sums, TokenData, stored


def schedule_of(
    problem: Problem,
    config: Config,
    classes: Any,
    possible: Callable[[], np.ndarray],
    whole_heads: bool,
) -> Schedule:
    """Which tiles a CTA takes, and how what they add to dQ comes together; of whole heads, if they may be taken
    and suit. `possible` gives classes by the mask's code alone: EMPTY, or not, whatever its data."""
    if whole_heads and HeadSchedule.suits(problem, config):
        return HeadSchedule.of(problem, config)
    if config.ordered:
        return OrderedSchedule.of(problem, config, classes)
    stores_first = FirstSchedule.suits(problem, config, classes, possible)
    return (FirstSchedule if stores_first else Schedule).of(problem, config, classes)


def gradients(
    schedule: Schedule,
    factors: passes.Factors,
    lse: jax.Array,
    delta: jax.Array,
    zeros: jax.Array | None,
    classes: Any = None,
    data: TokenData | None = None,
    answers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, Sums | None]:
    """dQ, dK and dV like q, k and v, and what the data of scores get. Head dims are `config`'s or less.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of `block_q`, both negated: -lse in base
    2, -inf where a row does not exist so that its probabilities are 0; and -delta. If the schedule needs
    them, dQ is added to `zeros`, of `passes.prepare`; unless tiles are ordered or heads whole, in any order:
    it is not bitwise reproducible then. Under a mask, `classes` are those of tiles, `[B | 1, N | 1, T tiles,
    S tiles]`; `data` is what masks and scores read, and `answers` are those of a mask that has been asked.
    """
    problem, config = schedule.problem, schedule.config
    seen = None if classes is None else schedule.seen(classes)
    tiles, inputs = schedule.tiles(seen), Inputs(*factors, lse, delta, answers=answers)
    q, k, v, _ = factors
    if seen is not None:
        inputs = inputs._replace(**{n: jnp.asarray(x) for n, x in schedule.arrays(seen).items()})
    if data is not None:
        data = data.with_places(config.block_q, config.block_kv)
        if not config.paired:  # where shared memory has room, queries bring their data
            inputs = inputs._replace(lse=_with_query_data(lse, data))
            data = data._replace(q=None, row_keys=None)
        inputs = inputs._replace(data=data)
    # Of a part of a group, a gradient leaves as two numbers whose sum is as good as in float32.
    shapes = ((*x.shape[:2], schedule.heads, x.shape[3]) for x in (k, v))
    count = 1 if schedule.parts == 1 else 2
    # one each: of one for all, XLA may let two share their memory
    dk, dv = ([lax.empty(shape, k.dtype) for _ in range(count)] for shape in shapes)
    sums = None
    if problem.score is not None:
        lengths = schedule.q_blocks * config.block_q, schedule.kv_tiles * config.block_kv
        assert data is not None
        sums = Sums.start(problem, q.dtype, lengths, data)
    outputs = Outputs(zeros, dk, dv, sums)
    if isinstance(schedule, HeadSchedule):
        partial = lax.empty(schedule.accumulator_shape, jnp.float32)
        outputs = outputs._replace(dq=lax.empty(q.shape, k.dtype), partial=partial)
    if isinstance(schedule, OrderedSchedule | FirstSchedule):
        outputs = outputs._replace(turns=jnp.zeros(schedule.turns_shape, I32))
    if isinstance(schedule, FirstSchedule):
        outputs = outputs._replace(dq=lax.empty(schedule.dq_shape, jnp.float32))
    dq, dk, dv, sums, turns, *_ = launch(
        "attention_gradients",
        functools.partial(_body, schedule),
        memory_of(
            config,
            (q.shape[3], v.shape[3]),
            q.dtype,
            inputs.lse.shape[2:-1],
            [stored(s.dtype) for s in problem.pairs()],
            SLOTS if isinstance(schedule, FirstSchedule) else 0,
        ),
        tiles,
        inputs,
        outputs,
        len(config.registers),
        {PAIR: 2} if config.paired else {},
    )
    if not isinstance(schedule, HeadSchedule):
        visits = turns if isinstance(schedule, FirstSchedule) else None
        dq = passes.finish(problem, config, dq, q, visits)
    return dq, schedule.join(dk), schedule.join(dv), sums


def _with_query_data(lse: jax.Array, data: TokenData) -> jax.Array:
    """`[B, N, 1 + rows, T']`: data of queries, `[B, 1 + rows, T']`, with lse for their places; then what
    dropout reads."""
    batch, heads, length = lse.shape
    shape = (batch, heads, data.q.shape[1] - 1, length)
    rows = [jnp.broadcast_to(data.q[:, None, 1:], shape)]
    if data.row_keys is not None:
        rows.append(data.row_keys)
    rows = [lax.bitcast_convert_type(x, jnp.float32) for x in rows]
    return jnp.concatenate([lse[:, :, None], *rows], 2)


def _body(
    schedule: Schedule, tiles: Dealt | Claims, inputs: Inputs, outputs: Outputs, memory: Memory
) -> None:
    config = schedule.config

    def run(branch: int, me: Any) -> None:
        mosaic.set_registers(config.registers, branch)
        role = kinds[branch](schedule, tiles, inputs, outputs, memory, me)

        def visit(k: Any, entry: list[Any], state: tuple, look: Callable) -> tuple:
            first_step, dq_row = state
            tile = schedule.tile(k, first_step, entry, **schedule.arrays(inputs))
            dq_row, seen = role.visit(tile, dq_row, look)
            return (tile.next_step, dq_row), seen

        role.open()
        state = I32(0), role.start(I32(schedule.blocks))
        taken, (steps, dq_row) = each_tile(tiles, visit, state)
        role.close(steps, taken, dq_row)
        mosaic.leave_together(memory.done, branch)

    kinds, warpgroup = KINDS[config.paired, type(schedule)], lax.axis_index("warpgroup")
    roles = [functools.partial(run, me, me) for me in range(len(kinds))]
    if schedule.one_code:
        roles[:2] = [functools.partial(run, 0, warpgroup)] * 2
    mosaic.assign_roles(warpgroup, *roles)


class KeyHalf(ColumnBlock):
    """All the gradients of 64 keys, up to H = 128; and half of the block's dQ.

    dQ of a step is formed in the next, with dV and dK of that one: by then the other warpgroup's dS is
    there. Nothing is in flight when P and dS become operands, as ptxas serializes all products if
    registers that one reads change while another is in flight.
    """

    def open(self) -> None:
        super().open()
        plgpu.barrier_arrive(self.memory.ds_there)  # as if there were a step before the first

    def visit(self, tile: Tile, dq_row: Any, look: Callable) -> Any:
        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
            last = tile.each_step(functools.partial(self.step, dk_acc, dv_acc), dq_row, apart=True)
            return dk_acc[...], dv_acc[...], last

        self.wait_for_keys(tile)
        wide = (self.accumulator(dim) for dim in (self.config.head_dim, self.config.value_dim))
        dk, dv, last = pl.run_scoped(accumulate, *wide)
        self.memory.values.release(tile.k)
        seen = look()
        self.store(tile, (self.outputs.dv, self.scaled(dv)), (self.outputs.dk, dk * self.scale))
        return last, seen

    def step(self, dk_acc: Any, dv_acc: Any, step: Step, dq_row: Any) -> Any:
        """dV and dK of a step, and dQ of the step before."""
        memory, t, k = self.memory, step.t, step.tile.k
        ticket = self.draw(step)
        panels = list(zip(self.panels, self.scores(step), strict=True))
        (q, _), (dout, _) = memory.queries.at(t), memory.douts.at(t)
        plgpu.barrier_wait(memory.ds_there)
        for i, (_, (_, ds)) in enumerate(panels):
            self.ds_of(t).at[i, self.keys][...] = ds

        def products(dq_acc: Any) -> None:
            self.multiply_dq_of(dq_acc, t - 1, jnp.where(step.first, k - 1, k))
            for panel, (p, ds) in panels:
                plgpu.wgmma(dv_acc, p, dout.at[panel])
                plgpu.wgmma(dk_acc, ds, q.at[panel])
            plgpu.commit_smem()
            self.show(t, ticket)
            plgpu.barrier_arrive(memory.ds_there)
            self.collect_dq(t - 1, dq_acc, dq_row, in_flight=2 * len(panels))
            plgpu.wgmma_wait(0)

        pl.run_scoped(products, self.dq_accumulator)
        when(step.first & (t > 0))(lambda: memory.keys.release(k - 1))
        self.release_rows(1 - self.me, t)
        self.release_own_rows(step)
        return self.dq_row(step)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """dQ of the last step."""
        plgpu.barrier_wait(self.memory.ds_there)

        def product(dq_acc: Any) -> None:
            self.multiply_dq_of(dq_acc, steps - 1, tiles - 1)
            self.collect_dq(steps - 1, dq_acc, dq_row, in_flight=0)

        pl.run_scoped(product, self.dq_accumulator)
        when(tiles > 0)(lambda: self.memory.keys.release(tiles - 1))

    def ds_of(self, t: Any) -> Any:
        """dS of a step; there is one before the first, whose dQ goes nowhere."""
        stages = self.config.ds_stages
        return self.memory.ds.at[lax.rem(t + stages, I32(stages))]

    @property
    def dq_accumulator(self) -> Any:
        return self.accumulator(self.config.dq_place(self.me)[1].size)

    def draw(self, step: Step) -> Any:
        """What tells how dQ of the step will be added."""

    def show(self, t: Any, ticket: Any) -> None:
        """To the other warpgroup, what this one has drawn."""

    def dq_row(self, step: Step) -> Any:
        """Where dQ of a step goes."""
        return step.row

    def multiply_dq_of(self, dq_acc: Any, t: Any, k: Any) -> None:
        """This warpgroup's part of dQ of step t, of the CTA's k-th tile."""
        rows, columns = self.config.dq_place(self.me)
        ds = self.ds_of(t).at[rows.start // PANEL]
        dq_acc[...] = ptx.zeros((DQ_TILE, columns.size))
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), self.keys_of(jnp.maximum(k, 0)).at[:, columns])

    def collect_dq(self, t: Any, dq_acc: Any, row: Any, in_flight: int) -> None:
        """Of step t, with so many products behind it."""
        self.add_dq(t, plgpu.wgmma_accumulator_load(dq_acc, wait_n=in_flight), row)

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        numbers = self.config.dq_numbers(*self.config.dq_place(self.me))
        fragments.add_fragments(self.outputs.dq.at[row, numbers], dq, self.config.late_dq)


class OrderedHalf(KeyHalf):
    def open(self) -> None:
        super().open()
        Turns.of(self.memory).open()

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        turns = Turns.of(self.memory)
        turns.take(t)
        super().add_dq(t, dq, row)
        turns.give(t)


class FirstHalf(KeyHalf):
    """Stores its part of dQ where that is the row's first."""

    @property
    def tickets(self) -> Tickets:
        return Tickets(self.outputs.turns, self.memory.tickets)

    def open(self) -> None:
        if self.me == 0:
            self.tickets.open()
        super().open()

    def draw(self, step: Step) -> Any:
        return self.tickets.draw(step.row) if self.me == 0 else None

    def show(self, t: Any, ticket: Any) -> None:
        if self.me == 0:
            self.tickets.show(t, ticket)

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        numbers = self.config.dq_numbers(*self.config.dq_place(self.me))
        first = self.tickets.use(t, row)
        fragments.put_fragments(self.outputs.dq.at[row, numbers], dq, first)
        self.tickets.tell(row, first)


class OwnerOfHalf(KeyHalf):
    """Adds up its part of dQ of a whole head, each thread what it finds where it left it."""

    schedule: HeadSchedule

    def start(self, row: Any) -> Any:
        return Visit.none().encoded

    def dq_row(self, step: Step) -> Any:
        return self.schedule.visit(step).encoded

    def collect_dq(self, t: Any, dq_acc: Any, row: Any, in_flight: int) -> None:
        """What was added before is loaded while products are in flight."""
        visit, (rows, columns) = Visit.decode(row), self.config.dq_place(self.me)
        numbers = self.config.dq_numbers(rows, columns)
        partial = self.outputs.partial.at[self.schedule.partial_row(visit.row), numbers]
        before = fragments.take_fragments(partial, columns.size, visit.last & ~visit.first)
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=in_flight)

        def finish() -> None:
            (batch, head, first), target = self.schedule.queries(visit.row), self.outputs.dq
            first += rows.start
            fragments.store_rows(
                target.at[batch, pl.ds(first, rows.size), head],
                ((before + dq) * self.scale).astype(target.dtype),
                columns.start,
                self.schedule.problem.q_len - first,
            )

        cond(visit.last, finish, lambda: fragments.put_fragments(partial, dq, visit.first))


# What the warpgroups of a CTA do: in pairs or not, and by how dQ is added up.
KINDS: dict[tuple[bool, type[Schedule]], tuple[type[Role], ...]] = {
    (False, Schedule): (KeyHalf, KeyHalf, Loader),
    (False, FirstSchedule): (FirstHalf, FirstHalf, Loader),
    (False, OrderedSchedule): (OrderedHalf, OrderedHalf, OrderedLoader),
    (False, HeadSchedule): (OwnerOfHalf, OwnerOfHalf, Loader),
    (True, Schedule): (KeyGradient, ValueGradient, Scores),
    (True, OrderedSchedule): (OrderedKeyGradient, OrderedValueGradient, Scores),
}
