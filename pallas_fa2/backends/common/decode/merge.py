"""The merge of a tile's splits by the CTA that stores the last of them, so that no kernel follows.

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
from pallas_fa2.backends.common.decode.entries import Entry
from pallas_fa2.backends.common.decode.plan_tables import FixedSplits, PlanTables
from pallas_fa2.backends.common.decode.share import load_deal
from pallas_fa2.backends.common.decode.spec import NO_MAXIMUM
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import (
    gather_scatter,
    layouts,
    register_io,
    thread_values,
)
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    COL_LAYOUT,
    LANES,
    THREADS,
    broadcast_columns,
)
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.types import Ref, Registers, Scalar
from pallas_fa2.control_flow import cond, when

# So many splits are loaded together, or as many as have O^T, with that of the sum, in so many registers of a thread. 17: where 8
# heads share 264 CTAs, a tile has 33 splits, which are two turns; at Hv = 128 with 8 columns a split takes 8 registers. With 160
# registers kernels of 16 columns spill 8 bytes, and with 144 those of 8 bits, whose operands are in registers, 96 (ptxas 13.0,
# for an H200).
MAX_LOADS, MAX_REGISTERS, MAX_REGISTERS_WITH_8_BITS = 17, 144, 128


class TileVisit[Memory](NamedTuple):
    """The visit of a CTA to a tile, of which it has all blocks or some: its split."""

    cta: Cta[Memory]
    tile: Tile
    entry: Entry
    first_index: Scalar  # of the tile's blocks, the first that the CTA visits
    step: Scalar  # how many blocks the CTA has visited before
    num_blocks: Scalar

    @classmethod
    def of(
        cls,
        cta: Cta[Memory],
        tile: Tile,
        entry: Entry,
        first_index: Scalar,
        step: Scalar,
        num_steps: Scalar,
    ) -> "TileVisit[Memory]":
        """Compute how many blocks of a tile a CTA visits, from its `step`-th on, of `num_steps` in all."""
        num_blocks = jnp.minimum(entry.num_blocks - first_index, num_steps - step)
        return cls(cta, tile, entry, first_index, step, num_blocks)

    def prepare(self, is_due: jax.Array | bool) -> None:
        """Prepare the word that counts the tile's splits, if `is_due` and the tile is split.

        That is due before the ring is filled for a CTA's first tile, and when the visit begins for others.
        """
        when(~self._is_whole() & is_due)(lambda: self._splits().prepare())

    def store(
        self, result: tuple[jax.Array, jax.Array], store: Callable[[jax.Array, jax.Array], None]
    ) -> None:
        """Store the tile's O^T and lse in base 2 by `store`, or this CTA's split of it; the last CTA that has one merges
        all."""

        def store_split() -> None:
            splits = self._splits()
            splits.store(*result)
            when(splits.arrive() != 0)(lambda: store(*splits.merge()))

        cond(self._is_whole(), lambda: store(*result), store_split)

    def _is_whole(self) -> jax.Array:
        if self.cta.spec.split_blocks is None:
            return self.num_blocks == self.entry.num_blocks
        return load_fixed_splits(self.cta, self.tile.entry).num_rows == 1

    def _splits(self) -> "TileSplits":
        if self.cta.spec.split_blocks is None:
            first_step = self.step - self.first_index
            return TileSplits.of_ctas(self.cta, first_step, self.entry.num_blocks)
        return TileSplits.of_rows(self.cta, self.tile.head, self.tile.entry)


def load_fixed_splits(cta: Cta[Any], row: Scalar) -> FixedSplits:
    """Load the rows of the entry whose fixed split a row of the plan is."""
    plan = cta.inputs.plan
    assert isinstance(plan, PlanTables), "fixed splits have tables"
    return plan.load_fixed_splits(row)


class TileSplits(NamedTuple):
    """The splits of a tile: `first` to `last` are the CTAs that have them, or the rows of fixed splits."""

    cta: Cta[Any]
    own: Scalar  # the index of this CTA's split in the workspace
    first: Scalar
    last: Scalar
    word: Ref  # that counts arrivals

    @classmethod
    def of_ctas(cls, cta: Cta[Any], first_step: Scalar, num_blocks: Scalar) -> "TileSplits":
        """Compute which CTAs visit a tile of `num_blocks`, whose first block is the `first_step`-th from this CTA's first one
        on; negative if an earlier CTA begins the tile."""
        begin, deal = load_deal(cta.memory.deal)
        tile_begin, own = begin + first_step, lax.axis_index("cta")
        first, last = deal.cta_of(tile_begin), deal.cta_of(tile_begin + num_blocks - 1)
        word = cta.outputs.arrivals.at[first]
        return cls(cta, _split_index(own, own == first), first, last, word)

    @classmethod
    def of_rows(cls, cta: Cta[Any], head: Scalar, row: Scalar) -> "TileSplits":
        """Load the rows of the tile whose fixed split this one is."""
        first, count = load_fixed_splits(cta, row)
        start = head * cta.spec.max_rows
        word = cta.outputs.arrivals.at[start + first]
        return cls(cta, start + row, start + first, start + first + count - 1, word)

    def prepare(self) -> None:
        """Set the word that counts arrivals to none, unless another CTA has. To call before this CTA visits the tile."""
        _prepare(self.word)

    def store(self, acc: jax.Array, lse: jax.Array) -> None:
        """Store the split of this CTA: O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`."""
        outputs = self.cta.outputs
        for i, rows in enumerate(layouts.slices(acc.shape[0], 64)):
            tile = acc[rows.start : rows.start + rows.size]
            register_io.store_fragments(outputs.split_out.at[self.own, i], tile)
        gather_scatter.store_columns(outputs.split_lse.at[self.own], lse)

    def arrive(self) -> jax.Array:
        """Return 1 if all other splits of the tile have been stored when this CTA's one is, else 0."""
        return _arrive(self.word, self.last - self.first)

    def merge(self) -> tuple[jax.Array, jax.Array]:
        """Return O^T and lse in base 2 of the tile, of which all splits are stored: an online softmax over splits."""
        columns = self.cta.spec.columns
        shape = self.cta.config.value_dim, columns
        registers = math.prod(shape) // THREADS
        is_plain = self.cta.spec.quantized is None
        available = (MAX_REGISTERS if is_plain else MAX_REGISTERS_WITH_8_BITS) - registers
        unroll = max(1, min(MAX_LOADS, available // registers))

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
        maximum = layouts.splat_constant(NO_MAXIMUM, (columns,), COL_LAYOUT)
        if self.cta.spec.split_blocks is not None:
            # Where turns begin, and how many splits registers leave room for, follows from an entry's other queries. With
            # the maximum of all splits from the beginning nothing is scaled, and so rounded, between turns.
            maximum = lax.fori_loop(
                self.first, self.last + 1, lambda i, m: jnp.maximum(m, self._load_lse(i)), maximum
            )
        turns = lax.div(self.last - self.first + unroll, I32(unroll))
        acc, maximum, total = lax.fori_loop(I32(0), turns, add, (zeros, maximum, no_sum))
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


# What the upper 48 bits of a word are while it counts; the lower 16 are the arrivals. XLA does not initialize outputs, and a word
# that looked like one that counts would stay so. As bfloat16, float16, float32 or float64 this is NaN, with bits that no
# instruction makes. Of words of random bits, as keys of 8 bits may be, 2^-48 have it: with 264 words, one launch in 10^12.
COUNTS = 0xFFF7_7FF7_FFA2
MAX_SPLITS = 1 << 16  # of a tile


@inline_op("prepare_arrivals", plgpu.RefType())
def _prepare(_, word: Ref) -> None:
    """Begin to count in a word of device memory, if it does not count. A thread of the last warp does, so that the first one,
    which may begin to load, need not wait for the word."""
    code = (
        f"{{ .reg .pred p; .reg .b64 v, u; setp.ne.s32 p, $0, {THREADS - LANES}; @p bra done; "
        f"ld.relaxed.gpu.global.b64 v, [$1]; shr.u64 u, v, 16; setp.eq.u64 p, u, {COUNTS}; "
        f"@p bra done; atom.relaxed.gpu.global.cas.b64 u, [$1], v, {COUNTS << 16}; done: }}"
    )
    asm(code, "r,l", thread_values.warpgroup_thread_index(), thread_values.address(word))


@inline_op("arrive_last", plgpu.RefType(), plgpu.Layout.WG_SPLAT, result=thread_values.SCALAR_I32)
def _arrive(_, word: Ref, others: Registers) -> Registers:
    """Count an arrival in a word of device memory; return 1 for the last one, which sets it to 0, after `others`.

    What all threads of the CTA have stored before is released, and what the CTAs that arrived before have stored is
    acquired: the barriers carry that between the threads and the one that counts (PTX ISA, memory consistency model:
    causality order). The last shuffle tells ptxas that the result is the same in all threads (see `votes`).
    """
    barrier = f"{int(NamedBarrier.VOTE)}, {THREADS}"
    code = (
        "{ .reg .pred p, leader; .reg .b32 v; .reg .b64 count; "
        f"barrier.cta.sync {barrier}; setp.eq.s32 leader, $1, 0; mov.b64 count, -1; "
        "@leader atom.acq_rel.gpu.global.add.u64 count, [$2], 1; cvt.u32.u64 v, count; "
        "and.b32 v, v, 0xffff; setp.eq.and.s32 p, v, $3, leader; @p st.relaxed.gpu.global.b64 [$2], 0; "
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
