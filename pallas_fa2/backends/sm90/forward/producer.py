"""The producer warpgroup of the forward."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, QueryTile
from pallas_fa2.backends.sm90.primitives import layouts, roles
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from pallas_fa2.backends.sm90.scheduler import for_each_tile
from pallas_fa2.control_flow import when

# In how many blocks a claim is answered (2500 clocks), where a block of keys takes 600 or more.
CLAIM_AHEAD = 4


def produce(schedule: ForwardSchedule, arrays: Arrays, memory: SharedStorage) -> None:
    """The loading warpgroup: queries, keys and values of one tile after another."""
    problem, config, inputs = schedule.spec, schedule.config, arrays.inputs
    roles.set_max_registers(config.registers_per_warpgroup, -1)
    arrays.scheduler.prime()

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        tile = QueryTile(schedule, *entry)
        (batch, head, _), (first_step, first_data) = tile.coordinates, before

        def keys(t: Any) -> Any:
            return pl.ds(arrays.kv_block(tile, t) * config.block_kv, config.block_kv)

        def rows_of(source: Any, t: Any) -> HeadRows:
            return HeadRows(source, batch, keys(t), tile.kv_head)

        def load_keys(t: Any) -> None:
            memory.k_pipeline.tma_load(first_step + t, rows_of(inputs.k, t))

        def load_values(t: Any) -> None:
            memory.v_pipeline.tma_load(first_step + t, rows_of(inputs.v, t))

        def rows(g: int) -> Any:
            return pl.ds(tile.first_row + g * config.rows_per_warpgroup, config.rows_per_warpgroup)

        def load_key_data(t: Any) -> None:
            if memory.key_aux is None:
                return
            source, step = inputs.aux.k.at[batch, :, keys(t)], first_data + tile.aux_index(t)
            when(tile.has_aux(t))(lambda: memory.key_aux_pipeline.tma_load(step, source))

        def load_pairs(t: Any) -> None:
            if not memory.pairwise:
                return

            def fill() -> None:
                for g in range(config.warpgroups):
                    for ring, source in zip(
                        memory.pairwise_pipelines(g), problem.pairwise_inputs(), strict=True
                    ):
                        array, place = inputs.aux.pairwise[source.position], (rows(g), keys(t))
                        step = first_data + tile.aux_index(t)
                        ring.tma_load(step, layouts.index_broadcast(array, batch, head, *place))

            when(tile.has_aux(t))(fill)

        def claim(t: Any) -> None:
            in_time = t == jnp.maximum(tile.num_kv_blocks - CLAIM_AHEAD, 0)
            arrays.scheduler.request_next(n + 1, in_time)

        def load(t: Any, _: Any) -> None:
            claim(t)
            load_keys(t)
            load_key_data(t)
            load_values(t - 1)
            load_pairs(t)  # which have fewer buffers: values do not wait for them

        claim(I32(0))
        load_keys(I32(0))
        for g in range(config.warpgroups):
            memory.q_pipeline(g).tma_load(n, HeadRows(inputs.q, batch, rows(g), head))
        load_key_data(I32(0))
        load_pairs(I32(0))
        lax.fori_loop(I32(1), tile.num_kv_blocks, load, None)
        seen = look()  # the next tile's first keys wait for it
        load_values(tile.num_kv_blocks - 1)
        return tile.advance(before), seen

    for_each_tile(arrays.scheduler, visit, (I32(0), I32(0)), early=True)
    for ring in memory.kv_pipelines:
        ring.producer_tail()
    for g in range(config.warpgroups):
        for ring in (memory.q_pipeline(g), *memory.pairwise_pipelines(g)):
            ring.producer_tail()
    roles.sync_before_exit(memory.exit_barriers, 1)
