"""What takes the place of blocks in which something is not finite, interpreted and on a GPU."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.kernels.tamed import Part, tame
from tests.support import interpreter

BATCH, HEADS = 2, 2
# A place in the first array, and what stands there.
WILD = {
    (0, 3, 1, 5): math.nan,
    (0, 100, 0, 7): math.nan,  # with blocks of 96, two CTAs see it
    (1, 64, 0, 0): math.inf,
    (1, 69, 0, 63): -math.inf,
}


def arrays(length: int, dims: tuple[int, int]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    x, y = (
        jax.random.normal(key, (BATCH, length, HEADS, dim), jnp.bfloat16)
        for key, dim in zip(keys, dims, strict=True)
    )
    for place, value in WILD.items():
        x = x.at[place].set(value)
    return [x, y]


def tamed(block: int, kernel_dims: tuple[int, int]) -> Any:
    def run(x: jax.Array, y: jax.Array) -> list[Any]:
        return tame(block, Part(x, kernel_dims[0], 0.0), Part(y, kernel_dims[1], math.nan))

    return run


def check(found: list[Any], x: jax.Array, y: jax.Array, block: int) -> None:
    rows = ~np.isfinite(np.asarray(x, np.float32)).all(-1)
    for array, value, tamed in ((x, 0.0, found[0]), (y, math.nan, found[1])):
        assert tamed.wild.shape == (BATCH, HEADS, -(-x.shape[1] // block))
        expected = np.where(rows[..., None], value, np.asarray(array, np.float32))
        instead = np.asarray(tamed.instead, np.float32)
        for (batch, head, number), wild in np.ndenumerate(np.asarray(tamed.wild)):
            part = batch, slice(number * block, (number + 1) * block), head
            # A block may be named for what is just past it, in the same 64 rows.
            assert wild == 1 or not rows[part].any()
            assert wild == 0 or rows[batch, number * block : number * block + 128, head].any()
            if wild:
                np.testing.assert_array_equal(instead[part], expected[part])


CASES = pytest.mark.parametrize(
    "length, dims, kernel_dims, block",
    [
        (128, (64, 64), (64, 64), 64),
        (70, (64, 64), (64, 64), 128),  # what ends within a group of rows
        (192, (96, 96), (96, 96), 96),  # no multiple of 64
        (136, (72, 64), (96, 96), 64),  # fewer columns than the kernel has
        (139, (64, 96), (96, 96), 128),
        (128, (192, 128), (192, 128), 128),
    ],
)


@CASES
def test_tamed_interpreted(length: int, dims: Any, kernel_dims: Any, block: int) -> None:
    x, y = arrays(length, dims)
    check(interpreter.run(tamed(block, kernel_dims), x, y), x, y, block)


@pytest.mark.gpu
@CASES
def test_tamed_on_a_gpu(length: int, dims: Any, kernel_dims: Any, block: int) -> None:
    x, y = arrays(length, dims)
    check(jax.jit(tamed(block, kernel_dims))(x, y), x, y, block)
