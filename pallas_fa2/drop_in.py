"""`jax.nn.dot_product_attention` by `flash_attention`."""

import functools
import operator
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pallas_fa2.api import flash_attention
from pallas_fa2.check_args import check_arrays, check_shapes
from pallas_fa2.ir.arrays import CallShape
from pallas_fa2.masks import Lengths, Mask, Window, as_mask
from pallas_fa2.options import (
    DropInOptions,
    Implementation,
    Key,
    MaskLike,
    Out,
    Query,
    Scores,
    Value,
)
from pallas_fa2.scores import as_scores
from pallas_fa2.scores import bias as add_bias

Bias = Float[Array, "..."]
Residual = Float[Array, "*B T N"]
SeqLengths = Int[Array, " B"]


@overload
def dot_product_attention(
    query: Query, key: Key, value: Value, bias: Bias | None = None, mask: MaskLike | None = None,
    *, return_residual: Literal[False] = False, **options: Unpack[DropInOptions],
) -> Out: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Query, key: Key, value: Value, bias: Bias | None = None, mask: MaskLike | None = None,
    *, return_residual: Literal[True], **options: Unpack[DropInOptions],
) -> tuple[Out, Residual]: ...  # fmt: skip
@overload
def dot_product_attention(
    query: Query, key: Key, value: Value, bias: Bias | None = None, mask: MaskLike | None = None,
    *, return_residual: bool = ..., **options: Unpack[DropInOptions],
) -> Out | tuple[Out, Residual]: ...  # fmt: skip
def dot_product_attention(
    query: Query,
    key: Key,
    value: Value,
    bias: Bias | None = None,
    mask: MaskLike | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    is_causal: bool = False,
    query_seq_lengths: SeqLengths | None = None,
    key_value_seq_lengths: SeqLengths | None = None,
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
    """Compute what `jax.nn.dot_product_attention` does, with its signature and our options after it.

    There are four differences. A query that attends to no key, or by the bias to none above -2^26, gets 0 and a
    residual of -inf (there, the mean of the values). The residual is differentiable. `implementation` takes our names
    (`"xla"` stands for `"reference"`; for cuDNN call `jax.nn` itself). The head dim of value may differ from that of
    key.

    Args:
      query: `[B, T, N, H]` or `[T, N, H]` (any number of batch axes works); dtypes are those of `flash_attention`.
      key: `[B, S, K, H]` or `[S, K, H]`, with N a multiple of K.
      value: `[B, S, K, Hv]` or `[S, K, Hv]`.
      bias: added to the scaled scores; broadcasts to `[B, N, T, S]` from the right, as everywhere in JAX: three
        axes are `[N, T, S]`. Its gradient has its shape.
      mask: boolean and broadcasting in the same way, or a mask object, or a function of two tokens.
      scale: the factor of q·k, `1 / sqrt(H)` by default.
      is_causal: whether query i attends to keys 0 to i alone (top-left alignment where T and S differ, unless
        `align="end"`).
      query_seq_lengths, key_value_seq_lengths: int32 `[B]`, the number of valid tokens of each row.
      local_window_size: `(left, right)` in keys, or one integer for both; -1 is unlimited.
      implementation: as in `flash_attention`.
      return_residual: also return the logsumexp.
      score, sinks, dropout_rate, dropout_rng, align, q_positions, kv_positions, deterministic_gradients: as in
        `flash_attention`; scores apply after the bias.

    Returns:
      `[B, T, N, Hv]` in query's dtype; with `return_residual` also the natural logsumexp, `[B, T, N]` in key's dtype.

    Raises:
      ValueError, TypeError: as `flash_attention`; also for lengths that are not int32 `[B]`, and for `"cudnn"`.
    """
    check_arrays(query, key, value)
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if implementation == "cudnn":
        raise ValueError(
            "implementation must be reference, blockwise, hopper, ampere, xla or None, but it is 'cudnn'; "
            "for cuDNN call jax.nn.dot_product_attention"
        )
    unbatched = query.ndim == 3  # then a batch of one: masks, biases and lengths may have its axis
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    dims = check_shapes(query, key, value)
    masks = [] if mask is None else [as_mask(_with_four_axes("mask", mask, dims))]
    if local_window_size is not None:
        is_int = isinstance(local_window_size, int | np.integer)
        left, right = (local_window_size,) * 2 if is_int else local_window_size
        masks.append(Window(left, right))
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        query_seq_lengths = _as_lengths("query_seq_lengths", query_seq_lengths, query)
        key_value_seq_lengths = _as_lengths("key_value_seq_lengths", key_value_seq_lengths, query)
        masks.append(Lengths(query_seq_lengths, key_value_seq_lengths))
    scores = ()
    if bias is not None:
        scores = (add_bias(_with_four_axes("bias", jnp.asarray(bias), dims)),)
    out, lse = flash_attention(
        query,
        key,
        value,
        mask=functools.reduce(operator.and_, masks) if masks else None,
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
    out, lse = (out[0], lse[0]) if unbatched else (out, lse)
    if return_residual:
        return out, jnp.swapaxes(lse, -1, -2).astype(key.dtype)
    return out


def _with_four_axes(name: str, array: Any, dims: CallShape) -> Any:
    """Return an array `[N, T, S]` as `[1, N, T, S]`, as arrays broadcast, and anything else as it is."""
    is_array = hasattr(array, "dtype") and not isinstance(array, Mask)
    if not is_array or array.ndim != 3:
        return array
    sizes = dims.kv_heads * dims.group, dims.q_len, dims.kv_len
    if any(a not in (1, b) for a, b in zip(array.shape, sizes, strict=True)):
        raise ValueError(
            f"{name} of three axes must have shape [N | 1, T | 1, S | 1] with N = {sizes[0]}, T = {sizes[1]}, "
            f"S = {sizes[2]}, but it has shape {array.shape}; for [B, T, S] write {name}[:, None]"
        )
    return array[None]  # pyright: ignore[reportIndexIssue]


def _as_lengths(name: str, lengths: Any, query: jax.Array) -> jax.Array | None:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.dtype != jnp.int32 or lengths.shape != query.shape[:-3]:
        raise ValueError(
            f"{name} must be int32 of shape {query.shape[:-3]}, one length for each batch row, but it is "
            f"{lengths.dtype} of shape {lengths.shape}"
        )
    return lengths
