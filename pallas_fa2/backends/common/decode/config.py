"""The configuration of a decode kernel."""

import dataclasses
from typing import ClassVar

from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec

# How much later than with equal shares the last CTA may be done where each has whole tiles, and nothing is merged. With
# 128 tiles on 132 SMs, 1.03, the call takes 0.96 of the time (docs/decisions/0076-decode-kernel.md).
MAX_IMBALANCE = 1.04


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """The shared memory and the number of CTAs of one decode kernel."""

    head_dim: int  # columns of K in shared memory, a multiple of 64; arrays may have fewer
    value_dim: int
    stages: int  # blocks of K and V in the ring
    ctas_per_sm: int
    num_sms: int
    # The blocks that a CTA has at least, if it has any. With fewer, more splits are merged: 4096 tokens of 8 key heads
    # take 7.6 us with 4, 8.9 with 2 and 9.1 with 3 (docs/decisions/0076-decode-kernel.md).
    min_share: int = 4

    block_kv: ClassVar[int] = BLOCK_KV

    @property
    def num_ctas(self) -> int:
        return self.num_sms * self.ctas_per_sm


def reduction_bytes(spec: DecodeSpec) -> int:
    """Return the bytes through which the four warps reduce a tile's keys: a float32 of each thread for both of
    its columns of each eight."""
    return 128 * spec.columns
