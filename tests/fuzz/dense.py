"""Dense attention and its gradients, written out in NumPy: no line of it is the library's, or JAX's.

In float64 it is the truth; with every array rounded to the inputs' dtype it is what dense attention
in that dtype gives, the measure of error.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz.shapes import Shape

# A rounding error of so many standard deviations does not happen by chance.
DEVIATIONS = 4.0
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23, "float64": 2.0**-52}


class Inputs(NamedTuple):
    """`q, k, v` are `[B, T, N, H]`, `[B, S, K, H]`, `[B, S, K, Hv]`; `dout, dlse` cotangents."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dlse: Any
    i: Any  # positions, [B | 1, 1, T, 1]
    j: Any
    visible: Any  # bool, broadcasts to [B, N, T, S]
    dropout_factor: Any  # what dropout does to each probability
    scores: tuple  # each with its data
    sinks: Any  # [N] or None


class Results(NamedTuple):
    out: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any
    dscores: tuple  # a dictionary for each score
    dsinks: Any = None


class Steps(NamedTuple):
    """The intermediate arrays `[B, N, T, S]`, for the estimate of rounding errors."""

    raw: Any
    s: Any
    p: Any  # without dropout
    ds: Any
    slope: Any  # of the score functions: d s / d raw
    by_data: list  # for each score, d s / d data, by each of its data
    between: list  # what score functions have read
    p_sink: Any  # [B, N, T, 1], and the gradient of that logit
    ds_sink: Any


def _heads(x: Any, heads: int) -> Any:
    return np.repeat(x, heads // x.shape[2], 2)


def _over_group(x: Any, heads: int) -> Any:
    b, s, n, h = x.shape
    return x.reshape(b, s, heads, n // heads, h).sum(3)


def attention(
    a: Inputs, shape: Shape, scale: float, work: Any, rounded: Callable
) -> tuple[Results, Steps]:
    """Values and gradients in `work`; `rounded` is applied wherever dense attention would round."""
    kv_heads = a.k.shape[2]
    q, k, v, dout = (np.asarray(x, work) for x in a[:4])
    dlse = np.asarray(a.dlse, work)
    k, v = _heads(k, shape.q_heads), _heads(v, shape.q_heads)
    raw = rounded(rounded(np.einsum("btnh,bsnh->bnts", q, k, optimize=True)) * work(scale))
    s, slope, by_data, between = raw, np.ones_like(raw), [], []
    for score, data in a.scores:
        placed = {n: shape.spread(score.kinds[n], x).astype(work) for n, x in data.items()}
        between.append(s)
        s, by_s, by = score.dense(s, a.i, a.j, placed)
        slope = slope * by_s
        by_data = [{n: x * by_s for n, x in older.items()} for older in by_data] + [by]
    s = np.where(a.visible, s, -np.inf)
    sink = np.full((1, 1, 1, 1), -np.inf, work)
    if a.sinks is not None:
        sink = a.sinks.astype(work).reshape(1, -1, 1, 1)
    top = np.maximum(s.max(-1, keepdims=True), sink)
    empty = top == -np.inf
    e, e_sink = (np.exp(x - np.where(empty, 0, top)) for x in (s, sink))
    total = np.where(empty, 1, e.sum(-1, keepdims=True) + e_sink)
    p, p_sink = e / total, e_sink / total
    out = rounded(np.einsum("bnts,bsnh->btnh", rounded(p * a.dropout_factor), v, optimize=True))
    lse = np.where(empty, -np.inf, np.log(total) + np.where(empty, 0, top))[..., 0]

    dp = rounded(np.einsum("btnh,bsnh->bnts", dout, v, optimize=True)) * a.dropout_factor
    of_row = dlse[..., None] - (p * dp).sum(-1, keepdims=True)
    ds, ds_sink = p * (dp + of_row), p_sink * of_row
    draw = rounded(rounded(ds * slope) * work(scale))
    dv = np.einsum("bnts,btnh->bsnh", rounded(p * a.dropout_factor), dout, optimize=True)
    dk = np.einsum("bnts,btnh->bsnh", draw, q, optimize=True)
    dq = rounded(np.einsum("bnts,bsnh->btnh", draw, k, optimize=True))
    dk, dv = (rounded(_over_group(rounded(x), kv_heads)) for x in (dk, dv))
    dscores = tuple(
        {n: shape.gather(score.kinds[n], ds * x, data[n], np.sum) for n, x in by.items()}
        for (score, data), by in zip(a.scores, by_data, strict=True)
    )
    dsinks = None if a.sinks is None else ds_sink.sum((0, 2, 3))
    results = Results(out, lse, dq, dk, dv, dscores, dsinks)
    return results, Steps(raw, s, p, ds, slope, by_data, between, p_sink, ds_sink)


def truth(a: Inputs, shape: Shape, scale: float) -> tuple[Results, Steps]:
    return attention(a, shape, scale, np.float64, lambda x: x)


def same_dtype(a: Inputs, shape: Shape, scale: float) -> Results:
    dtype = a.q.dtype
    results, _ = attention(
        a, shape, scale, np.float32, lambda x: x.astype(dtype).astype(np.float32)
    )
    scores = tuple(
        {n: x.astype(data[n].dtype).astype(np.float64) for n, x in by.items()}
        for (_, data), by in zip(a.scores, results.dscores, strict=True)
    )
    if a.sinks is None:
        return results._replace(dscores=scores)
    dsinks = results.dsinks.astype(a.sinks.dtype).astype(np.float64)
    return results._replace(dscores=scores, dsinks=dsinks)


def noise(a: Inputs, shape: Shape, scale: float, goal: Results, steps: Steps) -> Results:
    """How far rounding may carry each number, where few numbers make twice an error a game of dice.

    First order: q·k, the scores, the output within delta, probabilities and dS are each rounded,
    independently; variances add up.
    """
    eps = EPS[str(a.q.dtype)]
    tiny = min(eps, EPS["float32"])  # of scores, statistics and sums
    q, k, v, dout = (np.asarray(x, np.float64) for x in a[:4])
    kv_heads = k.shape[2]
    k, v = _heads(k, shape.q_heads), _heads(v, shape.q_heads)
    q2, k2, v2, dout2 = (x**2 for x in (q, k, v, dout))
    p, ds, visible = steps.p, steps.ds, a.visible

    def product(letters: str, x: Any, y: Any) -> Any:
        return np.einsum(letters, x, y, optimize=True)

    raw = tiny**2 * (scale**2 * product("btnh,bsnh->bnts", q2, k2) + 4 * steps.raw**2)
    s = raw * steps.slope**2 + tiny**2 * 16 * (1 + np.where(visible, steps.s, 0) ** 2)
    s = s + (p * s).sum(-1, keepdims=True)  # relative, of p; the second is that of the row's sum
    out2 = np.asarray(goal.out, np.float64) ** 2
    out = product("bnts,bsnh->btnh", (s + eps**2) * (p * a.dropout_factor) ** 2, v2) + eps**2 * out2
    # With sinks, dout is rounded once more: when it has been multiplied by the keys' share.
    dout_deviation = tiny if a.sinks is None else eps
    dp = dout_deviation**2 * product("btnh,bsnh->bnts", dout2, v2) * a.dropout_factor**2
    delta = eps**2 * np.moveaxis((dout2 * out2).sum(-1), 1, 2)[..., None]
    delta = delta + np.moveaxis((dout2 * out).sum(-1), 1, 2)[..., None]
    delta = delta + tiny**2 * np.asarray(a.dlse, np.float64)[..., None] ** 2
    of_ds = p**2 * dp + (s + 16 * tiny**2) * ds**2
    # A slope may be a small difference of numbers about 1, as 1 - tanh(s)^2 is.
    of_slope = np.where(steps.slope == 1, 0, 16 * tiny**2)
    own = scale**2 * (of_ds * steps.slope**2 + ds**2 * (eps**2 * steps.slope**2 + of_slope))
    row = scale * p * steps.slope  # what delta, one for all of a row, does to it
    dq = product("bnts,bsnh->btnh", own, k2)
    dq = dq + product("bnts,bsnh->btnh", row, k) ** 2 * np.moveaxis(delta, 1, 2)
    dk = _over_group(product("bnts,btnh->bsnh", own + delta * row**2, q2), kv_heads)
    dv = product("bnts,btnh->bsnh", (s + eps**2) * (p * a.dropout_factor) ** 2, dout2)
    dv = _over_group(dv, kv_heads)
    lse = (p**2 * s).sum(-1) + tiny**2 * np.where(np.isinf(goal.lse), 1, goal.lse) ** 2

    def of_data(kind: str, x: Any, by: Any) -> Any:
        """A derivative by data is rounded to their dtype, tile by tile."""
        whole_row = kind in ("q", "heads", "params") or (kind == "pairs" and x.shape[-1] == 1)
        by = np.broadcast_to(by, p.shape)
        row = (p * by).sum(-1, keepdims=True) if whole_row else p * by
        row = delta * row**2 / (p.shape[-1] if whole_row else 1)  # gather adds a row up again
        own = (of_ds + EPS[str(x.dtype)] ** 2 * ds**2) * by**2
        # what it is a difference of: a score, before or after what other functions make of it
        scores = sum((x**2 for x in steps.between), np.where(visible, steps.s, 0) ** 2)
        own = own + 16 * tiny**2 * ds**2 * (by**2 + scores)
        return shape.gather(kind, own + row, x, np.sum)

    def sink_variance() -> Any:
        of_row = tiny**2 * (16 + np.where(np.isinf(a.sinks), 0, a.sinks).astype(np.float64) ** 2)
        relative = of_row.reshape(1, -1, 1, 1) + (p**2 * s).sum(-1, keepdims=True)
        each = steps.p_sink**2 * delta + relative * steps.ds_sink**2
        return each.sum((0, 2, 3)) + EPS[str(a.sinks.dtype)] ** 2 * goal.dsinks**2

    per_score = [
        {n: of_data(score.kinds[n], data[n], x) for n, x in by.items()}
        for (score, data), by in zip(a.scores, steps.by_data, strict=True)
    ]
    results = [
        DEVIATIONS * np.sqrt(x + eps**2 * g**2)
        for x, g in zip((out, lse, dq, dk, dv), (goal.out, 0, *goal[2:5]), strict=True)
    ]
    scores = tuple({n: DEVIATIONS * np.sqrt(x) for n, x in by.items()} for by in per_score)
    return Results(
        *results, scores, None if a.sinks is None else DEVIATIONS * np.sqrt(sink_variance())
    )


def default_scale(head_dim: int) -> float:
    return 1 / math.sqrt(head_dim)


def _mixed(x: Any, between: Any = 0) -> Any:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D) + between
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def dropout(rate: float, words: Any, shape: Shape, i: Any, j: Any) -> Any:
    """0 or 1 / (1 - rate) for each pair, from the seed, the head's number and both positions."""
    if rate == 0:
        return np.ones((1, 1, 1, 1))
    words = np.asarray(words, np.uint32)
    head = np.arange(shape.pairs[0] * shape.q_heads, dtype=np.uint32).reshape(
        *shape.pairs[:2], 1, 1
    )
    row, column = (np.asarray(x).astype(np.uint32) for x in (i, j))
    first = _mixed(_mixed(head ^ words[0]) ^ row)
    second = _mixed(_mixed(head + words[1]) + row * np.uint32(0x9E3779B9))
    high = column // 8 % 2  # which half of a word, that two keys share
    words = _mixed(column - 8 * high ^ first, second)
    bits = np.where(high == 1, words // 2**16, words % 2**16)
    dropped = round(rate * 2**16)
    return np.where(bits < dropped, 0.0, 2**16 / (2**16 - dropped))
