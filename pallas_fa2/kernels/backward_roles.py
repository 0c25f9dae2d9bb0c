"""What the warpgroups of the Hopper backward share: their memory, loads, scores and stores."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import answers, mosaic, ptx, tma
from pallas_fa2.kernels.backward_columns import Columns, join
from pallas_fa2.kernels.backward_schedule import PAIR, PANEL, Config, Schedule, Step, Tile
from pallas_fa2.kernels.branches import cond, when
from pallas_fa2.kernels.mosaic import I32, Ring
from pallas_fa2.kernels.tamed import rows_of
from pallas_fa2.kernels.tile_code import COLUMNS_AT_ONCE, Side
from pallas_fa2.kernels.tiles import Claims, Dealt
from pallas_fa2.kernels.tma import Rows
from pallas_fa2.kernels.token_data import Sums


class Inputs(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # [B, N, T'], or with the data of queries [B, N, 1 + rows, T']
    delta: Any
    # under a mask, what the schedule's tiles read of the blocks that they visit
    lists: Any = None
    runs: Any = None
    flags: Any = None
    data: Any = None  # of masks and scores
    answers: Any = None  # of a mask that has been asked (`answers`)


class Outputs(NamedTuple):
    dq: Any  # [blocks of queries, parts one after another, each in the order of registers]
    dk: list[Any]  # an array for each number that a gradient is made of
    dv: list[Any]
    scores: Sums | None = None
    # Where dQ is added in one order, of each block of queries, how many tiles have added to it.
    turns: Any = None
    # Where CTAs take whole heads, dQ as it is added up.
    partial: Any = None


class Memory(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Any  # [stages, kv_rows, H]
    v: Any  # [stages, kv_rows, Hv]
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    lse: Any  # [stages, block_q]
    delta: Any
    ds: Any  # [stages, panels, kv_rows, PANEL]
    full: Any
    free: Any
    done: list[Any]
    # of pairs of CTAs
    p: Any = None  # as dS
    ds_of_other: Any = None
    k_of_other: Any = None  # [1, kv_rows, H / 2]
    arrived: Any = None
    once: Any = None
    used: Any = None
    # [stages, 2, 16, 64] of each array of pairs: a piece of the queries, and half of the keys each
    pairs: tuple[Any, ...] = ()

    @property
    def queries(self) -> Ring:
        return Ring((self.q, self.lse), self.full, self._rows_free)

    @property
    def douts(self) -> Ring:
        first = self.queries.stages
        delta = self.lse.at[pl.ds(first, self.dout.shape[0])] if self.delta is None else self.delta
        return Ring((self.dout, delta), self.full, self._rows_free, first, first)

    @property
    def rows(self) -> tuple[Ring, Ring]:
        """Of queries: Q, and dO."""
        return self.queries, self.douts

    def free_rows(self, which: Any) -> Ring:
        """To be released: the first ring of rows, or the second. Where `which` is not known when traced, both have
        as many stages, and barriers side by side."""
        if isinstance(which, int):
            return self.rows[which]
        queries = self.queries
        return dataclasses.replace(queries, first_free=which * queries.stages)

    @property
    def _rows_free(self) -> Any:
        """In pairs one warpgroup alone uses Q last, and one dO."""
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
    def pieces(self) -> list[Ring]:
        """Of each array of pairs, for some queries after another."""
        first = sum(ring.stages for ring in self._of_operands)
        starts = [first + i * array.shape[0] for i, array in enumerate(self.pairs)]
        return [
            Ring((array.at[:, 0], array.at[:, 1]), self.full, self.free, start, start)
            for array, start in zip(self.pairs, starts, strict=True)
        ]

    @property
    def _of_operands(self) -> list[Ring]:
        return [self.queries, self.douts, self.keys, self.values]

    @property
    def rings(self) -> list[Ring]:
        return [*self._of_operands, *self.pieces]

    @property
    def p_ring(self) -> Ring:
        """P^T. A stage is free when four warpgroups have used it: here, and in the other CTA."""
        first = self.queries.stages + self.douts.stages
        return Ring((self.p,), self.once, self.used, first)

    @property
    def ds_ring(self) -> Ring:
        """dS^T, of the same stages: free when those of P are."""
        first = self.queries.stages + self.douts.stages + self.p_ring.stages
        return Ring((self.ds,), self.once, self.used, first)

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


# Of a step whose dQ may be added, and of one whose has been: for two steps each.
TURN_BARRIERS = 4


def memory_of(
    config: Config,
    dims: tuple[int, int],
    dtype: Any,
    row_data: tuple[int, ...] = (),
    pairs: Sequence[Any] = (),
) -> Memory:
    """`dims` are those of the arrays, H and Hv. `row_data` is how many rows lie with lse: what masks and
    scores read of queries. `pairs` are the dtypes of what they read of pairs."""
    block_q, kv_rows = config.block_q, config.kv_rows
    operand = functools.partial(mosaic.operand, dtype=dtype)
    # P is multiplied by dO, and dS by Q and K: WGMMA takes one swizzle for both.
    panel = tma.panel_width(config.head_dim, dims[0], dtype, whole=config.paired)
    v_panel = tma.panel_width(config.value_dim, dims[1], dtype, whole=config.paired)
    (q_stages, do_stages), (k_stages, v_stages) = config.stages, config.kv_stages
    rings, warpgroups = q_stages + do_stages + k_stages + v_stages, len(config.registers)

    scores = config.ds_stages, block_q // PANEL, kv_rows, PANEL
    pieces = ()
    if pairs:
        extra = math.prod(row_data) - 1
        stages = config.pair_stages(sum(kind.itemsize for kind in pairs), extra)
        shape = stages, 2, COLUMNS_AT_ONCE, kv_rows // 2
        pieces = tuple(mosaic.operand(*shape, dtype=kind) for kind in pairs)
        rings += stages * len(pairs)
    memory = Memory(
        k=operand(k_stages, kv_rows, config.head_dim, panel=panel),
        v=operand(v_stages, kv_rows, config.value_dim, panel=v_panel),
        q=operand(q_stages, block_q, config.head_dim, panel=panel),
        dout=operand(do_stages, block_q, config.value_dim, panel=v_panel),
        lse=plgpu.SMEM((q_stages, *row_data, block_q), jnp.float32),
        delta=plgpu.SMEM((do_stages, block_q), jnp.float32),
        ds=operand(*scores, panel=panel),
        # All that complete by two arrivals in one array: each array costs a register for its phases,
        # and at H = 128 those make the difference to spilling.
        full=mosaic.barriers(
            rings + 2 + (TURN_BARRIERS if config.ordered and not config.paired else 0), 2
        ),
        free=mosaic.barriers(rings, 2),
        done=[mosaic.barriers(1, warpgroups) for _ in range(warpgroups)],
        pairs=pieces,
    )
    if not config.paired:
        return memory
    return memory._replace(
        # in one array, as each begins at a multiple of 1024 bytes
        lse=plgpu.SMEM((q_stages + do_stages, block_q), jnp.float32),
        delta=None,
        p=operand(*scores, panel=v_panel),
        ds_of_other=operand(config.ds_stages, kv_rows, block_q, panel=panel),
        arrived=plgpu.SMEM((config.ds_stages, 2), jnp.uint32),
        k_of_other=operand(k_stages, kv_rows, config.head_dim // 2, panel=panel),
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
class Role:
    """What a warpgroup does."""

    schedule: Schedule
    tiles: Dealt | Claims
    inputs: Inputs
    outputs: Outputs
    memory: Memory
    me: Any  # the warpgroup, known when traced unless its code serves another as well

    @property
    def config(self) -> Config:
        return self.schedule.config

    def first_row(self, tile: Tile) -> Any:
        """Of the block's keys, the CTA's first."""
        return tile.first_key + (64 * lax.axis_index(PAIR) if self.config.paired else 0)

    def open(self) -> None:
        """Before the first tile."""

    def start(self, row: Any) -> Any:
        """What the first tile's `visit` gets, where `row` is that of no gradient."""
        return row

    def visit(self, tile: Tile, dq_row: Any, look: Callable) -> tuple[Any, Any]:
        """A tile. `dq_row` is where dQ of the step before goes; returns it for the last step, and
        look()."""
        raise NotImplementedError

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        """After the last tile."""


class Loader(Role):
    """Keys and values of one tile after another, and the queries that they meet."""

    def open(self) -> None:
        self.tiles.open()

    def visit(self, tile: Tile, dq_row: Any, look: Callable) -> Any:
        tile.each_step(lambda step, _: self.load(step))
        return dq_row, look()

    def load(self, step: Step) -> None:
        self.claim_next(step)
        when(step.first)(lambda: self.load_keys(step.tile))
        self.load_queries(step)
        when(step.first)(lambda: self.load_values(step.tile))
        self.load_douts(step)
        self.load_pairs(step)

    def claim_next(self, step: Step) -> None:
        """The next tile, in the last step of one: not sooner, as another CTA may be free before."""
        self.tiles.claim(step.tile.k + 1, step.last)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        for ring in self.memory.rings:
            ring.drain()

    def load_queries(self, step: Step) -> None:
        self._load_rows(self.memory.queries, step, self.inputs.q, self.inputs.lse)

    def load_douts(self, step: Step) -> None:
        self._load_rows(self.memory.douts, step, self.inputs.dout, self.inputs.delta)

    def load_pairs(self, step: Step) -> None:
        (batch, head), first_key = step.head, self.first_row(step.tile)
        halves = [pl.ds(first_key + i * 64, 64) for i in range(2)]
        for piece in range(self.config.pieces if self.memory.pairs else 0):
            queries = pl.ds(step.first_query + piece * COLUMNS_AT_ONCE, COLUMNS_AT_ONCE)
            for ring, source in zip(self.memory.pieces, self.schedule.problem.pairs(), strict=True):
                array = self.inputs.data.pairs[source.place]
                parts = [mosaic.shared_at(array, batch, head, queries, keys) for keys in halves]
                ring.fill(step.t * self.config.pieces + piece, *parts)

    def load_keys(self, tile: Tile) -> None:
        self._load_halves(self.memory.keys, tile, self.inputs.k)

    def load_values(self, tile: Tile) -> None:
        self._load_halves(self.memory.values, tile, self.inputs.v)

    def _load_rows(self, ring: Ring, step: Step, source: Any, row_data: Any) -> None:
        (batch, head), rows = step.head, pl.ds(step.first_query, self.config.block_q)
        every = [slice(None)] * (len(row_data.shape) - 3)
        ring.fill(
            step.t, rows_of(source, batch, rows, head), row_data.at[(batch, head, *every, rows)]
        )

    def _load_halves(self, ring: Ring, tile: Tile, source: Any) -> None:
        batch, kv_head = tile.place[0], tile.kv_head
        half = self.config.kv_rows // 2
        parts = [pl.ds(self.first_row(tile) + i * half, half) for i in range(2)]
        ring.fill(tile.k, *(rows_of(source, batch, x, kv_head, by_pieces=True) for x in parts))


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

    def scaled(self, dv: jax.Array) -> jax.Array:
        """As if each probability had been, that dropout has left."""
        scale = self.schedule.problem.kept_scale
        return dv if scale == 1.0 else dv * scale

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
        return mosaic.slices(self.config.block_q, PANEL)

    def multiply_scores(self, s_acc: Any, q: Any, k: Any) -> None:
        """S^T."""
        s_acc[...] = ptx.zeros(self.shape)
        plgpu.wgmma(s_acc, self.keys_of(k).at[self.keys], q.transpose((1, 0)))

    def multiply_dp(self, dp_acc: Any, dout: Any) -> None:
        """dP^T."""
        dp_acc[...] = ptx.zeros(self.shape)
        v = self.memory.v.at[lax.optimization_barrier(I32(0))]
        plgpu.wgmma(dp_acc, v.at[self.keys], dout.transpose((1, 0)))

    def columns(self, step: Step, lse: Any, delta: Any) -> Columns:
        """The queries of a step. What is read of the keys is to be loaded a while before it is needed."""
        first_key = self.first_row(step.tile) + self.keys.start
        problem, keys, numbers = self.schedule.problem, Side(0), {}
        sources, indexed = problem.rows("k", step.masked), problem.reads_index("k", step.masked)
        if sources or indexed:
            first = lax.optimization_barrier(first_key)
            data = self.inputs.data.k.at[step.head[0], :, pl.ds(first, 64)]
            index = mosaic.index((64, PANEL), 0, first) if indexed else None
            keys = Side.load(0, index, data, sources)
        if found := problem.numbers(step.masked):
            numbers = self.inputs.data.numbers.load(*step.head, found)
        of_all = self.schedule, self.inputs.data, self.outputs.scores
        rings, me, answers = self.memory.pieces, self.me, self.answers(step)
        return Columns(*of_all, step, first_key, keys, numbers, lse, delta, rings, me, answers)

    def answers(self, step: Step) -> list[jax.Array]:
        """Of a mask that has been asked, of each panel of queries."""
        if not (step.masked and self.schedule.problem.asked):
            return []
        batch, _, row = step.tile.place
        block = mosaic.div(step.first_query, self.config.block_q)
        half = lax.axis_index(PAIR) if self.config.paired else self.me
        return answers.load(self.inputs.answers, batch, row, block, half)

    def scores(self, step: Step) -> list[tuple[jax.Array, jax.Array]]:
        """P^T and dS^T of a step, panel by panel, in the input dtype."""
        block = self.columns(step, *(ring.at(step.t)[1] for ring in self.memory.rings[:2]))
        q, _ = self.memory.queries.wait(step.t)
        dout, _ = self.memory.douts.wait(step.t)

        def products(s_acc: Any, dp_acc: Any) -> list:
            self.multiply_scores(s_acc, q, step.tile.k)
            self.multiply_dp(dp_acc, dout)
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

            def of(panel: Any) -> tuple[jax.Array, jax.Array]:
                all_p, all_ds, gathered = [], [], []
                for piece in block.pieces(panel):
                    scores, piece = piece.of(s), piece.with_pairs()
                    p = piece.probabilities(scores)
                    piece.release_pairs(p)
                    p = piece.drop(p)
                    ds, for_data = piece.ds(p, scores, piece.of(dp_acc[...]))
                    all_p.append(piece.kept(p).astype(dout.dtype))
                    all_ds.append(ds.astype(dout.dtype))
                    gathered.append(for_data)
                block.add(gathered)
                return join(all_p), join(all_ds)

            return lax.optimization_barrier([of(panel) for panel in self.panels])

        square = self.accumulator(self.config.block_q)
        return pl.run_scoped(products, square, square)

    @property
    def own_rows(self) -> Ring:
        """Through whose last buffer of a tile this warpgroup stores: that of Q, or of dO."""
        return self.memory.rows[self.me]

    def release_rows(self, which: Any, t: Any) -> None:
        """Q's of a step, or dO's."""
        self.memory.free_rows(which).release(t)

    def release_own_rows(self, step: Step) -> None:
        """Of a tile's last step, `store` does, when it has used them."""
        when(jnp.logical_not(step.last))(lambda: self.release_rows(self.me, step.t))

    def store(self, tile: Tile, *gradients: tuple[list[Any], jax.Array]) -> None:
        """(dK or dV, of this warpgroup's keys), at the end of a tile: through the buffers of its last Q
        and dO, one a warpgroup."""
        batch, head, _ = tile.place
        last_step = tile.next_step - 1
        rows = pl.ds(self.first_row(tile) + self.keys.start, 64)
        mosaic.meet(self.memory.met)  # nobody reads Q and dO any more
        store = functools.partial(self._store, last_step, (batch, rows, head), gradients)
        if isinstance(self.me, int):
            store(self.own_rows)
        else:
            cond(self.me == 0, *(functools.partial(store, ring) for ring in self.memory.rows))
        self.release_rows(self.me, last_step)

    def _store(self, last_step: Any, place_of: tuple, gradients: tuple, through: Ring) -> None:
        batch, rows, head = place_of
        buffer, _ = through.at(last_step)
        places = self.config.block_q // 64
        numbers = [x for targets, gradient in gradients for x in _numbers(targets, gradient)]
        for i, (target, number) in enumerate(numbers):
            place = buffer.at[pl.ds(64 * (i % places), 64)]
            if i and i % places == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            # By panels, as dS: their addresses differ by constants, and hold fewer registers.
            for start in range(0, place.shape[1], PANEL):
                panel = number(start)
                place.at[:, pl.ds(start, panel.shape[1])][...] = panel
            plgpu.commit_smem()
            Rows(target, batch, rows, head, by_pieces=True).store(place)
            plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _numbers(targets: list[Any], gradient: jax.Array) -> list[tuple[Any, Callable]]:
    """For each target, its panel of columns from a start on: the gradient as rounded, and the rest."""

    def rounded(start: int) -> jax.Array:
        return gradient[:, start : start + PANEL].astype(targets[0].dtype)

    def rest(start: int) -> jax.Array:
        # rounded once more: LLVM would keep what was rounded before in registers
        panel = lax.optimization_barrier(gradient[:, start : start + PANEL])
        return (panel - panel.astype(targets[0].dtype).astype(jnp.float32)).astype(targets[0].dtype)

    return list(zip(targets, (rounded, rest), strict=False))
