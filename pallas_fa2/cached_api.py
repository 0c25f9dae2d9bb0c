"""`cached_attention`: parses the call, plans it, and runs the backend's kernel on a cache."""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from pallas_fa2.api import as_run_time_data, naming_the_cure_of_forward_mode
from pallas_fa2.cached_autodiff import attention_on_cache
from pallas_fa2.caches import Cache, Packed, Pages
from pallas_fa2.device import device_of
from pallas_fa2.fallback import warn_of_equivalent_call, warn_of_fallback
from pallas_fa2.ir.cached_spec import requests_of
from pallas_fa2.masks import Causal, as_mask
from pallas_fa2.options import Implementation, MaskLike, Scores
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.planning.cached_plan import make_cached_plan
from pallas_fa2.scores import as_scores
from pallas_fa2.sinks import add_sinks

Query = Float[Array, "B T N H"] | Float[Array, "tokens N H"]
Out = Float[Array, "B T N Hv"] | Float[Array, "tokens N Hv"]
Lse = Float[Array, "B N T"] | Float[Array, "N tokens"]

CAUSAL = Causal()


class CachedOptions(TypedDict, total=False):
    """The options of `cached_attention` without `return_lse`, for annotations: `**options: Unpack[CachedOptions]`."""

    queries: Packed | None
    mask: MaskLike | None
    score: Scores | None
    scale: float | Float[Array, ""] | None
    sinks: Float[Array, " N"] | None
    q_positions: Int[Array, "B T"] | Int[Array, " tokens"] | None
    split_size: int | None
    implementation: Implementation | None


@overload
def cached_attention(
    query: Query, cache: Cache | Pages,
    *, return_lse: Literal[False] = False, **options: Unpack[CachedOptions],
) -> Out: ...  # fmt: skip
@overload
def cached_attention(
    query: Query, cache: Cache | Pages,
    *, return_lse: Literal[True], **options: Unpack[CachedOptions],
) -> tuple[Out, Lse]: ...  # fmt: skip
@overload
def cached_attention(
    query: Query, cache: Cache | Pages,
    *, return_lse: bool = ..., **options: Unpack[CachedOptions],
) -> Out | tuple[Out, Lse]: ...  # fmt: skip
def cached_attention(
    query: Query,
    cache: Cache | Pages,
    *,
    queries: Packed | None = None,
    mask: MaskLike | None = CAUSAL,
    score: Scores | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " N"] | None = None,
    q_positions: Int[Array, "B T"] | Int[Array, " tokens"] | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """Compute exact softmax attention of the last tokens of each sequence on all that its cache holds.

    Their own keys and values are in the cache already (`cache.append`). Masks and scores are those of
    `flash_attention`: `q.index` and `k.index` are positions in the sequence, never a slot or a page, `q.length` is T
    and `k.length` the capacity of a sequence. Keys from a sequence's length on do not exist, whatever the mask says;
    slots there may hold NaN. Lengths, tables and starts are run-time data: one program serves all of them.

    Args:
      query: `[B, T, N, H]` in the cache's dtype, the last T tokens of each sequence: query t is at position
        `length - T + t`. Where that is negative, the query is padding. On a cache of 8 bits it has any dtype that
        `flash_attention` takes.
      cache: a `Cache`, or `Pages` of a pool, with K heads of which N is a multiple. One of 8 bits stands for its
        numbers times their scales.
      queries: `Packed(starts)` where query is `[tokens, N, H]`, rows of several requests, such as decode steps, prompts
        and parts of prompts. Token data of queries are then `[tokens]`, of keys `[R, S]`, and `[*B]` is `[R]`. Rows of
        no request have output 0 and lse -inf.
      mask: as in `flash_attention`, causal by default; None for all keys of the sequence. Token data of keys are
        `[B, S]`, by position. `Tree` is the mask of drafted tokens.
      score, scale, sinks: as in `flash_attention`.
      q_positions: integers `[B, T]` (or `[tokens]`), any other positions of the queries, such as depths in a tree.
      split_size: split each sequence at multiples of so many keys, itself a multiple of 64, and nowhere else, so that
        the bits of a query's result do not depend on the other sequences of the batch, nor on which tokens are computed
        with it. Smaller sizes fill a GPU with fewer sequences, and have more results to merge. By default sequences are
        split into equal shares. Only kernels that read a cache have this.
      return_lse: also return the natural logsumexp of the scores, by which `merge` combines this with attention on
        other keys, such as a prefix that all sequences share.
      implementation: as in `flash_attention`. Backends without kernels that read a cache run the equivalent call of
        `flash_attention`, for which pages are gathered. On a GPU a `FallbackWarning` says once for each reason why no
        kernel reads the cache, and `"fused"` makes it an error.

    Returns:
      `[B, T, N, Hv]` (or `[tokens, N, Hv]`) in query's dtype; with `return_lse` also `[B, N, T]` (or `[N, tokens]`) in
      float32 (float64 for float64 inputs). A query that attends to no key has output 0 and lse -inf. Both are
      differentiable in query, the cache's key and value (unless these have 8 bits), sinks and score data, as those of
      `flash_attention` are.

    Raises:
      ValueError, TypeError: before anything is compiled; the message names the argument, the rule, the value and the
        remedy. Known lengths beyond the capacity, and known entries of a table out of range, are such errors. Traced
        ones are clamped: nothing outside of the cache is read.

    Example:
      >>> import jax.numpy as jnp, pallas_fa2 as fa
      >>> cache = fa.Cache.zeros(2, 64, kv_heads=4, head_dim=16, dtype=jnp.float32)
      >>> k = v = jnp.ones((2, 3, 4, 16))
      >>> fa.cached_attention(jnp.ones((2, 3, 8, 16)), cache.append(k, v)).shape
      (2, 3, 8, 16)
    """
    if isinstance(query, Tracer):
        mask, score = as_run_time_data((None if mask is None else as_mask(mask), as_scores(score)))
    spec, operands = parse_cached(
        query,
        cache,
        queries=queries,
        mask=mask,
        score=score,
        scale=scale,
        sinks=sinks,
        q_positions=q_positions,
        split_size=split_size,
    )
    query = jnp.asarray(query)
    device = device_of(query)
    plan = make_cached_plan(spec, device, implementation)
    if implementation is None:
        warn_of_fallback(spec.call, plan.implementation, plan.rejected, device)
        warn_of_equivalent_call(spec, plan, device)
    if spec.call.batch == 0:
        *batch, rows, heads, _ = query.shape
        out = jnp.zeros((*batch, rows, heads, spec.call.value_dim), spec.call.dtype)
        lse = jnp.full((*batch, heads, rows), -jnp.inf, spec.call.accumulator)
    else:
        key, value = jnp.asarray(cache.key), jnp.asarray(cache.value)
        if spec.quantized is not None:
            key, value = jax.lax.stop_gradient((key, value))
        with naming_the_cure_of_forward_mode(plan.implementation):
            out, lse = attention_on_cache(spec, plan, query, key, value, operands)
    if sinks is not None:
        out, lse = add_sinks(out, lse, jnp.asarray(sinks))
        if operands.starts is not None:
            unused = requests_of(operands.starts, query.shape[0]) == spec.call.batch
            lse = jnp.where(unused, -jnp.inf, lse)
    return (out, lse) if return_lse else out
