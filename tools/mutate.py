"""Mutation testing: plants the mistakes of mutants.toml in copies of the tree, and prints which of them tests find.

The expected tests first run on the unchanged tree, and must pass.

python tools/mutate.py                              # all mutants, each with the tests that are expected to find it
python tools/mutate.py hiding_after align_end       # some of them
python tools/mutate.py --tier test --jobs 2         # and with what `make test` runs where those tests pass
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
# Pytest's exit codes. Others (no such test, a tree that cannot be imported) are errors.
SURVIVED, KILLED = 0, 1


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: `old` becomes `new` in a file of pallas_fa2; `equivalent` is the reason why no test can find it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    equivalent: str = ""

    @contextlib.contextmanager
    def planted(self, tree: pathlib.Path) -> Iterator[None]:
        """Plant the mistake in a copy of the tree within the context."""
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
    """The verdict on a mutant, and the first test that failed, if any."""

    mutant: Mutant
    verdict: str
    seconds: float
    test: str = ""

    def __str__(self) -> str:
        return f"{self.mutant.name:28} {self.verdict:10} {self.seconds:6.1f} s  {self.test}"


def read_mutants() -> list[Mutant]:
    listed = tomllib.loads(LIST.read_text())
    return [Mutant(name, **fields) for name, fields in listed.items()]


def tier_arguments(target: str) -> list[str]:
    """Return the arguments with which `make target` runs pytest."""
    recipe = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (line,) = re.findall(r"-m pytest\b(.*)", recipe.stdout)
    return shlex.split(line)


def copy_tree(to: pathlib.Path) -> pathlib.Path:
    """Copy the files that git tracks from the working tree."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(lambda name: (ROOT / name).is_file(), listed.stdout.splitlines()):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    return to


def run_pytest(tree: pathlib.Path, arguments: list[str], limit: float) -> tuple[int | None, str]:
    """Return the exit code, None if pytest takes longer than the limit, and the first test that failed."""
    options = ["-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.setdefault("JAX_PLATFORMS", "cpu")
    try:
        done = subprocess.run(
            [sys.executable, *options, *arguments],
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
    """Run the expected tests on the unchanged tree: one that fails anyway would find every mistake."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    code, test = run_pytest(tree, tests, limit) if tests else (SURVIVED, "")
    if code != SURVIVED:
        raise SystemExit(f"exit code {code} without a mistake: {test}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="names of mutants; all by default")
    parser.add_argument(
        "--tier", choices=["test", "all"], help="the tests that run where the expected ones pass"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="the number of mutants at the same time"
    )
    parser.add_argument(
        "--limit", type=float, default=3600, help="the time limit of one pytest in seconds"
    )
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
    for result in results:
        if result not in killed and result not in equivalent:
            print(result)
    return int(len(killed) + len(equivalent) < len(results))


if __name__ == "__main__":
    sys.exit(main())
