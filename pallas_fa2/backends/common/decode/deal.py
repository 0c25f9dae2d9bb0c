"""How many blocks of the line each CTA has."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig


class Deal(NamedTuple):
    """CTA c begins with block `c least + min(c, rest)` of the line, if there are so many: int32 scalars."""

    least: Any  # blocks of a CTA, of those that have any; at least 1
    rest: Any  # CTAs that have one more

    @classmethod
    def compute(
        cls, config: DecodeConfig, kv_heads: int, num_entries: Any, head_blocks: Any, longest: Any
    ) -> "Deal":
        """Deal the blocks of so many entries, `head_blocks` for each key head and `longest` of one entry.

        Shares are equal, or of `config.min_share` blocks where they would be smaller, or of whole tiles where all tiles are
        equally long and those come out nearly even.
        """
        num_ctas = config.num_ctas
        total, num_tiles = head_blocks * kv_heads, num_entries * kv_heads
        least, rest = lax.div(total, I32(num_ctas)), lax.rem(total, I32(num_ctas))
        whole_tiles = longest * lax.div(num_tiles + (num_ctas - 1), I32(num_ctas))
        # in float32, as int32 would overflow where one tile has most of the blocks that are admitted
        has_whole_tiles = (longest * num_entries == head_blocks) & (
            _float32(whole_tiles) * num_ctas <= MAX_IMBALANCE * _float32(total)
        )
        is_fixed = has_whole_tiles | (least < config.min_share)
        fixed_share = jnp.where(has_whole_tiles, whole_tiles, config.min_share)
        return cls(jnp.where(is_fixed, fixed_share, least), jnp.where(is_fixed, 0, rest))

    def first_block(self, cta: Any, total: Any) -> Any:
        """Return the first block of a CTA, or `total`, the blocks in the line, if it has none."""
        return jnp.minimum(cta * self.least + jnp.minimum(cta, self.rest), total)

    def cta_of(self, block: Any) -> Any:
        """Return the CTA that has a block."""
        in_larger = self.rest * (self.least + 1)  # the first shares have a block more
        in_smaller = self.rest + lax.div(block - in_larger, self.least)
        return jnp.where(block < in_larger, lax.div(block, self.least + 1), in_smaller)


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
