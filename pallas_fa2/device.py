"""`Device`, a description of the device on which a call runs."""

import functools
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
