"""Checks the arguments of one call and describes it as a `CallSpec` and `Operands`."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Hashable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from pallas_fa2.ir.affine import causal_offset
from pallas_fa2.ir.arrays import (
    K_AXIS,
    NUM_LEADING_AXES,
    Q_AXIS,
    CallShape,
    as_array,
    check_align,
    default_positions,
    normalize_tokens,
)
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.trace import TracedFn, trace
from pallas_fa2.masks import Causal, Mask, as_mask
from pallas_fa2.scores import Score, as_scores

DTYPES = ("bfloat16", "float16", "float32", "float64")


def parse_call(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    score: Any = None,
    scale: Any = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    align: str = "start",
    q_positions: Any = None,
    kv_positions: Any = None,
    is_causal: bool = False,
    deterministic_gradients: bool = False,
) -> tuple[CallSpec, Operands]:
    """Checks one call and describes it; arrays may be `jax.ShapeDtypeStruct`s."""
    check_arrays(query, key, value)
    dims = check_shapes(query, key, value)
    dtype = check_dtypes(query, key, value)
    scale, learned = _check_scale(scale, query.shape[-1])
    seed = _check_dropout(dropout_rate, dropout_rng)
    _check_flag("is_causal", is_causal, "for a mask of run-time data use mask=")
    _check_flag(
        "deterministic_gradients",
        deterministic_gradients,
        "it chooses the backward when a call is traced",
    )
    first_position = check_align(align, dims)
    if align != "start" and q_positions is not None:
        raise ValueError(
            f"align (= {align!r}) must be left out where q_positions are given, which say where each query "
            "lies; leave one of them out"
        )
    q_index = _check_positions("q_positions", q_positions, dims, Q_AXIS)
    k_index = _check_positions("kv_positions", kv_positions, dims, K_AXIS)
    mask_object = None if mask is None else as_mask(mask)
    if is_causal:
        mask_object = Causal() if mask_object is None else mask_object & Causal()
    scores = (*learned, *as_scores(score))
    positions = q_index is not None or k_index is not None or not isinstance(first_position, int)
    if positions:  # one side given: the other counts from 0
        if q_index is None:
            q_index = default_positions(dims.q_len, Q_AXIS) + jnp.asarray(first_position, jnp.int32)
            first_position = 0
        k_index = default_positions(dims.kv_len, K_AXIS) if k_index is None else k_index

    mask_data = None if mask_object is None else mask_object.place(dims)
    score_data = tuple(s.place(dims) for s in scores)
    spec = CallSpec(
        batch=math.prod(dims.batch),
        q_len=dims.q_len,
        kv_len=dims.kv_len,
        q_heads=query.shape[-2],
        kv_heads=key.shape[-2],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        dtype=dtype,
        scale=scale,
        has_explicit_positions=positions,
        dropout_rate=float(dropout_rate),
        deterministic=bool(deterministic_gradients),
        first_position=first_position if dropout_rate else 0,  # else it is in the code alone
    )
    accumulator = spec.accumulator
    code = None
    if mask_object is not None:
        code = _trace_mask(mask_object, mask_data, dims, first_position)
    spec = dataclasses.replace(
        spec,
        mask=code,
        mask_varies_by_head=any(x.shape[1:3] != (1, 1) for x in jax.tree.leaves(mask_data)),
        causal=None if code is None or positions else _causal(code, dims),
        scores=tuple(
            _trace_score(s, data, dims, first_position, accumulator)
            for s, data in zip(scores, score_data, strict=True)
        ),
    )
    return spec, Operands(mask_data, score_data, q_index, k_index, seed)


def _causal(mask: TracedFn, dims: CallShape) -> Literal["start", "end"] | None:
    """How it is aligned, if it is a causal one."""
    shift = causal_offset(mask)
    if shift == 0:
        return "start"
    return "end" if shift == dims.kv_len - dims.q_len else None


def check_arrays(query: Any, key: Any, value: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"{name} must be an array, but it is {type(x).__name__}; use jnp.asarray"
            )


def check_shapes(query: Any, key: Any, value: Any) -> CallShape:
    """The dimensions of one call; an error names a layout `[*B, N, T, H]` if that would fit."""
    shapes = query.shape, key.shape, value.shape
    try:
        return _dims(*shapes)
    except ValueError as error:
        known = all(len(x) >= 3 and all(isinstance(n, int) for n in x) for x in shapes)
        if not known or key.shape[-3] >= key.shape[-2]:
            raise  # the other layout would have more heads than keys, or sizes that cannot be compared
        swapped = [(*x[:-3], x[-2], x[-3], x[-1]) for x in shapes]
        try:
            _dims(*swapped)
        except ValueError:
            raise error from None
        raise ValueError(
            f"{error} (as [*B, N, T, H] the shapes {', '.join(map(str, shapes))} would fit: heads are the axis before "
            "the last here; if they are yours' third from the end, pass jnp.swapaxes(x, -3, -2))"
        ) from None


def _dims(q: tuple, k: tuple, v: tuple) -> CallShape:
    for name, x, letters in (
        ("query", q, "[*B, T, N, H]"),
        ("key", k, "[*B, S, K, H]"),
        ("value", v, "[*B, S, K, Hv]"),
    ):
        if len(x) < 3:
            raise ValueError(
                f"{name} must have shape {letters}, at least three axes, but it has shape "
                f"{x}; add the missing axes, e.g. {name}[None]"
            )
    for name, x in (("key", k), ("value", v)):
        if x[:-3] != q[:-3]:
            raise ValueError(
                f"{name} must have query's batch axes {q[:-3]}, but it has {x[:-3]} (query has "
                f"shape {q}, {name} {x}); broadcast them or use jax.vmap"
            )
    if k[-3] != v[-3]:
        raise ValueError(
            f"key and value must have one length S, but have {k[-3]} and {v[-3]}; cut or pad one"
        )
    if k[-2] != v[-2]:
        raise ValueError(
            f"key and value must have one number of heads K, but have {k[-2]} and {v[-2]}; "
            "repeat the smaller one's heads"
        )
    if q[-1] != k[-1]:
        raise ValueError(
            f"query and key must have one head dim H, but have {q[-1]} and {k[-1]}; "
            "project both to one size"
        )
    for name, size in (
        ("T (query's axis -3)", q[-3]),
        ("S (key's axis -3)", k[-3]),
        ("N (query's axis -2)", q[-2]),
        ("K (key's axis -2)", k[-2]),
        ("H (query's axis -1)", q[-1]),
        ("Hv (value's axis -1)", v[-1]),
    ):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, but is {size}; leave out the call")
    if q[-2] % k[-2] != 0:
        raise ValueError(
            f"query's heads N (= {q[-2]}) must be a multiple of key's heads K (= {k[-2]}); query "
            "head n reads key head n // (N // K)"
        )
    return CallShape(tuple(q[:-3]), q[-3], k[-3], k[-2], q[-2] // k[-2])


def check_dtypes(query: Any, key: Any, value: Any) -> np.dtype:
    dtype = np.dtype(query.dtype)
    if dtype.name not in DTYPES:
        raise TypeError(
            f"query's dtype must be one of {', '.join(DTYPES)}, but it is {dtype.name}; cast it, "
            "e.g. query.astype(jnp.bfloat16)"
        )
    for name, x in (("key", key), ("value", value)):
        if x.dtype != dtype:
            raise TypeError(
                f"{name}'s dtype must be query's, {dtype.name}, but it is {x.dtype}; cast one of "
                "them (nothing is promoted silently)"
            )
    return dtype


def _multiply(s: Any, q: Any, k: Any, c: Any) -> Any:
    return s * c.scale.astype(s.dtype)


def _check_scale(scale: Any, head_dim: int) -> tuple[float, tuple[Score, ...]]:
    """The static factor of scores, and one of run-time data as a score function."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim), ()
    if isinstance(scale, jax.Array | np.ndarray | np.generic):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.number):
            raise TypeError(
                f"scale must be one real number, but it has shape {scale.shape} and dtype {scale.dtype}; for "
                "one a head use a score function: score_fn(lambda s, q, k, c: s * c.t)(heads={'t': t})"
            )
        if isinstance(scale, Tracer):
            return 1.0, (Score(_multiply, params={"scale": scale}),)
        scale = scale.item()
    # math.isfinite raises OverflowError for a long integer; no comparison holds for NaN.
    if not isinstance(scale, numbers.Real) or not abs(scale) < math.inf:  # pyright: ignore
        raise TypeError(
            f"scale must be a finite real number, but it is {scale!r}; leave it out for 1 / sqrt(H)"
        )
    if abs(scale) > (limit := float(np.finfo(np.float32).max)):  # pyright: ignore
        shown = f"about 10^{math.log10(abs(scale)):.0f}" if isinstance(scale, int) else f"{scale:g}"
        raise ValueError(
            f"scale must be at most {limit:.3g} in size, the largest float32, but it is {shown}; "
            "leave it out for 1 / sqrt(H)"
        )
    return float(scale), ()


def _check_flag(name: str, flag: Any, cure: str) -> None:
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool, but it is {flag!r}; {cure}")


def _check_dropout(rate: float, rng: Any) -> jax.Array | None:
    if not isinstance(rate, numbers.Real) or not 0.0 <= rate < 1.0:
        raise ValueError(
            f"dropout_rate must be a Python number in [0, 1), but it is {rate!r}; "
            "use 0.0 for no dropout"
        )
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(
            f"dropout_rng must be given where dropout_rate (= {rate}) is not 0: pass a jax.random.key"
        )
    rng = jnp.asarray(rng)
    data = jax.random.key_data(rng) if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) else rng
    if data.ndim != 1 or data.dtype != jnp.uint32:
        raise ValueError(
            f"dropout_rng must be one key, but it has shape {rng.shape} and dtype {rng.dtype}; "
            "split it and use jax.vmap for several"
        )
    # Keys of some generators are longer than two words.
    return jnp.stack([_xor_words(data[0::2]), _xor_words(data[1::2])])


def _xor_words(words: jax.Array) -> jax.Array:
    return functools.reduce(jnp.bitwise_xor, [words[i] for i in range(words.shape[0])])


def as_sinks(sinks: Any, heads: int) -> jax.Array:
    sinks = jnp.asarray(sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats of shape [N], one for each of {heads} query heads, but has shape "
            f"{sinks.shape} and dtype {sinks.dtype}; broadcast or cast it"
        )
    return sinks


def _check_positions(name: str, x: Any, dims: CallShape, axis: int) -> jax.Array | None:
    if x is None:
        return None
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, but it has dtype {x.dtype}; cast it")
    size = dims.q_len if axis == Q_AXIS else dims.kv_len
    placed = normalize_tokens(name, as_array(name, x, jnp.int32), dims, axis)
    if placed.shape[axis] != size:
        raise ValueError(
            f"{name} must give one position a token, {size}, but has shape {x.shape}; broadcast it"
        )
    return placed


INDEX = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, jnp.int32)


def _trace_mask(mask: Mask, data: Any, dims: CallShape, first_position: int) -> TracedFn:
    how = jax.tree.structure(mask), _avals(mask), _avals(data), dims, first_position
    return _traced_again(_cached_mask, mask.fingerprint(), *how)


def _trace_score(
    score: Any, data: Any, dims: CallShape, first_position: int, dtype: np.dtype
) -> TracedFn:
    how = jax.tree.structure(score), _avals(score), _avals(data), dims, first_position, dtype
    return _traced_again(_cached_score, score.fingerprint(), *how)


def _traced_again(cached: Any, reads: Hashable | None, *how: Any) -> TracedFn:
    """From the cache where what the code reads is known to be as it was; else traced now."""
    if reads is None:
        return cached.__wrapped__(None, *how)
    return cached((reads, jax.config.jax_enable_x64), *how)  # pyright: ignore


class _Avals(NamedTuple):
    """Shapes and dtypes of a pytree, hashable."""

    tree: Any
    leaves: tuple

    def unflatten(self) -> Any:
        return jax.tree.unflatten(self.tree, self.leaves)


def _avals(tree: Any) -> _Avals:
    leaves, structure = jax.tree.flatten(tree)
    return _Avals(structure, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))


@functools.lru_cache(maxsize=512)
def _cached_mask(
    reads: Hashable, tree: Any, leaves: _Avals, data: _Avals, dims: CallShape, first_position: int
) -> TracedFn:
    mask = leaves.unflatten()

    def visible(row: Any, k_index: Any, data: Any) -> Any:
        q_index = _position(row, first_position)
        return jnp.asarray(mask.evaluate(q_index, k_index, data, dims))

    code = trace(f"mask {mask!r}", visible, INDEX, INDEX, data.unflatten())
    _check_result(code, "a boolean", lambda dtype: dtype == jnp.bool_)
    return dataclasses.replace(code, name=repr(mask))


@functools.lru_cache(maxsize=512)
def _cached_score(
    reads: Hashable,
    tree: Any,
    leaves: _Avals,
    data: _Avals,
    dims: CallShape,
    first_position: int,
    dtype: np.dtype,
) -> TracedFn:
    score = leaves.unflatten()

    def scored(s: Any, row: Any, k_index: Any, data: Any) -> Any:
        q_index = _position(row, first_position)
        return jnp.asarray(score.evaluate(s, q_index, k_index, data, dims))

    s = jax.ShapeDtypeStruct((1,) * NUM_LEADING_AXES, dtype)
    code = trace(f"score {score!r}", scored, s, INDEX, INDEX, data.unflatten())
    _check_result(code, f"one {dtype.name}", lambda result: result == dtype)
    return dataclasses.replace(code, name=repr(score))


def _position(row: Any, first_position: int) -> Any:
    """Where a query lies among the keys, of its row (or of a given position, where the first one is 0)."""
    return row + np.int32(first_position) if first_position else row


def _check_result(code: TracedFn, what: str, fits: Any) -> None:
    (out,) = cast(list[ShapedArray], code.jaxpr.out_avals)
    if out.shape != () or not fits(out.dtype):
        raise TypeError(
            f"{code.name} must return {what} for one pair of tokens, but it returns "
            f"{out.dtype}[{','.join(map(str, out.shape))}]; compare or cast its result"
        )
