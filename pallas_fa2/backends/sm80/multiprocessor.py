"""What a multiprocessor of each kind of GPU has."""

from pallas_fa2.device import Device

# Bytes of shared memory that a CTA may have (CUDA C++ Programming Guide, table of technical specifications per compute
# capability); `MIN_SMEM_BYTES` on all other GPUs.
SMEM_BYTES = {"8.0": 166_912, "8.7": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
MIN_SMEM_BYTES = 101_376
# Every kernel of Pallas has one byte of static shared memory. Dynamic shared memory begins behind it, at a multiple of
# 16 bytes: the driver refuses a kernel that asks for all bytes of a CTA as dynamic ones.
STATIC_BYTES = 16
# What the driver takes of a multiprocessor's shared memory for each CTA. A multiprocessor has one CTA's most and this:
# 164 KB where a CTA may have 163 (the same table).
RESERVED_BYTES = 1024
# Warps of our kernels that run on a multiprocessor: with more than 168 registers a thread, of 65,536, no more CTAs
# of 4.
MAX_WARPS = 8
# Of what the tiles of a group of heads read again and again (`RasterOrder.l2_head_group`): a half of an A100's 40 MB of
# L2.
L2_BUDGET = 20 << 20


def smem_bytes(device: Device) -> int:
    """Return how many bytes of dynamic shared memory a CTA may have."""
    return smem_bytes_of_ctas(device, 1)


def smem_bytes_of_ctas(device: Device, count: int) -> int:
    """Return how many bytes of dynamic shared memory each of `count` CTAs may have that run on one multiprocessor."""
    return _smem_bytes_of_multiprocessor(device) // count - RESERVED_BYTES - STATIC_BYTES


def ctas_at_a_time(device: Device, smem_bytes_of_cta: int, warpgroups: int) -> int:
    """Return how many CTAs of an attention kernel run on a device at the same time."""
    of_cta = smem_bytes_of_cta + RESERVED_BYTES + STATIC_BYTES
    by_smem = _smem_bytes_of_multiprocessor(device) // of_cta
    return device.num_sms * min(by_smem, MAX_WARPS // (4 * warpgroups))


def _smem_bytes_of_multiprocessor(device: Device) -> int:
    return SMEM_BYTES.get(device.capability, MIN_SMEM_BYTES) + RESERVED_BYTES
