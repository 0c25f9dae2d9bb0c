"""What inline operations compute, by their names and parameters (`InlineOp`), with NumPy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.primitives import layouts
from tests.support import programs


def _columns(tile: np.ndarray) -> np.ndarray:
    return np.arange(tile.shape[1])[None]


def to_fragments(tile: Any) -> Any:
    """(warp, half, group) x (eight, thread, element) -> the order of a thread's registers."""
    return tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(-1)


def from_fragments(values: Any) -> Any:
    tile = values.reshape(-1, 4, 8, 4, 2, 2).transpose(1, 4, 2, 0, 3, 5)
    return tile.reshape(64, -1)


def _load_pairwise(tile, *, shape, transposed, columns, dtype):
    assert tile.shape == shape, (tile.shape, shape)
    return (tile.T if transposed else tile)[:, columns].astype(dtype)


def _load_packed_bools(tile, *, transposed):
    return (tile.T if transposed else tile).astype("int32")


def _load_keys(tile):
    """Column 16 k + 4 c + 2 h + j becomes 16 k + 8 h + 2 c + j."""
    ordered = tile.astype("float16").reshape(len(tile), -1, 4, 2, 2).swapaxes(2, 3)
    return ordered.reshape(tile.shape)


def _load_values(tile):
    """Row 16 a + 2 g + h of the transpose becomes 16 a + 8 h + g."""
    rows = tile.T.astype("float16")
    return rows.reshape(-1, 8, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def order_queries(tile):
    """Return float16 rows in the order of keys' columns, and the powers of two that they were divided by."""
    wide = tile.astype(np.float32)
    largest = np.abs(wide).max(1)
    power = np.frexp(largest)[1].astype(np.int32) - 1 - 14
    is_number = np.isfinite(largest) & (largest >= np.finfo(np.float32).tiny)
    scale = np.ldexp(np.float32(1), np.where(is_number, np.maximum(power, -126), 0))
    return _load_keys(wide / scale[:, None]), scale


def _order_output(tile):
    return tile.reshape(-1, 2, 8, tile.shape[1]).swapaxes(1, 2).reshape(tile.shape)


def _load_scales(copies):
    return copies[:, 0].reshape(-1).astype("float32")


# What becomes of an array in memory that is loaded into registers.
LOADED: dict[str, Callable[..., np.ndarray]] = {
    "load_fragment_words": lambda values: from_fragments(
        values.reshape(-1, 2, 2, 128).transpose(0, 3, 1, 2)
    ),
    "load_fragments": from_fragments,
    "load_keys": _load_keys,
    "load_packed_bools": _load_packed_bools,
    "load_pairwise": _load_pairwise,
    "load_scales": _load_scales,
    "load_values": _load_values,
}

# What is stored in memory from registers.
STORED: dict[str, Callable[[np.ndarray], np.ndarray]] = {"store_fragments": to_fragments}

# What is added to device memory from registers.
ADDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "add_fragment_words": lambda tile: (
        to_fragments(tile).reshape(-1, 128, 2, 2).transpose(0, 2, 3, 1).reshape(-1)
    ),
    "add_column_sums": lambda tile: tile.sum(0),
    "add_fragments": to_fragments,
    "add_row_sums": lambda tile: tile.sum(1),
}


def _negate_dropped(p, first, second, columns, *, key_axis, threshold):
    keys = dropout.RowKeys(*(x.astype("uint32")[:, None] for x in (first, second)))
    bits = programs.evaluate(dropout.bits, keys, columns[None])
    return np.where((bits if key_axis == 1 else bits.T) < threshold, -p, p)


def _own_values(tile):
    """`[threads, values]` of a tile of 64 rows, in the order of registers."""
    count = tile.shape[1] // 8
    return tile.reshape(4, 2, 8, count, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(-1, 4 * count)


def _bit_positions():
    """Of a thread's values, in its word."""
    return 31 - np.arange(32, dtype="int32")[None]


def _pack_bits(visible, *, start):
    values = _own_values(~visible).astype("uint32")
    positions = _bit_positions()[:, start // 2 :][:, : values.shape[1]]
    bits = values << positions.astype("uint32")
    return bits.sum(1, dtype="uint32").view("int32")


def _apply_bits(s, *words, start):
    def hidden(word):
        bits = word[:, None] >> _bit_positions() & 1
        return bits.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)

    columns = slice(start, start + s.shape[1])
    bits = np.concatenate([hidden(word) for word in words], 1)[:, columns]
    return np.where(bits != 0, -np.inf, s)


def _mask_outside(s, *arrays, bounds):
    given = dict(zip(bounds, arrays, strict=True))
    first, last = given.get("first", np.int32([-1])), given.get("last", np.int32([s.shape[1]]))
    inside = (_columns(s) >= first[:, None]) & (_columns(s) <= last[:, None])
    return np.where(inside, s, -np.inf)


def _by_warps(x):
    return x.reshape(-1, layouts.LANES)


def _exclusive_sum_of_lanes(x):
    warps = _by_warps(x)
    return (np.cumsum(warps, 1, x.dtype) - warps).reshape(-1)


def _uniform(x):
    assert (x == x[0]).all(), f"a value that all threads have is {x}"
    return x[0]


def _warp_largest(tile):
    """fmax leaves out NaN."""
    return np.repeat(np.fmax.reduce(np.abs(tile).reshape(4, -1), 1, initial=0), 16)


# What is computed in registers. A warpgroup is one thread here: its four warps share their votes.
INLINE: dict[str, Callable[..., Any]] = {
    "apply_bits": _apply_bits,
    "as_left": lambda tile: tile,
    "canonicalize_module": lambda: None,
    "cluster_expect_tx": lambda *_: None,
    "cluster_init": lambda *_: None,
    "column_iota": lambda start, *, count: start + np.arange(count, dtype="int32"),
    "defeat_minmax_fusion": lambda x: x,
    "fence_before_wgmma_wait": lambda _: None,
    "mask_after": lambda s, last: np.where(_columns(s) <= last[:, None], s, -np.inf),
    "mask_before": lambda s, first: np.where(_columns(s) >= first[:, None], s, -np.inf),
    "mask_outside": _mask_outside,
    "named_barrier_arrive": lambda _: None,
    "named_barrier_sync": lambda _: None,
    "negate_dropped": _negate_dropped,
    "order_output": _order_output,
    "pack_bits": _pack_bits,
    "reciprocal": np.reciprocal,
    "sync_producer_warps": lambda: None,
    "thread_indices": lambda: np.arange(layouts.THREADS, dtype="int32"),
    "uniform": _uniform,
    "warp_any_abs_ge_2": lambda tile: np.any(~(np.abs(tile) < 2)).astype("int32"),
    "warp_any_gt": lambda tile, *, limit: np.any(tile > limit).astype("int32"),
    "warp_largest": _warp_largest,
    "warp_exclusive_count": _exclusive_sum_of_lanes,
    "warp_exclusive_sum": _exclusive_sum_of_lanes,
    "warp_max": lambda x: np.repeat(_by_warps(x).max(1), layouts.LANES),
    "warp_sum": lambda x: np.repeat(_by_warps(x).sum(1, x.dtype), layouts.LANES),
    "warpgroup_any_nonfinite": lambda rows, _: np.any(~(rows < np.inf)).astype("int32"),
    "zero_accumulator": lambda *, shape: np.zeros(shape, "float32"),
}
