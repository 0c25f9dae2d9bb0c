"""Tiles that two CTAs copy to each other, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.primitives import launch, swizzle
from pallas_fa2.backends.sm90.primitives import cluster, pipeline
from tests.support import interpreter, shared

STEPS, TILE = 3, (64, 64)


def exchange(bug: str | None = None) -> jax.Array:
    """Return each CTA's tiles as the other one got them, in one stage, less what they were: `[2, STEPS, 64, 64]`."""

    def body(x, out, mine, theirs, arrived, full, both) -> None:
        rank, copies = lax.axis_index("pair"), cluster.ClusterCopy(theirs, arrived, jnp.float16)
        copies.init()
        pipeline.arrive_and_wait(both)
        for i in range(STEPS):
            step = jnp.int32(i)
            plgpu.copy_gmem_to_smem(x.at[rank, i], mine, full)
            plgpu.barrier_wait(full)
            copies.expect_tx(step)
            copies.send(step, mine, 1 - rank)
            tile = theirs.at[0] if bug == "read before it came" else copies.wait(step)
            plgpu.copy_smem_to_gmem(tile, out.at[rank, i])
            plgpu.wait_smem_to_gmem(0)
            if bug != "sent before the other has read":
                plgpu.commit_smem()  # one thread arrives for all
                pipeline.arrive_and_wait(both)

    tiles = jnp.arange(2 * STEPS * 64 * 64).reshape(2, STEPS, *TILE) % 1999
    kernel = launch.build_kernel(
        "exchange",
        lambda refs, memory: body(*refs, *memory),
        [
            swizzle.swizzled_smem(*TILE, dtype=jnp.float16),
            swizzle.swizzled_smem(1, *TILE, dtype=jnp.float16),
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


def test_copies_interpreted() -> None:
    np.testing.assert_array_equal(interpreter.run(exchange), 0)


@pytest.mark.parametrize("bug", ["read before it came", "sent before the other has read"])
def test_careless_copies_are_caught(bug: str) -> None:
    with pytest.raises(shared.RaceDetected):
        interpreter.run(lambda: exchange(bug))


@pytest.mark.gpu
def test_copies_on_a_gpu() -> None:
    np.testing.assert_array_equal(jax.jit(exchange)(), 0)
