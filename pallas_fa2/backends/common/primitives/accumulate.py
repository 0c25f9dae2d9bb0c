"""Float32 tiles that many CTAs add up in device memory, in the order of registers.

A tile of 64 rows and n columns is `[64 n]`. Vectors of 16 bytes are added from compute capability 9.0 on, in the order
of `register_io.add_fragments`. Before, value i of thread t lies at 128 i + t, so that a warp's additions are of
128 bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import register_io
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, THREADS
from pallas_fa2.backends.common.primitives.thread_values import (
    scalars,
    vector,
)
from pallas_fa2.backends.common.primitives.types import Ref, Registers


def add_tile(target: Ref, tile: jax.Array, vectors: bool) -> None:
    """Add a tile to device memory, atomically for each value and in any order."""
    (register_io.add_fragments if vectors else _add_words)(target, tile)


def load_tile(source: Ref, columns: int, vectors: bool) -> jax.Array:
    """Load a tile that another kernel has added up."""
    return (register_io.load_fragments if vectors else _load_words)(source, columns)


@inline_op("add_fragment_words", plgpu.RefType(), ACC_LAYOUT)
def _add_words(_, target: Ref, tile: Registers) -> None:
    start = register_io.thread_start(target, 4)
    for i, value in enumerate(scalars(tile)):
        code = f"red.relaxed.gpu.global.add.f32 [$0 + {4 * THREADS * i}], $1;"
        asm(code, "l,f", start, value)


def _load_words(source: Ref, columns: int) -> jax.Array:
    shape = 64, columns

    @inline_op(
        "load_fragment_words",
        plgpu.RefType(),
        result=plgpu.ShapeDtypeStruct(shape, jnp.float32, ACC_LAYOUT),
    )
    def load(_, source: Ref) -> Registers:
        start, layout = register_io.thread_start(source, 4), ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), object)
        for i in range(registers.size):
            values = (
                asm(
                    f"ld.global.nc.f32 $0, [$1 + {4 * THREADS * (2 * i + e)}];",
                    "=f,l",
                    start,
                    result=ir.F32Type.get(),
                    side_effects=False,
                )
                for e in range(2)
            )
            registers.flat[i] = vector(list(values))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)
