"""Operands of mma.sync (m16n8k16): fragments of swizzled shared memory and of accumulators."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.inline import inline_op
from pallas_fa2.backends.common.primitives import layouts
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


def panel_slices(buffer: Ref) -> list[Slice]:
    """Return slices of a buffer's columns, whole swizzled panels each: 64 columns, or 32 where rows are no multiple."""
    columns = buffer.shape[-1]
    return layouts.slices(columns, 64 if columns % 64 == 0 else 32)


def multiply_rows(accs: list[jax.Array], lefts: list[jax.Array], buffer: Ref) -> list[jax.Array]:
    """Return acc + left @ buffer of each tile of rows; they share the fragments of the buffer `[k, n]`."""
    for start in range(0, buffer.shape[0], K_STEP):
        right = load_right(buffer.at[pl.ds(start, K_STEP)])
        pairs = zip(accs, lefts, strict=True)
        accs = [plgpu.mma(acc, left[:, start : start + K_STEP], right) for acc, left in pairs]
    return accs
