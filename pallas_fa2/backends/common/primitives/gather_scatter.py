"""Elements of arrays in device memory, at an index for each element of a tile or for each of its columns.

None of it orders memory.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, COL_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.thread_values import (
    address,
    elements,
    map_elements,
    scalars,
    warpgroup_thread_index,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers


@inline_op("scatter_columns", plgpu.RefType(), COL_LAYOUT, COL_LAYOUT)
def scatter_columns(_, target: Ref, values: Registers, indices: Registers) -> None:
    """Store the float32 of each column at its index in device memory `[n]`, if there is such an index."""
    # Every warp has all columns: a lane has two of each eight, the same as seven others.
    (size,) = ir.MemRefType(target.type).shape
    thread, start = warpgroup_thread_index(), address(target)
    for value, index in zip(scalars(values), scalars(indices), strict=True):
        code = (
            f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $2, {size}; setp.lt.and.u32 p, $3, 4, p; "
            "mad.wide.u32 a, $2, 4, $0; @p st.global.f32 [a], $1; }"
        )
        asm(code, "l,f,r,r", start, value, index, thread)


@inline_op("store_columns", plgpu.RefType(), COL_LAYOUT)
def store_columns(_, target: Ref, values: Registers) -> None:
    """Store the float32 of each column in device memory `[columns]`, which begins at a multiple of 8 bytes.

    jax 0.12 refuses an assignment of less than a line of L2.
    """
    thread, start = warpgroup_thread_index(), address(target)
    own = scalars(values)
    for i in range(0, len(own), 2):  # two columns of eight, as in `scatter_columns`
        code = (
            "{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $3, 4; mad.wide.u32 a, $3, 8, $0; "
            f"@p st.global.v2.f32 [a + {16 * i}], {{$1, $2}}; }}"
        )
        asm(code, "l,f,f,r", start, own[i], own[i + 1], thread)


@inline_op("scatter_outer", plgpu.RefType(), ACC_LAYOUT, ROW_LAYOUT, COL_LAYOUT)
def scatter_outer(_, target: Ref, tile: Registers, rows: Registers, columns: Registers) -> None:
    """Store the elements of a tile of 16 bits in an array in device memory as it lies there, each at the sum of two
    indices, of its row and of its column, unless one is negative."""
    start, half_word = address(target), ir.IntegerType.get_signless(16)
    row_of, column_of = scalars(rows), scalars(columns)
    code = (
        "{ .reg .pred p; .reg .b32 i; .reg .b64 a; or.b32 i, $2, $3; setp.ge.s32 p, i, 0; add.s32 i, $2, $3; "
        "mad.wide.u32 a, i, 2, $0; @p st.global.b16 [a], $1; }"
    )
    for at, register in np.ndenumerate(tile.registers):
        row = row_of[sum(at[2:])]  # rows r and r + 8 of a warp's 16
        for e, value in enumerate(elements(register)):  # two of each 8 columns
            column = column_of[2 * at[1] + e]
            asm(code, "l,h,r,r", start, llvm.bitcast(half_word, value), row, column)


def gather_elements(source: Ref, index: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return the 32 bits of the elements of an array in device memory at these indices, as it lies there: int32, in the
    layout of the indices, which vary over these axes of a tile of 64 rows.

    Floats of 16 bits become those of float32, and bytes integers. An index past the end stands for the last element. No
    thread writes the array.
    """
    layout = {(0,): ROW_LAYOUT, (1,): COL_LAYOUT, (0, 1): ACC_LAYOUT}[axes]
    result = plgpu.ShapeDtypeStruct(index.shape, I32, layout)
    size, dtype = math.prod(source.shape), jnp.dtype(source.dtype)
    load = {
        "bfloat16": "ld.global.nc.b16 h, [a]; mov.b32 $0, {zero, h};",
        "float16": "ld.global.nc.b16 h, [a]; cvt.f32.f16 f, h; mov.b32 $0, f;",
        "int8": "ld.global.nc.u8 $0, [a];",
    }.get(dtype.name, "ld.global.nc.b32 $0, [a];")
    code = (
        "{ .reg .b32 i; .reg .b64 a; .reg .b16 h, zero; .reg .f32 f; mov.b16 zero, 0; "
        f"min.u32 i, $2, {size - 1}; mad.wide.u32 a, i, {dtype.itemsize}, $1; {load} }}"
    )

    @inline_op("gather_elements", plgpu.RefType(), layout, result=result)
    def gather(_, source: Ref, index: Registers) -> Registers:
        start = address(source)

        def element(x: MlirValue, *_: Any) -> MlirValue:
            return asm(code, "=r,l,r", start, x, result=x.type, side_effects=False)

        return map_elements(index, element)

    return gather(source, index)
