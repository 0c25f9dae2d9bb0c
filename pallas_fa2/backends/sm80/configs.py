"""The configurations of the mma.sync kernels, by head dims and the shared memory of a GPU."""

import dataclasses

from pallas_fa2.backends.common import limits, split_float32
from pallas_fa2.backends.protocol import Configuration
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

# Bytes of shared memory that a CTA may have (CUDA C++ Programming Guide, table of technical specifications per compute
# capability); `MIN_SMEM_BYTES` on all other GPUs.
SMEM_BYTES = {"8.0": 166_912, "8.7": 166_912, "9.0": 232_448, "10.0": 232_448, "10.3": 232_448}
MIN_SMEM_BYTES = 101_376


def kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the dims of the smallest kernels that take these."""
    return next(dims for dims in limits.KERNEL_DIMS if dims[0] >= head_dim and dims[1] >= value_dim)


def smem_bytes(device: Device) -> int:
    return SMEM_BYTES.get(device.capability, MIN_SMEM_BYTES)


def terms(spec: CallSpec) -> int:
    """Return how many 16-bit numbers an element of q, k or v is the sum of."""
    return split_float32.TERMS if spec.dtype.itemsize == 4 else 1


def forward_config(spec: CallSpec, device: Device) -> ForwardConfig:
    """Return the forward's configuration, as measured on an H200 (docs/decisions/0073-portable-kernels.md)."""
    dims = kernel_dims(spec.head_dim, spec.value_dim)
    if terms(spec) > 1:
        return _split_forward_config(spec, device)
    if dims[0] > 128:  # O takes 128 registers for 64 rows
        return ForwardConfig(*dims, row_tiles=1)
    if dims[0] == 64:
        # More keys at a time spill up to 1752 bytes a thread where ptxas compiles for Blackwell.
        short = spec.causal is not None or spec.q_len <= 1024
        short &= float(device.capability) < 10.0
        return ForwardConfig(*dims, block_kv=128 if short else 64, q_in_registers=not short)
    config = ForwardConfig(*dims)
    # Two CTAs on a multiprocessor hide each other's softmax; where only one fits, it has 8 warps. So it has where ptxas
    # compiles for Blackwell, and 32 rows a warp spill 1040 bytes.
    if 2 * config.smem_bytes > smem_bytes(device) or float(device.capability) >= 10.0:
        return ForwardConfig(*dims, warpgroups=2, row_tiles=1, q_in_registers=True)
    return config


def _split_forward_config(spec: CallSpec, device: Device) -> ForwardConfig:
    """Return the forward's configuration for float32 inputs; none was measured yet.

    A warp has 16 rows: S, P and P V_j take twice the registers of 16-bit inputs, and 32 rows spill 1100 bytes a thread. So
    do 64 keys at a time at H = 256; but bits of masks are of 64 keys.
    """
    dims = kernel_dims(spec.head_dim, spec.value_dim)
    block_kv = 32 if dims[0] > 192 and spec.is_plain else 64
    config = ForwardConfig(*dims, row_tiles=1, block_kv=block_kv, terms=split_float32.TERMS)
    wide = dataclasses.replace(config, warpgroups=2)
    available = smem_bytes(device)
    # Where a multiprocessor has no room for two CTAs, 8 warps of one hide each other's softmax.
    return wide if wide.smem_bytes <= available < 2 * config.smem_bytes else config


def backward_config(spec: CallSpec, device: Device) -> BackwardConfig | None:
    """Return the backward's configuration, or None if no kernel fits."""
    dims, available = kernel_dims(spec.head_dim, spec.value_dim), smem_bytes(device)
    vectors = float(device.capability) >= 9.0
    if dims[0] == 64:  # 32 keys a warp
        candidates = [BackwardConfig(*dims, warpgroups=1, key_tiles=2, score_queries=32)]
    elif dims[0] == 96:  # columns are no whole panels of two warpgroups
        candidates = [BackwardConfig(*dims, warpgroups=1)]
    else:
        tiles = 2 if dims[0] == 128 else 1
        # Two tiles of keys where registers and shared memory have room for them: see `key_tiles`.
        candidates = [BackwardConfig(*dims, split_columns=True, key_tiles=tiles)]
        if dims[0] == 128:
            candidates.append(BackwardConfig(*dims, split_columns=True))
    fitting = (config for config in candidates if config.smem_bytes <= available)
    config = next(fitting, None)
    return None if config is None else dataclasses.replace(config, vector_atomics=vectors)


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    if terms(spec) > 1:
        if (needed := forward_config(spec, device).smem_bytes) <= smem_bytes(device):
            return None
        return (
            f"its kernel for float32 and these head dims needs {needed} bytes of shared memory, and {device.kind} has "
            f"{smem_bytes(device)}"
        )
    if backward_config(spec, device) is None:
        return (
            f"its backward for these head dims needs more shared memory than {device.kind} has "
            f"({smem_bytes(device)} bytes)"
        )
    return None


def configure(spec: CallSpec, device: Device) -> Configuration:
    if terms(spec) > 1:  # there is no backward of split operands
        return Configuration(forward_config(spec, device), None, score_gradients="blockwise")
    return Configuration(forward_config(spec, device), backward_config(spec, device))
