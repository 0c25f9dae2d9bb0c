"""Reads the scales of 64 keys or values of 8 bits in shared memory, `[copies, heads, keys]`: those of the first
head."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import ROW_LAYOUT
from pallas_fa2.backends.common.primitives.thread_values import (
    SCALAR_I32,
    address,
    splat,
    sum_i32,
    thread_field,
    vector,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar


def load(buffer: Ref) -> jax.Array:
    """Return the scales of 64 keys, float32 `[64]`."""
    result = plgpu.ShapeDtypeStruct((64,), jnp.float32, ROW_LAYOUT)

    @inline_op("load_scales", plgpu.RefType(), result=result)
    def run(_, buffer: Ref) -> Registers:
        row = sum_i32(thread_field(5, 2, 16), thread_field(2, 3, 1))
        layout, f32 = ROW_LAYOUT.to_mgpu(), ir.F32Type.get()
        registers = np.empty(layout.registers_shape((64,)), object)
        code = "{ .reg .b16 h, z; mov.b16 z, 0; ld.shared.b16 h, [$1]; mov.b32 $0, {z, h}; }"
        for half, at in enumerate(np.ndindex(*registers.shape)):
            place = _scale_address(buffer, arith.addi(row, i32(8 * half)))
            value = asm(code, "=f,r", place, result=f32)
            registers[at] = vector([value])
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return run(buffer)


def largest_exponent(buffer: Ref, first: Scalar, end: Scalar) -> jax.Array:
    """Return the exponent of the largest finite scale of keys from `first` on and before `end`, of 64: the bits of that
    power of two as float32, and 0 where there is none."""

    @inline_op(
        "largest_exponent",
        *(plgpu.RefType(), plgpu.Layout.WG_SPLAT, plgpu.Layout.WG_SPLAT),
        result=SCALAR_I32,
    )
    def find(_, buffer: Ref, first: Registers, end: Registers) -> Registers:
        key = thread_field(0, 5, 2)  # and the next one; all warps do the same
        code = (
            "{ .reg .pred p; .reg .b32 v, a, b, k; ld.shared.b32 v, [$1]; add.s32 k, $2, 1; "
            "shl.b32 a, v, 16; and.b32 a, a, 0x7f800000; and.b32 b, v, 0x7f800000; "
            "setp.ge.s32 p, $2, $3; setp.lt.and.s32 p, $2, $4, p; setp.lt.and.u32 p, a, 0x7f800000, p; "
            "selp.b32 a, a, 0, p; "
            "setp.ge.s32 p, k, $3; setp.lt.and.s32 p, k, $4, p; setp.lt.and.u32 p, b, 0x7f800000, p; "
            "selp.b32 b, b, 0, p; "
            "max.u32 a, a, b; redux.sync.max.u32 $0, a, -1; }"
        )
        place = _scale_address(buffer, key)
        operands = place, key, first.registers[()], end.registers[()]
        return splat(asm(code, "=r,r,r,r,r", *operands, result=key.type))

    return find(buffer, I32(first), I32(end))


def _scale_address(buffer: Ref, key: MlirValue) -> MlirValue:
    """Emit the address of a key's scale."""
    kind = ir.MemRefType(buffer.type)
    (stride, _, _), _ = kind.get_strides_and_offset()
    keys = kind.shape[2]
    copy = arith.shrui(key, i32(keys.bit_length() - 1))
    inside = arith.andi(key, i32(keys - 1))
    offset = arith.addi(arith.muli(copy, i32(stride)), inside)
    return arith.addi(address(buffer, 32), arith.shli(offset, i32(1)))
