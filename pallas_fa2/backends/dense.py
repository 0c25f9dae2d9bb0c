"""Dense attention and its gradients in NumPy: the definition where nothing is to be compiled for it.

No line of it is JAX's or the kernels'.
"""

from typing import Any

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray | None = None,
    *,
    keep: Any = True,
    bias: Any = 0.0,
    factor: Any = 1.0,
) -> dict[str, np.ndarray]:
    """Return `out [B, T, N, Hv]`, and with its cotangent `dq`, `dk`, `dv` and `dscore` (of the bias), in float64.

    `q` is `[B, T, N, H]`, `k` and `v` are `[B, S, K, H | Hv]`. `keep` (which pairs are not masked), `bias` (of the
    scores, which are scaled by 1 / sqrt(H)) and `factor` (of probabilities, by dropout) broadcast to `[B, N, T, S]`.
    """
    batch, q_len, heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[1:3]
    pairs = batch, heads, q_len, kv_len

    def rows(x: np.ndarray) -> np.ndarray:
        """`[B, T, N, H]` as `[B, K, G T, H]`: a group shares its keys."""
        return np.moveaxis(x.astype(np.float64), 2, 1).reshape(batch, kv_heads, -1, x.shape[-1])

    def of_pairs(x: Any) -> np.ndarray:
        return np.broadcast_to(x, pairs).reshape(batch, kv_heads, -1, kv_len)

    def tokens(x: np.ndarray, count: int) -> np.ndarray:
        return np.moveaxis(x.reshape(batch, -1, count, x.shape[-1]), 1, 2)

    scale = head_dim**-0.5
    keep, bias, factor = of_pairs(keep), of_pairs(bias), of_pairs(factor)
    q, k, v = rows(q), rows(k), rows(v)
    s = np.where(keep, scale * q @ k.mT + bias, -np.inf)
    maximum = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(maximum == -np.inf, 0, maximum))
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total == 0, 1, total)
    results = {"out": tokens((p * factor) @ v, q_len)}
    if dout is None:
        return results
    dout = rows(dout)
    dp = factor * (dout @ v.mT)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return results | {
        "dq": tokens(scale * ds @ k, q_len),
        "dk": tokens(scale * ds.mT @ q, kv_len),
        "dv": tokens((p * factor).mT @ dout, kv_len),
        "dscore": ds.reshape(pairs),
    }


def dropout_factor(
    rate: float, seed: np.ndarray, batch: int, heads: int, q_len: int, kv_len: int
) -> np.ndarray:
    """Return 0 where a probability is dropped and 1 / (1 - rate) where it is kept, `[B, N, T, S]`.

    `seed` is uint32 `[2]`, and the rate a multiple of 2^-16. 16 bits of a pair are half of a hashed word, that two keys
    share whose positions differ by 8.
    """
    head = np.arange(batch * heads, dtype=np.uint32).reshape(batch, heads, 1, 1)
    row = np.arange(q_len, dtype=np.uint32)[:, None]
    column = np.arange(kv_len, dtype=np.uint32)
    first = _mix(_mix(head ^ seed[0]) ^ row)
    second = _mix(_mix(head + seed[1]) + row * np.uint32(0x9E3779B9))
    is_high = column // 8 % 2
    words = _mix(first ^ (column - 8 * is_high), second)
    bits = np.where(is_high, words // 2**16, words % 2**16)
    return np.where(bits < rate * 2**16, 0.0, 1 / (1 - rate))


def _mix(x: np.ndarray, between: Any = 0) -> np.ndarray:
    """Hash words (C. Wellons, "hash prospector", lowbias32); `between` is added after the first product."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D) + between
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
