"""Which CTA reads which blocks of keys, from the lengths, which are data.

A tile is an entry and a key head. The 64-key blocks of all tiles form one line, one key head after another, and each
CTA has an equal share of it (stream-K, arXiv:2301.03598): how often a tile is split depends on the lengths, the number
of CTAs does not. Where all tiles are equally long, a CTA has no parts of two tiles if that costs nearly nothing; where
the CTAs are a multiple of the key heads, none has parts of two heads (`Deal`).
"""

import jax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.decode.block_lists import VisibleBlocks
from pallas_fa2.backends.common.decode.config import DecodeConfig
from pallas_fa2.backends.common.decode.plan_tables import PlanTables, make_tables
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.decode.step_plan import MAX_ENTRIES, StepPlan

type DecodePlan = PlanTables | StepPlan


def plan_decode(
    spec: DecodeSpec,
    config: DecodeConfig,
    lengths: jax.Array,
    starts: jax.Array | None = None,
    visible_blocks: VisibleBlocks | None = None,
) -> DecodePlan:
    """Return the plan of requests of these lengths, integers `[B]`; those beyond the capacity are cut off.

    Without `starts` each request has as many queries as any other; otherwise request r has those from `starts[r]` to
    `starts[r + 1]`, int32 `[B + 1]`, which are the last tokens of its sequence. Blocks for which
    `visible_blocks`, bool `[entries, blocks]` of all entries, is False are not in the line.
    """
    lengths = lengths.astype(I32)
    if starts is None and spec.split_blocks is None and spec.max_entries <= MAX_ENTRIES:
        return StepPlan.make(spec, lengths, visible_blocks)
    return make_tables(spec, config, lengths, starts, visible_blocks)
