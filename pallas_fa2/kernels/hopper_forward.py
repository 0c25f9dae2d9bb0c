"""FlashAttention-2, Algorithm 1, on Hopper: persistent CTAs, one block of query rows after another.

One warpgroup streams keys and values through rings of buffers by TMA, and the next block's queries;
the others own 64 query rows each and follow FlashAttention-3 (arXiv:2407.08608), Algorithm 2: the
scores of a block and the output of the block before are multiplied together, and the softmax runs
while the latter is in flight.

The online softmax may subtract any reference from a row's scores, as long as exponentials neither
overflow nor vanish. Ours is the maximum of the first key block; it is raised when a row's sum has
grown a lot, and that is seen from the sum: exponentials begin as soon as the scores are there, and no
block but the first looks for a maximum. Should scores rise within one block by so much that float32
overflows, the tile is done again with true maxima (`RowBlock.repeat`). So it is where the output is not
finite and a mask may have hidden what made it so.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic, ptx, tma
from pallas_fa2.kernels.branches import cond, when
from pallas_fa2.kernels.forward_memory import Arrays, Inputs, Memory, Outputs
from pallas_fa2.kernels.forward_rows import RowBlock
from pallas_fa2.kernels.forward_schedule import Config, Schedule, Tile
from pallas_fa2.kernels.mosaic import I32, TILE, Problem
from pallas_fa2.kernels.ptx import Turns
from pallas_fa2.kernels.tiles import Claims, Dealt, each_tile, launch
from pallas_fa2.kernels.tma import Rows, Together
from pallas_fa2.kernels.token_data import TokenData, stored
from pallas_fa2.kernels.visits import Visits

# In how many blocks a claim is answered (2500 clocks), where a block of keys takes 600 or more.
CLAIM_AHEAD = 4


def attention(
    problem: Problem,
    config: Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: Visits | None = None,
    data: TokenData | None = None,
    answers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T, N, Hv]` and natural `lse [B, N, T']`; T' is T rounded up to whole tiles.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, bfloat16 or float16; head dims are `config`'s or
    less. Under a mask, `seen` lists the blocks of keys of every tile; `data` is what masks and scores read,
    and `answers` are those of a mask that has been asked.
    """
    key_rows = data.k.shape[1] + 1 if data is not None and problem.reads_keys() else 0
    if not problem.pairs():
        config = config.with_queries_ahead(key_rows)
    schedule = Schedule(problem, config)
    dtype, dim, groups = q.dtype, config.head_dim, config.warpgroups
    rows, stages = config.rows, config.stages
    rings = 3 if problem.reads_keys() else 2
    pairs = _pair_buffers(config, problem, key_rows)
    pair_slots = sum(buffer.shape[1] for buffer in pairs) * groups
    panel = tma.panel_width(dim, k.shape[3], dtype)
    v_panel = tma.panel_width(config.value_dim, v.shape[3], dtype)
    memory = Memory(
        q=mosaic.operand(groups, config.q_buffers, rows, dim, dtype=dtype, panel=panel),
        k=mosaic.operand(stages, config.block_kv, dim, dtype=dtype, panel=panel),
        v=mosaic.operand(stages, config.block_kv, config.value_dim, dtype=dtype, panel=v_panel),
        # as queries: keys of a repeated tile come here
        out=mosaic.operand(groups, rows, config.out_pieces[0].size, dtype=dtype, panel=panel),
        key_data=None,
        full=mosaic.barriers((config.q_buffers + 2) * groups + rings * stages + pair_slots),
        q_free=mosaic.barriers(config.q_buffers * groups + pair_slots),
        kv_free=mosaic.barriers(rings * stages, groups),
        done=[mosaic.barriers(1, groups + 1) for _ in range(2)],
        pairs=pairs,
    )
    tiles, inputs = schedule.tiles(seen), Inputs(q, k, v, answers=answers)
    if seen is not None:
        inputs = inputs._replace(lists=jnp.asarray(seen.lists))
    if data is not None:
        data = data.with_places(config.block_q, config.block_kv)
        inputs = inputs._replace(data=data)
        if problem.reads_keys():
            buffers = plgpu.SMEM((stages, data.k.shape[1], config.block_kv), jnp.int32)
            memory = memory._replace(key_data=buffers)
    lse_shape = (problem.batch, problem.q_heads, schedule.q_tiles * config.block_q)
    outputs = Outputs(
        lax.empty((*q.shape[:3], v.shape[3]), dtype), lax.empty(lse_shape, jnp.float32)
    )

    def run(tiles: Dealt | Claims, inputs: Inputs, outputs: Outputs, memory: Memory) -> None:
        arrays, warpgroup = Arrays(tiles, inputs, outputs), lax.axis_index("warpgroup")
        multiply = functools.partial(_multiply, schedule, arrays, memory, warpgroup)
        load = functools.partial(_load, schedule, arrays, memory)
        mosaic.assign_roles(warpgroup, *[multiply] * groups, load)

    out, lse = launch("attention", run, memory, tiles, inputs, outputs, groups + 1)
    return out, lse


def _pair_buffers(config: Config, problem: Problem, key_rows: int) -> list[Any]:
    """A warpgroup's rows against a block of keys, for each array of pairs."""
    dtypes = [stored(source.dtype) for source in problem.pairs()]
    if not dtypes:
        return []
    shape = config.warpgroups, config.rows, config.block_kv
    stages = config.pair_stages(sum(dtype.itemsize for dtype in dtypes), key_rows)
    return [mosaic.operand(shape[0], stages, *shape[1:], dtype=dtype) for dtype in dtypes]


def _load(schedule: Schedule, arrays: Arrays, memory: Memory) -> None:
    """The loading warpgroup: queries, keys and values of one tile after another."""
    problem, config, inputs = schedule.problem, schedule.config, arrays.inputs
    mosaic.set_registers(config.shares, -1)
    arrays.tiles.open()

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        tile = Tile(schedule, *entry)
        (batch, head, _), (first_step, first_data) = tile.place, before

        def parts(t: Any) -> list[Any]:
            size = schedule.listed
            return [pl.ds(part * size, size) for part in arrays.block(tile, t)]

        def keys(t: Any) -> Any:
            (whole,) = parts(t)  # blocks have parts only where nothing else comes with their keys
            return whole

        def rows_of(source: Any, t: Any) -> Together:
            return Together([Rows(source, batch, part, tile.kv_head) for part in parts(t)])

        def load_keys(t: Any) -> None:
            memory.keys.fill(first_step + t, rows_of(inputs.k, t))

        def load_values(t: Any) -> None:
            memory.values.fill(first_step + t, rows_of(inputs.v, t))

        def rows(g: int) -> Any:
            return pl.ds(tile.first_row + g * config.rows, config.rows)

        def load_key_data(t: Any) -> None:
            if memory.key_data is None:
                return
            source, step = inputs.data.k.at[batch, :, keys(t)], first_data + tile.data_before(t)
            when(tile.has_data(t))(lambda: memory.data_of_keys.fill(step, source))

        def load_pairs(t: Any) -> None:
            if not memory.pairs:
                return

            def fill() -> None:
                for g in range(config.warpgroups):
                    for ring, source in zip(memory.pairs_of(g), problem.pairs(), strict=True):
                        array, place = inputs.data.pairs[source.place], (rows(g), keys(t))
                        step = first_data + tile.data_before(t)
                        ring.fill(step, mosaic.shared_at(array, batch, head, *place))

            when(tile.has_data(t))(fill)

        def claim(t: Any) -> None:
            in_time = t == jnp.maximum(tile.visited - CLAIM_AHEAD, 0)
            arrays.tiles.claim(n + 1, in_time)

        def load(t: Any, _: Any) -> None:
            claim(t)
            load_keys(t)
            load_key_data(t)
            load_values(t - 1)
            load_pairs(t)  # which have fewer buffers: values do not wait for them

        claim(I32(0))
        load_keys(I32(0))
        for g in range(config.warpgroups):
            memory.queries(g).fill(n, Rows(inputs.q, batch, rows(g), head))
        load_key_data(I32(0))
        load_pairs(I32(0))
        lax.fori_loop(I32(1), tile.visited, load, None)
        seen = look()  # the next tile's first keys wait for it
        load_values(tile.visited - 1)
        return tile.next_steps(before), seen

    each_tile(arrays.tiles, visit, (I32(0), I32(0)), early=True)
    for ring in memory.rings:
        ring.drain()
    for g in range(config.warpgroups):
        for ring in (memory.queries(g), *memory.pairs_of(g)):
            ring.drain()
    mosaic.leave_together(memory.done, 1)


def _multiply(schedule: Schedule, arrays: Arrays, memory: Memory, warpgroup: Any) -> None:
    """A multiplying warpgroup: 64 rows of one tile after another."""
    config = schedule.config
    mosaic.set_registers(config.shares, 0)
    queries, turns = memory.queries(warpgroup), Turns(warpgroup, config.warpgroups)
    pieces = Rows.pieces(arrays.outputs.out, config.out_pieces)

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        """The CTA's n-th tile; the rings, and that of key data, have been through some steps before."""
        (q,) = queries.wait(n)
        if config.q_in_registers:
            q = plgpu.load(q, layout=TILE, optimized=False)
        tile = Tile(schedule, *entry)
        place = warpgroup
        if config.q_buffers > 1:
            place = lax.optimization_barrier(warpgroup * config.q_buffers + queries.slot(n))
        block = RowBlock(tile, arrays, memory, q, place, *before)
        acc, statistics = block.attend()
        seen = look()
        total = block.total(acc, statistics)
        infinite = ptx.any_infinite(total, warpgroup)

        def release_queries() -> None:
            if not config.q_in_registers:  # else they were when the first scores were there
                queries.release(n)

        def finish() -> Any:
            release_queries()
            here = block.shifted(infinite)
            for columns in pieces:
                piece = mosaic.columns_of(acc, columns)
                here.store(columns, piece, statistics.reference, total)
            return here.next_steps

        def repeat() -> Any:
            here = block.shifted(infinite - 1)

            def piece(i: Any, _: Any) -> None:
                size = pieces[0].size
                columns = pl.ds(i * size, size)
                here.store(columns, *here.repeat(columns))

            lax.fori_loop(0, len(pieces), piece, None)
            release_queries()
            return here.next_steps

        return cond(infinite != 0, repeat, finish), seen

    for ring in memory.rings:
        ring.open()
    for ring in (queries, *memory.pairs_of(warpgroup)):
        ring.open()
    turns.open()
    each_tile(arrays.tiles, visit, (I32(0), I32(0)), early=True)
    turns.close()
    plgpu.wait_smem_to_gmem(0)
    mosaic.leave_together(memory.done, 0)
