"""Dropout's bits for a tile in registers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.sm90.primitives.inline import inline_op
from pallas_fa2.backends.sm90.primitives.layouts import ACC_LAYOUT, COL_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.sm90.primitives.thread_values import i32, map_elements, scalars


def negate_dropped(
    p: jax.Array, keys: RowKeys, columns: jax.Array, key_axis: int, threshold: int, shared: bool
) -> jax.Array:
    """-p where the bits of a pair (`dropout.bits`) are below the threshold.

    `keys` are int32 vectors over the tile's queries, `columns` one over its keys, on `key_axis`: their
    positions. If words are `shared`, these are 16 in a row or more, and start at a multiple of 16.
    """

    def negate(_: Any, p: Any, first: Any, second: Any, columns: Any) -> Any:
        first, second, columns = map(scalars, (first, second, columns))

        @functools.cache
        def word(query: int, key: int) -> Any:
            x = arith.xori(first[query], arith.andi(columns[key], i32(~dropout.HALF_SELECT_BIT)))
            x = arith.muli(_shifted(x, 16), i32(dropout.MIX_1))
            x = arith.addi(x, second[query])
            x = arith.muli(_shifted(x, 15), i32(dropout.MIX_2 - 2**32))
            return _shifted(x, 16)

        def negated(x: Any, at: tuple[int, ...], e: int) -> Any:
            mine = sum(at[2:]), 2 * at[1] + e  # the row and the column, of the thread's own
            query, key = mine[1 - key_axis], mine[key_axis]
            if shared:
                # with the key eight before: the thread's row before, or the column two before
                lower = key & ~(1 + key_axis)
                bits, shift = word(query, lower), i32(16 if lower != key else 0)
            else:
                half = arith.andi(columns[key], i32(dropout.HALF_SELECT_BIT))
                bits, shift = word(query, key), arith.shli(half, i32(1))
            bits = arith.andi(arith.shrui(bits, shift), i32(0xFFFF))
            keep = arith.cmpi(arith.CmpIPredicate.uge, bits, i32(threshold))
            return arith.select(keep, x, arith.negf(x))

        return map_elements(p, negated)

    name = f"negate_dropped {key_axis} {threshold} {int(shared)}"
    vectors = ((ROW_LAYOUT, COL_LAYOUT)[axis] for axis in (1 - key_axis, 1 - key_axis, key_axis))
    result = plgpu.ShapeDtypeStruct(p.shape, jnp.float32, ACC_LAYOUT)
    return inline_op(name, negate, result, ACC_LAYOUT, *vectors)(p, *keys, columns)


def _shifted(x: Any, bits: int) -> Any:
    return arith.xori(x, arith.shrui(x, i32(bits)))
