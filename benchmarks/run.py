"""Times our attention beside its rivals on one GPU, after checking every one of them.

    python -m benchmarks.run                                   # benchmarks/results/<device>.json
    python -m benchmarks.run --shapes d128_s8192_c,llama8b_8k  # prints only
    python -m benchmarks.run --masks                           # masks and scores, prints only
    python -m benchmarks.run --short                           # less than 512 tokens, prints only
    python -m benchmarks.run --jobs 14                         # compiles 14 shapes at a time
    python -m benchmarks.run --budget 500 --json some.json     # what 500 seconds allow
    python -m benchmarks.run --resume some.json                # the shapes that some.json lacks

Random bfloat16 inputs, kernel time by CUPTI: the median of `--iterations` launches or more, in short bursts
of all implementations in turns. An implementation whose error is above twice that of dense bfloat16
attention, against dense float32 attention, gets no speed.
The file is written after every shape. Rivals that cannot be imported are left out. With `--jobs`,
each shape has a process of its own, and one at a time has the GPU; first calls then take longer.
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
    which.add_argument("--shapes", type=names_among(SHAPES), help="some of benchmarks/shapes.py")
    which.add_argument(
        "--masks", dest="shapes", action="store_const", const=list(MASKS),
        help="those with masks and scores",
    )  # fmt: skip
    which.add_argument(
        "--short", dest="shapes", action="store_const", const=list(SHORT),
        help="those of less than 512 tokens, left out otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--rivals", type=names_among(rivals.IMPLEMENTATIONS), help="some of benchmarks/rivals.py"
    )
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--forward-only", action="store_true", help="no gradients")
    parser.add_argument("--budget", type=float, help="seconds after which no shape is started")
    parser.add_argument(
        "--json", type=pathlib.Path, help="where results go, instead of the default"
    )
    parser.add_argument(
        "--resume", type=pathlib.Path, help="results to add to; they go to --json or back"
    )
    parser.add_argument("--commit", help="its name, where the files are no git checkout")
    return parser.parse_args(argv)


def names_among(known: dict[str, Any]) -> Any:
    def names(text: str) -> list[str]:
        chosen = [name for name in text.split(",") if name]
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown} not among {list(known)}")
        return chosen

    return names


def one(name: str, wanted: tuple[str, ...], iterations: int, backward: bool) -> dict[str, Any]:
    """`measure.measure` of a shape, in any process."""
    implementations, _ = rivals.importable(wanted)
    return measure.measure(SHAPES[name], implementations, iterations, backward)


def fill(
    found: dict[str, Any], todo: list[str], wanted: tuple[str, ...], args: Any, path: Any
) -> None:
    """Measures shapes into the record `found`, until the budget is spent, writing it each time."""
    run = {
        "date": datetime.date.today().isoformat(),
        "commit": args.commit or record.commit(),
        "matmul": float(f"{measure.matmul(args.iterations):.4g}"),
        "jobs": args.jobs,
        "shapes": [],
    }
    found["runs"].append(run)
    end = None if args.budget is None else time.monotonic() + args.budget
    function = functools.partial(
        one, wanted=wanted, iterations=args.iterations, backward=not args.forward_only
    )
    done = jobs.each(function, todo, args.jobs, end)
    for name, result in tqdm(done, total=len(todo), disable=None):
        results = found["results"] | {name: result}
        found["results"] = {name: results[name] for name in SHAPES if name in results}
        run["shapes"].append(name)
        if path:
            record.write(path, found)
        tqdm.write(json.dumps({name: result["rows"]}), file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    jobs.share_memory(args.jobs)
    wanted = rivals.IMPLEMENTATIONS if args.rivals is None else ("ours", *args.rivals)
    implementations, missing = rivals.importable(dict.fromkeys(wanted))
    for name, why in missing.items():
        print(f"without {name}: {why}", file=sys.stderr)

    setup = record.setup(implementations, args.iterations)
    found = {"setup": setup, "runs": [], "results": {}}
    if args.resume:
        found = record.resume(args.resume, setup)
    path = args.json or args.resume
    if path is None and args.shapes is None and args.rivals is None:
        path = record.default_path(setup["device"])

    wanted = args.shapes or [name for name in SHAPES if name not in SHORT]
    if todo := [name for name in wanted if name not in found["results"]]:
        fill(found, todo, tuple(implementations), args, path)
    print(report(found))
    if left := [name for name in wanted if name not in found["results"]]:
        print(f"\nnot measured for want of time: {', '.join(left)}")


if __name__ == "__main__":
    main()
