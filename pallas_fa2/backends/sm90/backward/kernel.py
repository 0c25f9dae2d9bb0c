"""FlashAttention-2, Algorithm 2, on Hopper: persistent CTAs, one block of key columns after another.

dK and dV stay in registers over all the queries that see the block, of all heads of the group; dQ
is added up in float32 in device memory, straight from registers. The products are transposed: the
probabilities P^T (keys x queries) are then register operands of dV and dK, and only dS passes through
shared memory, whose bandwidth bounds this kernel.

Up to H = 128 two warpgroups divide the work of a tile, each owns half of the block's 128 keys
(`KeyHalf`). Beyond, dK and dV of 64 keys alone take up to half of the register file: a warpgroup
owns one (`KeyGradient`, `ValueGradient`), and a third, which also loads, forms the scores for both
(`Scores`). A block then is a pair of CTAs' (a cluster), that send each other their dS: each forms half
of dQ's columns over all of the block's keys, as what bounds this kernel otherwise is how fast L2 adds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.backward import postprocess, preprocess
from pallas_fa2.backends.sm90.backward.config import CLUSTER_AXIS, BackwardConfig
from pallas_fa2.backends.sm90.backward.consumer import (
    Consumer,
    FirstStoreConsumer,
    HeadPerCtaConsumer,
    OrderedConsumer,
)
from pallas_fa2.backends.sm90.backward.consumer_2cta import (
    DeterministicDkWarpgroup,
    DeterministicDvWarpgroup,
    DkWarpgroup,
    DvWarpgroup,
    ScoreWarpgroup,
)
from pallas_fa2.backends.sm90.backward.dq.first_store import SLOTS, FirstStoreSchedule
from pallas_fa2.backends.sm90.backward.dq.head_per_cta import HeadPerCtaSchedule
from pallas_fa2.backends.sm90.backward.dq.ordered import (
    DeterministicProducer,
    DeterministicSchedule,
)
from pallas_fa2.backends.sm90.backward.memory import Inputs, Outputs, SharedStorage, shared_storage
from pallas_fa2.backends.sm90.backward.producer import Producer
from pallas_fa2.backends.sm90.backward.roles import WarpgroupRole
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.compile_mods import storage_dtype
from pallas_fa2.backends.sm90.primitives.roles import (
    dispatch_warpgroups,
    set_max_registers,
    sync_before_exit,
)
from pallas_fa2.backends.sm90.scheduler import (
    DynamicTileScheduler,
    StaticTileScheduler,
    for_each_tile,
    launch_persistent,
)


def schedule_of(
    problem: KernelSpec,
    config: BackwardConfig,
    classes: Any,
    possible: Callable[[], np.ndarray],
    whole_heads: bool,
) -> BackwardSchedule:
    """Which tiles a CTA takes, and how what they add to dQ comes together; of whole heads, if they may be taken
    and suit. `possible` gives classes by the mask's code alone: EMPTY, or not, whatever its data."""
    if whole_heads and HeadPerCtaSchedule.suits(problem, config):
        return HeadPerCtaSchedule.choose(problem, config)
    if config.deterministic:
        return DeterministicSchedule.choose(problem, config, classes)
    stores_first = FirstStoreSchedule.suits(problem, config, classes, possible)
    return (FirstStoreSchedule if stores_first else BackwardSchedule).choose(
        problem, config, classes
    )


def gradients(
    schedule: BackwardSchedule,
    factors: preprocess.BackwardOperands,
    lse: jax.Array,
    delta: jax.Array,
    zeros: jax.Array | None,
    classes: Any = None,
    data: AuxInputs | None = None,
    answers: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, AuxGrads | None]:
    """dQ, dK and dV like q, k and v, and what the data of scores get. Head dims are `config`'s or less.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of `block_q`, both negated: -lse in base
    2, -inf where a row does not exist so that its probabilities are 0; and -delta. If the schedule needs
    them, dQ is added to `zeros`, of `preprocess.backward_preprocess`; unless tiles are ordered or heads whole, in any order:
    it is not bitwise reproducible then. Under a mask, `classes` are those of tiles, `[B | 1, N | 1, T tiles,
    S tiles]`; `data` is what masks and scores read, and `answers` are those of a mask that has been asked.
    """
    problem, config = schedule.spec, schedule.config
    seen = None if classes is None else schedule.block_mask(classes)
    tiles, inputs = schedule.tile_scheduler(seen), Inputs(*factors, lse, delta, mask_bits=answers)
    q, k, v, _ = factors
    if seen is not None:
        inputs = inputs._replace(**{n: jnp.asarray(x) for n, x in schedule.arrays(seen).items()})
    if data is not None:
        data = data.with_index_row(config.block_q, config.block_kv)
        if not config.two_cta:  # where shared memory has room, queries bring their data
            inputs = inputs._replace(lse=_with_query_data(lse, data))
            data = data._replace(q=None, row_keys=None)
        inputs = inputs._replace(aux=data)
    # Of a part of a group, a gradient leaves as two numbers whose sum is as good as in float32.
    shapes = ((*x.shape[:2], schedule.heads, x.shape[3]) for x in (k, v))
    count = 1 if schedule.group_splits == 1 else 2
    # one each: of one for all, XLA may let two share their memory
    dk, dv = ([lax.empty(shape, k.dtype) for _ in range(count)] for shape in shapes)
    sums = None
    if problem.score is not None:
        lengths = schedule.q_blocks * config.block_q, schedule.kv_tiles * config.block_kv
        assert data is not None
        sums = AuxGrads.zeros(problem, q.dtype, lengths, data)
    outputs = Outputs(zeros, dk, dv, sums)
    if isinstance(schedule, HeadPerCtaSchedule):
        partial = lax.empty(schedule.accumulator_shape, jnp.float32)
        outputs = outputs._replace(dq=lax.empty(q.shape, k.dtype), partial=partial)
    if isinstance(schedule, DeterministicSchedule | FirstStoreSchedule):
        outputs = outputs._replace(turns=jnp.zeros(schedule.turns_shape, I32))
    if isinstance(schedule, FirstStoreSchedule):
        outputs = outputs._replace(dq=lax.empty(schedule.dq_shape, jnp.float32))
    dq, dk, dv, sums, turns, *_ = launch_persistent(
        "attention_gradients",
        functools.partial(_body, schedule),
        shared_storage(
            config,
            (q.shape[3], v.shape[3]),
            q.dtype,
            inputs.lse.shape[2:-1],
            [storage_dtype(s.dtype) for s in problem.pairwise_inputs()],
            SLOTS if isinstance(schedule, FirstStoreSchedule) else 0,
        ),
        tiles,
        inputs,
        outputs,
        len(config.registers),
        {CLUSTER_AXIS: 2} if config.two_cta else {},
    )
    if not isinstance(schedule, HeadPerCtaSchedule):
        visits = turns if isinstance(schedule, FirstStoreSchedule) else None
        dq = postprocess.convert_dq(problem, config, dq, q, visits)
    return dq, schedule.combine_splits(dk), schedule.combine_splits(dv), sums


def _with_query_data(lse: jax.Array, data: AuxInputs) -> jax.Array:
    """`[B, N, 1 + rows, T']`: data of queries, `[B, 1 + rows, T']`, with lse for their places; then what
    dropout reads."""
    batch, heads, length = lse.shape
    shape = (batch, heads, data.q.shape[1] - 1, length)
    rows = [jnp.broadcast_to(data.q[:, None, 1:], shape)]
    if data.row_keys is not None:
        rows.append(data.row_keys)
    rows = [lax.bitcast_convert_type(x, jnp.float32) for x in rows]
    return jnp.concatenate([lse[:, :, None], *rows], 2)


def _body(
    schedule: BackwardSchedule,
    tiles: StaticTileScheduler | DynamicTileScheduler,
    inputs: Inputs,
    outputs: Outputs,
    memory: SharedStorage,
) -> None:
    config = schedule.config

    def run(branch: int, me: Any) -> None:
        set_max_registers(config.registers, branch)
        role = kinds[branch](schedule, tiles, inputs, outputs, memory, me)

        def visit(k: Any, entry: list[Any], state: tuple, look: Callable) -> tuple:
            first_step, dq_row = state
            tile = schedule.tile(k, first_step, entry, **schedule.arrays(inputs))
            dq_row, seen = role.visit(tile, dq_row, look)
            return (tile.next_step, dq_row), seen

        role.open()
        state = I32(0), role.start(I32(schedule.blocks))
        taken, (steps, dq_row) = for_each_tile(tiles, visit, state)
        role.close(steps, taken, dq_row)
        sync_before_exit(memory.exit_barriers, branch)

    kinds, warpgroup = KINDS[config.two_cta, type(schedule)], lax.axis_index("warpgroup")
    roles = [functools.partial(run, me, me) for me in range(len(kinds))]
    if schedule.shared_consumer_code:
        roles[:2] = [functools.partial(run, 0, warpgroup)] * 2
    dispatch_warpgroups(warpgroup, *roles)


# What the warpgroups of a CTA do: in pairs or not, and by how dQ is added up.
KINDS: dict[tuple[bool, type[BackwardSchedule]], tuple[type[WarpgroupRole], ...]] = {
    (False, BackwardSchedule): (Consumer, Consumer, Producer),
    (False, FirstStoreSchedule): (FirstStoreConsumer, FirstStoreConsumer, Producer),
    (False, DeterministicSchedule): (OrderedConsumer, OrderedConsumer, DeterministicProducer),
    (False, HeadPerCtaSchedule): (HeadPerCtaConsumer, HeadPerCtaConsumer, Producer),
    (True, BackwardSchedule): (DkWarpgroup, DvWarpgroup, ScoreWarpgroup),
    (True, DeterministicSchedule): (
        DeterministicDkWarpgroup,
        DeterministicDvWarpgroup,
        ScoreWarpgroup,
    ),
}
