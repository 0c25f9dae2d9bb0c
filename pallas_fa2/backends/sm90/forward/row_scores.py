"""What masks, scores and dropout make of 64 query rows of the Hopper forward."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.sm90 import mask_bits
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, QueryTile
from pallas_fa2.backends.sm90.primitives import layouts, masking, thread_values
from pallas_fa2.backends.sm90.primitives.layouts import ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.named_barriers import WarpgroupTurns
from pallas_fa2.backends.sm90.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.tile_functions import (
    PIECE_COLUMNS,
    ArgSource,
    AxisInputs,
    TileFunction,
    TileInputs,
)


class SoftmaxState(NamedTuple):
    """Of the softmax of 64 rows so far."""

    reference: jax.Array  # [64], subtracted from the scores in base 2
    total: jax.Array  # [64, 8], the sum of each thread's columns


class RowInputs(NamedTuple):
    """What masks, scores and dropout read of the rows, and of their head."""

    side: AxisInputs
    numbers: Mapping[ArgSource, jax.Array]
    row_keys: RowKeys | None


class KvBlockInputs(NamedTuple):
    """What masks and scores read of a block of keys."""

    keys: Any  # [1 + rows, keys], or None
    pairs: Mapping[ArgSource, PairwiseTile]

    def load_pairs(self, function: TileFunction, columns: Any) -> dict[ArgSource, jax.Array]:
        """Of some columns, what the function reads."""
        return {s: self.pairs[s].load(columns.start, columns.size, s.dtype) for s in function.pairs}


@dataclasses.dataclass(frozen=True)
class RowScores:
    """64 query rows of one warpgroup: the data that come with them and with keys, and their use."""

    tile: QueryTile
    arrays: Arrays
    memory: SharedStorage
    q: Any  # [64, H], in shared memory or registers
    place: Any  # of these queries, among the buffers of all warpgroups
    first_step: Any  # of this tile, in the rings of keys and values
    first_data: Any  # in those of data

    @property
    def schedule(self) -> ForwardSchedule:
        return self.tile.schedule

    @property
    def me(self) -> Any:
        """The warpgroup. One number that ptxas knows nothing of holds fewer registers through the loops."""
        return arithmetic.div(self.place, self.schedule.config.q_buffers)

    @property
    def turns(self) -> WarpgroupTurns:
        return WarpgroupTurns(self.me, self.schedule.config.warpgroups)

    @property
    def shape(self) -> tuple[int, int]:
        return layouts.ROWS_PER_WARPGROUP, self.schedule.config.block_kv

    @property
    def first_row(self) -> Any:
        return self.tile.first_row + self.me * self.schedule.config.rows

    @property
    def masked(self) -> bool:
        """Whether there are blocks that some row sees only a part of."""
        problem = self.schedule.problem
        cut = problem.causal or problem.kv_len % self.shape[1] != 0
        return cut or problem.mask is not None

    def query_data(self, masked: bool) -> RowInputs:
        """To be loaded a while before it is needed."""
        problem = self.schedule.problem
        sources, indexed = problem.rows("q", masked), problem.reads_index("q", masked)
        numbers = problem.numbers(masked)
        if not (sources or indexed or numbers or problem.dropout):
            return RowInputs(AxisInputs(0), {}, None)
        # Where they lie is computed here: it would hold registers through the loops.
        tile = dataclasses.replace(self.tile, number=lax.optimization_barrier(self.tile.number))
        (batch, head, _), data = tile.place, self.arrays.inputs.data
        first_row = dataclasses.replace(self, tile=tile).first_row
        rows = pl.ds(first_row, self.shape[0])
        index = layouts.index(self.shape, 0, first_row + problem.first_query) if indexed else None
        side = AxisInputs.load(0, index, data.q.at[batch, :, rows], sources)
        row_keys = None
        if problem.dropout is not None:
            words = (data.row_keys.at[batch, head, i, rows] for i in range(2))
            row_keys = RowKeys(*(layouts.load_row(0, x, I32) for x in words))
        return RowInputs(side, data.numbers.load(batch, head, numbers), row_keys)

    def numbers(self, t: Any) -> list[Any]:
        """Of the parts of the block of keys that is visited as the t-th: to be loaded a while before they are needed."""
        return self.arrays.block(self.tile, t)

    def first_key(self, t: Any) -> Any:
        """Of a block in parts, that of the first: nobody asks for it."""
        return self.numbers(t)[0] * self.schedule.listed

    @property
    def data_rings(self) -> list[Pipeline]:
        """Of data of keys, if there are any, and of pairs."""
        keys = [] if self.memory.key_data is None else [self.memory.data_of_keys]
        return [*keys, *self.memory.pairs_of(self.me)]

    def data_step(self, t: Any) -> Any:
        """Of block t, in these rings."""
        return self.first_data + self.tile.data_before(t)

    def wait_for_data(self, t: Any, masked: bool) -> KvBlockInputs | None:
        """Of block t."""
        problem = self.schedule.problem
        if not problem.reads_block(masked):
            return None
        found = [array for ring in self.data_rings for array in ring.wait(self.data_step(t))]
        keys = None if self.memory.key_data is None else found.pop(0)
        return KvBlockInputs(
            keys, dict(zip(problem.pairs(), map(PairwiseTile, found), strict=True))
        )

    def release_data(self, t: Any, statistics: SoftmaxState) -> None:
        """Once the statistics are known. An arrival may overtake what a warp still reads from shared
        memory, which WGMMA delays, and half of a warp's reads then find the next block's data."""
        thread_values.fence_before_wgmma_wait(statistics.total)
        for ring in self.data_rings:
            ring.release(self.data_step(t))

    def data_in_device_memory(self, first_key: Any) -> KvBlockInputs | None:
        """Of keys of a repeated tile."""
        problem, data = self.schedule.problem, self.arrays.inputs.data
        if not problem.reads_block():
            return None
        (batch, head, _), keys = self.tile.place, pl.ds(first_key, self.schedule.config.repeat_kv)
        rows = pl.ds(self.first_row, self.shape[0])

        def pairs(source: ArgSource) -> PairwiseTile:
            array = layouts.index_broadcast(data.pairs[source.place], batch, head, rows, keys)
            return PairwiseTile(array, in_panels=False)

        return KvBlockInputs(data.k.at[batch, :, keys], {s: pairs(s) for s in problem.pairs()})

    def scored(
        self,
        s: jax.Array,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
    ) -> tuple[jax.Array, float]:
        """What score functions make of some keys' scores, and the factor that brings it to base 2."""
        problem = self.schedule.problem
        if problem.score is None:
            return s, problem.scale * LOG2E

        value = problem.score.value

        def pair_at(columns: Any) -> TileInputs:
            keys, pairs = AxisInputs(1), {}
            if value.reads_index("k"):
                keys = AxisInputs(
                    1, thread_values.column_iota(columns.size, first_key + columns.start)
                )
            if rows := value.rows("k"):
                assert data is not None
                keys = AxisInputs.load(1, keys.index, data.keys.at[:, columns], rows)
            if data is not None:
                pairs = data.load_pairs(value, columns)
            return TileInputs(queries.side, keys, queries.numbers, pairs)

        return problem.score.apply(s, problem.scale, pair_at)

    def answers(self, numbers: list[Any], masked: bool, squares: Any = None) -> list[jax.Array]:
        """Of a mask that has been asked, of these parts of a block or some squares of them: to be loaded a while
        before."""
        if not (masked and self.schedule.problem.asked):
            return []
        batch, _, row = self.tile.place
        load = functools.partial(mask_bits.load_bits, self.arrays.inputs.answers, batch, row)
        return [word for x in numbers for word in load(x, self.me, squares=squares)]

    def hide(
        self,
        s: jax.Array,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
        answers: Sequence[jax.Array],
    ) -> jax.Array:
        """-inf where a row does not see a key."""
        if self.schedule.problem.mask is None:
            return self.hide_after(s, first_key)
        if answers:
            return masking.apply_bits(s, answers)
        return self.hide_unseen(s, first_key, queries, data)

    def hide_after(self, s: jax.Array, first_key: Any) -> jax.Array:
        problem, rows = self.schedule.problem, self.shape[:1]
        if problem.offset is None:
            last = plgpu.layout_cast(jnp.full(rows, problem.kv_len - 1), ROW_LAYOUT)
        else:
            row = layouts.index(self.shape, 0, self.first_row + problem.offset)
            last = jnp.minimum(row, problem.kv_len - 1)
        return masking.mask_after(s, last - first_key)

    def hide_unseen(
        self, s: jax.Array, first_key: Any, queries: RowInputs, data: KvBlockInputs | None
    ) -> jax.Array:
        """The mask itself; the first row of the data of keys is their index, or kv_len and more."""
        problem = self.schedule.problem
        visible = problem.mask.visible
        k_end = problem.kv_len if problem.kv_len % self.shape[1] else None
        if problem.mask.sees_a_range:
            some = AxisInputs(1, thread_values.column_iota(PIECE_COLUMNS, first_key))
            pair = TileInputs(queries.side, some, queries.numbers)
            return problem.mask.hide_outside_range(s, pair, first_key, k_end)
        assert data is not None

        def pair_at(columns: Any) -> TileInputs:
            some = data.keys.at[:, columns]
            index = layouts.load_row(1, some.at[0], I32)
            keys = AxisInputs.load(1, index, some, visible.rows("k"))
            pairs = data.load_pairs(visible, columns)
            return TileInputs(queries.side, keys, queries.numbers, pairs)

        return problem.mask.hide(s, pair_at, k_end)

    def drop(
        self,
        p: jax.Array,
        keys: Any,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
    ) -> jax.Array:
        """These keys of a block, with 0 for what is dropped; the output makes up for the rest."""
        dropped = self.schedule.problem.dropout
        if dropped is None:
            return p
        if dropped.given:
            assert data is not None
            columns = layouts.load_row(1, data.keys.at[dropped.key.place + 1, keys], I32)
        else:
            columns = thread_values.column_iota(keys.size, first_key + keys.start)
        p = jnp.maximum(dropped.negate(p, queries.row_keys, columns, 1), 0.0)
        if dropped.given:
            thread_values.fence_before_wgmma_wait(
                layouts.fold_octets(jnp.add, p)
            )  # before the positions are released
        return p
