"""What `benchmarks.run --report` says of a GPU beside errors and times: the device, its software, and whether the
kernels are right."""

import platform
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.backends.sm80 import backend, first_use
from pallas_fa2.backends.sm80.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.backends.sm80.first_use_cases import (
    DROPOUT,
    SEGMENTS,
    AttentionFamily,
    DecodeFamily,
    Family,
)
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.support import MIN_CAPABILITY
from pallas_fa2.device import Device, device_of

# No shape starts after so many seconds: the check before takes about a minute, and so do the last shapes.
BUDGET = 150.0
# The families of kernels that differ most: each head dim, dtype and kind of mods once.
FAMILIES: tuple[Family, ...] = (
    *(AttentionFamily(dim, dim, "bfloat16") for dim in (64, 96, 128, 256)),
    AttentionFamily(64, 64, "bfloat16", forward=ForwardConfig(64, 64, q_in_registers=True)),
    AttentionFamily(192, 128, "bfloat16", SEGMENTS),
    AttentionFamily(128, 128, "bfloat16", SEGMENTS, deterministic=True),
    AttentionFamily(64, 64, "float16", DROPOUT),
    AttentionFamily(64, 64, "float32", DROPOUT, deterministic=True),
    AttentionFamily(128, 128, "float32", SEGMENTS),
    DecodeFamily(64, 64, "bfloat16"),
    DecodeFamily(128, 128, "float16", page_size=16, mods=True),
    DecodeFamily(256, 256, "bfloat16", columns=32, page_size=64),
)
RIVALS = ("fa2", "fa3", "cudnn", "tokamax", "tokamax_triton", "xla")


def gpu() -> Device:
    """Return JAX's device; exit with an explanation if it is no GPU that has kernels."""
    device = device_of(jnp.zeros(()))
    if device.platform != "gpu" or float(device.capability or 0) < MIN_CAPABILITY:
        described = f"{device.kind} ({device.platform})"
        raise SystemExit(
            f"--report needs an NVIDIA GPU of compute capability {MIN_CAPABILITY} or more, and JAX's first device is "
            f"{described}: run it where the GPU is, with JAX for CUDA installed (pip install '.[cuda13]' tqdm, in the checkout)"
        )
    return device


def kernels(device: Device) -> tuple[str, ...]:
    """Return our kernels for a GPU, by their names in benchmarks/rivals.py."""
    return ("ours", "ampere") if device.is_sm90 else ("ampere",)


def describe(device: Device) -> dict[str, Any]:
    """Return what the results of another GPU may depend on."""
    actual = jax.devices()[0]
    return {
        "capability": device.capability,
        "multiprocessors": device.num_sms,
        "memory_bytes": (actual.memory_stats() or {}).get("bytes_limit"),
        "platform": actual.client.platform_version.replace("\n", " "),
        "system": f"{platform.platform()}, Python {platform.python_version()}",
        "first_use": first_use_by_family(device),
    }


def first_use_by_family(device: Device) -> dict[str, str]:
    """Compare families of the mma.sync kernels with the definition; return what is wrong with each, if one cannot be
    compiled or launched too."""
    actual = jax.devices()[0]
    attention = backend.forward, backend.backward
    decoding = CACHED_FORWARD.configure, CACHED_FORWARD.forward
    errors = {
        str(family): first_use.check(
            family, decoding if isinstance(family, DecodeFamily) else attention, device, actual
        ).error
        for family in FAMILIES
    }
    return {family: error or "right" for family, error in errors.items()}
