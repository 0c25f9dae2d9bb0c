"""Writes the pages of docs/benchmarks from committed results.

    python -m benchmarks.pages            # h200.md, masks.md, short.md and numerics.md
    python -m benchmarks.pages --check    # write nothing; exit status 1 if a page differs

`methodology.md` beside them is written by hand.
"""

import argparse
import pathlib
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from benchmarks import numerics, record, report

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks"
TITLES = {"forward": "Forward", "both": "Forward and backward"}
GRADIENTS = ("out", "dq", "dk", "dv")


class Page(NamedTuple):
    """A page about one group of shapes in a file of results."""

    title: str
    results: str  # the file's name in benchmarks/results
    group: str  # a key of `report.groups`
    figures: tuple[str, ...] = ()  # stems in docs/figures
    times: bool = False  # milliseconds instead of TFLOP/s, which are misleading for sparse masks


PAGES = {
    "h200.md": Page(
        "Speed on an H200",
        "nvidia-h200.json",
        "",
        ("nvidia-h200-forward", "nvidia-h200-both"),
    ),
    "masks.md": Page(
        "Speed under masks and scores on an H200",
        "nvidia-h200.json",
        " with masks and scores",
        times=True,
    ),
    "short.md": Page(
        "Speed below 512 tokens on an H200",
        "nvidia-h200-short.json",
        " of short sequences",
    ),
}


def time(row: dict[str, dict], phase: str) -> str | None:
    """Return milliseconds as a cell of a table, None without a time."""
    ms = row.get(phase, {}).get("ms")
    return None if ms is None else f"{ms:.3f}"


def table(results: dict[str, dict], phase: str, cell: Callable) -> str:
    """Return a Markdown table of the implementations that have a cell for some shape."""
    rows = [result["rows"] for result in results.values()]
    names = report.implementations(results)
    known = [name for name in names if any(cell(row.get(name, {}), phase) for row in rows)]
    return report.table(results, phase, cell, known)


def errors(results: dict[str, dict], rival: str = "fa3") -> list[str]:
    """Return a table of our errors over a rival's, for out and each gradient."""
    pairs = [
        tuple(result["rows"].get(name, {}).get("both", {}).get("error") for name in ("ours", rival))
        for result in results.values()
    ]
    known = [(ours, rivals) for ours, rivals in pairs if ours and rivals]
    lines = []
    for i, name in enumerate(GRADIENTS if known else ()):
        ratios = [ours[i] / rivals[i] for ours, rivals in known]
        mean = statistics.fmean(ratios)
        lines.append(f"| {name} | {mean:.3f} | {min(ratios):.3f} | {max(ratios):.3f} |")
    if lines:
        lines[:0] = [f"| over {rival}'s | mean | least | most |", "|---|---|---|---|"]
    return lines


def conditions(measured: dict[str, Any]) -> str:
    """Return the device, the versions and the runs as a Markdown list."""
    setup = measured["setup"]
    versions = [f"{name} {version}" for name, version in setup["implementations"].items()]
    names = "driver", "jax", "jaxlib"
    versions = [setup["device"], *(f"{n} {setup[n]}" for n in names if n in setup), *versions]
    runs = [
        f"{run['date']}, commit {run['commit']}: 8192³ matrix product {run['matmul']:.0f} TFLOP/s"
        for run in measured["runs"]
    ]
    return items((", ".join(versions), *runs))


def items(lines: Iterable[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(wrapped(f"- {line}", indent="  ") for line in lines)


def wrapped(line: str, indent: str = "") -> str:
    """Return prose in lines of at most 100 columns, those after the first indented."""
    return textwrap.fill(
        line, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def text(page: Page) -> str:
    """Return a page as Markdown."""
    measured = record.load(record.RESULTS / page.results)
    results = report.groups(measured["results"])[page.group]
    cell = time if page.times else report.speed
    paragraphs = [
        f"# {page.title}",
        wrapped(
            "`python -m benchmarks.pages` writes this page from "
            f"[{page.results}](../../benchmarks/results/{page.results}). "
            "[Methodology](methodology.md) says how speeds are measured, and what the names of rivals "
            "and shapes mean."
        ),
        conditions(measured),
    ]
    for phase, title in TITLES.items():
        summary = report.summary(results, phase)
        paragraphs.append(f"## {title}, {'milliseconds' if page.times else 'TFLOP/s'}")
        paragraphs.append(wrapped(f"Ours over the best rival in TFLOP/s: {summary}."))
        paragraphs += [f"![{title}](../figures/{f}.svg)" for f in page.figures if f.endswith(phase)]
        paragraphs.append(table(results, phase, cell))
        if cost := report.cost_of_functions(results, phase):
            paragraphs.append(wrapped(f"{cost[0].upper()}{cost[1:]}."))
    ratios = ", ".join(f"{n} {ratio:.2f}" for n, ratio in report.worst_errors(results).items())
    paragraphs += ["## Errors", wrapped(f"Largest error over the allowed: {ratios}.")]
    if lines := errors(results):
        paragraphs.append("\n".join(lines))
    refused = [
        line for line in report.refusals(results) if line.split(",")[0] not in report.OURS[1:]
    ]
    if refused:
        paragraphs += ["## Without a speed", items(refused)]
    return "\n\n".join(paragraphs) + "\n"


def generate() -> dict[pathlib.Path, str]:
    """Return every generated page by its path."""
    pages = {FOLDER / name: text(page) for name, page in PAGES.items()}
    return {**pages, numerics.PAGE: numerics.page()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args(argv).check, []
    for path, content in generate().items():
        if path.exists() and path.read_text() == content:
            continue
        stale.append(path)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    print("\n".join(f"{'differs' if check else 'written'}: {path.name}" for path in stale))
    return check and bool(stale)


if __name__ == "__main__":
    sys.exit(main())
