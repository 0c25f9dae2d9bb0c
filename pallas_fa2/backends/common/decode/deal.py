"""How many blocks of the line each CTA has."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig


class Deal(NamedTuple):
    """The line is divided into runs, and CTA i of a run begins with its block `i least + min(i, rest)`, if it has so many: int32
    scalars."""

    least: Any  # blocks of a CTA, of those that have any; at least 1
    rest: Any  # CTAs of a run that have one more
    run_blocks: Any
    run_ctas: Any

    @classmethod
    def compute(
        cls, config: DecodeConfig, kv_heads: int, num_entries: Any, head_blocks: Any, longest: Any
    ) -> "Deal":
        """Deal the blocks of so many entries, `head_blocks` for each key head and `longest` of one entry.

        A run is a tile, if all tiles are equally long and the CTAs are nearly a multiple of them. Otherwise it is a key head, if
        the CTAs are a multiple of these, or the whole line. Its shares are equal, or of `config.min_share` blocks where they
        would be smaller, or of whole tiles where those come out nearly even.
        """
        num_ctas, num_tiles = config.num_ctas, num_entries * kv_heads
        are_even = longest * num_entries == head_blocks
        tile_ctas = jnp.maximum(lax.div(I32(num_ctas), jnp.maximum(num_tiles, 1)), 1)
        of_tiles = cls._of_run(config, longest, tile_ctas)
        runs = kv_heads if num_ctas % kv_heads == 0 else 1
        of_heads = cls._of_run(config, head_blocks * (kv_heads // runs), I32(num_ctas // runs))
        most = MAX_IMBALANCE * _float32(of_heads.run_blocks) / (num_ctas // runs)

        tiles_of_run = num_entries * (kv_heads // runs)
        whole_tiles = longest * lax.div(tiles_of_run + (of_heads.run_ctas - 1), of_heads.run_ctas)
        has_whole_tiles = are_even & (_float32(whole_tiles) <= most)
        of_heads = of_heads._replace(
            least=jnp.where(has_whole_tiles, whole_tiles, of_heads.least),
            rest=jnp.where(has_whole_tiles, 0, of_heads.rest),
        )
        largest = of_tiles.least + jnp.minimum(of_tiles.rest, 1)
        is_dealt_by_tiles = are_even & (num_tiles <= num_ctas)
        is_dealt_by_tiles &= (_float32(largest) <= most) | (largest <= config.min_share)
        pairs = zip(of_tiles, of_heads, strict=True)
        return cls(*(jnp.where(is_dealt_by_tiles, *pair) for pair in pairs))

    @classmethod
    def _of_run(cls, config: DecodeConfig, run_blocks: Any, run_ctas: Any) -> "Deal":
        """Deal equal shares of runs of so many blocks, or shares of `config.min_share` where those would be smaller."""
        least, rest = lax.div(run_blocks, run_ctas), lax.rem(run_blocks, run_ctas)
        is_small = least < config.min_share
        least, rest = jnp.where(is_small, config.min_share, least), jnp.where(is_small, 0, rest)
        return cls(least, rest, run_blocks, run_ctas)

    def first_block(self, cta: Any, total: Any) -> Any:
        """Return the first block of a CTA, or where its run ends, or `total`, the blocks in the line, if it has none."""
        run, index = lax.div(cta, self.run_ctas), lax.rem(cta, self.run_ctas)
        in_run = jnp.minimum(index * self.least + jnp.minimum(index, self.rest), self.run_blocks)
        return jnp.minimum(run * self.run_blocks + in_run, total)

    def cta_of(self, block: Any) -> Any:
        """Return the CTA that has a block."""
        run, index = lax.div(block, self.run_blocks), lax.rem(block, self.run_blocks)
        in_larger = self.rest * (self.least + 1)  # the first shares have a block more
        in_smaller = self.rest + lax.div(index - in_larger, self.least)
        in_run = jnp.where(index < in_larger, lax.div(index, self.least + 1), in_smaller)
        return run * self.run_ctas + in_run


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
