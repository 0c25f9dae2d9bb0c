"""The configurations of decode kernels."""

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE, DecodeConfig, reduction_bytes
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.sm90.primitives.pipeline import SHARED_MEMORY_BYTES

# The scales of 16 bits that a copy brings: 128 bytes, because TMA writes to multiples of 128, and Pallas copies a byte
# for each of 128 threads at least.
SCALE_LINE = 64
# The driver keeps 1 KiB of a multiprocessor's 228 KiB for each CTA (NVIDIA's Hopper Tuning Guide).
SM_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10
# Pallas begins each array at a multiple of so many bytes.
ARRAY_BYTES = 1024
# Of mbarriers: one for each Q of two, and for K and V of each stage, of 8 bytes each, and what Pallas adds.
BARRIER_BYTES = 256
# With so many columns a split is 16 KiB, and with so many multiprocessors for each tile, two CTAs on each, the last CTA
# of a tile merges 8 splits or more, two turns of its loads. With K = 1, B 16 and S 8192 it merges 16, which took 6 of
# 29 us. One CTA of 6 stages, where two would have 2 each, takes 24.5, and on pages as long as two
# (docs/decisions/0089-first-copies-and-wide-splits.md).
WIDE_COLUMNS, SMS_OF_A_TILE = 32, 4
# What two CTAs have in flight at H = 64, 192 KiB an SM, is several times what its share of 4.8 TB/s brings in the
# latency of device memory (36 KiB in a microsecond): more stages would wait for the same bytes.
MAX_STAGES = 8


def choose(spec: DecodeSpec, num_sms: int) -> DecodeConfig | None:
    """Return the configuration of a launch: two CTAs per SM if both have room for two stages, or three where each tile
    has many wide splits (`WIDE_COLUMNS`), else one.

    One CTA's products and softmax leave its loads idle unless another one's are in flight. But where tiles are about as
    many as SMs, each CTA may have a whole one (`MAX_IMBALANCE`), and all of an SM's memory for its ring. (Not of pages:
    a CTA's loads wait for the table, and one an SM has 0.92 of the speed; nor of 8 bits, which arrive in three quarters
    of the time that a block takes until its last product, docs/decisions/0081-caches-of-8-bits.md.) And where there are
    at most `min_share` blocks for each SM, a second CTA would have none.
    None if shared memory has no room for two stages.
    """
    num_tiles = spec.max_entries * spec.kv_heads
    fills_sms_once = num_sms / MAX_IMBALANCE <= num_tiles <= num_sms
    fills_sms_once &= spec.page_size is None and spec.quantized is None
    fills_sms_once |= num_tiles * spec.max_blocks <= num_sms * DecodeConfig.min_share
    dims = round_up(spec.head_dim, 64), round_up(spec.value_dim, 64)
    has_wide_splits = spec.columns >= WIDE_COLUMNS and SMS_OF_A_TILE * num_tiles <= num_sms
    has_wide_splits &= spec.page_size is None
    least_stages = {1: 2} if fills_sms_once else {2: 3 if has_wide_splits else 2, 1: 2}
    for ctas_per_sm, least in least_stages.items():
        available = min(SM_BYTES // ctas_per_sm - RESERVED_BYTES, SHARED_MEMORY_BYTES)
        for stages in range(MAX_STAGES, least - 1, -1):
            if shared_bytes(spec, *dims, stages) <= available:
                return DecodeConfig(*dims, stages, ctas_per_sm, num_sms)
    return None


def shared_bytes(spec: DecodeSpec, head_dim: int, value_dim: int, stages: int) -> int:
    """Return the bytes of shared memory of a CTA, no fewer than those of `SharedStorage` and of the reductions of the
    softmax."""
    item = 1 if spec.quantized else 2
    ring = stages * DecodeConfig.block_kv * (head_dim + value_dim) * item
    # Q twice, P and the output
    operands = 2 * spec.columns * (2 * head_dim + DecodeConfig.block_kv + value_dim)
    small = [80]  # `merge.allocate_notes`
    if spec.quantized is not None:
        copies = DecodeConfig.block_kv // page_rows(spec, DecodeConfig.block_kv)
        small += [4 * spec.columns] + 2 * [stages * copies * 2 * SCALE_LINE]
    arrays = sum(round_up(n, ARRAY_BYTES) for n in small)
    return ring + operands + arrays + reduction_bytes(spec) + BARRIER_BYTES
