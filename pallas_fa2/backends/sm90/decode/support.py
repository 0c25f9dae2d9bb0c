"""The launches that the decode kernel supports."""

from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS
from pallas_fa2.backends.sm90.decode.config import MAX_COLUMNS, DecodeConfig
from pallas_fa2.backends.sm90.decode.memory import page_rows
from pallas_fa2.backends.sm90.decode.spec import DecodeSpec

# Rows of a head dim that fills no whole panel are loaded 8 at a time by each of a warpgroup's four warps.
PARTIAL_PANEL_ROWS = 4 * SWIZZLE_ROWS


def unsupported_reason(spec: DecodeSpec) -> str | None:
    """Return why the kernel does not support a launch, or None."""
    if spec.columns > MAX_COLUMNS:
        return (
            f"queries times heads of a group, rounded up to a multiple of 8, are {MAX_COLUMNS} at most, and here are "
            f"{spec.q_len} times {spec.padded_group}"
        )
    if spec.page_size is not None:
        if spec.page_size % SWIZZLE_ROWS:
            return f"a page has a multiple of {SWIZZLE_ROWS} tokens, and here {spec.page_size}"
        rows = page_rows(spec, DecodeConfig.block_kv)
        if rows < PARTIAL_PANEL_ROWS and (spec.head_dim % 64 or spec.value_dim % 64):
            return (
                f"with pages of {spec.page_size} tokens head dims are multiples of 64, and here {spec.head_dim} and "
                f"{spec.value_dim}"
            )
    if DecodeConfig.choose(spec, num_sms=1) is None:
        return (
            f"shared memory has no room for {spec.columns} columns of queries beside K and V with head dims of "
            f"{spec.head_dim} and {spec.value_dim}"
        )
    return None
