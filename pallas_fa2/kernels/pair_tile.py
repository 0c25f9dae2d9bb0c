"""Data of pairs of tokens, from memory into the registers of a tile of scores."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.kernels import ptx, tma
from pallas_fa2.kernels.mosaic import TILE, inline
from pallas_fa2.kernels.ptx import i32

LINE = 128  # bytes of a row of a panel, of whose 16-byte chunks swizzling permutes the order
PANEL_BYTES = tma.GROUP * LINE


@dataclasses.dataclass(frozen=True)
class PairTile:
    """A `[queries, keys]` part of an array of pairs, for a tile of scores or its transpose."""

    ref: Any
    in_panels: bool = True  # as TMA fills shared memory (`tma.tiles`); or as any array
    keys_are_rows: bool = False  # of the tile

    def load(self, start: int, count: int, dtype: str) -> jax.Array:
        """Some of the tile's columns. Floats of 16 bits become float32; booleans lie as 0 and 1, in 16 bits
        or as bytes."""
        memory, (queries, keys) = jnp.dtype(self.ref.dtype), self.ref.shape
        shape = keys if self.keys_are_rows else queries, count
        loaded = jnp.dtype({1: "int32", 2: "float32"}.get(memory.itemsize, dtype))

        def load(_: Any, ref: Any) -> Any:
            registers = self._registers(ref, shape, start)
            signed = loaded == jnp.int32 if loaded.kind in "iu" else None
            return mgpu.FragmentedArray(
                _registers=registers, _layout=TILE.to_mgpu(), _is_signed=signed
            )

        orientation = "transposed" if self.keys_are_rows else "straight"
        name = f"load_pairs {orientation} {queries} {keys} {start} {count} {loaded.name}"
        kind = tma.as_operand(self.ref) if self.in_panels else plgpu.RefType()
        found = inline(name, load, plgpu.ShapeDtypeStruct(shape, loaded, TILE), kind)(self.ref)
        return found != 0 if dtype == "bool" else found

    def _registers(self, ref: Any, shape: tuple[int, int], start: int) -> np.ndarray:
        i8, kind = ir.IntegerType.get_signless(8), ir.MemRefType(ref.type).element_type
        pairs, base, place = (
            ir.VectorType.get((2,), kind),
            mgpu.utils.memref_ptr(ref),
            self._place(ref),
        )

        def value(what: Any, row: int, column: int) -> Any:
            return llvm.load(what, mgpu.utils.getelementptr(base, [place(row, column)], i8))

        registers = np.empty(TILE.to_mgpu().registers_shape(shape), object)
        for at in np.ndindex(*registers.shape):
            row, column = 8 * sum(at[2:]), start + 8 * at[1]
            if self.keys_are_rows:
                found = llvm.mlir_undef(pairs)
                for e in range(2):
                    found = llvm.insertelement(found, value(kind, row, column + e), i32(e))
            else:
                found = value(pairs, row, column)
            if mgpu.utils.bitwidth(kind) == 16:
                found = arith.extf(ir.VectorType.get((2,), ir.F32Type.get()), found)
            if mgpu.utils.bitwidth(kind) == 8:
                word = ir.IntegerType.get_signless(32)
                found = arith.extui(ir.VectorType.get((2,), word), found)
            registers[at] = found
        return registers

    def _place(self, ref: Any) -> Callable[[int, int], Any]:
        """(row, column) -> where a thread's own value lies, in bytes, which at (0, 0) is the first that it
        has: thread 32 w + 4 g + t has rows 16 w + g and columns 2 t (PTX ISA, wgmma's D fragment)."""
        size = jnp.dtype(self.ref.dtype).itemsize
        if not self.in_panels:
            (stride, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
            return _in_order(stride * size, size, self.keys_are_rows)
        return (_transposed if self.keys_are_rows else _straight)(self.ref.shape[1], size)


def _field(first: int, count: int, weight: int) -> Any:
    """Some bits of the thread's number, as an integer times the weight, a power of two."""
    bits = arith.andi(ptx.thread_number(), i32(((1 << count) - 1) << first))
    shift = weight.bit_length() - 1 - first
    return arith.shli(bits, i32(shift)) if shift >= 0 else arith.shrui(bits, i32(-shift))


def _sum(*terms: Any) -> Any:
    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total


def _xor(*terms: Any) -> Any:
    total, *rest = terms
    for term in rest:
        total = arith.xori(total, term)
    return total


def _in_order(of_query: int, of_key: int, keys_are_rows: bool) -> Callable[[int, int], Any]:
    of_row, of_column = (of_key, of_query) if keys_are_rows else (of_query, of_key)
    row, column = _sum(_field(5, 2, 16), _field(2, 3, 1)), _field(0, 2, 2)
    first = _sum(arith.muli(row, i32(of_row)), arith.muli(column, i32(of_column)))
    return lambda row, column: _sum(first, i32(row * of_row + column * of_column))


def _straight(keys: int, size: int) -> Callable[[int, int], Any]:
    """Rows are queries: g is a row's place in its panel, which its chunks are permuted by."""
    across = keys * size // LINE  # panels side by side
    line = _sum(arith.muli(_field(5, 2, 2), i32(across * PANEL_BYTES)), _field(2, 3, LINE))
    chunk = _xor(_field(0, 2, 2 * size), _field(2, 3, 16))

    def place(row: int, column: int) -> Any:
        panel, byte = divmod(column * size, LINE)
        start = i32((row // 8 * across + panel) * PANEL_BYTES)
        return _sum(line, start, _xor(chunk, i32(byte)))

    return place


def _transposed(keys: int, size: int) -> Callable[[int, int], Any]:
    """Rows are keys, 64 of them: 2 t is a query's place in its panel, or the one before it."""
    across = keys * size // LINE  # one panel, or two of two warps' keys each
    line = _field(0, 2, 2 * LINE)
    if across == 2:
        line = _sum(line, _field(6, 1, PANEL_BYTES))
    warps = _field(5, 2 // across, 16 * size)
    chunk = _xor(warps, _field(2, 3, size), _field(0, 2, 32))

    def place(row: int, column: int) -> Any:
        group, query = divmod(column, 8)
        odd = query % 2
        start = i32(group * across * PANEL_BYTES + odd * LINE)
        return _sum(line, start, _xor(chunk, i32(row * size ^ 16 * odd)))

    return place
