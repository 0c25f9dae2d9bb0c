"""Times attention of sequences that are divided over the GPUs of one host, beside one of them.

    python -m benchmarks.context_parallel                                   # all cases that the GPUs take, prints only
    python -m benchmarks.context_parallel --cases causal_32k,full_32k --strategies ring
    python -m benchmarks.context_parallel --devices 2,4 --jobs 24 --limit 400 --json x4.json
    python -m benchmarks.context_parallel --cases causal_128k --strategies ring --devices 4 --trace traces

Inputs are random bfloat16, H = 128, N = 32 query heads and K = 8 key heads. A time is the median of the milliseconds
between calls that follow each other, as the host sees them; `speedup` is one GPU's time over that of n GPUs, and
`efficiency` is speedup / n. Out and gradients of 1024 tokens, spread over the sequence, are compared with those of one
GPU: a difference of more than twice that of dense bfloat16 attention from float32 (1 %) gets no speed. Inputs lie in
the order of the layout before and after, as in training, and are not moved for the call.

Strategies are those of `context_parallel_attention`, `jit` (flash_attention on arrays that are divided along the
sequence, without shard_map) and `heads` (flash_attention on divided heads, for comparison). Where a number of GPUs has
two factors, the sequence is also divided over one of them and heads over the other. `llama_256k` is a training step of
`benchmarks.llama_step`.

Each row, a case on some GPUs, has a process of its own, which compiles beside the others. With `--trace` one more call
of each phase is traced, and the times of its kernels (`benchmarks.overlap`) are part of the row.
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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa
from benchmarks import jobs, llama_step, measure, overlap, packing, record
from benchmarks.divisions import (
    CASES,
    HEAD_AXIS,
    IN_SHARD_MAP,
    ONE,
    SEQUENCE,
    STRATEGIES,
    Case,
    Division,
    divisions,
)
from benchmarks.run import names_among

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128  # Llama-8B's
ALLOWED = 0.01  # of the norm: bfloat16 has 8 bits, and blocks are rounded once more
SAMPLES = 1024  # tokens whose results are compared: all of 524,288 tokens would take longer to move than to compute
# Of calls in a round: a second of them heats the GPU, and the host's part of one call is 0.1 ms. Calls of LONG seconds
# have one round: they would take minutes, and differ less.
SECONDS, ROUNDS, LONG = 0.15, 3, 2.0
MOST_ELEMENTS = 2**31 - 1


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


def random_bits(seed: int, counters: Any) -> Any:
    """Hash uint32 counters by MurmurHash3's finalizer: element by element, so that each device makes its own tokens."""
    x = counters ^ jnp.uint32(seed * 0x9E3779B9 % 2**32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def normal_from_bits(bits: jax.Array) -> jax.Array:
    """Return a number of a normal distribution, bfloat16, for each uint32. All are finite: of 2^29 there is any
    word."""
    # 23 bits and a half, which float32 has exactly: with more, the largest word would become 1, and infinity.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2**-22 - 1
    return (jax.lax.erf_inv(uniform) * 2**0.5).astype(jnp.bfloat16)


def inputs(case: Case, positions: Any) -> tuple[jax.Array, ...]:
    """Return q, k, v, ids and dout of the tokens at these positions; they depend on no other position."""
    at = jnp.asarray(positions, jnp.uint32)[None, :, None, None]

    def normal(seed: int, heads: int) -> jax.Array:
        row = jnp.arange(heads * HEAD_DIM, dtype=jnp.uint32).reshape(1, 1, heads, HEAD_DIM)
        return normal_from_bits(random_bits(seed, at * jnp.uint32(heads * HEAD_DIM) + row))

    heads = HEADS, KEY_HEADS, KEY_HEADS, HEADS
    q, k, v, dout = (normal(seed, n) for seed, n in enumerate(heads, 1))
    return q, k, v, jnp.asarray(case.ids_at(positions)), dout


class Phase(NamedTuple):
    """A function to be timed, how many of the inputs it takes, and what of its results is compared."""

    run: Any  # jitted
    arguments: int
    sample: Callable[[tuple], tuple]


def on_one_device(q: Any, k: Any, v: Any, **options: Any) -> jax.Array:
    """Compute `flash_attention`, of some heads after others where all have 2^31 elements: no kernel takes as many."""
    calls = -(-q[0].size // MOST_ELEMENTS)
    parts = (jnp.split(x, calls, 2) for x in (q, k, v))
    outs = [fa.flash_attention(*x, **options) for x in zip(*parts, strict=True)]
    return jnp.concatenate(outs, 2) if calls > 1 else outs[0]


def local_attention(case: Case, division: Division) -> Callable:
    """Return the attention of a device inside `shard_map`."""
    strategy: Any = division.strategy
    attend = functools.partial(
        fa.context_parallel_attention,
        axis_name=SEQUENCE,
        strategy=strategy,
        layout=case.device_layout,
    )
    if case.layout != "balanced":
        return attend
    # The window takes nothing from documents of at most its length, but says what a device may have to see of others.
    return lambda q, k, v, mask: attend(q, k, v, mask=mask & fa.SlidingWindow(packing.LONGEST))


def attention_phases(case: Case, division: Division) -> tuple[Callable, Any, dict[str, Phase]]:
    """Return what makes the inputs, where these lie, and the forward, and forward + backward, of a division."""
    divided = P(None, SEQUENCE, HEAD_AXIS)
    specs = (divided, divided, divided, P(None, SEQUENCE), divided)
    order = case.order(division.sequence)
    tokens = np.argsort(order)[sampled(case.length)]
    attention: Callable = on_one_device if division == ONE else fa.flash_attention
    if division.strategy in IN_SHARD_MAP:
        attention = local_attention(case, division)
    elif division.sequence > 1 and case.layout == "zigzag":
        positions = jnp.asarray(order)
        attention = functools.partial(attention, q_positions=positions, kv_positions=positions)
    phases = {}
    for name, (make, count, results) in {"forward": (forward, 4, 1), "both": (both, 5, 4)}.items():
        run = make(attention, case)
        if division.strategy in IN_SHARD_MAP:
            run = jax.shard_map(
                run, mesh=division.mesh(), in_specs=specs[:count], out_specs=(divided,) * results,
                check_vma=False,
            )  # fmt: skip
        run = jax.jit(run, in_shardings=division.shardings(specs[:count]))
        phases[name] = Phase(run, count, lambda arrays: tuple(x[:, tokens] for x in arrays))
    return functools.partial(inputs, case, order), division.shardings(specs), phases


def model_phases(case: Case, division: Division) -> tuple[Callable, Any, dict[str, Phase]]:
    """Return what makes parameters and tokens, where these lie, and the training step of a division."""
    sizes = llama_step.sizes(case.layers, HEADS, KEY_HEADS, HEAD_DIM)
    order = case.order(division.sequence)
    specs = (P(), P(None, SEQUENCE), P(None, SEQUENCE), P(SEQUENCE))

    def make() -> tuple:
        words = [random_bits(0, jnp.uint32(order + i)) % sizes.vocabulary for i in range(2)]
        tokens, labels = (x.astype(jnp.int32)[None] for x in words)
        return llama_step.parameters(sizes), tokens, labels, jnp.asarray(order)

    if division == ONE:
        attention: Any = functools.partial(fa.flash_attention, is_causal=True)
        step: Any = llama_step.make_step(attention, case.length)
    else:
        attention = functools.partial(local_attention(case, division), is_causal=True)
        step = llama_step.make_step(attention, case.length, SEQUENCE)
        step = jax.shard_map(
            step, mesh=division.mesh(), in_specs=specs, out_specs=P(), check_vma=False
        )
    places = division.shardings(specs)
    phase = Phase(jax.jit(step, in_shardings=places), 4, lambda results: results[1])
    return make, places, {"step": phase}


def sampled(length: int) -> np.ndarray:
    """Return the positions of SAMPLES tokens, each from another part of the sequence."""
    count = min(SAMPLES, length)
    part = length // count
    return np.arange(count) * part + np.random.default_rng(1).integers(0, part, count)


def milliseconds(run: Callable, args: tuple) -> tuple[float, tuple]:
    """Return the median over the rounds of the milliseconds of a call among calls that follow each other, and its
    results."""
    results: tuple = ()

    def seconds(count: int) -> float:
        nonlocal results
        start = time.perf_counter()
        for _ in range(count):
            results = run(*args)  # the results before are freed
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / count

    seconds(1)  # loads kernels, and connects devices
    # The results of the call before are alive while a call runs: the second allocates memory that later ones have.
    times = [seconds(1)]
    if times[0] < LONG:
        count = max(1, int(SECONDS / times[0]))
        times = [seconds(count) for _ in range(ROUNDS)]
    return 1e3 * statistics.median(times), results


class Compiled(NamedTuple):
    """The compiled programs of a phase: what is timed, and what of its results is compared."""

    run: Any
    sample: Any
    arguments: int


# Autotuning is off where several processes compile, and Triton's products of matrices are slow without.
COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def compile_phase(phase: Phase, arguments: tuple, division: Division) -> Compiled:
    """Compile a phase for arguments of these shapes, and what is compared of its results."""
    lowered = phase.run.lower(*arguments[: phase.arguments])
    run = lowered.compile(COMPILER_OPTIONS if jax.default_backend() == "gpu" else None)
    results = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        lowered.out_info,
        run.output_shardings,
    )
    sample = jax.jit(phase.sample, out_shardings=division.shardings(P()))
    return Compiled(run, sample.lower(results).compile(), phase.arguments)


def measure_row(
    name: str,
    rows: dict[str, tuple[Case, Division]],
    end: float | None,
    traces: pathlib.Path | None,
) -> dict[str, Any] | None:
    """Return milliseconds and sampled results of each phase of a row, or None if the time was over before."""
    case, division = rows[name]

    # A division that this case does not have, or has no memory for, must not end the run.
    result: dict[str, Any] = {}
    try:
        make, places, phases = (model_phases if case.layers else attention_phases)(case, division)
        arguments = jax.eval_shape(make)
        make = jax.jit(make, out_shardings=places).lower().compile()
    except Exception as e:  # noqa: BLE001
        return {phase: refused(e) for phase in (("step",) if case.layers else ("forward", "both"))}
    programs: dict[str, Compiled] = {}
    for phase, x in phases.items():
        if jobs.is_over(end):
            return None
        try:
            programs[phase] = compile_phase(x, arguments, division)
        except Exception as e:  # noqa: BLE001
            result[phase] = refused(e)
    with measure.Gpu.lock:
        if jobs.is_over(end):
            return None
        args = make() if programs else ()
        for phase, program in programs.items():
            trace = traces and traces / name.replace(" ", "_") / phase
            try:
                result[phase] = measure_program(program, args[: program.arguments], trace)
            except Exception as e:  # noqa: BLE001
                result[phase] = refused(e)
    return result


def refused(e: Exception) -> dict[str, str]:
    """Return the result of a phase that raised an error."""
    return {"refused": measure.short_error(e)}


def measure_program(program: Compiled, args: tuple, trace: pathlib.Path | None) -> dict[str, Any]:
    """Return the time of a program, its sampled results, and its kernels if it is traced."""
    ms, results = milliseconds(program.run, args)
    sample = [np.asarray(x, np.float32) for x in jax.tree.leaves(program.sample(results))]
    row: dict[str, Any] = {"ms": record.rounded(ms), "sample": sample}
    del results
    if trace is not None:
        try:
            row["trace"] = overlap.traced(program.run, args, trace)
        except Exception as e:  # noqa: BLE001 - the time is known nevertheless
            row["trace"] = refused(e)
    return row


def differences(results: list, expected: list) -> list[float]:
    """Return the norm of each difference over that of the expected array."""
    pairs = zip(results, expected, strict=True)
    return [float(f"{np.linalg.norm(x - y) / np.linalg.norm(y):.3g}") for x, y in pairs]


def grade(rows: dict[str, dict[str, Any]], known: dict[str, Division]) -> dict[str, Any]:
    """Return the rows of a case with their differences from one GPU and, where these are allowed, their speed-ups."""
    graded: dict[str, Any] = {}
    for name, row in rows.items():
        division, one = known[name], rows.get(ONE.name, {})
        graded[name] = division._asdict() | {"devices": division.devices}
        for phase, x in row.items():
            result = {key: value for key, value in x.items() if key != "sample"}
            expected = one.get(phase, {})
            if division != ONE and "sample" in x and "sample" in expected:
                result["difference"] = differences(x["sample"], expected["sample"])
                if max(result["difference"]) <= ALLOWED:
                    speedup = expected["ms"] / x["ms"]
                    result["speedup"] = record.rounded(speedup)
                    result["efficiency"] = record.rounded(speedup / division.devices)
            graded[name][phase] = result
    return graded


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line, or of `argv`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [int(x) for x in text.split(",")]

    strategies: dict[str, Any] = dict.fromkeys(STRATEGIES)
    parser.add_argument("--cases", type=names_among(CASES), default=list(CASES))
    parser.add_argument("--strategies", type=names_among(strategies), default=list(STRATEGIES))
    parser.add_argument("--devices", type=numbers, help="numbers of GPUs, by default that of all")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--limit", type=float, help="seconds after which nothing is started")
    parser.add_argument("--trace", type=pathlib.Path, help="a folder for traces")
    record.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    end = None if args.limit is None else time.monotonic() + args.limit
    jobs.share_memory()
    counts = args.devices or [jax.device_count()]
    known = {
        case: {x.name: x for x in divisions(CASES[case], args.strategies, counts)}
        for case in args.cases
    }
    rows = {
        f"{case} {name}": (CASES[case], division)
        for case, named in known.items()
        for name, division in named.items()
    }
    measured: dict[str, dict[str, Any]] = {case: {} for case in args.cases}
    results: dict[str, Any] = {}
    contents = {"setup": record.setup({}, 0), "run": record.stamp(args.commit), "results": results}
    measure_named = functools.partial(measure_row, rows=rows, end=end, traces=args.trace)
    for name, row in jobs.run_all(measure_named, list(rows), args.jobs, end):
        case, _, division = name.partition(" ")
        measured[case][division] = row
        # With the row of one GPU, rows that were measured before it get their speed-ups, and are printed again.
        graded = grade(measured[case], known[case])
        results[case] = {"case": dataclasses.asdict(CASES[case]), "rows": graded}
        if args.json:
            record.write(args.json, contents)
        for changed in graded if division == ONE.name else [division]:
            phases = measured[case][changed]
            text = "; ".join(f"{phase} {json.dumps(graded[changed][phase])}" for phase in phases)
            print(f"{case} {changed}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
