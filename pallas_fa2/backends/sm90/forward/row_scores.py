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
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90 import mask_bits
from pallas_fa2.backends.sm90.forward.memory import Arrays, SharedStorage
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule, QueryTile
from pallas_fa2.backends.sm90.primitives import layouts, masking, thread_values
from pallas_fa2.backends.sm90.primitives.layouts import ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.named_barriers import WarpgroupTurns
from pallas_fa2.backends.sm90.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.backends.sm90.primitives.tile_ops import TILE_OPS
from pallas_fa2.ir.tile_functions import (
    PIECE_COLUMNS,
    ArgSource,
    AxisInputs,
    TileFunction,
    TileInputs,
)


class SoftmaxState(NamedTuple):
    """Of the softmax of 64 rows so far."""

    reference: jax.Array  # [64], subtracted from the scores in base 2
    row_sum: jax.Array  # [64, 8], the sum of each thread's columns


class RowInputs(NamedTuple):
    """What masks, scores and dropout read of the rows, and of their head."""

    side: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    row_keys: RowKeys | None


class KvBlockInputs(NamedTuple):
    """What masks and scores read of a block of keys."""

    keys: Any  # [1 + rows, keys], or None
    pairwise: Mapping[ArgSource, PairwiseTile]

    def load_pairwise(self, function: TileFunction, columns: Any) -> dict[ArgSource, jax.Array]:
        """Of some columns, what the function reads."""
        return {
            s: self.pairwise[s].load(columns.start, columns.size, s.dtype)
            for s in function.pairwise_inputs
        }


@dataclasses.dataclass(frozen=True)
class RowScores:
    """64 query rows of one warpgroup: the data that come with them and with keys, and their use."""

    tile: QueryTile
    arrays: Arrays
    memory: SharedStorage
    q: Any  # [64, H], in shared memory or registers
    q_slot: Any  # of these queries, among the buffers of all warpgroups
    kv_step0: Any  # of this tile, in the rings of keys and values
    aux_step0: Any  # in those of data

    @property
    def schedule(self) -> ForwardSchedule:
        return self.tile.schedule

    @property
    def warpgroup(self) -> Any:
        """The warpgroup. One number that ptxas knows nothing of holds fewer registers through the loops."""
        return arithmetic.div(self.q_slot, self.schedule.config.q_stages)

    @property
    def turns(self) -> WarpgroupTurns:
        return WarpgroupTurns(self.warpgroup, self.schedule.config.warpgroups)

    @property
    def shape(self) -> tuple[int, int]:
        return layouts.ROWS_PER_WARPGROUP, self.schedule.config.block_kv

    @property
    def first_row(self) -> Any:
        return self.tile.first_row + self.warpgroup * self.schedule.config.rows_per_warpgroup

    @property
    def masked(self) -> bool:
        """Whether there are blocks that some row sees only a part of."""
        problem = self.schedule.spec
        cut = problem.causal or problem.kv_len % self.shape[1] != 0
        return cut or problem.mask is not None

    def row_inputs(self, masked: bool) -> RowInputs:
        """To be loaded a while before it is needed."""
        problem = self.schedule.spec
        sources, indexed = problem.token_inputs("q", masked), problem.reads_index("q", masked)
        numbers = problem.head_inputs(masked)
        if not (sources or indexed or numbers or problem.dropout):
            return RowInputs(AxisInputs(0), {}, None)
        # Where they lie is computed here: it would hold registers through the loops.
        tile = dataclasses.replace(self.tile, tile_id=lax.optimization_barrier(self.tile.tile_id))
        (batch, head, _), data = tile.coordinates, self.arrays.inputs.aux
        first_row = dataclasses.replace(self, tile=tile).first_row
        rows = pl.ds(first_row, self.shape[0])
        index = (
            layouts.index(self.shape, 0, first_row + problem.q_index_offset) if indexed else None
        )
        side = load_axis_inputs(TILE_OPS, 0, index, data.q.at[batch, :, rows], sources)
        row_keys = None
        if problem.dropout is not None:
            words = (data.row_keys.at[batch, head, i, rows] for i in range(2))
            row_keys = RowKeys(*(layouts.load_row(0, x, I32) for x in words))
        return RowInputs(side, data.head_scalars.load(batch, head, numbers), row_keys)

    def key_index_of(self, t: Any) -> list[Any]:
        """Of the parts of the block of keys that is visited as the t-th: to be loaded a while before they are needed."""
        return self.arrays.kv_block(self.tile, t)

    def first_key(self, t: Any) -> Any:
        """Of a block in parts, that of the first: nobody asks for it."""
        return self.key_index_of(t)[0] * self.schedule.kv_entry_size

    @property
    def aux_pipelines(self) -> list[Pipeline]:
        """Of data of keys, if there are any, and of pairs."""
        keys = [] if self.memory.key_aux is None else [self.memory.key_aux_pipeline]
        return [*keys, *self.memory.pairwise_pipelines(self.warpgroup)]

    def aux_step(self, t: Any) -> Any:
        """Of block t, in these rings."""
        return self.aux_step0 + self.tile.aux_index(t)

    def wait_for_aux(self, t: Any, masked: bool) -> KvBlockInputs | None:
        """Of block t."""
        problem = self.schedule.spec
        if not problem.loads_kv_aux(masked):
            return None
        found = [
            array for ring in self.aux_pipelines for array in ring.consumer_wait(self.aux_step(t))
        ]
        keys = None if self.memory.key_aux is None else found.pop(0)
        return KvBlockInputs(
            keys, dict(zip(problem.pairwise_inputs(), map(PairwiseTile, found), strict=True))
        )

    def release_aux(self, t: Any, statistics: SoftmaxState) -> None:
        """Once the statistics are known. An arrival may overtake what a warp still reads from shared
        memory, which WGMMA delays, and half of a warp's reads then find the next block's data."""
        thread_values.fence_before_wgmma_wait(statistics.row_sum)
        for ring in self.aux_pipelines:
            ring.consumer_release(self.aux_step(t))

    def aux_from_gmem(self, first_key: Any) -> KvBlockInputs | None:
        """Of keys of a repeated tile."""
        problem, data = self.schedule.spec, self.arrays.inputs.aux
        if not problem.loads_kv_aux():
            return None
        (batch, head, _), keys = (
            self.tile.coordinates,
            pl.ds(first_key, self.schedule.config.retry_block_kv),
        )
        rows = pl.ds(self.first_row, self.shape[0])

        def pairs(source: ArgSource) -> PairwiseTile:
            array = layouts.index_broadcast(data.pairwise[source.position], batch, head, rows, keys)
            return PairwiseTile(array, is_swizzled=False)

        return KvBlockInputs(
            data.k.at[batch, :, keys], {s: pairs(s) for s in problem.pairwise_inputs()}
        )

    def apply_score(
        self,
        s: jax.Array,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
    ) -> tuple[jax.Array, float]:
        """What score functions make of some keys' scores, and the factor that brings it to base 2."""
        problem = self.schedule.spec
        if problem.score is None:
            return s, problem.scale * LOG2E

        value = problem.score.value

        def pair_at(columns: Any) -> TileInputs:
            keys, pairs = AxisInputs(1), {}
            if value.reads_index("k"):
                keys = AxisInputs(
                    1, thread_values.column_iota(columns.size, first_key + columns.start)
                )
            if rows := value.token_inputs("k"):
                assert data is not None
                keys = load_axis_inputs(TILE_OPS, 1, keys.index, data.keys.at[:, columns], rows)
            if data is not None:
                pairs = data.load_pairwise(value, columns)
            return TileInputs(queries.side, keys, queries.head_scalars, pairs)

        return problem.score.apply(s, problem.scale, pair_at)

    def load_mask_bits(
        self, numbers: list[Any], masked: bool, squares: Any = None
    ) -> list[jax.Array]:
        """Of a mask that has been asked, of these parts of a block or some squares of them: to be loaded a while
        before."""
        if not (masked and self.schedule.spec.uses_mask_bits):
            return []
        batch, _, row = self.tile.coordinates
        load = functools.partial(mask_bits.load_bits, self.arrays.inputs.mask_bits, batch, row)
        return [word for x in numbers for word in load(x, self.warpgroup, squares=squares)]

    def apply_mask(
        self,
        s: jax.Array,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
        answers: Sequence[jax.Array],
    ) -> jax.Array:
        """-inf where a row does not see a key."""
        if self.schedule.spec.mask is None:
            return self.apply_causal(s, first_key)
        if answers:
            return masking.apply_bits(s, answers)
        return self.apply_mask_fn(s, first_key, queries, data)

    def apply_causal(self, s: jax.Array, first_key: Any) -> jax.Array:
        problem, rows = self.schedule.spec, self.shape[:1]
        if problem.causal_offset is None:
            last = plgpu.layout_cast(jnp.full(rows, problem.kv_len - 1), ROW_LAYOUT)
        else:
            row = layouts.index(self.shape, 0, self.first_row + problem.causal_offset)
            last = jnp.minimum(row, problem.kv_len - 1)
        return masking.mask_after(s, last - first_key)

    def apply_mask_fn(
        self, s: jax.Array, first_key: Any, queries: RowInputs, data: KvBlockInputs | None
    ) -> jax.Array:
        """The mask itself; the first row of the data of keys is their index, or kv_len and more."""
        problem = self.schedule.spec
        visible = problem.mask.visible
        k_end = problem.kv_len if problem.kv_len % self.shape[1] else None
        if problem.mask.is_key_interval:
            some = AxisInputs(1, thread_values.column_iota(PIECE_COLUMNS, first_key))
            pair = TileInputs(queries.side, some, queries.head_scalars)
            return problem.mask.apply_interval(s, pair, first_key, k_end)
        assert data is not None

        def pair_at(columns: Any) -> TileInputs:
            some = data.keys.at[:, columns]
            index = layouts.load_row(1, some.at[0], I32)
            keys = load_axis_inputs(TILE_OPS, 1, index, some, visible.token_inputs("k"))
            pairs = data.load_pairwise(visible, columns)
            return TileInputs(queries.side, keys, queries.head_scalars, pairs)

        return problem.mask.apply(s, pair_at, k_end)

    def apply_dropout(
        self,
        p: jax.Array,
        keys: Any,
        first_key: Any,
        queries: RowInputs,
        data: KvBlockInputs | None,
    ) -> jax.Array:
        """These keys of a block, with 0 for what is dropped; the output makes up for the rest."""
        dropped = self.schedule.spec.dropout
        if dropped is None:
            return p
        if dropped.explicit_positions:
            assert data is not None
            columns = layouts.load_row(
                1, data.keys.at[dropped.key_positions.position + 1, keys], I32
            )
        else:
            columns = thread_values.column_iota(keys.size, first_key + keys.start)
        p = jnp.maximum(dropped.mark_dropped(p, queries.row_keys, columns, 1), 0.0)
        if dropped.explicit_positions:
            thread_values.fence_before_wgmma_wait(
                layouts.fold_octets(jnp.add, p)
            )  # before the positions are released
        return p
