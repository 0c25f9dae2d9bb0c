"""Parses the arguments of one call of `cached_attention` into a `CachedSpec` and its `CachedOperands`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.caches import Cache, Packed, Pages, as_int32, clamp_lengths, clamp_starts
from pallas_fa2.check_caches import check_cache, check_packed, is_known
from pallas_fa2.ir.arrays import K_AXIS, Q_AXIS
from pallas_fa2.ir.cached_spec import CachedOperands, CachedSpec
from pallas_fa2.ir.call_spec import Operands
from pallas_fa2.ir.quantized import Scales, is_quantized
from pallas_fa2.masks import as_mask
from pallas_fa2.masks.tree import MAX_TOKENS, Tree, with_context
from pallas_fa2.parse_call import parse_call

SPLIT_MULTIPLE = 64  # the keys of a block of the kernels that read a cache


def parse_cached(
    query: Any,
    cache: Any,
    *,
    queries: Any = None,
    mask: Any = None,
    score: Any = None,
    scale: Any = None,
    sinks: Any = None,
    q_positions: Any = None,
    split_size: Any = None,
) -> tuple[CachedSpec, CachedOperands]:
    """Check the arguments of `cached_attention` and describe the call; query may be a `jax.ShapeDtypeStruct`."""
    tokens, packed = _check_query(query, cache, queries)
    _check_query_fits(query, cache)
    _check_split_size(split_size)
    lengths = clamp_lengths(cache)
    if packed is None:
        context = lengths - tokens
        positions = context[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        request = None
    else:
        context = lengths - packed.counts()
        request, positions = packed.locate(lengths, tokens)
    # The equivalent contiguous call. Packed queries are a row that all requests share.
    batch, heads = lengths.shape[0], cache.key.shape[2]
    query_like = jax.ShapeDtypeStruct((batch, tokens, *query.shape[-2:]), query.dtype)
    quantized = cache.key.dtype.name if is_quantized(cache.key.dtype) else None
    key, value = (
        jax.ShapeDtypeStruct(
            (batch, cache.capacity, heads, x.shape[-1]), query.dtype if quantized else x.dtype
        )
        for x in (cache.key, cache.value)
    )
    mask = None if mask is None else with_context(as_mask(mask), context)
    _check_trees(mask, tokens, queries)
    call, operands = parse_call(
        query_like,
        key,
        value,
        mask=mask,
        score=score,
        scale=scale,
        sinks=sinks,
        q_positions=positions if q_positions is None else q_positions,
    )
    if request is not None:
        operands = _own_rows(operands, jnp.minimum(request, batch - 1))
    if packed is None:
        assert operands.q_index is not None
        q_index = jnp.broadcast_to(operands.q_index, (batch, 1, 1, tokens, 1))
        operands = operands._replace(q_index=q_index)
    page_size = None if isinstance(cache, Cache) else cache.page_size
    has_sequence_data = packed is not None and any(map(_is_of_sequences, jax.tree.leaves(operands)))
    spec = CachedSpec(
        call,
        page_size,
        is_packed=packed is not None,
        has_given_positions=q_positions is not None,
        has_sequence_data=has_sequence_data,
        split_size=split_size,
        quantized=quantized,
    )
    starts = None if packed is None else packed.starts
    scales = None
    if quantized:
        # no gradient, as keys and values have none
        scales = Scales(
            *map(jax.lax.stop_gradient, map(jnp.asarray, (cache.k_scale, cache.v_scale)))
        )
    # In no range yet: implementations clamp what they read, which takes no kernel of its own.
    given = as_int32(cache.lengths), None if isinstance(cache, Cache) else as_int32(cache.table)
    return spec, CachedOperands(given[0], operands, given[1], starts, scales)


def _check_query(query: Any, cache: Any, queries: Any) -> tuple[int, Packed | None]:
    """Return the number of query rows of a sequence, or of all packed ones, and these with starts in range."""
    if not isinstance(cache, Cache | Pages):
        raise TypeError(
            f"cache must be a pallas_fa2.Cache or pallas_fa2.Pages, but it is {type(cache).__name__}; for arrays of keys "
            "and values use flash_attention"
        )
    check_cache(cache)
    if not hasattr(query, "shape") or not hasattr(query, "dtype"):
        raise TypeError(
            f"query must be an array, but it is {type(query).__name__}; use jnp.asarray"
        )
    batch = cache.lengths.shape[0]
    if queries is None:
        if len(query.shape) != 4 or query.shape[0] != batch:
            raise ValueError(
                f"query must have shape [B, T, N, H] with the cache's B = {batch} sequences, but it has shape "
                f"{query.shape}; for one token a sequence add an axis, query[:, None]; rows of several requests in one "
                "array need queries=Packed(starts)"
            )
        return query.shape[1], None
    if len(query.shape) != 3:
        raise ValueError(
            f"query must have shape [tokens, N, H] where queries are packed, but it has shape {query.shape}; leave out "
            "its batch axis"
        )
    check_packed(queries, batch, query.shape[0])
    return query.shape[0], clamp_starts(queries, query.shape[0])


def _check_query_fits(query: Any, cache: Cache | Pages) -> None:
    """Raise a TypeError or ValueError unless heads `[..., N, H]` and the dtype of query are those of the cache."""
    heads, head_dim = cache.key.shape[2:]
    if query.shape[-1] != head_dim or (heads and query.shape[-2] % heads):
        raise ValueError(
            f"query must have shape [..., N, H] with a multiple of the cache's {heads} heads and its head dim {head_dim}, "
            f"but it has shape {query.shape}; make the cache with the kv_heads= and head_dim= of the model"
        )
    if not is_quantized(cache.key.dtype) and query.dtype != cache.key.dtype:
        raise TypeError(
            f"query's dtype must be the cache's, {cache.key.dtype}, but it is {query.dtype}; cast query, or make the cache "
            f"with dtype={query.dtype} (nothing is promoted silently)"
        )


def _check_split_size(size: Any) -> None:
    is_integer = isinstance(size, int) and not isinstance(size, bool)
    if size is not None and not (is_integer and size > 0 and size % SPLIT_MULTIPLE == 0):
        raise ValueError(
            f"split_size must be a positive multiple of {SPLIT_MULTIPLE} keys, or None, but it is {size!r}; try 2048"
        )


def _check_trees(mask: Any, tokens: int, packed: Packed | None) -> None:
    """Raise a ValueError if a tree is known to have more new tokens than a word has bits."""
    if not _has_tree(mask):
        return
    most = tokens
    if packed is not None:
        known = is_known(
            packed.starts
        )  # under `jit` too, where what is computed from them is traced
        most = int(np.max(np.diff(np.asarray(packed.starts)), initial=0)) if known else 0
    if most > MAX_TOKENS:
        raise ValueError(
            f"Tree must have at most {MAX_TOKENS} new tokens, the bits of a word, but there are {most}; use a mask_fn "
            "with pairs=, or a dense mask, for more"
        )


def _has_tree(mask: Any) -> bool:
    nodes = jax.tree.leaves(mask, is_leaf=lambda node: isinstance(node, Tree))
    return any(isinstance(node, Tree) for node in nodes)


def _is_of_sequences(x: jax.Array) -> bool:
    """Return whether an array has a value for each sequence, and none for each token."""
    return x.shape[0] > 1 and x.shape[Q_AXIS] == x.shape[K_AXIS] == 1


def _own_rows(operands: Operands, request: jax.Array) -> Operands:
    """Return the operands with data that vary by sequence and query as those of each query's own sequence."""
    row = jnp.arange(request.size, dtype=jnp.int32)

    def own(x: jax.Array) -> jax.Array:
        if x.shape[0] == 1 or x.shape[Q_AXIS] == 1:
            return x
        return jnp.moveaxis(x[request, :, :, row], 0, Q_AXIS - 1)[None]

    return jax.tree.map(own, operands)
