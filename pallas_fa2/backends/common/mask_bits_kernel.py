"""The kernel that evaluates a mask into a bitmap (`mask_bits`)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts, thread_values
from pallas_fa2.backends.common.primitives.launch import build_kernel
from pallas_fa2.backends.common.primitives.packed_bools import BoolTile
from pallas_fa2.backends.common.primitives.pairwise import PairwiseTile
from pallas_fa2.backends.common.primitives.tile_ops import TILE_OPS
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.common.tile_mods import load_axis_inputs
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource, AxisInputs, TileInputs

FRAGMENT = 64
# CTAs of a row of tiles, as long as there are no more than `MAX_CTAS` in all. With fewer, a row with many partial
# blocks takes longer than all others; so many that launch in vain take 2 us.
CTAS_PER_ROW, MAX_CTAS = 16, 4096


def rows_first(q_and_k: tuple[Any, Any], q_axis: int) -> tuple[Any, Any]:
    """Return what belongs to queries and to keys with that of a tile's rows first."""
    q, k = q_and_k
    return (q, k) if q_axis == 0 else (k, q)


@dataclasses.dataclass(frozen=True)
class BitsKernel:
    """A kernel that evaluates a mask: a CTA on some blocks of a row of tiles, a warpgroup on 64 of its rows."""

    spec: KernelSpec
    aux: AuxInputs
    tile: tuple[int, int]  # queries and keys
    q_axis: int
    counts: tuple[int, int, int]  # batch entries, tiles, and blocks that each may visit

    @property
    def fragments(self) -> tuple[int, int]:
        """How many fragments a tile's rows and columns have."""
        rows, columns = rows_first(self.tile, self.q_axis)
        return rows // FRAGMENT, columns // FRAGMENT

    @property
    def ctas_per_row(self) -> int:
        batch, tiles, blocks = self.counts
        return min(blocks, CTAS_PER_ROW, max(1, MAX_CTAS // (batch * tiles)))

    @functools.cached_property
    def padded_aux(self) -> AuxInputs:
        return self.aux._replace(pairwise=self.aux.pairwise_unpacked).padded(*self.tile)

    @property
    def bits_type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.counts, *self.fragments, layouts.THREADS), I32)

    def launch(self, run: Callable, out: Any) -> Callable:
        entries, tiles, _ = self.counts
        grid = {"batch": entries, "tile": tiles, "share": self.ctas_per_row}
        return build_kernel("mask_bits", run, [], out, grid, self.fragments[0])

    @property
    def axes(self) -> list[Scalar]:
        """A CTA's batch entry, row of tiles, and index among the CTAs of that row."""
        return [lax.axis_index(name) for name in ("batch", "tile", "share")]

    @property
    def warpgroup(self) -> Scalar:
        return lax.axis_index("warpgroup")

    def for_each_block(self, count: Any, load_block_index: Callable, body: Callable) -> None:
        """Run body(load_block_index(i)) for each i below `count` that is this CTA's, and load the next index
        meanwhile."""
        cta, ctas = self.axes[2], self.ctas_per_row
        own_count = arithmetic.div(count - cta + (ctas - 1), ctas)
        last = jnp.maximum(own_count - 1, 0)

        def step(i: Scalar, block: Scalar) -> Scalar:
            next_block = load_block_index(cta + jnp.minimum(i + 1, last) * ctas)
            body(block)
            return next_block

        lax.fori_loop(I32(0), own_count, step, load_block_index(cta))

    def store_block(self, bits: Ref, aux: AuxInputs, block: Scalar) -> list[jax.Array]:
        """Store the bits of a warpgroup's rows of a block, and return them."""
        spec, fragments = self.spec, self.fragments
        entry, row, _ = self.axes
        # Keys past the end are masked where they are columns; where they are rows, their gradients are not kept.
        k_end = spec.kv_len if self.q_axis == 0 and spec.kv_len % self.tile[1] else None
        target, words = bits.at[entry, row, block, self.warpgroup], []
        for j in range(fragments[1]):
            index = row * fragments[0] + self.warpgroup, block * fragments[1] + j
            first = [I32(FRAGMENT) * x for x in index]
            words.append(compute_fragment(spec, aux, entry, first, self.q_axis, k_end))
            target[j] = words[-1]
        return words


def compute_fragment(
    spec: KernelSpec,
    aux: AuxInputs,
    entry: Scalar,
    first: list[Any],
    q_axis: int,
    k_end: int | None,
) -> jax.Array:
    """Return which pairs of a fragment are masked: `masking.pack_bits`. `first` are its first row and column."""
    visible, shape = spec.mask.visible, (FRAGMENT, FRAGMENT)
    first_query, first_key = first[q_axis], first[1 - q_axis]
    head_scalars = aux.head_scalars.load(entry, 0, visible.head_inputs)
    fragment = pl.ds(first_query, FRAGMENT), pl.ds(first_key, FRAGMENT)

    def pairwise_tile(source: ArgSource) -> PairwiseTile | BoolTile:
        array = aux.pairwise[cast(int, source.position)]
        ref = layouts.index_broadcast(array, entry, 0, *fragment)
        if source.dtype == "bool":
            return BoolTile.load_packed(ref, keys_are_rows=q_axis == 1)
        return PairwiseTile(ref, is_swizzled=False, transposed=q_axis == 1)

    pairwise = {source: pairwise_tile(source) for source in visible.pairwise_inputs}

    def axis_inputs(side: str, axis: int, start: Any) -> AxisInputs:
        count = FRAGMENT if axis == 0 else PIECE_COLUMNS
        tokens = (aux.q if side == "q" else aux.k).at[entry, :, pl.ds(start, count)]
        first_index = start + (spec.q_index_offset if side == "q" else 0)
        if axis == 0:
            index = layouts.index(shape, 0, first_index)
        else:
            index = thread_values.column_iota(count, first_index)
        return load_axis_inputs(TILE_OPS, axis, index, tokens, visible.token_inputs(side), first=0)

    sides = ("q", "k") if q_axis == 0 else ("k", "q")
    rows = axis_inputs(sides[0], 0, first[0])

    def inputs_for_columns(columns: Any) -> TileInputs:
        axes = {sides[0]: rows, sides[1]: axis_inputs(sides[1], 1, first[1] + columns.start)}
        pairs = {s: x.load(columns.start, columns.size, s.dtype) for s, x in pairwise.items()}
        return TileInputs(axes["q"], axes["k"], head_scalars, pairs)

    return spec.mask.pack_bits(inputs_for_columns, k_end)
