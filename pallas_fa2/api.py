"""The public functions: canonical form, then plan, then kernel."""

import os
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_fa2.autodiff import attention
from pallas_fa2.backends.registry import FUSED
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir.arrays import as_array
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.masks import Lengths, Mask, Window, as_mask
from pallas_fa2.parse_call import as_sinks, check_arrays, parse_call
from pallas_fa2.planning.plan import Plan, make_plan
from pallas_fa2.scores import Score, as_scores
from pallas_fa2.scores import bias as add_bias

Implementation = Literal["reference", "blockwise", "hopper", "ampere", "fused"]
Scores = Score | Callable | tuple[Score | Callable, ...]


class _SharedOptions(TypedDict, total=False):
    """What both functions take by keyword, and mean alike."""

    is_causal: bool
    score: Scores | None
    scale: float | Float[Array, ""] | None
    sinks: Float[Array, " N"] | None
    dropout_rate: float
    dropout_rng: PRNGKeyArray | None
    align: Literal["start", "end"]
    q_positions: Int[Array, "*B T"] | None
    kv_positions: Int[Array, "*B S"] | None
    deterministic_gradients: bool


class Options(_SharedOptions, total=False):
    """The options of `flash_attention` but `return_lse`, for annotations: `**options: Unpack[Options]`."""

    mask: Mask | Callable | Bool[Array, "..."] | None
    implementation: Implementation | None


class FallbackWarning(UserWarning):
    """A call on a GPU runs on XLA's operations, because no fused kernel serves it."""


_warned: set[str] = set()


def _warn_of_fallback(spec: CallSpec, plan: Plan, device: Device) -> None:
    """Once for each reason; as an error, each time."""
    if device.platform != "gpu" or plan.implementation in FUSED or not plan.rejected:
        return
    reason = plan.rejected[0][1]
    if reason in _warned:
        return
    cure = (
        "cast query, key and value to bfloat16 (a Flax layer does with dtype=jnp.bfloat16)"
        if spec.dtype.itemsize > 2 and device.is_sm90
        else "see explain(...) and the table in README"
    )
    warnings.warn(
        f"no fused kernel serves this call, which runs on {plan.implementation}, slower: {reason} ({spec}). To mend "
        f"it, {cure}; implementation={plan.implementation!r} asks for it without this warning, "
        "implementation='fused' makes it an error",
        FallbackWarning,
        skip_file_prefixes=(os.path.dirname(__file__),),
    )
    _warned.add(reason)


Out = Float[Array, "*B T N Hv"]


@overload
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Out: ...


@overload
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Out, Float[Array, "*B N T"]]: ...


@overload
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    return_lse: bool = ...,
    **options: Unpack[Options],
) -> Out | tuple[Out, Float[Array, "*B N T"]]: ...


def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    mask: Mask | Callable | Bool[Array, "..."] | None = None,
    is_causal: bool = False,
    score: Scores | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    align: Literal["start", "end"] = "start",
    q_positions: Int[Array, "*B T"] | None = None,
    kv_positions: Int[Array, "*B S"] | None = None,
    return_lse: bool = False,
    deterministic_gradients: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    r"""Exact softmax attention in memory that grows with the length, not with its square.

    For each head, with the score functions $f$ and the mask $M$,

    $$O_i = \sum_j P_{ij} V_j, \quad P_{ij} = e^{S_{ij} - L_i}, \quad
      S_{ij} = f(\mathrm{scale}\; q_i \cdot k_j), \quad L_i = \log \sum_{j \in M_i} e^{S_{ij}}.$$

    FlashAttention-2 (arXiv:2307.08691), Algorithms 1 and 2. Differentiable in query, key, value, sinks
    and the floating-point data of the score functions, in reverse mode; for `jax.jvp`, `jax.jacfwd`
    and `jax.hessian` ask for `implementation="reference"` (the others raise a TypeError). Under
    `jax.checkpoint` the policy `save_only_these_names("attention_out", "attention_lse")` keeps the forward from
    running twice.

    Args:
      query: `[*B, T, N, H]`, bfloat16, float16, float32 or float64; any number of batch axes.
      key: `[*B, S, K, H]`, with N a multiple of K: query head n reads key head `n // (N // K)`.
      value: `[*B, S, K, Hv]`; Hv may differ from H.
      mask: a mask object, such as `Causal() & Window(1024)`, a function of two tokens, or a boolean
        array that broadcasts to `[*B, N, T, S]`, True where a query attends to a key (of keys alone
        it is `[*B, 1, 1, S]`, for all heads `[*B, 1, T, S]`). A query that sees no key gets output 0,
        lse -inf and no gradient.
      is_causal: whether queries see no later keys: `Causal()` joined to the mask.
      score: a score function or a tuple of them, applied in order to the scaled scores in float32. Where
        all of a query's are below -2^26, as additive masks leave them, it sees no key.
      scale: a real number; `1 / sqrt(H)` by default. One that is traced is run-time data, and a score function
        to the kernels: pass a Python number where it is known.
      sinks: a logit for each query head, to which a query attends as well, and which has no value
        (gpt-oss, arXiv:2508.10925): $L_i = \log (e^{sink} + \sum_j e^{S_{ij}})$.
      dropout_rate: the share of probabilities that are dropped, in [0, 1), rounded to a multiple of
        2^-16. Which ones follows from the key, the batch entry, the head and both positions alone.
      dropout_rng: one PRNG key; needed where `dropout_rate` is not 0.
      align: where the queries lie among the keys: `"start"`, query 0 at key 0 (as in `jax.nn`), or `"end"`, the
        last query at the last key (as in FlashAttention, for decoding and prefill against a longer cache): then
        query i is at S - T + i. Masks, scores and dropout see it as `q.index`.
      q_positions, kv_positions: any other positions, what masks and scores see as `q.index` and `k.index`.
      return_lse: also return the natural logsumexp of the scores.
      deterministic_gradients: whether gradients must be bitwise the same in every run. Otherwise the Hopper
        kernels sum query's, and those of score functions' data, in any order.
      implementation: ask for one implementation, or for `"fused"`, any that is a kernel of ours; an error says
        why if it cannot run. By default the fastest that supports the call (see `explain`); on a GPU a
        `FallbackWarning` says once for each reason that none is fused.

    Returns:
      `[*B, T, N, Hv]` in query's dtype; with `return_lse` also `[*B, N, T]` in float32 (float64 for
      float64 inputs), itself differentiable.

    Raises:
      ValueError, TypeError: before anything is compiled; the message names the argument, the rule,
        the value and the cure.

    Example:
      >>> import jax, pallas_fa2 as fa
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
      >>> fa.flash_attention(q, k, v, mask=fa.Causal()).shape
      (2, 128, 8, 64)
    """
    check_arrays(query, key, value)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if isinstance(query, Tracer):
        mask, score = _as_run_time_data((None if mask is None else as_mask(mask), as_scores(score)))
    spec, operands = parse_call(
        query,
        key,
        value,
        mask=mask,
        score=score,
        scale=scale,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        align=align,
        q_positions=q_positions,
        kv_positions=kv_positions,
        is_causal=is_causal,
        deterministic_gradients=deterministic_gradients,
    )
    sinks = None if sinks is None else as_sinks(sinks, spec.q_heads)
    device = device_of(query)
    plan = make_plan(spec, device, implementation)
    if implementation is None:
        _warn_of_fallback(spec, plan, device)
    if spec.batch == 0:
        out = jnp.zeros((*query.shape[:-1], spec.value_dim), spec.dtype)
        lse = jnp.zeros((*query.shape[:-3], spec.q_heads, spec.q_len), spec.accumulator)
    else:
        try:
            out, lse = attention(spec, plan, query, key, value, operands)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            raise TypeError(
                f"implementation {plan.implementation!r} has no forward-mode autodiff (jax.jvp, jax.jacfwd, "
                "jax.hessian); ask for implementation='reference'"
            ) from error
    if sinks is not None:
        out, lse = _with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _as_run_time_data(tree: Any) -> Any:
    """The same masks and scores, their arrays that are constants of the traced program hidden from XLA.

    It would fold what is computed of them while it compiles: 30 s for a dense mask of 1024 x 1024. An array that
    occurs twice stays one.
    """
    hidden: dict[int, Any] = {}

    def hide(x: Any) -> Any:
        if isinstance(x, Tracer) or not isinstance(x, jax.Array | np.ndarray) or x.size == 1:
            return x
        if id(x) not in hidden:
            hidden[id(x)] = lax.optimization_barrier(as_array("data of a mask or score", x))
        return hidden[id(x)]

    return jax.tree.map(hide, tree)


def _with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One more logit in each row's sum: what was all of a row's probability is now a part of it."""
    sinks = sinks.astype(lse.dtype).reshape(*[1] * (lse.ndim - 2), -1, 1)
    sinks = jnp.broadcast_to(sinks, lse.shape)
    empty = lse == -jnp.inf
    nothing = empty & (sinks == -jnp.inf)  # logaddexp's gradient is NaN there
    total = jnp.logaddexp(jnp.where(nothing, 0.0, lse), sinks)
    total = jnp.where(nothing, -jnp.inf, total)
    share = jnp.where(empty, 0.0, jnp.exp(jnp.where(empty, 0.0, lse - total)))
    share = jnp.moveaxis(share, -1, -2)[..., None]
    return (out.astype(lse.dtype) * share).astype(out.dtype), total


class DropInOptions(_SharedOptions, total=False):
    """Those of `dot_product_attention` by keyword, but `return_residual`."""

    query_seq_lengths: Int[Array, " B"] | None
    key_value_seq_lengths: Int[Array, " B"] | None
    local_window_size: int | tuple[int, int] | None
    implementation: Implementation | Literal["xla"] | None


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | Callable | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[DropInOptions],
) -> Out: ...


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | Callable | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[DropInOptions],
) -> tuple[Out, Float[Array, "*B T N"]]: ...


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | Callable | None = None,
    *,
    return_residual: bool = ...,
    **options: Unpack[DropInOptions],
) -> Out | tuple[Out, Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | Callable | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | Literal["xla"] | None = None,
    return_residual: bool = False,
    score: Scores | None = None,
    sinks: Float[Array, " N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: PRNGKeyArray | None = None,
    align: Literal["start", "end"] = "start",
    q_positions: Int[Array, "*B T"] | None = None,
    kv_positions: Int[Array, "*B S"] | None = None,
    deterministic_gradients: bool = False,
) -> Any:
    """`jax.nn.dot_product_attention`, with its signature and meaning, and our options after it.

    The differences: a query that sees no key, or by the bias none above -2^26, gets 0 (there, the mean of
    the values) and a residual of -inf; the residual is differentiable; `implementation` takes our names (`"xla"` stands for
    `"reference"`, and for cuDNN call `jax.nn` itself); value's head dim may differ from key's.

    Args:
      query, key, value: `[B, T, N, H]`, `[B, S, K, H]`, `[B, S, K, Hv]`, or without B (any number
        of batch axes works).
      bias: added to the scaled scores; broadcasts to `[B, N, T, S]` from the right, as everywhere in JAX: three
        axes are `[N, T, S]`. Its gradient has its shape.
      mask: boolean and broadcasting in the same way, or a mask object.
      scale: `1 / sqrt(H)` by default.
      is_causal: query i sees keys 0 .. i (top-left alignment where T and S differ, unless `align="end"`).
      query_seq_lengths, key_value_seq_lengths: int32 `[B]`, the valid tokens of each row.
      local_window_size: `(left, right)`, or one integer for both; -1 is unlimited.
      implementation: as in `flash_attention`.
      return_residual: also return the logsumexp, `[B, T, N]` in key's dtype.
      score, sinks, dropout_rate, dropout_rng, align, q_positions, kv_positions, deterministic_gradients: as in
        `flash_attention`; scores apply after the bias.

    Returns:
      `[B, T, N, Hv]`, or a pair with the residual.
    """
    check_arrays(query, key, value)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if implementation == "cudnn":
        raise ValueError(
            "implementation must be reference, blockwise, hopper, xla or None, but it is 'cudnn'; "
            "for cuDNN call jax.nn.dot_product_attention"
        )
    alone = query.ndim == 3  # a batch of one, so that masks, biases and lengths may have its axis
    if alone:
        query, key, value = query[None], key[None], value[None]
    query_seq_lengths, key_value_seq_lengths = (
        None if n is None else jnp.asarray(n) for n in (query_seq_lengths, key_value_seq_lengths)
    )
    masks = [] if mask is None else [as_mask(_with_four_axes(mask))]
    if local_window_size is not None:
        left, right = (
            (local_window_size, local_window_size)
            if isinstance(local_window_size, int | np.integer)
            else local_window_size
        )
        masks.append(Window(left, right))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        _check_lengths("query_seq_lengths", query_seq_lengths, query)
        _check_lengths("key_value_seq_lengths", key_value_seq_lengths, query)
        masks.append(Lengths(query_seq_lengths, key_value_seq_lengths))
    both = None
    for m in masks:
        both = m if both is None else both & m
    scores = () if bias is None else (add_bias(_with_four_axes(jnp.asarray(bias))),)
    out, lse = flash_attention(
        query,
        key,
        value,
        mask=both,
        is_causal=is_causal,
        score=scores + as_scores(score),
        scale=scale,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        align=align,
        q_positions=q_positions,
        kv_positions=kv_positions,
        deterministic_gradients=deterministic_gradients,
        return_lse=True,
        implementation="reference" if implementation == "xla" else implementation,
    )
    out, lse = (out[0], lse[0]) if alone else (out, lse)
    if return_residual:
        return out, jnp.swapaxes(lse, -1, -2).astype(key.dtype)
    return out


def _with_four_axes(array: Any) -> Any:
    """An array of three axes is [N, T, S], as arrays broadcast; others, and what is no array, as they are."""
    is_array = hasattr(array, "dtype") and not isinstance(array, Mask)
    return array[None] if is_array and array.ndim == 3 else array  # pyright: ignore[reportIndexIssue]


def _check_lengths(name: str, lengths: Any, query: jax.Array) -> None:
    if lengths is None:
        return
    if lengths.dtype != jnp.int32 or lengths.shape != query.shape[:-3]:
        raise ValueError(
            f"{name} must be int32 of shape {query.shape[:-3]}, one length a batch row, but it is "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
