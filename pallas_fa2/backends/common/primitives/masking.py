"""Scores of hidden pairs of tokens become -inf: by one bound or two for each row, or by a bit for each pair."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common.inline import asm, i32, inline_op
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.types import MlirValue, RegisterIndex, Registers

type Predicate = Callable[
    [RegisterIndex, int], MlirValue
]  # of a value: its register, and its index there


def mask_after(s: jax.Array, last: jax.Array) -> jax.Array:
    """Return a tile with -inf right of each row's last column."""
    return _mask_by_comparison("mask_after", s, last, arith.CmpIPredicate.sge)


def mask_before(s: jax.Array, first: jax.Array) -> jax.Array:
    """Return a tile with -inf left of each row's first column."""
    return _mask_by_comparison("mask_before", s, first, arith.CmpIPredicate.sle)


def _mask_by_comparison(name: str, s: jax.Array, bound: jax.Array, kept: Any) -> jax.Array:
    """Move the bound to where a thread's first column is 0, so that all of its columns are compared with
    constants: an index for every column would hold 32 registers, as it is the same in every tile."""

    @inline_op(name, ACC_LAYOUT, ROW_LAYOUT, result=_like(s))
    def mask(_, tile: Registers, bound: Registers) -> Registers:
        first_column = thread_values.first_column()
        bounds = [arith.subi(x, first_column) for x in thread_values.scalars(bound)]

        def keep(at: RegisterIndex, e: int) -> MlirValue:
            columns, half = at[1], sum(at[2:])  # 8 columns each; rows r and r + 8 of a warp's 16
            return arith.cmpi(kept, bounds[half], i32(8 * columns + e))

        return _where(keep, tile)

    return mask(s, bound)


def mask_outside(
    s: jax.Array, first: jax.Array | None = None, last: jax.Array | None = None
) -> jax.Array:
    """Return a tile with -inf left of each row's first column, and right of its last one.

    A thread's columns up to some column are its first so many: a bit each, and one shift sets 32 of them. ptxas
    makes predicates of seven bits in one instruction (R2P), where `mask_after` takes a comparison a column; but
    where there is one bound and the columns are few, as in the backward, that is as fast.
    """
    given = {"first": first, "last": last}
    bounds = {name: x for name, x in given.items() if x is not None}

    @inline_op(
        "mask_outside",
        ACC_LAYOUT,
        *[ROW_LAYOUT] * len(bounds),
        result=_like(s),
        bounds=tuple(bounds),
    )
    def mask(_, tile: Registers, *bound_arrays: Registers) -> Registers:
        first_column = thread_values.first_column()

        def after(bound: MlirValue, word: int) -> MlirValue:
            """Emit a bit for each of 32 columns of the thread, that lies right of the bound."""
            bound = arith.subi(bound, first_column)
            eights = (arith.addi(bound, i32(n - 128 * word)) for n in (7, 8))
            count = functools.reduce(arith.addi, (arith.shrsi(x, i32(3)) for x in eights))
            count = arith.maxsi(count, i32(0))
            code = "shl.b32 $0, -1, $1;"
            return asm(code, "=r,r", count, result=count.type, side_effects=False)

        @functools.cache
        def outside(half: int, word: int) -> MlirValue:
            """Emit the bits of rows r, or r + 8, of a warp's 16."""
            bits = i32(0)
            for name, array in zip(bounds, bound_arrays, strict=True):
                bound = thread_values.scalars(array)[half]
                if name == "last":
                    bits = arith.ori(bits, after(bound, word))
                else:
                    before = arith.xori(after(arith.subi(bound, i32(1)), word), i32(-1))
                    bits = arith.ori(bits, before)
            return bits

        def keep(at: RegisterIndex, e: int) -> MlirValue:
            column = 2 * at[1] + e  # among the thread's own, two of each eight
            return _is_clear(outside(sum(at[2:]), column // 32), 1 << column % 32)

        # a row after the other, as its bits lie
        return _where(keep, tile, order=lambda at: sum(at[2:]))

    return mask(s, *bounds.values())


def pack_bits(visible: jax.Array, start: int = 0) -> jax.Array:
    """Return a word for each thread, `[128]` int32: of its values of `[64, n]`, columns of a fragment of 64 from
    `start` on, whether they are hidden. A value has a bit; that of the fragment's first register is the highest one."""

    @inline_op("pack_bits", ACC_LAYOUT, result=thread_values.PER_THREAD_I32, start=start)
    def pack(_, visible: Registers) -> Registers:
        bits = i32(0)
        for at, register in np.ndenumerate(visible.registers):
            for e, x in enumerate(thread_values.elements(register)):
                # One instruction a value; a selection takes one for each part of a conjunction.
                code = f"@!$2 or.b32 $0, $0, {_bit(start, at, e)};"
                bits = asm(code, "=r,0,b", bits, x, result=bits.type, side_effects=False)
        return thread_values.from_thread_values(bits)

    return pack(visible)


def _bit(start: int, at: RegisterIndex, e: int) -> int:
    return 1 << (31 - _value_index(start, at, e) % 32)


def _value_index(start: int, at: RegisterIndex, e: int) -> int:
    """Return the index of a value among a thread's own of a row of fragments, in the order of registers; `at` counts
    from the column `start`."""
    return 4 * (start // 8 + at[1]) + 2 * sum(at[2:]) + e


def apply_bits(s: jax.Array, words: Sequence[jax.Array], start: int = 0) -> jax.Array:
    """Return a tile with -inf where the words of `pack_bits` have a bit, of fragments that lie side by side. The tile
    has their columns from `start` on."""
    layouts = [thread_values.PER_THREAD] * len(words)

    @inline_op("apply_bits", ACC_LAYOUT, *layouts, result=_like(s), start=start)
    def mask(_, tile: Registers, *words: Registers) -> Registers:
        return _where(_bit_is_clear(words, start), tile)

    return mask(s, *words)


def _like(s: jax.Array) -> Any:
    return plgpu.ShapeDtypeStruct(s.shape, jnp.float32, ACC_LAYOUT)


def _bit_is_clear(words: Sequence[Registers], start: int) -> Predicate:
    own_words = list(map(thread_values.thread_value, words))

    def is_clear(at: RegisterIndex, e: int) -> MlirValue:
        return _is_clear(own_words[_value_index(start, at, e) // 32], _bit(start, at, e))

    return is_clear


def _is_clear(word: MlirValue, bit: int) -> MlirValue:
    masked = arith.andi(word, i32(bit))
    return arith.cmpi(arith.CmpIPredicate.eq, masked, i32(0))


def _where(keep: Predicate, tile: Registers, **order: Callable) -> Registers:
    """Emit the tile, with -inf for values that are not kept."""
    minus_infinity = arith.constant(ir.F32Type.get(), -math.inf)

    def select(x: MlirValue, at: RegisterIndex, e: int) -> MlirValue:
        return arith.select(keep(at, e), x, minus_infinity)

    return thread_values.map_elements(tile, select, **order)
