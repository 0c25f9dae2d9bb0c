"""Checks of the arguments of one call: arrays, scale, dropout and positions."""

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_fa2.ir.arrays import Q_AXIS, CallShape, as_array, normalize_tokens
from pallas_fa2.scores import Score

DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_arrays(query: Any, key: Any, value: Any) -> None:
    """Raise a TypeError unless all three are arrays, or have shapes and dtypes like them."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(
                f"{name} must be an array, but it is {type(x).__name__}; use jnp.asarray"
            )


def check_shapes(query: Any, key: Any, value: Any) -> CallShape:
    """Return the sizes of one call; an error names the layout `[*B, N, T, H]` if that would fit."""
    shapes = query.shape, key.shape, value.shape
    try:
        return _call_shape(*shapes)
    except ValueError as error:
        known = all(len(x) >= 3 and all(isinstance(n, int) for n in x) for x in shapes)
        if not known or key.shape[-3] >= key.shape[-2]:
            raise  # in the other layout there would be more heads than keys, or sizes that cannot be compared
        swapped = [(*x[:-3], x[-2], x[-3], x[-1]) for x in shapes]
        try:
            _call_shape(*swapped)
        except ValueError:
            raise error from None
        raise ValueError(
            f"{error} (as [*B, N, T, H] the shapes {', '.join(map(str, shapes))} would fit: heads are the axis before "
            "the last here; if they are yours' third from the end, pass jnp.swapaxes(x, -3, -2))"
        ) from None


def _call_shape(q: tuple, k: tuple, v: tuple) -> CallShape:
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
    for a, b, rule, remedy in (
        (k[-3], v[-3], "key and value must have one length S", "cut or pad one"),
        (k[-2], v[-2], "key and value must have one number of heads K", "repeat those of one"),
        (q[-1], k[-1], "query and key must have one head dim H", "project both to one size"),
    ):
        if a != b:
            raise ValueError(f"{rule}, but have {a} and {b}; {remedy}")
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
    """Return the one dtype of all three arrays."""
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


def check_scale(scale: Any, head_dim: int) -> tuple[float, tuple[Score, ...]]:
    """Return the static factor of scores, and a factor that is run-time data as a score function."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim), ()
    if isinstance(scale, jax.Array | np.ndarray | np.generic):
        if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.number):
            raise TypeError(
                f"scale must be one real number, but it has shape {scale.shape} and dtype {scale.dtype}; for "
                "one for each head use a score function: score_fn(lambda s, q, k, c: s * c.t)(heads={'t': t})"
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
        text = f"about 10^{math.log10(abs(scale)):.0f}" if isinstance(scale, int) else f"{scale:g}"
        raise ValueError(
            f"scale must be at most {limit:.3g} in size, the largest float32, but it is {text}; "
            "leave it out for 1 / sqrt(H)"
        )
    return float(scale), ()


def check_flag(name: str, flag: Any, remedy: str) -> None:
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool, but it is {flag!r}; {remedy}")


def check_dropout(rate: float, rng: Any) -> jax.Array | None:
    """Return the seed of dropout, uint32 `[2]`, or None where the rate is 0."""
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


def check_positions(name: str, x: Any, dims: CallShape, axis: int) -> jax.Array | None:
    """Return positions as int32 with the five leading axes."""
    if x is None:
        return None
    x = x if hasattr(x, "dtype") else np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, but it has dtype {x.dtype}; cast it")
    size = dims.q_len if axis == Q_AXIS else dims.kv_len
    positions = normalize_tokens(name, as_array(name, x, jnp.int32), dims, axis)
    if positions.shape[axis] != size:
        raise ValueError(
            f"{name} must give one position a token, {size}, but has shape {x.shape}; broadcast it"
        )
    return positions
