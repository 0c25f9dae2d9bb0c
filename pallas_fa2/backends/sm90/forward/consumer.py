"""A consumer warpgroup of the forward."""

from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.row_block import RowBlock
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, QueryTile
from pallas_fa2.backends.sm90.primitives import layouts, roles, votes
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.sm90.primitives.named_barriers import WarpgroupTurns
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.backends.sm90.scheduler import for_each_tile
from pallas_fa2.control_flow import cond


def consume(
    schedule: ForwardSchedule, arrays: Arrays, memory: SharedStorage, warpgroup: Any
) -> None:
    """A multiplying warpgroup: 64 rows of one tile after another."""
    config = schedule.config
    roles.set_max_registers(config.shares, 0)
    queries, turns = memory.queries(warpgroup), WarpgroupTurns(warpgroup, config.warpgroups)
    pieces = HeadRows.pieces(arrays.outputs.out, config.out_pieces)

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        """The CTA's n-th tile; the rings, and that of key data, have been through some steps before."""
        (q,) = queries.wait(n)
        if config.q_in_registers:
            q = plgpu.load(q, layout=ACC_LAYOUT, optimized=False)
        tile = QueryTile(schedule, *entry)
        place = warpgroup
        if config.q_buffers > 1:
            place = lax.optimization_barrier(warpgroup * config.q_buffers + queries.slot(n))
        block = RowBlock(tile, arrays, memory, q, place, *before)
        acc, statistics = block.attend()
        seen = look()
        total = block.total(acc, statistics)
        infinite = votes.warpgroup_any_nonfinite(total, warpgroup)

        def release_queries() -> None:
            if not config.q_in_registers:  # else they were when the first scores were there
                queries.release(n)

        def finish() -> Any:
            release_queries()
            here = block.shifted(infinite)
            for columns in pieces:
                piece = layouts.slice_columns(acc, columns)
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
    for_each_tile(arrays.tiles, visit, (I32(0), I32(0)), early=True)
    turns.close()
    plgpu.wait_smem_to_gmem(0)
    roles.sync_before_exit(memory.done, 0)
