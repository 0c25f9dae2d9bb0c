"""The backward on Hopper: FlashAttention-2, Algorithm 2, in persistent CTAs (docs/design/backward.md).

A CTA takes one block of keys after another. dK and dV stay in registers over all the queries that see the block, of all
heads of its group; dQ is summed in device memory, by a strategy of `dq`. Up to H = 128 two consumer warpgroups own 64
keys each; beyond, two CTAs share a block.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.compile_mods import storage_dtype
from pallas_fa2.backends.common.scheduler import (
    DynamicTileScheduler,
    StaticTileScheduler,
    for_each_tile,
    launch_persistent,
)
from pallas_fa2.backends.sm90.backward import group_splits
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS
from pallas_fa2.backends.sm90.backward.consumer import Consumer
from pallas_fa2.backends.sm90.backward.consumer_2cta import (
    GradientWarpgroup,
    OwnedGradient,
    ScoreWarpgroup,
)
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex, WarpgroupRole
from pallas_fa2.backends.sm90.backward.dq.strategy import DqStrategy
from pallas_fa2.backends.sm90.backward.memory import Inputs, Outputs, SharedStorage
from pallas_fa2.backends.sm90.backward.preprocess import BackwardOperands
from pallas_fa2.backends.sm90.backward.producer import Producer
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.primitives.roles import (
    dispatch_warpgroups,
    set_max_registers,
    sync_before_exit,
)


def gradients(
    strategy: DqStrategy,
    operands: BackwardOperands,
    lse: jax.Array,
    delta: jax.Array,
    zeros: jax.Array | None,
    classes: Any = None,
    aux: AuxInputs | None = None,
    mask_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, AuxGrads | None]:
    """Return dQ, dK and dV like q, k and v, and the sums of aux gradients. Head dims are the config's or less.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of `block_q`, both negated: -lse in base
    2, -inf where a row does not exist so that its probabilities are 0; and -delta. `zeros` is that of
    `backward_preprocess`, if the strategy needs it. Under a mask, `classes` are those of tiles,
    `[B | 1, N | 1, T tiles, S tiles]`; `aux` is what masks and scores read, and `mask_bits` the bits of a
    precomputed mask.
    """
    schedule, q = strategy.schedule, operands.q
    spec, config = schedule.spec, schedule.config
    block_mask = None if classes is None else schedule.block_mask(classes)
    scheduler = schedule.tile_scheduler(block_mask)
    if block_mask is not None:  # counts come with the tiles
        block_mask = jax.tree.map(jnp.asarray, block_mask._replace(num_blocks=None))
    inputs = Inputs(*operands, lse, delta, block_mask, mask_bits=mask_bits)
    if aux is not None:
        aux = aux.with_index_row(config.block_q, config.block_kv)
        if not config.two_cta:  # shared memory has room: the queries' aux inputs come with lse
            inputs = inputs._replace(lse=_with_query_rows(lse, aux))
            aux = aux._replace(q=None, row_keys=None)
        inputs = inputs._replace(aux=aux)
    outputs = _allocate_outputs(strategy, operands, zeros, aux)
    memory = SharedStorage.allocate(
        config,
        q,
        operands.v,
        inputs.lse,
        [storage_dtype(source.dtype) for source in spec.pairwise_inputs()],
        strategy.smem,
        strategy.barriers,
    )
    outputs = launch_persistent(
        "attention_gradients",
        functools.partial(_run_cta, strategy),
        memory,
        scheduler,
        inputs,
        outputs,
        len(config.registers),
        {CLUSTER_AXIS: 2} if config.two_cta else {},
    )
    dq = strategy.finish(outputs.dq, outputs.dq_workspace, q)
    splits = spec.kv_heads, schedule.group_splits
    dk, dv = (group_splits.combine_splits(terms, *splits) for terms in (outputs.dk, outputs.dv))
    return dq, dk, dv, outputs.aux_grads


def _with_query_rows(lse: jax.Array, aux: AuxInputs) -> jax.Array:
    """Return lse with the queries' aux inputs, float32 `[B, N, 1 + rows, T']`: `aux.q` `[B, 1 + rows, T']` with lse in
    place of the index, and what dropout reads."""
    batch, heads, length = lse.shape
    shape = (batch, heads, aux.q.shape[1] - 1, length)
    # XLA's partitioner (Shardy, in jaxlib 0.11.2) crashes on constants of size 0 that `shard_map` closes over.
    rows = [jnp.broadcast_to(aux.q[:, None, 1:], shape)] if aux.q.shape[1] > 1 else []
    if aux.row_keys is not None:
        rows.append(aux.row_keys)
    rows = [lax.bitcast_convert_type(x, jnp.float32) for x in rows]
    return jnp.concatenate([lse[:, :, None], *rows], 2)


def _allocate_outputs(
    strategy: DqStrategy,
    operands: BackwardOperands,
    zeros: jax.Array | None,
    aux: AuxInputs | None,
) -> Outputs:
    schedule, (q, k, v, _) = strategy.schedule, operands
    shapes = ((*x.shape[:2], schedule.heads, x.shape[3]) for x in (k, v))
    num_terms = 1 if schedule.group_splits == 1 else 2
    # an array for each term: of one for all, XLA may let two share their memory
    dk, dv = ([lax.empty(shape, k.dtype) for _ in range(num_terms)] for shape in shapes)
    dq, workspace = strategy.allocate(q, zeros)
    return Outputs(dq, dk, dv, _zero_aux_grads(schedule, q.dtype, aux), workspace)


def _zero_aux_grads(
    schedule: BackwardSchedule, dtype: Any, aux: AuxInputs | None
) -> AuxGrads | None:
    if schedule.spec.score is None:
        return None
    assert aux is not None
    config = schedule.config
    lengths = schedule.q_blocks * config.block_q, schedule.kv_tiles * config.block_kv
    return AuxGrads.zeros(schedule.spec, dtype, lengths, aux)


def _run_cta(
    strategy: DqStrategy,
    scheduler: StaticTileScheduler | DynamicTileScheduler,
    inputs: Inputs,
    outputs: Outputs,
    memory: SharedStorage,
) -> None:
    """Run the warpgroups of a CTA."""
    cta = Cta(strategy.schedule, scheduler, inputs, outputs, memory)
    warpgroup = lax.axis_index("warpgroup")
    run = functools.partial(_run_warpgroup, strategy, cta)
    branches = [functools.partial(run, i, i) for i in range(len(cta.config.registers))]
    if cta.schedule.shared_consumer_code:
        branches[:2] = [functools.partial(run, 0, warpgroup)] * 2
    dispatch_warpgroups(warpgroup, *branches)


def _run_warpgroup(strategy: DqStrategy, cta: Cta, branch: int, warpgroup: WarpgroupIndex) -> None:
    """Run a warpgroup's role for each tile of the CTA: lines 5 to 19 of Algorithm 2."""
    set_max_registers(cta.config.registers, branch)
    role, block_mask = _make_role(strategy, cta, branch, warpgroup), cta.inputs.block_mask

    def visit(k: jax.Array, entry: list[Any], carry: tuple, prefetch: Any) -> tuple:
        first_step, state = carry
        tile_id, counts = entry if block_mask is not None else (entry[0], None)
        tile = strategy.tile_type(cta.schedule, k, first_step, tile_id, counts, block_mask)
        state, next_entry = role.visit(tile, state, prefetch)
        return (tile.compute_next_step(), state), next_entry

    carry = I32(0), role.open()
    tiles, (steps, state) = for_each_tile(cta.scheduler, visit, carry)
    role.close(steps, tiles, state)
    sync_before_exit(cta.memory.exit_barriers, branch)


def _make_role(
    strategy: DqStrategy, cta: Cta, branch: int, warpgroup: WarpgroupIndex
) -> WarpgroupRole:
    loads = branch == len(cta.config.registers) - 1
    if not cta.config.two_cta:
        if loads:
            return Producer(cta, warpgroup, strategy.producer(cta))
        return Consumer(cta, warpgroup, strategy.consumer(cta, warpgroup))
    if loads:
        return ScoreWarpgroup(cta, warpgroup)
    gradient = OwnedGradient.dk(cta) if branch == 0 else OwnedGradient.dv(cta)
    return GradientWarpgroup(cta, warpgroup, gradient, strategy.consumer(cta, warpgroup))
