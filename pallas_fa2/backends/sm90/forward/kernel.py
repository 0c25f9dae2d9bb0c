"""FlashAttention-2, Algorithm 1, on Hopper: persistent CTAs, one block of query rows after another.

One warpgroup streams keys and values through rings of buffers by TMA, and the next block's queries;
the others own 64 query rows each and follow FlashAttention-3 (arXiv:2407.08608), Algorithm 2: the
scores of a block and the output of the block before are multiplied together, and the softmax runs
while the latter is in flight.

The online softmax may subtract any reference from a row's scores, as long as exponentials neither
overflow nor vanish. Ours is the maximum of the first key block; it is raised when a row's sum has
grown a lot, and that is seen from the sum: exponentials begin as soon as the scores are there, and no
block but the first looks for a maximum. Should scores rise within one block by so much that float32
overflows, the tile is done again with true maxima (`RowBlock.recompute_exact`). So it is where the output is not
finite and a mask may have hidden what made it so.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.block_mask import BlockMask
from pallas_fa2.backends.sm90.compile_mods import storage_dtype
from pallas_fa2.backends.sm90.forward.config import ForwardConfig
from pallas_fa2.backends.sm90.forward.consumer import consume
from pallas_fa2.backends.sm90.forward.memory import Arrays, Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm90.forward.producer import produce
from pallas_fa2.backends.sm90.forward.schedule import ForwardSchedule
from pallas_fa2.backends.sm90.primitives import pipeline, roles, swizzle
from pallas_fa2.backends.sm90.scheduler import (
    DynamicTileScheduler,
    StaticTileScheduler,
    launch_persistent,
)


def attention(
    problem: KernelSpec,
    config: ForwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: BlockMask | None = None,
    data: AuxInputs | None = None,
    answers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T, N, Hv]` and natural `lse [B, N, T']`; T' is T rounded up to whole tiles.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, bfloat16 or float16; head dims are `config`'s or
    less. Under a mask, `seen` lists the blocks of keys of every tile; `data` is what masks and scores read,
    and `answers` are those of a mask that has been asked.
    """
    key_rows = data.k.shape[1] + 1 if data is not None and problem.loads_key_aux() else 0
    if not problem.pairwise_inputs():
        config = config.with_double_buffered_q(key_rows)
    schedule = ForwardSchedule(problem, config)
    dtype, dim, groups = q.dtype, config.head_dim, config.warpgroups
    rows, stages = config.rows_per_warpgroup, config.stages
    rings = 3 if problem.loads_key_aux() else 2
    pairs = _pair_buffers(config, problem, key_rows)
    pair_slots = sum(buffer.shape[1] for buffer in pairs) * groups
    panel = swizzle.panel_width(dim, k.shape[3], dtype)
    v_panel = swizzle.panel_width(config.value_dim, v.shape[3], dtype)
    memory = SharedStorage(
        q=pipeline.swizzled_smem(groups, config.q_stages, rows, dim, dtype=dtype, panel=panel),
        k=pipeline.swizzled_smem(stages, config.block_kv, dim, dtype=dtype, panel=panel),
        v=pipeline.swizzled_smem(
            stages, config.block_kv, config.value_dim, dtype=dtype, panel=v_panel
        ),
        # as queries: keys of a repeated tile come here
        out=pipeline.swizzled_smem(
            groups, rows, config.epilogue_pieces[0].size, dtype=dtype, panel=panel
        ),
        key_aux=None,
        full=pipeline.barriers((config.q_stages + 2) * groups + rings * stages + pair_slots),
        q_empty=pipeline.barriers(config.q_stages * groups + pair_slots),
        kv_empty=pipeline.barriers(rings * stages, groups),
        exit_barriers=[pipeline.barriers(1, groups + 1) for _ in range(2)],
        pairwise=pairs,
    )
    tiles, inputs = schedule.tile_scheduler(seen), Inputs(q, k, v, mask_bits=answers)
    if seen is not None:
        inputs = inputs._replace(block_indices=jnp.asarray(seen.block_indices))
    if data is not None:
        data = data.with_index_row(config.block_q, config.block_kv)
        inputs = inputs._replace(aux=data)
        if problem.loads_key_aux():
            buffers = plgpu.SMEM((stages, data.k.shape[1], config.block_kv), jnp.int32)
            memory = memory._replace(key_aux=buffers)
    lse_shape = (problem.batch, problem.q_heads, schedule.q_tiles * config.block_q)
    outputs = Outputs(
        lax.empty((*q.shape[:3], v.shape[3]), dtype), lax.empty(lse_shape, jnp.float32)
    )

    def run(
        tiles: StaticTileScheduler | DynamicTileScheduler,
        inputs: Inputs,
        outputs: Outputs,
        memory: SharedStorage,
    ) -> None:
        arrays, warpgroup = Arrays(tiles, inputs, outputs), lax.axis_index("warpgroup")
        multiply = functools.partial(consume, schedule, arrays, memory, warpgroup)
        load = functools.partial(produce, schedule, arrays, memory)
        roles.dispatch_warpgroups(warpgroup, *[multiply] * groups, load)

    out, lse = launch_persistent("attention", run, memory, tiles, inputs, outputs, groups + 1)
    return out, lse


def _pair_buffers(config: ForwardConfig, problem: KernelSpec, key_rows: int) -> list[Any]:
    """A warpgroup's rows against a block of keys, for each array of pairs."""
    dtypes = [storage_dtype(source.dtype) for source in problem.pairwise_inputs()]
    if not dtypes:
        return []
    shape = config.warpgroups, config.rows_per_warpgroup, config.block_kv
    stages = config.pairwise_stages(sum(dtype.itemsize for dtype in dtypes), key_rows)
    return [pipeline.swizzled_smem(shape[0], stages, *shape[1:], dtype=dtype) for dtype in dtypes]
