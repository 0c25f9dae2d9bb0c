"""Times attention of sequences that are divided over the GPUs of one host, beside one of them.

    python -m benchmarks.context_parallel                                   # all cases that the GPUs take, prints only
    python -m benchmarks.context_parallel --cases causal_32k,full_32k --strategies ring
    python -m benchmarks.context_parallel --devices 4 --jobs 8 --json benchmarks/results/nvidia-h200-x4.json

Inputs are random bfloat16, H = 128, N = 32 query heads and K = 8 key heads. A time is the median of the milliseconds
between calls that follow each other, as the host sees them; `speedup` is one GPU's time over that of n GPUs, and
`efficiency` is speedup / n. Out and gradients are compared with those of one GPU: a difference of more than twice that of
dense bfloat16 attention from float32 (1 %) gets no speed. Inputs lie in the order of the layout before and after, as in
training, and are not moved for the call.

Strategies are those of `context_parallel_attention`, `jit` (flash_attention on arrays that are divided along the
sequence, without shard_map) and `heads` (flash_attention on divided heads, for comparison).
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from benchmarks import jobs, measure, record
from benchmarks.run import names_among

AXIS = "sequence"
RESULTS = "nvidia-h200-x2.json"
PAGE = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks" / "context-parallel.md"
HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128  # Llama-8B's
STRATEGIES = "ring", "all_gather", "ulysses", "jit", "heads"
ALLOWED = 0.01  # of the norm: bfloat16 has 8 bits, and blocks are rounded once more
# Of launches for one time: more heats the GPU. One launch of 524,288 tokens takes longer.
SECONDS = 0.7


@dataclasses.dataclass(frozen=True)
class Case:
    """A mask on a sequence of `length` tokens: "causal", "full", or "documents" of 4096 tokens in the mean."""

    mask: str
    length: int
    layout: Any = "zigzag"

    def ids(self) -> np.ndarray:
        """Return the document of each token, int32 `[1, length]`; lengths are exponential, as if cuts were random."""
        starts = np.random.default_rng(0).random(self.length) < 1 / 4096
        return np.cumsum(starts, dtype=np.int32)[None]

    def order(self, shards: int) -> np.ndarray:
        """Return the positions of the tokens in the order in which devices have them."""
        if self.layout == "zigzag":
            return fa.zigzag(self.length, shards).permutation
        return np.arange(self.length, dtype=np.int32)


CASES = {
    f"{mask}_{length // 1024}k{'' if layout == 'zigzag' else '_contiguous'}": Case(mask, length, layout)
    for mask, length, layout in (
        ("causal", 32_768, "zigzag"),
        ("causal", 131_072, "zigzag"),
        ("causal", 524_288, "zigzag"),
        ("full", 32_768, "contiguous"),
        ("full", 131_072, "contiguous"),
        ("documents", 131_072, "zigzag"),
        ("documents", 131_072, "contiguous"),
    )
}  # fmt: skip


def options(case: Case, ids: Any) -> dict[str, Any]:
    """Return what a call of attention takes for the mask of a case, given the documents of its tokens."""
    if case.mask == "full":
        return {}
    return {"mask": fa.Causal() if case.mask == "causal" else fa.Causal() & fa.Segments(ids)}


def forward(attention: Callable, case: Case) -> Callable:
    """Return (q, k, v, ids) -> out."""
    return lambda q, k, v, ids: (attention(q, k, v, **options(case, ids)),)


def both(attention: Callable, case: Case) -> Callable:
    """Return (q, k, v, ids, dout) -> out, dq, dk, dv."""

    def run(q: Any, k: Any, v: Any, ids: Any, dout: Any) -> tuple:
        out, pull = jax.vjp(lambda *x: attention(*x, **options(case, ids)), q, k, v)
        return out, *pull(dout)

    return run


def inputs(case: Case, order: np.ndarray) -> tuple[jax.Array, ...]:
    """Return q, k, v, ids and dout of a case, on one device, in this order of tokens."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = HEADS, KEY_HEADS, KEY_HEADS, HEADS
    q, k, v, dout = (
        jax.random.normal(key, (1, case.length, n, HEAD_DIM), jnp.bfloat16)[:, order]
        for key, n in zip(keys, heads, strict=True)
    )
    return q, k, v, jnp.asarray(case.ids()[:, order]), dout


PHASES = {"forward": (forward, 4), "both": (both, 5)}  # and how many arguments they have


def program(case: Case, strategy: Any, mesh: Mesh, make: Callable) -> Any:
    """Return the jitted function that `make` makes of a strategy, or of flash_attention on one device."""
    if strategy == "one":
        return jax.jit(make(fa.flash_attention, case))
    divided = P(None, None, AXIS) if strategy == "heads" else P(None, AXIS)
    ids = P() if strategy == "heads" else P(None, AXIS)
    specs = (divided, divided, divided, ids, divided)[: 4 if make is forward else 5]
    if strategy in ("jit", "heads"):
        attention: Callable = fa.flash_attention
        if strategy == "jit" and case.layout == "zigzag":
            positions = jnp.asarray(case.order(mesh.size))
            attention = functools.partial(attention, q_positions=positions, kv_positions=positions)
        run = make(attention, case)
    else:
        attention = functools.partial(
            fa.context_parallel_attention, axis_name=AXIS, strategy=strategy, layout=case.layout
        )
        results = (divided,) * (1 if make is forward else 4)
        run = jax.shard_map(
            make(attention, case), mesh=mesh, in_specs=specs, out_specs=results, check_vma=False
        )
    return jax.jit(run, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


def milliseconds(run: Callable, args: tuple) -> float:
    """Return the median over three rounds of the milliseconds of a call among calls that follow each other."""
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    count = max(1, int(SECONDS / 3 / (time.perf_counter() - start)))
    rounds = []
    for _ in range(3):
        start = time.perf_counter()
        results = [run(*args) for _ in range(count)][-1]
        jax.block_until_ready(results)
        rounds.append(1e3 * (time.perf_counter() - start) / count)
        del results
        time.sleep(SECONDS / 3)
    return statistics.median(rounds)


def differences(results: tuple, expected: tuple) -> list[float]:
    """Return the norm of each difference over that of the expected array."""

    @jax.jit
    def squares(x: Any, y: Any) -> Any:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        return jnp.sum((x - y) ** 2), jnp.sum(y**2)

    return [
        float(f"{np.sqrt(float(d) / float(n)):.3g}")
        for d, n in (squares(x, y) for x, y in zip(results, expected, strict=True))
    ]


Programs = dict[tuple[str, str], Any]  # (strategy, phase): a compiled program, or why there is none


def compile_case(case: Case, strategies: tuple[str, ...], mesh: Mesh) -> Programs:
    """Compile the forward, and forward + backward, for one GPU and of each strategy for those of the mesh."""
    arrays = jax.eval_shape(lambda: inputs(case, np.arange(case.length)))
    programs: Programs = {}
    for phase, (make, count) in PHASES.items():
        for strategy in ("one", *strategies):
            try:
                run = program(case, strategy, mesh, make)
                programs[strategy, phase] = run.lower(*arrays[:count]).compile()
            except Exception as e:  # noqa: BLE001 - a strategy without this case must not end the run
                programs[strategy, phase] = measure.short_error(e)
    return programs


def measure_case(name: str, strategies: tuple[str, ...], devices: int) -> dict[str, Any]:
    """Return milliseconds and differences of one GPU and of each strategy on several, forward and forward + backward."""
    case = CASES[name]
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    programs = compile_case(case, strategies, mesh)
    rows: dict[str, dict[str, Any]] = {x: {} for x in ("one", *strategies)}
    with measure.Gpu.lock:
        args = inputs(case, np.arange(case.length))
        for phase, (_, count) in PHASES.items():
            one = programs["one", phase]
            ms, expected = milliseconds(one, args[:count]), one(*args[:count])
            rows["one"][phase] = {"ms": _rounded(ms)}
            for strategy in strategies:
                order = np.arange(case.length) if strategy == "heads" else case.order(devices)
                in_order = tuple(x[:, order] for x in args[:count])
                row = measured(programs[strategy, phase], in_order, expected, order)
                if max(row.get("difference", [1.0])) <= ALLOWED:
                    speedup = ms / row["ms"]
                    row |= {"speedup": speedup, "efficiency": speedup / devices}
                rows[strategy][phase] = {key: _rounded(x) for key, x in row.items()}
    return {"case": dataclasses.asdict(case), "devices": devices, "rows": rows}


def measured(run: Any, args: tuple, expected: tuple, order: np.ndarray) -> dict[str, Any]:
    """Return the time of a program on several GPUs and the differences from one GPU's results, or why there are none."""
    if isinstance(run, str):
        return {"refused": run}
    one = jax.devices()[0]
    divided = tuple(map(jax.device_put, args, run.input_shardings[0]))
    row: dict[str, Any] = {"ms": milliseconds(run, divided)}
    results = tuple(jax.device_put(x, one) for x in run(*divided))
    row["difference"] = differences(results, tuple(x[:, order] for x in expected))
    return row


def _rounded(x: Any) -> Any:
    return record.rounded(x) if isinstance(x, float) else x


def page() -> str:
    """Return docs/benchmarks/context-parallel.md from the committed results."""
    measured = record.load(record.RESULTS / RESULTS)
    setup, run, results = measured["setup"], measured["run"], measured["results"]
    names = [name for name in STRATEGIES if any(name in x["rows"] for x in results.values())]
    rows = [
        "| | pass | one GPU, ms | " + " | ".join(names) + " |",
        "|" + "---|" * (len(names) + 3),
    ]
    for case, result in results.items():
        for phase, title in (("forward", "forward"), ("both", "with the backward")):
            cells = [result["rows"].get(name, {}).get(phase, {}) for name in names]
            text = [
                f"{x['ms']:.2f} ({x['efficiency']:.3f})" if "efficiency" in x else "-"
                for x in cells
            ]
            one = result["rows"]["one"][phase]["ms"]
            rows.append(f"| {case} | {title} | {one:.2f} | {' | '.join(text)} |")
    devices = next(iter(results.values()))["devices"]
    return f"""# Speed of sequences over several GPUs

`python -m benchmarks.pages` writes this page from [{RESULTS}](../../benchmarks/results/{RESULTS}):
{devices} of {setup["device"]} of one host, driver {setup["driver"]}, jax {setup["jax"]}, {run["date"]}, commit {run["commit"]}.

Milliseconds, and the speed over {devices} times that of one GPU. bfloat16, N = 32, K = 8, H = 128; causal cases and documents (4096
tokens in the mean) in zigzag order if their name does not say otherwise. `heads` has heads divided and moves nothing.
{run.get("note", "")}

{chr(10).join(rows)}
"""


def lines(results: dict[str, Any]) -> list[str]:
    """Return a line for each strategy of each case."""
    return [
        f"{name:26} {strategy:10} " + "; ".join(f"{phase} {json.dumps(x)}" for phase, x in row.items())
        for name, result in results.items()
        for strategy, row in result["rows"].items()
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    strategies: dict[str, Any] = dict.fromkeys(STRATEGIES)
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--strategies", type=names_among(strategies), default=list(STRATEGIES))
    parser.add_argument("--devices", type=int, help="GPUs, all by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    record.add_arguments(parser)
    args = parser.parse_args(argv)
    jobs.share_memory()
    devices = args.devices or jax.device_count()
    contents: dict[str, Any] = {
        "setup": record.setup({}, 0),
        "run": record.stamp(args.commit),
        "results": {},
    }
    function = functools.partial(measure_case, strategies=tuple(args.strategies), devices=devices)
    for name, result in jobs.run_all(function, args.cases, args.jobs):
        contents["results"][name] = result
        if args.json:
            record.write(args.json, contents)
        print("\n".join(lines({name: result})), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
