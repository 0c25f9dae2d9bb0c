"""What a multiprocessor of each kind of GPU has."""

from pallas_fa2.device import Device

# Bytes of shared memory that a CTA may have (CUDA C++ Programming Guide, table of technical specifications per compute
# capability); `MIN_SMEM_BYTES` on all other GPUs.
SMEM_BYTES = {"8.0": 166_912, "8.7": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
MIN_SMEM_BYTES = 101_376
# The driver keeps so many bytes of a multiprocessor's shared memory for each CTA, of all that there is but those of a CTA
# that has the most (the same table).
RESERVED_BYTES = 1024
# Warps of our kernels that run on a multiprocessor: with more than 168 registers a thread, of 65,536, no more CTAs of 4.
MAX_WARPS = 8


def smem_bytes(device: Device) -> int:
    """Return how many bytes of shared memory a CTA may have."""
    return SMEM_BYTES.get(device.capability, MIN_SMEM_BYTES)


def smem_bytes_of_ctas(device: Device, count: int) -> int:
    """Return how many bytes of shared memory each of so many CTAs of a multiprocessor may have."""
    return (smem_bytes(device) + RESERVED_BYTES) // count - RESERVED_BYTES


def ctas_at_a_time(device: Device, smem_bytes_of_cta: int, warpgroups: int) -> int:
    """Return how many CTAs of an attention kernel run on a device at the same time."""
    by_smem = (smem_bytes(device) + RESERVED_BYTES) // (smem_bytes_of_cta + RESERVED_BYTES)
    return device.num_sms * min(by_smem, MAX_WARPS // (4 * warpgroups))
