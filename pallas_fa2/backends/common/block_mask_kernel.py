"""A small kernel that lists the blocks that tiles visit under a mask whose classes depend on data.

XLA would sort, in several kernels, most of which take little longer than their launch. Here each warp computes the
prefix counts that it needs, redundantly, so that no warps synchronize.
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
from pallas_fa2.backends.common.primitives import launch, thread_ops
from pallas_fa2.backends.common.primitives.layouts import LANES, WARPS
from pallas_fa2.backends.common.primitives.thread_values import (
    PER_THREAD,
    PER_THREAD_I32,
    thread_value,
)
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL

# The bit at which the second of two counts in a word begins: each is at most `MAX_BLOCKS`.
FULL_BIT = 16
MAX_BLOCKS = (1 << (FULL_BIT - 1)) - 1


def unpack_word(word: Any) -> tuple[Any, Any]:
    """Return the counts below `FULL_BIT` and from it on."""
    return word & np.int32(MAX_BLOCKS), word >> np.int32(FULL_BIT)


def build_block_lists(classes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the counts and lists of `block_mask.BlockMask`, from classes `[B | 1, heads | 1, tiles, blocks]`.

    A list ends with the blocks that are not visited. A CTA writes the list of a row of blocks, and a warp the
    entries of a quarter of them, after it has counted the whole row.
    """
    *outer, blocks = classes.shape
    assert (EMPTY, PARTIAL, FULL) == (0, 1, 2) and blocks <= MAX_BLOCKS
    rows = math.prod(outer)
    quarter = arithmetic.round_up(-(-blocks // WARPS), LANES)

    def run(refs: tuple, _: Any) -> None:
        classes, counts, lists = refs
        row, thread = lax.axis_index("cta"), thread_ops.thread_indices()
        classes, block_list = classes.at[row], lists.at[row]
        lane, first = rem(thread, LANES), div(thread, LANES) * quarter
        end = jnp.minimum(first + quarter, blocks)

        def load(columns: list[Any]) -> list[Any]:
            """Load the classes of blocks as counts: 1, or 1 << FULL_BIT, of each that is visited."""
            loaded = [thread_ops.gather(classes, column) for column in columns]
            return [jnp.where(x == FULL, 1 << FULL_BIT, x) for x in loaded]

        def count(columns: list[Any], sums: tuple[Any, Any]) -> tuple[Any, Any]:
            for column, x in zip(columns, load(columns), strict=True):
                sums = sums[0] + x, sums[1] + jnp.where(column < first, x, 0)
            return sums

        def store(columns: list[Any], before: Any) -> Any:
            for column, x in zip(columns, load(columns), strict=True):
                partial, full = unpack_word(before + warp_exclusive_count(x))
                empty = all_full + all_partial + column - full - partial
                index = jnp.where(x == 1, all_full + partial, empty)
                index = jnp.where(x > 1, full, index)
                thread_ops.scatter(block_list, jnp.where(column < end, index, blocks), column)
                before = before + thread_ops.warp_sum(x)
            return before

        sums = thread_ops.strided_loop(blocks, lane, LANES, count, (0 * thread, 0 * thread))
        total, before = map(thread_ops.warp_sum, sums)
        all_partial, all_full = unpack_word(total)
        thread_ops.strided_loop(quarter, first + lane, LANES, store, before)
        row_counts = jnp.maximum(all_full + all_partial, 1) + (all_full << FULL_BIT)
        thread_ops.scatter(counts, jnp.where(thread == 0, row, rows), row_counts)

    out = [jax.ShapeDtypeStruct(shape, I32) for shape in ((rows,), (rows, blocks))]
    kernel = launch.build_kernel("list_blocks", run, [], out, {"cta": rows}, 1)
    counts, lists = kernel(classes.reshape(rows, blocks))
    return counts.reshape(outer), lists.reshape(classes.shape)


def warp_exclusive_count(x: jax.Array) -> jax.Array:
    """Return the sum of x over the lanes below each lane, where x is 0, 1 or 1 << FULL_BIT."""
    return _sum_of_lanes_before(x)  # pyright: ignore[reportCallIssue]


@inline_op("warp_exclusive_count", PER_THREAD, result=PER_THREAD_I32)
def _sum_of_lanes_before(_: Any, x: Any) -> Any:
    code = (
        "{ .reg .pred p; .reg .b32 below, low, high; mov.u32 below, %lanemask_lt; "
        "setp.eq.b32 p, $1, 1; vote.sync.ballot.b32 low, p, -1; and.b32 low, low, below; "
        f"setp.eq.b32 p, $1, {1 << FULL_BIT}; vote.sync.ballot.b32 high, p, -1; "
        "and.b32 high, high, below; popc.b32 low, low; popc.b32 high, high; "
        f"shl.b32 high, high, {FULL_BIT}; or.b32 $0, low, high; }}"
    )
    return thread_ops.asm_i32(code, "=r,r", thread_value(x))
