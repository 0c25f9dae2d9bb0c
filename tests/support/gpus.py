"""NVIDIA GPUs as XLA's compiler sees them, so that one can compile for them without having one.

The figures are public limits of a compute capability (CUDA C++ Programming Guide) and of a board. The real thing prints
its own with `xla_client.get_topology_for_devices(jax.devices()).target_config`. Mosaic keeps the first architecture
that it compiles for in a process, so a process has one: what `PALLAS_FA2_GATE` says, or an H200.
"""

import os
from typing import NamedTuple

from pallas_fa2.device import Device


class Gpu(NamedTuple):
    kind: str
    num_sms: int
    smem_per_sm: int
    smem_per_block: int  # that a block may ask for
    threads_per_sm: int
    accelerated: bool  # whether the instructions of this architecture alone are enabled


GPUS = {
    "8.0": Gpu("NVIDIA A100-SXM4-80GB", 108, 167_936, 166_912, 2048, False),
    "8.6": Gpu("NVIDIA GeForce RTX 3090", 82, 102_400, 101_376, 1536, False),
    "8.9": Gpu("NVIDIA GeForce RTX 4090", 128, 102_400, 101_376, 1536, False),
    "9.0": Gpu("NVIDIA H200", 132, 233_472, 232_448, 2048, True),
    "10.0": Gpu("NVIDIA B200", 148, 233_472, 232_448, 2048, True),
    "12.0": Gpu("NVIDIA GeForce RTX 5090", 170, 102_400, 101_376, 1536, True),
}
CAPABILITY = os.environ.get("PALLAS_FA2_GATE", "9.0")
MAX_SHARED_MEMORY_BYTES = GPUS[CAPABILITY].smem_per_block


def device(capability: str = CAPABILITY) -> Device:
    gpu = GPUS[capability]
    return Device("gpu", gpu.kind, capability, gpu.num_sms)


def target_config(capability: str = CAPABILITY) -> str:
    gpu, (major, minor) = GPUS[capability], capability.split(".")
    extension = "feature_extension: ACCELERATED_FEATURES" if gpu.accelerated else ""
    return f"""
platform_name: "CUDA"
device_description_str: "{gpu.kind}"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 14 }}
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  core_count: {gpu.num_sms}
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {gpu.threads_per_sm}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.smem_per_block}
  shared_memory_per_core: {gpu.smem_per_sm}
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
}}
"""
