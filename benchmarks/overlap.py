"""Says from a trace what each GPU's kernels take, and how much of the collectives no other kernel hides.

python -m benchmarks.overlap traces/causal_128k_ring_4/both     # what `benchmarks.context_parallel --trace` wrote
"""

import argparse
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import record

GROUPS = {"nccl": re.compile("nccl", re.IGNORECASE), "attention": re.compile("attention|gradients")}
Intervals = list[tuple[float, float]]


def traced(run: Callable, args: tuple, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Trace one call into a folder, and return its `kernels` on each GPU."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0  # only kernels
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        jax.block_until_ready(run(*args))
    finally:
        jax.profiler.stop_trace()
    return kernels(folder)


def kernels(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Return for each GPU of the newest trace in a folder the milliseconds of groups of kernels (see `summary`)."""
    newest = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return summaries(jax.profiler.ProfileData.from_file(str(newest)))


def summaries(profile: Any) -> list[dict[str, Any]]:
    events = [
        [
            (event.name, event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream")  # the other lines say the same once more
            for event in line.events
        ]
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
    ]
    return [summary(x) for x in events if x]


def summary(events: list[tuple[str, float, float]]) -> dict[str, Any]:
    """Return milliseconds, given (name, start, end) of a GPU's kernels and copies in nanoseconds.

    A group's time is that in which one of its kernels runs. `exposed` is the time in which only collectives run, in all
    and by their names, and `idle` that in which nothing runs between the first kernel and the last.
    """
    groups: dict[str, Intervals] = {"attention": [], "nccl": [], "others": []}
    by_name: dict[str, Intervals] = {}
    for name, start, end in events:
        group = next((g for g, pattern in GROUPS.items() if pattern.search(name)), "others")
        groups[group].append((start, end))
        if group == "nccl":
            by_name.setdefault(name.split("(")[0], []).append((start, end))
    computed = union(groups["attention"] + groups["others"])
    busy = union(computed + groups["nccl"])

    def exposed(intervals: Intervals) -> float:
        return total(union(intervals + computed)) - total(computed)

    times = {
        "span": busy[-1][1] - busy[0][0],
        "idle": busy[-1][1] - busy[0][0] - total(busy),
        **{name: total(union(intervals)) for name, intervals in groups.items()},
        "exposed": exposed(groups["nccl"]),
        **{f"exposed {name}": exposed(intervals) for name, intervals in by_name.items()},
    }
    return {name: record.rounded(1e-6 * ns) for name, ns in times.items()}


def union(intervals: Intervals) -> Intervals:
    """Return disjoint intervals that cover the same times, in their order."""
    merged: Intervals = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def total(intervals: Intervals) -> float:
    """Return the length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=pathlib.Path, nargs="+")
    for folder in parser.parse_args(argv).folders:
        for gpu, times in enumerate(kernels(folder)):
            print(f"{folder} GPU {gpu}: {json.dumps(times)}")


if __name__ == "__main__":
    main()
