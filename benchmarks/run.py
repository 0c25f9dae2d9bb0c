"""Times our attention beside its rivals on one GPU, after checking the results of all.

    python -m benchmarks.run                                   # benchmarks/results/<device>.json
    python -m benchmarks.run --shapes d128_s8192_c,llama8b_8k  # prints only
    python -m benchmarks.run --masks                           # masks and scores, prints only
    python -m benchmarks.run --short                           # less than 512 tokens, prints only
    python -m benchmarks.run --jobs 14                         # compiles 14 shapes at a time
    python -m benchmarks.run --budget 500 --json some.json     # starts no shape after 500 seconds
    python -m benchmarks.run --resume some.json                # the shapes that some.json lacks

Inputs are random bfloat16; times are kernel times by CUPTI, the median of `--iterations` launches or more, in short
bursts that alternate between the implementations. An implementation whose error against dense float32 attention is above
twice that of dense bfloat16 attention gets no speed.
The file is written after every shape. Rivals that cannot be imported are skipped. With `--jobs`, each shape has a process
of its own, and one at a time uses the GPU; first calls then take longer.
"""

import argparse
import datetime
import functools
import json
import pathlib
import sys
import time
from typing import Any

from tqdm import tqdm

from benchmarks import jobs, measure, record, rivals
from benchmarks.report import report
from benchmarks.shapes import MASKS, SHAPES, SHORT


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
    return parser.parse_args(argv)


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
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or record.commit(),
        "matmul": float(f"{measure.matmul(args.iterations):.4g}"),
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


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    jobs.share_memory(args.jobs)
    rival_names = rivals.IMPLEMENTATIONS if args.rivals is None else ("ours", *args.rivals)
    implementations, missing = rivals.importable(dict.fromkeys(rival_names))
    for name, why in missing.items():
        print(f"without {name}: {why}", file=sys.stderr)

    setup = record.setup(implementations, args.iterations)
    contents = {"setup": setup, "runs": [], "results": {}}
    if args.resume:
        contents = record.resume(args.resume, setup)
    path = args.json or args.resume
    if path is None and args.shapes is None and args.rivals is None:
        path = record.default_path(setup["device"])

    shapes = args.shapes or [name for name in SHAPES if name not in SHORT]
    if todo := [name for name in shapes if name not in contents["results"]]:
        fill(contents, todo, tuple(implementations), args, path)
    print(report(contents))
    if left := [name for name in shapes if name not in contents["results"]]:
        print(f"\nnot measured for lack of time: {', '.join(left)}")


if __name__ == "__main__":
    main()
