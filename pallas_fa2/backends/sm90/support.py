"""The calls that the sm90 kernels support."""

from pallas_fa2.backends.common import block_mask_kernel, compile_mods
from pallas_fa2.backends.common.primitives import swizzle
from pallas_fa2.backends.sm90.backward import config
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

# The (H, Hv) that kernels are built for. TMA fills the missing columns of smaller arrays with zeros.
KERNEL_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
MAX_HEAD_DIM = KERNEL_DIMS[-1][0]
# TMA coordinates are 32-bit, and no launch on larger arrays has been tested.
MAX_ELEMENTS = 2**31 - 1
# No launch with more heads, batch entries times key heads, or blocks of 64 tokens has been tested either.
MAX_COUNT = 65_535
# Per-token inputs of queries, or of keys: in every kernel shared memory has room for so many beside the rest.
MAX_TOKEN_ROWS = 12


def unsupported_reason(spec: CallSpec, device: Device) -> str | None:
    """Return why the kernels do not support a call on this device, or None."""
    if not device.is_sm90:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    if not isinstance(spec.batch, int):
        return f"its arrays have sizes that are known, and here the batch is {spec.batch}"
    if spec.dtype.name not in ("bfloat16", "float16"):
        return f"its inputs are bfloat16 or float16, not {spec.dtype.name}"
    for name, dim in (("H", spec.head_dim), ("Hv", spec.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8:
            return f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} is {dim}"
    if reason := compile_mods.unsupported_reason(spec) or _unsupported_aux(spec):
        return reason
    if spec.has_general_mask and _max_listed_blocks(spec) > block_mask_kernel.MAX_BLOCKS:
        return f"its masks list {block_mask_kernel.MAX_BLOCKS} blocks at most, and here are {_max_listed_blocks(spec)}"
    if spec.scale <= 0:
        return f"the scale must be positive, but it is {spec.scale:g}"
    if (elements := _entry_elements(spec)) > MAX_ELEMENTS:
        return f"a batch entry has fewer than 2^31 elements, and here are {elements}"
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


def _max_listed_blocks(spec: CallSpec) -> int:
    """Return the most blocks that a tile may visit: of 64 keys, or of 64 queries of each head of a group."""
    return max(-(-spec.kv_len // 64), spec.group * -(-spec.q_len // 64))


def kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Return the (H, Hv) of the smallest kernel that takes these, with panels that TMA is not slow with."""
    dims = head_dim, value_dim

    def takes_dims(sizes: tuple[int, int]) -> bool:
        return all(
            n >= dim and not swizzle.has_narrow_partial_panel(n, dim)
            for n, dim in zip(sizes, dims, strict=True)
        )

    return next(filter(takes_dims, KERNEL_DIMS))


def _entry_elements(spec: CallSpec) -> int:
    """Return the elements of the largest array of one batch entry."""
    head_dim, _ = kernel_dims(spec.head_dim, spec.value_dim)
    return max(spec.q_len * spec.q_heads, spec.kv_len * spec.kv_heads) * head_dim


def batch_limit(spec: CallSpec) -> int:
    """Return how many batch entries one launch takes."""
    return max(1, min(MAX_COUNT // spec.kv_heads, MAX_ELEMENTS // max(_entry_elements(spec), 1)))
