"""Lists of blocks: what the kernel counts is what the host sorts."""

import numpy as np
import pytest

from pallas_fa2.backends.sm90 import block_mask
from pallas_fa2.backends.sm90.block_mask import BlockMask
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from tests.support import interpreter

# [B | 1, heads | 1, tiles, blocks], from one block to more than a loop's turn of the whole row and of
# the quarter that a warp places
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 3, 5),
    (1, 1, 2, 33),
    (1, 2, 1, 128),
    (1, 1, 2, 700),
    (1, 1, 1, 2500),
]


def check_lists(classes, parts=1):
    counts, lists = interpreter.run(lambda x: BlockMask.from_classes(x, parts), classes)
    want = BlockMask.from_classes(classes, parts)
    np.testing.assert_array_equal(counts, want.num_blocks)
    np.testing.assert_array_equal(
        block_mask.block_id(lists), block_mask.block_id(want.block_indices)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_listed_as_on_the_host(shape):
    check_lists(np.random.default_rng(0).integers(0, 3, shape).astype(np.int32))


@pytest.mark.parametrize("parts, blocks", [(2, 10), (2, 260), (3, 129)])
def test_blocks_in_parts_are_counted_as_on_the_host(parts, blocks):
    classes = np.random.default_rng(0).integers(0, 3, (1, 2, 7, blocks)).astype(np.int32)
    classes[:, :, 0] = EMPTY
    check_lists(classes, parts)


@pytest.mark.parametrize("of", [EMPTY, PARTIAL, FULL])
@pytest.mark.parametrize("blocks", [1, 130])
def test_blocks_of_one_class(of, blocks):
    check_lists(np.full((1, 1, 2, blocks), of, np.int32))
