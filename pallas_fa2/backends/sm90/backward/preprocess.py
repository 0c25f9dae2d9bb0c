"""What comes before and after the Hopper backward: passes over O, dO and dQ, as fast as memory is.

XLA takes 1.4 times as long (docs/decisions/0024-pre-and-postprocess.md).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import launch, layouts, register_io
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import ArrayToSanitize, SanitizePass, any_row_nonfinite
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.control_flow import cond, when


class BackwardOperands(NamedTuple):
    """What the backward multiplies, arrays or each a `Tamed`."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]


class _Before(NamedTuple):
    """What `prepare` reads and writes, in device memory."""

    out: Any
    dout: Any
    doubted: Any  # q, k, v and lse, where tokens may take part in nothing, and whether they may, of each entry
    delta: Any
    dq: Any
    of_rows: Any  # of q and dout, what `Copies` has
    of_keys: Any


class _Tiles(NamedTuple):
    """In shared memory."""

    out: Any
    dout: Any
    arrived: Any
    other: Any = None  # of q or k
    other_arrived: Any = None


def backward_preprocess(
    problem: KernelSpec,
    config: BackwardConfig,
    factors: BackwardOperands,
    out: jax.Array,
    lse: jax.Array,
    with_zeros: bool = True,
    in_doubt: jax.Array | None = None,
) -> tuple[BackwardOperands, jax.Array, jax.Array | None]:
    """The factors; -rowsum(dO ∘ O) in float32, `[B, N, T']`; and zeros to which dQ will be added, if it is.

    `out` is like dout; lse is `[B, N, T']`. T' is a multiple of `block_q`, and 0 stands there for rows that
    do not exist. If by the mask's code tokens may take part in nothing, `in_doubt`, int32 `[B]`, is 0 in
    entries whose data say that all take part.

    P and dS are 0 where a mask hides a pair, and meet k, q and dout. Where tokens may take part in nothing,
    these become finite. Of a key that was not, v is NaN instead, and with it dS of a pair that is seen; of a
    row, lse or delta is, and q is read only where one of them is. (Under a score function, everywhere: lse
    may be finite although q is not.)
    """
    schedule, tames, (q, k, v, dout) = (
        BackwardSchedule(problem, config),
        problem.guards_nonfinite,
        factors,
    )
    of_q, of_dout = (
        ArrayToSanitize(q, config.head_dim, 0.0),
        ArrayToSanitize(dout, config.value_dim, 0.0),
    )
    of_k, of_v = (
        ArrayToSanitize(k, config.head_dim, 0.0),
        ArrayToSanitize(v, config.value_dim, math.nan),
    )
    rows = SanitizePass((of_q, of_dout), config.block_q)
    keys = SanitizePass((of_k, of_v), config.block_q, config.block_kv)

    def run(refs: tuple, tiles: _Tiles) -> None:
        arrays, cta = _Before(*jax.tree.unflatten(tree, refs)), lax.axis_index("cta")
        block = _block(schedule)
        if not tames:
            prepare_rows(arrays, tiles, block)
            return

        @when(cta < schedule.blocks)
        def _() -> None:
            tame_rows(arrays, tiles, block, prepare_rows(arrays, tiles, block))

        @when(cta >= schedule.blocks)
        def _() -> None:
            _, k, v, _, in_doubt = arrays.doubted
            place, buffers = cta - schedule.blocks, (tiles.other, tiles.dout)
            batch, _, _ = arithmetic.unravel(place, keys.grid)

            def look() -> None:
                keys.sanitize_with_first(
                    (k, v), arrays.of_keys, place, buffers, tiles.other_arrived
                )

            cond(in_doubt[batch] != 0, look, lambda: keys.record(arrays.of_keys, place, I32(0)))

    def prepare_rows(arrays: _Before, tiles: _Tiles, block: Any) -> list[jax.Array]:
        """NaN where delta or lse is not finite."""
        batch, head, first = schedule.queries(block)
        for array, tile in zip(arrays[:2], tiles[:2], strict=True):
            rows.rows_of(array, block, tile).load(tile, tiles.arrived, I32(0))
        for part in range(config.num_dq_parts if with_zeros else 0):
            place = config.dq_part_slices(part)
            nothing = layouts.splat_constant(0.0, tuple(x.size for x in place), ACC_LAYOUT)
            register_io.store_fragments(arrays.dq.at[block, config.dq_part_range(*place)], nothing)
        plgpu.barrier_wait(tiles.arrived.at[0])
        doubts = []
        for square in rows.fragments:
            total = layouts.sum_rows(jnp.multiply, *(tile.at[square] for tile in tiles[:2]))
            place = batch, head, pl.ds(first + square.start, square.size)
            arrays.delta.at[place][...] = -total
            if tames:
                lse = layouts.load_row(0, arrays.doubted[3].at[place], jnp.float32)
                doubts.append((total - total) + (lse - lse))
        return doubts

    def tame_rows(arrays: _Before, tiles: _Tiles, block: Any, doubts: list[jax.Array]) -> None:
        (q, *_, in_doubt), buffers = arrays.doubted, (tiles.other, tiles.dout)

        def look() -> Any:
            rows.rows_of(q, block, tiles.other).load(tiles.other, tiles.other_arrived, I32(0))
            plgpu.barrier_wait(tiles.other_arrived.at[0])
            found = rows.find(buffers)
            wild = any_row_nonfinite(found)
            when(wild != 0)(lambda: rows.write(arrays.of_rows, block, buffers, found))
            return wild

        batch, _, _ = schedule.queries(block)
        looks = in_doubt[batch] != 0
        if problem.score is None:
            looks &= any_row_nonfinite(doubts) != 0
        wild = cond(looks, look, lambda: I32(0))
        rows.record(arrays.of_rows, block, wild)

    delta = problem.batch, problem.q_heads, schedule.q_blocks * config.block_q
    delta, dq = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (delta, schedule.dq_shape))
    dq = dq if with_zeros else None
    copies = [x.outputs if tames else [] for x in (rows, keys)]
    inputs, outputs = (out, dout, [q, k, v, lse, in_doubt] if tames else []), (delta, dq, *copies)
    tree = jax.tree.structure((*inputs, *outputs))
    out_tile, dout_tile = (of_dout.buffer(config.block_q) for _ in range(2))
    tiles = _Tiles(out_tile, dout_tile, pipeline.barriers(1, 2))
    if tames:
        other = of_q.buffer(config.block_q)
        tiles = tiles._replace(other=other, other_arrived=pipeline.barriers(1))
    grid = {"cta": schedule.blocks + (math.prod(keys.grid) if tames else 0)}
    made, made_tree = jax.tree.flatten(outputs)
    kernel = launch.build_kernel("prepare_gradients", run, tiles, made, grid, 1)
    made = kernel(*jax.tree.leaves(inputs))
    delta, zeros, *copied = jax.tree.unflatten(made_tree, made)
    if tames:
        (q, dout), (k, v) = (
            x.sanitized_arrays(y) for x, y in zip((rows, keys), copied, strict=True)
        )
    return BackwardOperands(q, k, v, dout), delta, zeros


def _block(schedule: BackwardSchedule) -> Any:
    """A CTA's block of queries, the last first: L2 holds what the kernel before has written last, and the one
    after begins with the first."""
    return schedule.blocks - 1 - lax.axis_index("cta")
