"""Score functions, masks and dropout on 64 rows against one block of keys."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2.backends.common import mask_bits
from pallas_fa2.backends.common.primitives import layouts, masking, thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.row_mods import KeyBlockInputs, RowInputs, RowMods
from pallas_fa2.backends.sm90.forward.rows import WarpgroupRows
from pallas_fa2.backends.sm90.forward.softmax import SoftmaxState
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.control_flow import cond, rematerialize, when
from pallas_fa2.ir.tile_functions import AxisInputs


@dataclasses.dataclass(frozen=True)
class ScoreMask:
    """The mods of 64 rows against one block of keys, and the pipelines that bring what they read of the keys."""

    rows: WarpgroupRows
    t: Scalar  # which of the blocks visited it is
    mods: RowMods

    @classmethod
    def load(cls, rows: WarpgroupRows, t: Scalar, masked: bool) -> "ScoreMask":
        """Load what is read of the rows, a while before it is needed; `masked`: whether by the mask as well."""
        row_inputs = load_row_inputs(rows, masked)
        return cls._of(rows, t, rows.load_first_key(t), row_inputs)

    @classmethod
    def load_for_retry(cls, rows: WarpgroupRows, t: Scalar, first_key: Scalar) -> "ScoreMask":
        """Load what is read of the rows, for some keys of a retried tile. Their aux inputs stay in device memory."""
        row_inputs, spec = load_row_inputs(rows, masked=True), rows.spec
        key_inputs = None
        if spec.loads_kv_aux():
            batch, head, _ = rows.tile.compute_coordinates()
            keys = pl.ds(first_key, rows.config.retry_block_kv)
            place = (batch, head), rows.compute_first_row(), keys
            key_inputs = KeyBlockInputs.in_gmem(spec, rows.arrays.inputs.aux, *place)
        return cls._of(rows, t, first_key, row_inputs, key_inputs)

    @classmethod
    def _of(
        cls,
        rows: WarpgroupRows,
        t: Scalar,
        first_key: Scalar,
        row_inputs: RowInputs,
        key_inputs: KeyBlockInputs | None = None,
    ) -> "ScoreMask":
        block_kv, first_row, load_kv_len = rows.config.block_kv, rows.load_first_position, None
        if rows.spec.in_cache:
            load_kv_len = functools.partial(rows.load_entry_field, "kv_len")
        mods = RowMods(
            rows.spec, block_kv, first_row, first_key, row_inputs, key_inputs, load_kv_len
        )
        return cls(rows, t, mods)

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
        mods = dataclasses.replace(self.mods, key_inputs=KeyBlockInputs(keys, pairwise))
        return dataclasses.replace(self, mods=mods)

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
        return self.mods.apply_score(s)

    def apply_mask(self, s: jax.Array, bits: Sequence[jax.Array] = ()) -> jax.Array:
        """Set scores to -inf where a row does not see a key, by the mask's bits if they are precomputed."""
        return self.mods.apply_mask(s, bits)

    def apply_mask_if_partial(self, s: jax.Array, bits: Sequence[jax.Array]) -> jax.Array:
        """Mask the scores of a block of which it is not known when traced whether it is partial."""
        if self.rows.spec.mask is None:
            return self.apply_mask(s) if self.rows.schedule.has_partial_blocks else s

        def mask() -> jax.Array:
            loaded = self.wait_for_aux(masked=True) if self.mods.key_inputs is None else self
            return loaded.apply_mask(s, bits)

        return cond(self.rows.tile.is_partial(self.t), mask, lambda: s)

    def apply_dropout(self, p: jax.Array, keys: Any) -> jax.Array:
        """Set P of some keys of the block to 0 where it is dropped; the epilogue scales up the rest."""
        p = self.mods.apply_dropout(p, keys)
        dropout = self.rows.spec.dropout
        if dropout is not None and dropout.explicit_positions:
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
    if not (spec.mask or spec.score or spec.dropout):
        return RowInputs(AxisInputs(0), {}, None)
    # Addresses are computed here: they would hold registers through the loops.
    tile = dataclasses.replace(rows.tile, tile_id=rematerialize(rows.tile.tile_id))
    batch, head, _ = tile.compute_coordinates()
    if spec.in_cache and rows.arrays.inputs.aux.head_scalars.batch > 1:
        batch = rows.arrays.load_batch(tile)
    first_row = dataclasses.replace(rows, tile=tile).load_first_position()
    return RowInputs.load(spec, rows.arrays.inputs.aux, (batch, head), first_row, masked)
