"""FlashAttention-2, Algorithm 1, by mma.sync: a CTA for each block of query rows of a head.

One source for every GPU from Ampere on: mma.sync, ldmatrix and cp.async exist on all of them. 4 or 8 warps own 16 or 32
query rows each and share the blocks of K and V. With one buffer of each, K and V are loaded in turns, V_j behind S_j =
Q K_j^T and K_j+1 behind O += P_j V_j, as in FlashAttention-2's own kernels; two CTAs on a multiprocessor then hide each
other's softmax.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import launch, swizzle
from pallas_fa2.backends.common.split_float32 import split_operands
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.memory import Inputs, SharedStorage
from pallas_fa2.backends.sm80.forward.row_block import RowBlock
from pallas_fa2.backends.sm80.primitives.mma import panel_width
from pallas_fa2.backends.sm80.row_schedule import RowSchedule
from pallas_fa2.backends.sm80.tile_list import TileList


def attention(
    spec: KernelSpec,
    config: ForwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: TileList | None = None,
    aux: AuxInputs | None = None,
    mask_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return `out [B, T, N, Hv]` in q's dtype and natural `lse [B, N, T]` in float32.

    q is `[B, T, N, H]`, k `[B, S, K, H]`, v `[B, S, K, Hv]`, bfloat16 or float16, or float32 if the config `is_split`;
    head dims are the config's or less.
    Under a mask, `tiles` lists the tiles and their blocks of keys; `aux` is what masks, scores and dropout read, and
    `mask_bits` are those of a mask that is precomputed.
    """
    schedule, scales = RowSchedule(spec, config), None
    out_type = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
        jax.ShapeDtypeStruct((spec.batch, spec.q_heads, spec.q_len), jnp.float32),
    )
    dims = config.head_dim, config.value_dim
    if config.is_split:
        assert config.stages == 1, (
            "the scales of keys come with V, too late for the scores otherwise"
        )
        q, k, v, scales = split_operands(q, k, v, dims, config.tile)
    operand = functools.partial(swizzle.swizzled_smem, dtype=q.dtype)
    (columns, panel), (v_columns, v_panel) = ((config.terms * n, panel_width(n)) for n in dims)
    memory = SharedStorage(
        q=operand(config.block_q, columns, panel=panel),
        k=operand(config.stages, config.block_kv, columns, panel=panel),
        v=operand(config.stages, config.block_kv, v_columns, panel=v_panel),
        key_scales=plgpu.SMEM((3 * config.block_kv,), jnp.float32) if config.is_split else None,
    )

    if aux is not None:
        aux = aux.with_index_row(*config.tile)
    inputs = Inputs(q, k, v, tiles, aux, mask_bits, scales)
    leaves, tree = jax.tree.flatten(inputs)

    def run(refs: tuple, memory: SharedStorage) -> None:
        *inputs, out, lse = refs
        RowBlock.start(schedule, jax.tree.unflatten(tree, inputs), out, lse, memory).attend()

    grid = {"cta": schedule.raster_order.count}
    kernel = launch.build_kernel("attention", run, memory, out_type, grid, config.warpgroups)
    return kernel(*leaves)
