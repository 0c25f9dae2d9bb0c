"""The calls that decode kernels of all architectures support."""

from pallas_fa2.arithmetic import round_up
from pallas_fa2.backends.common import compile_mods, limits
from pallas_fa2.backends.common.decode.arrivals import MAX_SPLITS
from pallas_fa2.backends.common.decode.config import MAX_IMBALANCE
from pallas_fa2.backends.common.decode.mods import needs_mask_code
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.limits import MAX_HEAD_DIM
from pallas_fa2.ir.cached_spec import CachedSpec

# They are counted in int32, and with whole tiles for each CTA the last ones begin up to `MAX_IMBALANCE` times as far.
MAX_BLOCKS = int((1 << 31) / MAX_IMBALANCE) - (1 << 16)
# As float32, in which scores compute with them, the positions of more keys are not exact (`TileValue.of_index`).
MAX_INDEX = 1 << 23


def unsupported_reason(cached: CachedSpec) -> str | None:
    """Return why no kernel supports a call on a cache, or None."""
    call = cached.call
    if not (isinstance(call.batch, int) and call.has_known_lengths):
        return "its arrays have sizes that are known, and here some are symbols"
    if call.dtype.name not in ("bfloat16", "float16"):
        return f"its inputs are bfloat16 or float16, not {call.dtype.name}"
    for name, dim in (("H", call.head_dim), ("Hv", call.value_dim)):
        if dim > MAX_HEAD_DIM or dim % 8 or dim == 0:
            return f"head dims are multiples of 8 up to {MAX_HEAD_DIM}, but {name} is {dim}"
    if 0 in (call.batch, call.q_len, call.kv_len):
        return "it has queries and slots for keys, and here are none"
    return _unsupported_mods(cached) or unsupported_launch(DecodeSpec.of_call(cached))


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


def unsupported_launch(spec: DecodeSpec) -> str | None:
    """Return why no kernel has a launch, or None."""
    blocks = spec.max_entries * spec.kv_heads * spec.max_blocks
    if blocks > MAX_BLOCKS:
        return f"sequences times key heads times blocks of 64 keys are {MAX_BLOCKS} at most, and here {blocks}"
    if spec.split_blocks is not None:
        splits = spec.max_rows // spec.max_entries
        if splits > MAX_SPLITS:
            return f"a sequence has {MAX_SPLITS} splits at most, and here {splits}; make split_size larger"
        splits = spec.kv_heads * spec.max_rows * spec.columns
        return limits.too_many_elements(splits * round_up(spec.value_dim, 64))
    return None
