"""What a file of results says: TFLOP/s, the ratio of ours to the best rival, and their means.

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

PARTS = {"forward": "forward", "both": "forward + backward", "backward": "backward (difference)"}
UP_TO = 2048
# The others are ours under a mask of the same meaning.
OURS = ("ours", "mask_fn", "segments", "array")


def groups(results: dict[str, dict]) -> dict[str, dict]:
    """Plain shapes apart from those with masks and scores, and from short ones, by title."""

    def title(name: str, shape: Shape) -> str:
        if name in SHORT:
            return " of short sequences"
        return " with masks and scores" if shape.general else ""

    found: dict[str, dict] = {"": {}, " with masks and scores": {}, " of short sequences": {}}
    for name, result in results.items():
        found[title(name, Shape(**result["shape"]))][name] = result
    return {title: of_group for title, of_group in found.items() if of_group}


def tflops(row: dict[str, dict], part: str) -> float | None:
    """Of one implementation, None where it was refused."""
    if part != "backward":
        return row.get(part, {}).get("tflops")
    forward, both = row.get("forward", {}), row.get("both", {})
    if "tflops" not in forward or "tflops" not in both:
        return None
    work = both["tflops"] * both["ms"] - forward["tflops"] * forward["ms"]
    time = both["ms"] - forward["ms"]
    return work / time if time > 0 else None


def ratio(rows: dict[str, dict], part: str) -> float | None:
    """Ours over the best rival, None without either."""
    rivals = (tflops(row, part) for name, row in rows.items() if name not in OURS)
    ours = tflops(rows.get("ours", {}), part)
    best = max((x for x in rivals if x is not None), default=None)
    return None if ours is None or best is None else ours / best


def cost_of_functions(results: dict[str, dict], part: str) -> str | None:
    """What a user's mask takes of the time of the ready-made one, which means the same."""
    pairs = {
        name: [tflops(result["rows"].get(who, {}), part) for who in OURS[:2]]
        for name, result in results.items()
    }
    costs = {name: x / y for name, (x, y) in pairs.items() if x is not None and y is not None}
    if not costs:
        return None
    most = max(costs, key=lambda name: costs[name])
    return (
        f"{PARTS[part]} under a user's mask_fn over the ready-made mask, time: geometric mean "
        f"{geometric_mean(costs.values()):.3f} over {len(costs)} shapes, most {costs[most]:.3f} ({most})"
    )


def summary(results: dict[str, dict], part: str) -> str:
    """Geometric means of the ratios over all shapes and over the short ones, and the least."""
    ratios = {name: ratio(result["rows"], part) for name, result in results.items()}
    known = {name: x for name, x in ratios.items() if x is not None}
    if not known:
        return "no shape has both ours and a rival"
    short = [
        x
        for name, x in known.items()
        if max(results[name]["shape"]["q_len"], results[name]["shape"]["kv_len"]) <= UP_TO
    ]
    least = min(known, key=lambda name: known[name])
    parts = [f"geometric mean {geometric_mean(known.values()):.3f} over {len(known)} shapes"]
    if short:
        parts.append(f"{geometric_mean(short):.3f} over the {len(short)} up to {UP_TO} tokens")
    parts.append(f"least {known[least]:.3f} ({least})")
    if missing := len(ratios) - len(known):
        parts.append(f"{missing} without a ratio")
    return ", ".join(parts)


def geometric_mean(values: Any) -> float:
    return math.exp(statistics.fmean(math.log(x) for x in values))


def speed(row: dict[str, dict], part: str) -> str | None:
    """TFLOP/s as a cell of a table, None without a speed."""
    found = tflops(row, part)
    return None if found is None else f"{found:.0f}"


def implementations(results: dict[str, dict]) -> list[str]:
    """Those of all shapes, in the order in which they come."""
    return list(dict.fromkeys(name for result in results.values() for name in result["rows"]))


def table(
    results: dict[str, dict],
    part: str,
    cell: Callable[[dict[str, dict], str], str | None] = speed,
    names: list[str] | None = None,
) -> str:
    """A Markdown table of some implementations, or of all."""
    names = implementations(results) if names is None else names
    lines = [
        f"| shape | {' | '.join(names)} | ours / best rival |",
        "|---" * (len(names) + 2) + "|",
    ]
    for shape, result in results.items():
        cells = [cell(result["rows"].get(name, {}), part) or "-" for name in names]
        r = ratio(result["rows"], part)
        lines.append(f"| {shape} | {' | '.join(cells)} | {'-' if r is None else f'{r:.2f}'} |")
    return "\n".join(lines)


def refusals(results: dict[str, dict]) -> list[str]:
    """Who has no speed, on which shapes, and why."""
    shapes: dict[str, list[str]] = {}
    for shape, result in results.items():
        for name, row in result["rows"].items():
            for part, found in row.items():
                if "refused" in found:
                    error = f" {found['error']}" if "error" in found else ""
                    why = f"{name}, {PARTS[part]}: {found['refused']}{error}"
                    shapes.setdefault(why, []).append(shape)
    return [f"{why} ({', '.join(where)})" for why, where in shapes.items()]


def worst_errors(results: dict[str, dict]) -> dict[str, float]:
    """The largest error of each implementation that has a speed, as a share of what is allowed."""
    worst: dict[str, float] = {}
    for result in results.values():
        for name, row in result["rows"].items():
            for found in row.values():
                if "tflops" in found:
                    for e, limit in zip(found["error"], result["allowed"], strict=False):
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
    for part, title in PARTS.items():
        for of_what, group in groups(results).items():
            lines += [f"\n{title}{of_what}, TFLOP/s: {summary(group, part)}\n", table(group, part)]
    costs = (cost_of_functions(results, part) for part in ("forward", "both"))
    lines += [f"\n{line}" for line in costs if line is not None]
    shares = ", ".join(f"{name} {share:.2f}" for name, share in worst_errors(results).items())
    lines += [f"\nlargest error over the allowed: {shares}"]
    if refused := refusals(results):
        lines += ["\nwithout a speed:", *(f"- {line}" for line in refused)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=pathlib.Path)
    print(report(records.load(parser.parse_args(argv).file)))


if __name__ == "__main__":
    main()
