"""Operands of mma.sync (m16n8k16): fragments of swizzled shared memory and of accumulators."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_fa2.backends.common.inline import inline_op
from pallas_fa2.backends.common.primitives import layouts, thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.common.primitives.types import Ref, Registers, Slice

K_STEP = 16  # the K of an instruction: rows of a right operand that are loaded at a time


def load_left(ref: Ref, transposed: bool = False) -> jax.Array:
    """Load a left operand `[64, k]`, or its transpose, from swizzled shared memory by ldmatrix."""
    ref = ref.transpose((1, 0)) if transposed else ref
    return plgpu.load(ref, layout=plgpu.Layout.MMA_LHS(ref.dtype))


def load_right(ref: Ref, transposed: bool = False) -> jax.Array:
    """Load a right operand `[k, n]`, or its transpose, from swizzled shared memory by ldmatrix."""
    ref = ref.transpose((1, 0)) if transposed else ref
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(ref.dtype))


def as_left(tile: jax.Array) -> jax.Array:
    """Return a 16-bit accumulator tile as a left operand: the same registers by another name."""
    layout = plgpu.Layout.MMA_LHS(tile.dtype)

    @inline_op("as_left", ACC_LAYOUT, result=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout))
    def rename(_, tile: Registers) -> Registers:
        target = layout.to_mgpu()
        registers = tile.registers.reshape(target.registers_shape(tile.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return rename(tile)


def panel_width(columns: int) -> int:
    """Return the columns of a swizzled panel: 64, or 32 where rows are no multiple."""
    return 64 if columns % 64 == 0 else 32


def panel_slices(buffer: Ref, terms: int = 1, most: int = 64) -> list[Slice]:
    """Return slices of a buffer's columns, whole swizzled panels of at `most` so many each; of an operand of several
    terms, of the first."""
    columns = buffer.shape[-1] // terms
    return layouts.slices(columns, min(panel_width(columns), most))


def term_slices(buffer: Ref, columns: Slice, terms: int) -> list[Slice]:
    """Return where some columns of each term of an operand are: rows have their terms one after the other."""
    dim = buffer.shape[-1] // terms
    return [pl.ds(i * dim + columns.start, columns.size) for i in range(terms)]


def split_tile(tile: jax.Array, dtype: DTypeLike, terms: int) -> list[jax.Array]:
    """Return a float32 tile as tiles of 16 bits, whose sum it is but for the rounding of the last."""
    parts = []
    for i in range(terms):
        part = tile.astype(dtype)
        parts.append(part)
        if i + 1 < terms:
            tile -= part.astype(jnp.float32)
    return parts


def split_left(tile: jax.Array, dtype: DTypeLike, terms: int) -> list[jax.Array]:
    """Return the terms of a float32 tile as left operands."""
    return list(map(as_left, split_tile(tile, dtype, terms)))


# Accumulators of products, by the size of the products: of term i of the left and term j of the right operand at i + j,
# which are 2^-11 (i + j) of the largest in size.
Sums = list[list[jax.Array]]  # of each of the tiles that share right operands


def zero_sums(terms: int, tiles: int, shape: tuple[int, int]) -> Sums:
    return [[thread_values.zero_accumulator(shape) for _ in range(tiles)] for _ in range(terms)]


def add_products(sums: Sums, lefts: list[list[jax.Array]], rights: list[jax.Array]) -> Sums:
    """Add left @ right of each tile, `lefts[tile][term]` and `rights[term]`, but the products below the last sum."""
    sums = list(sums)
    for i in range(len(rights)):
        for j in range(len(rights) - i):
            tiles = zip(sums[i + j], lefts, strict=True)
            sums[i + j] = [plgpu.mma(acc, left[i], rights[j]) for acc, left in tiles]
    return sums


def total(sums: Sums) -> list[jax.Array]:
    """Add up the sums of each tile, the smallest first."""
    return [functools.reduce(jnp.add, reversed(tile)) for tile in zip(*sums, strict=True)]


def add_terms(
    accs: list[jax.Array], lefts: list[list[jax.Array]], rights: list[jax.Array]
) -> list[jax.Array]:
    """Return acc + left @ right of each tile, but for the products below the last size: all sizes in one accumulator.

    The smallest products come first, so that few of the sums that tensor cores round toward zero are large. It takes
    half the registers of `add_products`.
    """
    for size in reversed(range(len(rights))):
        for i in range(size + 1):
            tiles = zip(accs, lefts, strict=True)
            accs = [plgpu.mma(acc, left[i], rights[size - i]) for acc, left in tiles]
    return accs


def multiply_rows(accs: list[jax.Array], lefts: list[jax.Array], buffer: Ref) -> list[jax.Array]:
    """Return acc + left @ buffer of each tile of rows; they share the fragments of the buffer `[k, n]`."""
    for start in range(0, buffer.shape[0], K_STEP):
        right = load_right(buffer.at[pl.ds(start, K_STEP)])
        pairs = zip(accs, lefts, strict=True)
        accs = [plgpu.mma(acc, left[:, start : start + K_STEP], right) for acc, left in pairs]
    return accs
