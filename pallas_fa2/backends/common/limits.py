"""The limits that the kernels of all GPU backends share."""

from pallas_fa2.backends.common import block_mask_kernel, compile_mods
from pallas_fa2.ir.call_spec import CallSpec

# The (H, Hv) that kernels are built for. Columns that smaller arrays lack are filled with zeros.
KERNEL_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
MAX_HEAD_DIM = KERNEL_DIMS[-1][0]
# Indices of elements, and TMA coordinates, are 32-bit.
MAX_ELEMENTS = 2**31 - 1


def unsupported_reason(
    spec: CallSpec, dtypes: tuple[str, ...] = ("bfloat16", "float16")
) -> str | None:
    """Return why kernels for inputs of these dtypes do not support a call, or None."""
    if not isinstance(spec.batch, int):
        return f"its arrays have sizes that are known, and here the batch is {spec.batch}"
    if spec.dtype.name not in dtypes:
        return f"its inputs are {', '.join(dtypes[:-1])} or {dtypes[-1]}, not {spec.dtype.name}"
    for name, dim in (("H", spec.head_dim), ("Hv", spec.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8:
            return f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} is {dim}"
    if spec.scale <= 0:
        return f"the scale must be positive, but it is {spec.scale:g}"
    if reason := compile_mods.unsupported_reason(spec):
        return reason
    listed, most = _max_listed_blocks(spec), block_mask_kernel.MAX_BLOCKS
    if spec.has_general_mask and listed > most:
        return f"its masks list {most} blocks at most, and here are {listed}"
    return None


def _max_listed_blocks(spec: CallSpec) -> int:
    """Return the most blocks that a tile may visit: of 64 keys, or of 64 queries of each head of a group."""
    return max(-(-spec.kv_len // 64), spec.group * -(-spec.q_len // 64))


def reason_of_ordered_scores(spec: CallSpec) -> str | None:
    """Return why kernels do not compute the gradients where those of score data are needed, or None."""
    if not (spec.deterministic and spec.scores):
        return None
    return "with deterministic_gradients, its kernels sum those of score data in any order"


def entry_elements(spec: CallSpec, kernel_head_dim: int) -> int:
    """Return the elements of the largest array of one batch entry, with the head dim of the kernel that takes it."""
    return max(spec.q_len * spec.q_heads, spec.kv_len * spec.kv_heads) * kernel_head_dim


def too_many_elements(elements: int) -> str | None:
    """Return why no kernel takes batch entries of so many elements, or None."""
    if elements <= MAX_ELEMENTS:
        return None
    return f"a batch entry has fewer than 2^31 elements, and here are {elements}"


def max_entries(elements: int) -> int:
    """Return how many batch entries of so many elements one launch takes."""
    return max(1, MAX_ELEMENTS // max(elements, 1))
