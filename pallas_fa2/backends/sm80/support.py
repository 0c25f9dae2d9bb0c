"""Which calls the mma.sync kernels take."""

from pallas_fa2.backends.common import limits
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

MIN_CAPABILITY = 8.0
DTYPES = ("bfloat16", "float16", "float32")


def unsupported_device(device: Device) -> str | None:
    """Return why the kernels cannot run on a device, or None."""
    if device.platform != "gpu" or not device.capability:
        return f"it needs an NVIDIA GPU, and this is {device.kind}"
    # LLVM ends the process where it meets cp.async for an older GPU.
    if float(device.capability) < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or more, and {device.kind} has {device.capability}"
    return None


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why the kernels cannot run a call on a device, or None."""
    if reason := unsupported_device(device):
        return reason
    if reason := limits.unsupported_reason(spec, DTYPES):
        return reason
    if reason := limits.too_many_elements(_entry_elements(spec)):
        return reason
    return configs.unsupported_reason(spec, device)


def batch_limit(spec: CallSpec) -> int:
    """Return how many batch entries one launch takes."""
    return limits.max_entries(_entry_elements(spec))


def _entry_elements(spec: CallSpec) -> int:
    head_dim, _ = configs.kernel_dims(spec.head_dim, spec.value_dim)
    return limits.entry_elements(spec, configs.terms(spec) * head_dim)
