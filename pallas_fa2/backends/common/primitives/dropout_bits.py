"""Dropout's bits for a tile in registers."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.common.inline import i32, inline_op
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, COL_LAYOUT, ROW_LAYOUT
from pallas_fa2.backends.common.primitives.thread_values import map_elements, scalars
from pallas_fa2.backends.common.primitives.types import MlirValue, RegisterIndex, Registers


def negate_dropped(
    p: jax.Array, keys: RowKeys, columns: jax.Array, key_axis: int, threshold: int, shared: bool
) -> jax.Array:
    """Return -p where the bits of a pair (`dropout.bits`) are below the threshold, p elsewhere.

    `keys` are int32 vectors over the tile's queries, `columns` one over its keys, on `key_axis`: their
    positions. If words are `shared`, these are 16 in a row or more, and start at a multiple of 16.
    """
    vectors = ((ROW_LAYOUT, COL_LAYOUT)[axis] for axis in (1 - key_axis, 1 - key_axis, key_axis))
    result = plgpu.ShapeDtypeStruct(p.shape, jnp.float32, ACC_LAYOUT)

    @inline_op(
        "negate_dropped",
        ACC_LAYOUT,
        *vectors,
        result=result,
        key_axis=key_axis,
        threshold=threshold,
    )
    def negate(
        _, p: Registers, first: Registers, second: Registers, columns: Registers
    ) -> Registers:
        first_keys, second_keys, positions = map(scalars, (first, second, columns))

        @functools.cache
        def word(query: int, key: int) -> MlirValue:
            x = arith.andi(positions[key], i32(~dropout.HALF_SELECT_BIT))
            x = arith.xori(first_keys[query], x)
            x = arith.muli(_xor_shifted(x, 16), i32(dropout.MIX_1))
            x = arith.addi(x, second_keys[query])
            x = arith.muli(_xor_shifted(x, 15), i32(dropout.MIX_2 - 2**32))
            return _xor_shifted(x, 16)

        def negated(x: MlirValue, at: RegisterIndex, e: int) -> MlirValue:
            own = sum(at[2:]), 2 * at[1] + e  # indices among the thread's own rows and columns
            query, key = own[1 - key_axis], own[key_axis]
            if shared:
                # with the key eight before: the thread's row before, or the column two before
                lower = key & ~(1 + key_axis)
                bits, shift = word(query, lower), i32(16 if lower != key else 0)
            else:
                half = arith.andi(positions[key], i32(dropout.HALF_SELECT_BIT))
                bits, shift = word(query, key), arith.shli(half, i32(1))
            bits = arith.andi(arith.shrui(bits, shift), i32(0xFFFF))
            keep = arith.cmpi(arith.CmpIPredicate.uge, bits, i32(threshold))
            return arith.select(keep, x, arith.negf(x))

        return map_elements(p, negated)

    return negate(p, *keys, columns)


def _xor_shifted(x: MlirValue, bits: int) -> MlirValue:
    return arith.xori(x, arith.shrui(x, i32(bits)))
