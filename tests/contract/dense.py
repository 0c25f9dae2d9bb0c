"""Dense softmax attention and its gradients, written out in NumPy without the library: the truth, and the measure of
error."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Truth(NamedTuple):
    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any


def attention(
    *inputs: Any, mask: Any, score: Any, scale: float | None, work: Any, rounded: Callable
) -> Truth:
    """Of q, k, v and the cotangents of out and lse, in `work`; `rounded` is what arrays in the inputs' dtype are.

    `mask` is a boolean array `[B, N, T, S]` or None, `score` a function that returns other scores and their slope.
    """
    q, k, v, dout = (np.moveaxis(np.asarray(x, work), 2, 1) for x in inputs[:4])
    dlse, kv_heads = np.asarray(inputs[4], work), k.shape[1]
    k, v = (np.repeat(x, q.shape[1] // kv_heads, 1) for x in (k, v))
    scale = rounded(work(1 / math.sqrt(q.shape[-1]) if scale is None else scale))
    s, slope = rounded(q @ _transposed(k)) * scale, None
    if score is not None:
        s, slope = score(s)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    top = s.max(-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top)
    e = np.exp(s - top)
    total = e.sum(-1, keepdims=True)
    empty = total == 0
    p = e / np.where(empty, 1, total)
    lse = np.where(empty, -np.inf, top + np.log(np.where(empty, 1, total)))
    out, dv = rounded(rounded(p) @ v), rounded(_transposed(rounded(p)) @ dout)
    dp = rounded(dout @ _transposed(v))
    dlse = np.where(empty, 0, dlse[..., None])
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dlse)
    ds = rounded(rounded(ds if slope is None else ds * slope) * scale)
    dq, dk = rounded(ds @ k), rounded(_transposed(ds) @ q)

    def over_group(x: Any) -> Any:
        b, n, *rest = x.shape
        return rounded(x.reshape(b, kv_heads, n // kv_heads, *rest).sum(2))

    out, dq, dk, dv = (np.moveaxis(x, 1, 2) for x in (out, dq, over_group(dk), over_group(dv)))
    return Truth(out, lse[..., 0], dq, dk, dv)


def _transposed(x: Any) -> Any:
    return np.swapaxes(x, -1, -2)


def truth(*inputs: Any, **options: Any) -> Truth:
    """Values and gradients in float64 from q, k, v, dout and dlse of any dtype."""
    return attention(*inputs, work=np.float64, rounded=lambda x: x, **options)


def same_dtype(*inputs: Any, **options: Any) -> Truth:
    """The same in the inputs' own dtype, as a user would write it without a fused kernel: but for the softmax itself,
    which is in float32 at least, every array is rounded."""
    dtype = np.asarray(inputs[0]).dtype
    work = np.promote_types(dtype, np.float32).type
    results = attention(
        *inputs, work=work, rounded=lambda x: np.asarray(x, dtype).astype(work), **options
    )
    return Truth(
        *(x if name == "lse" else x.astype(dtype) for name, x in results._asdict().items())
    )
