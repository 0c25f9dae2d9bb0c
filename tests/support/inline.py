"""What the library's inline code means, by its name: that of `sm90.primitives`, `block_mask_kernel`, `scheduler`,
`module_name`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.sm90.primitives import thread_ops, tma
from tests.support import programs


def _columns(tile: np.ndarray) -> np.ndarray:
    return np.arange(tile.shape[1])[None]


def to_fragments(tile: Any) -> Any:
    """(warp, half, group) x (eight, thread, element) -> the order of a thread's registers."""
    return tile.reshape(4, 2, 8, -1, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(-1)


def _pairs(parameters, _):
    orientation, queries, keys, start, count, dtype = parameters
    columns = slice(int(start), int(start) + int(count))

    def convert(tile):
        tile = tile.T if orientation == "transposed" else tile
        return tile[:, columns].astype(dtype)

    return (int(queries), int(keys)), convert


def _booleans(parameters, shape):
    transposed = parameters == ["transposed"]
    return shape, lambda square: (square.T if transposed else square).astype("int32")


def from_fragments(numbers: Any) -> Any:
    tile = numbers.reshape(-1, 4, 8, 4, 2, 2).transpose(1, 4, 2, 0, 3, 5)
    return tile.reshape(64, -1)


def _loaded_fragments(_, shape):
    return (shape[0] * shape[1],), from_fragments


# What is loaded: of the operation's parameters and the result's shape, the shape of what lies in memory
# and what becomes of it.
LOADED: dict[str, Callable] = {
    "load_pairs": _pairs,
    "load_booleans": _booleans,
    "load_fragments": _loaded_fragments,
}

# What is stored there from registers.
STORED: dict[str, Callable[[np.ndarray], np.ndarray]] = {"_store_fragments": to_fragments}

# What is added to device memory from registers.
ADDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "_add_fragments": to_fragments,
    "_add_row_sums": lambda tile: tile.sum(1),
    "_add_column_sums": lambda tile: tile.sum(0),
}


def _negate_dropped(p, first, second, columns, key_axis, threshold, _):
    keys = dropout.RowKeys(*(x.astype("uint32")[:, None] for x in (first, second)))
    bits = programs.evaluate(dropout.bits, keys, columns[None])
    return np.where((bits if key_axis == "1" else bits.T) < int(threshold), -p, p)


def _own_values(tile):
    """`[threads, values]` of a tile of 64 rows, in the order of registers."""
    count = tile.shape[1] // 8
    return tile.reshape(4, 2, 8, count, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(-1, 4 * count)


def _places():
    """Of a thread's values, in its word."""
    return 31 - np.arange(32, dtype="int32")[None]


def _hidden_bits(seen, start):
    values = _own_values(~seen).astype("uint32")
    places = _places()[:, int(start) // 2 :][:, : values.shape[1]]
    bits = values << places.astype("uint32")
    return bits.sum(1, dtype="uint32").view("int32")


def _hide_signed(s, *words_and_start):
    *words, start = words_and_start

    def hidden(word):
        bits = word[:, None] >> _places() & 1
        return bits.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)

    columns = slice(int(start), int(start) + s.shape[1])
    found = np.concatenate([hidden(word) for word in words], 1)[:, columns]
    return np.where(found != 0, -np.inf, s)


def _hide_outside(s, *bounds_and_names):
    count = len(bounds_and_names) // 2
    bounds = dict(zip(bounds_and_names[count:], bounds_and_names[:count], strict=True))
    first, last = bounds.get("first", np.int32([-1])), bounds.get("last", np.int32([s.shape[1]]))
    inside = (_columns(s) >= first[:, None]) & (_columns(s) <= last[:, None])
    return np.where(inside, s, -np.inf)


def _by_warps(x):
    return x.reshape(-1, thread_ops.LANES)


def _sum_of_lanes_before(x):
    warps = _by_warps(x)
    return (np.cumsum(warps, 1, x.dtype) - warps).reshape(-1)


# A warpgroup is one thread here: its four warps share their answers.
INLINE: dict[str, Callable[..., Any]] = {
    "any_above": lambda tile, limit: np.any(tile > float(limit)).astype("int32"),
    "_any_from_two": lambda tile: np.any(~(np.abs(tile) < 2)).astype("int32"),
    "_any_infinite": lambda rows, _: np.any(~(rows < np.inf)).astype("int32"),
    "_pin": lambda _: None,
    "_name_module": lambda: None,
    "_open_mail": lambda *_: None,
    "_expect_mail": lambda *_: None,
    "reciprocal": np.reciprocal,
    "unfused": lambda x: x,
    "zeros": lambda *shape: np.zeros(tuple(map(int, shape)), "float32"),
    "_meet_warps": lambda: None,
    "_turn_sync": lambda _: None,
    "_turn_arrive": lambda _: None,
    "column_numbers": lambda start, count: start + np.arange(int(count), dtype="int32"),
    "_thread_numbers": lambda: np.arange(tma.THREADS, dtype="int32"),
    "_sum_of_lanes": lambda x: np.repeat(_by_warps(x).sum(1, x.dtype), thread_ops.LANES),
    "_sum_of_lanes_before": _sum_of_lanes_before,
    "negate_dropped": _negate_dropped,
    "hidden_bits": _hidden_bits,
    "hide_signed": _hide_signed,
    "hide_after": lambda s, last: np.where(_columns(s) <= last[:, None], s, -np.inf),
    "hide_before": lambda s, first: np.where(_columns(s) >= first[:, None], s, -np.inf),
    "hide_outside": _hide_outside,
}
