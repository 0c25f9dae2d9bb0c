"""Prints a file of results: TFLOP/s, the ratio of ours to the best rival, and geometric means.

python -m benchmarks.report benchmarks/results/nvidia-h200.json
"""

import argparse
import math
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import record as records
from benchmarks.shapes import SHORT, Shape

PHASES = {"forward": "forward", "both": "forward + backward", "backward": "backward (difference)"}
MAX_SHORT = 2048  # tokens of shapes whose mean is printed separately
# Our kernels, of which the first that has a speed is compared with the rivals.
KERNELS = ("ours", "ampere")
VARIANTS = ("mask_fn", "segments", "array")  # ours under an equivalent mask


def groups(results: dict[str, dict]) -> dict[str, dict]:
    """Group the results by title: plain shapes, those with masks and scores, and short ones."""

    def title(name: str, shape: Shape) -> str:
        if name in SHORT:
            return " of short sequences"
        return " with masks and scores" if shape.has_mods else ""

    grouped: dict[str, dict] = {"": {}, " with masks and scores": {}, " of short sequences": {}}
    for name, result in results.items():
        grouped[title(name, Shape(**result["shape"]))][name] = result
    return {title: group for title, group in grouped.items() if group}


def tflops(row: dict[str, dict], phase: str) -> float | None:
    """Return the TFLOP/s of one implementation, None where it has no speed."""
    if phase != "backward":
        return row.get(phase, {}).get("tflops")
    forward, both = row.get("forward", {}), row.get("both", {})
    if "tflops" not in forward or "tflops" not in both:
        return None
    work = both["tflops"] * both["ms"] - forward["tflops"] * forward["ms"]
    time = both["ms"] - forward["ms"]
    return work / time if time > 0 else None


def ratio(rows: dict[str, dict], phase: str) -> float | None:
    """Return the speed of ours over that of the best rival, None without either."""
    speeds = {name: x for name, row in rows.items() if (x := tflops(row, phase)) is not None}
    ours = next((speeds[name] for name in KERNELS if name in speeds), None)
    rivals = [x for name, x in speeds.items() if name not in (*KERNELS, *VARIANTS)]
    return None if ours is None or not rivals else ours / max(rivals)


def cost_of_functions(results: dict[str, dict], phase: str) -> str | None:
    """Compare the time under a user's mask function with that under the equivalent built-in mask."""
    pairs = {
        name: [tflops(result["rows"].get(who, {}), phase) for who in ("ours", "mask_fn")]
        for name, result in results.items()
    }
    costs = {name: x / y for name, (x, y) in pairs.items() if x is not None and y is not None}
    if not costs:
        return None
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{PHASES[phase]} under a user's mask_fn over the built-in mask, time: geometric mean "
        f"{geometric_mean(costs.values()):.3f} over {len(costs)} shapes, most {costs[most]:.3f} ({most})"
    )


def summary(results: dict[str, dict], phase: str) -> str:
    """Return the geometric means of the ratios over all shapes and over the short ones, and the smallest ratio."""
    ratios = {name: ratio(result["rows"], phase) for name, result in results.items()}
    known = {name: x for name, x in ratios.items() if x is not None}
    if not known:
        return "no shape has both ours and a rival"
    short = [
        x
        for name, x in known.items()
        if max(results[name]["shape"]["q_len"], results[name]["shape"]["kv_len"]) <= MAX_SHORT
    ]
    least = min(known, key=lambda name: known[name])
    clauses = [f"geometric mean {geometric_mean(known.values()):.3f} over {len(known)} shapes"]
    if short:
        clauses.append(
            f"{geometric_mean(short):.3f} over the {len(short)} up to {MAX_SHORT} tokens"
        )
    clauses.append(f"least {known[least]:.3f} ({least})")
    if missing := len(ratios) - len(known):
        clauses.append(f"{missing} without a ratio")
    return ", ".join(clauses)


def geometric_mean(values: Any) -> float:
    return math.exp(statistics.fmean(math.log(x) for x in values))


def speed(row: dict[str, dict], phase: str) -> str | None:
    """Return TFLOP/s as a cell of a table, None without a speed."""
    value = tflops(row, phase)
    return None if value is None else f"{value:.0f}"


def implementations(results: dict[str, dict]) -> list[str]:
    """Return the implementations of all shapes in their order."""
    return list(dict.fromkeys(name for result in results.values() for name in result["rows"]))


def table(
    results: dict[str, dict],
    phase: str,
    cell: Callable[[dict[str, dict], str], str | None] = speed,
    names: list[str] | None = None,
) -> str:
    """Return a Markdown table of some implementations, or of all."""
    names = implementations(results) if names is None else names
    lines = [
        f"| shape | {' | '.join(names)} | ours / best rival |",
        "|---" * (len(names) + 2) + "|",
    ]
    for shape, result in results.items():
        cells = [cell(result["rows"].get(name, {}), phase) or "-" for name in names]
        r = ratio(result["rows"], phase)
        lines.append(f"| {shape} | {' | '.join(cells)} | {'-' if r is None else f'{r:.2f}'} |")
    return "\n".join(lines)


def refusals(results: dict[str, dict]) -> list[str]:
    """Return a line for each implementation and reason that it has no speed, with the shapes."""
    shapes: dict[str, list[str]] = {}
    for shape, result in results.items():
        for name, row in result["rows"].items():
            for phase, cell in row.items():
                if "refused" in cell:
                    error = f" {cell['error']}" if "error" in cell else ""
                    why = f"{name}, {PHASES[phase]}: {cell['refused']}{error}"
                    shapes.setdefault(why, []).append(shape)
    return [f"{why} ({', '.join(names)})" for why, names in shapes.items()]


def worst_errors(results: dict[str, dict]) -> dict[str, float]:
    """Return the largest error over the allowed one of each implementation that has a speed."""
    worst: dict[str, float] = {}
    for result in results.values():
        for name, row in result["rows"].items():
            for cell in row.values():
                if "tflops" in cell:
                    for e, limit in zip(cell["error"], result["allowed"], strict=False):
                        worst[name] = max(worst.get(name, 0.0), e / limit)
    return worst


def report(record: dict[str, Any]) -> str:
    results = record["results"]
    lines = [", ".join(f"{name} {value}" for name, value in record["setup"].items())]
    lines += [
        f"{run['date']}, {run['commit']}: {len(run['shapes'])} shapes, 8192³ matrix product "
        f"{run['matmul']:.0f} TFLOP/s"
        for run in record["runs"]
    ]
    for phase, title in PHASES.items():
        for suffix, group in groups(results).items():
            lines += [f"\n{title}{suffix}, TFLOP/s: {summary(group, phase)}\n", table(group, phase)]
    costs = (cost_of_functions(results, phase) for phase in ("forward", "both"))
    lines += [f"\n{line}" for line in costs if line is not None]
    errors = ", ".join(f"{name} {ratio:.2f}" for name, ratio in worst_errors(results).items())
    lines += [f"\nlargest error over the allowed: {errors}"]
    if refused := refusals(results):
        lines += ["\nwithout a speed:", *(f"- {line}" for line in refused)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    print(report(records.load(parser.parse_args(argv).file)))


if __name__ == "__main__":
    main()
