"""Draws the tiles that the masks of `masks_and_scores` compute, and times masks and scores.

    python -m examples.mask_gallery                              # any machine: shares of tiles
    python -m examples.mask_gallery --length 16384               # a Hopper GPU: times as well
    python -m examples.mask_gallery --jobs 16                    # compiles 16 of them at a time
    python -m examples.mask_gallery packed_documents soft_cap    # some of them

out/mask_gallery.png shows the tiles that are EMPTY (the kernels skip them), PARTIAL (they evaluate the mask) and FULL,
by interval arithmetic on the mask's code: no [T, T] array is built. On a Hopper GPU the tables have milliseconds,
ratios to full and causal attention, and for masks a bound: 1.10 times the time of full attention times the fraction of
tiles that is computed, plus 10 microseconds. Full attention is timed alternately with each mask, as a warm GPU is
slower. (2 seconds on a laptop, 2 minutes on an H200 with 16 jobs.)
"""

import argparse
import functools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tqdm import tqdm

import pallas_fa2 as fa
from benchmarks import jobs
from benchmarks.measure import Gpu, burst, with_gradients
from examples.masks_and_scores import MASKS, SCORES
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir import block_classes
from pallas_fa2.parse_call import parse_call

HEAD_DIM = 128
# The device whose tiles are drawn on a machine without a Hopper GPU.
H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
COLORS = {"empty": "#f1f3f5", "partial": "#ffc078", "full": "#4dabf7"}  # classes 0, 1, 2
PHASES = ("forward", "forward + backward")
TURNS, ITERATIONS = 2, 5
Times = tuple[float, ...]  # milliseconds of each phase


class Timing(NamedTuple):
    """The times of a mask or a score, and of full attention measured alternately."""

    times: Times
    full: Times


class Tiles(NamedTuple):
    """`classes [B | 1, K | 1, G | 1, T tiles, S tiles]`, and why the Hopper kernels do not support the call."""

    classes: np.ndarray
    unsupported_reason: str | None

    @property
    def share(self) -> float:
        return float((self.classes != block_classes.EMPTY).mean())


def classify(query: Any, device: Device, **options: Any) -> Tiles:
    """Classify the tiles of a call on a device."""
    explained = fa.explain(query, query, query, device=device, **options)
    spec, operands = parse_call(query, query, query, **options)
    classes = np.asarray(block_classes.block_classes(spec, operands, *explained.tiles))
    return Tiles(classes, dict(explained.plan.rejected).get("hopper"))


def draw(masks: dict[str, Tiles], title: str) -> Figure:
    """Draw a panel for each mask: the tiles of the last batch entry and head."""
    columns = min(len(masks), 5)
    rows = math.ceil(len(masks) / columns)
    figure = Figure(figsize=(2.1 * columns, 2.4 * rows + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, (name, tiles) in zip(axes, masks.items(), strict=False):
        axis.imshow(
            tiles.classes[-1, -1, -1], ListedColormap(list(COLORS.values())), vmin=0, vmax=2
        )
        axis.set_title(f"{name.replace('_', ' ')}, {tiles.share:.0%}", fontsize=9)
        axis.set(xticks=[], yticks=[])
    for axis in list(figure.axes)[len(masks) :]:
        axis.remove()
    handles = [Patch(facecolor=c, edgecolor="0.7", label=name) for name, c in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    return figure


def measure(name: str, length: int, heads: int) -> Timing:
    """Time a mask, or a score with a causal mask, with gradients of the score's data.

    Nothing runs on the GPU before this process holds its lock.
    """

    def make() -> tuple:
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (1, length, heads, HEAD_DIM)
        mask = MASKS.get(name, MASKS["causal"])(length, heads)
        score = SCORES[name](length, heads) if name in SCORES else None
        return *(jax.random.normal(key, shape, jnp.bfloat16) for key in keys), mask, score

    def attend(q: Any, k: Any, v: Any, mask: Any, score: Any) -> jax.Array:
        return fa.flash_attention(q, k, v, mask=mask, score=score, implementation="hopper")

    def forward(q: Any, k: Any, v: Any, _: Any, mask: Any, score: Any) -> jax.Array:
        return attend(q, k, v, mask, score)

    def both(q: Any, k: Any, v: Any, dout: Any, mask: Any, score: Any) -> tuple:
        return with_gradients(lambda q, k, v, score: attend(q, k, v, mask, score))(
            q, k, v, dout, score
        )

    avals = jax.eval_shape(make)
    programs = [
        [jax.jit(run).lower(*x).compile() for x in with_full(avals)] for run in (forward, both)
    ]
    with Gpu.lock:
        # The structure is that of `avals`: the functions of a new mask are other objects.
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(make())]
        args = jax.tree.unflatten(jax.tree.structure(avals), leaves)
        phases = [alternate(runs, with_full(args)) for runs in programs]
        return Timing(*zip(*phases, strict=True))


def with_full(args: tuple) -> tuple[tuple, tuple]:
    """Return q, k, v, dout, a mask and a score, and the same with None for the mask and the score."""
    return args, (*args[:4], None, None)


def alternate(programs: Sequence[Callable], args: Sequence[tuple]) -> list[float]:
    """Run the programs alternately, and return the median of each in milliseconds."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(TURNS):
        for run, operands, run_times in zip(programs, args, times, strict=True):
            run_times += burst(run, operands, ITERATIONS)
    return list(map(statistics.median, times))


def bound(share: float, full: float) -> float:
    """Return the time bound of a mask in milliseconds."""
    return 1.10 * share * full + 0.010


def mask_cells(tiles: Tiles, timing: Timing, causal: Times) -> str:
    bounds = [bound(tiles.share, x) for x in timing.full]
    rows = zip(timing.times, bounds, timing.full, causal, strict=True)
    text = "".join(f"{ms:9.3f}{limit:9.3f}{ms / x:9.2f}{ms / y:11.2f}" for ms, limit, x, y in rows)
    over = any(ms > limit for ms, limit in zip(timing.times, bounds, strict=True))
    return text + ("  over its bound" if over else "")


def score_cells(times: Times, causal: Times) -> str:
    return "".join(f"{ms:9.3f}{ms / y:11.2f}" for ms, y in zip(times, causal, strict=True))


def show(title: str, columns: str, rows: dict[str, Tiles], cells: Callable | None) -> None:
    """Print a table; `cells(name)` are the times under `columns` for each phase."""
    head = f"{title:17}{'computed':>9}"
    print()
    if cells is not None:
        print(f"{'':26}" + "".join(f"{phase:>{len(columns)}}" for phase in PHASES))
        head += columns * len(PHASES)
    print(head)
    for name, tiles in rows.items():
        line = f"{name:17}{tiles.share:9.1%}"
        if tiles.unsupported_reason:
            line += f"  not on the Hopper kernels: {tiles.unsupported_reason}"
        elif cells is not None:
            line += cells(name)
        print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="masks and scores; all by default")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the figure")
    args = parser.parse_args(arguments)
    jobs.share_memory()
    if unknown := set(args.names) - {*MASKS, *SCORES}:
        parser.error(f"{sorted(unknown)} not among {[*MASKS, *SCORES]}")
    if args.length < 128 or args.heads < 1:  # the masks use fractions of the length
        parser.error(
            f"--length {args.length} --heads {args.heads}, but at least 128 and 1 are needed"
        )

    shape = (1, args.length, args.heads, HEAD_DIM)
    query = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    here = device_of(query)
    device = here if here.is_sm90 else H200
    title = f"{args.length} tokens, {args.heads} heads of {HEAD_DIM}, bfloat16, {device.kind}"
    print(title + ("" if here.is_sm90 else ", which this machine does not have: no times"))

    def select(functions: dict[str, Callable]) -> dict[str, Any]:
        names = [name for name in functions if not args.names or name in args.names]
        return {name: functions[name](args.length, args.heads) for name in names}

    masks, scores = select(MASKS), select(SCORES)
    mask_tiles = {n: classify(query, device, mask=x) for n, x in masks.items()}
    score_tiles = {n: classify(query, device, mask=fa.Causal(), score=x) for n, x in scores.items()}
    timings: dict[str, Timing] = {}
    if here.is_sm90:
        function = functools.partial(measure, length=args.length, heads=args.heads)
        run = [
            name
            for name, tiles in {**mask_tiles, **score_tiles}.items()
            if not tiles.unsupported_reason
        ]
        names = list(dict.fromkeys(("causal", *run)))
        done = jobs.run_all(function, names, args.jobs)
        timings = dict(tqdm(done, total=len(names), disable=None))

    def mask_row(name: str) -> str:
        return mask_cells(mask_tiles[name], timings[name], timings["causal"].times)

    def score_row(name: str) -> str:
        return score_cells(timings[name].times, timings["causal"].times)

    if masks:
        columns = f"{'ms':>9}{'bound':>9}{'of full':>9}{'of causal':>11}"
        show("mask", columns, mask_tiles, mask_row if here.is_sm90 else None)
        args.out.mkdir(parents=True, exist_ok=True)
        draw(mask_tiles, title).savefig(args.out / "mask_gallery.png", dpi=150)
        print(f"tiles in {args.out}/mask_gallery.png")
    if scores:
        columns = f"{'ms':>9}{'of causal':>11}"
        show("score, causal", columns, score_tiles, score_row if here.is_sm90 else None)


if __name__ == "__main__":
    main()
