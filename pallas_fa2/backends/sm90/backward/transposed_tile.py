"""P^T and dS^T of a step, in registers: lines 11 and 14 of Algorithm 2, with scores, masks and dropout."""

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common import mask_bits
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts, masking, thread_values
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.tile_ops import TARGET_OPS, TILE_OPS
from pallas_fa2.backends.common.primitives.types import Ref, Scalar, Slice
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, QUERY_PANEL
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.backends.sm90.backward.step_aux_grads import RowSums, StepAuxGrads
from pallas_fa2.control_flow import rematerialize
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource, AxisInputs, TileInputs
from pallas_fa2.ir.tile_values import TileValue, broadcast_to_tile


@dataclasses.dataclass(frozen=True)
class TransposedTile:
    """A warpgroup's 64 keys (rows) against some queries of a step (columns), and what scores, masks and dropout read
    of these."""

    cta: Cta
    step: Step
    warpgroup: WarpgroupIndex
    first_key: Scalar
    keys: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    lse: Ref  # -lse, [block_q], or with the queries' aux inputs [1 + rows, block_q]
    delta: Ref  # -delta, [block_q]
    mask_bits: Sequence[jax.Array]  # of each panel of queries, if the mask is precomputed
    columns: Slice  # in the step's queries
    pairwise: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})

    @classmethod
    def load(
        cls, cta: Cta, warpgroup: WarpgroupIndex, first_row: Scalar, step: Step
    ) -> "TransposedTile":
        """Load what is read of the keys, which begin at a row of the CTA's, a while before it is needed."""
        spec, aux, t = cta.schedule.spec, cta.inputs.aux, step.global_step
        lse, delta = (x.buffers_at(t)[1] for x in cta.memory.row_pipelines)
        first_key = cta.compute_first_key(step.tile) + first_row
        keys, head_scalars = AxisInputs(0), {}
        sources, indexed = (
            spec.token_inputs("k", step.masked),
            spec.reads_index("k", step.masked),
        )
        if sources or indexed:
            first = rematerialize(first_key)
            rows = aux.k.at[step.compute_head()[0], :, pl.ds(first, 64)]
            index = layouts.index((64, QUERY_PANEL), 0, first) if indexed else None
            keys = load_axis_inputs(TILE_OPS, 0, index, rows, sources)
        if scalar_sources := spec.head_inputs(step.masked):
            head_scalars = aux.head_scalars.load(*step.compute_head(), scalar_sources)
        bits, columns = _load_mask_bits(cta, warpgroup, step), pl.ds(0, cta.config.block_q)
        return cls(cta, step, warpgroup, first_key, keys, head_scalars, lse, delta, bits, columns)

    @property
    def spec(self) -> KernelSpec:
        return self.cta.schedule.spec

    def split_panel(self, panel: Slice) -> list["TransposedTile"]:
        """Divide a panel of queries into as many columns as a score function takes at once."""
        in_pieces = self.spec.score is not None or self.cta.memory.pairwise
        size = PIECE_COLUMNS if in_pieces else QUERY_PANEL
        starts = range(panel.start, panel.start + QUERY_PANEL, size)
        return [dataclasses.replace(self, columns=pl.ds(start, size)) for start in starts]

    def slice(self, tile: jax.Array) -> jax.Array:
        """Return the columns of a tile of all the step's queries."""
        return layouts.slice_columns(tile, self.columns)

    def compute_p_and_ds(
        self, panel: Slice, s: jax.Array, dp_acc: Ref, dtype: DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """Return P^T and dS^T of a panel, from S^T and the accumulator of dP^T, which may be in flight till then."""
        all_p, all_ds, row_sums = [], [], []
        for piece in self.split_panel(panel):
            piece_s, piece = piece.slice(s), piece.wait_for_pairwise()
            p = piece.compute_p(piece_s)
            piece.release_pairwise(p)
            p = piece.apply_dropout(p)
            ds, sums = piece.compute_ds(p, piece_s, piece.slice(dp_acc[...]))
            all_p.append(piece.zero_dropped(p).astype(dtype))
            all_ds.append(ds.astype(dtype))
            row_sums.append(sums)
        self.aux_grads.add_row_sums(row_sums)
        return concat_columns(all_p), concat_columns(all_ds)

    def _load_row(self, row_data: Ref) -> jax.Array:
        """Load a float32 value of each query."""
        columns = self.columns if len(row_data.shape) == 1 else (0, self.columns)
        return layouts.load_row(1, row_data.at[columns], jnp.float32)

    def wait_for_pairwise(self) -> "TransposedTile":
        """Return this with its pairwise inputs, once they have landed."""
        spec, loaded = self.spec, {}
        pipelines = self.cta.memory.pairwise_pipelines
        for pipeline, source in zip(pipelines, spec.pairwise_inputs(), strict=True):
            assert isinstance(self.warpgroup, int)
            half = pipeline.consumer_wait(self._compute_pairwise_step())[self.warpgroup]
            if source in spec.pairwise_inputs(self.step.masked):
                tile = PairwiseTile(half, transposed=True)
                loaded[source] = tile.load(0, PIECE_COLUMNS, source.dtype)
        return dataclasses.replace(self, pairwise=loaded)

    def _compute_pairwise_step(self) -> Scalar:
        """Compute the step of the pairwise pipelines."""
        first = self.step.global_step * self.cta.config.column_pieces
        return first + self.columns.start // PIECE_COLUMNS

    def release_pairwise(self, p: jax.Array) -> None:
        """Release pairwise inputs once P is known: an arrival may overtake reads
        (docs/decisions/0045-aux-buffer-race.md)."""
        if self.cta.memory.pairwise:
            thread_values.fence_before_wgmma_wait(p)
        for pipeline in self.cta.memory.pairwise_pipelines:
            pipeline.consumer_release(self._compute_pairwise_step())

    def load_inputs(self, columns: Slice) -> TileInputs:
        """Load what masks and scores read, of some columns of these; pairwise inputs of all."""
        q = self._load_queries(pl.ds(self.columns.start + columns.start, columns.size))
        return TileInputs(q, self.keys, self.head_scalars, self.pairwise)

    def _load_queries(self, columns: Slice) -> AxisInputs:
        spec, step, aux, rows = self.spec, self.step, self.cta.inputs.aux, self.lse
        sources, index = spec.token_inputs("q", step.masked), None
        if spec.reads_index("q", step.masked):
            first = spec.q_index_offset + step.compute_first_query() + columns.start
            index = thread_values.column_iota(cast(int, columns.size), first)
        if not sources:
            return AxisInputs(1, index)
        if aux.q is not None:
            block = pl.ds(step.compute_first_query(), self.cta.config.block_q)
            rows = aux.q.at[step.compute_head()[0], :, block]
        return load_axis_inputs(TILE_OPS, 1, index, rows.at[:, columns], sources)

    def compute_p(self, s: jax.Array) -> jax.Array:
        """Return P^T = 2^(S^T - lse) in float32, line 11."""
        spec, neg_lse = self.spec, self._load_row(self.lse)
        neg_lse_tile = layouts.broadcast_columns(neg_lse, s.shape)
        if spec.score is None:
            exponent = s * (spec.scale * LOG2E) + neg_lse_tile
        else:
            inputs = self.load_inputs(pl.ds(0, self.columns.size))
            exponent = spec.score.evaluate(s, spec.scale, inputs) + neg_lse_tile
            exponent = self._mask_tails(exponent, neg_lse)
        if self.step.masked:
            exponent = self._apply_mask(exponent)
        if spec.score is None and self._kv_tail_visible:
            # Keys past the end are zeros: they add 0 to dQ, and their dK and dV are not stored. So P need only be
            # finite; a true p is at most 1.
            exponent = jnp.minimum(exponent, 0.0)
        return jnp.exp2(exponent)

    def apply_dropout(self, p: jax.Array) -> jax.Array:
        """Return P^T, negative where it is dropped."""
        dropout = self.spec.dropout
        if dropout is None:
            return p
        aux, rows, (batch, head) = self.cta.inputs.aux, self.lse, self.step.compute_head()
        first = self.lse.shape[0] - 2
        if aux.row_keys is not None:
            block = pl.ds(self.step.compute_first_query(), self.cta.config.block_q)
            rows, first = aux.row_keys.at[batch, head, :, block], 0
        words = (rows.at[first + i, self.columns] for i in range(2))
        row_keys = RowKeys(*(layouts.load_row(1, x, jnp.int32) for x in words))
        explicit = dropout.explicit_positions
        positions = self.keys.arrays[dropout.key_positions] if explicit else self.keys.index
        return dropout.mark_dropped(p, row_keys, positions, 0)

    def zero_dropped(self, p: jax.Array) -> jax.Array:
        """Return P^T with 0 where it is dropped."""
        return p if self.spec.dropout is None else jnp.maximum(p, 0.0)

    @property
    def _kv_tail_visible(self) -> bool:
        return self.step.masked and self.cta.schedule.kv_tail_visible

    def _mask_tails(self, exponent: jax.Array, neg_lse: jax.Array) -> jax.Array:
        """Return the exponent with -inf for keys and queries past the end, where a score may be anything."""
        shape = exponent.shape
        if self._kv_tail_visible:
            key = layouts.index(shape, 0, self.first_key)
            exists = layouts.broadcast_rows(key < self.spec.kv_len, shape)
            exponent = jnp.where(exists, exponent, -jnp.inf)
        if self.spec.q_len % self.cta.config.block_q:
            exists = layouts.broadcast_columns(neg_lse != -jnp.inf, shape)
            exponent = jnp.where(exists, exponent, -jnp.inf)
        return exponent

    def _apply_mask(self, exponent: jax.Array) -> jax.Array:
        """Return the exponent with -inf where a query does not see a key."""
        spec = self.spec
        if self.mask_bits:
            panel, start = divmod(cast(int, self.columns.start), QUERY_PANEL)
            return masking.apply_bits(exponent, [self.mask_bits[panel]], start)
        if spec.mask is not None:
            return spec.mask.apply(exponent, self.load_inputs)
        if spec.causal_offset is None:
            return exponent
        # the first query that sees each key, relative to these
        first_query = self.first_key - self.step.compute_first_query() - self.columns.start
        shift = first_query - spec.causal_offset
        return masking.mask_before(exponent, layouts.index(exponent.shape, 0, shift))

    def compute_ds(self, p: jax.Array, s: jax.Array, dp: jax.Array) -> tuple[jax.Array, RowSums]:
        """Return dS^T = P^T ∘ (dP^T - delta), line 14, and what `StepAuxGrads.add_row_sums` adds up.

        P^T is negative where it is dropped.
        """
        spec = self.spec
        if spec.dropout is not None:
            dp = jnp.where(p > 0, dp * spec.dropout_scale, 0.0)
            p = abs(p)
        ds = p * (dp + layouts.broadcast_columns(self._load_row(self.delta), p.shape))
        if spec.score is None:
            if self.step.masked and spec.guards_nonfinite:
                ds = jnp.where(p == 0, 0.0, ds)  # dP of a masked pair may be NaN
            return ds, {}
        inputs = self.load_inputs(pl.ds(0, self.columns.size))
        slope, aux_slopes = spec.score.derivatives(s, spec.scale, inputs)
        positive = p != 0  # elsewhere slopes may be infinite

        def times(slope: TileValue) -> jax.Array:
            slopes = broadcast_to_tile(slope, (0, 1), ds.shape, TARGET_OPS)
            return jnp.where(positive, ds * slopes, 0.0)

        row_sums = self.aux_grads.add(aux_slopes, times, self.columns)
        return times(slope), row_sums

    @property
    def aux_grads(self) -> StepAuxGrads:
        return StepAuxGrads(self.cta, self.step, self.first_key)


def _load_mask_bits(cta: Cta, warpgroup: WarpgroupIndex, step: Step) -> list[jax.Array]:
    """Load the bits of a precomputed mask, of each panel of queries."""
    if not (step.masked and cta.schedule.spec.uses_mask_bits):
        return []
    batch, _, kv_tile = step.tile.compute_coordinates()
    q_block = arithmetic.div(step.compute_first_query(), cta.config.block_q)
    half = lax.axis_index(CLUSTER_AXIS) if cta.config.two_cta else warpgroup
    return mask_bits.load_bits(cta.inputs.mask_bits, batch, kv_tile, q_block, half)


def concat_columns(tiles: list[jax.Array]) -> jax.Array:
    """Put tiles side by side."""
    return tiles[0] if len(tiles) == 1 else lax.concatenate(tiles, 1)
