"""The merge of a tile's splits, by the last of their CTAs that arrives: no kernel follows.

O = sum_i 2^(lse_i - lse) O_i with lse = log2 sum_i 2^lse_i (Flash-Decoding, and FlashInfer's `merge_states`). The splits
are read in the order of their keys, the CTA's own one as well, so that the result does not depend on who is the last.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.arithmetic import I32
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
from pallas_fa2.backends.sm90.decode.memory import Cta
from pallas_fa2.backends.sm90.decode.schedule import ARRIVALS_COLUMN, Share
from pallas_fa2.backends.sm90.decode.spec import NO_MAXIMUM
from pallas_fa2.control_flow import rematerialize

# Registers of a thread that hold splits which are loaded together: with 128, a kernel of 64 columns spills.
LOAD_REGISTERS = 64


class TileSplits(NamedTuple):
    """The splits of a tile that several CTAs visit, from `first_cta` on one CTA after another."""

    cta: Cta
    first_cta: Scalar
    last_cta: Scalar

    @classmethod
    def load(cls, cta: Cta, begins_here: jax.Array | bool) -> "TileSplits":
        """Load which CTAs visit the tile that this CTA visits in part: the first or the last one of its share."""
        # Loaded here: they would hold registers through the loops. The CTA after a tile's first one begins with it.
        index = rematerialize(lax.axis_index("cta"))
        row = jnp.where(begins_here, index + 1, index)
        share = Share.load(cta.inputs.plan.shares, row)
        return cls(cta, jnp.where(begins_here, index, share.first_cta), share.last_cta)

    def _index(self, cta: Scalar) -> Scalar:
        """Compute the index of a CTA's split: only the first CTA begins the tile."""
        return 2 * cta + jnp.where(cta == self.first_cta, 1, 0)

    def store(self, acc: jax.Array, lse: jax.Array) -> None:
        """Store the split of this CTA: O^T, normalized, `[Hv, columns]`, and lse in base 2, `[columns]`."""
        index, outputs = self._index(lax.axis_index("cta")), self.cta.outputs
        for i, rows in enumerate(layouts.slices(acc.shape[0], 64)):
            tile = acc[rows.start : rows.start + rows.size]
            register_io.store_fragments(outputs.split_out.at[index, i], tile)
        outputs.split_lse.at[index][...] = lse

    def arrive(self) -> jax.Array:
        """Return 1 if all other splits of the tile have been stored when this CTA's one is, else 0."""
        word = self.cta.inputs.plan.shares.at[self.first_cta, ARRIVALS_COLUMN]
        return _arrive(word, self.last_cta - self.first_cta)

    def merge(self) -> tuple[jax.Array, jax.Array]:
        """Return O^T and lse in base 2 of the tile, of which all splits are stored."""
        lse = self._merge_lse()
        # 0 where no split has a key: as all have `NO_MAXIMUM`, they would weigh 1
        shift = jnp.where(lse <= NO_MAXIMUM, jnp.inf, lse)

        def add(ctas: Sequence[Scalar], acc: jax.Array) -> jax.Array:
            loaded = [(self._load_out(cta), self._load_lse(cta)) for cta in ctas]
            for out, split_lse in loaded:
                acc += out * broadcast_columns(jnp.exp2(split_lse - shift), acc.shape)
            return acc

        shape = self.cta.config.value_dim, self.cta.spec.columns
        zeros = layouts.splat_constant(0.0, shape, ACC_LAYOUT)
        return self._fold(add, zeros, registers=math.prod(shape) // THREADS), lse

    def _merge_lse(self) -> jax.Array:
        """Return log2 sum_i 2^lse_i of each column."""
        columns = (self.cta.spec.columns,)

        def add(ctas: Sequence[Scalar], state: Any) -> Any:
            maximum, total = state
            loaded = list(map(self._load_lse, ctas))
            new = functools.reduce(jnp.maximum, loaded, maximum)
            terms = (jnp.exp2(lse - new) for lse in loaded)
            return new, functools.reduce(jnp.add, terms, total * jnp.exp2(maximum - new))

        zeros = layouts.splat_constant(0.0, columns, COL_LAYOUT)
        start = layouts.splat_constant(NO_MAXIMUM, columns, COL_LAYOUT), zeros
        maximum, total = self._fold(add, start, registers=columns[0] // 4)
        return jnp.where(maximum <= NO_MAXIMUM, NO_MAXIMUM, maximum + jnp.log2(total))

    def _fold(self, add: Callable[[Sequence[Scalar], Any], Any], start: Any, registers: int) -> Any:
        """Return add(CTAs, carry) of all CTAs, in order, several at once, of which each loads so many registers."""
        unroll = max(1, LOAD_REGISTERS // registers)
        turns = lax.div(self.last_cta - self.first_cta + unroll, I32(unroll))

        def add_some(i: Scalar, carry: Any) -> Any:
            first = self.first_cta + i * unroll
            return add([first + u for u in range(unroll)], carry)

        return lax.fori_loop(I32(0), turns, add_some, start)

    def _load_out(self, cta: Scalar) -> jax.Array:
        """Load O^T of a CTA's split, or zeros if it comes after the last."""
        split_out, columns = self.cta.outputs.split_out, self.cta.spec.columns
        index, exists = (
            self._index(jnp.minimum(cta, self.last_cta)),
            jnp.asarray(cta <= self.last_cta),
        )
        tiles = [
            register_io.take_fragments(split_out.at[index, i], columns, exists)
            for i in range(split_out.shape[1])
        ]
        return lax.concatenate(tiles, 0)

    def _load_lse(self, cta: Scalar) -> jax.Array:
        """Load lse of a CTA's split, or -inf if it comes after the last."""
        index = self._index(jnp.minimum(cta, self.last_cta))
        lse = plgpu.load(self.cta.outputs.split_lse.at[index], layout=COL_LAYOUT, optimized=False)
        return lse + jnp.where(cta <= self.last_cta, 0.0, -jnp.inf)


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
