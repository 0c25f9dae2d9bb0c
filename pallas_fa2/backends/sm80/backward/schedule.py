"""Which blocks of queries a block of keys visits."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.block_mask import BlockMask, reversed_classes
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.multiprocessor import L2_BUDGET
from pallas_fa2.schedule import raster


def block_mask_by_keys(classes: Any) -> BlockMask:
    """Return the blocks of queries that visit each block of keys, from the classes of tiles,
    `[B | 1, N | 1, T tiles, S tiles]`.

    A block of queries is given by its distance from the last one. A block of keys that no query sees is visited by the
    last one, of which the mask bits are known.
    """
    return BlockMask.from_classes(reversed_classes(classes.swapaxes(2, 3)))


@dataclasses.dataclass(frozen=True)
class BackwardSchedule:
    """The order of CTAs, and the blocks of queries that each visits, where no mask lists them."""

    spec: KernelSpec
    config: BackwardConfig

    @property
    def kv_tiles(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def q_blocks(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def raster_order(self) -> raster.RasterOrder:
        """Return the order of tiles: under a causal mask the last tiles of a group of heads come first."""
        spec = self.spec
        q_bytes = spec.q_len * self.config.head_dim * (2 + 2 + 4)  # Q, dO and float32 dQ
        heads = raster.heads_per_l2_group(spec.q_heads, q_bytes, L2_BUDGET)
        return raster.RasterOrder(spec.batch, spec.q_heads, self.kv_tiles, heads, spec.causal)

    def coordinates(self, cta: Any) -> tuple[Any, Any, Any]:
        """Return batch entry, head and block of keys of a CTA.

        Under a causal mask the first block, which most queries see, is the last tile of `raster_order`.
        """
        batch, head, tile = self.raster_order.coordinates(cta)
        return batch, head, self.kv_tiles - 1 - tile if self.spec.causal else tile

    def first_q_block(self, kv_tile: Any) -> Any:
        """Return the first block of queries that sees a key of a tile, under a causal mask."""
        if self.spec.causal_offset is None:
            return I32(0)
        first_key = kv_tile * self.config.block_kv
        first_query = jnp.maximum(first_key - self.spec.causal_offset, 0)
        return arithmetic.div(first_query, self.config.block_q)

    def first_full_q_block(self, kv_tile: Any) -> Any:
        """Return the first block of queries that sees all keys of a tile, under a causal mask."""
        assert self.spec.causal_offset is not None
        last_key = (kv_tile + 1) * self.config.block_kv - 1
        block_q = self.config.block_q
        first_query = jnp.maximum(last_key - self.spec.causal_offset, 0)
        return arithmetic.div(first_query + (block_q - 1), block_q)
