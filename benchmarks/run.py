"""Times our attention beside its rivals on one GPU, after checking the results of all.

    python -m benchmarks.run                                   # benchmarks/results/<device>.json
    python -m benchmarks.run --shapes d128_s8192_c,llama8b_8k  # prints only
    python -m benchmarks.run --masks                           # masks and scores, prints only
    python -m benchmarks.run --short                           # less than 512 tokens, prints only
    python -m benchmarks.run --ampere                          # our mma.sync kernels and FlashAttention-2, prints only
    python -m benchmarks.run --report                          # pallas_fa2-<device>.json, to send us from another GPU
    python -m benchmarks.run --jobs 14                         # compiles 14 shapes at a time
    python -m benchmarks.run --budget 500 --json some.json     # starts no shape after 500 seconds
    python -m benchmarks.run --resume some.json                # the shapes that some.json lacks

Inputs are random bfloat16; times are kernel times by CUPTI, the median of `--iterations` launches or more, in short
bursts that alternate between the implementations. An implementation whose error against dense float32 attention is
above twice that of dense bfloat16 attention gets no speed.
The file is written after every shape. Rivals that cannot be imported are skipped. With `--jobs`, each shape has a
process of its own, and one at a time uses the GPU; first calls then take longer.
A report has a dozen shapes, and what `benchmarks/gpu_report.py` says of the GPU; it takes less than five minutes.
"""

import argparse
import functools
import json
import os
import pathlib
import sys
import time
from typing import Any

try:
    from tqdm import tqdm
except ModuleNotFoundError as error:
    needed = "benchmarks.run needs tqdm: pip install '.[cuda13]' tqdm, in the checkout"
    raise ImportError(needed, name="tqdm") from error

from benchmarks import gpu_report, jobs, measure, record, rivals
from benchmarks.report import report
from benchmarks.shapes import AMPERE, MASKS, REPORT, SHAPES, SHORT


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shapes", type=names_among(SHAPES), help="names in benchmarks/shapes.py")
    which.add_argument(
        "--masks", dest="shapes", action="store_const", const=list(MASKS),
        help="the shapes with masks and scores",
    )  # fmt: skip
    which.add_argument(
        "--short", dest="shapes", action="store_const", const=list(SHORT),
        help="the shapes of less than 512 tokens, skipped by default",
    )  # fmt: skip
    which.add_argument(
        "--ampere", action="store_true",
        help="our mma.sync kernels beside FlashAttention-2's (or --rivals), on the shapes of both",
    )  # fmt: skip
    which.add_argument(
        "--report", action="store_true",
        help="a report on this GPU, of any kind that has kernels: its path is the default of --json",
    )  # fmt: skip
    parser.add_argument(
        "--rivals", type=names_among(rivals.IMPLEMENTATIONS), help="names in benchmarks/rivals.py"
    )
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--forward-only", action="store_true", help="no gradients")
    parser.add_argument("--budget", type=float, help="seconds after which no shape is started")
    parser.add_argument(
        "--json", type=pathlib.Path, help="the file of results, instead of the default"
    )
    parser.add_argument(
        "--resume",
        type=pathlib.Path,
        help="a file of results to add to; written to --json or to itself",
    )
    parser.add_argument(
        "--commit", help="the name of the commit, where the files are no git checkout"
    )
    args = parser.parse_args(argv)
    if args.ampere or args.report:
        args.shapes = list(AMPERE if args.ampere else REPORT)
    return args


def names_among(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} not among {list(known)}")
        return chosen

    return names


def measure_shape(
    name: str, rival_names: tuple[str, ...], iterations: int, backward: bool
) -> dict[str, Any]:
    """Measure a shape in any process."""
    implementations, _ = rivals.importable(rival_names)
    return measure.measure(SHAPES[name], implementations, iterations, backward)


def fill(
    contents: dict[str, Any], todo: list[str], rival_names: tuple[str, ...], args: Any, path: Any
) -> None:
    """Measure shapes into the record `contents` until the budget is spent, and write it after each."""
    run = {
        **record.stamp(args.commit),
        "matmul": record.rounded(measure.matmul(args.iterations)),
        "jobs": args.jobs,
        "shapes": [],
    }
    contents["runs"].append(run)
    end = None if args.budget is None else time.monotonic() + args.budget
    function = functools.partial(
        measure_shape,
        rival_names=rival_names,
        iterations=args.iterations,
        backward=not args.forward_only,
    )
    done = jobs.run_all(function, todo, args.jobs, end)
    for name, result in tqdm(done, total=len(todo), disable=None):
        results = contents["results"] | {name: result}
        contents["results"] = {name: results[name] for name in SHAPES if name in results}
        run["shapes"].append(name)
        if path:
            record.write(path, contents)
        tqdm.write(json.dumps({name: result["rows"]}), file=sys.stderr)


def contestants(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the names of the implementations that are measured, ours first."""
    if args.report:
        ours, all_rivals = gpu_report.kernels(gpu_report.gpu()), gpu_report.RIVALS
    elif args.ampere:
        ours, all_rivals = ("ampere",), ("fa2",)
    else:
        ours, all_rivals = ("ours",), tuple(rivals.IMPLEMENTATIONS)
    return tuple(dict.fromkeys((*ours, *(all_rivals if args.rivals is None else args.rivals))))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    jobs.share_memory()
    implementations, missing = rivals.importable(contestants(args))
    for name, why in missing.items():
        print(f"without {name}: {why}", file=sys.stderr)

    setup = record.setup(implementations, args.iterations)
    contents = {"setup": setup, "runs": [], "results": {}}
    if args.resume:
        contents = record.resume(args.resume, setup)
    path = args.json or args.resume
    if args.report:
        contents["gpu"] = gpu_report.describe(gpu_report.gpu())
        path = path or pathlib.Path(f"pallas_fa2-{record.default_path(setup['device']).name}")
        record.write(path, contents)  # the GPU's description, should the kernels end the process
        args.budget = gpu_report.BUDGET if args.budget is None else args.budget
        if args.jobs == 1:  # compilation takes longest; each process has a context of the GPU
            args.jobs = max(1, min(4, (os.cpu_count() or 1) // 2))
    elif path is None and args.shapes is None and args.rivals is None:
        path = record.default_path(setup["device"])

    shapes = args.shapes or [name for name in SHAPES if name not in SHORT]
    if todo := [name for name in shapes if name not in contents["results"]]:
        fill(contents, todo, tuple(implementations), args, path)
    print(report(contents))
    if left := [name for name in shapes if name not in contents["results"]]:
        print(f"\nnot measured for lack of time: {', '.join(left)}")
    if args.report and path:
        print(f"\nPlease send us {path.resolve()}")


if __name__ == "__main__":
    main()
