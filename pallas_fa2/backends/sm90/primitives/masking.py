"""Scores of pairs that do not see each other become -inf: by a bound or two of each row, or by a bit each."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.backends.sm90.primitives import thread_values
from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.thread_values import i32


def mask_after(s: jax.Array, last: jax.Array) -> jax.Array:
    """-inf in a tile right of each row's last column."""
    return _compared(s, last, arith.CmpIPredicate.sge, "hide_after")


def mask_before(s: jax.Array, first: jax.Array) -> jax.Array:
    """-inf in a tile left of each row's first column."""
    return _compared(s, first, arith.CmpIPredicate.sle, "hide_before")


def _compared(s: jax.Array, bound: jax.Array, kept: Any, name: str) -> jax.Array:
    """The bound moves to where a thread's first column is 0, so that the others compare with
    constants: an index for every column would hold 32 registers, as it is the same in every tile."""

    def hide(_: Any, tile: Any, bound: Any) -> Any:
        first_column = thread_values.first_column()
        bounds = [arith.subi(x, first_column) for x in thread_values.scalars(bound)]

        def keep(at: tuple[int, ...], e: int) -> Any:
            columns, half = at[1], sum(at[2:])  # 8 columns each; rows r and r + 8 of a warp's 16
            return arith.cmpi(kept, bounds[half], i32(8 * columns + e))

        return _where(tile, keep)

    return inline_op(name, hide, _like(s), ACC_LAYOUT, ROW_LAYOUT)(s, bound)


def mask_outside(
    s: jax.Array, first: jax.Array | None = None, last: jax.Array | None = None
) -> jax.Array:
    """-inf in a tile left of each row's first column, and right of its last one.

    A thread's columns up to some column are its first so many: a bit each, and one shift sets 32 of them. ptxas
    makes predicates of seven bits in one instruction (R2P), where `after` takes a comparison a column; but
    where there is one bound and the columns are few, as in the backward, that is as fast.
    """
    bounds = {"first": first, "last": last}
    bounds = {name: x for name, x in bounds.items() if x is not None}

    def hide(_: Any, tile: Any, *bounds_of: Any) -> Any:
        first_column = thread_values.first_column()

        def after(bound: Any, word: int) -> Any:
            """Which of the thread's columns lie right of it, of 32."""
            bound = arith.subi(bound, first_column)
            eights = (arith.addi(bound, i32(n - 128 * word)) for n in (7, 8))
            count = functools.reduce(arith.addi, (arith.shrsi(x, i32(3)) for x in eights))
            count = arith.maxsi(count, i32(0))
            return llvm.inline_asm(count.type, [count], "shl.b32 $0, -1, $1;", "=r,r")

        @functools.cache
        def outside(half: int, word: int) -> Any:
            """Of rows r, or r + 8, of a warp's 16."""
            found = i32(0)
            for name, rows in zip(bounds, bounds_of, strict=True):
                bound = thread_values.scalars(rows)[half]
                if name == "last":
                    found = arith.ori(found, after(bound, word))
                else:
                    before = arith.xori(after(arith.subi(bound, i32(1)), word), i32(-1))
                    found = arith.ori(found, before)
            return found

        def keep(at: tuple[int, ...], e: int) -> Any:
            place = 2 * at[1] + e  # two columns of each eight
            return _is_clear(outside(sum(at[2:]), place // 32), 1 << place % 32)

        # a row after the other, as its bits lie
        return _where(tile, keep, order=lambda at: sum(at[2:]))

    name = " ".join(["hide_outside", *bounds])
    return inline_op(name, hide, _like(s), ACC_LAYOUT, *[ROW_LAYOUT] * len(bounds))(
        s, *bounds.values()
    )


def pack_bits(seen: jax.Array, start: int = 0) -> jax.Array:
    """Of some columns of a square of 64, from `start` on, what is hidden of each thread's values: a bit each, that
    of the square's first register the highest one."""

    def write(_: Any, seen: Any) -> Any:
        found = i32(0)
        for at, register in np.ndenumerate(seen.registers):
            for e, x in enumerate(thread_values.elements(register)):
                # One instruction a value; a selection takes one for each part of a conjunction.
                code = f"@!$2 or.b32 $0, $0, {_bit(start, at, e)};"
                found = llvm.inline_asm(found.type, [found, x], code, "=r,0,b")
        return thread_values.from_thread_values(found)

    return inline_op(f"hidden_bits {start}", write, thread_values.PER_THREAD_I32, ACC_LAYOUT)(seen)


def _bit(start: int, at: tuple[int, ...], e: int) -> int:
    return 1 << (31 - _place(start, at, e) % 32)


def _place(start: int, at: tuple[int, ...], e: int) -> int:
    """Of a value among a thread's own, in the order of registers, of a tile's columns from `start` on."""
    return 4 * (start // 8 + at[1]) + 2 * sum(at[2:]) + e


def apply_bits(s: jax.Array, words: Sequence[jax.Array], start: int = 0) -> jax.Array:
    """-inf where the `hidden_bits` of squares, side by side, say so; of their columns from `start` on."""

    def hide(_: Any, tile: Any, *words: Any) -> Any:
        return _where(tile, _seen(words, start))

    name = f"hide_signed {start}"
    return inline_op(name, hide, _like(s), ACC_LAYOUT, *[thread_values.PER_THREAD] * len(words))(
        s, *words
    )


def _like(s: jax.Array) -> Any:
    return plgpu.ShapeDtypeStruct(s.shape, jnp.float32, ACC_LAYOUT)


def _seen(words: Sequence[Any], start: int = 0) -> Callable[[tuple[int, ...], int], Any]:
    """Whether `hidden_bits` of squares, side by side, leave a value: of the place of its register, and its place there."""
    mine = list(map(thread_values.thread_value, words))

    def seen(at: tuple[int, ...], e: int) -> Any:
        return _is_clear(mine[_place(start, at, e) // 32], _bit(start, at, e))

    return seen


def _is_clear(word: Any, bit: int) -> Any:
    found = arith.andi(word, i32(bit))
    return arith.cmpi(arith.CmpIPredicate.eq, found, i32(0))


def _where(tile: Any, keep: Callable, **order: Callable) -> Any:
    """-inf but for keep(the place of a register, a value's place there)."""
    minus_infinity = arith.constant(ir.F32Type.get(), -math.inf)

    def select(x: Any, at: tuple[int, ...], e: int) -> Any:
        return arith.select(keep(at, e), x, minus_infinity)

    return thread_values.map_elements(tile, select, **order)
