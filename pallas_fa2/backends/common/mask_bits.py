"""A mask as a bitmap: its partial tiles, one bit for each pair of tokens, precomputed for all heads.

Where heads share a mask, a kernel evaluates it once and the attention reads bits: it would evaluate it again for
each head, and a mask may take longer than the softmax. A fragment of 64 rows and 64 columns is one word for each
of a warpgroup's 128 threads: which of its own values, in the order of registers, are masked.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import block_mask
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.block_mask import BlockMask
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.mask_bits_kernel import FRAGMENT, BitsKernel, rows_first
from pallas_fa2.backends.common.primitives import thread_ops, thread_values
from pallas_fa2.backends.common.primitives.layouts import LANES, WARPS
from pallas_fa2.backends.common.primitives.types import Ref, Scalar
from pallas_fa2.backends.common.tile_mods import TileMask
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL

# A mask is precomputed where that saves so many operations on pairs: on all of a GPU's SMs they take 12 us, and the
# bitmap's kernel takes 5 and more. (docs/decisions/0046-mask-bitmap.md)
MIN_OPS_SAVED = 2.5e8
# The bitmap's kernel takes as long as two heads that evaluate the mask themselves.
PRECOMPUTE_COST_IN_HEADS = 2
# In the backward, a mask of fewer operations is evaluated again while its bits would be loaded.
MIN_OPS_BACKWARD = 10
# Of a mask that is not known when traced, one tile in so many is taken to be partial: a guess, not measured.
ASSUMED_PARTIAL_1_IN = 8


def precompute_pays_off(
    spec: KernelSpec, head_dim: int, classes: Any, tile: tuple[int, int], q_axis: int
) -> bool:
    """Return whether a mask that reads no pairwise inputs is to be precomputed for all heads.

    `classes` are those of its tiles of so many queries and keys, `[B | 1, N | 1, T tiles, S tiles]`; the rows of an
    attention's CTA are queries if `q_axis` is 0, else keys. (For masks that read some: `compile_mods.needs_mask_bits`.)
    """
    if spec.score is not None or classes.shape[1] > 1 or any(n % FRAGMENT for n in tile):
        return False
    size = len(classes) * spec.q_len * spec.kv_len // 8
    if size > 2 * spec.batch * spec.q_len * spec.q_heads * head_dim:
        return False  # more memory than queries have
    if not may_pay_off(spec.mask, q_axis):
        return False
    visible, heads = spec.mask.visible, spec.q_heads * (spec.batch // len(classes))
    known = isinstance(classes, np.ndarray)
    partial = np.sum(classes == PARTIAL) if known else classes.size / ASSUMED_PARTIAL_1_IN
    ops = visible.op_cost("k" if q_axis == 0 else "q")
    saved = (heads - PRECOMPUTE_COST_IN_HEADS) * partial * math.prod(tile) * ops
    return saved >= MIN_OPS_SAVED


def may_pay_off(mask: TileMask, q_axis: int) -> bool:
    """Return whether there are sizes for which a mask that reads no pairwise inputs is to be precomputed."""
    if q_axis == 0:
        return not mask.is_key_interval  # which has a few operations a row, and none a pair
    return mask.visible.op_cost("q") >= MIN_OPS_BACKWARD


def compute_bits(
    spec: KernelSpec, aux: AuxInputs, tiles: BlockMask, tile: tuple[int, int], q_axis: int
) -> jax.Array:
    """Return the bits of partial blocks, int32 `[B | 1, tiles, blocks, row fragments, column fragments, 128]`.

    A fragment is 64 rows and columns. Blocks lie by their indices. Rows of the tile, which has so many queries and
    keys, are queries if `q_axis` is 0, else keys. `tiles` lists what each row of tiles visits; where rows are keys,
    its lists are those of `block_mask.reversed_classes`.
    """
    batch, _, num_tiles, num_blocks = tiles.block_indices.shape
    kernel = BitsKernel(spec, aux, tile, q_axis, (batch, num_tiles, num_blocks))

    def run(refs: tuple, _: Any) -> None:
        counts, lists, aux, bits = jax.tree.unflatten(tree, refs)
        entry, row, _ = kernel.axes
        visited, partial = block_mask.unpack_counts(counts[entry, 0, row])

        def load_block_index(i: Scalar) -> Scalar:
            # A CTA may have no block; it reads an entry nevertheless.
            listed = lists[entry, 0, row, jnp.minimum(visited - partial + i, num_blocks - 1)]
            if q_axis == 0:
                return block_mask.block_id(listed)
            return block_mask.reversed_block_id(listed, num_blocks)

        store = functools.partial(kernel.store_block, bits, aux)
        kernel.for_each_block(partial, load_block_index, store)

    inputs = jnp.asarray(tiles.num_blocks), jnp.asarray(tiles.block_indices), kernel.padded_aux
    tree = jax.tree.structure((*inputs, kernel.bits_type))
    return kernel.launch(run, kernel.bits_type)(*jax.tree.leaves(inputs))


# The counts of lanes of a warp that find masked pairs in a block, and visible ones, are in one word: each times this.
MASKED, VISIBLE = 1, 2 * LANES


def compute_bits_and_classes(
    spec: KernelSpec, aux: AuxInputs, tile: tuple[int, int], q_axis: int
) -> tuple[jax.Array, jax.Array]:
    """Return the bits of all blocks, as `compute_bits`, and the classes of tiles that follow from them,
    `[B | 1, 1, T tiles, S tiles]`.

    Where the mask is an array, to classify its tiles alone takes as long.
    """
    num_tiles = -(-spec.q_len // tile[0]), -(-spec.kv_len // tile[1])
    counts = _num_distinct_entries(spec, aux), *rows_first(num_tiles, q_axis)
    kernel = BitsKernel(spec, aux, tile, q_axis, counts)
    outer = kernel.bits_type.shape[:4]
    flags = jax.ShapeDtypeStruct((math.prod((*outer, WARPS)),), I32)

    def run(refs: tuple, _: Any) -> None:
        aux, bits, flags = jax.tree.unflatten(tree, refs)
        entry, row, _ = kernel.axes

        def store_block(block: Scalar) -> None:
            words = kernel.store_block(bits, aux, block)
            masked = functools.reduce(jnp.bitwise_or, words) != 0
            visible = functools.reduce(jnp.bitwise_and, words) != -1
            lane_flags = (
                jnp.where(x, I32(y), I32(0)) for x, y in ((masked, MASKED), (visible, VISIBLE))
            )
            warp_flags = thread_ops.warp_sum(functools.reduce(jnp.add, lane_flags))
            index = entry
            for size, i in zip(outer[1:], (row, block, kernel.warpgroup), strict=True):
                index = index * size + i
            thread = thread_ops.thread_indices()
            index = index * WARPS + arithmetic.div(thread, LANES)
            first = arithmetic.rem(thread, LANES) == 0
            thread_ops.scatter(flags, jnp.where(first, index, flags.shape[0]), warp_flags)

        kernel.for_each_block(kernel.counts[2], lambda i: i, store_block)

    tree = jax.tree.structure((kernel.padded_aux, kernel.bits_type, flags))
    outputs = kernel.launch(run, [kernel.bits_type, flags])(*jax.tree.leaves(kernel.padded_aux))
    bits, flags = outputs
    flags = flags.reshape(*outer[:3], -1)
    masked, visible = (jnp.any(flags & (x * (2 * LANES - 1)) != 0, -1) for x in (MASKED, VISIBLE))
    classes = jnp.where(masked, jnp.where(visible, PARTIAL, EMPTY), FULL).astype(I32)[:, None]
    return bits, classes if q_axis == 0 else classes.swapaxes(2, 3)


def load_bits(
    bits: Ref, entry: Scalar, *index: Scalar, fragments: Sequence[Scalar] | None = None
) -> list[jax.Array]:
    """Load some fragments, or all, of one row of them in a block; `index` is (tile, block, row of fragments)."""
    row = bits.at[(entry if bits.shape[0] > 1 else 0, *index)]
    if fragments is None:
        fragments = range(row.shape[0])
    return [
        plgpu.load(row.at[j], layout=thread_values.PER_THREAD, optimized=False) for j in fragments
    ]


def _num_distinct_entries(spec: KernelSpec, aux: AuxInputs) -> int:
    """Return in how many batch entries what a mask reads differs."""
    visible = spec.mask.visible
    if visible.token_inputs("q") or visible.token_inputs("k") or visible.head_inputs:
        return spec.batch
    return max(
        aux.pairwise_unpacked[cast(int, source.position)].shape[0]
        for source in visible.pairwise_inputs
    )
