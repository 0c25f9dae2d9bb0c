"""Which calls the mma.sync kernels take."""

from pallas_fa2.backends.common import block_mask_kernel, compile_mods
from pallas_fa2.backends.sm80 import configs
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

MAX_HEAD_DIM = configs.KERNEL_DIMS[-1][0]
# Indices of elements are 32-bit.
MAX_ELEMENTS = 2**31 - 1
MIN_CAPABILITY = 8.0


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why the kernels cannot run a call on a device, or None."""
    if device.platform != "gpu" or not device.capability:
        return f"it needs an NVIDIA GPU, and this is {device.kind}"
    # LLVM ends the process where it meets cp.async for an older GPU.
    if float(device.capability) < MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or more, and {device.kind} has {device.capability}"
    if not isinstance(spec.batch, int):
        return f"its arrays have sizes that are known, and here the batch is {spec.batch}"
    if spec.dtype.name not in ("bfloat16", "float16"):
        return f"its inputs are bfloat16 or float16, not {spec.dtype.name}"
    for name, dim in (("H", spec.head_dim), ("Hv", spec.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8:
            return f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} is {dim}"
    if spec.deterministic:
        return "it adds dQ in any order, and the call asks for deterministic gradients"
    if spec.scale <= 0:
        return f"the scale must be positive, but it is {spec.scale:g}"
    if reason := compile_mods.unsupported_reason(spec):
        return reason
    listed = max(-(-spec.kv_len // 64), spec.group * -(-spec.q_len // 64))
    if spec.has_general_mask and listed > block_mask_kernel.MAX_BLOCKS:
        return (
            f"its masks list {block_mask_kernel.MAX_BLOCKS} blocks at most, and here are {listed}"
        )
    if (elements := _entry_elements(spec)) > MAX_ELEMENTS:
        return f"a batch entry has fewer than 2^31 elements, and here are {elements}"
    return configs.unsupported_reason(spec, device)


def batch_limit(spec: CallSpec) -> int:
    """Return how many batch entries one launch takes."""
    return max(1, MAX_ELEMENTS // max(_entry_elements(spec), 1))


def _entry_elements(spec: CallSpec) -> int:
    """Return the size of the largest array that the kernels see, for one batch entry."""
    head_dim, _ = configs.kernel_dims(spec.head_dim, spec.value_dim)
    return max(spec.q_len * spec.q_heads, spec.kv_len * spec.kv_heads) * head_dim
