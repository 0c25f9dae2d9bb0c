"""Times prompts on a cache beside the same attention without one on one GPU, after checking the results of all.

    python -m benchmarks.prompts
    python -m benchmarks.prompts --cases new_2048,step_of_60 --layouts forward,pages64,int8 --jobs 8

The tokens of a prompt, or of packed requests, are the last ones of their sequences; bfloat16, random, causal.
Microseconds are those of all kernels of a call by CUPTI, the median of bursts that alternate, and in parentheses those
of the longest kernel; behind a stroke those of a call as the host sees calls that follow each other. `forward` is
`flash_attention` on contiguous keys of just this length. `pages16` and `pages64` are pages in random order, `int8` has
caches of 8 bits, and `int8_entries` is what these take by the decode kernel (docs/decisions/0093-tiles-of-8-bits.md). A
layout whose error against `blockwise` in float32 is above twice that of `blockwise` in bfloat16 gets no time.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from benchmarks import decode, jobs, measure
from benchmarks.run import names_among
from pallas_fa2.backends.sm90 import cached_forward


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests with so many new tokens each, behind `before` others."""

    new: tuple[int, ...]
    before: int = 0
    capacity: int = 16_384
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def is_packed(self) -> bool:
        return len(self.new) > 1

    def inputs(self) -> tuple[jax.Array, ...]:
        """Return query, packed or `[1, T, N, H]`, key and value `[B, S, K, H]`, and the lengths."""
        keys = jax.random.split(jax.random.key(0), 3)
        rows = (sum(self.new),) if self.is_packed else (1, *self.new)
        q = jax.random.normal(keys[0], (*rows, self.q_heads, self.head_dim), jnp.bfloat16)
        shape = len(self.new), self.capacity, self.kv_heads, self.head_dim
        k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
        return q, k, v, jnp.array(self.new, jnp.int32) + self.before

    def queries(self) -> fa.Packed | None:
        starts = np.cumsum([0, *self.new]).astype(np.int32)
        return fa.Packed(jnp.asarray(starts)) if self.is_packed else None


CASES = {
    "new_512": Case((512,)),
    "new_2048": Case((2048,)),
    "new_8192": Case((8192,)),
    "new_512_after_8192": Case((512,), 8192),
    "new_2048_after_8192": Case((2048,), 8192),
    "new_2048_of_131072": Case((2048,), 0, 131_072),
    "prompts": Case((3000, 1200, 700, 300), 0, 4096),
    "step_of_60": Case((1,) * 59 + (1989,), 2000, 4096),
}


def in_pages_of_8_bits(q: Any, k: Any, v: Any, lengths: Any) -> tuple:
    """Return the arguments with keys and values in pages of 64 tokens and 8 bits, the table, and the scales."""
    q, key, value, lengths, table = decode.paged(64, q, k, v, lengths)
    _, key, value, _, *scales = decode.quantized(jnp.int8, q, key, value, lengths)
    return q, key, value, lengths, table, *scales


def on_cache(case: Case, q: Any, k: Any, v: Any, lengths: Any, *scales: Any, **options: Any) -> Any:
    cache = fa.Cache(k, v, lengths, *scales)
    return fa.cached_attention(q, cache, queries=case.queries(), **options)


def on_pages(
    case: Case, q: Any, k: Any, v: Any, lengths: Any, table: Any, *scales: Any, **options: Any
) -> Any:
    cache = fa.Pages(k, v, table, lengths, *scales)
    return fa.cached_attention(q, cache, queries=case.queries(), **options)


def forward(case: Case, q: Any, k: Any, v: Any, lengths: Any, **options: Any) -> Any:
    """Attend to keys and values of just the length, of one request."""
    if case.is_packed:
        raise NotImplementedError("it has one request")
    return fa.flash_attention(q, k, v, is_causal=True, align="end", **options)


def of_this_length(case: Case, q: Any, k: Any, v: Any, lengths: Any) -> tuple:
    length = case.before + max(case.new)
    return q, k[:, :length], v[:, :length], lengths


_of_8_bits = functools.partial(decode.quantized, jnp.int8)
# The call, and what makes its arguments of a case's inputs.
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "forward": (forward, None),
    "contiguous": (on_cache, lambda *args: args),
    "pages64": (on_pages, functools.partial(decode.paged, 64)),
    "pages16": (on_pages, functools.partial(decode.paged, 16)),
    "int8": (on_cache, _of_8_bits),
    "int8_pages64": (on_pages, in_pages_of_8_bits),
    "int8_entries": (on_cache, _of_8_bits),
}


def stored(case: Case, name: str, *args: Any) -> tuple:
    """Return the arguments of a layout's call."""
    return of_this_length(case, *args) if name == "forward" else LAYOUTS[name][1](*args)


def attend(case: Case, name: str, dtype: Any, implementation: str | None, *args: Any) -> jax.Array:
    """Call a layout with queries, and keys of 16 bits, in another dtype."""
    args = (
        tuple(x.astype(dtype) if x.dtype == jnp.bfloat16 and x.ndim > 2 else x for x in args[:3])
        + args[3:]
    )
    return LAYOUTS[name][0](case, *args, implementation=implementation)


def measure_case(name: str, layouts: list[str], iterations: int) -> dict[str, dict[str, Any]]:
    """Return microseconds and errors of each layout."""
    case, rows = CASES[name], {}
    types = jax.eval_shape(case.inputs)
    compiled: dict[str, list] = {}
    for layout in layouts:
        kinds = [(jnp.bfloat16, None), (jnp.float32, "blockwise"), (jnp.bfloat16, "blockwise")]
        without = mock.patch.object(cached_forward, "_prefers_tiles", lambda *_: False)
        try:
            args = jax.eval_shape(functools.partial(stored, case, layout), *types)
            calls = [functools.partial(attend, case, layout, *kind) for kind in kinds]
            with without if layout == "int8_entries" else contextlib.nullcontext():
                compiled[layout] = [jax.jit(call).lower(*args).compile() for call in calls]
        except Exception as e:  # noqa: BLE001 - one that has no such case must not end the run
            rows[layout] = {"refused": measure.short_error(e)}
    with measure.Gpu.lock:
        args, programs = case.inputs(), {}
        for layout, (run, exact, rounded) in compiled.items():
            own = jax.jit(functools.partial(stored, case, layout))(*args)
            expected = exact(*own)
            allowed = measure.FACTOR * decode.error(rounded(*own), expected)
            rows[layout] = {"error": decode.error(run(*own), expected), "allowed": allowed}
            if rows[layout]["error"] <= allowed:
                programs[layout] = run, own
        for layout, launches in decode.alternate(programs, iterations).items():
            times = [[1e3 * ms for _, ms in kernels] for kernels in launches]
            rows[layout]["us"] = statistics.median(map(sum, times))
            rows[layout]["longest_us"] = statistics.median(map(max, times))
            run, own = programs[layout]
            rows[layout]["host_us"] = host_us(run, own, iterations)
    return {layout: rows[layout] for layout in layouts}


def host_us(run: Any, args: tuple, count: int) -> float:
    """Return the microseconds of a call, of so many that follow each other."""
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    for _ in range(count - 1):
        run(*args)
    jax.block_until_ready(run(*args))
    return 1e6 * (time.perf_counter() - start) / count


def line(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """Return what is printed of a case."""

    def cell(row: dict[str, Any]) -> str:
        if "us" in row:
            return f"{row['us']:.1f} ({row['longest_us']:.1f}) / {row['host_us']:.1f}"
        return row.get("refused", f"wrong result: {row.get('error')}")[:60]

    return f"{name:20} " + ", ".join(f"{layout} {cell(row)}" for layout, row in rows.items())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--layouts", type=names_among(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    args = parser.parse_args(argv)
    jobs.share_memory()
    function = functools.partial(measure_case, layouts=args.layouts, iterations=args.iterations)
    results = {}
    for name, rows in jobs.run_all(function, args.cases, args.jobs):
        results[name] = rows
        print(line(name, rows), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
