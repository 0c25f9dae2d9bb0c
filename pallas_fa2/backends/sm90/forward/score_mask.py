"""Score functions, masks and dropout on 64 rows against one block of keys."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common import mask_bits
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.primitives import layouts, masking, thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.tile_ops import TILE_OPS
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90.forward.rows import WarpgroupRows
from pallas_fa2.backends.sm90.forward.softmax import SoftmaxState
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.control_flow import cond, when
from pallas_fa2.ir.tile_functions import (
    PIECE_COLUMNS,
    ArgSource,
    AxisInputs,
    TileFunction,
    TileInputs,
)


class RowInputs(NamedTuple):
    """What masks, scores and dropout read of the rows and of their head, in registers."""

    axis: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    row_keys: RowKeys | None


class KvBlockInputs(NamedTuple):
    """What masks and scores read of a block of keys, in memory."""

    keys: Ref  # int32 [1 + rows, keys], or None
    pairwise: Mapping[ArgSource, PairwiseTile]

    def load_pairwise(self, function: TileFunction, columns: Any) -> dict[ArgSource, jax.Array]:
        """Load what the function reads of some columns."""
        return {
            s: self.pairwise[s].load(columns.start, columns.size, s.dtype)
            for s in function.pairwise_inputs
        }


@dataclasses.dataclass(frozen=True)
class ScoreMask:
    """The score functions, the mask and the dropout of 64 rows against one block of keys, with what they read."""

    rows: WarpgroupRows
    t: Scalar  # which of the blocks visited it is
    first_key: Scalar
    row_inputs: RowInputs
    aux: KvBlockInputs | None = None

    @classmethod
    def load(cls, rows: WarpgroupRows, t: Scalar, masked: bool) -> "ScoreMask":
        """Load what is read of the rows, a while before it is needed; `masked`: whether by the mask as well."""
        row_inputs = load_row_inputs(rows, masked)
        return cls(rows, t, rows.load_first_key(t), row_inputs)

    @classmethod
    def load_for_retry(cls, rows: WarpgroupRows, t: Scalar, first_key: Scalar) -> "ScoreMask":
        """Load what is read of the rows, for some keys of a retried tile. Their aux inputs stay in device memory."""
        row_inputs = load_row_inputs(rows, masked=True)
        return cls(rows, t, first_key, row_inputs, _aux_in_gmem(rows, first_key))

    @property
    def _visible_end(self) -> int | None:
        """The end of the keys if it lies within a block."""
        kv_len = self.rows.spec.kv_len
        return kv_len if kv_len % self.rows.config.block_kv else None

    def compute_aux_pipelines(self) -> list[Pipeline]:
        memory = self.rows.memory
        key_aux = [] if memory.key_aux is None else [memory.key_aux_pipeline]
        return [*key_aux, *memory.pairwise_pipelines(self.rows.compute_warpgroup())]

    def compute_aux_step(self) -> Scalar:
        return self.rows.position.aux_step + self.rows.tile.compute_aux_index(self.t)

    def wait_for_aux(self, masked: bool) -> "ScoreMask":
        """Wait for the aux inputs that come with the block, if scores, or the mask where `masked`, read any."""
        spec = self.rows.spec
        if not spec.loads_kv_aux(masked):
            return self
        buffers = [
            buffer
            for pipeline in self.compute_aux_pipelines()
            for buffer in pipeline.consumer_wait(self.compute_aux_step())
        ]
        keys = None if self.rows.memory.key_aux is None else buffers.pop(0)
        tiles = map(PairwiseTile, buffers)
        pairwise = dict(zip(spec.pairwise_inputs(), tiles, strict=True))
        return dataclasses.replace(self, aux=KvBlockInputs(keys, pairwise))

    def release_aux(self, softmax: SoftmaxState) -> None:
        """Release the aux inputs of the block, once its softmax is known.

        An arrival may overtake what a warp still reads from shared memory, which WGMMA delays, and half of a
        warp's reads then find the next block's inputs (docs/decisions/0045-aux-buffer-race.md).
        """
        thread_values.fence_before_wgmma_wait(softmax.row_sum)
        for pipeline in self.compute_aux_pipelines():
            pipeline.consumer_release(self.compute_aux_step())

    def release_first_aux(self, softmax: SoftmaxState) -> None:
        """Release the aux inputs of a block of which it is not known when traced whether it is partial."""
        spec = self.rows.spec
        if spec.loads_kv_aux(masked=False):
            self.release_aux(softmax)
        elif spec.loads_kv_aux():
            when(self.rows.tile.is_partial(self.t))(lambda: self.release_aux(softmax))

    def apply_score(self, s: jax.Array) -> tuple[jax.Array, float]:
        """Apply the score functions to Q K^T; return also the factor that brings the scores to base 2."""
        spec = self.rows.spec
        if spec.score is None:
            return s, spec.scale * LOG2E

        value = spec.score.value

        def inputs_for_columns(columns: Any) -> TileInputs:
            keys, pairs = AxisInputs(1), {}
            if value.reads_index("k"):
                first = self.first_key + columns.start
                keys = AxisInputs(1, thread_values.column_iota(columns.size, first))
            if sources := value.token_inputs("k"):
                assert self.aux is not None
                keys = load_axis_inputs(
                    TILE_OPS, 1, keys.index, self.aux.keys.at[:, columns], sources
                )
            if self.aux is not None:
                pairs = self.aux.load_pairwise(value, columns)
            return TileInputs(self.row_inputs.axis, keys, self.row_inputs.head_scalars, pairs)

        return spec.score.apply(s, spec.scale, inputs_for_columns)

    def apply_mask(self, s: jax.Array, bits: Sequence[jax.Array] = ()) -> jax.Array:
        """Set scores to -inf where a row does not see a key, by the mask's bits if they are precomputed."""
        if self.rows.spec.mask is None:
            return self._apply_causal(s)
        if bits:
            return masking.apply_bits(s, bits)
        return self._apply_mask_fn(s)

    def apply_mask_if_partial(self, s: jax.Array, bits: Sequence[jax.Array]) -> jax.Array:
        """Mask the scores of a block of which it is not known when traced whether it is partial."""
        if self.rows.spec.mask is None:
            return self.apply_mask(s) if self.rows.schedule.has_partial_blocks else s

        def mask() -> jax.Array:
            loaded = self.wait_for_aux(masked=True) if self.aux is None else self
            return loaded.apply_mask(s, bits)

        return cond(self.rows.tile.is_partial(self.t), mask, lambda: s)

    def _apply_causal(self, s: jax.Array) -> jax.Array:
        spec, shape = self.rows.spec, self.rows.score_shape
        if spec.causal_offset is None:
            last = plgpu.layout_cast(jnp.full(shape[:1], spec.kv_len - 1), ROW_LAYOUT)
        else:
            row = layouts.index(shape, 0, self.rows.compute_first_row() + spec.causal_offset)
            last = jnp.minimum(row, spec.kv_len - 1)
        return masking.mask_after(s, last - self.first_key)

    def _apply_mask_fn(self, s: jax.Array) -> jax.Array:
        """Evaluate the mask. The first row of the keys' aux inputs is their index; it is kv_len or more for keys
        past the end."""
        mask, row_inputs, first_key = self.rows.spec.mask, self.row_inputs, self.first_key
        if mask.is_key_interval:
            keys = AxisInputs(1, thread_values.column_iota(PIECE_COLUMNS, first_key))
            inputs = TileInputs(row_inputs.axis, keys, row_inputs.head_scalars)
            return mask.apply_interval(s, inputs, first_key, self._visible_end)
        aux = self.aux
        assert aux is not None

        def inputs_for_columns(columns: Any) -> TileInputs:
            key_aux = aux.keys.at[:, columns]
            index = layouts.load_row(1, key_aux.at[0], I32)
            keys = load_axis_inputs(TILE_OPS, 1, index, key_aux, mask.visible.token_inputs("k"))
            pairs = aux.load_pairwise(mask.visible, columns)
            return TileInputs(row_inputs.axis, keys, row_inputs.head_scalars, pairs)

        return mask.apply(s, inputs_for_columns, self._visible_end)

    def apply_dropout(self, p: jax.Array, keys: Any) -> jax.Array:
        """Set P of some keys of the block to 0 where it is dropped; the epilogue scales up the rest."""
        dropout = self.rows.spec.dropout
        if dropout is None:
            return p
        if dropout.explicit_positions:
            assert self.aux is not None
            positions = self.aux.keys.at[dropout.key_positions.position + 1, keys]
            columns = layouts.load_row(1, positions, I32)
        else:
            columns = thread_values.column_iota(keys.size, self.first_key + keys.start)
        p = jnp.maximum(dropout.mark_dropped(p, self.row_inputs.row_keys, columns, 1), 0.0)
        if dropout.explicit_positions:
            # before the positions are released
            thread_values.fence_before_wgmma_wait(layouts.fold_octets(jnp.add, p))
        return p


def load_mask_bits(
    rows: WarpgroupRows, block: Scalar, fragments: Sequence[Scalar] | None = None
) -> list[jax.Array]:
    """Load the precomputed bits of a key block, or of some fragments of it, a while before they are needed.

    Return none where the mask is not precomputed.
    """
    if not rows.spec.uses_mask_bits:
        return []
    batch, _, q_tile = rows.tile.compute_coordinates()
    bits, warpgroup = rows.arrays.inputs.mask_bits, rows.compute_warpgroup()
    return mask_bits.load_bits(bits, batch, q_tile, block, warpgroup, fragments=fragments)


def masked_accumulator(rows: WarpgroupRows, bits: Sequence[jax.Array]) -> jax.Array | None:
    """Return 0 and -inf by a mask's bits, for a product to be added to, or None if it begins at 0.

    (Scales are positive, and -inf remains -inf; score functions might do anything with it.)
    """
    if not bits or rows.spec.score is not None:
        return None
    return masking.apply_bits(layouts.splat_constant(0.0, rows.score_shape, ACC_LAYOUT), bits)


def load_row_inputs(rows: WarpgroupRows, masked: bool) -> RowInputs:
    """Load what scores and dropout, and the mask if `masked`, read of the rows."""
    spec = rows.spec
    sources, reads_index = spec.token_inputs("q", masked), spec.reads_index("q", masked)
    head_sources = spec.head_inputs(masked)
    if not (sources or reads_index or head_sources or spec.dropout):
        return RowInputs(AxisInputs(0), {}, None)
    # Addresses are computed here: they would hold registers through the loops.
    tile = dataclasses.replace(rows.tile, tile_id=lax.optimization_barrier(rows.tile.tile_id))
    (batch, head, _), aux = tile.compute_coordinates(), rows.arrays.inputs.aux
    first_row = dataclasses.replace(rows, tile=tile).compute_first_row()
    row_range = pl.ds(first_row, layouts.ROWS_PER_WARPGROUP)
    index = None
    if reads_index:
        index = layouts.index(rows.score_shape, 0, first_row + spec.q_index_offset)
    axis = load_axis_inputs(TILE_OPS, 0, index, aux.q.at[batch, :, row_range], sources)
    row_keys = None
    if spec.dropout is not None:
        words = (aux.row_keys.at[batch, head, i, row_range] for i in range(2))
        row_keys = RowKeys(*(layouts.load_row(0, x, I32) for x in words))
    return RowInputs(axis, aux.head_scalars.load(batch, head, head_sources), row_keys)


def _aux_in_gmem(rows: WarpgroupRows, first_key: Scalar) -> KvBlockInputs | None:
    """Return the aux inputs of keys of a retried tile, in device memory."""
    spec, aux = rows.spec, rows.arrays.inputs.aux
    if not spec.loads_kv_aux():
        return None
    batch, head, _ = rows.tile.compute_coordinates()
    keys, row_range = pl.ds(first_key, rows.config.retry_block_kv), rows.compute_row_range()

    def pairwise_tile(source: ArgSource) -> PairwiseTile:
        array: Any = aux.pairwise[source.position]
        tile = layouts.index_broadcast(array, batch, head, row_range, keys)
        return PairwiseTile(tile, is_swizzled=False)

    pairwise = {source: pairwise_tile(source) for source in spec.pairwise_inputs()}
    return KvBlockInputs(aux.k.at[batch, :, keys], pairwise)
