"""How many blocks of the line each CTA has."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig


class Deal(NamedTuple):
    """The line is divided into runs, and CTA i of a run begins with its block `i least + min(i, rest)`, if it has so
    many: int32 scalars."""

    least: Any  # blocks of a CTA, of those that have any; at least 1
    rest: Any  # CTAs of a run that have one more
    run_blocks: Any
    run_ctas: Any

    @classmethod
    def compute(
        cls,
        config: DecodeConfig,
        kv_heads: int,
        num_entries: Any,
        head_blocks: Any,
        longest: Any,
        cta: Any,
    ) -> tuple["Deal", Any, Any]:
        """Deal the blocks of so many entries, `head_blocks` for each key head and `longest` of one entry. Return how,
        the first block of a CTA, and where its share ends. The first block of one that has none is where its run ends,
        or the line.

        A run is a tile, if all tiles are equally long and the CTAs are nearly a multiple of them. Otherwise it is a key
        head, if the CTAs are a multiple of these, or the whole line. Its shares are equal, or of `config.min_share`
        blocks where they would be smaller, or of whole tiles where those come out nearly even.
        """
        num_ctas, num_tiles = config.num_ctas, num_entries * kv_heads
        are_even = longest * num_entries == head_blocks
        tile_ctas = jnp.maximum(lax.div(I32(num_ctas), jnp.maximum(num_tiles, 1)), 1)
        of_tiles = cls._of_run(config, longest, tile_ctas)
        runs = kv_heads if num_ctas % kv_heads == 0 else 1
        of_heads = cls._of_run(config, head_blocks * (kv_heads // runs), I32(num_ctas // runs))

        def is_nearly_even(largest: Any) -> Any:  # that no share has more blocks
            dealt = _float32(largest) * (num_ctas // runs)
            return dealt <= MAX_IMBALANCE * _float32(of_heads.run_blocks)

        tiles_of_run = num_entries * (kv_heads // runs)
        whole_tiles = longest * lax.div(tiles_of_run + (of_heads.run_ctas - 1), of_heads.run_ctas)
        has_whole_tiles = are_even & is_nearly_even(whole_tiles)
        of_heads = of_heads._replace(
            least=jnp.where(has_whole_tiles, whole_tiles, of_heads.least),
            rest=jnp.where(has_whole_tiles, 0, of_heads.rest),
        )
        largest = of_tiles.least + jnp.minimum(of_tiles.rest, 1)
        is_dealt_by_tiles = are_even & (num_tiles <= num_ctas)
        is_dealt_by_tiles &= is_nearly_even(largest) | (largest <= config.min_share)
        # Where the number of entries is known when traced, both divisors are, and no division is left.
        tiles, heads = ((*x, *_divide(cta, x.run_ctas)) for x in (of_tiles, of_heads))
        chosen = (jnp.where(is_dealt_by_tiles, *pair) for pair in zip(tiles, heads, strict=True))
        *fields, run, index = chosen
        deal = cls(*fields)
        return deal, *deal._blocks_of(run, index, head_blocks * kv_heads)

    @classmethod
    def _of_run(cls, config: DecodeConfig, run_blocks: Any, run_ctas: Any) -> "Deal":
        """Deal equal shares of runs of so many blocks, or shares of `config.min_share` where those would be smaller."""
        least, rest = lax.div(run_blocks, run_ctas), lax.rem(run_blocks, run_ctas)
        is_small = least < config.min_share
        least, rest = jnp.where(is_small, config.min_share, least), jnp.where(is_small, 0, rest)
        return cls(least, rest, run_blocks, run_ctas)

    def _blocks_of(self, run: Any, index: Any, total: Any) -> tuple[Any, Any]:
        """Return the first block of the CTA of this index in a run, and where its share ends, of `total` in the
        line."""
        begin = index * self.least + jnp.minimum(index, self.rest)
        end = begin + self.least + jnp.where(index < self.rest, 1, 0)
        before = run * self.run_blocks
        room = jnp.minimum(self.run_blocks, total - before)
        return before + jnp.minimum(begin, room), before + jnp.minimum(end, room)

    def cta_of(self, block: Any) -> Any:
        """Return the CTA that has a block."""
        run, index = _divide(block, self.run_blocks)
        in_larger = self.rest * (self.least + 1)  # the first shares have a block more
        is_in_larger = index < in_larger
        size = self.least + jnp.where(is_in_larger, 1, 0)
        in_run = lax.div(index - jnp.where(is_in_larger, 0, in_larger), size)
        return run * self.run_ctas + jnp.where(is_in_larger, 0, self.rest) + in_run


def _divide(a: Any, b: Any) -> tuple[Any, Any]:
    """Return quotient and remainder of nonnegative integers by one division."""
    quotient = lax.div(a, b)
    return quotient, a - quotient * b


def _float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
