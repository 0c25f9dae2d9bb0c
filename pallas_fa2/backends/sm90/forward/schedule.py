"""The query tiles that each CTA of the forward takes, and the key blocks that a tile visits."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa2 import arithmetic
from pallas_fa2.backends.common import block_mask
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.backends.common.scheduler import DynamicTileScheduler, StaticTileScheduler
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.schedule import raster


@dataclasses.dataclass(frozen=True)
class ForwardSchedule:
    """The order of query tiles, and the key blocks of each where no mask lists them."""

    spec: KernelSpec
    config: ForwardConfig

    @property
    def q_tiles(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether a tile may visit blocks of which a query sees some keys only."""
        ragged = self.spec.kv_len % self.config.block_kv != 0
        return self.spec.causal or ragged or self.spec.mask is not None or self.spec.in_cache

    @property
    def _l2_head_group(self) -> int:
        spec = self.spec
        kv_bytes = 2 * spec.kv_len * (self.config.head_dim + self.config.value_dim)
        return (
            raster.heads_per_l2_group(spec.kv_heads, kv_bytes, self.config.l2_budget) * spec.group
        )

    @property
    def order(self) -> raster.RasterOrder:
        spec = self.spec
        return raster.RasterOrder(
            spec.batch,
            spec.q_heads,
            self.q_tiles,
            self._l2_head_group,
            spec.causal and not spec.in_cache,
        )

    def tile_scheduler(
        self, block_mask: BlockMask | None
    ) -> StaticTileScheduler | DynamicTileScheduler:
        """Return the scheduler that gives each CTA its tiles."""
        spec, num_ctas = self.spec, self.config.num_ctas
        if block_mask is not None:
            # Elsewhere the 24 registers of the producer hold no claims beside what it knows of a tile.
            if self.config.head_dim == 128 and not spec.pairwise_inputs():
                return block_mask.dynamic_schedule(spec.batch, spec.q_heads, num_ctas)
            return block_mask.static_schedule(
                spec.batch, spec.q_heads, self._l2_head_group, num_ctas
            )
        tile_ids = np.arange(self.order.count, dtype=np.int32)
        _, _, q_tile = self.order.coordinates(tile_ids)
        # A tile's prologue and epilogue cost about as much as a block.
        costs = self.count_kv_blocks(q_tile)[0] + 1.0
        return StaticTileScheduler.deal(tile_ids[:, None], costs, min(num_ctas, self.order.count))

    def count_kv_blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """Return how many key blocks a tile visits without a mask, and how many of them, the last ones, are partial."""
        spec, config = self.spec, self.config
        whole = spec.kv_len // config.block_kv
        if spec.causal_offset is None:
            return 0 * q_tile + self.kv_blocks, 0 * q_tile + (self.kv_blocks - whole)
        first_row = q_tile * config.block_q
        end = first_row + (config.block_q + spec.causal_offset + config.block_kv - 1)
        visited = arithmetic.minimum(arithmetic.div(end, config.block_kv), self.kv_blocks)
        full = arithmetic.minimum(
            arithmetic.div(first_row + (spec.causal_offset + 1), config.block_kv), whole
        )
        return visited, visited - full


class PipelinePosition(NamedTuple):
    """How many steps the pipelines of a CTA have made before a tile."""

    kv_step: Scalar  # those of K and V: one a key block
    aux_step: Scalar  # those of aux inputs: one for each block that comes with some


@dataclasses.dataclass(frozen=True)
class QueryTile:
    """A block of query rows of one head, and the key blocks that it visits.

    Methods `compute_...` emit instructions at each call: what they return, kept through the loops, would hold
    registers (docs/decisions/0064-register-rules.md).
    """

    schedule: ForwardSchedule
    tile_id: Scalar
    counts: Scalar | None = None  # under a mask, and in a cache: `block_mask.unpack_counts`

    @property
    def reverse_kv(self) -> bool:
        """Whether the tile visits its last key block first, and so its partial blocks.

        The first block gives the softmax its references, and score functions mostly favor near keys: after the
        farthest ones, the exponentials of `alibi` would overflow.
        """
        return self.schedule.spec.score is not None

    def compute_coordinates(self) -> tuple[Scalar, Scalar, Scalar]:
        """Compute the batch entry, the query head and the index of the tile in its head."""
        return self.schedule.order.coordinates(self.tile_id)

    def compute_kv_head(self) -> Scalar:
        return arithmetic.div(self.compute_coordinates()[1], self.schedule.spec.group)

    def compute_first_row(self) -> Scalar:
        return self.compute_coordinates()[2] * self.schedule.config.block_q

    def _count_kv_blocks(self) -> tuple[Any, Any]:
        if self.counts is None:
            return self.schedule.count_kv_blocks(self.compute_coordinates()[2])
        return block_mask.unpack_counts(self.counts)

    def compute_num_kv_blocks(self) -> Any:
        return self._count_kv_blocks()[0]

    def compute_num_partial(self) -> Any:
        """Compute how many blocks pass through the mask: the partial ones. In reverse order a full one follows
        them, where rows that have seen no key yet find their reference."""
        visited, partial = self._count_kv_blocks()
        if self.reverse_kv:
            return jnp.where(partial > 0, jnp.minimum(partial + 1, visited), 0)
        return partial

    def compute_num_full_listed(self) -> Any:
        """Compute how many blocks of the tile's list, the first ones, are full."""
        visited, partial = self._count_kv_blocks()
        return visited - partial

    def compute_num_full(self) -> Any:
        """Compute how many blocks do not pass through the mask."""
        return self.compute_num_kv_blocks() - self.compute_num_partial()

    def compute_loop_ends(self) -> list[tuple[bool, Any]]:
        """Compute, for the blocks that pass through the mask and for those that do not, where they end."""
        if self.reverse_kv:
            return [(True, self.compute_num_partial()), (False, self.compute_num_kv_blocks())]
        return [(False, self.compute_num_full()), (True, self.compute_num_kv_blocks())]

    def is_partial(self, t: Scalar) -> Any:
        """Compute whether the t-th block visited passes through the mask."""
        return t < self.compute_num_partial() if self.reverse_kv else t >= self.compute_num_full()

    def compute_list_index(self, t: Scalar) -> Any:
        """Compute the index of the t-th block visited in the tile's list, which has full blocks first."""
        return self.compute_num_kv_blocks() - 1 - t if self.reverse_kv else t

    def compute_next_partial(self) -> Any:
        """Compute which block after the first is the first partial one; if none is, some block of the tile."""
        first = jnp.int32(1) if self.reverse_kv else jnp.maximum(self.compute_num_full(), 1)
        return jnp.minimum(first, self.compute_num_kv_blocks() - 1)

    def compute_num_without_aux(self) -> Any:
        """Compute how many blocks come without aux inputs: full ones, unless scores read some."""
        return 0 if self.schedule.spec.loads_kv_aux(masked=False) else self.compute_num_full()

    def has_aux(self, t: Scalar) -> Any:
        """Compute whether aux inputs come with the t-th block visited."""
        if self.reverse_kv:
            return t < self.compute_num_kv_blocks() - self.compute_num_without_aux()
        return t >= self.compute_num_without_aux()

    def compute_aux_index(self, t: Scalar) -> Any:
        """Compute with how many of the blocks visited before the t-th aux inputs have come."""
        return t if self.reverse_kv else t - self.compute_num_without_aux()

    def advance(self, position: PipelinePosition) -> PipelinePosition:
        """Compute the position of the pipelines after this tile."""
        kv_step, aux_step = position
        if self.schedule.spec.loads_kv_aux():
            aux_step = aux_step + self.compute_num_kv_blocks() - self.compute_num_without_aux()
        return PipelinePosition(kv_step + self.compute_num_kv_blocks(), aux_step)

    def rematerialized(self, zero: Scalar) -> "QueryTile":
        """Return the same tile; see `WarpgroupRows.rematerialized`."""
        counts = None if self.counts is None else self.counts + zero
        return dataclasses.replace(self, tile_id=self.tile_id + zero, counts=counts)
