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
from pallas_fa2.backends.sm90.primitives.tma import GatheredRows, HeadRows
from pallas_fa2.backends.sm90.scheduler import for_each_tile
from pallas_fa2.control_flow import when

# In how many blocks a claim is answered (2500 clocks), where a block of keys takes 600 or more.
CLAIM_AHEAD = 4


def produce(schedule: ForwardSchedule, arrays: Arrays, memory: SharedStorage) -> None:
    """The loading warpgroup: queries, keys and values of one tile after another."""
    problem, config, inputs = schedule.problem, schedule.config, arrays.inputs
    roles.set_max_registers(config.shares, -1)
    arrays.tiles.open()

    def visit(n: Any, entry: list[Any], before: tuple[Any, Any], look: Callable) -> tuple:
        tile = QueryTile(schedule, *entry)
        (batch, head, _), (first_step, first_data) = tile.place, before

        def parts(t: Any) -> list[Any]:
            size = schedule.listed
            return [pl.ds(part * size, size) for part in arrays.block(tile, t)]

        def keys(t: Any) -> Any:
            (whole,) = parts(t)  # blocks have parts only where nothing else comes with their keys
            return whole

        def rows_of(source: Any, t: Any) -> GatheredRows:
            return GatheredRows([HeadRows(source, batch, part, tile.kv_head) for part in parts(t)])

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
                        ring.fill(step, layouts.index_broadcast(array, batch, head, *place))

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
            memory.queries(g).fill(n, HeadRows(inputs.q, batch, rows(g), head))
        load_key_data(I32(0))
        load_pairs(I32(0))
        lax.fori_loop(I32(1), tile.visited, load, None)
        seen = look()  # the next tile's first keys wait for it
        load_values(tile.visited - 1)
        return tile.next_steps(before), seen

    for_each_tile(arrays.tiles, visit, (I32(0), I32(0)), early=True)
    for ring in memory.rings:
        ring.drain()
    for g in range(config.warpgroups):
        for ring in (memory.queries(g), *memory.pairs_of(g)):
            ring.drain()
    roles.sync_before_exit(memory.done, 1)
