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
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.bounds import EMPTY, FULL, PARTIAL
from pallas_fa2.kernels import lanes, mosaic
from pallas_fa2.kernels.lanes import LANES, WARPS
from pallas_fa2.kernels.mosaic import I32, div, rem
from pallas_fa2.kernels.ptx import EACH, NUMBERS, own

# Where the second of two numbers in a word begins: each is at most `MOST`.
FULL_BIT = 16
MOST = (1 << (FULL_BIT - 1)) - 1


def halves(word: Any) -> tuple[Any, Any]:
    """The numbers below and from `FULL_BIT` on."""
    return word & np.int32(MOST), word >> np.int32(FULL_BIT)


def list_blocks(classes: jax.Array, parts: int = 1) -> tuple[jax.Array, jax.Array]:
    """The counts and lists of `visits.Visits`, from classes `[B | 1, heads | 1, tiles, blocks parts]`.

    A list ends with the blocks that are not visited. A CTA writes a list, and a warp a quarter of its
    row's blocks, after it has counted all of the row.
    """
    *outer, blocks = classes.shape
    assert (EMPTY, PARTIAL, FULL) == (0, 1, 2) and blocks <= MOST
    rows = math.prod(outer)
    quarter = mosaic.round_up(-(-blocks // WARPS), LANES)

    def run(refs: tuple, _: Any) -> None:
        classes, counts, lists = refs
        row, thread = lax.axis_index("cta"), lanes.thread_numbers()
        classes, found = classes.at[row], lists.at[row]
        lane, first = rem(thread, LANES), div(thread, LANES) * quarter
        end = jnp.minimum(first + quarter, blocks)

        def seen(columns: list[Any]) -> list[Any]:
            """1 in the half of its class, of each block that is visited."""
            found = [lanes.gather(classes, column) for column in columns]
            return [jnp.where(x == FULL, 1 << FULL_BIT, x) for x in found]

        def count(columns: list[Any], sums: tuple[Any, Any]) -> tuple[Any, Any]:
            for column, x in zip(columns, seen(columns), strict=True):
                sums = sums[0] + x, sums[1] + jnp.where(column < first, x, 0)
            return sums

        def place(columns: list[Any], before: Any) -> Any:
            for column, x in zip(columns, seen(columns), strict=True):
                cut, full = halves(before + sum_of_lanes_before(x))
                at = jnp.where(x == 1, all_full + cut, all_full + all_cut + column - full - cut)
                at = jnp.where(x > 1, full, at)
                lanes.scatter(found, jnp.where(column < end, at, blocks), column)
                before = before + lanes.sum_of_lanes(x)
            return before

        sums = lanes.strides(blocks, lane, LANES, count, (0 * thread, 0 * thread))
        total, before = map(lanes.sum_of_lanes, sums)
        all_cut, all_full = halves(total)
        lanes.strides(quarter, first + lane, LANES, place, before)
        visited = div(jnp.maximum(all_full + all_cut, 1) + (parts - 1), parts)
        count_of_row = visited + (div(all_full, parts) << FULL_BIT)
        lanes.scatter(counts, jnp.where(thread == 0, row, rows), count_of_row)

    out = [jax.ShapeDtypeStruct(shape, I32) for shape in ((rows,), (rows, blocks))]
    kernel = mosaic.launch("list_blocks", run, [], out, {"cta": rows}, 1)
    counts, lists = kernel(classes.reshape(rows, blocks))
    return counts.reshape(outer), lists.reshape(classes.shape)


def sum_of_lanes_before(x: jax.Array) -> jax.Array:
    """Of the lanes below a lane, where x is 0, 1 or 1 << FULL_BIT."""
    return _sum_of_lanes_before(x)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(EACH,), return_type=NUMBERS)
def _sum_of_lanes_before(_: Any, x: Any) -> Any:
    code = (
        "{ .reg .pred p; .reg .b32 below, low, high; mov.u32 below, %lanemask_lt; "
        "setp.eq.b32 p, $1, 1; vote.sync.ballot.b32 low, p, -1; and.b32 low, low, below; "
        f"setp.eq.b32 p, $1, {1 << FULL_BIT}; vote.sync.ballot.b32 high, p, -1; "
        "and.b32 high, high, below; popc.b32 low, low; popc.b32 high, high; "
        f"shl.b32 high, high, {FULL_BIT}; or.b32 $0, low, high; }}"
    )
    return lanes.word(code, "=r,r", own(x))
