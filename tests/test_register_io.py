"""Tiles are stored to device memory and loaded again, interpreted and on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import layouts, register_io
from pallas_fa2.backends.common.primitives.launch import build_kernel
from tests.support import interpreter


def through_registers(dtype: Any, columns: int) -> Any:
    """Return a tile, what a kernel stored of it, and what another one loaded."""
    shape = 64, columns

    def store(refs: tuple, _: Any) -> None:
        tile, stored = refs
        values = plgpu.load(tile, layout=layouts.ACC_LAYOUT, optimized=False)
        register_io.store_fragments(stored, values)

    def load(refs: tuple, _: Any) -> None:
        stored, tile = refs
        tile[...] = register_io.load_fragments(stored, columns)

    def launch(run: Any, shape: tuple[int, ...]) -> Any:
        out = jax.ShapeDtypeStruct(shape, dtype)
        return build_kernel("fragments", run, [plgpu.Barrier()], out, {"cta": 1}, 1)

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


def accumulated(first_column: int) -> tuple[jax.Array, ...]:
    """Return a tile, what its own threads load after they have stored and added it, a tile that does not exist, and the
    rows and columns of the tile that exist, in a larger array."""
    rows, columns = 45, 72
    tile = jax.random.normal(jax.random.key(0), (64, 64), jnp.bfloat16)

    def run(refs: tuple, _: Any) -> None:
        tile, partial, loaded, nothing, out = refs
        values = plgpu.load(tile, layout=layouts.ACC_LAYOUT, optimized=False)
        floats, yes = values.astype(jnp.float32), lax.axis_index("cta") == 0
        register_io.put_fragments(partial, floats, yes)
        register_io.put_fragments(partial, 0.5 * floats, ~yes)
        loaded[...] = register_io.take_fragments(partial, 64, yes)
        nothing[...] = register_io.take_fragments(partial, 64, ~yes)
        rows_out = out.at[1, pl.ds(3, 64), 1]
        register_io.store_rows(rows_out, values, jnp.int32(first_column), jnp.int32(rows))

    partial, fragment = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096,), (64, 64)))
    outputs = partial, fragment, fragment
    kernel = build_kernel("fragments", run, [plgpu.Barrier()], (), {"cta": 1}, 1)

    def written(*arrays: jax.Array) -> tuple:
        return pl.run_state(lambda refs: kernel(tile, *refs))(arrays)

    arrays = [jnp.zeros(x.shape, x.dtype) for x in outputs]
    _, loaded, nothing, out = written(*arrays, jnp.zeros((2, 100, 2, columns), jnp.bfloat16))
    return tile, loaded, nothing, out


def check_accumulated(first_column: int, tile: Any, loaded: Any, nothing: Any, out: Any) -> None:
    np.testing.assert_array_equal(loaded, 1.5 * tile.astype(jnp.float32))
    assert not nothing.any()
    expected = np.zeros_like(out)
    count = min(64, 72 - first_column)
    expected[1, 3:48, 1, first_column : first_column + count] = tile[:45, :count]
    np.testing.assert_array_equal(out, expected)


FIRST_COLUMNS = pytest.mark.parametrize("first_column", [0, 8, 64])


@FIRST_COLUMNS
def test_accumulation_interpreted(first_column: int) -> None:
    check_accumulated(first_column, *interpreter.run(lambda: accumulated(first_column)))


@pytest.mark.gpu
@FIRST_COLUMNS
def test_accumulation_on_a_gpu(first_column: int) -> None:
    check_accumulated(first_column, *jax.jit(accumulated, static_argnums=0)(first_column))
