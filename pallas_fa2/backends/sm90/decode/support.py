"""The calls that the decode kernel supports."""

from pallas_fa2.backends.common import compile_mods, limits
from pallas_fa2.backends.common.limits import MAX_HEAD_DIM
from pallas_fa2.backends.common.primitives.swizzle import SWIZZLE_ROWS
from pallas_fa2.backends.sm90.decode.config import DecodeConfig, page_rows
from pallas_fa2.backends.sm90.decode.mods import needs_mask_code
from pallas_fa2.backends.sm90.decode.spec import MAX_COLUMNS, DecodeSpec, max_columns, pad_group
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec

# Rows of a head dim that fills no whole panel are loaded 8 at a time by each of a warpgroup's four warps.
PARTIAL_PANEL_ROWS = 4 * SWIZZLE_ROWS
# As float32, in which scores compute with them, the positions of more keys are not exact (`TileValue.of_index`).
MAX_INDEX = 1 << 23


def unsupported_reason(cached: CachedSpec, device: Device) -> str | None:
    """Return why the kernel does not support a call on a cache on this device, or None."""
    call = cached.call
    if not device.is_sm90:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    if not (isinstance(call.batch, int) and call.has_known_lengths):
        return "its arrays have sizes that are known, and here some are symbols"
    if call.dtype.name not in ("bfloat16", "float16"):
        return f"its inputs are bfloat16 or float16, not {call.dtype.name}"
    for name, dim in (("H", call.head_dim), ("Hv", call.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8 or dim == 0:
            return f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} is {dim}"
    if 0 in (call.batch, call.q_len, call.kv_len):
        return "it has queries and slots for keys, and here are none"
    if cached.quantized is not None and (reason := _unsupported_8_bits(cached)):
        return reason
    return _unsupported_mods(cached) or _unsupported_launch(DecodeSpec.of_call(cached))


def _unsupported_8_bits(cached: CachedSpec) -> str | None:
    call = cached.call
    for name, dim in (("H", call.head_dim), ("Hv", call.value_dim)):
        if dim % 64:
            return f"head dims of caches of 8 bits are multiples of 64, but {name} is {dim}"
    group = pad_group(call.group)
    if group > max_columns(cached):
        return (
            "heads of a group, rounded up to a multiple of 8, are "
            f"{max_columns(cached)} at most with caches of 8 bits and these head dims, and here are {group}"
        )
    if not cached.is_packed and call.q_len * group > MAX_COLUMNS:
        return _too_many_columns(call.q_len, group)
    if cached.page_size is None and call.kv_len % SWIZZLE_ROWS:
        return f"a cache of 8 bits has a multiple of {SWIZZLE_ROWS} slots for a sequence, and here {call.kv_len}"
    return None


def _unsupported_mods(cached: CachedSpec) -> str | None:
    call = cached.call
    if not (needs_mask_code(cached) or call.scores):
        return None
    if reason := compile_mods.unsupported_reason(call):
        return reason
    if call.kv_len > MAX_INDEX:
        return f"under masks and scores sequences have {MAX_INDEX} slots at most, and here {call.kv_len}"
    # Of the arrays that masks and scores read: those of pairs may have all axes.
    queries = call.q_len if cached.is_packed else call.batch * call.q_len
    sizes = [compile_mods.num_token_rows(call, "k") * call.batch * call.kv_len]
    if compile_mods.pairwise_bytes(call):
        sizes.append(call.q_heads * queries * call.kv_len)
    return limits.too_many_elements(max(sizes))


def _too_many_columns(queries: int, padded_group: int) -> str:
    return (
        f"queries times heads of a group, rounded up to a multiple of 8, are {MAX_COLUMNS} at most, and here are "
        f"{queries} times {padded_group}"
    )


def _unsupported_launch(spec: DecodeSpec) -> str | None:
    if spec.columns > MAX_COLUMNS:
        return _too_many_columns(spec.q_len, spec.padded_group)
    if spec.page_size is not None:
        if spec.page_size % SWIZZLE_ROWS:
            return f"a page has a multiple of {SWIZZLE_ROWS} tokens, and here {spec.page_size}"
        rows = page_rows(spec)
        if rows < PARTIAL_PANEL_ROWS and (spec.head_dim % 64 or spec.value_dim % 64):
            return (
                f"with pages of {spec.page_size} tokens head dims are multiples of 64, and here {spec.head_dim} and "
                f"{spec.value_dim}"
            )
    blocks = spec.max_entries * spec.kv_heads * -(-spec.kv_len // DecodeConfig.block_kv)
    if blocks >= 1 << 31:  # they are counted in int32
        return (
            f"sequences times key heads times blocks of 64 keys are below 2^31, and here {blocks}"
        )
    if DecodeConfig.choose(spec, num_sms=1) is None:
        return (
            f"shared memory has no room for {spec.columns} columns of queries beside K and V with head dims of "
            f"{spec.head_dim} and {spec.value_dim}"
        )
    return None
