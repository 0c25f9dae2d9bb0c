"""Times the first calls of processes on one GPU: without a store of kernels, with an empty one and with a full one.

    python -m benchmarks.first_call                                  # prints a line as each process ends
    python -m benchmarks.first_call --cases forward,llama --limit 60
    python -m benchmarks.first_call --json benchmarks/results/nvidia-h200-first-call.json

The cases are those of `benchmarks/first_call_cases.py`, and `command`, which is `python -m pallas_fa2`. Each has three
processes, one after another: `cold` has no store, `store_cold` fills an empty one, and `store_warm` finds it. The
model's step has a fourth, the same step with cuDNN's attention, because most of a step is not attention. JAX's own
cache is off. A process that runs longer than `--limit` seconds is ended.

A first call takes the seconds to its results (tracing, lowering, XLA's compilation, running), of a program that is new
to a process whose device is initialized and whose inputs are on it. What comes before, the imports of JAX and of this
package and XLA's start with a program of one operation, is printed apart. `second` is another program of the same
process with the same call. `command` takes all of its process.

The first process only starts JAX, so that no case pays for files that the machine has not read. The norms of the
results of a case's processes must agree within 1 %; the file also has a digest of their bits.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import record
from benchmarks.first_call_cases import CASES
from benchmarks.run import names_among
from pallas_fa2.compilation import store

COMMAND = "command"
RIVALS = {"llama": "llama_cudnn"}
# Processes of a case, and whether they have a store. The second and third share one.
STORES = {"cold": False, "store_cold": True, "store_warm": True}
# The norms of a run: kernels add in any order, and XLA chooses other products for another process.
TOLERANCE = 1e-2


class Target(NamedTuple):
    """Seconds: of the first call without a store and with a full one, and of a second program.

    Those of a case with a rival are beyond the rival's.
    """

    cold: float
    warm: float
    second: float | None = None


TARGETS = {
    "forward": Target(2.0, 0.3),
    "backward": Target(5.0, 0.5),
    "documents": Target(8.0, 0.6),
    "scores": Target(10.0, 0.8),
    "llama": Target(6.0, 1.0, 0.5),
    COMMAND: Target(8.0, 4.0),
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", type=names_among(TARGETS), default=list(TARGETS), help=", ".join(TARGETS)
    )
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a process")
    parser.add_argument("--json", type=pathlib.Path, help="the file of results")
    parser.add_argument(
        "--commit", help="the name of the commit, where the files are no git checkout"
    )
    return parser.parse_args(argv)


def run(command: Sequence[str], limit: float, cache: str) -> dict[str, Any]:
    """Run a module in a process with a store or "0"; return the JSON of its last line, `process` seconds, or why it
    `failed`."""
    without_caches = {k: v for k, v in os.environ.items() if "COMPILATION_CACHE" not in k}
    env = without_caches | {
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_TRACEBACK_FILTERING": "off",  # the last line is then the error
        store.VARIABLE: cache,
    }
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command], env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"it had not ended after {limit:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):  # its compilers, too
                os.killpg(process.pid, signal.SIGKILL)
    result = {"process": time.monotonic() - start}
    if process.returncode:
        lines = *out.splitlines()[-1:], *err.splitlines()[-1:]
        return {"failed": "; ".join((f"exit code {process.returncode}", *lines))}
    with contextlib.suppress(ValueError, IndexError):  # the command prints no JSON
        result |= json.loads(out.splitlines()[-1])
    return result


def processes(case: str, limit: float) -> Any:
    """Yield the name and the result of each process of a case."""
    command = ["-m", "pallas_fa2"] if case == COMMAND else _process_of(case)
    with tempfile.TemporaryDirectory() as directory:
        cache = str(pathlib.Path(directory) / "store")
        for name, has_store in STORES.items():
            yield name, run(command, limit, cache if has_store else "0")
    if case in RIVALS:
        yield "rival", run(_process_of(RIVALS[case]), limit, "0")


def _process_of(case: str) -> list[str]:
    assert case in CASES
    return ["-m", "benchmarks.first_call_cases", case]


def disagreement(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the processes whose results have other norms than those of the first process, or a norm that is not
    finite."""
    norms = {name: result["norms"] for name, result in results.items() if "norms" in result}
    expected = next(iter(norms.values()), ())
    wrong = [
        name
        for name, found in norms.items()
        if not (np.isfinite(found).all() and np.allclose(found, expected, rtol=TOLERANCE, atol=0))
    ]
    return f"norms differ: {', '.join(wrong)}" if wrong else None


def line(case: str, name: str, result: Mapping[str, Any]) -> str:
    label = f"{case:9s} {name:10s}"
    if "failed" in result:
        return f"{label} {result['failed']}"
    if "first" not in result:
        return f"{label} {result['process']:6.2f} s"
    first = result["first"]
    steps = ", ".join(f"{step} {first[step]:.2f}" for step in first if step != "total")
    return (
        f"{label} {first['total']:6.2f} s ({steps}); second program {result['second']['total']:.2f} s; "
        f"before: import {result['import']:.2f}, device {result['device']:.2f}"
    )


def summarize(case: str, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return lines that compare the seconds of a case with its targets."""

    def seconds(name: str, which: str) -> float | None:
        result = results.get(name, {})
        return result.get("process") if case == COMMAND else result.get(which, {}).get("total")

    target, has_rival = TARGETS[case], case in RIVALS
    rows = [
        ("cold", seconds("cold", "first"), seconds("rival", "first"), target.cold),
        ("store warm", seconds("store_warm", "first"), seconds("rival", "first"), target.warm),
        ("second program", seconds("cold", "second"), seconds("rival", "second"), target.second),
    ]
    lines = []
    for label, ours, rivals, limit in rows:
        if limit is None or ours is None or (has_rival and rivals is None):
            continue
        beyond = f" beyond the rival's {rivals:.2f}" if has_rival else ""
        taken = ours - (rivals or 0.0)
        verdict = "met" if taken <= limit else "MISSED"
        lines.append(f"{case:9s} {label}: {taken:.2f} s{beyond}, target {limit:g}: {verdict}")
    return lines


def rounded(x: Any) -> Any:
    """Round seconds to milliseconds."""
    if isinstance(x, dict):
        return {k: v if k == "norms" else rounded(v) for k, v in x.items()}
    return round(x, 3) if isinstance(x, float) else x


def main(argv: list[str] | None = None) -> int:
    """Return the number of cases in which a process failed or computed something else."""
    args = parse(argv)
    start = time.monotonic()
    setup = "import json; from benchmarks import record; print(json.dumps(record.setup({}, 1)))"
    described = run(["-c", setup], args.limit, "0")
    if "failed" in described:
        raise SystemExit(f"JAX does not start: {described['failed']}")
    names = "device", "driver", "jax", "jaxlib", "sources"
    contents = {
        "setup": {n: described[n] for n in names} | {"cpus": os.cpu_count()},
        **record.stamp(args.commit),
        "seconds": {},
    }
    print(
        f"{described['device']}, jax {jax.__version__}, {os.cpu_count()} CPUs: {described['process']:.1f} s",
        flush=True,
    )
    wrong = 0
    for case in args.cases:
        results: dict[str, Any] = {}
        contents["seconds"][case] = results
        for name, result in processes(case, args.limit):
            results[name] = rounded(result)
            print(line(case, name, result), flush=True)
            if args.json:
                record.write(args.json, contents)
        reason = disagreement(results)
        wrong += reason is not None or any("failed" in x for x in results.values())
        for text in (*summarize(case, results), *([reason] if reason else [])):
            print(text, flush=True)
    print(f"{time.monotonic() - start:.0f} s")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
