"""Float32 tiles that many CTAs add up in device memory, in the order of registers.

A tile of 64 rows and n columns is `[64 n]`: value i of thread t lies at 128 i + t, or with `vectors` values 4 i to 4 i + 3 at
512 i + 4 t. So a warp's additions are of adjacent words. Vectors need compute capability 9.0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.sm90.primitives.thread_values import address, i32, scalars, thread_number


def add_tile(target: Any, tile: jax.Array, vectors: bool) -> None:
    """Adds a tile to device memory, atomically for each value and in any order."""

    def add(_: Any, target: Any, tile: Any) -> None:
        start, void = _thread_start(target, 16 if vectors else 4), ir.Type.parse("!llvm.void")
        values = scalars(tile)
        if vectors:
            for i in range(0, len(values), 4):
                code = f"red.relaxed.gpu.global.add.v4.f32 [$0 + {512 * i}], {{$1, $2, $3, $4}};"
                operands = [start, *values[i : i + 4]]
                llvm.inline_asm(void, operands, code, "l,f,f,f,f", has_side_effects=True)
        else:
            for i, value in enumerate(values):
                code = f"red.relaxed.gpu.global.add.f32 [$0 + {512 * i}], $1;"
                llvm.inline_asm(void, [start, value], code, "l,f", has_side_effects=True)

    inline_op(f"add_tile {int(vectors)}", add, None, plgpu.RefType(), ACC_LAYOUT)(target, tile)


def load_tile(source: Any, columns: int, vectors: bool) -> jax.Array:
    """Loads a tile that another kernel has added up."""

    def load(_: Any, source: Any) -> Any:
        start = _thread_start(source, 16 if vectors else 4)
        f32, layout = ir.F32Type.get(), ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((64, columns)), object)
        pair = ir.VectorType.get((2,), f32)
        values = []
        for i in range(0, 2 * registers.size, 4):
            if vectors:
                names, kinds = "{$0, $1, $2, $3}", ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
                code = f"ld.global.nc.v4.f32 {names}, [$4 + {512 * i}];"
                loaded = llvm.inline_asm(kinds, [start], code, "=f,=f,=f,=f,l")
                values += [llvm.extractvalue(f32, loaded, [e]) for e in range(4)]
            else:
                for e in range(4):
                    code = f"ld.global.nc.f32 $0, [$1 + {512 * (i + e)}];"
                    values.append(llvm.inline_asm(f32, [start], code, "=f,l"))
        for i in range(registers.size):
            both = llvm.mlir_undef(pair)
            for e in range(2):
                both = llvm.insertelement(both, values[2 * i + e], i32(e))
            registers.flat[i] = both
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((64, columns), jnp.float32, ACC_LAYOUT)
    return inline_op(f"load_tile {int(vectors)}", load, result, plgpu.RefType())(source)


def _thread_start(ref: Any, size: int) -> Any:
    thread = arith.andi(thread_number(), i32(127))
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(address(ref), arith.extui(i64, arith.muli(thread, i32(size))))
