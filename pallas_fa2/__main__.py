"""`python -m pallas_fa2`: prints the devices and the chosen backend, and compares it with the definition."""

import sys
import time

import jax
import jax.numpy as jnp

import pallas_fa2 as fa


def main() -> int:
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"pallas_fa2 {fa.__version__}, jax {jax.__version__}")
    print("devices:", ", ".join(d.device_kind for d in jax.devices()))
    dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32
    q, k, v, dout = (
        jax.random.normal(key, (2, 256, heads, 64), dtype)
        for key, heads in zip(jax.random.split(jax.random.key(0), 4), (4, 2, 2, 4), strict=True)
    )
    print(fa.explain(q, k, v, mask=fa.Causal()))

    def run(implementation: fa.Implementation | None, *args: jax.Array) -> tuple:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return fa.flash_attention(q, k, v, mask=fa.Causal(), implementation=implementation)

        out, pull = jax.vjp(attend, *args[:3])
        return (out, *pull(args[3].astype(out.dtype)))

    actual = jax.jit(run, static_argnums=0)(None, q, k, v, dout)
    exact = [x.astype(jnp.float32) for x in (q, k, v, dout)]
    expected = jax.jit(run, static_argnums=0)("reference", *exact)
    # bfloat16 has 8 bits of precision, and a gradient is rounded three times.
    limit = 1e-5 if dtype == jnp.float32 else 6e-3
    agrees = True
    for name, x, y in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float(jnp.linalg.norm(x.astype(jnp.float32) - y) / jnp.linalg.norm(y))
        agrees &= error <= limit  # false for NaN
        print(f"{name:4s} relative error {error:.1e} (limit {limit:.0e})")
    verdict = "agrees with the definition" if agrees else "DOES NOT AGREE WITH THE DEFINITION"
    print(f"{verdict}, {time.perf_counter() - start:.1f} s")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
