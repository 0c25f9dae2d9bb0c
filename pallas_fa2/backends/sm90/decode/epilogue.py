"""The output of a tile in device memory: lines 14 and 15 of Algorithm 1."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.columns import QueryColumns
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.softmax import natural_lse
from pallas_fa2.backends.common.primitives import gather_scatter, layouts
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.sm90.decode import eight_bits
from pallas_fa2.backends.sm90.decode.loader import group_rows
from pallas_fa2.backends.sm90.decode.memory import SharedStorage
from pallas_fa2.control_flow import when


class TileOutput(NamedTuple):
    """Where the output of a tile goes."""

    cta: Cta[SharedStorage]
    entry: Entry
    head: Scalar

    def store(self, acc: jax.Array, lse: jax.Array) -> None:
        """Store O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`: lines 14 and 15."""
        spec, out = self.cta.spec, self.cta.memory.out
        group = spec.padded_group
        if spec.quantized is not None:
            acc = eight_bits.order_output(acc)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left the buffer
        for columns in layouts.slices(self.cta.config.value_dim, 64):
            tile = acc[columns.start : columns.start + columns.size].astype(out.dtype)
            tile = plgpu.layout_cast(tile, plgpu.Layout.WGMMA_TRANSPOSED)
            out.at[:, columns].transpose((1, 0))[...] = tile
        plgpu.commit_smem()
        for t in range(spec.q_len):
            source = out.at[pl.ds(t * group, group)]
            row = (self.entry.first_query + t) * spec.kv_heads + self.head
            target = group_rows(self.cta.outputs.out, row, group)
            when(t < self.entry.num_queries)(functools.partial(target.store, source))
        plgpu.commit_smem_to_gmem_group()
        self.store_lse(natural_lse(lse))

    def store_lse(self, lse: jax.Array) -> None:
        """Store the natural lse of the columns that are queries."""
        spec, target = self.cta.spec, self.cta.outputs.lse
        columns = QueryColumns.compute(spec)
        index = columns.compute_index(spec, self.entry, self.head)
        index = jnp.where(columns.are_queries(spec, self.entry), index, target.shape[0])
        gather_scatter.scatter_columns(target, lse, index)
