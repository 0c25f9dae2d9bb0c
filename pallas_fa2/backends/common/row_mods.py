"""Score functions, masks and dropout on tiles of 64 query rows in registers, and what they read in device memory."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, LOG2E
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts, masking, thread_values
from pallas_fa2.backends.common.primitives.layouts import ROW_LAYOUT, ROWS_PER_WARPGROUP
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.tile_ops import TILE_OPS
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.backends.common.tile_gradients import softmax_gradient, times_derivative
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
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

    @classmethod
    def load(
        cls,
        spec: KernelSpec,
        aux: AuxInputs,
        head: tuple[Scalar, Scalar],
        first_row: Scalar,
        masked: bool,
    ) -> "RowInputs":
        """Load what scores and dropout, and the mask if `masked`, read of 64 rows of `head`, (batch entry, head)."""
        sources, reads_index = spec.token_inputs("q", masked), spec.reads_index("q", masked)
        head_sources = spec.head_inputs(masked)
        if not (sources or reads_index or head_sources or spec.dropout):
            return cls(AxisInputs(0), {}, None)
        rows = pl.ds(first_row, ROWS_PER_WARPGROUP)
        index = None
        if reads_index:
            shape = ROWS_PER_WARPGROUP, PIECE_COLUMNS
            index = layouts.index(shape, 0, first_row + spec.q_index_offset)
        axis = load_axis_inputs(TILE_OPS, 0, index, aux.q.at[head[0], :, rows], sources)
        row_keys = None
        if spec.dropout is not None:
            assert aux.row_keys is not None
            words = (aux.row_keys.at[(*head, i, rows)] for i in range(2))
            row_keys = RowKeys(*(layouts.load_row(0, x, I32) for x in words))
        return cls(axis, aux.head_scalars.load(*head, head_sources), row_keys)


class KeyBlockInputs(NamedTuple):
    """What masks, scores and dropout read of a block of keys, in memory."""

    keys: Ref  # int32 [1 + rows, keys]: the first row is the keys' index
    pairwise: Mapping[ArgSource, PairwiseTile]

    @classmethod
    def in_gmem(
        cls, spec: KernelSpec, aux: AuxInputs, head: tuple, first_row: Scalar, keys: Slice
    ) -> "KeyBlockInputs":
        """Return where they lie in device memory, for 64 rows of `head`, (batch entry, head)."""
        rows = pl.ds(first_row, ROWS_PER_WARPGROUP)

        def pairwise(source: ArgSource) -> PairwiseTile:
            assert source.position is not None
            array = layouts.index_broadcast(aux.pairwise[source.position], *head, rows, keys)
            return PairwiseTile(array, is_swizzled=False)

        tiles = {source: pairwise(source) for source in spec.pairwise_inputs()}
        return cls(aux.k.at[head[0], :, keys], tiles)

    def load_pairwise(self, function: TileFunction, columns: Any) -> dict[ArgSource, jax.Array]:
        """Load what the function reads of some columns."""
        return {
            s: self.pairwise[s].load(columns.start, columns.size, s.dtype)
            for s in function.pairwise_inputs
        }


@dataclasses.dataclass(frozen=True)
class RowMods:
    """The score functions, the mask and the dropout of 64 query rows against one block of keys, or some of its keys."""

    spec: KernelSpec
    block_kv: int
    compute_first_row: Callable[[], Scalar]  # emits instructions at each call
    first_key: Scalar
    row_inputs: RowInputs
    key_inputs: KeyBlockInputs | None = None
    load_kv_len: Callable[[], Scalar] | None = None  # how many keys exist, if that is data

    @classmethod
    def load(
        cls,
        spec: KernelSpec,
        aux: AuxInputs | None,
        head: tuple[Scalar, Scalar],
        first_row: Scalar,
        keys: Slice,
        block_kv: int,
        masked: bool,
    ) -> "RowMods":
        """Load what scores and dropout, and the mask if `masked`, read of 64 rows of `head`, (batch entry, head).

        What they read of `keys`, all or some of a block of `block_kv`, and of pairs stays in device memory.
        """
        row_inputs, key_inputs = RowInputs(AxisInputs(0), {}, None), None
        if aux is not None:
            row_inputs = RowInputs.load(spec, aux, head, first_row, masked)
            key_inputs = KeyBlockInputs.in_gmem(spec, aux, head, first_row, keys)
        return cls(spec, block_kv, lambda: first_row, keys.start, row_inputs, key_inputs)

    def apply_score(self, s: jax.Array) -> tuple[jax.Array, float]:
        """Apply the score functions to Q K^T; return also the factor that brings the scores to base 2."""
        spec = self.spec
        if spec.score is None:
            return s, spec.scale * LOG2E
        return spec.score.apply(s, spec.scale, self._load_score_inputs)

    def _load_score_inputs(self, columns: Any) -> TileInputs:
        """Load what score functions, and so their derivatives, read of some columns."""
        value, keys, pairs = self.spec.score.value, AxisInputs(1), {}
        if value.reads_index("k"):
            first = self.first_key + columns.start
            keys = AxisInputs(1, thread_values.column_iota(columns.size, first))
        if sources := value.token_inputs("k"):
            assert self.key_inputs is not None
            rows = self.key_inputs.keys.at[:, columns]
            keys = load_axis_inputs(TILE_OPS, 1, keys.index, rows, sources)
        if self.key_inputs is not None:
            pairs = self.key_inputs.load_pairwise(value, columns)
        return TileInputs(self.row_inputs.axis, keys, self.row_inputs.head_scalars, pairs)

    def apply_mask(self, s: jax.Array, bits: Sequence[jax.Array] = ()) -> jax.Array:
        """Set scores to -inf where a row does not see a key, by the mask's bits if they are precomputed."""
        if self.spec.mask is None:
            return self._apply_causal(s)
        if bits:
            return masking.apply_bits(s, bits)
        return self._apply_mask_fn(s)

    def apply_dropout(self, p: jax.Array, keys: Any) -> jax.Array:
        """Set P of some keys of the block to 0 where it is dropped; the epilogue scales up the rest."""
        return p if self.spec.dropout is None else jnp.maximum(self.mark_dropped(p, keys), 0.0)

    def mark_dropped(self, p: jax.Array, keys: Any) -> jax.Array:
        """Return P of some keys of the block, negative where it is dropped."""
        dropout = self.spec.dropout
        if dropout is None:
            return p
        if dropout.explicit_positions:
            assert self.key_inputs is not None
            positions = self.key_inputs.keys.at[dropout.key_positions.position + 1, keys]
            columns = layouts.load_row(1, positions, I32)
        else:
            columns = thread_values.column_iota(keys.size, self.first_key + keys.start)
        return dropout.mark_dropped(p, self.row_inputs.row_keys, columns, 1)

    def ds(self, p: jax.Array, s: jax.Array, dp: jax.Array, delta: jax.Array) -> jax.Array:
        """Return dS from S = Q K^T, not scaled, and dP.

        P is negative where it is dropped; `delta` is -delta of each row.
        """
        spec = self.spec
        ds = softmax_gradient(spec, p, dp, layouts.broadcast_rows(delta, p.shape))
        if spec.score is None:
            return ds
        pieces = []
        for columns in layouts.slices(p.shape[1], PIECE_COLUMNS):
            p_piece, s_piece, ds_piece = (layouts.slice_columns(x, columns) for x in (p, s, ds))
            inputs = self._load_score_inputs(columns)
            derivative, _ = spec.score.derivatives(s_piece, spec.scale, inputs)
            pieces.append(times_derivative(ds_piece, p_piece, derivative))
        return lax.concatenate(pieces, 1)

    @property
    def _visible_end(self) -> int | None:
        """The end of the keys if it lies within a block."""
        kv_len = self.spec.kv_len
        return kv_len if kv_len % self.block_kv else None

    def _apply_causal(self, s: jax.Array) -> jax.Array:
        spec, shape = self.spec, s.shape
        kv_len = spec.kv_len if self.load_kv_len is None else self.load_kv_len()
        if spec.causal_offset is None:
            last = plgpu.layout_cast(jnp.full(shape[:1], kv_len - 1), ROW_LAYOUT)
        else:
            row = layouts.index(shape, 0, self.compute_first_row() + spec.causal_offset)
            last = jnp.minimum(row, kv_len - 1)
        if spec.window_offset is None:
            return masking.mask_after(s, last - self.first_key)
        first = layouts.index(shape, 0, self.compute_first_row() + spec.window_offset)
        return masking.mask_outside(s, first - self.first_key, last - self.first_key)

    def _apply_mask_fn(self, s: jax.Array) -> jax.Array:
        """Evaluate the mask; keys past the end have an index of kv_len or more."""
        mask, row_inputs, first_key = self.spec.mask, self.row_inputs, self.first_key
        if mask.is_key_interval:
            keys = AxisInputs(1, thread_values.column_iota(PIECE_COLUMNS, first_key))
            inputs = TileInputs(row_inputs.axis, keys, row_inputs.head_scalars)
            return mask.apply_interval(s, inputs, first_key, self._visible_end)
        key_inputs = self.key_inputs
        assert key_inputs is not None

        def inputs_at(columns: Any) -> TileInputs:
            rows = key_inputs.keys.at[:, columns]
            index = layouts.load_row(1, rows.at[0], I32)
            sources = mask.visible.token_inputs("k")
            keys = load_axis_inputs(TILE_OPS, 1, index, rows, sources)
            pairs = key_inputs.load_pairwise(mask.visible, columns)
            return TileInputs(row_inputs.axis, keys, row_inputs.head_scalars, pairs)

        return mask.apply(s, inputs_at, self._visible_end)
