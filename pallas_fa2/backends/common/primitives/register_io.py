"""Tiles between registers and device memory, as they lie in registers; and sums of their rows and columns.

None of it orders memory.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, asm_words, i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import (
    ACC_LAYOUT,
    ROW_LAYOUT,
    ROWS_PER_WARPGROUP,
)
from pallas_fa2.backends.common.primitives.thread_values import (
    address,
    elements,
    scalars,
    shuffle_xor,
    thread_index,
    vector,
    warpgroup_thread_index,
)
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar

_SCALAR = plgpu.Layout.WG_SPLAT


def _with_eviction(priority: str, instruction: str) -> str:
    """Return an instruction whose cache hint is `policy`: what it touches is the "first" or the "last" that L2 gives
    up for other data (PTX ISA, createpolicy)."""
    policy = f"createpolicy.fractional.L2::evict_{priority}.b64 policy, 1.0;"
    return f"{{ .reg .b64 policy; {policy} {instruction} }}"


@inline_op("add_fragments", plgpu.RefType(), ACC_LAYOUT)
def add_fragments(_, target: Ref, tile: Registers) -> None:
    """Add a float32 tile of 64 rows to device memory, as it lies in registers, 16 bytes at a time.

    `target` is as large, `[4096]` for 64 columns, in the order (eight, warp, group, thread, half,
    element) that `load_fragments` undoes: row 16 warp + 8 half + group and column 8 eight + 2 thread +
    element (PTX ISA, wgmma's D fragment). A warp then adds 512 bytes side by side.

    Compute capability 9.0 is needed; `accumulate` has additions for those before.
    """
    values, start = scalars(tile), thread_start(target, 16)
    for i in range(0, len(values), 4):
        # 128 threads add 2048 bytes
        code = f"red.relaxed.gpu.global.add.v4.f32 [$0 + {512 * i}], {{$1, $2, $3, $4}};"
        asm(code, "l,f,f,f,f", start, *values[i : i + 4])


def put_fragments(target: Ref, tile: jax.Array, overwrite: jax.Array) -> None:
    """Store a float32 tile in the same order if `overwrite`, or add it; L2 keeps it."""
    _put_fragments(target, tile, overwrite.astype(I32))


@inline_op("put_fragments", plgpu.RefType(), ACC_LAYOUT, _SCALAR)
def _put_fragments(_, target: Ref, tile: Registers, overwrite: Registers) -> None:
    start, values = thread_start(target, 16), scalars(tile)
    for i in range(0, len(values), 4):
        operands = f"[$0 + {512 * i}], {{$1, $2, $3, $4}}, policy;"
        code = (
            ".reg .pred p; setp.ne.s32 p, $5, 0; "
            f"@p st.global.L2::cache_hint.v4.f32 {operands} "
            f"@!p red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 {operands}"
        )
        code = _with_eviction("last", code)
        asm(code, "l,f,f,f,f,r", start, *values[i : i + 4], overwrite.registers[()])


@inline_op("store_fragments", plgpu.RefType(), ACC_LAYOUT)
def store_fragments(_, target: Ref, tile: Registers) -> None:
    """Store a tile in the same order: of 32 bits 16 bytes at a time, of 16 bits 8 bytes."""
    word = ir.IntegerType.get_signless(32)
    count = mgpu.utils.bitwidth(tile.mlir_dtype) // 8  # of words that a thread has in two registers
    words = scalars(tile) if count == 4 else tile.registers.flat
    words = [llvm.bitcast(word, x) for x in words]
    start, names = thread_start(target, 4 * count), ", ".join(f"${1 + i}" for i in range(count))
    for i in range(0, len(words), count):
        code = f"st.global.v{count}.b32 [$0 + {512 * i}], {{{names}}};"
        asm(code, "l" + ",r" * count, start, *words[i : i + count])


def load_fragments(source: Ref, columns: int) -> jax.Array:
    """Return a tile of 64 rows from device memory, where another kernel has stored it or added it up."""
    dtype, shape = source.dtype, (ROWS_PER_WARPGROUP, columns)
    result = plgpu.ShapeDtypeStruct(shape, dtype, ACC_LAYOUT)

    @inline_op("load_fragments", plgpu.RefType(), result=result)
    def load(_, source: Ref) -> Registers:
        count = dtype.itemsize  # of words that a thread has in two registers
        start = thread_start(source, 4 * count)
        pair = ir.VectorType.get((2,), ir.MemRefType(source.type).element_type)
        layout = ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), object)
        for i in range(0, registers.size, 2):
            words = _load_words(start, 256 * count * i, count)
            for e, half in enumerate((words[: count // 2], words[count // 2 :])):
                registers.flat[i + e] = llvm.bitcast(pair, vector(half))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source)


def take_fragments(source: Ref, columns: int, exists: jax.Array) -> jax.Array:
    """Return a float32 tile of 64 rows, as this kernel's same threads, or those of one before, have stored it and added
    to it; zeros if it does not exist. L2 need not keep it."""
    shape = ROWS_PER_WARPGROUP, columns
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, ACC_LAYOUT)

    @inline_op("take_fragments", plgpu.RefType(), _SCALAR, result=result)
    def load(_, source: Ref, exists: Registers) -> Registers:
        start, predicate = thread_start(source, 16), exists.registers[()]
        f32, layout = ir.F32Type.get(), ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape(shape), object)
        clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
        for i in range(0, registers.size, 2):
            operands = f"{{$0, $1, $2, $3}}, [$4 + {1024 * i}], policy;"
            code = (
                f".reg .pred p; setp.ne.s32 p, $5, 0; {clear} "
                f"@p ld.global.L2::cache_hint.v4.b32 {operands}"
            )
            code = _with_eviction("first", code)
            words = asm_words(4, code, "l,r", start, predicate, side_effects=True)
            for e in range(2):
                half = [llvm.bitcast(f32, x) for x in words[2 * e : 2 * e + 2]]
                registers.flat[i + e] = vector(half)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(source, exists.astype(I32))


def store_rows(target: Ref, tile: jax.Array, first_column: Scalar, rows: Scalar) -> None:
    """Store as many `rows` as there are of a tile of 64 rows, of 16 or 32 bits, in `[64, H]`, from a column on; columns
    from H on do not exist. H is a multiple of 8."""
    store = _store_rows if tile.dtype.itemsize == 2 else _store_float_rows
    store(target, tile, I32(first_column), I32(rows))


@inline_op("store_rows", plgpu.RefType(), ACC_LAYOUT, _SCALAR, _SCALAR)
def _store_rows(_, target: Ref, tile: Registers, first_column: Registers, rows: Registers) -> None:
    # Of PTX's accumulator fragments, four neighbors have two columns of each eight, of rows r and r + 8. They
    # exchange them, so that each stores an eight of every four at once.
    kind = ir.MemRefType(target.type)
    (stride, _), _ = kind.get_strides_and_offset()
    i64, word = (ir.IntegerType.get_signless(bits) for bits in (64, 32))
    thread = thread_index()
    warp, neighbor = (arith.andi(thread, i32(mask)) for mask in (96, 3))
    row = arith.addi(arith.shrui(warp, i32(1)), arith.shrui(arith.andi(thread, i32(31)), i32(2)))
    column = arith.addi(first_column.registers[()], arith.shli(neighbor, i32(3)))
    offset = arith.addi(arith.muli(row, i32(stride)), column)
    start = arith.addi(address(target), arith.extui(i64, arith.shli(offset, i32(1))))
    rows_left = arith.subi(rows.registers[()], row)
    columns_left = arith.subi(i32(kind.shape[1]), column)
    pairs: dict[tuple[int, int], list[MlirValue]] = {}
    for at, pair in np.ndenumerate(tile.registers):
        pairs.setdefault((at[1] // 4, 8 * sum(at[2:])), []).append(llvm.bitcast(word, pair))
    for (four, half), words in pairs.items():
        code = (
            f".reg .pred p; setp.gt.s32 p, $5, {half}; setp.gt.and.s32 p, $6, {32 * four}, p; "
            "@p st.global.L2::cache_hint.v4.b32 "
            f"[$0 + {2 * (half * stride + 32 * four)}], {{$1, $2, $3, $4}}, policy;"
        )
        operands = start, *_transpose_among_four(words, neighbor), rows_left, columns_left
        asm(_with_eviction("first", code), "l" + ",r" * 6, *operands)


@inline_op("store_rows", plgpu.RefType(), ACC_LAYOUT, _SCALAR, _SCALAR)
def _store_float_rows(
    _, target: Ref, tile: Registers, first_column: Registers, rows: Registers
) -> None:
    # Four neighbors have two columns each of every eight, which are 32 bytes: a sector of memory.
    kind = ir.MemRefType(target.type)
    (stride, _), _ = kind.get_strides_and_offset()
    i64 = ir.IntegerType.get_signless(64)
    thread = thread_index()
    warp, neighbor = (arith.andi(thread, i32(mask)) for mask in (96, 3))
    row = arith.addi(arith.shrui(warp, i32(1)), arith.shrui(arith.andi(thread, i32(31)), i32(2)))
    column = arith.addi(first_column.registers[()], arith.shli(neighbor, i32(1)))
    offset = arith.addi(arith.muli(row, i32(stride)), column)
    start = arith.addi(address(target), arith.extui(i64, arith.shli(offset, i32(2))))
    rows_left = arith.subi(rows.registers[()], row)
    columns_left = arith.subi(i32(kind.shape[1]), column)
    for at, pair in np.ndenumerate(tile.registers):
        half, eight = 8 * sum(at[2:]), 8 * at[1]
        code = (
            f"{{ .reg .pred p; setp.gt.s32 p, $3, {half}; setp.gt.and.s32 p, $4, {eight}, p; "
            f"@p st.global.v2.f32 [$0 + {4 * (half * stride + eight)}], {{$1, $2}}; }}"
        )
        asm(code, "l,f,f,r,r", start, *elements(pair), rows_left, columns_left)


def store_row_values(values: jax.Array, vector: Ref, limit: Scalar) -> None:
    """Store float32 `[64]`, a value for each row of a tile, of which rows from `limit` on do not exist."""
    _store_row_values(values, vector, I32(limit))


@inline_op("store_row_values", ROW_LAYOUT, plgpu.RefType(), _SCALAR)
def _store_row_values(_, values: Registers, vector: Ref, limit: Registers) -> None:
    """A thread has rows r and r + 8 of its warp's 16, the same as three neighbors."""
    thread = warpgroup_thread_index()
    lane = arith.andi(thread, i32(31))
    row = arith.addi(arith.shli(arith.shrui(thread, i32(5)), i32(4)), arith.shrui(lane, i32(2)))
    i64 = ir.IntegerType.get_signless(64)
    (stride,), _ = ir.MemRefType(vector.type).get_strides_and_offset()
    gmem = arith.addi(address(vector), arith.extui(i64, arith.muli(row, i32(4 * stride))))
    leader = arith.andi(lane, i32(3))
    for half, value in enumerate(scalars(values)):
        code = (
            "{ .reg .pred p; setp.eq.s32 p, $3, 0; setp.lt.and.s32 p, $2, $4, p; "
            f"@p st.global.f32 [$0 + {32 * half * stride}], $1; }}"
        )
        half_row = arith.addi(row, i32(8 * half))
        asm(code, "l,f,r,r,r", gmem, value, half_row, leader, limit.registers[()])


def _transpose_among_four(words: list[MlirValue], neighbor: MlirValue) -> list[MlirValue]:
    """Emit the exchange of four words among four neighbors, of which the n-th gets the n-th word of each."""
    for bit in (1, 2):
        has_bit = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(neighbor, i32(bit)), i32(0))
        for i in (i for i in range(4) if not i & bit):
            low, high = words[i], words[i + bit]
            received = shuffle_xor(arith.select(has_bit, low, high), bit, "r")
            words[i] = arith.select(has_bit, received, low)
            words[i + bit] = arith.select(has_bit, high, received)
    return words


def _load_words(start: MlirValue, offset: int, count: int) -> list[MlirValue]:
    names = ", ".join(f"${i}" for i in range(count))
    code = f"ld.global.nc.v{count}.b32 {{{names}}}, [${count} + {offset}];"
    return asm_words(count, code, "l", start)


def thread_start(target: Ref, size: int) -> MlirValue:
    """Emit the address of a thread's own bytes of a tile, of which each thread has so many at a time."""
    i64 = ir.IntegerType.get_signless(64)
    thread = arith.andi(thread_index(), i32(127))
    return arith.addi(address(target), arith.extui(i64, arith.muli(thread, i32(size))))


@inline_op("add_row_sums", plgpu.RefType(), ACC_LAYOUT)
def add_row_sums(_, target: Ref, tile: Registers) -> None:
    """Add the sums of a float32 tile's rows to device memory, `[64]`."""
    # Of PTX's accumulator fragments, a thread has rows r and r + 8, the same as three neighbors.
    halves: dict[int, list[MlirValue]] = {0: [], 8: []}
    for at, pair in np.ndenumerate(tile.registers):
        halves[8 * sum(at[2:])] += elements(pair)
    thread = thread_index()
    warp, lane = (arith.andi(thread, i32(mask)) for mask in (96, 31))
    row = arith.addi(arith.shrui(warp, i32(1)), arith.shrui(lane, i32(2)))
    _add_sums(target, row, halves, lanes=(1, 2))


@inline_op("add_column_sums", plgpu.RefType(), ACC_LAYOUT)
def add_column_sums(_, target: Ref, tile: Registers) -> None:
    """Add the sums of a float32 tile's columns to device memory."""
    # A thread has two of each eight columns, the same as seven others of its warp.
    columns: dict[int, list[MlirValue]] = {}
    for at, pair in np.ndenumerate(tile.registers):
        for e, value in enumerate(elements(pair)):
            columns.setdefault(8 * at[1] + e, []).append(value)
    column = arith.shli(arith.andi(thread_index(), i32(3)), i32(1))
    _add_sums(target, column, columns, lanes=(4, 8, 16))


def _add_sums(
    target: Ref, first: MlirValue, terms: dict[int, list[MlirValue]], lanes: Sequence[int]
) -> None:
    """Emit the addition of sums to `target`, each at its key's distance from `first`. Its terms are those of a thread
    and of the threads whose lanes differ in these bits, of which the one without them adds."""
    i64 = ir.IntegerType.get_signless(64)
    start = arith.addi(address(target), arith.extui(i64, arith.shli(first, i32(2))))
    lane = arith.andi(thread_index(), i32(sum(lanes)))
    sums = {offset: functools.reduce(arith.addf, values) for offset, values in terms.items()}
    for offset, value in sums.items():
        for bit in lanes:
            value = arith.addf(value, shuffle_xor(value, bit, "f"))
        code = (
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; "
            f"@p red.relaxed.gpu.global.add.f32 [$0 + {4 * offset}], $1; }}"
        )
        asm(code, "l,f,r", start, value, lane)
