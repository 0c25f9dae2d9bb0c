"""Copies of rows, for lengths and head dims that are multiples of a tile's and for others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import launch, swizzle
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.backends.sm90.primitives.tma import HeadRows
from tests.support import compile_gate, interpreter
from tests.support.tiers import slow_but

TILE = 64
LENGTHS = (3, 8, 9, 70, 127, 128)
# Of arrays, and of shared memory: as wide, or with columns that are missing; with another's panels, some of
# which are cut.
WIDTHS = [
    *((n, n, None) for n in (64, 96, 128, 256)),
    *((40, 64, None), (64, 128, None), (160, 192, None), (80, 96, None), (208, 256, None)),
    *((80, 128, 64), (112, 128, None), (72, 96, None), (200, 256, 32)),
]
PLACES = pytest.mark.parametrize("dim, columns, panel", WIDTHS)


def through_shared_memory(
    x: jax.Array, length: int, columns: int, panel: int | None = None
) -> jax.Array:
    """`x` `[B, T, N, H]`, tile by tile, in an array of another length."""
    batch, _, heads, dim = x.shape
    tiles = -(-length // TILE)

    def run(refs: tuple, memory: tuple) -> None:
        (source, target), (buffer, barriers) = refs, memory
        place, tile = jnp.divmod(lax.axis_index("cta"), jnp.int32(tiles))
        entry, head = jnp.divmod(place, jnp.int32(heads))
        rows = pl.ds(tile * TILE, TILE)
        HeadRows(source, entry, rows, head).load(buffer, barriers, 1)
        plgpu.barrier_wait(barriers.at[1])
        HeadRows(target, entry, rows, head).store(buffer)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    panel = panel or swizzle.panel_width(columns, dim, x.dtype)
    memory = swizzle.swizzled_smem(TILE, columns, dtype=x.dtype, panel=panel), pipeline.barriers(3)
    shape = jax.ShapeDtypeStruct((batch, length, heads, dim), x.dtype)
    return launch.build_kernel("copy", run, memory, shape, {"cta": batch * heads * tiles}, 1)(x)


def check(length: int, dim: int, call: Any) -> None:
    """What lies beyond an entry is the next one, beyond a row the next head: neither is loaded or stored."""
    x = jax.random.normal(jax.random.key(0), (3, length, 2, dim), jnp.bfloat16)
    np.testing.assert_array_equal(call(x, length), x)
    longer = length + TILE // 2
    zeros = ((0, 0), (0, TILE // 2), (0, 0), (0, 0))
    np.testing.assert_array_equal(call(x, longer), jnp.pad(x, zeros))


@pytest.mark.parametrize("length", slow_but(lambda length: length == LENGTHS[1], LENGTHS))
@PLACES
def test_rows_interpreted(length: int, dim: int, columns: int, panel: int | None) -> None:
    def call(x: jax.Array, longer: int) -> Any:
        return interpreter.run(lambda x: through_shared_memory(x, longer, columns, panel), x)

    check(length, dim, call)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [*LENGTHS, 1000, 4097])
@PLACES
def test_rows_on_a_gpu(length: int, dim: int, columns: int, panel: int | None) -> None:
    run = jax.jit(through_shared_memory, static_argnums=(1, 2, 3))
    check(length, dim, lambda x, longer: run(x, longer, columns, panel))


@pytest.mark.parametrize(
    "length, dim, columns, panel, copies",
    [
        (4096, 128, 128, None, 1),
        (3, 128, 128, None, 1),
        (4097, 64, 64, None, 1),
        (4097, 128, 128, None, 2),
        (4097, 40, 64, None, 1),
        (4096, 160, 192, None, 1),
        (4097, 160, 192, None, 2),
        (4096, 80, 96, None, 1),
        (4096, 80, 128, 64, 1),
        (4097, 72, 96, 32, 1),
    ],
)
def test_rows_compile(length: int, dim: int, columns: int, panel: int | None, copies: int) -> None:
    """One copy, or one of whole groups and one in a loop, or one in a loop."""
    x = jax.ShapeDtypeStruct((2, length, 2, dim), jnp.bfloat16)
    (report,) = compile_gate.compile_for_h200(
        lambda x: through_shared_memory(x, length, columns, panel), x
    )
    compile_gate.assert_clean(report)
    assert (report.count("UTMALDG"), report.count("UTMASTG")) == (copies, copies)


def test_an_array_of_barriers_must_be_the_only_one_of_its_kind() -> None:
    def copy(x: jax.Array) -> jax.Array:
        def run(refs: tuple, memory: tuple) -> None:
            buffer, barriers, _ = memory
            HeadRows(refs[0], 0, pl.ds(0, TILE), 0).load(buffer, barriers, 0)

        barriers = pipeline.barriers(3), pipeline.barriers(3)
        memory = swizzle.swizzled_smem(TILE, 128, dtype=x.dtype), *barriers
        return launch.build_kernel("copy", run, memory, x, {"cta": 1}, 1)(x)

    x = jax.ShapeDtypeStruct((1, 70, 1, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="2 arrays of barriers look like"):
        compile_gate.compile_for_h200(copy, x)


@pytest.mark.parametrize(
    "columns, dim, width, if_whole",
    [
        *((64, 64, 64, 64), (64, 8, 64, 64), (128, 40, 64, 64)),
        *((96, 96, 32, 32), (192, 192, 32, 32), (256, 256, 64, 64), (256, 224, 32, 32)),
        *((96, 80, 16, 16), (192, 144, 16, 16), (128, 112, 64, 16), (256, 208, 64, 16)),
        *((128, 72, 64, 64), (96, 72, 32, 32), (192, 136, 32, 32)),
    ],
)
def test_panels(columns: int, dim: int, width: int, if_whole: int) -> None:
    """They divide rows in shared memory; and in device memory, unless they would be of 32 bytes."""
    assert swizzle.panel_width(columns, dim, jnp.bfloat16) == width
    assert swizzle.panel_width(columns, dim, jnp.bfloat16, whole=True) == if_whole
    assert swizzle.has_narrow_partial_panel(columns, dim) == (dim in (72, 136) and width == 32)
