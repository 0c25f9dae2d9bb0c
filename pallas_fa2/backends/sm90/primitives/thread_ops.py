"""Numbers of which each thread has its own: loads, stores, and sums over a warp."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives import thread_values
from pallas_fa2.backends.sm90.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    from_thread_values,
    i32,
    thread_value,
)
from pallas_fa2.backends.sm90.primitives.tma import THREADS

LANES, WARPS = 32, 4
# Loads of a thread that are under way together: a row of 512 takes as long as one load.
UNROLL = 16


def strided_loop(count: int, first: Any, stride: int, body: Callable, carry: Any) -> Any:
    """carry = body(numbers, carry): of first, first + stride, ... several at once, until all `count` are
    done that `stride` threads share. The last may lie past the end."""
    if count == 0:
        return carry
    steps = -(-count // stride)
    turns = -(-steps // UNROLL)
    at_once = -(-steps // turns)

    def turn(k: Any, carry: Any) -> Any:
        start = first + k * (at_once * stride)
        return body([start + i * stride for i in range(at_once)], carry)

    return turn(0, carry) if turns == 1 else lax.fori_loop(I32(0), I32(turns), turn, carry)


def thread_numbers() -> jax.Array:
    """Each thread's own number, `[THREADS]`."""
    return _thread_numbers()  # pyright: ignore[reportCallIssue]


def gather(source: Any, places: jax.Array) -> jax.Array:
    """A number for each thread, of device memory `[n]` that no thread writes; 0 where there is none."""
    return _gather(source, places)  # pyright: ignore[reportCallIssue]


def scatter(target: Any, places: Any, *values: Any) -> None:
    """Each thread's values, side by side, to its place in device memory, if there is such a place."""
    (_scatter if len(values) == 1 else _scatter_pairs)(target, places, *values)  # pyright: ignore[reportCallIssue]


def sum_of_lanes(x: jax.Array) -> jax.Array:
    """Of a warp, for each of its lanes."""
    return _sum_of_lanes(x)  # pyright: ignore[reportCallIssue]


def asm_i32(code: str, constraints: str, *operands: Any, apart: bool = True) -> Any:
    """Of a thread, what `code` leaves in $0. Without `apart` it may run anywhere, or not at all."""
    word = ir.IntegerType.get_signless(32)
    return from_thread_values(
        llvm.inline_asm(word, operands, code, constraints, has_side_effects=apart)
    )


@plgpu.inline_mgpu(arg_types=(), return_type=PER_THREAD_I32)
def _thread_numbers(_: Any) -> Any:
    return from_thread_values(arith.andi(thread_values.thread_number(), i32(THREADS - 1)))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD), return_type=PER_THREAD_I32)
def _gather(_: Any, source: Any, places: Any) -> Any:
    (size,) = ir.MemRefType(source.type).shape
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $2, {size}; mad.wide.u32 a, $2, 4, $1; "
        "mov.b32 $0, 0; @p ld.global.nc.b32 $0, [a]; }"
    )
    return asm_i32(
        code, "=&r,l,r", thread_values.address(source), thread_value(places), apart=False
    )


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, PER_THREAD))
def _scatter(_: Any, target: Any, places: Any, values: Any) -> None:
    _store("st.global.b32 [a], $2;", 1, target, places, values)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, PER_THREAD, PER_THREAD))
def _scatter_pairs(_: Any, target: Any, places: Any, first: Any, second: Any) -> None:
    _store("st.global.v2.b32 [a], {$2, $3};", 2, target, places, first, second)


def _store(code: str, count: int, target: Any, places: Any, *values: Any) -> None:
    (size,) = ir.MemRefType(target.type).shape
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $1, {size // count}; "
        f"mad.wide.u32 a, $1, {4 * count}, $0; @p {code} }}"
    )
    operands = [thread_values.address(target), *map(thread_value, (places, *values))]
    constraints = ",".join(["l"] + ["r"] * (1 + count))
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, constraints, has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(PER_THREAD,), return_type=PER_THREAD_I32)
def _sum_of_lanes(_: Any, x: Any) -> Any:
    return asm_i32("redux.sync.add.s32 $0, $1, -1;", "=r,r", thread_value(x))
