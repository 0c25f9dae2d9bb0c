"""Times a whole decode step of a model of Llama-8B's shape on one GPU: one token for each sequence, caches donated.

    python -m benchmarks.decode_step  # 32 layers, 16 sequences of 8192 tokens: 17 GB of caches, 14 of weights
    python -m benchmarks.decode_step --batch 4 --length 32768 --json step.json

Prints the milliseconds of a step as the host sees them (steps that follow each other), and of its kernels by CUPTI in
the groups attention, matrix products and others. `beyond` is the step over attention and matrix products together,
minus 1; `attention_costs` is the step over the same step without attention (out is q) and the attention kernels, minus
1: what attention costs beside its kernels, such as the plan, and writing the new keys and values. The step is compiled
once, for all lengths: its traces are counted. Nothing of a cache's size is copied: the compiled program's temporary
memory says so.
"""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_fa2 as fa
from benchmarks import jobs, record
from pallas_fa2.planning.autotune import kernel_times

MATMUL = re.compile(r"gemm|nvjet|cutlass|cublas|dot|matmul|splitk", re.IGNORECASE)
ATTENTION = re.compile(r"decode|attention")


class Sizes(NamedTuple):
    """A model, by default Llama-8B's layers."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 14336


def make_weights(sizes: Sizes) -> list[dict[str, jax.Array]]:
    """Return random bfloat16 matrices of each layer."""
    width, rows = sizes.width, sizes.heads * sizes.head_dim
    shapes = {
        "qkv": (width, rows + 2 * sizes.kv_heads * sizes.head_dim),
        "out": (rows, width),
        "gate_up": (width, 2 * sizes.hidden),
        "down": (sizes.hidden, width),
    }
    keys = iter(jax.random.split(jax.random.key(0), sizes.layers * len(shapes)))

    def matrix(shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) * (shape[0] ** -0.5)

    return [{name: matrix(shape) for name, shape in shapes.items()} for _ in range(sizes.layers)]


def rms_norm(x: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Apply rotary embeddings at positions `[B]` to `[B, 1, heads, dim]`."""
    half = x.shape[-1] // 2
    frequencies = 1e4 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None, None] * frequencies[None, None, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: fa.Cache) -> tuple[Any, fa.Cache]:
    """Append a token to a layer's cache and attend to all of it."""
    cache = cache.append(k, v)
    return fa.cached_attention(q, cache), cache


def skip(q: jax.Array, k: jax.Array, v: jax.Array, cache: fa.Cache) -> tuple[Any, fa.Cache]:
    """Do what uses q, k and v without a cache."""
    return q + (k + v).repeat(q.shape[2] // k.shape[2], 2), cache


def make_step(sizes: Sizes, attention: Callable, traces: list[None]) -> Any:
    """Return (weights, caches, x `[B, 1, width]`) -> (x, caches); `traces` grows by one when it is traced."""

    def step(weights: list, caches: list[fa.Cache], x: jax.Array) -> tuple:
        traces.append(None)
        new, (n, kv) = [], (sizes.heads, sizes.kv_heads)
        for layer, cache in zip(weights, caches, strict=True):
            qkv = rms_norm(x) @ layer["qkv"]
            qkv = qkv.reshape(*x.shape[:2], n + 2 * kv, sizes.head_dim)
            q, k, v = jnp.split(qkv, (n, n + kv), 2)
            q, k = rotate(q, cache.lengths), rotate(k, cache.lengths)
            out, cache = attention(q, k, v, cache)
            new.append(cache)
            x = x + out.reshape(*x.shape[:2], -1) @ layer["out"]
            gate, up = jnp.split(rms_norm(x) @ layer["gate_up"], 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ layer["down"]
        return x, new

    return jax.jit(step, donate_argnums=1)


class Measured(NamedTuple):
    """Milliseconds of a step, as the host sees it, and of its kernels; and the program's temporary memory."""

    step: float
    attention: float
    matmul: float
    others: float
    temporary_bytes: int


def measure(sizes: Sizes, attention: Callable, batch: int, length: int, steps: int) -> Measured:
    """Measure steps on caches that are nearly full, and check that they are one program."""
    traces: list[None] = []
    step = make_step(sizes, attention, traces)
    weights = make_weights(sizes)
    caches = [
        fa.Cache.zeros(batch, length, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
        for _ in range(sizes.layers)
    ]
    full = jnp.full(batch, length - 8 * steps - 8, jnp.int32)
    caches = [fa.Cache(x.key, x.value, full + 0) for x in caches]
    x = jnp.ones((batch, 1, sizes.width), jnp.bfloat16)
    lowered = step.lower(weights, caches, x)
    # CUPTI sees no kernels of a CUDA graph, which XLA makes of so many operations at least.
    without_graphs = {"xla_gpu_graph_min_graph_size": 1 << 30}
    programs = lowered.compile(), lowered.compile(without_graphs)
    analysis = programs[0].memory_analysis()

    class Step(jax.stages.Wrapped):
        """A step on the caches that the step before has returned. CUPTI's wrapper would jit a function."""

        def __call__(self, program: Any) -> jax.Array:
            nonlocal caches
            out, caches = program(weights, caches, x)
            return out

    run = Step()  # pyright: ignore[reportAbstractUsage]  # it is only called
    jax.block_until_ready(run(programs[0]))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        results = [run(programs[0]) for _ in range(steps)]
        jax.block_until_ready(results)
        rounds.append(1e3 * (time.perf_counter() - start) / steps)
    launches = kernel_times(run, (programs[1],), steps)
    assert len(traces) == 1, "the step was traced more than once"

    def total(group: Callable[[str], bool]) -> float:
        return statistics.median(sum(ms for name, ms in x if group(name)) for x in launches)

    attention_ms = total(lambda name: bool(ATTENTION.search(name)))
    matmul_ms = total(lambda name: not ATTENTION.search(name) and bool(MATMUL.search(name)))
    all_ms = total(lambda name: True)
    others = all_ms - attention_ms - matmul_ms
    temporary = 0 if analysis is None else analysis.temp_size_in_bytes
    return Measured(statistics.median(rounds), attention_ms, matmul_ms, others, temporary)


def report(sizes: Sizes, batch: int, length: int, steps: int) -> dict[str, Any]:
    """Measure a step with and without attention, and what attention costs beside its kernels."""
    without = measure(sizes, skip, batch, length, steps)
    ours = measure(sizes, attend, batch, length, steps)
    beyond = ours.step / (ours.attention + ours.matmul) - 1
    costs = ours.step / (without.step + ours.attention) - 1
    return {
        "sizes": sizes._asdict(),
        "batch": batch,
        "length": length,
        "with_attention": _rounded(ours),
        "without_attention": _rounded(without),
        "beyond": round(beyond, 4),
        "attention_costs": round(costs, 4),
    }


def _rounded(measured: Measured) -> dict[str, float]:
    return {name: record.rounded(x) for name, x in measured._asdict().items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    record.add_arguments(parser)
    args = parser.parse_args(argv)
    jobs.share_memory()
    contents = {
        "setup": record.setup({}, args.steps),
        "run": record.stamp(args.commit),
        "results": report(Sizes(layers=args.layers), args.batch, args.length, args.steps),
    }  # fmt: skip
    print(json.dumps(contents["results"], indent=1))
    if args.json:
        record.write(args.json, contents)


if __name__ == "__main__":
    main()
