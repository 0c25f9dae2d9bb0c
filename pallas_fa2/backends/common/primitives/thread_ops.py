"""Operations on an int32 of each thread, `[THREADS]`: loads, stores, and sums and maxima over a warp."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    SCALAR_I32,
    address,
    from_thread_values,
    splat,
    thread_value,
    warpgroup_thread_index,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar

# Loads of a thread that are under way together: a row of 512 takes as long as one load.
UNROLL = 16


def strided_loop(count: int, first: Scalar, stride: int, body: Callable, carry: Any) -> Any:
    """Return the carry after carry = body(indices, carry) for first, first + stride, ..., several at once.

    `stride` threads share `count` indices; the last of a thread may lie past the end.
    """
    if count == 0:
        return carry
    steps = -(-count // stride)
    iterations = -(-steps // UNROLL)
    at_once = -(-steps // iterations)

    def iterate(k: Any, carry: Any) -> Any:
        start = first + k * (at_once * stride)
        return body([start + i * stride for i in range(at_once)], carry)

    if iterations == 1:
        return iterate(0, carry)
    return lax.fori_loop(I32(0), I32(iterations), iterate, carry)


@inline_op("thread_indices", result=PER_THREAD_I32)
def thread_indices(_) -> Registers:
    """Return each thread's index in its warpgroup."""
    return from_thread_values(warpgroup_thread_index())


@inline_op("gather", plgpu.RefType(), PER_THREAD, result=PER_THREAD_I32)
def gather(_, source: Ref, indices: Registers) -> Registers:
    """Return an element for each thread, of device memory `[n]` that no thread writes; 0 for an index of n or more."""
    return _gather("ld.global.nc.b32", source, indices, side_effects=False)


@inline_op("gather", plgpu.RefType(), PER_THREAD, result=PER_THREAD_I32)
def gather_after_barriers(_, source: Ref, indices: Registers) -> Registers:
    """Return what `gather` does, by loads that stay after all barriers before them.

    At its start a kernel prefetches TMA's descriptors and initializes barriers. ptxas puts other loads before that, and
    so what waits for them: the descriptors then arrive a latency of device memory later.
    """
    return _gather("ld.global.b32", source, indices, side_effects=True)


def _gather(load: str, source: Ref, indices: Registers, side_effects: bool) -> Registers:
    (size,) = ir.MemRefType(source.type).shape
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $2, {size}; mad.wide.u32 a, $2, 4, $1; "
        f"mov.b32 $0, 0; @p {load} $0, [a]; }}"
    )
    operands = address(source), thread_value(indices)
    return asm_i32(code, "=&r,l,r", *operands, side_effects=side_effects)


def scatter(target: Ref, indices: jax.Array, *values: jax.Array) -> None:
    """Store each thread's one or two values, side by side, at its index in device memory, if there is such an index."""
    (_scatter if len(values) == 1 else _scatter_pairs)(target, indices, *values)


@inline_op("scatter", plgpu.RefType(), PER_THREAD, PER_THREAD)
def _scatter(_, target: Ref, indices: Registers, values: Registers) -> None:
    _store("st.global.b32 [a], $2;", target, indices, values)


@inline_op("scatter", plgpu.RefType(), PER_THREAD, PER_THREAD, PER_THREAD)
def _scatter_pairs(_, target: Ref, indices: Registers, first: Registers, second: Registers) -> None:
    _store("st.global.v2.b32 [a], {$2, $3};", target, indices, first, second)


def _store(instruction: str, target: Ref, indices: Registers, *values: Registers) -> None:
    (size,), count = ir.MemRefType(target.type).shape, len(values)
    code = (
        f"{{ .reg .pred p; .reg .b64 a; setp.lt.u32 p, $1, {size // count}; "
        f"mad.wide.u32 a, $1, {4 * count}, $0; @p {instruction} }}"
    )
    constraints = ",".join(["l"] + ["r"] * (1 + count))
    asm(code, constraints, address(target), *map(thread_value, (indices, *values)))


@inline_op("warp_sum", PER_THREAD, result=PER_THREAD_I32)
def warp_sum(_, x: Registers) -> Registers:
    """Return the sum over a warp to each of its lanes."""
    return asm_i32("redux.sync.add.s32 $0, $1, -1;", "=r,r", thread_value(x))


@inline_op("warp_max", PER_THREAD, result=PER_THREAD_I32)
def warp_max(_, x: Registers) -> Registers:
    """Return the maximum over a warp to each of its lanes."""
    return asm_i32("redux.sync.max.s32 $0, $1, -1;", "=r,r", thread_value(x))


@inline_op("warp_exclusive_sum", PER_THREAD, result=PER_THREAD_I32)
def warp_exclusive_sum(_, x: Registers) -> Registers:
    """Return the sum over the lanes below each lane."""
    add = "shfl.sync.up.b32 v|p, sum, {}, 0, -1; @p add.s32 sum, sum, v; "
    steps = "".join(add.format(1 << i) for i in range(5))
    code = f"{{ .reg .pred p; .reg .b32 v, sum; mov.b32 sum, $1; {steps}sub.s32 $0, sum, $1; }}"
    return asm_i32(code, "=r,r", thread_value(x))


@inline_op("uniform", PER_THREAD, result=SCALAR_I32)
def uniform(_, x: Registers) -> Registers:
    """Return the value that all threads have, as a scalar."""
    return splat(thread_value(x))


def asm_i32(
    code: str, constraints: str, *operands: MlirValue, side_effects: bool = True
) -> Registers:
    """Return what PTX leaves in $0 of each thread. Without side effects it may run anywhere, or not at all."""
    word = ir.IntegerType.get_signless(32)
    return from_thread_values(
        asm(code, constraints, *operands, result=word, side_effects=side_effects)
    )
