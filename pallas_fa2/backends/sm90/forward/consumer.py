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
    roles.set_max_registers(config.registers_per_warpgroup, 0)
    queries, turns = memory.q_pipeline(warpgroup), WarpgroupTurns(warpgroup, config.warpgroups)
    pieces = HeadRows.existing_columns(arrays.outputs.out, config.epilogue_pieces)

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        """The CTA's n-th tile; the rings, and that of key data, have been through some steps before."""
        (q,) = queries.consumer_wait(n)
        if config.q_in_registers:
            q = plgpu.load(q, layout=ACC_LAYOUT, optimized=False)
        tile = QueryTile(schedule, *entry)
        place = warpgroup
        if config.q_stages > 1:
            place = lax.optimization_barrier(warpgroup * config.q_stages + queries.stage(n))
        block = RowBlock(tile, arrays, memory, q, place, *before)
        acc, statistics = block.mainloop()
        seen = look()
        total = block.row_sum(acc, statistics)
        infinite = votes.warpgroup_any_nonfinite(total, warpgroup)

        def release_queries() -> None:
            if not config.q_in_registers:  # else they were when the first scores were there
                queries.consumer_release(n)

        def finish() -> Any:
            release_queries()
            here = block.rematerialized(infinite)
            for columns in pieces:
                piece = layouts.slice_columns(acc, columns)
                here.epilogue(columns, piece, statistics.reference, total)
            return here.advance

        def repeat() -> Any:
            here = block.rematerialized(infinite - 1)

            def piece(i: Any, _: Any) -> None:
                size = pieces[0].size
                columns = pl.ds(i * size, size)
                here.epilogue(columns, *here.recompute_exact(columns))

            lax.fori_loop(0, len(pieces), piece, None)
            release_queries()
            return here.advance

        return cond(infinite != 0, repeat, finish), seen

    for ring in memory.kv_pipelines:
        ring.consumer_prime()
    for ring in (queries, *memory.pairwise_pipelines(warpgroup)):
        ring.consumer_prime()
    turns.prime()
    for_each_tile(arrays.scheduler, visit, (I32(0), I32(0)), early=True)
    turns.finish()
    plgpu.wait_smem_to_gmem(0)
    roles.sync_before_exit(memory.exit_barriers, 0)
