"""Tiles to device memory and back, interpreted and on a GPU; they are added and summed in the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import fragments, mosaic
from tests.support import interpreter
from tests.support.on_integers import executed_here


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


def by_squares(dtype: Any, columns: int, panel: int) -> Any:
    """A tile, and what was loaded from where it was stored in shared memory."""
    shape = 64, columns

    def run(refs: tuple, memory: Any) -> None:
        source, target = refs
        fragments.store_tile(memory, plgpu.load(source, layout=mosaic.TILE, optimized=False))
        target[...] = plgpu.load(memory, layout=mosaic.TILE, optimized=False)

    out = jax.ShapeDtypeStruct(shape, dtype)
    tile = jax.random.normal(jax.random.key(0), shape).astype(dtype)
    memory = mosaic.operand(*shape, dtype=dtype, panel=panel)
    return tile, mosaic.launch("squares", run, memory, out, {"cta": 1}, 1)(tile)


PANELS = pytest.mark.parametrize(
    "columns, panel", [(128, 64), (64, 64), (96, 32), (80, 16), (16, 16)]
)


@PANELS
def test_squares_interpreted(columns: int, panel: int) -> None:
    np.testing.assert_array_equal(
        *interpreter.run(lambda: by_squares(jnp.bfloat16, columns, panel))
    )


@pytest.mark.gpu
@PANELS
def test_squares_on_a_gpu(columns: int, panel: int) -> None:
    run = jax.jit(by_squares, static_argnums=(0, 1, 2))
    np.testing.assert_array_equal(*run(jnp.bfloat16, columns, panel))


@pytest.mark.parametrize("panel", [64, 32, 16])
def test_every_thread_says_where_a_row_of_a_square_lies(
    monkeypatch: pytest.MonkeyPatch, panel: int
) -> None:
    """Of 64 rows and 128 columns: bits 4 to 6 of an address, as many as a line of a panel has, are turned
    over where bits 7 to 9 are set (CUDA's swizzles of 128, 64 and 32 bytes)."""
    rows, columns = np.mgrid[:64, :128]
    group, across = rows // 8, 128 // panel
    byte = 2 * (
        (group * across + columns // panel) * 8 * panel + rows % 8 * panel + columns % panel
    )
    lie = byte ^ (byte >> 7 & (panel // 8 - 1)) << 4
    here = executed_here(monkeypatch, fragments)
    for here.number in range(128):
        warp, lane = divmod(here.number, 32)
        place = fragments._squares(panel, across * 8 * panel, 8 * panel)
        row, right = 16 * warp + lane % 16, 8 * (lane // 16)
        for column in range(0, 128, 16):
            assert place(column) == lie[row, column + right]
