"""What a multiprocessor of each kind of GPU has."""

from pallas_fa2.device import Device

# Bytes of shared memory that a CTA may have (CUDA C++ Programming Guide, table of technical specifications per compute
# capability); `MIN_SMEM_BYTES` on all other GPUs.
SMEM_BYTES = {"8.0": 166_912, "8.7": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
MIN_SMEM_BYTES = 101_376
# A kernel of Pallas has a byte of static shared memory, where its dynamic one begins, which is at a multiple of so many. The
# driver refuses a kernel that asks for all bytes that a CTA may have as dynamic ones.
STATIC_BYTES = 16
# The driver keeps so many bytes of a multiprocessor's shared memory for each CTA, of all that there is but those of a CTA
# that has the most (the same table).
RESERVED_BYTES = 1024
# Warps of our kernels that run on a multiprocessor: with more than 168 registers a thread, of 65,536, no more CTAs of 4.
MAX_WARPS = 8


def smem_bytes(device: Device) -> int:
    """Return how many bytes of shared memory a kernel of Pallas may ask for."""
    return smem_bytes_of_ctas(device, 1)


def smem_bytes_of_ctas(device: Device, count: int) -> int:
    """Return how many bytes of shared memory a kernel may ask for of which so many CTAs run on a multiprocessor."""
    return _smem_bytes_of_multiprocessor(device) // count - RESERVED_BYTES - STATIC_BYTES


def ctas_at_a_time(device: Device, smem_bytes_of_cta: int, warpgroups: int) -> int:
    """Return how many CTAs of an attention kernel run on a device at the same time."""
    of_cta = smem_bytes_of_cta + RESERVED_BYTES + STATIC_BYTES
    by_smem = _smem_bytes_of_multiprocessor(device) // of_cta
    return device.num_sms * min(by_smem, MAX_WARPS // (4 * warpgroups))


def _smem_bytes_of_multiprocessor(device: Device) -> int:
    return SMEM_BYTES.get(device.capability, MIN_SMEM_BYTES) + RESERVED_BYTES
