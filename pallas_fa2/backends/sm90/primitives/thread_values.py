"""Values and elements of each thread, in inline PTX and MLIR.

None of it orders memory. The interpreter in the tests knows each inner function by its name."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives import tma
from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, COL_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.named_barriers import NEVER_USED

PER_THREAD = plgpu.Layout.WG_STRIDED((tma.THREADS,), 1)  # a number for each thread of a warpgroup
PER_THREAD_I32 = plgpu.ShapeDtypeStruct((tma.THREADS,), I32, PER_THREAD)


SCALAR_I32 = plgpu.ShapeDtypeStruct((), I32, plgpu.Layout.WG_SPLAT(shape=()))


def thread_number() -> Any:
    """The thread's number in its CTA. It is read once, outside all loops, as that takes 350 clocks;
    but what follows from it is computed where it is used, and holds no registers elsewhere."""
    thread = mgpu.utils.thread_idx()
    return llvm.inline_asm(thread.type, [thread], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def first_column() -> Any:
    """Of a thread's own columns of a tile, of which it has two in each eight."""
    return arith.shli(arith.andi(thread_number(), i32(3)), i32(1))


def splat(answer: Any) -> Any:
    return mgpu.FragmentedArray.splat(answer, shape=(), is_signed=True)


def scalars(array: Any) -> list[Any]:
    """A thread's own values of an array."""
    return [x for register in array.registers.flat for x in elements(register)]


def elements(register: Any) -> list[Any]:
    count = ir.VectorType(register.type).shape[0]
    return [llvm.extractelement(register, i32(e)) for e in range(count)]


def asm_words(
    count: int, code: str, constraints: str, *operands: Any, side_effects: bool = False
) -> list[Any]:
    """The registers $0, $1, ... of `code`, so many; operands follow."""
    word = ir.IntegerType.get_signless(32)
    all_words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    constraints = ",".join(["=r"] * count + [constraints])
    found = llvm.inline_asm(all_words, operands, code, constraints, has_side_effects=side_effects)
    return [llvm.extractvalue(word, found, [i]) for i in range(count)]


def i32(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def thread_value(numbers: Any) -> Any:
    """A thread's own of `EACH`."""
    (found,) = scalars(numbers)
    return found


def from_thread_values(mine: Any) -> Any:
    layout = PER_THREAD.to_mgpu()
    register = llvm.mlir_undef(layout.registers_element_type(mine.type))
    registers = np.array([llvm.insertelement(register, mine, i32(0))], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def map_elements(tile: Any, function: Callable, order: Callable = lambda at: 0) -> Any:
    """function(a thread's value, the place of its register, its place there) of each, in the order of these
    places or of order(place)."""
    results = np.empty_like(tile.registers)
    for at, register in sorted(np.ndenumerate(tile.registers), key=lambda x: order(x[0])):
        for e, x in enumerate(elements(register)):
            register = llvm.insertelement(register, function(x, at, e), i32(e))
        results[at] = register
    return mgpu.FragmentedArray(_registers=results, _layout=tile.layout, _is_signed=tile.is_signed)


def zero_accumulator(shape: tuple[int, int]) -> jax.Array:
    """For an accumulator to start from. LLVM would keep one zero for all that a loop starts, in the
    first register of one of them: ptxas then moves the others around it, and spills."""

    def zeros(_: Any) -> Any:
        f32 = ir.F32Type.get()
        zero = llvm.inline_asm(f32, [], "mov.f32 $0, 0f00000000;", "=f", has_side_effects=True)
        return mgpu.FragmentedArray.splat(zero, shape, mgpu.WGMMA_LAYOUT)

    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, ACC_LAYOUT)
    return inline_op(f"zeros {shape[0]} {shape[1]}", zeros, result)()


def reciprocal(tile: jax.Array) -> jax.Array:
    """1 / x, off by one unit in the last place and flushing denormal numbers."""

    def one(x: Any, *_: Any) -> Any:
        return llvm.inline_asm(x.type, [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, ACC_LAYOUT)
    return inline_op("reciprocal", lambda _, tile: map_elements(tile, one), result, ACC_LAYOUT)(
        tile
    )


def defeat_minmax_fusion(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An int32 that varies over these axes of a tile, which ptxas takes for no maximum or minimum: it would
    lose a minus (`ptxas_safe.neg_ptxas_safe`). It does not look behind a permutation that leaves all bytes in place."""

    def one(x: Any, *_: Any) -> Any:
        return llvm.inline_asm(x.type, [x], "prmt.b32 $0, $1, 0, 0x3210;", "=r,r")

    def all_of(_: Any, array: Any) -> Any:
        return map_elements(array, one) if axes else splat(one(array.registers[()]))

    layout = {
        (): plgpu.Layout.WG_SPLAT(shape=()),
        (0,): ROW_LAYOUT,
        (1,): COL_LAYOUT,
        (0, 1): ACC_LAYOUT,
    }[axes]
    result = plgpu.ShapeDtypeStruct(x.shape, I32, layout)
    return inline_op("unfused", all_of, result, layout if axes else plgpu.Layout.WG_SPLAT)(x)


def address(ref: Any, bits: int = 64) -> Any:
    """Of device memory; of shared memory in 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def on_warp(number: int, code: str, constraints: str, *operands: Any) -> None:
    """By one warp of a warpgroup: `code` uses the operands from $1 on, the registers v and p, and
    `leader`, which is true in one thread."""
    thread = arith.andi(thread_number(), i32(127))
    code = (
        "{ .reg .pred p, leader; .reg .b32 v; shr.b32 v, $0, 5; "
        f"setp.ne.b32 p, v, {number}; setp.eq.b32 leader, $0, {32 * number}; "
        f"@p bra done; {code} done: }}"
    )
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [thread, *operands], code, f"r,{constraints}", has_side_effects=True)


def warp_release_add(word: Any, amount: int, condition: Any = None) -> None:
    """Each warp adds to a word of device memory, after what all its lanes have stored or added; if there is a
    condition, where it is not 0."""
    operands = [address(word), arith.andi(thread_number(), i32(31))]
    skip = ""
    if condition is not None:
        operands.append(condition)
        skip = "setp.eq.s32 p, $2, 0; @p bra done; "
    code = (
        f"{{ .reg .pred p; {skip}setp.eq.b32 p, $1, 0; bar.warp.sync -1; "
        f"@p red.release.gpu.global.add.s32 [$0], {amount}; done: }}"
    )
    constraints = ",".join(["l"] + ["r"] * (len(operands) - 1))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, code, constraints, has_side_effects=True)


def elect_one(code: str, *operands: Any) -> None:
    """Of a warpgroup: `code` has the predicate p, which is true in one thread, and uses the operands from $1 on,
    and the registers a and b."""
    thread = arith.andi(thread_number(), i32(127))
    code = f"{{ .reg .pred p; .reg .b32 a, b; setp.eq.s32 p, $0, 0; {code} }}"
    constraints = ",".join(["r"] * (1 + len(operands)))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [thread, *operands], code, constraints, has_side_effects=True)


def column_iota(count: int, start: Any) -> jax.Array:
    """start, start + 1, ..., one a column.

    They are computed where this is called: LLVM would keep those of Pallas's iota in registers, all of
    them, as they are the same in every tile but for the start.
    """

    def numbers_of(_: Any, start: Any) -> Any:
        first = arith.addi(start.registers[()], first_column())
        layout = COL_LAYOUT.to_mgpu()
        numbers = np.empty(layout.registers_shape((count,)), object)
        for i, at in enumerate(np.ndindex(*numbers.shape)):  # 8 columns each
            pair = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
            for e in range(2):
                number = arith.addi(first, i32(8 * i + e))
                pair = llvm.insertelement(pair, number, i32(e))
            numbers[at] = pair
        return mgpu.FragmentedArray(_registers=numbers, _layout=layout, _is_signed=True)

    result = plgpu.ShapeDtypeStruct((count,), I32, COL_LAYOUT)
    return inline_op(f"column_numbers {count}", numbers_of, result, plgpu.Layout.WG_SPLAT)(start)


def fence_before_wgmma_wait(positive: jax.Array) -> None:
    """A place that ptxas moves no wait for WGMMA across, once `positive` (a tile) is known.

    It would otherwise wait for a product before the exponentials that should run beside it.
    """
    _pin(positive)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(ACC_LAYOUT,))
def _pin(_: Any, positive: Any) -> None:
    total = functools.reduce(arith.addf, scalars(positive))
    # A barrier that nobody ever arrives at, and ptxas cannot know.
    arrive = f"{{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p bar.arrive {NEVER_USED}, 128; }}"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [total], arrive, "f", has_side_effects=True)
