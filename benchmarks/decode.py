"""Times one decode step's attention on a cache beside its rivals on one GPU, after checking the results of all.

    python -m benchmarks.decode                                    # all cases, prints only
    python -m benchmarks.decode --cases b16_s8k,b1_s128k --rivals cudnn
    python -m benchmarks.decode --jobs 8 --json benchmarks/results/nvidia-h200-decode.json

Each sequence has one query, bfloat16, random. Gigabytes a second are those of the keys and values up to the sequences'
lengths, over the time of all kernels of a call by CUPTI, the median of bursts that alternate between the
implementations. An implementation whose error against dense float32 attention is above twice that of dense bfloat16
attention gets no speed. `pages16` and `pages64` are ours on pages in random order, `int8` and `fp8` ours on caches of
8 bits, whose error is against dense attention of the values that they stand for.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from benchmarks import jobs, measure, record
from benchmarks.run import names_among
from pallas_fa2.planning.autotune import kernel_times


@dataclasses.dataclass(frozen=True)
class Case:
    """Caches of `batch` sequences of `kv_len` tokens, or of lengths from a log-normal distribution, the longest
    `kv_len`."""

    batch: int
    kv_len: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    log_normal: bool = False

    def lengths(self) -> np.ndarray:
        """Return the tokens of each sequence, int32 `[batch]`."""
        if not self.log_normal:
            return np.full(self.batch, self.kv_len, np.int32)
        draws = np.random.default_rng(0).lognormal(0.0, 1.0, self.batch)
        return np.maximum(1, draws / draws.max() * self.kv_len).astype(np.int32)

    def gigabytes(self, itemsize: int = 2) -> float:
        """Return the size of the keys and values that a step reads, without scales."""
        return 2e-9 * itemsize * int(self.lengths().sum()) * self.kv_heads * self.head_dim


CASES = {
    "b1_s4k": Case(1, 4096),
    "b8_s1k": Case(8, 1024),
    "b16_s8k": Case(16, 8192),
    "b64_s2k": Case(64, 2048),
    "b256_s1k": Case(256, 1024),
    "b4_s32k": Case(4, 32_768),
    "b1_s128k": Case(1, 131_072),
    "b1_s1m": Case(1, 1_048_576),
    "b16_s8k_mha": Case(16, 8192, 32, 32),
    "b16_s8k_mqa": Case(16, 8192, 32, 1),
    "b16_s8k_d64": Case(16, 8192, 32, 8, 64),
    "b16_s8k_d256": Case(16, 8192, 32, 8, 256),
    "b64_s8k_lognormal": Case(64, 8192, log_normal=True),
}


def inputs(case: Case) -> tuple[jax.Array, ...]:
    """Return query `[B, 1, N, H]`, key and value `[B, S, K, H]`, and the lengths."""
    keys, size = jax.random.split(jax.random.key(0), 3), case.head_dim
    q = jax.random.normal(keys[0], (case.batch, 1, case.q_heads, size), jnp.bfloat16)
    shape = case.batch, case.kv_len, case.kv_heads, size
    k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[1:])
    return q, k, v, jnp.asarray(case.lengths())


def paged(page: int, q: Any, k: Any, v: Any, lengths: Any) -> tuple:
    """Return the arguments with keys and values in pages `[P, page, K, H]` in random order, and the table of these."""
    batch, tokens = k.shape[:2]
    count = batch * tokens // page
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    key, value = (x.reshape(count, page, *x.shape[2:])[np.argsort(order)] for x in (k, v))
    return q, key, value, lengths, jnp.asarray(order.reshape(batch, -1))


def quantized(dtype: Any, q: Any, k: Any, v: Any, lengths: Any) -> tuple:
    """Return the arguments with keys and values of 8 bits, and the scales of these."""
    batch, tokens, heads, size = k.shape
    cache = fa.Cache.zeros(batch, tokens, kv_heads=heads, head_dim=size, dtype=dtype).append(k, v)
    return q, cache.key, cache.value, lengths, cache.k_scale, cache.v_scale


def ours(q: Any, k: Any, v: Any, lengths: Any, *scales: Any) -> Any:
    return fa.cached_attention(q, fa.Cache(k, v, lengths, *scales))


def ours_paged(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
    return fa.cached_attention(q, fa.Pages(k, v, table, lengths))


def cudnn(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, query_seq_lengths=jnp.ones_like(lengths),
        implementation="cudnn",
    )  # fmt: skip


def cudnn_paged(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
    """Run cuDNN on pages through a private function of JAX, which has no public one."""
    from jax._src.cudnn.fused_attention_stablehlo import paged_attention

    table = table[:, None, :, None]
    scale = 1 / math.sqrt(q.shape[-1])
    out: Any = paged_attention(q, k, v, jnp.ones_like(lengths), lengths, table, table, scale=scale)
    return out[0] if isinstance(out, tuple | list) else out


def triton(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """Run JAX's deprecated split-KV kernel, which transposes the cache in each call."""
    from jax.experimental.pallas.ops.gpu import decode_attention

    return decode_attention.gqa(q[:, 0], k, v, kv_seq_len=lengths)[:, None]


def fa3(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    """Run FlashAttention-3's forward on one query, which knows no lengths; its kernel for caches has no port."""
    import dew_flash_attn  # type: ignore[import-not-found]

    return dew_flash_attn.flash_mha(q, k, v)


def xla(q: Any, k: Any, v: Any, lengths: Any) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, key_value_seq_lengths=lengths, implementation="xla"
    )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function of the arrays that `stored` makes of a case's inputs."""

    run: Callable
    stored: Callable[..., tuple] | None = None  # the inputs themselves
    takes_lengths: bool = True  # sequences may have several lengths
    itemsize: int = 2  # bytes of a number in keys and values

    def arguments(self, *args: Any) -> tuple:
        return args if self.stored is None else self.stored(*args)


def _of_8_bits(dtype: Any) -> Implementation:
    return Implementation(ours, functools.partial(quantized, dtype), itemsize=1)


IMPLEMENTATIONS = {
    "ours": Implementation(ours),
    "pages16": Implementation(ours_paged, functools.partial(paged, 16)),
    "pages64": Implementation(ours_paged, functools.partial(paged, 64)),
    "int8": _of_8_bits(jnp.int8),
    "fp8": _of_8_bits(jnp.float8_e4m3fn),
    "cudnn": Implementation(cudnn),
    "cudnn_pages64": Implementation(cudnn_paged, functools.partial(paged, 64)),
    "fa3": Implementation(fa3, takes_lengths=False),
    "triton": Implementation(triton),
    "xla": Implementation(xla),
}
OURS = "ours", "pages16", "pages64", "int8", "fp8"
RESULTS = "nvidia-h200-decode.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks" / "decode.md"


def reference(dtype: Any, q: Any, k: Any, v: Any, lengths: Any, *scales: Any) -> jax.Array:
    """Compute dense attention of the query heads of the last key head, whose scores fit in memory."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q[:, :, -group:].astype(dtype), k[:, :, -1:], v[:, :, -1:]
    if not scales:
        k, v = k.astype(dtype), v.astype(dtype)
    cache = fa.Cache(k, v, lengths, *(x[:, -1:] for x in scales))
    return fa.cached_attention(q, cache, implementation="reference").astype(jnp.float32)


def error(out: jax.Array, expected: jax.Array) -> float:
    """Return the norm of the error of the last key head's queries over that of the expected array."""
    difference = out[:, :, -expected.shape[2] :].astype(jnp.float32) - expected
    return float(f"{jnp.linalg.norm(difference) / jnp.linalg.norm(expected):.3g}")


def measure_case(name: str, names: tuple[str, ...], iterations: int) -> dict[str, Any]:
    """Return a row for each implementation of a case."""
    case = CASES[name]
    types = jax.eval_shape(lambda: inputs(case))
    programs: dict[str, Any] = {}
    references = {"inputs": compiled_references(types)}
    rows: dict[str, dict[str, Any]] = {}
    for who in names:
        how = IMPLEMENTATIONS[who]
        try:
            if case.log_normal and not how.takes_lengths:
                raise NotImplementedError("it knows no lengths")
            args = jax.eval_shape(how.arguments, *types)
            programs[who] = jax.jit(how.run).lower(*args).compile()
        except Exception as e:  # noqa: BLE001 - a rival without this case must not end the run
            rows[who] = {"refused": measure.short_error(e)}
            continue
        if how.itemsize == 1:
            references[who] = compiled_references(args)
    with measure.Gpu.lock:
        args = inputs(case)
        expected = {"inputs": solve(references["inputs"], args)}
        for who, run in list(programs.items()):
            own = jax.jit(IMPLEMENTATIONS[who].arguments)(*args)
            if who in references:
                expected[who] = solve(references[who], own)
            exact, allowed = expected.get(who, expected["inputs"])
            rows[who] = {}
            try:
                rows[who] = {"error": error(run(*own), exact), "allowed": allowed}
                if not rows[who]["error"] <= allowed:
                    raise ValueError("wrong result")
                programs[who] = run, own
            except Exception as e:  # noqa: BLE001 - nor one that runs and fails
                rows[who]["refused"] = measure.describe_failure(e, args)
                del programs[who]
        for who, times in alternate(programs, iterations).items():
            rows[who] |= speed(case.gigabytes(IMPLEMENTATIONS[who].itemsize), times)
    return {
        "case": dataclasses.asdict(case),
        "rows": {n: rows[n] for n in names},
    }


def compiled_references(types: tuple) -> list[Any]:
    """Return dense attention in float32 and in bfloat16, compiled for arguments of these types."""
    return [
        jax.jit(functools.partial(reference, dtype)).lower(*types).compile()
        for dtype in (jnp.float32, jnp.bfloat16)
    ]


def solve(references: list[Any], args: tuple) -> tuple[jax.Array, float]:
    """Return the result of dense float32 attention, and twice the error of dense bfloat16 attention."""
    exact, rounded = (run(*args) for run in references)
    return exact, measure.FACTOR * error(rounded, exact)


def alternate(programs: dict[str, Any], iterations: int) -> dict[str, list]:
    """Return the kernels of each launch of all programs, which take turns in short bursts."""
    launches: dict[str, list] = {who: [] for who in programs}
    for turn in range(measure.ROUNDS):
        for who in list(programs) if turn % 2 == 0 else reversed(programs):
            run, args = programs[who]
            burst = kernel_times(run, args, iterations)
            measure.rest_after([sum(ms for _, ms in kernels) for kernels in burst])
            launches[who] += burst
    return launches


def speed(gigabytes: float, launches: list[list[tuple[str, float]]]) -> dict[str, float]:
    """Return the median milliseconds of all kernels of a launch, and without the longest one, and gigabytes a
    second."""
    ms = statistics.median(sum(ms for _, ms in kernels) for kernels in launches)
    longest = statistics.median(max(ms for _, ms in kernels) for kernels in launches)
    rounded = {"ms": ms, "others_ms": ms - longest, "gb_s": gigabytes / ms * 1e3}
    return {name: record.rounded(x) for name, x in rounded.items()}


def page() -> str:
    """Return docs/benchmarks/decode.md from the committed results."""
    measured = record.load(record.RESULTS / RESULTS)
    setup, run, results = measured["setup"], measured["run"], measured["results"]
    names = [name for name in IMPLEMENTATIONS if any(name in x["rows"] for x in results.values())]
    rows = [
        f"| | {' | '.join(names)} | ours / best rival | 8 bits / 16 |",
        "|" + "---|" * (len(names) + 3),
    ]
    for case, result in results.items():
        speeds = {who: row.get("gb_s") for who, row in result["rows"].items()}
        rivals = [x for who, x in speeds.items() if who not in OURS and x is not None]
        own = result["rows"]["ours"]
        eight_bits = [
            own["ms"] / result["rows"][who].get("ms", math.nan) for who in ("int8", "fp8")
        ]
        cells = ["-" if speeds[name] is None else f"{speeds[name]:.0f}" for name in names]
        cells += [f"{own['gb_s'] / max(rivals, default=math.nan):.3f}", f"{min(eight_bits):.2f}"]
        rows.append(f"| {case} | {' | '.join(cells)} |")
    largest = max(
        row["error"] / row["allowed"]
        for x in results.values()
        for row in x["rows"].values()
        if "error" in row
    )
    return f"""# Speed of a decode step's attention

`python -m benchmarks.pages` writes this page from [{RESULTS}](../../benchmarks/results/{RESULTS}):
{setup["device"]}, driver {setup["driver"]}, jax {setup["jax"]}, {run["date"]}, commit {run["commit"]}.

Gigabytes of keys and values a second, over the time of all kernels of a call. One query for each sequence, bfloat16, N = 32
query heads and, if the name does not say otherwise, K = 8 key heads and H = 128; `b16_s8k` are 16 sequences of 8192 tokens.
`pages16` and `pages64` are ours on pages of so many tokens in random order, `int8` and `fp8` ours on caches of 8 bits, whose
scales are not counted. "8 bits / 16" is the slower one's speed by tokens over that of bfloat16. A call is one kernel: nothing runs before or
after it.

{chr(10).join(rows)}

Largest error over the allowed, twice that of dense bfloat16 attention: {largest:.2f}.
"""


def lines(results: dict[str, Any]) -> list[str]:
    """Return a line for each case: gigabytes a second, and ours over the best rival."""
    text = []
    for name, result in results.items():
        speeds = {who: row.get("gb_s") for who, row in result["rows"].items()}
        known = {who: x for who, x in speeds.items() if x is not None}
        rivals = [x for who, x in known.items() if who not in OURS]
        ratio = f"{known['ours'] / max(rivals):.3f}" if rivals and "ours" in known else "-"
        cells = [f"{who} {x:.0f}" for who, x in known.items()]
        cells += [
            f"{who}: {row['refused'][:60]}"
            for who, row in result["rows"].items()
            if "refused" in row
        ]
        text.append(f"{name:20} {ratio:>6}  " + ", ".join(cells))
    return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--rivals", type=names_among(IMPLEMENTATIONS))
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    record.add_arguments(parser)
    args = parser.parse_args(argv)
    jobs.share_memory()
    names = tuple(IMPLEMENTATIONS) if args.rivals is None else (*OURS, *args.rivals)
    contents: dict[str, Any] = {
        "setup": record.setup({}, args.iterations),
        "run": record.stamp(args.commit),
        "results": {},
    }
    function = functools.partial(measure_case, names=names, iterations=args.iterations)
    for name, result in jobs.run_all(function, args.cases, args.jobs):
        known = contents["results"] | {name: result}
        contents["results"] = {case: known[case] for case in CASES if case in known}
        if args.json:
            record.write(args.json, contents)
        print("\n".join(lines({name: result})), file=sys.stderr, flush=True)
    print(json.dumps({name: lines({name: x}) for name, x in contents["results"].items()}, indent=1))


if __name__ == "__main__":
    main()
