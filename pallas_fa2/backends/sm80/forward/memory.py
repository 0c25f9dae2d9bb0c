"""What a CTA of the forward has in memory: arrays outside, and its shared memory."""

from typing import Any, NamedTuple

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.sm80.tile_list import TileList


class SharedStorage(NamedTuple):
    """Shared memory of a CTA; split operands have H columns for each term."""

    q: Any  # [block_q, H]: an output of 16 bits leaves through it, as Hv <= H
    k: Any  # [stages, block_kv, H]
    v: Any  # [stages, block_kv, Hv]
    key_scales: Any  # float32 [3 block_kv], of split operands: they come with V


class Inputs(NamedTuple):
    """Arrays in device memory."""

    q: Any
    k: Any
    v: Any
    tiles: TileList | None  # under a mask
    aux: AuxInputs | None  # what masks, scores and dropout read
    mask_bits: Any  # of a mask that is precomputed
    scales: Any  # `split_float32.Scales`, of split operands
