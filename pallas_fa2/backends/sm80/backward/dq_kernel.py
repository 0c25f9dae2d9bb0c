"""The kernel of dQ alone: a CTA for each block of query rows of a head.

It is for gradients that are bitwise the same in every run, and for those whose kernel of dK and dV has no room in
shared memory for dQ's dS.
"""

from typing import Any

import jax

from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import launch
from pallas_fa2.backends.sm80.backward.config import DqConfig
from pallas_fa2.backends.sm80.backward.memory import DqStorage, Inputs, dq_storage
from pallas_fa2.backends.sm80.backward.query_block import QueryBlock
from pallas_fa2.backends.sm80.row_schedule import RowSchedule


def query_gradients(spec: KernelSpec, config: DqConfig, inputs: Inputs, like: Any) -> jax.Array:
    """Return dq like q `[B, T, N, H]`, which is `like`, from what `kernel.gradients` reads as well.

    Under a mask, `inputs.tiles` lists the blocks of queries and the blocks of keys of each, and mask bits are those of
    rows of queries.
    """
    schedule = RowSchedule(spec, config)
    if inputs.aux is not None:
        inputs = inputs._replace(aux=inputs.aux.with_index_row(*config.tile))
    leaves, tree = jax.tree.flatten(inputs)

    def run(refs: tuple, memory: DqStorage) -> None:
        *inputs, dq = refs
        QueryBlock.start(schedule, jax.tree.unflatten(tree, inputs), dq, memory).differentiate()

    kernel = launch.build_kernel(
        "attention_dq",
        run,
        dq_storage(config, inputs.q.dtype),
        jax.ShapeDtypeStruct(like.shape, like.dtype),
        {"cta": schedule.raster_order.count},
        config.warpgroups,
    )
    return kernel(*leaves)
