"""What each thread has of an array in registers, in inline code; and operations that have one value for each thread.

None of it orders memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    COL_LAYOUT,
    LANES,
    ROW_LAYOUT,
    THREADS,
    WARPS,
)
from pallas_fa2.backends.common.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.common.primitives.types import (
    MlirValue,
    Ref,
    RegisterIndex,
    Registers,
    Scalar,
)

PER_THREAD = plgpu.Layout.WG_STRIDED((THREADS,), 1)  # a value for each thread of a warpgroup
PER_THREAD_I32 = plgpu.ShapeDtypeStruct((THREADS,), I32, PER_THREAD)

SCALAR_I32 = plgpu.ShapeDtypeStruct((), I32, plgpu.Layout.WG_SPLAT(shape=()))


def thread_index() -> MlirValue:
    """Emit the thread's index in its CTA. It is read once, outside all loops, as that takes 350 clocks;
    but what follows from it is computed where it is used, and holds no registers elsewhere."""
    thread = mgpu.utils.thread_idx()
    return asm("mov.b32 $0, $1;", "=r,r", thread, result=thread.type)


def warpgroup_thread_index() -> MlirValue:
    """Emit the thread's index in its warpgroup."""
    return arith.andi(thread_index(), i32(THREADS - 1))


def first_column() -> MlirValue:
    """Emit the first of the thread's own columns of a tile, of which it has two in each eight."""
    return arith.shli(arith.andi(thread_index(), i32(3)), i32(1))


def thread_field(first: int, count: int, weight: int) -> MlirValue:
    """Emit some bits of the thread's index, as an integer times the weight, a power of two."""
    bits = arith.andi(thread_index(), i32(((1 << count) - 1) << first))
    shift = weight.bit_length() - 1 - first
    return arith.shli(bits, i32(shift)) if shift >= 0 else arith.shrui(bits, i32(-shift))


def sum_i32(*terms: MlirValue) -> MlirValue:
    """Emit the sum of integers."""
    return functools.reduce(arith.addi, terms)


def shuffle_xor(value: MlirValue, lanes: int, register: str) -> MlirValue:
    """Emit the exchange of a value, in a PTX register "r" or "f", with the lane whose index differs in these bits."""
    code = f"shfl.sync.bfly.b32 $0, $1, {lanes}, {LANES - 1}, -1;"
    return asm(code, f"={register},{register}", value, result=value.type)


def splat(value: MlirValue) -> Registers:
    """Return an int32 scalar array of a value that all threads share."""
    return mgpu.FragmentedArray.splat(value, shape=(), is_signed=True)


def scalars(array: Registers) -> list[MlirValue]:
    """Emit the thread's own values of an array, in the order of registers."""
    return [x for register in array.registers.flat for x in elements(register)]


def elements(register: MlirValue) -> list[MlirValue]:
    """Emit the values of a register, which is a vector."""
    count = ir.VectorType(register.type).shape[0]
    return [llvm.extractelement(register, i32(e)) for e in range(count)]


def vector(values: Sequence[MlirValue]) -> MlirValue:
    """Emit a vector of these values, which are of one type: a register."""
    register = llvm.mlir_undef(ir.VectorType.get((len(values),), values[0].type))
    for e, x in enumerate(values):
        register = llvm.insertelement(register, x, i32(e))
    return register


def thread_value(array: Registers) -> MlirValue:
    """Emit the thread's own value of an array in the layout `PER_THREAD`."""
    (value,) = scalars(array)
    return value


def from_thread_values(value: MlirValue) -> Registers:
    """Return the int32 array `[THREADS]` of the threads' own values."""
    layout = PER_THREAD.to_mgpu()
    register = llvm.mlir_undef(layout.registers_element_type(value.type))
    registers = np.array([llvm.insertelement(register, value, i32(0))], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def repeat(value: MlirValue, shape: tuple[int, ...], layout: Any) -> Registers:
    """Return a float array whose elements of a thread are all this value of its."""
    registers = np.empty(layout.registers_shape(shape), object)
    kind = layout.registers_element_type(value.type)
    count = ir.VectorType(kind).shape[0]
    for at in np.ndindex(*registers.shape):
        registers[at] = vector([value] * count)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def map_elements(
    tile: Registers,
    function: Callable[[MlirValue, RegisterIndex, int], MlirValue],
    order: Callable[[RegisterIndex], int] = lambda at: 0,
) -> Registers:
    """Return the array of function(value, index of its register, index in the register).

    Code is emitted in the order of registers, or of order(index of the register).
    """
    results = np.empty_like(tile.registers)
    for at, register in sorted(np.ndenumerate(tile.registers), key=lambda x: order(x[0])):
        for e, x in enumerate(elements(register)):
            register = llvm.insertelement(register, function(x, at, e), i32(e))
        results[at] = register
    return mgpu.FragmentedArray(_registers=results, _layout=tile.layout, _is_signed=tile.is_signed)


def zero_accumulator(shape: tuple[int, int]) -> jax.Array:
    """Return zeros for an accumulator to start from. LLVM would keep one zero for all that a loop starts, in the
    first register of one of them: ptxas then moves the others around it, and spills."""
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, ACC_LAYOUT)

    @inline_op("zero_accumulator", result=result, shape=shape)
    def zeros(_) -> Registers:
        zero = asm("mov.f32 $0, 0f00000000;", "=f", result=ir.F32Type.get())
        return mgpu.FragmentedArray.splat(zero, shape, mgpu.WGMMA_LAYOUT)

    return zeros()


def reciprocal(tile: jax.Array) -> jax.Array:
    """Return 1 / x, off by one unit in the last place and flushing denormal numbers."""

    def compute(x: MlirValue, *_: Any) -> MlirValue:
        code = "rcp.approx.ftz.f32 $0, $1;"
        return asm(code, "=f,f", x, result=x.type, side_effects=False)

    @inline_op(
        "reciprocal",
        ACC_LAYOUT,
        result=plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, ACC_LAYOUT),
    )
    def apply(_, tile: Registers) -> Registers:
        return map_elements(tile, compute)

    return apply(tile)


def defeat_minmax_fusion(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Return an int32 that varies over these axes of a tile, as what ptxas takes for no maximum or minimum: it would
    lose a minus (`ptxas_safe.neg_ptxas_safe`). It does not look behind a permutation that leaves all bytes in place."""

    def compute(x: MlirValue, *_: Any) -> MlirValue:
        return asm("prmt.b32 $0, $1, 0, 0x3210;", "=r,r", x, result=x.type, side_effects=False)

    scalar = plgpu.Layout.WG_SPLAT(shape=())
    layout = {(): scalar, (0,): ROW_LAYOUT, (1,): COL_LAYOUT, (0, 1): ACC_LAYOUT}[axes]

    @inline_op(
        "defeat_minmax_fusion",
        layout if axes else plgpu.Layout.WG_SPLAT,
        result=plgpu.ShapeDtypeStruct(x.shape, I32, layout),
    )
    def permute(_, array: Registers) -> Registers:
        return map_elements(array, compute) if axes else splat(compute(array.registers[()]))

    return permute(x)


def column_iota(count: int, start: Scalar) -> jax.Array:
    """Return start, start + 1, ..., one a column, `[count]` int32.

    They are computed where this is called: LLVM would keep those of Pallas's iota in registers, all of
    them, as they are the same in every tile but for the start.
    """
    result = plgpu.ShapeDtypeStruct((count,), I32, COL_LAYOUT)

    @inline_op("column_iota", plgpu.Layout.WG_SPLAT, result=result, count=count)
    def iota(_, start: Registers) -> Registers:
        first = arith.addi(start.registers[()], first_column())
        layout = COL_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((count,)), object)
        for i, at in enumerate(np.ndindex(*registers.shape)):  # 8 columns each
            pair = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
            for e in range(2):
                pair = llvm.insertelement(pair, arith.addi(first, i32(8 * i + e)), i32(e))
            registers[at] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

    return iota(start)


@inline_op("fence_before_wgmma_wait", ACC_LAYOUT)
def fence_before_wgmma_wait(_, positive: Registers) -> None:
    """Keep ptxas from moving a wait for WGMMA across this line. `positive` is a tile that is known before it.

    It would otherwise wait for a product before the exponentials that should run beside it.
    """
    total = functools.reduce(arith.addf, scalars(positive))
    # A barrier that nobody ever arrives at, and ptxas cannot know.
    arrive = f"@p bar.arrive {NamedBarrier.NEVER_USED}, {THREADS};"
    asm(f"{{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; {arrive} }}", "f", total)


def address(ref: Ref, bits: int = 64) -> MlirValue:
    """Emit the address of device memory, or of shared memory in 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def on_warp(warp: int, code: str, constraints: str, *operands: MlirValue) -> None:
    """Emit PTX that one warp of a warpgroup runs. It uses the operands from $1 on, the registers v and p, and
    `leader`, which is true in one thread."""
    thread = warpgroup_thread_index()
    code = (
        "{ .reg .pred p, leader; .reg .b32 v; shr.b32 v, $0, 5; "
        f"setp.ne.b32 p, v, {warp}; setp.eq.b32 leader, $0, {THREADS // WARPS * warp}; "
        f"@p bra done; {code} done: }}"
    )
    asm(code, f"r,{constraints}", thread, *operands)


def elect_one(code: str, *operands: MlirValue) -> None:
    """Emit PTX in which the predicate p is true in one thread of a warpgroup. It uses the operands from $1 on, and the
    registers a and b."""
    thread = warpgroup_thread_index()
    code = f"{{ .reg .pred p; .reg .b32 a, b; setp.eq.s32 p, $0, 0; {code} }}"
    asm(code, ",".join(["r"] * (1 + len(operands))), thread, *operands)


def warp_release_add(word: Ref, amount: int, condition: MlirValue | None = None) -> None:
    """Emit the addition by each warp to a word of device memory, after what all its lanes have stored or added; if
    there is a condition, where it is not 0."""
    operands = [address(word), arith.andi(thread_index(), i32(31))]
    skip = ""
    if condition is not None:
        operands.append(condition)
        skip = "setp.eq.s32 p, $2, 0; @p bra done; "
    code = (
        f"{{ .reg .pred p; {skip}setp.eq.b32 p, $1, 0; bar.warp.sync -1; "
        f"@p red.release.gpu.global.add.s32 [$0], {amount}; done: }}"
    )
    asm(code, ",".join(["l"] + ["r"] * (len(operands) - 1)), *operands)
