"""What a CTA of the Hopper backward has in memory: arrays outside, and its shared memory and barriers."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, QUERY_PANEL, BackwardConfig
from pallas_fa2.backends.sm90.primitives import cluster, pipeline, swizzle
from pallas_fa2.backends.sm90.primitives.pipeline import Pipeline
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS


class Inputs(NamedTuple):
    """In device memory."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # [B, N, T'], or with the data of queries [B, N, 1 + rows, T']
    delta: Any
    # under a mask, what the schedule's tiles read of the blocks that they visit
    block_indices: Any = None
    run_lengths: Any = None
    flags: Any = None
    aux: Any = None  # of masks and scores
    mask_bits: Any = None  # of a mask that has been asked (`mask_bits`)


class Outputs(NamedTuple):
    dq: Any  # [blocks of queries, parts one after another, each in the order of registers]
    dk: list[Any]  # an array for each number that a gradient is made of
    dv: list[Any]
    scores: AuxGrads | None = None
    # Where dQ is added in one order, of each block of queries, how many tiles have added to it; where the first is
    # stored, its tickets.
    turns: Any = None
    # Where CTAs take whole heads, dQ as it is added up.
    partial: Any = None


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Any  # [stages, kv_rows, H]
    v: Any  # [stages, kv_rows, Hv]
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    lse: Any  # [stages, block_q]
    delta: Any
    ds: Any  # [stages, panels, kv_rows, PANEL]
    full: Any
    empty: Any
    exit_barriers: list[Any]
    # of pairs of CTAs
    p: Any = None  # as dS
    peer_ds: Any = None
    peer_k: Any = None  # [1, kv_rows, H / 2]
    dsmem_arrived: Any = None
    single_arrival: Any = None
    cluster_free: Any = None
    tickets: Any = None  # of `first_store`
    # [stages, 2, 16, 64] of each array of pairs: a piece of the queries, and half of the keys each
    pairwise: tuple[Any, ...] = ()

    @property
    def q_pipeline(self) -> Pipeline:
        return Pipeline((self.q, self.lse), self.full, self._rows_free)

    @property
    def dout_pipeline(self) -> Pipeline:
        first = self.q_pipeline.stages
        delta = self.lse.at[pl.ds(first, self.dout.shape[0])] if self.delta is None else self.delta
        return Pipeline((self.dout, delta), self.full, self._rows_free, first, first)

    @property
    def row_pipelines(self) -> tuple[Pipeline, Pipeline]:
        """Of queries: Q, and dO."""
        return self.q_pipeline, self.dout_pipeline

    def row_pipeline_to_release(self, which: Any) -> Pipeline:
        """To be released: the first ring of rows, or the second. Where `which` is not known when traced, both have
        as many stages, and barriers side by side."""
        if isinstance(which, int):
            return self.row_pipelines[which]
        queries = self.q_pipeline
        return dataclasses.replace(queries, empty_offset=which * queries.stages)

    @property
    def _rows_free(self) -> Any:
        """In pairs one warpgroup alone uses Q last, and one dO."""
        return self.empty if self.single_arrival is None else self.single_arrival

    @property
    def k_pipeline(self) -> Pipeline:
        first = self.q_pipeline.stages + self.dout_pipeline.stages
        buffers = _halves(self.k) if self.peer_k is None else (self.k, self.peer_k)
        return Pipeline(buffers, self.full, self.empty, first, first)

    @property
    def v_pipeline(self) -> Pipeline:
        first = self.q_pipeline.stages + self.dout_pipeline.stages + self.k_pipeline.stages
        return Pipeline(_halves(self.v), self.full, self.empty, first, first)

    @property
    def pairwise_pipelines(self) -> list[Pipeline]:
        """Of each array of pairs, for some queries after another."""
        first = sum(ring.stages for ring in self._of_operands)
        starts = [first + i * array.shape[0] for i, array in enumerate(self.pairwise)]
        return [
            Pipeline((array.at[:, 0], array.at[:, 1]), self.full, self.empty, start, start)
            for array, start in zip(self.pairwise, starts, strict=True)
        ]

    @property
    def _of_operands(self) -> list[Pipeline]:
        return [self.q_pipeline, self.dout_pipeline, self.k_pipeline, self.v_pipeline]

    @property
    def pipelines(self) -> list[Pipeline]:
        return [*self._of_operands, *self.pairwise_pipelines]

    @property
    def p_pipeline(self) -> Pipeline:
        """P^T. A stage is free when four warpgroups have used it: here, and in the other CTA."""
        first = self.q_pipeline.stages + self.dout_pipeline.stages
        return Pipeline((self.p,), self.single_arrival, self.cluster_free, first)

    @property
    def ds_pipeline(self) -> Pipeline:
        """dS^T, of the same stages: free when those of P are."""
        first = self.q_pipeline.stages + self.dout_pipeline.stages + self.p_pipeline.stages
        return Pipeline((self.ds,), self.single_arrival, self.cluster_free, first)

    @property
    def peer_copy(self) -> cluster.ClusterCopy:
        """The other CTA's dS^T, in the same stage."""
        return cluster.ClusterCopy(self.peer_ds, self.dsmem_arrived, self.ds.dtype)

    def barrier(self, i: int) -> Any:
        return self.full.at[sum(ring.stages for ring in self.pipelines) + i]

    @property
    def tile_barrier(self) -> Any:
        """Where the two multiplying warpgroups wait for each other at the end of a tile."""
        return self.barrier(0)

    @property
    def ds_ready(self) -> Any:
        """Completed when the dS of a step is there."""
        return self.barrier(1)


# Of a step whose dQ may be added, and of one whose has been: for two steps each.
TURN_BARRIERS = 4


def shared_storage(
    config: BackwardConfig,
    dims: tuple[int, int],
    dtype: Any,
    row_data: tuple[int, ...] = (),
    pairs: Sequence[Any] = (),
    tickets: int = 0,
) -> SharedStorage:
    """`dims` are those of the arrays, H and Hv. `row_data` is how many rows lie with lse: what masks and
    scores read of queries. `pairs` are the dtypes of what they read of pairs. So many steps have `tickets`."""
    block_q, kv_rows = config.block_q, config.kv_rows
    operand = functools.partial(pipeline.swizzled_smem, dtype=dtype)
    # P is multiplied by dO, and dS by Q and K: WGMMA takes one swizzle for both.
    panel = swizzle.panel_width(config.head_dim, dims[0], dtype, whole=config.two_cta)
    v_panel = swizzle.panel_width(config.value_dim, dims[1], dtype, whole=config.two_cta)
    (q_stages, do_stages), (k_stages, v_stages) = config.stages, config.kv_stages
    rings, warpgroups = q_stages + do_stages + k_stages + v_stages, len(config.registers)

    scores = config.ds_stages, block_q // QUERY_PANEL, kv_rows, QUERY_PANEL
    pieces = ()
    if pairs:
        extra = math.prod(row_data) - 1
        stages = config.pairwise_stages(sum(kind.itemsize for kind in pairs), extra)
        shape = stages, 2, PIECE_COLUMNS, kv_rows // 2
        pieces = tuple(pipeline.swizzled_smem(*shape, dtype=kind) for kind in pairs)
        rings += stages * len(pairs)
    memory = SharedStorage(
        k=operand(k_stages, kv_rows, config.head_dim, panel=panel),
        v=operand(v_stages, kv_rows, config.value_dim, panel=v_panel),
        q=operand(q_stages, block_q, config.head_dim, panel=panel),
        dout=operand(do_stages, block_q, config.value_dim, panel=v_panel),
        lse=plgpu.SMEM((q_stages, *row_data, block_q), jnp.float32),
        delta=plgpu.SMEM((do_stages, block_q), jnp.float32),
        ds=operand(*scores, panel=panel),
        # All that complete by two arrivals in one array: each array costs a register for its phases,
        # and at H = 128 those make the difference to spilling.
        full=pipeline.barriers(
            rings + 2 + (TURN_BARRIERS if config.deterministic and not config.two_cta else 0), 2
        ),
        empty=pipeline.barriers(rings, 2),
        exit_barriers=[pipeline.barriers(1, warpgroups) for _ in range(warpgroups)],
        pairwise=pieces,
        tickets=plgpu.SMEM((tickets,), jnp.int32) if tickets else None,
    )
    if not config.two_cta:
        return memory
    return memory._replace(
        # in one array, as each begins at a multiple of 1024 bytes
        lse=plgpu.SMEM((q_stages + do_stages, block_q), jnp.float32),
        delta=None,
        p=operand(*scores, panel=v_panel),
        peer_ds=operand(config.ds_stages, kv_rows, block_q, panel=panel),
        dsmem_arrived=plgpu.SMEM((config.ds_stages, 2), jnp.uint32),
        peer_k=operand(k_stages, kv_rows, config.head_dim // 2, panel=panel),
        single_arrival=pipeline.barriers(q_stages + do_stages + 2 * config.ds_stages),
        cluster_free=plgpu.ClusterBarrier(
            collective_axes=(CLUSTER_AXIS,), num_barriers=config.ds_stages, num_arrivals=2
        ),
    )


def _halves(ref: Any) -> tuple[Any, Any]:
    """Two copies, and so two arrivals, as for all that is loaded."""
    half = ref.shape[1] // 2
    return ref.at[:, pl.ds(0, half)], ref.at[:, pl.ds(half, half)]
