"""Tiles to device memory and back, interpreted and on a GPU; they are added and summed in the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import fragments, mosaic
from tests.support import interpreter


def through_registers(dtype: Any, columns: int) -> Any:
    """A tile, as it was stored, and what was then loaded; by a kernel each."""
    shape = 64, columns

    def store(refs: tuple, _: Any) -> None:
        tile, numbers = refs
        found = plgpu.load(tile, layout=mosaic.TILE, optimized=False)
        fragments.store_fragments(numbers, found)

    def load(refs: tuple, _: Any) -> None:
        numbers, tile = refs
        tile[...] = fragments.load_fragments(numbers, columns)

    def launch(run: Any, shape: tuple[int, ...]) -> Any:
        out = jax.ShapeDtypeStruct(shape, dtype)
        return mosaic.launch("fragments", run, [plgpu.Barrier()], out, {"cta": 1}, 1)

    tile = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    stored = launch(store, (64 * columns,))(tile)
    return tile, stored, launch(load, shape)(stored)


def check_fragments(tile: jax.Array, stored: jax.Array, loaded: jax.Array) -> None:
    np.testing.assert_array_equal(loaded, tile)
    parts = tile.reshape(4, 2, 8, -1, 4, 2)  # warp, half, group, eight, thread, element
    np.testing.assert_array_equal(stored, parts.transpose(3, 0, 2, 4, 1, 5).ravel())


FRAGMENTS = pytest.mark.parametrize("columns", [16, 32, 64])
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


@FRAGMENTS
@DTYPES
def test_fragments_interpreted(dtype: Any, columns: int) -> None:
    check_fragments(*interpreter.run(lambda: through_registers(dtype, columns)))


@pytest.mark.gpu
@FRAGMENTS
@DTYPES
def test_fragments_on_a_gpu(dtype: Any, columns: int) -> None:
    check_fragments(*jax.jit(through_registers, static_argnums=(0, 1))(dtype, columns))
