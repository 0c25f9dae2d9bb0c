"""Checks of caches and packed queries: shapes and dtypes always, lengths, tables and starts where they are known."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer

from pallas_fa2.ir.quantized import LARGEST, SCALE_DTYPE, is_quantized

# What the arguments of an empty cache count.
SIZES = {
    "batch": "sequences",
    "num_pages": "pages of the pool",
    "page_size": "tokens of a page",
    "capacity": "tokens that a sequence may have",
    "kv_heads": "key heads",
    "head_dim": "elements of a key",
    "value_dim": "elements of a value, or None for those of a key",
}


def check_sizes(function: str, sizes: dict[str, tuple[Any, int]], dtype: Any) -> None:
    """Raise a TypeError or ValueError unless `function` can make a cache of such `sizes`, with the least of each, and
    dtype."""
    for name, (size, least) in sizes.items():
        if export.is_symbolic_dim(size):
            continue
        is_integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_integer or size < least:
            more = ", and jax.vmap for more batch axes" if isinstance(size, tuple | list) else ""
            raise (ValueError if is_integer else TypeError)(
                f"{function}: {name} must be an integer of at least {least}, a size of arrays, but it is {size!r}; pass the "
                f"number of {SIZES[name]}{more}"
            )
    kinds = f"a float of 16 bits or more, or {' or '.join(LARGEST)} with scales"
    try:
        # NumPy takes None for float64.
        known = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not (
        known.name in LARGEST or (jnp.issubdtype(known, jnp.floating) and known.itemsize >= 2)
    ):
        raise TypeError(
            f"{function}: dtype must be {kinds}, but it is {repr(dtype) if known is None else known.name}; pass the dtype "
            "of the keys and values, or leave it out for bfloat16"
        )


def check_cache(cache: Any) -> None:
    """Raise a TypeError or ValueError unless the arrays of a `Cache` or of `Pages` fit each other and the pool."""
    name, is_paged = type(cache).__name__, hasattr(cache, "table")
    letters = "P, page" if is_paged else "B, S"
    for field, axes in (("key", f"[{letters}, K, H]"), ("value", f"[{letters}, K, Hv]")):
        x = getattr(cache, field)
        if not hasattr(x, "shape") or len(x.shape) != 4:
            raise ValueError(
                f"{name}.{field} must be an array of shape {axes}, but it is {_short(x)}; a cache has one batch axis, "
                "for more use jax.vmap"
            )
    if cache.key.shape[:3] != cache.value.shape[:3]:
        raise ValueError(
            f"{name}.key and {name}.value must have the same axes [{letters}, K], but they have "
            f"{cache.key.shape[:3]} and {cache.value.shape[:3]}; make both for the same tokens and heads"
        )
    _check_scales(cache, name, "[P, K, page]" if is_paged else "[B, K, S]")
    if is_paged:
        _check_integers(f"{name}.table", cache.table, ("B", "W"))
    _check_integers(f"{name}.lengths", cache.lengths, ("B",))
    batch = cache.table.shape[0] if is_paged else cache.key.shape[0]
    if cache.lengths.shape[0] != batch:
        raise ValueError(
            f"{name}.lengths must have a length for each of {batch} sequences, but it has shape "
            f"{cache.lengths.shape}; give one for each, 0 where a sequence is empty"
        )
    if is_known(cache.lengths):
        lengths = np.asarray(cache.lengths)
        if np.any((lengths < 0) | (lengths > cache.capacity)):
            raise ValueError(
                f"{name}.lengths must be 0 to the capacity of a sequence, {cache.capacity}, but they are {lengths}; "
                "make a larger cache, or cut the sequences"
            )
        if is_paged:
            check_table(cache, np.zeros_like(lengths), lengths)


def _check_scales(cache: Any, name: str, axes: str) -> None:
    """Raise a TypeError or ValueError unless a cache of 8 bits has scales, and any other none."""
    dtypes = cache.key.dtype, cache.value.dtype
    has_scales = is_quantized(dtypes[0])
    if has_scales and dtypes[0] != dtypes[1]:
        raise TypeError(
            f"{name}.key and {name}.value must have one dtype where they have 8 bits, but they have {dtypes[0]} and "
            f"{dtypes[1]}; append floats to a cache of one dtype"
        )
    if not has_scales and any(
        not jnp.issubdtype(x, jnp.floating) or x.itemsize < 2 for x in dtypes
    ):
        raise TypeError(
            f"{name}.key and {name}.value must be floats of 16 bits or more, or both {' or '.join(LARGEST)} with scales, "
            f"but they are {dtypes[0]} and {dtypes[1]}; cast them"
        )
    for field in ("k_scale", "v_scale"):
        scale = getattr(cache, field)
        if not has_scales:
            if scale is not None:
                raise ValueError(
                    f"{name}.{field} must be None where key and value have {dtypes[0].itemsize * 8} bits, but it is "
                    f"{_short(scale)}; multiply by it, or cast to 8 bits"
                )
            continue
        outer, tokens, heads = cache.key.shape[:3]
        expected = outer, heads, tokens
        if (
            not hasattr(scale, "shape")
            or tuple(scale.shape) != expected
            or scale.dtype != SCALE_DTYPE
        ):
            raise ValueError(
                f"{name}.{field} must be {jnp.dtype(SCALE_DTYPE).name}{list(expected)}, a scale for each token and head "
                f"{axes} of a cache of 8 bits, but it is {_short(scale)}; make an empty cache and append to it, or cast "
                "or transpose the scales"
            )


def check_table(cache: Any, begins: np.ndarray, ends: np.ndarray) -> None:
    """Raise a ValueError unless a known table has pages of the pool for the tokens `begins` to `ends - 1`, `[B]`."""
    if not is_known(cache.table):
        return
    table, num_pages = np.asarray(cache.table), cache.key.shape[0]
    column = np.arange(table.shape[1]) * cache.page_size
    needed = (column + cache.page_size > begins[:, None]) & (column < ends[:, None])
    wrong = needed & ((table < 0) | (table >= num_pages))
    if wrong.any():
        sequence, entry = np.argwhere(wrong)[0]
        raise ValueError(
            f"Pages.table must name pages of the pool, 0 to {num_pages - 1}, for all tokens, but entry {entry} of sequence "
            f"{sequence} is {table[sequence, entry]}; give the sequence another page before its tokens need it"
        )


def _check_written_pages(cache: Any, begins: np.ndarray, ends: np.ndarray) -> None:
    """Raise a ValueError if tokens `begins` to `ends - 1`, `[B]`, go where a known table has tokens of another
    sequence."""
    if not is_known(cache.table):
        return
    table, page = np.asarray(cache.table), cache.page_size
    column = np.arange(table.shape[1]) * page
    # Of each entry the first slot that is written, and how many have tokens then.
    first, used = (np.clip(x[:, None] - column, 0, page) for x in (begins, ends))
    is_written = first < used
    pages, counts = np.unique(
        table[(used > 0) & np.isin(table, table[is_written])], return_counts=True
    )
    for shared in pages[counts > 1]:
        entries = np.argwhere((table == shared) & (used > 0))
        for a, b in itertools.permutations(map(tuple, entries), 2):
            if is_written[a] and first[a] < used[b]:
                owners = (
                    f"sequences {a[0]} and {b[0]}" if a[0] != b[0] else f"sequence {a[0]} twice"
                )
                raise ValueError(
                    f"append: Pages.table names page {shared} for {owners}, and a token of sequence {a[0]} would be written to "
                    f"slot {first[a]} of it, where the other has one too: one would be lost; copy the page to one of its own "
                    f"for sequence {a[0]}"
                )


def check_packed(queries: Any, batch: int, tokens: int) -> None:
    """Raise a TypeError or ValueError unless the starts are those of `batch` requests in `tokens` rows."""
    if not hasattr(queries, "starts"):
        raise TypeError(
            f"queries must be pallas_fa2.Packed(starts) or None, but it is {_short(queries)}; wrap the starts"
        )
    _check_integers("Packed.starts", queries.starts, ("R + 1",))
    if batch == 0:
        raise ValueError(
            "queries must be left out where the cache has no sequence, and so no request; leave out the call"
        )
    if queries.starts.shape[0] != batch + 1:
        raise ValueError(
            f"Packed.starts must have shape [R + 1] = [{batch + 1}], a request for each of the cache's {batch} "
            f"sequences, but it has shape {queries.starts.shape}; repeat the last start for requests without tokens"
        )
    if is_known(queries.starts):
        starts = np.asarray(queries.starts)
        if starts[0] != 0 or np.any(np.diff(starts) < 0) or starts[-1] > tokens:
            raise ValueError(
                f"Packed.starts must begin with 0, not fall, and end at most at the number of rows, {tokens}, but they "
                f"are {starts}; they are the sums of the requests' numbers of tokens"
            )


def check_append(cache: Any, key: Any, value: Any, new: Any, queries: Any) -> None:
    """Raise a TypeError or ValueError unless the new tokens fit the cache."""
    check_cache(cache)
    if np.iinfo(cache.lengths.dtype).max < cache.capacity:
        raise TypeError(
            f"append: lengths' dtype must hold the capacity of a sequence, {cache.capacity}, but it is "
            f"{cache.lengths.dtype}, in which they would wrap around; use int32"
        )
    batch, axes = cache.lengths.shape[0], "[B, T, K, H]" if queries is None else "[tokens, K, H]"
    for name, x, cached in (("key", key, cache.key), ("value", value, cache.value)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"append: {name} must be an array, but it is {type(x).__name__}; use jnp.asarray"
            )
        heads = tuple(cached.shape[2:])
        fits = len(x.shape) == (4 if queries is None else 3) and tuple(x.shape[-2:]) == heads
        if not fits or (queries is None and x.shape[0] != batch):
            packed = "" if queries is None else " for packed queries"
            raise ValueError(
                f"append: {name} must have shape {axes}{packed} with the cache's {batch} sequences and heads {heads}, but "
                f"it has shape {x.shape}; for one token a sequence add an axis, {name}[:, None]"
            )
        if is_quantized(cached.dtype):
            if x.dtype.name not in ("bfloat16", "float16", "float32"):
                raise TypeError(
                    f"append: {name} must be bfloat16, float16 or float32 for a cache of 8 bits, which gets a scale for "
                    f"each token and head, but it is {x.dtype}; pass the tokens as they were before"
                )
        elif x.dtype != cached.dtype:
            raise TypeError(
                f"append: {name}'s dtype must be the cache's, {cached.dtype}, but it is {x.dtype}; cast it (nothing is "
                "rounded silently)"
            )
    if key.shape[:-2] != value.shape[:-2]:
        raise ValueError(
            f"append: key and value must have the same tokens, but they have {key.shape[:-2]} and {value.shape[:-2]}; "
            "cut or pad one"
        )
    if queries is not None:
        if new is not None:
            raise ValueError(
                "append: new must be left out where queries are packed, whose starts say how many tokens each request "
                "has; leave one of them out"
            )
        check_packed(queries, batch, key.shape[0])
        new = np.diff(np.asarray(queries.starts)) if is_known(queries.starts) else None
    elif new is None:
        new = np.full(batch, key.shape[1])
    else:
        new = _check_new(new, batch, key.shape[1])
    if new is not None and is_known(cache.lengths):
        lengths = np.asarray(cache.lengths)
        if np.any(lengths + new > cache.capacity):
            raise ValueError(
                f"append: sequences may have at most {cache.capacity} tokens, the cache's capacity, but would have "
                f"{lengths + new}; make a larger cache, or drop the sequences that are done"
            )
        if hasattr(cache, "table"):
            check_table(cache, lengths, lengths + new)
            _check_written_pages(cache, lengths, lengths + new)


def _check_new(new: Any, batch: int, tokens: int) -> np.ndarray | None:
    """Return the known numbers of new tokens, or None where they are traced."""
    _check_integers("append: new", new, ("B",))
    if new.shape != (batch,):
        raise ValueError(
            f"append: new must have shape [B] = [{batch}], but it has shape {new.shape}; broadcast it"
        )
    if not is_known(new):
        return None
    new = np.asarray(new)
    if np.any((new < 0) | (new > tokens)):
        raise ValueError(
            f"append: new must be 0 to T = {tokens}, the tokens that are given, but they are {new}; pass more tokens"
        )
    return new


def is_known(x: Any) -> bool:
    """Return whether the values of an array can be read here: it is neither traced nor on other hosts."""
    if isinstance(x, Tracer | jax.ShapeDtypeStruct):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _check_integers(name: str, x: Any, axes: tuple[str, ...]) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(
            f"{name} must be an array of integers, but it is {_short(x)}; use jnp.asarray"
        )
    if not jnp.issubdtype(x.dtype, jnp.integer) or len(x.shape) != len(axes):
        raise ValueError(
            f"{name} must be integers of shape [{', '.join(axes)}], but it has shape {x.shape} and dtype {x.dtype}; "
            "cast or reshape it"
        )


def _short(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else type(x).__name__
