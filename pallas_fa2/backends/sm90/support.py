"""The calls that the sm90 kernels support."""

from pallas_fa2.backends.common import compile_mods, limits
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.sm90.backward import config
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

# No launch with more heads, batch entries times key heads, or blocks of 64 tokens has been tested.
MAX_COUNT = 65_535
# Per-token inputs of queries, or of keys: in every kernel shared memory has room for so many beside the rest.
MAX_TOKEN_ROWS = 12


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why the kernels do not support a call on this device, or None."""
    if not device.is_sm90:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    reason = (
        limits.unsupported_reason(spec)
        or _unsupported_aux(spec)
        or limits.too_many_elements(_entry_elements(spec))
    )
    if reason:
        return reason
    if spec.q_heads > MAX_COUNT:
        return f"it has {MAX_COUNT} heads at most, and here are {spec.q_heads}"
    if (length := max(spec.q_len, spec.kv_len)) > 64 * MAX_COUNT:
        return f"its sequences have {64 * MAX_COUNT} tokens at most, and here are {length}"
    return None


def _unsupported_aux(spec: CallSpec) -> str | None:
    for side, name in (("q", "queries"), ("k", "keys")):
        if (rows := compile_mods.num_token_rows(spec, side)) > MAX_TOKEN_ROWS:
            what = "masks, scores and dropout"
            return f"its {what} read {MAX_TOKEN_ROWS} arrays of {name} at most, and here are {rows}"
    size, dims = compile_mods.pairwise_bytes(spec), kernel_dims(spec.head_dim, spec.value_dim)
    if (dim := max(spec.head_dim, spec.value_dim)) > (most := compile_mods.MAX_DIM_WITH_PAIRWISE):
        if size:
            return f"with scores of data of pairs, head dims are at most {most}, and here is {dim}"
        if compile_mods.needs_mask_bits(spec) and spec.mask_varies_by_head:
            what = "a mask of data of pairs that differs between heads"
            return f"with {what} head dims are at most {most}, and here is {dim}"
    rows = compile_mods.num_token_rows(spec, "q") + (2 if spec.dropout_rate else 0)
    if size and config.BackwardConfig(*dims).pairwise_stages(size, rows) < 1:
        return f"its data of pairs of tokens are too many for shared memory ({size} bytes a pair)"
    return None


def kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the (H, Hv) of the smallest kernel that takes these, with panels that TMA is not slow with."""
    dims = head_dim, value_dim

    def takes_dims(sizes: tuple[int, int]) -> bool:
        return all(
            n >= dim and not swizzle.has_narrow_partial_panel(n, dim)
            for n, dim in zip(sizes, dims, strict=True)
        )

    return next(filter(takes_dims, limits.KERNEL_DIMS))


def _entry_elements(spec: CallSpec) -> int:
    head_dim, _ = kernel_dims(spec.head_dim, spec.value_dim)
    return limits.entry_elements(spec, head_dim)


def batch_limit(spec: CallSpec) -> int:
    """Return how many batch entries one launch takes."""
    return max(1, min(MAX_COUNT // spec.kv_heads, limits.max_entries(_entry_elements(spec))))
