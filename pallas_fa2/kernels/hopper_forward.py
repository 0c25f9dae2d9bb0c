"""FlashAttention-2, Algorithm 1, on Hopper: one CTA for each block of query rows.

One warpgroup streams keys and values through rings of buffers by TMA; the others own 64 query rows
each and follow FlashAttention-3 (arXiv:2407.08608), Algorithm 2: the scores of a block and the
output of the block before are multiplied together, and the softmax runs while the latter is in
flight. Key blocks go from the last to the first, so that those that need the mask come first.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic
from pallas_fa2.kernels.mosaic import I32, LOG2E, ROWS, TILE, Problem, Ring, Turns

# Below any score, but finite: a row that has seen no key yet gives p = 0 rather than NaN.
NO_MAXIMUM = -1e30


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one forward kernel."""

    head_dim: int  # of queries, keys and values: 64, 128 or 256
    warpgroups: int  # that multiply; each owns 64 query rows
    block_kv: int
    stages: int
    registers: tuple[int, int]  # of a thread in a multiplying and in the loading warpgroup
    # Keys and values of the heads that run at the same time: about half of the 60 MB of L2.
    section_bytes: int = 32 << 20

    rows: ClassVar[int] = mosaic.ROWS_PER_WARPGROUP

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which query tile a CTA takes, and which key blocks that tile visits."""

    problem: Problem
    config: Config

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def grid(self) -> mosaic.Grid:
        p = self.problem
        section = None
        if p.causal:
            kv_bytes = 2 * 2 * p.kv_len * self.config.head_dim
            section = mosaic.section_of(p.kv_heads, kv_bytes, self.config.section_bytes) * p.group
        return mosaic.Grid(p.batch, p.q_heads, self.q_tiles, section)

    def place(self) -> tuple[Any, Any, Any]:
        """(batch entry, query head, query tile); under a causal mask the last tile is longest."""
        batch, head, tile = self.grid.place()
        return batch, head, self.q_tiles - 1 - tile if self.problem.causal else tile

    def blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """How many key blocks the tile visits, and how many of them, the last ones, are cut."""
        p, c = self.problem, self.config
        whole = I32(p.kv_len // c.block_kv)
        if p.offset is None:
            return I32(self.kv_blocks), I32(self.kv_blocks) - whole
        first_row = q_tile * c.block_q
        end = first_row + (c.block_q + p.offset + c.block_kv - 1)
        visited = jnp.minimum(lax.div(end, I32(c.block_kv)), I32(self.kv_blocks))
        full = jnp.minimum(lax.div(first_row + (p.offset + 1), I32(c.block_kv)), whole)
        return visited, visited - full


def attention(
    problem: Problem, config: Config, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T8, N, H]` and natural `lse [B, N, T']`; T8 and T' are T rounded up (8, tile).

    q is `[B, T8, N, H]`, k and v `[B, S8, K, H]`, bfloat16 or float16, lengths multiples of 8.
    """
    schedule = Schedule(problem, config)
    dtype, dim = q.dtype, config.head_dim
    rows, stages = config.rows, config.stages
    scratch = {
        "q_smem": mosaic.operand(config.warpgroups, rows, dim, dtype=dtype),
        "k_smem": mosaic.operand(stages, config.block_kv, dim, dtype=dtype),
        "v_smem": mosaic.operand(stages, config.block_kv, dim, dtype=dtype),
        "lse_smem": plgpu.SMEM((config.warpgroups, rows), jnp.float32),
        "q_full": mosaic.barriers(config.warpgroups),
        "k_full": mosaic.barriers(stages),
        "v_full": mosaic.barriers(stages),
        "k_free": mosaic.barriers(stages, config.warpgroups),
        "v_free": mosaic.barriers(stages, config.warpgroups),
        "turns": mosaic.barriers(config.warpgroups),
        "done_consumer": plgpu.Barrier(num_arrivals=config.warpgroups + 1),
        "done_producer": plgpu.Barrier(num_arrivals=config.warpgroups + 1),
    }
    lse_shape = (problem.batch, problem.q_heads, schedule.q_tiles * config.block_q)
    kernel = plgpu.kernel(
        lambda *refs: _body(schedule, *refs[:5], **dict(zip(scratch, refs[5:], strict=True))),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct(lse_shape, jnp.float32),
        ),
        scratch_types=list(scratch.values()),
        grid=schedule.grid.shape,
        grid_names=mosaic.Grid.names,
        num_threads=config.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=mosaic.COMPILER_PARAMS,
    )
    return kernel(q, k, v)


def _body(
    schedule: Schedule, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    q_smem: Any, k_smem: Any, v_smem: Any, lse_smem: Any, q_full: Any, k_full: Any, v_full: Any,
    k_free: Any, v_free: Any, turns: Any, done_consumer: Any, done_producer: Any,
) -> None:  # fmt: skip
    config = schedule.config
    warpgroup = lax.axis_index("warpgroup")
    batch, head, q_tile = schedule.place()
    keys = Ring((k_smem,), k_full, k_free)
    values = Ring((v_smem,), v_full, v_free)

    def multiply() -> None:
        plgpu.set_max_registers(config.registers[0], action="increase")
        rows = pl.ds(q_tile * config.block_q + warpgroup * config.rows, config.rows)
        block = RowBlock(
            schedule, keys, values, Turns(turns, warpgroup, config.warpgroups),
            q_smem.at[warpgroup], q_tile, rows.start,
        )  # fmt: skip
        keys.open()
        values.open()
        plgpu.barrier_wait(q_full.at[warpgroup])
        acc, maximum, total = block.attend()
        # Q has been read for the last time: its buffer stages the output.
        block.q[...] = (acc / mosaic.over_rows(total, acc.shape)).astype(out.dtype)
        lse_smem.at[warpgroup][...] = (maximum + jnp.log2(total)) / LOG2E
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block.q, out.at[batch, rows, head], commit_group=False)
        plgpu.copy_smem_to_gmem(
            lse_smem.at[warpgroup], lse.at[batch, head, rows], commit_group=False
        )
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)
        mosaic.leave_together([done_consumer, done_producer], 0)

    def load_all() -> None:
        plgpu.set_max_registers(config.registers[1], action="decrease")
        visited, _ = schedule.blocks(q_tile)
        kv_head = lax.div(head, I32(schedule.problem.group))

        def fill(ring: Ring, source: Any, step: Any) -> None:
            rows = pl.ds((visited - 1 - step) * config.block_kv, config.block_kv)
            ring.fill(step, source.at[batch, rows, kv_head])

        def load(step: Any, _: Any) -> None:
            fill(keys, k, step)
            fill(values, v, step - 1)

        fill(keys, k, I32(0))
        for g in range(config.warpgroups):
            rows = pl.ds(q_tile * config.block_q + g * config.rows, config.rows)
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_smem.at[g], q_full.at[g])
        lax.fori_loop(I32(1), visited, load, None)
        fill(values, v, visited - 1)
        keys.drain()
        values.drain()
        mosaic.leave_together([done_consumer, done_producer], 1)

    mosaic.assign_roles(warpgroup, *[multiply] * config.warpgroups, load_all)


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """64 query rows against all the key blocks that they see, by one warpgroup."""

    schedule: Schedule
    keys: Ring
    values: Ring
    turns: Turns
    q: Any  # [64, H] in shared memory
    q_tile: Any
    first_row: Any

    @property
    def shape(self) -> tuple[int, int]:
        return mosaic.ROWS_PER_WARPGROUP, self.schedule.config.block_kv

    def attend(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The unnormalized output, the row maximum (base 2) and the row sum."""
        visited, cut = self.schedule.blocks(self.q_tile)
        first_key = (visited - 1) * self.schedule.config.block_kv
        self.turns.open()
        state = self.first_block(first_key)
        cut = jnp.maximum(cut, 1)

        def step(masked: bool) -> Any:
            return lambda t, state: self.next_block(t, first_key, state, masked)

        if self.schedule.problem.causal:
            state = lax.fori_loop(I32(1), cut, step(True), state)
        else:
            cut = I32(1)  # of full attention only the first block, the last of the keys, can be cut
        state = lax.fori_loop(cut, visited, step(False), state)
        acc, maximum, total, p = state
        acc = self.last_output(visited - 1, acc, p)
        self.turns.close()
        return acc, maximum, total

    def first_block(self, first_key: Any) -> tuple:
        """Scores and softmax of the first block; there is no output to update yet."""
        (k,) = self.keys.wait(0)
        self.turns.take()

        def multiply(s_acc: Any) -> Any:
            plgpu.wgmma(s_acc, self.q, k.transpose((1, 0)))
            self.turns.give()
            return s_acc[...]

        s = pl.run_scoped(multiply, mosaic.accumulator(*self.shape))
        self.keys.release(0)
        p = self.schedule.problem
        if p.causal or p.kv_len % self.shape[1]:
            s = self.hide(s, first_key)
        rows, dim = self.shape[0], self.schedule.config.head_dim
        maximum = mosaic.constant(NO_MAXIMUM, (rows,), ROWS)
        total = mosaic.constant(0.0, (rows,), ROWS)
        acc = mosaic.constant(0.0, (rows, dim), TILE)
        maximum, _, total, probabilities = self.softmax(s, maximum, total)
        return acc, maximum, total, probabilities.astype(self.q.dtype)

    def next_block(self, t: Any, first_key: Any, state: tuple, masked: bool) -> tuple:
        """Scores of block t and output of block t - 1, multiplied together; softmax of block t."""
        acc, maximum, total, p = state
        (k,) = self.keys.wait(t)
        self.turns.take()

        # The scores' accumulator is allocated just before its first product, so that ptxas starts
        # it from zero in the instruction itself and not by 64 moves.
        def multiply(s_acc: Any) -> tuple:
            plgpu.wgmma(s_acc, self.q, k.transpose((1, 0)))
            (v,) = self.values.wait(t - 1)

            def update(o_acc: Any) -> tuple:
                o_acc[...] = acc
                plgpu.wgmma(o_acc, p, v)
                self.turns.give()
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                self.keys.release(t)
                if masked:
                    s = self.hide(s, first_key - t * self.shape[1])
                softmax = self.softmax(s, maximum, total)
                return o_acc[...], softmax

            return pl.run_scoped(update, mosaic.accumulator(*acc.shape))

        out, (maximum, rescale, total, p_new) = pl.run_scoped(
            multiply, mosaic.accumulator(*self.shape)
        )
        self.values.release(t - 1)
        acc = out * mosaic.over_rows(rescale, out.shape)
        return acc, maximum, total, p_new.astype(self.q.dtype)

    def last_output(self, t: Any, acc: jax.Array, p: jax.Array) -> jax.Array:
        (v,) = self.values.wait(t)
        self.turns.take()

        def update(o_acc: Any) -> jax.Array:
            o_acc[...] = acc
            plgpu.wgmma(o_acc, p, v)
            self.turns.give()
            return o_acc[...]

        acc = pl.run_scoped(update, mosaic.accumulator(*acc.shape))
        self.values.release(t)
        return acc

    def hide(self, s: jax.Array, first_key: Any) -> jax.Array:
        """-inf where a row does not see a key."""
        problem, shape = self.schedule.problem, self.shape
        column = mosaic.index(shape, 1, first_key)
        if problem.offset is None:
            seen = mosaic.over_columns(column < problem.kv_len, shape)
        else:
            row = mosaic.index(shape, 0, self.first_row)
            last = jnp.minimum(row + problem.offset, problem.kv_len - 1)
            seen = mosaic.over_columns(column, shape) <= mosaic.over_rows(last, shape)
        return jnp.where(seen, s, -jnp.inf)

    def softmax(
        self, s: jax.Array, maximum: jax.Array, total: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """New maximum, the factor for what came before, new sum, and the block's probabilities.

        Base 2, one multiply-add a score: exp2(s * scale * log2(e) - maximum).
        """
        scale = self.schedule.problem.scale * LOG2E
        new = jnp.maximum(maximum, s.max(axis=1) * scale)
        rescale = jnp.exp2(maximum - new)
        p = jnp.exp2(s * scale - mosaic.over_rows(new, s.shape))
        return new, rescale, total * rescale + p.sum(axis=1), p
