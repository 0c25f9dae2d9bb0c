"""Draws TFLOP/s over the length, a panel for each head dim with and without a causal mask, or speed-ups over GPUs.

    python -m benchmarks.plot benchmarks/results/nvidia-h200.json       # docs/figures/nvidia-h200-*.svg
    python -m benchmarks.plot benchmarks/results/nvidia-h200-x4.json    # docs/figures/nvidia-h200-x4-speedup.svg

There is one figure for the forward and one for forward + backward, and one for speed-ups. The same file always gives
the same bytes.
"""

import argparse
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks import record as records
from benchmarks import report
from benchmarks.shapes import SWEEP, Shape

FIGURES = pathlib.Path(__file__).parent.parent / "docs" / "figures"
LENGTHS = sorted({shape.q_len for shape in SWEEP.values()})
INK = "#808080"  # readable on white and on black
NAMES = {"ours": "pallas_fa2", "ampere": "pallas_fa2, ampere", "fa2": "FlashAttention-2",
         "fa3": "FlashAttention-3", "cudnn": "cuDNN", "xla": "XLA"}  # fmt: skip
COLORS = {"ours": "#e8590c", "ampere": "#f2a65a", "fa2": "#70c1c8", "fa3": "#3b8ed0",
          "cudnn": "#4fa04f", "tokamax": "#a678d0", "tokamax_triton": "#cfa8ea", "jla": "#c2a02c",
          "xla": INK, "ring": "#e8590c", "all_gather": "#3b8ed0", "ulysses": "#4fa04f",
          "jit": "#f2a65a"}  # fmt: skip
MARKERS = {"ours": "o", "ampere": "o", "fa2": "P", "fa3": "s", "cudnn": "^", "tokamax": "D",
           "tokamax_triton": "d", "jla": "v", "xla": "x", "ring": "o",
           "all_gather": "s", "ulysses": "^", "jit": "P"}  # fmt: skip
STYLE: Any = {
    "svg.hashsalt": "pallas_fa2",
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def curves(results: dict[str, dict], phase: str) -> dict[tuple[bool, int], dict[str, list]]:
    """Map (causal, head dim) to implementations, and these to [(T, TFLOP/s)], for the shapes of the sweep."""
    panels: dict[tuple[bool, int], dict[str, list]] = {}
    for name in SWEEP:
        if name not in results:
            continue
        shape = Shape(**results[name]["shape"])
        for who, row in results[name]["rows"].items():
            if who in report.VARIANTS:
                continue
            if (speed := report.tflops(row, phase)) is not None:
                panel = panels.setdefault((shape.causal, shape.head_dim), {})
                panel.setdefault(who, []).append((shape.q_len, speed))
    return panels


def draw(record: dict[str, Any], phase: str) -> Figure:
    panels = curves(record["results"], phase)
    if not panels:
        raise ValueError("the results have no shape of `benchmarks.shapes.SWEEP` to draw")
    rows = sorted({causal for causal, _ in panels}, reverse=True)
    columns = sorted({head_dim for _, head_dim in panels})
    ceiling = statistics.median(run["matmul"] for run in record["runs"])
    figure = Figure(figsize=(9, 2.6 * len(rows) + 0.6), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    for i, causal in enumerate(rows):
        for j, head_dim in enumerate(columns):
            title = f"{'causal' if causal else 'full'}, head dim {head_dim}"
            _panel(axes[i, j], title, panels.get((causal, head_dim), {}), ceiling)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("TFLOP/s")
    _add_legend(figure, axes.flat)
    figure.suptitle(f"{record['setup']['device']}, bfloat16, {report.PHASES[phase]}")
    return figure


def _add_legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Name each line of all panels once, below them."""
    handles = {str(line.get_label()): line for axis in axes for line in axis.get_lines()}
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles),
        frameon=False,
    )  # fmt: skip


def _panel(axis: Axes, title: str, lines: dict[str, list], ceiling: float) -> None:
    axis.set_title(title, fontsize=9)
    for who, points in lines.items():  # ours first: thick, under the thin ones
        is_ours = who in report.KERNELS
        axis.plot(
            *zip(*sorted(points), strict=True),
            label=NAMES.get(who, who),
            color=COLORS.get(who, INK),
            marker=MARKERS.get(who, "."),
            markersize=6 if is_ours else 3,
            linewidth=3 if is_ours else 1.1,
        )
    axis.axhline(ceiling, color=INK, linestyle=":", linewidth=1, label="8192³ matrix product")
    axis.set_xscale("log", base=2)
    axis.set_xticks(LENGTHS)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(_tokens))
    axis.margins(y=0.05)
    axis.set_ylim(bottom=0)
    axis.grid(color=INK, alpha=0.25, linewidth=0.6)


def speedups(results: dict[str, dict]) -> dict[tuple[str, str], dict[str, list]]:
    """Map (case, phase) to strategies, and these to [(GPUs, speed-up)], from results of several numbers of GPUs."""
    panels: dict[tuple[str, str], dict[str, list]] = {}
    for case, result in results.items():
        for row in result["rows"].values():
            for phase in ("forward", "both", "step"):
                if row.get("heads") == 1 and "speedup" in row.get(phase, {}):
                    panel = panels.setdefault((case, phase), {})
                    points = panel.setdefault(row["strategy"], [(1, 1.0)])
                    points.append((row["devices"], row[phase]["speedup"]))
    return panels


def draw_speedups(record: dict[str, Any]) -> Figure:
    """Draw the speed-up over one GPU, a panel for each case and phase, with the bar of linear speed-up."""
    panels = speedups(record["results"])
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(9, 2.6 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    counts = sorted({n for panel in panels.values() for line in panel.values() for n, _ in line})
    titles = {"forward": "forward", "both": "with the backward", "step": "step"}
    for axis, ((case, phase), lines) in zip(axes, panels.items(), strict=False):
        axis.set_title(f"{case}, {titles[phase]}", fontsize=8)
        axis.plot(counts, counts, color=INK, linestyle=":", linewidth=1, label="linear")
        for who, points in lines.items():
            axis.plot(
                *zip(*sorted(points), strict=True), label=who, color=COLORS[who], marker=MARKERS[who],
                markersize=4, linewidth=1.1,
            )  # fmt: skip
        axis.set_xticks(counts)
        axis.set_yticks(counts)
        axis.set_xlabel("GPUs")
        axis.grid(color=INK, alpha=0.25, linewidth=0.6)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _add_legend(figure, axes)
    figure.suptitle(f"Speed-up over one {record['setup']['device']}, bfloat16")
    return figure


def _tokens(length: float, _: Any) -> str:
    return f"{length:.0f}" if length < 1024 else f"{length / 1024:.0f}k"


def save(record: dict[str, Any], stem: str, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write `<stem>-forward.svg` and, with gradients, `<stem>-both.svg`, or `<stem>-speedup.svg`, without a background
    and a date."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        if speedups(record["results"]):
            paths.append(folder / f"{stem}-speedup.svg")
            draw_speedups(record).savefig(paths[-1], transparent=True, metadata={"Date": None})
            return paths
        for phase in ("forward", "both"):
            if phase == "both" and not curves(record["results"], phase):
                continue
            paths.append(folder / f"{stem}-{phase}.svg")
            draw(record, phase).savefig(paths[-1], transparent=True, metadata={"Date": None})
    return paths


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "file", type=pathlib.Path, help="results of benchmarks.run or benchmarks.context_parallel"
    )
    parser.add_argument("--out", type=pathlib.Path, default=FIGURES, help="a folder")
    args = parser.parse_args(argv)
    for path in save(records.load(args.file), args.file.stem, args.out):
        print(path)


if __name__ == "__main__":
    main()
