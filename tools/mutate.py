"""Plants the mistakes of mutants.toml in copies of the tree, one at a time, and says which of them tests find.

The expected tests run without any first, and must pass.

python tools/mutate.py                              # all, each with the tests that are expected to find it
python tools/mutate.py hiding_after align_end       # some
python tools/mutate.py --tier test --jobs 2         # and where those do not, with what `make test` runs
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIST = ROOT / "tools/mutants.toml"
# What pytest's exit codes say. Others (no such test, a tree that cannot be imported) are no answer.
SURVIVED, KILLED = 0, 1


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str  # in pallas_fa2
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @contextlib.contextmanager
    def planted(self, tree: pathlib.Path) -> Iterator[None]:
        """In a copy of the tree, inside."""
        path = tree / "pallas_fa2" / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} of {self.old!r}")
        path.write_text(text.replace(self.old, self.new))
        try:
            yield
        finally:
            path.write_text(text)


@dataclasses.dataclass(frozen=True)
class Result:
    mutant: Mutant
    verdict: str
    seconds: float
    test: str = ""  # the first that failed

    def __str__(self) -> str:
        return f"{self.mutant.name:28} {self.verdict:10} {self.seconds:6.1f} s  {self.test}"


def read_mutants() -> list[Mutant]:
    listed = tomllib.loads(LIST.read_text())
    return [Mutant(name, **fields) for name, fields in listed.items()]


def tier_arguments(target: str) -> list[str]:
    """What `make target` runs pytest with."""
    made = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (line,) = re.findall(r"-m pytest\b(.*)", made.stdout)
    return shlex.split(line)


def copy_tree(to: pathlib.Path) -> pathlib.Path:
    """What git knows of, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    return to


def run_pytest(tree: pathlib.Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """Its exit code, None if it takes longer than the limit, and the first test that failed."""
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.setdefault("JAX_PLATFORMS", "cpu")
    try:
        done = subprocess.run(
            command,
            check=False,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return None, ""
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.MULTILINE)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else lines[-1] if lines else ""


def try_mutant(mutant: Mutant, tree: pathlib.Path, tier: list[str] | None, limit: float) -> Result:
    start, code, test = time.monotonic(), SURVIVED, ""
    with mutant.planted(tree):
        if mutant.tests:
            code, test = run_pytest(tree, list(mutant.tests), limit)
        if code == SURVIVED and tier is not None:
            code, test = run_pytest(tree, tier, limit)
    verdicts = {SURVIVED: "SURVIVED", KILLED: "killed", None: "TOO LONG"}
    verdict = verdicts.get(code, f"ERROR {code}")
    if mutant.equivalent and verdict == "SURVIVED":
        verdict = "equivalent"
    return Result(mutant, verdict, time.monotonic() - start, "" if code == SURVIVED else test)


def check_unchanged(mutants: list[Mutant], tree: pathlib.Path, limit: float) -> None:
    """Runs the expected tests without a mistake: one that fails anyway would find every mistake."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, test = run_pytest(tree, tests, limit) if tests else (SURVIVED, "")
    if code != SURVIVED:
        raise SystemExit(f"without a mistake, exit code {code}: {test}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of mutants; all by default")
    parser.add_argument(
        "--tier", choices=["test", "all"], help="what runs where the expected tests pass"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of one pytest")
    options = parser.parse_args()
    mutants = read_mutants()
    if unknown := set(options.names) - {m.name for m in mutants}:
        parser.error(f"no mutants: {', '.join(sorted(unknown))}")
    chosen = [m for m in mutants if not options.names or m.name in options.names]
    target = {"test": "test", "all": "test-all", None: None}[options.tier]
    tier = None if target is None else tier_arguments(target)
    with tempfile.TemporaryDirectory() as directory:
        trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
        for i in range(options.jobs):
            trees.put(copy_tree(pathlib.Path(directory) / str(i)))
        check_unchanged(chosen, pathlib.Path(directory) / "0", options.limit)

        def run(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = try_mutant(mutant, tree, tier, options.limit)
            finally:
                trees.put(tree)
            print(result, flush=True)
            return result

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, chosen))
    killed = [r for r in results if r.verdict == "killed"]
    equivalent = [r for r in results if r.verdict == "equivalent"]
    print(f"{len(killed)} of {len(results) - len(equivalent)} killed, {len(equivalent)} equivalent")
    for other in results:
        if other not in killed and other not in equivalent:
            print(other)
    return int(len(killed) + len(equivalent) < len(results))


if __name__ == "__main__":
    sys.exit(main())
