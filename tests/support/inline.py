"""What the library's inline code means, by its name: `ptx`, `fragments`, `pair_tile`, `lanes`, `listing`,
`module_name`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa2.kernels import dropout, lanes


def _columns(tile: jax.Array) -> jax.Array:
    return jnp.arange(tile.shape[1])[None]


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
STORED: dict[str, Callable[[jax.Array], jax.Array]] = {"_store_fragments": to_fragments}

# What is added to device memory from registers.
ADDED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "add_fragments": to_fragments,
    "_add_row_sums": lambda tile: tile.sum(1),
    "_add_column_sums": lambda tile: tile.sum(0),
}


def _negate_dropped(p, first, second, columns, key_axis, threshold, _):
    keys = dropout.RowKeys(*(x.astype("uint32")[:, None] for x in (first, second)))
    bits = dropout.bits(keys, columns[None])
    return jnp.where((bits if key_axis == "1" else bits.T) < int(threshold), -p, p)


def _own_values(tile):
    """`[threads, values]` of a tile of 64 rows, in the order of registers."""
    count = tile.shape[1] // 8
    return tile.reshape(4, 2, 8, count, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(-1, 4 * count)


def _places():
    """Of a thread's values, in its word."""
    return 31 - jnp.arange(32, dtype="int32")[None]


def _hidden_bits(seen, start):
    values = _own_values(~seen).astype("uint32")
    places = _places()[:, int(start) // 2 :][:, : values.shape[1]]
    bits = values << places.astype("uint32")
    return jax.lax.bitcast_convert_type(bits.sum(1, dtype="uint32"), jnp.int32)


def _hide_signed(s, *words_and_start):
    *words, start = words_and_start

    def hidden(word):
        bits = word[:, None] >> _places() & 1
        return bits.reshape(4, 8, 4, 8, 2, 2).transpose(0, 4, 1, 3, 2, 5).reshape(64, 64)

    columns = slice(int(start), int(start) + s.shape[1])
    found = jnp.concatenate([hidden(word) for word in words], 1)[:, columns]
    return jnp.where(found != 0, -jnp.inf, s)


def _hide_outside(s, *bounds_and_names):
    count = len(bounds_and_names) // 2
    bounds = dict(zip(bounds_and_names[count:], bounds_and_names[:count], strict=True))
    first, last = bounds.get("first", jnp.int32([-1])), bounds.get("last", jnp.int32([s.shape[1]]))
    inside = (_columns(s) >= first[:, None]) & (_columns(s) <= last[:, None])
    return jnp.where(inside, s, -jnp.inf)


def _by_warps(x):
    return x.reshape(-1, lanes.LANES)


def _sum_of_lanes_before(x):
    warps = _by_warps(x)
    return (jnp.cumsum(warps, 1) - warps).reshape(-1)


# A warpgroup is one thread here: its four warps share their answers.
INLINE: dict[str, Callable[..., Any]] = {
    "any_above": lambda tile, limit: jnp.any(tile > float(limit)).astype("int32"),
    "_any_from_two": lambda tile: jnp.any(~(jnp.abs(tile) < 2)).astype("int32"),
    "_any_infinite": lambda rows, _: jnp.any(~(rows < jnp.inf)).astype("int32"),
    "_pin": lambda _: None,
    "_name_module": lambda: None,
    "_open_mail": lambda *_: None,
    "_expect_mail": lambda *_: None,
    "reciprocal": jnp.reciprocal,
    "unfused": lambda x: x,
    "zeros": lambda *shape: jnp.zeros(tuple(map(int, shape)), "float32"),
    "_meet_warps": lambda: None,
    "_turn_sync": lambda _: None,
    "_turn_arrive": lambda _: None,
    "column_numbers": lambda start, count: start + jnp.arange(int(count), dtype="int32"),
    "_thread_numbers": lambda: jnp.arange(lanes.THREADS, dtype="int32"),
    "_sum_of_lanes": lambda x: jnp.repeat(_by_warps(x).sum(1), lanes.LANES),
    "_sum_of_lanes_before": _sum_of_lanes_before,
    "negate_dropped": _negate_dropped,
    "hidden_bits": _hidden_bits,
    "hide_signed": _hide_signed,
    "hide_after": lambda s, last: jnp.where(_columns(s) <= last[:, None], s, -jnp.inf),
    "hide_before": lambda s, first: jnp.where(_columns(s) >= first[:, None], s, -jnp.inf),
    "hide_outside": _hide_outside,
}
