"""Tiles between two CTAs and between registers and device memory, interpreted and on a GPU; the rest of
`ptx` runs in the kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import mosaic, ptx
from tests.support import interpreter, shared

STEPS, TILE = 3, (64, 64)


def exchange(bug: str | None = None) -> jax.Array:
    """`[2, STEPS, 64, 64]`: each CTA's tiles, as the other one got them, in one stage."""

    def body(x, out, mine, theirs, arrived, full, both) -> None:
        rank, mail = lax.axis_index("pair"), ptx.Mail(theirs, arrived, jnp.float16)
        mail.open()
        mosaic.meet(both)
        for i in range(STEPS):
            step = jnp.int32(i)
            plgpu.copy_gmem_to_smem(x.at[rank, i], mine, full)
            plgpu.barrier_wait(full)
            mail.expect(step)
            mail.send(step, mine, 1 - rank)
            tile = theirs.at[0] if bug == "read before it came" else mail.wait(step)
            plgpu.copy_smem_to_gmem(tile, out.at[rank, i])
            plgpu.wait_smem_to_gmem(0)
            if bug != "sent before the other has read":
                plgpu.commit_smem()  # one thread arrives for all
                mosaic.meet(both)

    tiles = jnp.arange(2 * STEPS * 64 * 64).reshape(2, STEPS, *TILE) % 1999
    kernel = mosaic.launch(
        "exchange",
        lambda refs, memory: body(*refs, *memory),
        [
            mosaic.operand(*TILE, dtype=jnp.float16),
            mosaic.operand(1, *TILE, dtype=jnp.float16),
            plgpu.SMEM((1, 2), jnp.uint32),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
        ],
        jax.ShapeDtypeStruct((2, STEPS, *TILE), jnp.float16),
        {"cta": 1},
        1,
        {"pair": 2},
    )
    x = tiles.astype(jnp.float16)
    return kernel(x)[::-1] - x


def test_mail_interpreted() -> None:
    np.testing.assert_array_equal(interpreter.run(exchange), 0)


@pytest.mark.parametrize("bug", ["read before it came", "sent before the other has read"])
def test_careless_mail_is_caught(bug: str) -> None:
    with pytest.raises(shared.RaceDetected):
        interpreter.run(lambda: exchange(bug))


@pytest.mark.gpu
def test_mail_on_a_gpu() -> None:
    np.testing.assert_array_equal(jax.jit(exchange)(), 0)


def through_registers(dtype: Any, columns: int) -> Any:
    """A tile, as it was stored, and what was then loaded; by a kernel each."""
    shape = 64, columns

    def store(refs: tuple, _: Any) -> None:
        tile, fragments = refs
        found = plgpu.load(tile, layout=mosaic.TILE, optimized=False)
        ptx.store_fragments(fragments, found)

    def load(refs: tuple, _: Any) -> None:
        fragments, tile = refs
        tile[...] = ptx.load_fragments(fragments, columns)

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
