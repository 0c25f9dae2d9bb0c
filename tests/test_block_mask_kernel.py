"""Lists of blocks: what the kernel counts is what the host sorts."""

import numpy as np
import pytest

from pallas_fa2.backends.common import block_mask
from pallas_fa2.backends.common.block_mask import BlockMask
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


def check_lists(classes):
    counts, lists = interpreter.run(BlockMask.from_classes, classes)
    want = BlockMask.from_classes(classes)
    np.testing.assert_array_equal(counts, want.num_blocks)
    np.testing.assert_array_equal(
        block_mask.block_id(lists), block_mask.block_id(want.block_indices)
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_listed_as_on_the_host(shape):
    check_lists(np.random.default_rng(0).integers(0, 3, shape).astype(np.int32))


@pytest.mark.parametrize("of", [EMPTY, PARTIAL, FULL])
@pytest.mark.parametrize("blocks", [1, 130])
def test_blocks_of_one_class(of, blocks):
    check_lists(np.full((1, 1, 2, blocks), of, np.int32))
