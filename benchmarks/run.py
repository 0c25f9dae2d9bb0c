"""Times our attention beside its rivals on one GPU, after checking every one of them.

    python -m benchmarks.run [--shapes d128_s8192_c,...] [--rivals fa3,cudnn] [--json FILE]

Kernel time by CUPTI, median of `--iterations`, random bfloat16 inputs. An implementation whose error
against float32 dense attention is too large gets no speed. Rivals that cannot be imported are left
out.
"""

import argparse
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import pallas_fa2 as fa
from benchmarks.shapes import SHAPES, Shape

# Relative Frobenius error of bfloat16 attention: 2.0e-3 for out and 2.5e-3 for the gradients on
# normal inputs. Twice that is a wrong kernel.
LIMITS = (4e-3, 5e-3, 5e-3, 5e-3)


def ours(shape: Shape) -> Callable:
    mask = fa.Causal() if shape.causal else None
    return functools.partial(fa.flash_attention, mask=mask, implementation="hopper")


def fa3(shape: Shape) -> Callable:
    import dew_flash_attn  # type: ignore[import-not-found]

    return functools.partial(dew_flash_attn.flash_mha, is_causal=shape.causal)


def cudnn(shape: Shape) -> Callable:
    return functools.partial(
        jax.nn.dot_product_attention, is_causal=shape.causal, implementation="cudnn"
    )


RIVALS = {"fa3": fa3, "cudnn": cudnn}


def inputs(shape: Shape, seed: int = 0) -> tuple[jax.Array, ...]:
    """query, key, value and the cotangent of the output."""
    keys = jax.random.split(jax.random.key(seed), 4)
    sizes = (
        (shape.q_len, shape.q_heads),
        (shape.kv_len, shape.kv_heads),
        (shape.kv_len, shape.kv_heads),
        (shape.q_len, shape.q_heads),
    )
    return tuple(
        jax.random.normal(key, (shape.batch, length, heads, shape.head_dim), jnp.bfloat16)
        for key, (length, heads) in zip(keys, sizes, strict=True)
    )


def with_gradients(attention: Callable) -> Callable:
    def run(q: Any, k: Any, v: Any, dout: Any) -> tuple:
        out, pull = jax.vjp(attention, q, k, v)
        return (out, *pull(dout))

    return run


def truth(shape: Shape, args: tuple) -> tuple:
    """Out, dq, dk and dv of the first batch entry in float32, from the heads of one key head."""
    group = shape.q_heads // shape.kv_heads
    q, k, v, dout = (x[:1].astype(jnp.float32) for x in args)
    q, dout, k, v = q[:, :, :group], dout[:, :, :group], k[:, :, :1], v[:, :, :1]
    mask = fa.Causal() if shape.causal else None
    blockwise = functools.partial(fa.flash_attention, mask=mask, implementation="blockwise")
    return with_gradients(blockwise)(q, k, v, dout)


def errors(results: tuple, expected: tuple, shape: Shape) -> list[float]:
    """Relative Frobenius norms over the heads that `truth` holds."""
    found = []
    for x, y in zip(results, expected, strict=False):
        x = x[:1, :, : y.shape[2]].astype(jnp.float32)
        found.append(float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)))
    return found


def milliseconds(fn: Callable, args: tuple, iterations: int) -> float:
    from jax.experimental.mosaic.gpu import profiler

    _, times = profiler.measure(fn, iterations=iterations)(*args)
    if times is None:
        raise RuntimeError("no kernel ran")
    return statistics.median(times)


def measure(name: str, make: Callable, shape: Shape, args: tuple, expected: tuple, n: int) -> dict:
    """TFLOP/s of the forward and of forward + backward, or the reason why there is none."""
    try:
        attention = make(shape)
        start = time.perf_counter()
        forward = jax.jit(attention)
        jax.block_until_ready(forward(*args[:3]))
        first_call = time.perf_counter() - start
        both = jax.jit(with_gradients(attention))
        found = errors(jax.block_until_ready(both(*args)), expected, shape)
        if not all(e <= limit for e, limit in zip(found, LIMITS, strict=True)):
            return {"error": found, "refused": "wrong result"}
        forward_ms = milliseconds(forward, args[:3], n)
        both_ms = milliseconds(both, args, n)
    except Exception as e:  # noqa: BLE001 - a rival without this shape must not end the run
        return {"refused": f"{type(e).__name__}: {str(e)[:200]}"}
    flops = shape.forward_flops
    return {
        "error": found,
        "first_call_s": first_call,
        "forward_ms": forward_ms,
        "both_ms": both_ms,
        "forward": flops / forward_ms * 1e-9,
        "both": 3.5 * flops / both_ms * 1e-9,
        "backward": 2.5 * flops / (both_ms - forward_ms) * 1e-9,
    }


def ceiling(iterations: int) -> float:
    """TFLOP/s of an 8192^3 bfloat16 matrix product on random data."""
    a, b = jax.random.normal(jax.random.key(1), (2, 8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / milliseconds(jax.jit(jnp.matmul), (a, b), iterations) * 1e-9


def report(results: dict) -> None:
    for part in ("forward", "both"):
        print(f"\n{part}, TFLOP/s (ours / best rival)")
        for shape, rows in results.items():
            speeds = {n: r[part] for n, r in rows.items() if part in r}
            rivals = {n: s for n, s in speeds.items() if n != "ours"}
            ratio = speeds.get("ours", 0.0) / max(rivals.values(), default=float("nan"))
            cells = "  ".join(f"{n} {s:6.1f}" for n, s in speeds.items())
            print(f"  {shape:16s} {ratio:5.3f}   {cells}")
    for shape, rows in results.items():
        for name, row in rows.items():
            if "refused" in row:
                print(f"  {shape} {name}: {row['refused']} {row.get('error', '')}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rivals", default=",".join(RIVALS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args(argv)
    rivals = {n: RIVALS[n] for n in args.rivals.split(",") if n}
    device = jax.devices()[0]
    results: dict[str, dict] = {}
    for name in tqdm(args.shapes.split(","), disable=None):
        shape = SHAPES[name]
        data = inputs(shape)
        expected = jax.jit(functools.partial(truth, shape))(data)
        results[name] = {
            who: measure(who, make, shape, data, expected, args.iterations)
            for who, make in {"ours": ours, **rivals}.items()
        }
        tqdm.write(json.dumps({name: results[name]}), file=sys.stderr)
    record = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "matmul": ceiling(args.iterations),
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print({k: v for k, v in record.items() if k != "results"})
    report(results)


def _commit() -> str:
    out = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True
    )
    return out.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
