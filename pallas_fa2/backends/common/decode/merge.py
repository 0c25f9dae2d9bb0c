"""The merge of a tile's splits, by the last of their CTAs that arrives: no kernel follows.

O = sum_i 2^(lse_i - lse) O_i with lse = log2 sum_i 2^lse_i (Flash-Decoding, and FlashInfer's `merge_states`). The splits
are read in the order of their keys, the CTA's own one as well, so that the result does not depend on who is the last.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.arrays import Cta
from pallas_fa2.backends.common.decode.cursor import Tile
from pallas_fa2.backends.common.decode.schedule import (
    ARRIVALS_COLUMN,
    FixedSplits,
    Share,
)
from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import layouts, register_io, thread_values
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    COL_LAYOUT,
    THREADS,
    broadcast_columns,
)
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.types import Ref, Registers, Scalar
from pallas_fa2.control_flow import cond, rematerialize, when

# The splits that are loaded together, as long as their O^T and the sum take no more registers of a thread: with more,
# kernels of 64 columns spill.
MAX_LOADS, MAX_REGISTERS = 16, 128


def store_tile(
    cta: Cta[Any],
    tile: Tile,
    begins_here: jax.Array | bool,
    is_whole: jax.Array | bool,
    result: tuple[jax.Array, jax.Array],
    store: Callable[[jax.Array, jax.Array], None],
) -> None:
    """Store a tile's O^T and lse in base 2 by `store`, or this CTA's split of it; the last CTA that has one merges all.

    `begins_here` and `is_whole` say whether the CTA has the first block and all blocks of the tile.
    """
    fixed = cta.spec.split_blocks is not None
    if fixed:
        is_whole = FixedSplits.load(cta.inputs.plan.entries, tile.entry).num_rows == 1

    def store_split() -> None:
        splits = (
            TileSplits.of_rows(cta, tile.head, tile.entry)
            if fixed
            else TileSplits.of_ctas(cta, begins_here)
        )
        splits.store(*result)
        when(splits.arrive() != 0)(lambda: store(*splits.merge()))

    cond(is_whole, lambda: store(*result), store_split)


class TileSplits(NamedTuple):
    """The splits of a tile: `first` to `last` are the CTAs that have them, or the rows of fixed splits."""

    cta: Cta[Any]
    own: Scalar  # the index of this CTA's split in the workspace
    first: Scalar
    last: Scalar
    word: Ref  # that counts arrivals

    @classmethod
    def of_ctas(cls, cta: Cta[Any], begins_here: jax.Array | bool) -> "TileSplits":
        """Load which CTAs visit the tile that this CTA visits in part: the first or the last one of its share."""
        # Loaded here: they would hold registers through the loops. The CTA after a tile's first one begins with it.
        index, shares = rematerialize(lax.axis_index("cta")), cta.inputs.plan.shares
        share = Share.load(shares, jnp.where(begins_here, index + 1, index))
        first = jnp.where(begins_here, index, share.first_cta)
        own = _split_index(lax.axis_index("cta"), begins_here)
        return cls(cta, own, first, share.last_cta, shares.at[first, ARRIVALS_COLUMN])

    @classmethod
    def of_rows(cls, cta: Cta[Any], head: Scalar, row: Scalar) -> "TileSplits":
        """Load the rows of the tile whose fixed split this one is."""
        first, count = FixedSplits.load(cta.inputs.plan.entries, row)
        start = head * cta.spec.max_rows
        arrivals = cta.inputs.plan.arrivals
        assert arrivals is not None, "splits are fixed"
        word = arrivals.at[head, first]
        return cls(cta, start + row, start + first, start + first + count - 1, word)

    def store(self, acc: jax.Array, lse: jax.Array) -> None:
        """Store the split of this CTA: O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`."""
        outputs = self.cta.outputs
        for i, rows in enumerate(layouts.slices(acc.shape[0], 64)):
            tile = acc[rows.start : rows.start + rows.size]
            register_io.store_fragments(outputs.split_out.at[self.own, i], tile)
        outputs.split_lse.at[self.own][...] = lse

    def arrive(self) -> jax.Array:
        """Return 1 if all other splits of the tile have been stored when this CTA's one is, else 0."""
        return _arrive(self.word, self.last - self.first)

    def merge(self) -> tuple[jax.Array, jax.Array]:
        """Return O^T and lse in base 2 of the tile, of which all splits are stored: an online softmax over splits."""
        columns = self.cta.spec.columns
        shape = self.cta.config.value_dim, columns
        registers = math.prod(shape) // THREADS
        unroll = max(1, min(MAX_LOADS, (MAX_REGISTERS - registers) // registers))

        def add(i: Scalar, state: Any) -> Any:
            acc, maximum, total = state
            numbers = [self.first + i * unroll + u for u in range(unroll)]
            splits = [(self._load_out(x), self._load_lse(x)) for x in numbers]
            new = functools.reduce(jnp.maximum, (lse for _, lse in splits), maximum)
            factor = jnp.exp2(maximum - new)
            acc, total = acc * broadcast_columns(factor, shape), total * factor
            for out, lse in splits:
                weight = jnp.exp2(lse - new)
                acc, total = acc + out * broadcast_columns(weight, shape), total + weight
            return acc, new, total

        zeros = layouts.splat_constant(0.0, shape, ACC_LAYOUT)
        no_sum = layouts.splat_constant(0.0, (columns,), COL_LAYOUT)
        no_maximum = layouts.splat_constant(NO_MAXIMUM, (columns,), COL_LAYOUT)
        turns = lax.div(self.last - self.first + unroll, I32(unroll))
        acc, maximum, total = lax.fori_loop(I32(0), turns, add, (zeros, no_maximum, no_sum))
        # Where no split has a key, each weighs 1, and O is 0.
        lse = jnp.where(maximum <= NO_MAXIMUM, NO_MAXIMUM, maximum + jnp.log2(total))
        return acc * broadcast_columns(1 / total, shape), lse

    def _load_out(self, number: Scalar) -> jax.Array:
        """Load O^T of a split, or zeros if it comes after the last."""
        split_out, columns = self.cta.outputs.split_out, self.cta.spec.columns
        index, exists = self._index(number), jnp.asarray(number <= self.last)
        tiles = [
            register_io.take_fragments(split_out.at[index, i], columns, exists)
            for i in range(split_out.shape[1])
        ]
        return lax.concatenate(tiles, 0)

    def _load_lse(self, number: Scalar) -> jax.Array:
        """Load lse of a split, or -inf if it comes after the last."""
        lse = self.cta.outputs.split_lse.at[self._index(number)]
        lse = plgpu.load(lse, layout=COL_LAYOUT, optimized=False)
        return lse + jnp.where(number <= self.last, 0.0, -jnp.inf)

    def _index(self, number: Scalar) -> Scalar:
        """Compute the index of a split in the workspace, or of the last one's."""
        index = jnp.minimum(number, self.last)
        fixed = self.cta.spec.split_blocks is not None
        return index if fixed else _split_index(index, number == self.first)


def _split_index(cta: Scalar, begins_tile: Any) -> Scalar:
    """Compute the index of a CTA's split: a CTA has at most two, and begins the tile of one of them."""
    return 2 * cta + jnp.where(begins_tile, 1, 0)


@inline_op("arrive_last", plgpu.RefType(), plgpu.Layout.WG_SPLAT, result=thread_values.SCALAR_I32)
def _arrive(_, word: Ref, others: Registers) -> Registers:
    """Count an arrival in a word of device memory, which is 0 again after `others` + 1; return 1 for the last one.

    What all threads of the CTA have stored before is released, and what the CTAs that arrived before have stored is
    acquired: the barriers carry that between the threads and the one that counts (PTX ISA, memory consistency model:
    causality order). The last shuffle tells ptxas that the result is the same in all threads (see `votes`).
    """
    barrier = f"{int(NamedBarrier.VOTE)}, {THREADS}"
    code = (
        "{ .reg .pred p, leader; .reg .b32 v; "
        f"barrier.cta.sync {barrier}; setp.eq.s32 leader, $1, 0; mov.b32 v, -1; "
        "@leader atom.acq_rel.gpu.global.inc.u32 v, [$2], $3; setp.eq.s32 p, v, $3; "
        f"barrier.cta.red.or.pred p, {barrier}, p; selp.s32 v, 1, 0, p; "
        "shfl.sync.idx.b32 $0, v, 0, 31, -1; }"
    )
    word_type = ir.IntegerType.get_signless(32)
    operands: Any = (
        thread_values.warpgroup_thread_index(),
        thread_values.address(word),
        others.registers[()],
    )
    return thread_values.splat(asm(code, "=r,r,l,r", *operands, result=word_type))
