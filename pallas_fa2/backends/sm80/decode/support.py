"""The calls on caches that the mma.sync kernels take."""

from pallas_fa2.backends.common.decode import support
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.limits import MAX_ELEMENTS
from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS
from pallas_fa2.backends.sm80.decode.config import choose
from pallas_fa2.backends.sm80.multiprocessor import smem_bytes
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec


def unsupported_reason(cached: CachedSpec, device: Device) -> str | None:
    """Return why the kernel cannot run a call on a cache on a GPU that has mma.sync and cp.async, or None."""
    if reason := support.unsupported_reason(cached):
        return reason
    if cached.quantized is not None:
        return "its caches have the dtype of queries, and this one has 8 bits"
    return _unsupported_launch(DecodeSpec.of_call(cached), device)


def _unsupported_launch(spec: DecodeSpec, device: Device) -> str | None:
    if spec.page_size is not None and spec.page_size % SWIZZLE_ROWS:
        return f"a page has a multiple of {SWIZZLE_ROWS} tokens, and here {spec.page_size}"
    elements = spec.num_tokens * spec.q_heads * max(spec.head_dim, spec.value_dim)
    if elements > MAX_ELEMENTS:
        return f"queries have fewer than 2^31 elements, and here {elements}"
    if choose(spec, device) is None:
        return (
            f"{smem_bytes(device)} bytes of shared memory have no room for {spec.columns} columns of queries beside K and V "
            f"with head dims of {spec.head_dim} and {spec.value_dim}"
        )
    return None
