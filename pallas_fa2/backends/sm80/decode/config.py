"""The configurations of decode kernels, by the shared memory of a GPU."""

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.common.decode.config import DecodeConfig, reduction_bytes
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.sm80.multiprocessor import smem_bytes_of_ctas
from pallas_fa2.device import Device

# Two CTAs of two stages have 64 to 128 KiB in flight at H = 128. A multiprocessor's share of device memory brings
# 18 KiB in a microsecond, about its latency, on an A100 (2.0 TB/s, 108 of them), 8 on a GeForce 4090 and 36 on an H200:
# more would wait for the same bytes. (By count, not measured.)
MAX_CTAS_PER_SM, MAX_STAGES = 2, 4
# Pallas begins each array at a multiple of so many bytes: those of the notes of splits, the only one that is smaller.
NOTES_BYTES = 1024


def choose(spec: DecodeSpec, device: Device) -> DecodeConfig | None:
    """Return the configuration of a launch, or None if shared memory has no room for one.

    Where two CTAs have room for two stages each, they hide each other's softmax. Otherwise one has as many stages as
    fit; one stage will do, as K_j+1 is on its way while V_j is multiplied, and V_j+1 while K_j+1 is.
    """
    dims = round_up(spec.head_dim, 64), round_up(spec.value_dim, 64)
    for ctas_per_sm, least in ((MAX_CTAS_PER_SM, 2), (1, 1)):
        available = smem_bytes_of_ctas(device, ctas_per_sm) - _fixed_bytes(spec)
        stages = available // _stage_bytes(spec, *dims)
        if stages >= least:
            return DecodeConfig(*dims, min(stages, MAX_STAGES), ctas_per_sm, device.num_sms)
    return None


def _stage_bytes(spec: DecodeSpec, head_dim: int, value_dim: int) -> int:
    """Return the bytes of a block of K and of V, and of a tile of Q: as many tiles as blocks are on their way at
    most."""
    return 2 * (DecodeConfig.block_kv * (head_dim + value_dim) + spec.columns * head_dim)


def _fixed_bytes(spec: DecodeSpec) -> int:
    """Return the bytes of P, of the notes of splits, and of the scratch of reductions."""
    return 2 * spec.columns * DecodeConfig.block_kv + reduction_bytes(spec) + NOTES_BYTES
