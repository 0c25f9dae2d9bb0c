"""The arrays of a backward launch, and the shared memory and barriers of a CTA."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar, Scratch
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, QUERY_PANEL, BackwardConfig
from pallas_fa2.backends.sm90.primitives import cluster, pipeline
from pallas_fa2.backends.sm90.primitives.pipeline import Barriers, Pipeline
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS


class Inputs(NamedTuple):
    """Arrays in device memory that the backward reads."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]
    lse: Any  # -lse in base 2, [B, N, T'], or with the queries' aux inputs [B, N, 1 + rows, T']
    delta: Any  # -delta, [B, N, T']
    block_mask: Any = None  # under a mask: the lists of the query blocks that each tile visits
    aux: Any = None  # `aux_inputs.AuxInputs` of masks and scores
    mask_bits: Any = None  # of a mask that is precomputed (`mask_bits`)


class Outputs(NamedTuple):
    """Arrays in device memory that the backward writes."""

    dq: Any  # float32 [query blocks, tiles of dQ in the order of registers], or [B, T, N, H]
    dk: list[Any]  # the terms of dK, [B, S, heads, H] each
    dv: list[Any]
    aux_grads: AuxGrads | None = None
    dq_workspace: Any = None  # of the strategy of dQ: turns, tickets, or the sums of each CTA


class TwoCtaStorage(NamedTuple):
    """Shared memory and barriers that a CTA of a pair has in addition."""

    p: Ref  # as ds
    peer_ds: Ref  # dS of the other CTA, [stages, kv_rows, block_q]
    peer_k: Ref  # K of the other CTA, [1, kv_rows, H / 2]
    dsmem_arrived: Ref  # uint32 [stages, 2]: see `ClusterCopy`
    single_arrival: Barriers  # all that complete by one arrival
    cluster_free: Barrier  # of the stages of P and dS, by arrivals of both CTAs


class SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA, in the order of their addresses.

    Operands of products come first: with another order ptxas spills (144 bytes and more).
    """

    k: Ref  # [stages, kv_rows, H]
    v: Ref  # [stages, kv_rows, Hv]
    q: Ref  # [stages, block_q, H]
    dout: Ref  # [stages, block_q, Hv]
    lse: Ref  # [stages, block_q], or with the queries' aux inputs [stages, 1 + rows, block_q]
    delta: Ref | None  # [stages, block_q]; behind lse in a pair of CTAs
    ds: Ref  # [stages, panels, kv_rows, QUERY_PANEL]
    full: Barriers  # all that complete by two arrivals but `empty`
    empty: Barriers
    exit_barriers: list[Barrier]
    two_cta: TwoCtaStorage | None = None
    dq: Ref | None = None  # of the strategy of dQ
    # [stages, 2, 16, 64] of each pairwise input: a piece of the queries against each half of the keys
    pairwise: tuple[Ref, ...] = ()

    @classmethod
    def allocate(
        cls,
        config: BackwardConfig,
        q: Any,
        v: Any,
        lse: jax.Array,
        pairwise: list[DTypeLike],
        dq: Scratch | None,
        dq_barriers: Mapping[str, int],
    ) -> "SharedStorage":
        """Lay out shared memory for inputs like q, v and lse, and for pairwise inputs of these dtypes.

        `dq` and `dq_barriers`, which complete by two arrivals, are the strategy's.
        """
        block_q, kv_rows, two_cta = config.block_q, config.kv_rows, config.two_cta
        operand = functools.partial(swizzle.swizzled_smem, dtype=q.dtype)
        # P is multiplied by dO, and dS by Q and K: WGMMA takes one swizzle for both.
        panel = swizzle.panel_width(config.head_dim, q.shape[3], q.dtype, whole=two_cta)
        v_panel = swizzle.panel_width(config.value_dim, v.shape[3], q.dtype, whole=two_cta)
        (q_stages, do_stages), (k_stages, v_stages) = config.stages, config.kv_stages
        p_shape = config.ds_stages, block_q // QUERY_PANEL, kv_rows, QUERY_PANEL
        row_data = lse.shape[2:-1]
        pairwise_buffers = _allocate_pairwise(config, pairwise, math.prod(row_data) - 1)
        pairwise_stages = sum(buffer.shape[0] for buffer in pairwise_buffers)
        stages = {"q": q_stages, "dout": do_stages, "k": k_stages, "v": v_stages}
        stages["pairwise"] = pairwise_stages
        memory = cls(
            k=operand(k_stages, kv_rows, config.head_dim, panel=panel),
            v=operand(v_stages, kv_rows, config.value_dim, panel=v_panel),
            q=operand(q_stages, block_q, config.head_dim, panel=panel),
            dout=operand(do_stages, block_q, config.value_dim, panel=v_panel),
            lse=plgpu.SMEM((q_stages, *row_data, block_q), jnp.float32),
            delta=plgpu.SMEM((do_stages, block_q), jnp.float32),
            ds=operand(*p_shape, panel=panel),
            # One array: each costs a register for its phases, and at H = 128 those make the difference to spilling.
            full=Barriers.allocate(2, **stages, tile_end=1, ds_ready=1, **dq_barriers),
            empty=Barriers.allocate(2, **stages),
            exit_barriers=[pipeline.barriers(1, len(config.registers)) for _ in config.registers],
            pairwise=pairwise_buffers,
            dq=dq,
        )
        if not two_cta:
            return memory
        return memory._replace(
            # in one array, as each begins at a multiple of 1024 bytes
            lse=plgpu.SMEM((q_stages + do_stages, block_q), jnp.float32),
            delta=None,
            two_cta=TwoCtaStorage(
                p=operand(*p_shape, panel=v_panel),
                peer_ds=operand(config.ds_stages, kv_rows, block_q, panel=panel),
                peer_k=operand(k_stages, kv_rows, config.head_dim // 2, panel=panel),
                dsmem_arrived=plgpu.SMEM((config.ds_stages, 2), jnp.uint32),
                single_arrival=Barriers.allocate(
                    q=q_stages, dout=do_stages, p=config.ds_stages, ds=config.ds_stages
                ),
                cluster_free=plgpu.ClusterBarrier(
                    collective_axes=(CLUSTER_AXIS,), num_barriers=config.ds_stages, num_arrivals=2
                ),
            ),
        )

    def _pipeline(
        self, name: str, *buffers: Ref, empty: Barriers | None = None, first: int = 0
    ) -> Pipeline:
        """Return the pipeline of some buffers, whose barriers begin at the `first` of this name."""
        empty = empty or self.empty
        offsets = (barriers.offset(name) + first for barriers in (self.full, empty))
        return Pipeline(buffers, self.full.array, empty.array, *offsets)

    @property
    def _rows_empty(self) -> Barriers:
        """Return the barriers by which Q and dO are released: with two CTAs, one warpgroup alone uses each last."""
        return self.empty if self.two_cta is None else self.two_cta.single_arrival

    @property
    def q_pipeline(self) -> Pipeline:
        return self._pipeline("q", self.q, self.lse, empty=self._rows_empty)

    @property
    def dout_pipeline(self) -> Pipeline:
        delta = self.delta
        if delta is None:
            delta = self.lse.at[pl.ds(self.q.shape[0], self.dout.shape[0])]
        return self._pipeline("dout", self.dout, delta, empty=self._rows_empty)

    @property
    def row_pipelines(self) -> tuple[Pipeline, Pipeline]:
        """Return the pipelines of rows of queries: Q and dO."""
        return self.q_pipeline, self.dout_pipeline

    def row_pipeline_to_release(self, index: Scalar) -> Pipeline:
        """Return the pipeline of Q or of dO, for its barriers alone if the index is traced. Then both have as many
        stages, and barriers side by side."""
        if isinstance(index, int):
            return self.row_pipelines[index]
        first = self.q_pipeline
        return dataclasses.replace(first, empty_offset=index * first.stages)

    @property
    def k_pipeline(self) -> Pipeline:
        """Return the pipeline of K: one step a tile. With two CTAs, the other one's K that meets this one's dQ comes
        too."""
        buffers = _halves(self.k) if self.two_cta is None else (self.k, self.two_cta.peer_k)
        return self._pipeline("k", *buffers)

    @property
    def v_pipeline(self) -> Pipeline:
        return self._pipeline("v", *_halves(self.v))

    @property
    def pairwise_pipelines(self) -> list[Pipeline]:
        """Return the pipeline of each pairwise input: one step a piece of queries."""
        stages = 0 if not self.pairwise else self.pairwise[0].shape[0]
        return [
            self._pipeline("pairwise", array.at[:, 0], array.at[:, 1], first=i * stages)
            for i, array in enumerate(self.pairwise)
        ]

    @property
    def pipelines(self) -> list[Pipeline]:
        """Return all pipelines that TMA fills."""
        return [*self.row_pipelines, self.k_pipeline, self.v_pipeline, *self.pairwise_pipelines]

    @property
    def tile_end(self) -> Barrier:
        """Return the barrier at which the two consumer warpgroups wait for each other at the end of a tile."""
        return self.full.at("tile_end")

    @property
    def ds_ready(self) -> Barrier:
        """Return the barrier that completes when both halves of a step's dS are in shared memory."""
        return self.full.at("ds_ready")

    @property
    def p_pipeline(self) -> Pipeline:
        """Return the pipeline of P^T. A stage is free when four warpgroups have used it: here, and in the other CTA."""
        return self._pipeline_2cta("p")

    @property
    def ds_pipeline(self) -> Pipeline:
        """Return the pipeline of dS^T, whose stages are free when those of P^T are."""
        return self._pipeline_2cta("ds")

    def _pipeline_2cta(self, name: str) -> Pipeline:
        assert self.two_cta is not None
        buffer, full = self.two_cta.p if name == "p" else self.ds, self.two_cta.single_arrival
        return Pipeline((buffer,), full.array, self.two_cta.cluster_free, full.offset(name))

    @property
    def peer_copy(self) -> cluster.ClusterCopy:
        """Return the copy of dS^T to the other CTA, in the same stage."""
        assert self.two_cta is not None
        return cluster.ClusterCopy(self.two_cta.peer_ds, self.two_cta.dsmem_arrived, self.ds.dtype)


def _allocate_pairwise(
    config: BackwardConfig, dtypes: list[DTypeLike], query_rows: int
) -> tuple[Scratch, ...]:
    """Lay out the buffers of pairwise inputs, beside so many rows of the queries' aux inputs."""
    if not dtypes:
        return ()
    stages = config.pairwise_stages(sum(jnp.dtype(x).itemsize for x in dtypes), query_rows)
    shape = stages, 2, PIECE_COLUMNS, config.kv_rows // 2
    return tuple(swizzle.swizzled_smem(*shape, dtype=x) for x in dtypes)


def _halves(ref: Ref) -> tuple[Ref, Ref]:
    """Divide the rows of a buffer, as all that is loaded comes as two copies, and so two arrivals."""
    half = ref.shape[1] // 2
    return ref.at[:, pl.ds(0, half)], ref.at[:, pl.ds(half, half)]
