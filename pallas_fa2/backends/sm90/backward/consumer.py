"""The consumer warpgroups of the backward up to H = 128."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.backward.config import DQ_TILE, QUERY_PANEL
from pallas_fa2.backends.sm90.backward.dq.first_store import DqTickets
from pallas_fa2.backends.sm90.backward.dq.head_per_cta import DqVisit, HeadPerCtaSchedule
from pallas_fa2.backends.sm90.backward.dq.ordered import DqSemaphore
from pallas_fa2.backends.sm90.backward.roles import TransposedConsumer
from pallas_fa2.backends.sm90.backward.schedule import KvTile, Step
from pallas_fa2.backends.sm90.primitives import register_io, thread_values
from pallas_fa2.control_flow import cond, when


class Consumer(TransposedConsumer):
    """All the gradients of 64 keys, up to H = 128; and half of the block's dQ.

    dQ of a step is formed in the next, with dV and dK of that one: by then the other warpgroup's dS is
    there. Nothing is in flight when P and dS become operands, as ptxas serializes all products if
    registers that one reads change while another is in flight.
    """

    def open(self) -> None:
        super().open()
        plgpu.barrier_arrive(self.memory.ds_ready)  # as if there were a step before the first

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        def accumulate(dk_acc: Any, dv_acc: Any) -> tuple[jax.Array, jax.Array, Any]:
            last = tile.each_step(functools.partial(self.step, dk_acc, dv_acc), dq_row, apart=True)
            return dk_acc[...], dv_acc[...], last

        self.wait_for_keys(tile)
        wide = (self.accumulator(dim) for dim in (self.config.head_dim, self.config.value_dim))
        dk, dv, last = pl.run_scoped(accumulate, *wide)
        self.memory.v_pipeline.consumer_release(tile.k)
        seen = look()
        self.store(tile, (self.outputs.dv, self.scaled(dv)), (self.outputs.dk, dk * self.scale))
        return last, seen

    def step(self, dk_acc: Any, dv_acc: Any, step: Step, dq_row: Any) -> Any:
        """dV and dK of a step, and dQ of the step before."""
        memory, t, k = self.memory, step.global_step, step.tile.k
        ticket = self.draw(step)
        panels = list(zip(self.panels, self.p_and_ds(step), strict=True))
        (q, _), (dout, _) = memory.q_pipeline.buffers_at(t), memory.dout_pipeline.buffers_at(t)
        plgpu.barrier_wait(memory.ds_ready)
        for i, (_, (_, ds)) in enumerate(panels):
            self.ds_of(t).at[i, self.keys][...] = ds

        def products(dq_acc: Any) -> None:
            self.multiply_dq_of(dq_acc, t - 1, jnp.where(step.first, k - 1, k))
            for panel, (p, ds) in panels:
                plgpu.wgmma(dv_acc, p, dout.at[panel])
                plgpu.wgmma(dk_acc, ds, q.at[panel])
            plgpu.commit_smem()
            self.show(t, ticket)
            plgpu.barrier_arrive(memory.ds_ready)
            self.collect_dq(t - 1, dq_acc, dq_row, in_flight=2 * len(panels))
            plgpu.wgmma_wait(0)

        pl.run_scoped(products, self.dq_accumulator)
        when(step.first & (t > 0))(lambda: memory.k_pipeline.consumer_release(k - 1))
        self.release_rows(1 - self.warpgroup, t)
        self.release_own_rows(step)
        return self.dq_row(step)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """dQ of the last step."""
        plgpu.barrier_wait(self.memory.ds_ready)

        def product(dq_acc: Any) -> None:
            self.multiply_dq_of(dq_acc, steps - 1, tiles - 1)
            self.collect_dq(steps - 1, dq_acc, dq_row, in_flight=0)

        pl.run_scoped(product, self.dq_accumulator)
        when(tiles > 0)(lambda: self.memory.k_pipeline.consumer_release(tiles - 1))

    def ds_of(self, t: Any) -> Any:
        """dS of a step; there is one before the first, whose dQ goes nowhere."""
        stages = self.config.ds_stages
        return self.memory.ds.at[lax.rem(t + stages, I32(stages))]

    @property
    def dq_accumulator(self) -> Any:
        return self.accumulator(self.config.dq_part_slices(self.warpgroup)[1].size)

    def draw(self, step: Step) -> Any:
        """What tells how dQ of the step will be added."""

    def show(self, t: Any, ticket: Any) -> None:
        """To the other warpgroup, what this one has drawn."""

    def dq_row(self, step: Step) -> Any:
        """Where dQ of a step goes."""
        return step.dq_block

    def multiply_dq_of(self, dq_acc: Any, t: Any, k: Any) -> None:
        """This warpgroup's part of dQ of step t, of the CTA's k-th tile."""
        rows, columns = self.config.dq_part_slices(self.warpgroup)
        ds = self.ds_of(t).at[rows.start // QUERY_PANEL]
        dq_acc[...] = thread_values.zero_accumulator((DQ_TILE, columns.size))
        plgpu.wgmma(dq_acc, ds.transpose((1, 0)), self.keys_of(jnp.maximum(k, 0)).at[:, columns])

    def collect_dq(self, t: Any, dq_acc: Any, row: Any, in_flight: int) -> None:
        """Of step t, with so many products behind it."""
        self.add_dq(t, plgpu.wgmma_accumulator_load(dq_acc, wait_n=in_flight), row)

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        numbers = self.config.dq_part_range(*self.config.dq_part_slices(self.warpgroup))
        register_io.add_fragments(self.outputs.dq.at[row, numbers], dq)


class OrderedConsumer(Consumer):
    def open(self) -> None:
        super().open()
        DqSemaphore.of(self.memory).prime()

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        turns = DqSemaphore.of(self.memory)
        turns.acquire(t)
        super().add_dq(t, dq, row)
        turns.release(t)


class FirstStoreConsumer(Consumer):
    """Stores its part of dQ where that is the row's first."""

    @property
    def tickets(self) -> DqTickets:
        return DqTickets(self.outputs.turns, self.memory.tickets)

    def open(self) -> None:
        if self.warpgroup == 0:
            self.tickets.init()
        super().open()

    def draw(self, step: Step) -> Any:
        return self.tickets.take(step.dq_block) if self.warpgroup == 0 else None

    def show(self, t: Any, ticket: Any) -> None:
        if self.warpgroup == 0:
            self.tickets.share(t, ticket)

    def add_dq(self, t: Any, dq: jax.Array, row: Any) -> None:
        numbers = self.config.dq_part_range(*self.config.dq_part_slices(self.warpgroup))
        first = self.tickets.resolve(t, row)
        register_io.put_fragments(self.outputs.dq.at[row, numbers], dq, first)
        self.tickets.signal(row, first)


class HeadPerCtaConsumer(Consumer):
    """Adds up its part of dQ of a whole head, each thread what it finds where it left it."""

    schedule: HeadPerCtaSchedule

    def start(self, row: Any) -> Any:
        return DqVisit.none().encoded

    def dq_row(self, step: Step) -> Any:
        return self.schedule.visit(step).encoded

    def collect_dq(self, t: Any, dq_acc: Any, row: Any, in_flight: int) -> None:
        """What was added before is loaded while products are in flight."""
        visit, (rows, columns) = DqVisit.decode(row), self.config.dq_part_slices(self.warpgroup)
        numbers = self.config.dq_part_range(rows, columns)
        partial = self.outputs.partial.at[self.schedule.partial_row(visit.row), numbers]
        before = register_io.take_fragments(partial, columns.size, visit.last & ~visit.first)
        dq = plgpu.wgmma_accumulator_load(dq_acc, wait_n=in_flight)

        def finish() -> None:
            (batch, head, first), target = self.schedule.queries(visit.row), self.outputs.dq
            first += rows.start
            register_io.store_rows(
                target.at[batch, pl.ds(first, rows.size), head],
                ((before + dq) * self.scale).astype(target.dtype),
                columns.start,
                self.schedule.spec.q_len - first,
            )

        cond(visit.last, finish, lambda: register_io.put_fragments(partial, dq, visit.first))
