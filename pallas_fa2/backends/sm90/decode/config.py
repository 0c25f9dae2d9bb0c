"""The configuration of a decode kernel."""

import dataclasses
from typing import ClassVar

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.sm90.decode.spec import DecodeSpec
from pallas_fa2.backends.sm90.primitives.pipeline import SHARED_MEMORY_BYTES

# The scales that a copy brings: 128 bytes, because TMA writes to multiples of so many, and Pallas copies a byte for each
# thread at least.
SCALE_LINE = 64
# The driver keeps 1 KiB of a multiprocessor's 228 KiB for each CTA (NVIDIA's Hopper Tuning Guide).
SM_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
# Bytes of mbarriers and of alignment beside the buffers.
BARRIER_BYTES = 2048
# What two CTAs have in flight at H = 64, 192 KiB an SM, is several times what its share of 4.8 TB/s brings in the latency
# of device memory (36 KiB in a microsecond): more stages would wait for the same bytes.
MAX_STAGES = 8
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
    # The blocks that a CTA has at least, if it has any. With fewer, more splits are merged: 4096 tokens of 8 key heads take
    # 7.6 us with 4, 8.9 with 2 and 9.1 with 3 (docs/decisions/0076-decode-kernel.md).
    min_share: int = 4

    block_kv: ClassVar[int] = 64  # the M of WGMMA: keys are the rows of S^T

    @property
    def num_ctas(self) -> int:
        return self.num_sms * self.ctas_per_sm

    @classmethod
    def choose(cls, spec: DecodeSpec, num_sms: int) -> "DecodeConfig | None":
        """Return the configuration of a launch: two CTAs per SM if both have room for two stages, else one.

        One CTA's products and softmax leave its loads idle unless another one's are in flight. But where tiles are about
        as many as SMs, each CTA may have a whole one (`MAX_IMBALANCE`), and all of an SM's memory for its ring. (Not of
        pages: a CTA's loads wait for the table, and one an SM has 0.92 of the speed; nor of 8 bits, which arrive in half of
        the time that the softmax and both products of a block take.)
        None if shared memory has no room for two stages.
        """
        num_tiles = spec.max_entries * spec.kv_heads
        fills_sms_once = num_sms / MAX_IMBALANCE <= num_tiles <= num_sms
        fills_sms_once &= spec.page_size is None and spec.quantized is None
        dims = round_up(spec.head_dim, 64), round_up(spec.value_dim, 64)
        stage_bytes = cls.block_kv * sum(dims) * (1 if spec.quantized else 2) + scale_bytes(spec)
        for ctas_per_sm in (1,) if fills_sms_once else (2, 1):
            available = min(SM_BYTES // ctas_per_sm - RESERVED_BYTES, SHARED_MEMORY_BYTES)
            stages = (available - _fixed_bytes(spec, *dims)) // stage_bytes
            if stages >= 2:
                return cls(*dims, min(stages, MAX_STAGES), ctas_per_sm, num_sms)
        return None


def page_rows(spec: DecodeSpec) -> int:
    """Return how many keys of a block one copy brings: those that lie side by side in device memory for any table."""
    rows = DecodeConfig.block_kv
    while spec.page_size is not None and spec.page_size % rows:
        rows //= 2
    return rows


def scale_bytes(spec: DecodeSpec) -> int:
    """Return the bytes of the scales of a block of K and V of 8 bits."""
    copies = DecodeConfig.block_kv // page_rows(spec)
    return 2 * copies * 2 * SCALE_LINE if spec.quantized else 0


def _fixed_bytes(spec: DecodeSpec, head_dim: int, value_dim: int) -> int:
    """Return the bytes beside K and V: Q twice, P, the output, the scratch of reductions and barriers."""
    operands = 2 * spec.columns * (2 * head_dim + DecodeConfig.block_kv + value_dim)
    return operands + reduction_bytes(spec) + BARRIER_BYTES


def reduction_bytes(spec: DecodeSpec) -> int:
    """Return the bytes through which the four warps reduce a tile's keys: a float32 of each thread for every pair of
    columns of an eight."""
    return 128 * spec.columns
