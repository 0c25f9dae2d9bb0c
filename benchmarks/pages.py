"""Writes the pages of docs/benchmarks from committed results.

    python -m benchmarks.pages            # h200.md, masks.md, short.md, ampere.md and the others
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

from benchmarks import context_parallel_page, decode, numerics, record, report

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks"
TITLES = {"forward": "Forward", "both": "Forward and backward"}
# Modules that write a page of their own.
OTHERS: tuple[Any, ...] = numerics, decode, context_parallel_page
GRADIENTS = ("out", "dq", "dk", "dv")


class Page(NamedTuple):
    """A page about groups of shapes in a file of results."""

    title: str
    results: str  # the file's name in benchmarks/results
    groups: tuple[str, ...]  # keys of `report.groups`
    figures: tuple[str, ...] = ()  # stems in docs/figures
    times: bool = False  # milliseconds instead of TFLOP/s, which are misleading for sparse masks
    ours: str = "ours"  # whose errors are compared with those of a rival
    rival: str = "fa3"


PAGES = {
    "h200.md": Page(
        "Speed on an H200",
        "nvidia-h200.json",
        ("",),
        ("nvidia-h200-forward", "nvidia-h200-both"),
    ),
    "masks.md": Page(
        "Speed under masks and scores on an H200",
        "nvidia-h200.json",
        (" with masks and scores",),
        times=True,
    ),
    "short.md": Page(
        "Speed below 512 tokens on an H200",
        "nvidia-h200-short.json",
        (" of short sequences",),
    ),
    "ampere.md": Page(
        "Speed of the ampere kernels beside FlashAttention-2 on an H200",
        "nvidia-h200-ampere.json",
        ("", " with masks and scores", " of short sequences"),
        ours="ampere",
        rival="fa2",
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


def errors(results: dict[str, dict], ours: str = "ours", rival: str = "fa3") -> list[str]:
    """Return a table of our errors over a rival's, for out and each gradient."""
    pairs = [
        tuple(result["rows"].get(name, {}).get("both", {}).get("error") for name in (ours, rival))
        for result in results.values()
    ]
    known = [(own, others) for own, others in pairs if own and others]
    lines = []
    for i, name in enumerate(GRADIENTS if known else ()):
        ratios = [own[i] / others[i] for own, others in known]
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
    path = record.RESULTS / page.results
    link = f"[{page.results}](../../benchmarks/results/{page.results})"
    paragraphs = [
        f"# {page.title}",
        wrapped(
            f"`python -m benchmarks.pages` writes this page from {link}. "
            "[Methodology](methodology.md) says how speeds are measured, and what the names of rivals "
            "and shapes mean."
        ),
    ]
    measured = record.load(path)
    paragraphs.append(conditions(measured))
    grouped = report.groups(measured["results"])
    grouped = {title: grouped[title] for title in page.groups if title in grouped}
    for phase, title in TITLES.items():
        for suffix, group in grouped.items():
            paragraphs += section(
                page, phase, f"{title}{suffix if len(page.groups) > 1 else ''}", group
            )
    results = {name: result for group in grouped.values() for name, result in group.items()}
    ratios = ", ".join(f"{n} {ratio:.2f}" for n, ratio in report.worst_errors(results).items())
    paragraphs += ["## Errors", wrapped(f"Largest error over the allowed: {ratios}.")]
    if lines := errors(results, page.ours, page.rival):
        paragraphs.append("\n".join(lines))
    refused = [
        line for line in report.refusals(results) if line.split(",")[0] not in report.VARIANTS
    ]
    if refused:
        paragraphs += ["## Without a speed", items(refused)]
    return "\n\n".join(paragraphs) + "\n"


def section(page: Page, phase: str, title: str, results: dict[str, dict]) -> list[str]:
    """Return the paragraphs about one phase of some shapes."""
    summary, cell = report.summary(results, phase), time if page.times else report.speed
    paragraphs = [
        f"## {title}, {'milliseconds' if page.times else 'TFLOP/s'}",
        wrapped(f"Ours over the best rival in TFLOP/s: {summary}."),
        *(f"![{title}](../figures/{f}.svg)" for f in page.figures if f.endswith(phase)),
        table(results, phase, cell),
    ]
    if cost := report.cost_of_functions(results, phase):
        paragraphs.append(wrapped(f"{cost[0].upper()}{cost[1:]}."))
    return paragraphs


def generate() -> dict[pathlib.Path, str]:
    """Return every generated page by its path."""
    pages = {FOLDER / name: text(page) for name, page in PAGES.items()}
    return pages | {module.PAGE: module.page() for module in OTHERS}


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
