"""The calls of one device of several, over which the tokens of sequences are divided."""

import dataclasses
from collections.abc import Callable

from jax import lax

from pallas_fa2.distributed.collectives import AxisName
from pallas_fa2.distributed.ring_passes import Ring
from pallas_fa2.distributed.ring_schedule import RingSchedule, select_operands
from pallas_fa2.distributed.zigzag import Layout
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.translation import reads_positions
from pallas_fa2.parse_call import CheckedCall
from pallas_fa2.planning.plan import Plan


def plan_ring(
    call: CheckedCall,
    operands: Operands,
    axis_name: AxisName,
    layout: Layout,
    plan: Callable[[CallSpec], Plan],
) -> tuple[Ring, Operands]:
    """Return the ring of a call whose arrays are those of one device, and what its blocks read.

    `operands` are what masks and scores read of this device's queries and of all keys, positions too; the mask's data
    are a tuple, by conjuncts.
    """
    shards, has_default_positions = lax.axis_size(axis_name), not call.has_explicit_positions
    steps = RingSchedule(call, operands, shards, layout, has_default_positions, plan).steps()
    if not any(block.spec.has_explicit_positions for step in steps for block in step.calls):
        operands = operands._replace(q_index=None, k_index=None)
    return Ring(axis_name, steps), operands


def call_on_keys(call: CheckedCall, operands: Operands, kv_len: int) -> tuple[CallSpec, Operands]:
    """Return the call of this device's queries on `kv_len` keys; `operands` are those of `plan_ring`, of these keys."""
    dims = call.dims._replace(kv_len=kv_len)
    conjuncts = tuple(range(len(operands.mask)))
    operands = select_operands(operands, conjuncts, True, (0, dims.q_len), (0, dims.kv_len))
    spec = call._replace(dims=dims, operands=operands, first_position=0).spec()
    if not (spec.dropout_rate or any(map(reads_positions, spec.codes))):
        operands = operands._replace(q_index=None, k_index=None)
        spec = dataclasses.replace(spec, has_explicit_positions=False)
    return spec, operands
