"""Which tile each CTA takes under a mask, and the blocks that a tile visits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.block_mask_kernel import unpack_word
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts


class TileList(NamedTuple):
    """The tiles of all heads, of which CTA i takes the i-th, and the blocks that each of them visits.

    A GPU starts CTAs in the order of their index, and the next one where one ends: CTAs take tiles from this list as
    those of a dynamic tile scheduler do, without atomic additions. Results do not depend on which CTA starts when.
    """

    entries: Any  # int32 [n + 1, 2]: the ids and counts of n tiles (`BlockMask.order_tiles`)
    block_indices: Any  # `BlockMask.block_indices`

    @classmethod
    def build(
        cls, block_mask: BlockMask | None, spec: KernelSpec, num_ctas: int
    ) -> "TileList | None":
        """List the tiles in an order for `num_ctas` CTAs that run at the same time; return None where there is no
        mask."""
        if block_mask is None:
            return None
        tiles = spec.batch * spec.q_heads * block_mask.num_blocks.shape[-1]
        entries = block_mask.order_tiles(
            spec.batch, spec.q_heads, min(num_ctas, tiles), header_rows=0
        )
        return cls(jnp.asarray(entries), jnp.asarray(block_mask.block_indices))

    def load_coordinates(self, spec: KernelSpec) -> tuple[Any, Any, Any]:
        """Load the batch entry, the head and the index of this CTA's tile. Here and below the arrays are a kernel's
        references."""
        tile_id, tiles = self.entries[lax.axis_index("cta"), 0], self.block_indices.shape[-2]
        # The id is not negative, which this tells LLVM; of a CTA's index, which takes its place without a mask, it
        # knows. Else the forward under documents spills 544 bytes instead of 512 on 9.0, and the backward of float32
        # 488 instead of 360 on 10.0 (H = 128).
        tile_id &= I32(0x7FFFFFFF)
        head, tile = div(tile_id, tiles), rem(tile_id, tiles)
        return div(head, spec.q_heads), rem(head, spec.q_heads), tile

    def load_counts(self) -> tuple[Any, Any]:
        """Load how many blocks this CTA's tile visits, and how many of these, the first ones, are full."""
        return unpack_word(self.entries[lax.axis_index("cta"), 1])

    def load_block_entry(self, coordinates: tuple[Any, Any, Any], t: Any) -> Any:
        """Load the entry of the block that a tile visits as the t-th; beyond the last one, any entry."""
        t = jnp.minimum(t, self.block_indices.shape[-1] - 1)
        return layouts.index_broadcast(self.block_indices, *coordinates)[t]
