"""Shared memory, barriers and arrays of the forward."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common import block_mask
from pallas_fa2.backends.common.compile_mods import storage_dtype
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts, swizzle
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar, Slice
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.forward.cached_tiles import CachedTiles
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.eight_bit_rows import EightBitRows
from pallas_fa2.backends.sm90.forward.schedule import QueryTile
from pallas_fa2.backends.sm90.forward.staging import Staging
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers, Pipeline
from pallas_fa2.backends.sm90.primitives.tma import HeadRows, RowPieces

type KeysOrValues = Literal["k", "v"]


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA. Another order of the fields may make ptxas spill."""

    q: Ref  # [warpgroups, q_stages, 64, H]
    k: Ref  # [stages, block_kv, H]
    v: Ref  # [stages, block_kv, Hv]
    out: Ref  # [warpgroups, 64, columns of an epilogue tile]
    key_aux: Ref | None  # int32 [stages, rows, block_kv], if masks or scores read any
    full: Barriers  # all that complete by one arrival
    q_empty: Barriers
    kv_empty: Barriers
    exit_barriers: list[Barrier]
    pairwise: list[Ref]  # [warpgroups, stages, 64, block_kv] of each pairwise input
    staging: dict[str, Staging]  # of "k" and "v", if they have 8 bits

    @classmethod
    def allocate(
        cls, spec: KernelSpec, config: ForwardConfig, q: jax.Array, v: jax.Array, key_rows: int
    ) -> "SharedStorage":
        """Lay out shared memory for inputs like q and v, with so many rows of aux inputs of keys."""
        groups, rows, stages = config.warpgroups, config.rows_per_warpgroup, config.stages
        panel = swizzle.panel_width(config.head_dim, q.shape[3], q.dtype)
        v_panel = swizzle.panel_width(config.value_dim, v.shape[3], q.dtype)

        def smem(*shape: int, panel: int | None = panel) -> Any:
            return swizzle.swizzled_smem(*shape, dtype=q.dtype, panel=panel)

        pairwise = _allocate_pairwise(spec, config, key_rows)
        pairwise_slots = sum(buffer.shape[1] for buffer in pairwise) * groups
        rings = {"k": stages, "v": stages} | ({"key_aux": stages} if key_rows else {})
        q_slots = config.q_stages * groups
        return cls(
            q=smem(groups, config.q_stages, rows, config.head_dim),
            k=smem(stages, config.block_kv, config.head_dim),
            v=smem(stages, config.block_kv, config.value_dim, panel=v_panel),
            # In panels as Q: keys of a retried tile are loaded here.
            out=smem(groups, rows, config.out_columns),
            key_aux=plgpu.SMEM((stages, key_rows, config.block_kv), jnp.int32)
            if key_rows
            else None,
            full=Barriers.allocate(
                q=q_slots, **rings, pairwise=pairwise_slots, retry_loaded=groups, retry_sync=groups
            ),
            q_empty=Barriers.allocate(q=q_slots, pairwise=pairwise_slots),
            kv_empty=Barriers.allocate(arrivals=groups, **rings),
            exit_barriers=[
                pipeline.barriers(1, groups + config.producers) for _ in range(1 + config.producers)
            ],
            pairwise=pairwise,
            staging={
                name: Staging.allocate(config.subtile_kv, dim)
                for name, dim in (("k", config.head_dim), ("v", config.value_dim))
                if config.subtile_kv
            },
        )

    def _pipeline(self, name: str, buffer: Ref, empty: Barriers, first: Scalar = 0) -> Pipeline:
        """Return the pipeline of a buffer, whose barriers begin at the `first` of this name."""
        offsets = (barriers.offset(name) + first for barriers in (self.full, empty))
        return Pipeline((buffer,), self.full.array, empty.array, *offsets)

    def q_pipeline(self, warpgroup: Scalar) -> Pipeline:
        """Return the pipeline of a warpgroup's queries: one step a tile."""
        first = warpgroup * self.q.shape[1]
        return self._pipeline("q", self.q.at[warpgroup], self.q_empty, first)

    def buffer(self, name: KeysOrValues) -> Ref:
        """Return the buffers of K or V."""
        return self.k if name == "k" else self.v

    def kv_pipeline(self, name: KeysOrValues) -> Pipeline:
        """Return the pipeline of K or V."""
        return self._pipeline(name, self.buffer(name), self.kv_empty)

    @property
    def k_pipeline(self) -> Pipeline:
        return self.kv_pipeline("k")

    @property
    def v_pipeline(self) -> Pipeline:
        return self.kv_pipeline("v")

    @property
    def key_aux_pipeline(self) -> Pipeline:
        """The pipeline of the keys' aux inputs: one step for each block that comes with some."""
        return self._pipeline("key_aux", self.key_aux, self.kv_empty)

    @property
    def kv_pipelines(self) -> list[Pipeline]:
        """The pipelines that all warpgroups read."""
        key_aux = [] if self.key_aux is None else [self.key_aux_pipeline]
        return [self.k_pipeline, self.v_pipeline, *key_aux]

    def pairwise_pipelines(self, warpgroup: Scalar) -> list[Pipeline]:
        """Return the pipelines of pairwise inputs of a warpgroup's rows, with steps like the keys' aux inputs."""
        groups = self.q.shape[0]
        return [
            self._pipeline(
                "pairwise",
                array.at[warpgroup],
                self.q_empty,
                (i * groups + warpgroup) * array.shape[1],
            )
            for i, array in enumerate(self.pairwise)
        ]


def _allocate_pairwise(spec: KernelSpec, config: ForwardConfig, key_rows: int) -> list[Any]:
    """Lay out the buffers of each pairwise input: a warpgroup's rows against a block of keys."""
    dtypes = [storage_dtype(source.dtype) for source in spec.pairwise_inputs()]
    if not dtypes:
        return []
    stages = config.pairwise_stages(sum(dtype.itemsize for dtype in dtypes), key_rows)
    shape = config.warpgroups, stages, config.rows_per_warpgroup, config.block_kv
    return [swizzle.swizzled_smem(*shape, dtype=dtype) for dtype in dtypes]


class Inputs(NamedTuple):
    """Arrays in device memory that the forward reads."""

    q: Any
    k: Any
    v: Any
    block_indices: Any = None  # under a mask: `block_mask.BlockMask`
    aux: Any = None  # `aux_inputs.AuxInputs` of masks and scores
    mask_bits: Any = None  # of a mask that is precomputed (`mask_bits`)
    cached: CachedTiles | None = None  # if keys are in a cache


class Outputs(NamedTuple):
    """Arrays in device memory that the forward writes."""

    out: Any
    lse: Any


class Arrays(NamedTuple):
    """The tile scheduler and the arrays in device memory of a launch."""

    scheduler: StaticTileScheduler | DynamicTileScheduler
    inputs: Inputs
    outputs: Outputs

    @property
    def has_eight_bits(self) -> bool:
        """Whether keys and values are those of a cache of 8 bits."""
        cached = self.inputs.cached
        return cached is not None and cached.scales is not None

    def load_kv_block_index(self, tile: QueryTile, t: Scalar) -> Scalar:
        """Load the index of the key block that the tile visits as its t-th."""
        index = tile.compute_list_index(t)
        if tile.schedule.spec.window_offset is not None:
            return self._load_block_of_window(tile, index)
        if self.inputs.block_indices is None:
            return index
        return block_mask.block_id(
            layouts.index_broadcast(self.inputs.block_indices, *tile.compute_coordinates())[index]
        )

    def _load_block_of_window(self, tile: QueryTile, index: Scalar) -> Scalar:
        """Load which block is the one of this index among a tile's in a cache: full ones are those in the middle."""
        cached, entry = self.inputs.cached, tile.compute_coordinates()[2]
        assert cached is not None
        first, first_full = (cached.load(entry, x) for x in ("first_block", "first_full"))
        num_full = tile.compute_num_full_listed()
        partial = first + (index - num_full)
        partial = jnp.where(partial < first_full, partial, partial + num_full)
        return jnp.where(index < num_full, first_full + index, partial)

    def load_first_row(self, tile: QueryTile) -> Scalar:
        """Compute, or load, where the rows of a tile begin in Q and O."""
        if self.inputs.cached is None:
            return tile.compute_first_row()
        return self.inputs.cached.load(tile.compute_coordinates()[2], "first_query")

    def load_batch(self, tile: QueryTile) -> Scalar:
        """Compute, or load, the batch entry of a tile's keys."""
        batch, _, entry = tile.compute_coordinates()
        return batch if self.inputs.cached is None else self.inputs.cached.load(entry, "request")

    def kv_rows(
        self,
        name: KeysOrValues,
        tile: QueryTile,
        batch: Scalar,
        keys: Slice,
        head: Scalar,
        columns: Slice | None = None,
    ) -> HeadRows | RowPieces | EightBitRows:
        """Return where keys of a tile, or their values, lie, given its batch entry and head."""
        inputs = self.inputs
        source = {"k": inputs.k, "v": inputs.v}[name]
        if inputs.cached is None:
            return HeadRows(source, batch, keys, head, columns)
        if inputs.cached.scales is None:
            return inputs.cached.kv_rows(source, batch, keys, head, columns)
        scales = dict(zip("kv", inputs.cached.scales, strict=True))[name]
        entry = tile.compute_coordinates()[2]
        return inputs.cached.eight_bit_rows(source, scales, entry, batch, keys, head, columns)
