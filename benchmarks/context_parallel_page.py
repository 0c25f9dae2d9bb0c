"""Writes docs/benchmarks/context-parallel.md from the results of `benchmarks.context_parallel`."""

import pathlib
from typing import Any

from benchmarks import record
from benchmarks.divisions import ONE, STRATEGIES, Division

RESULTS = "nvidia-h200-x2.json", "nvidia-h200-x4.json", "nvidia-h200-x8.json"
DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGE = DOCS / "benchmarks" / "context-parallel.md"
INTRODUCTION = """# Speed of sequences over several GPUs

`python -m benchmarks.pages` writes this page from the results of `python -m benchmarks.context_parallel`, and
`python -m benchmarks.plot` draws the figure.

Milliseconds, and the speed over n times that of one GPU in the same run. bfloat16, N = 32, K = 8, H = 128; causal cases
and documents (4096 tokens in the mean) in zigzag order if their name does not say otherwise. `heads` has heads divided
and moves nothing. 2 x 4 GPUs: the sequence over two, heads over four. `llama_256k` is a training step of two of Llama-8B's
layers (`benchmarks/llama_step.py`). One GPU computes `causal_512k` in two calls, each of half of the heads, because all have
2^31 elements."""
PHASES = {"forward": "forward", "both": "with the backward", "step": "training step"}


def table(results: dict[str, Any]) -> list[str]:
    """Return a Markdown table with a line for each case, phase and number of GPUs."""
    divided = [row for x in results.values() for row in x["rows"].values() if row["devices"] > 1]
    strategies = [name for name in STRATEGIES if any(row["strategy"] == name for row in divided)]
    lines = [
        f"| | pass | one GPU, ms | GPUs | {' | '.join(strategies)} |",
        "|" + "---|" * (len(strategies) + 4),
    ]
    for case, result in results.items():
        rows = list(result["rows"].values())
        divisions = [Division(row["strategy"], row["sequence"], row["heads"]) for row in rows]
        for phase, title in PHASES.items():
            one = next(
                (x[phase] for x, y in zip(rows, divisions, strict=True) if y == ONE and phase in x),
                {},
            )
            cells: dict[str, dict[str, str]] = {}
            for row, division in zip(rows, divisions, strict=True):
                x = row.get(phase, {})
                if division != ONE and "efficiency" in x:
                    text = f"{x['ms']:.2f} ({x['efficiency']:.3f})"
                    cells.setdefault(division.gpus, {})[division.strategy] = text
            for gpus, cell in sorted(cells.items()):
                text = " | ".join(cell.get(name, "-") for name in strategies)
                lines.append(f"| {case} | {title} | {one['ms']:.2f} | {gpus} | {text} |")
    return lines


def section(name: str) -> list[str]:
    """Return the paragraphs about a file of results."""
    recorded = record.load(record.RESULTS / name)
    setup, run, results = recorded["setup"], recorded["run"], recorded["results"]
    most = max(row["devices"] for x in results.values() for row in x["rows"].values())
    figure = DOCS / "figures" / f"{pathlib.Path(name).stem}-speedup.svg"
    return [
        f"## {most} GPUs",
        f"[{name}](../../benchmarks/results/{name}): {most} of {setup['device']} of one host, driver {setup['driver']}, "
        f"jax {setup['jax']}, {run['date']}, commit {run['commit']}. {run.get('note', '')}".strip(),
        *([f"![Speed-up over one GPU](../figures/{figure.name})"] if figure.exists() else []),
        "\n".join(table(results)),
    ]


def page() -> str:
    """Return docs/benchmarks/context-parallel.md from the committed results."""
    known = [name for name in RESULTS if (record.RESULTS / name).exists()]
    paragraphs = [INTRODUCTION, *(paragraph for name in known for paragraph in section(name))]
    return "\n\n".join(paragraphs) + "\n"
