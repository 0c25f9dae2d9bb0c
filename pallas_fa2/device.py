"""`Device`, a description of the device on which a call runs."""

import functools
import re
from typing import Any, NamedTuple

import jax
from jax.core import Tracer


class Device(NamedTuple):
    """The device on which a call runs; `capability` is CUDA's compute capability, such as "9.0"."""

    platform: str = "cpu"
    kind: str = "cpu"
    capability: str = ""
    num_sms: int = 1

    @property
    def is_sm90(self) -> bool:
        return self.platform == "gpu" and self.capability == "9.0"


type DeviceLike = Device | jax.Device | str  # pyright: ignore[reportInvalidTypeForm]  # a variable to it

# A GPU of each compute capability that kernels are compiled for in the tests, and its multiprocessors.
GPUS = {
    "8.0": ("NVIDIA A100", 108),
    "8.6": ("NVIDIA GeForce RTX 3090", 82),
    "8.9": ("NVIDIA GeForce RTX 4090", 128),
    "9.0": ("NVIDIA H100", 132),
    "10.0": ("NVIDIA B200", 148),
    "12.0": ("NVIDIA GeForce RTX 5090", 170),
}


def as_device(device: DeviceLike) -> Device:
    """Describe a device of JAX, or a GPU that is named by its compute capability; check a description."""
    if isinstance(device, jax.Device):
        return _describe(device)
    if isinstance(device, str) and device in GPUS:
        kind, num_sms = GPUS[device]
        return Device("gpu", kind, device, num_sms)
    if not isinstance(device, Device):
        raise TypeError(
            f"device must be a jax.Device, a pallas_fa2.Device, or the compute capability of an NVIDIA GPU, one of "
            f"{', '.join(map(repr, GPUS))}, but it is {device!r}; leave it out for the device of query"
        )
    if device.capability and not re.fullmatch(r"\d+\.\d", device.capability):
        raise ValueError(
            f"device's capability must be a compute capability such as '9.0', but it is {device.capability!r}; write its "
            "point"
        )
    if device.capability and device.platform != "gpu":
        raise ValueError(
            f"device's platform must be 'gpu', as JAX calls it, where it has a compute capability, but it is "
            f"{device.platform!r}; write Device('gpu', {device.kind!r}, {device.capability!r}, {device.num_sms})"
        )
    return device


def device_of(array: Any) -> Device:
    """Describe the device of an array, or JAX's default device for a tracer and anything else."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        return _describe(next(iter(array.devices())))
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return _describe(default)
    return _describe(jax.devices(default)[0])


@functools.lru_cache
def _describe(device: Any) -> Device:
    return Device(
        device.platform,
        device.device_kind,
        str(getattr(device, "compute_capability", "")),
        int(getattr(device, "core_count", 1)),
    )
