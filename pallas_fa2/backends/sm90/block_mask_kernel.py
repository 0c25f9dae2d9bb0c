"""What tiles visit under a mask that only the device knows: a small kernel.

XLA would sort, in several kernels, most of which take little longer than their launch. Here places are
counted instead: by warps that wait for nobody, and so count again what others have counted too.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.common.inline import inline_op
from pallas_fa2.backends.sm90.primitives import launch, thread_ops
from pallas_fa2.backends.sm90.primitives.layouts import LANES, WARPS
from pallas_fa2.backends.sm90.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    thread_value,
)
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL

# Where the second of two numbers in a word begins: each is at most `MOST`.
FULL_BIT = 16
MAX_BLOCKS = (1 << (FULL_BIT - 1)) - 1


def unpack_counts(word: Any) -> tuple[Any, Any]:
    """The numbers below and from `FULL_BIT` on."""
    return word & np.int32(MAX_BLOCKS), word >> np.int32(FULL_BIT)


def build_block_lists(classes: jax.Array, parts: int = 1) -> tuple[jax.Array, jax.Array]:
    """The counts and lists of `block_mask.BlockMask`, from classes `[B | 1, heads | 1, tiles, blocks parts]`.

    A list ends with the blocks that are not visited. A CTA writes a list, and a warp a quarter of its
    row's blocks, after it has counted all of the row.
    """
    *outer, blocks = classes.shape
    assert (EMPTY, PARTIAL, FULL) == (0, 1, 2) and blocks <= MAX_BLOCKS
    rows = math.prod(outer)
    quarter = arithmetic.round_up(-(-blocks // WARPS), LANES)

    def run(refs: tuple, _: Any) -> None:
        classes, counts, lists = refs
        row, thread = lax.axis_index("cta"), thread_ops.thread_indices()
        classes, found = classes.at[row], lists.at[row]
        lane, first = rem(thread, LANES), div(thread, LANES) * quarter
        end = jnp.minimum(first + quarter, blocks)

        def seen(columns: list[Any]) -> list[Any]:
            """1 in the half of its class, of each block that is visited."""
            found = [thread_ops.gather(classes, column) for column in columns]
            return [jnp.where(x == FULL, 1 << FULL_BIT, x) for x in found]

        def count(columns: list[Any], sums: tuple[Any, Any]) -> tuple[Any, Any]:
            for column, x in zip(columns, seen(columns), strict=True):
                sums = sums[0] + x, sums[1] + jnp.where(column < first, x, 0)
            return sums

        def place(columns: list[Any], before: Any) -> Any:
            for column, x in zip(columns, seen(columns), strict=True):
                cut, full = unpack_counts(before + warp_exclusive_count(x))
                at = jnp.where(x == 1, all_full + cut, all_full + all_cut + column - full - cut)
                at = jnp.where(x > 1, full, at)
                thread_ops.scatter(found, jnp.where(column < end, at, blocks), column)
                before = before + thread_ops.warp_sum(x)
            return before

        sums = thread_ops.strided_loop(blocks, lane, LANES, count, (0 * thread, 0 * thread))
        total, before = map(thread_ops.warp_sum, sums)
        all_cut, all_full = unpack_counts(total)
        thread_ops.strided_loop(quarter, first + lane, LANES, place, before)
        visited = div(jnp.maximum(all_full + all_cut, 1) + (parts - 1), parts)
        count_of_row = visited + (div(all_full, parts) << FULL_BIT)
        thread_ops.scatter(counts, jnp.where(thread == 0, row, rows), count_of_row)

    out = [jax.ShapeDtypeStruct(shape, I32) for shape in ((rows,), (rows, blocks))]
    kernel = launch.build_kernel("list_blocks", run, [], out, {"cta": rows}, 1)
    counts, lists = kernel(classes.reshape(rows, blocks))
    return counts.reshape(outer), lists.reshape(classes.shape)


def warp_exclusive_count(x: jax.Array) -> jax.Array:
    """Of the lanes below a lane, where x is 0, 1 or 1 << FULL_BIT."""
    return _warp_exclusive_count(x)


@inline_op("warp_exclusive_count", PER_THREAD, result=PER_THREAD_I32)
def _warp_exclusive_count(_: Any, x: Any) -> Any:
    code = (
        "{ .reg .pred p; .reg .b32 below, low, high; mov.u32 below, %lanemask_lt; "
        "setp.eq.b32 p, $1, 1; vote.sync.ballot.b32 low, p, -1; and.b32 low, low, below; "
        f"setp.eq.b32 p, $1, {1 << FULL_BIT}; vote.sync.ballot.b32 high, p, -1; "
        "and.b32 high, high, below; popc.b32 low, low; popc.b32 high, high; "
        f"shl.b32 high, high, {FULL_BIT}; or.b32 $0, low, high; }}"
    )
    return thread_ops.asm_i32(code, "=r,r", thread_value(x))
