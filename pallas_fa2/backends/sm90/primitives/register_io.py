"""Tiles between registers and device memory, as they lie in registers; and sums of their rows and columns.

None of it orders memory. The interpreter in the tests knows each inner function by its name.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROWS_PER_WARPGROUP
from pallas_fa2.backends.sm90.primitives.thread_values import (
    address,
    asm_words,
    elements,
    i32,
    scalars,
    thread_number,
)

_SCALAR = plgpu.Layout.WG_SPLAT


def _in_l2(which: str, instruction: str) -> str:
    """An instruction whose cache hint is `policy`: what it touches is the "first" or the "last" that L2 gives up
    for other data (PTX ISA, createpolicy)."""
    policy = f"createpolicy.fractional.L2::evict_{which}.b64 policy, 1.0;"
    return f"{{ .reg .b64 policy; {policy} {instruction} }}"


def add_fragments(target: Any, tile: jax.Array) -> None:
    """Adds a float32 tile of 64 rows to device memory, as it lies in registers, 16 bytes at a time.

    `target` is as large, `[4096]` for 64 columns, in the order (eight, warp, group, thread, half,
    element) that `load_fragments` undoes: row 16 warp + 8 half + group and column 8 eight + 2 thread +
    element (PTX ISA, wgmma's D fragment). A warp then adds 512 bytes side by side.
    """
    _add_fragments(target, tile)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT))
def _add_fragments(_: Any, target: Any, tile: Any) -> None:
    values, start = scalars(tile), _start(target, 16)
    for i in range(0, len(values), 4):
        # 128 threads add 2048 bytes
        code = f"red.relaxed.gpu.global.add.v4.f32 [$0 + {512 * i}], {{$1, $2, $3, $4}};"
        void, operands = ir.Type.parse("!llvm.void"), [start, *values[i : i + 4]]
        llvm.inline_asm(void, operands, code, "l,f,f,f,f", has_side_effects=True)


def put_fragments(target: Any, tile: jax.Array, anew: Any) -> None:
    """Stores a float32 tile in the same order if `anew`, or adds it; L2 keeps it."""
    _put_fragments(target, tile, anew.astype(I32))  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT, _SCALAR))
def _put_fragments(_: Any, target: Any, tile: Any, anew: Any) -> None:
    start, values = _start(target, 16), scalars(tile)
    for i in range(0, len(values), 4):
        place = f"[$0 + {512 * i}], {{$1, $2, $3, $4}}, policy;"
        code = (
            ".reg .pred p; setp.ne.s32 p, $5, 0; "
            f"@p st.global.L2::cache_hint.v4.f32 {place} "
            f"@!p red.relaxed.gpu.global.add.L2::cache_hint.v4.f32 {place}"
        )
        void, operands = ir.Type.parse("!llvm.void"), [start, *values[i : i + 4]]
        code, operands = _in_l2("last", code), [*operands, anew.registers[()]]
        llvm.inline_asm(void, operands, code, "l,f,f,f,f,r", has_side_effects=True)


def store_fragments(target: Any, tile: jax.Array) -> None:
    """Stores a tile in the same order: of 32 bits 16 bytes at a time, of 16 bits 8 bytes."""
    _store_fragments(target, tile)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT))
def _store_fragments(_: Any, target: Any, tile: Any) -> None:
    word = ir.IntegerType.get_signless(32)
    count = mgpu.utils.bitwidth(tile.mlir_dtype) // 8  # of words that a thread has in two registers
    words = scalars(tile) if count == 4 else tile.registers.flat
    words = [llvm.bitcast(word, x) for x in words]
    start, names = _start(target, 4 * count), ", ".join(f"${1 + i}" for i in range(count))
    for i in range(0, len(words), count):
        code = f"st.global.v{count}.b32 [$0 + {512 * i}], {{{names}}};"
        void, operands = ir.Type.parse("!llvm.void"), [start, *words[i : i + count]]
        llvm.inline_asm(void, operands, code, "l" + ",r" * count, has_side_effects=True)


def load_fragments(source: Any, columns: int) -> jax.Array:
    """A tile of 64 rows from device memory, where another kernel has stored it or added it up."""
    dtype = source.dtype

    def load(_: Any, source: Any) -> Any:
        count = dtype.itemsize  # of words that a thread has in two registers
        word, start = ir.IntegerType.get_signless(32), _start(source, 4 * count)
        pair = ir.VectorType.get((2,), ir.MemRefType(source.type).element_type)
        layout = ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((ROWS_PER_WARPGROUP, columns)), object)
        for i in range(0, registers.size, 2):
            loaded = _load_words(start, 256 * count * i, count)
            halves = loaded[: count // 2], loaded[count // 2 :]
            for e, half in enumerate(halves):
                both = llvm.mlir_undef(ir.VectorType.get((len(half),), word))
                for place, x in enumerate(half):
                    both = llvm.insertelement(both, x, i32(place))
                registers.flat[i + e] = llvm.bitcast(pair, both)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((ROWS_PER_WARPGROUP, columns), dtype, ACC_LAYOUT)
    return inline_op(f"load_fragments {columns}", load, result, plgpu.RefType())(source)


def take_fragments(source: Any, columns: int, there: Any) -> jax.Array:
    """A float32 tile of 64 rows, as this kernel's same threads, or those of one before, have stored it and added
    to it; zeros if nothing is `there`. L2 need not keep it."""

    def load(_: Any, source: Any, there: Any) -> Any:
        start, is_there = _start(source, 16), there.registers[()]
        pair, layout = ir.VectorType.get((2,), ir.F32Type.get()), ACC_LAYOUT.to_mgpu()
        registers = np.empty(layout.registers_shape((ROWS_PER_WARPGROUP, columns)), object)
        clear = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
        for i in range(0, registers.size, 2):
            place = f"{{$0, $1, $2, $3}}, [$4 + {1024 * i}]"
            code = (
                f".reg .pred p; setp.ne.s32 p, $5, 0; {clear} "
                f"@p ld.global.L2::cache_hint.v4.b32 {place}, policy;"
            )
            code = _in_l2("first", code)
            found = asm_words(4, code, "l,r", start, is_there, side_effects=True)
            for e in range(2):
                both = llvm.mlir_undef(pair)
                for place, x in enumerate(found[2 * e : 2 * e + 2]):
                    both = llvm.insertelement(both, llvm.bitcast(pair.element_type, x), i32(place))
                registers.flat[i + e] = both
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    result = plgpu.ShapeDtypeStruct((ROWS_PER_WARPGROUP, columns), jax.numpy.float32, ACC_LAYOUT)
    code = inline_op(f"take_fragments {columns}", load, result, plgpu.RefType(), _SCALAR)
    return code(source, there.astype(I32))


def store_rows(target: Any, tile: jax.Array, first_column: Any, rows: Any) -> None:
    """Stores as many `rows` as there are of a 16-bit tile of 64 rows in `[64, H]`, from a column on; columns from
    H on do not exist. H is a multiple of 8."""
    _store_rows(target, tile, I32(first_column), I32(rows))  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT, _SCALAR, _SCALAR))
def _store_rows(_: Any, target: Any, tile: Any, first_column: Any, rows: Any) -> None:
    """Of PTX's accumulator fragments, four neighbours have two columns of each eight, of rows r and r + 8. They
    exchange them, so that each stores an eight of every four at once."""
    kind = ir.MemRefType(target.type)
    (stride, _), _ = kind.get_strides_and_offset()
    i64, word, void = (ir.Type.parse(x) for x in ("i64", "i32", "!llvm.void"))
    thread = thread_number()
    warp, neighbour = (arith.andi(thread, i32(mask)) for mask in (96, 3))
    row = arith.addi(arith.shrui(warp, i32(1)), arith.shrui(arith.andi(thread, i32(31)), i32(2)))
    own = arith.addi(first_column.registers[()], arith.shli(neighbour, i32(3)))
    place = arith.addi(arith.muli(row, i32(stride)), own)
    start = arith.addi(address(target), arith.extui(i64, arith.shli(place, i32(1))))
    rows_left = arith.subi(rows.registers[()], row)
    columns_left = arith.subi(i32(kind.shape[1]), own)
    pairs: dict[tuple[int, int], list[Any]] = {}
    for at, pair in np.ndenumerate(tile.registers):
        pairs.setdefault((at[1] // 4, 8 * sum(at[2:])), []).append(llvm.bitcast(word, pair))
    for (four, half), mine in pairs.items():
        code = (
            f".reg .pred p; setp.gt.s32 p, $5, {half}; setp.gt.and.s32 p, $6, {32 * four}, p; "
            "@p st.global.L2::cache_hint.v4.b32 "
            f"[$0 + {2 * (half * stride + 32 * four)}], {{$1, $2, $3, $4}}, policy;"
        )
        operands = [start, *_among_four(mine, neighbour), rows_left, columns_left]
        code = _in_l2("first", code)
        llvm.inline_asm(void, operands, code, "l" + ",r" * 6, has_side_effects=True)


def _among_four(mine: list[Any], neighbour: Any) -> list[Any]:
    """Of four words in each of four neighbours, the n-th of each for the n-th."""
    for bit in (1, 2):
        has_bit = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(neighbour, i32(bit)), i32(0))
        for i in (i for i in range(4) if not i & bit):
            low, high = mine[i], mine[i + bit]
            code = f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, -1;"
            given = [arith.select(has_bit, low, high)]
            found = llvm.inline_asm(low.type, given, code, "=r,r", has_side_effects=True)
            mine[i] = arith.select(has_bit, found, low)
            mine[i + bit] = arith.select(has_bit, high, found)
    return mine


def _load_words(start: Any, place: int, count: int) -> list[Any]:
    names = ", ".join(f"${i}" for i in range(count))
    code = f"ld.global.nc.v{count}.b32 {{{names}}}, [${count} + {place}];"
    return asm_words(count, code, "l", start)


def _start(target: Any, size: int) -> Any:
    """Where a thread's own bytes of a tile begin, as each has so many at a time."""
    i64, thread = ir.IntegerType.get_signless(64), thread_number()
    thread = arith.andi(thread, i32(127))
    return arith.addi(address(target), arith.extui(i64, arith.muli(thread, i32(size))))


def add_row_sums(target: Any, tile: jax.Array) -> None:
    """Adds the sums of a float32 tile's rows to device memory, `[64]`."""
    _add_row_sums(target, tile)  # pyright: ignore[reportCallIssue]


def add_column_sums(target: Any, tile: jax.Array) -> None:
    """Adds the sums of a float32 tile's columns to device memory."""
    _add_column_sums(target, tile)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT))
def _add_row_sums(_: Any, target: Any, tile: Any) -> None:
    """Of PTX's accumulator fragments, a thread has rows r and r + 8, the same as three neighbours."""
    halves: dict[int, list[Any]] = {0: [], 8: []}
    for at, pair in np.ndenumerate(tile.registers):
        halves[8 * sum(at[2:])] += elements(pair)
    thread = thread_number()
    warp, lane = (arith.andi(thread, i32(mask)) for mask in (96, 31))
    row = arith.addi(arith.shrui(warp, i32(1)), arith.shrui(lane, i32(2)))
    _add_among(target, row, halves, lanes=(1, 2), leaders=3)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ACC_LAYOUT))
def _add_column_sums(_: Any, target: Any, tile: Any) -> None:
    """A thread has two of each eight columns, the same as seven others of its warp."""
    columns: dict[int, list[Any]] = {}
    for at, pair in np.ndenumerate(tile.registers):
        for e, value in enumerate(elements(pair)):
            columns.setdefault(8 * at[1] + e, []).append(value)
    column = arith.shli(arith.andi(thread_number(), i32(3)), i32(1))
    _add_among(target, column, columns, lanes=(4, 8, 16), leaders=28)


def _add_among(
    target: Any, first: Any, parts: dict[int, list[Any]], lanes: tuple[int, ...], leaders: int
) -> None:
    """Adds a thread's parts of each sum up, and over lanes that differ in these bits; those without the
    bits `leaders` then add them to `target`, at the distance from `first` that each has as its key."""
    i64 = ir.IntegerType.get_signless(64)
    start = arith.addi(address(target), arith.extui(i64, arith.shli(first, i32(2))))
    lane = arith.andi(thread_number(), i32(leaders))
    sums = {place: functools.reduce(arith.addf, values) for place, values in parts.items()}
    for place, value in sums.items():
        for bit in lanes:
            code = f"shfl.sync.bfly.b32 $0, $1, {bit}, 31, -1;"
            other = llvm.inline_asm(value.type, [value], code, "=f,f", has_side_effects=True)
            value = arith.addf(value, other)
        code = (
            "{ .reg .pred p; setp.eq.s32 p, $2, 0; "
            f"@p red.relaxed.gpu.global.add.f32 [$0 + {4 * place}], $1; }}"
        )
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [start, value, lane], code, "l,f,r", has_side_effects=True)
