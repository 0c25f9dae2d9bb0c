"""An NVIDIA H200 as XLA's compiler sees it, so that one can compile for it without having one.

The figures are the public limits of compute capability 9.0 and of this board. The real thing
prints its own with `xla_client.get_topology_for_devices(jax.devices()).target_config`.
"""

# What one block may ask for (shared_memory_per_block_optin below).
MAX_SHARED_MEMORY_BYTES = 232_448

TARGET_CONFIG = f"""
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version {{ major: 13 minor: 0 }}
dnn_version_info {{ major: 9 minor: 14 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132
  clock_rate_ghz: 1.98
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {MAX_SHARED_MEMORY_BYTES}
  shared_memory_per_core: 233472
  l2_cache_size: 62914560
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
}}
"""
