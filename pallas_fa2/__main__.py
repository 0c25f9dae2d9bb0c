"""`python -m pallas_fa2`: prints the devices and the chosen backend, and compares it with the definition.

`python -m pallas_fa2 cache` shows, warms and clears the store of compiled kernels.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2 import cache_command
from pallas_fa2.backends import dense


def main() -> int:
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"pallas_fa2 {fa.__version__}, jax {jax.__version__}")
    print("devices:", ", ".join(d.device_kind for d in jax.devices()))
    dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32
    # NumPy draws the inputs and computes the truth, so that XLA compiles one program and its kernels. Kernels without a
    # mask and with a head dim of 128 are those that compile in least time, two thirds of a causal call's at 64.
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 256, 4, 128)).astype(dtype) for _ in range(4)]
    q, k, v, _ = shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    print(fa.explain(q, k, v))

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple:
        out, pull = jax.vjp(fa.flash_attention, q, k, v)
        return out, *pull(dout)

    compiled = run.lower(*shapes).compile()
    print(f"traced and compiled after {time.perf_counter() - start:.1f} s")
    actual = [np.asarray(x, np.float64) for x in compiled(*arrays)]
    expected = dense.attention(*arrays)
    # bfloat16 has 8 bits of precision, and a gradient is rounded three times.
    limit = 1e-5 if dtype == jnp.float32 else 6e-3
    agrees = True
    for name, x in zip(("out", "dq", "dk", "dv"), actual, strict=True):
        y = expected[name]
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        agrees &= bool(error <= limit)  # false for NaN
        print(f"{name:4s} relative error {error:.1e} (limit {limit:.0e})")
    verdict = "agrees with the definition" if agrees else "DOES NOT AGREE WITH THE DEFINITION"
    print(f"{verdict}, {time.perf_counter() - start:.1f} s")
    return 0 if agrees else 1


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments; return the exit code."""
    if arguments[:1] == ["cache"]:
        return cache_command.run(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m pallas_fa2",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)  # there are none: it prints the help, or what is not known
    return main()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
