"""The calls that the decode kernel supports."""

from pallas_fa2.backends.common.decode import support
from pallas_fa2.backends.common.decode.arrays import page_rows
from pallas_fa2.backends.common.decode.spec import BLOCK_KV, DecodeSpec
from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS
from pallas_fa2.backends.sm90.decode import config
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec

# Rows of a head dim that fills no whole panel are loaded 8 at a time by each of a warpgroup's four warps.
PARTIAL_PANEL_ROWS = 4 * SWIZZLE_ROWS


def unsupported_reason(
    cached: CachedSpec, device: Device, launch: DecodeSpec | None = None
) -> str | None:
    """Return why the kernel does not support a call on a cache, or a launch of it, on this device, or None."""
    if not device.is_sm90:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    return unsupported_call(cached, launch)


def unsupported_call(cached: CachedSpec, launch: DecodeSpec | None = None) -> str | None:
    """Return why the kernel does not support a call, or a launch of it, on any device, or None."""
    reason = support.unsupported_reason(cached)
    if reason is None and cached.quantized is not None:
        reason = _unsupported_8_bits(cached)
    return reason or _unsupported_launch(launch or DecodeSpec.of_call(cached))


def _unsupported_8_bits(cached: CachedSpec) -> str | None:
    call = cached.call
    for name, dim in (("H", call.head_dim), ("Hv", call.value_dim)):
        if dim % 64:
            return f"head dims of caches of 8 bits are multiples of 64, but {name} is {dim}"
    if cached.page_size is None and call.kv_len % SWIZZLE_ROWS:
        return f"a cache of 8 bits has a multiple of {SWIZZLE_ROWS} slots for a sequence, and here {call.kv_len}"
    return None


def _unsupported_launch(spec: DecodeSpec) -> str | None:
    if spec.page_size is not None:
        if spec.page_size % SWIZZLE_ROWS:
            return f"a page has a multiple of {SWIZZLE_ROWS} tokens, and here {spec.page_size}"
        rows = page_rows(spec, BLOCK_KV)
        if rows < PARTIAL_PANEL_ROWS and (spec.head_dim % 64 or spec.value_dim % 64):
            return (
                f"with pages of {spec.page_size} tokens head dims are multiples of 64, and here {spec.head_dim} and "
                f"{spec.value_dim}"
            )
    if config.choose(spec, num_sms=1) is None:
        return (
            f"shared memory has no room for {spec.columns} columns of queries beside K and V with head dims of "
            f"{spec.head_dim} and {spec.value_dim}"
        )
    return None
