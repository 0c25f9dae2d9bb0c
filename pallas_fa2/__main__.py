"""`python -m pallas_fa2`: prints the devices and the chosen backend, and compares it with the definition.

`python -m pallas_fa2 cache` shows, warms and clears the store of compiled kernels.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2 import cache_command


def main() -> int:
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"pallas_fa2 {fa.__version__}, jax {jax.__version__}")
    print("devices:", ", ".join(d.device_kind for d in jax.devices()))
    dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32
    # NumPy draws the inputs and computes the truth, so that XLA compiles one program and its kernels.
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 256, heads, 64)).astype(dtype) for heads in (4, 2, 2, 4)]
    q, k, v, _ = shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    print(fa.explain(q, k, v, mask=fa.Causal()))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple:
        out, pull = jax.vjp(lambda *qkv: fa.flash_attention(*qkv, mask=fa.Causal()), q, k, v)
        return out, *pull(dout)

    compiled = run.lower(*shapes).compile()
    print(f"traced and compiled after {time.perf_counter() - start:.1f} s")
    actual = [np.asarray(x, np.float64) for x in compiled(*arrays)]
    expected = _causal_attention_and_gradients(*(x.astype(np.float64) for x in arrays))
    # bfloat16 has 8 bits of precision, and a gradient is rounded three times.
    limit = 1e-5 if dtype == jnp.float32 else 6e-3
    agrees = True
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        agrees &= bool(error <= limit)  # false for NaN
        print(f"{name:4s} relative error {error:.1e} (limit {limit:.0e})")
    verdict = "agrees with the definition" if agrees else "DOES NOT AGREE WITH THE DEFINITION"
    print(f"{verdict}, {time.perf_counter() - start:.1f} s")
    return 0 if agrees else 1


def _causal_attention_and_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return out, dQ, dK and dV of dense causal attention; q and dout are `[B, T, N, H]`, k and v `[B, T, K, H]`."""
    length, heads, kv_heads, dim = *q.shape[1:3], *k.shape[2:]
    q, dout = (x.reshape(-1, length, kv_heads, heads // kv_heads, dim) for x in (q, dout))
    scale = dim**-0.5
    s = scale * np.einsum("btkgh,bskh->bkgts", q, k)
    s = np.where(np.tri(length, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("bkgts,bskh->btkgh", p, v)
    dv = np.einsum("bkgts,btkgh->bskh", p, dout)
    dp = np.einsum("btkgh,bskh->bkgts", dout, v)
    ds = scale * p * (dp - (p * dp).sum(-1, keepdims=True))
    dq = np.einsum("bkgts,bskh->btkgh", ds, k)
    dk = np.einsum("bkgts,btkgh->bskh", ds, q)
    merged = (-1, length, heads, dim)
    return out.reshape(merged), dq.reshape(merged), dk, dv


if __name__ == "__main__":
    if sys.argv[1:2] == ["cache"]:
        sys.exit(cache_command.run(sys.argv[2:]))
    if sys.argv[1:]:
        sys.exit(f"{__doc__}\nargument not known: {sys.argv[1]}")
    sys.exit(main())
