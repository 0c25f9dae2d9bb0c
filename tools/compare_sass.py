"""Compiles the kernels of two revisions for an H200, without a GPU, and prints which machine code differs.

python tools/compare_sass.py HEAD~1               # with the working tree
python tools/compare_sass.py HEAD~3 HEAD~1        # two commits
python tools/compare_sass.py HEAD~1 HEAD --calls h128,h128_packed --keep /tmp/sass
python tools/compare_sass.py --neutral HEAD~20    # each commit since then with `Neutral: yes`
python tools/compare_sass.py --last-neutral       # the latest of these together

A commit that only moves or renames code changes no kernel, and its message has a line `Neutral: yes`. CI compares the
latest such commits, back to the first one that changes the package without that line, with the revision before them
(`--last-neutral --small`). The calls are in tools/sass_matrix.py. The kernels of a revision are cached in .sass/ under
the hash of its package. The exit code is 0 if all kernels are the same, otherwise 1.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / ".sass"
TRAILER = "Neutral: yes"

# The kernels of each call in the order of compilation: name, registers, spilled bytes, bytes of shared memory, the
# number of instructions, and a hash of the machine code.
Kernels = dict[str, list[list]]


def git(*arguments: str, **environment: str) -> str:
    command, variables = ["git", *arguments], {**os.environ, **environment}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def instructions(sass: str, name: str) -> list[str]:
    """Return the disassembled instructions of a kernel with control codes, operands and addresses, without its name."""
    lines = [line.strip() for line in sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    return [line.replace(name, "kernel") for line in lines]


def compile_calls(tree: pathlib.Path, names: list[str], keep: pathlib.Path | None) -> Kernels:
    """Compile the named calls with the package of a tree; write the disassembly to the directory `keep`, if any."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path.insert(0, str(tree))
    import pallas_fa2

    package = pathlib.Path(pallas_fa2.__file__).parent.parent
    assert package == tree.resolve(), f"{package} was imported instead of {tree}"
    sys.path[0] = str(ROOT)
    from tests.support import compile_gate
    from tools.sass_matrix import CALLS

    compiled: Kernels = {}
    for name in names:
        kernels = []
        for i, report in enumerate(
            compile_gate.compile_for_h200(CALLS[name].run, *CALLS[name].arguments())
        ):
            assert report.sass_path is not None, "nvdisasm is missing"
            lines = instructions(report.sass_path.read_text(), report.name)
            text = "\n".join(lines)
            code = hashlib.sha256(text.encode()).hexdigest()
            spilled = report.spill_stores + report.spill_loads
            kernels.append(
                [report.name, report.registers, spilled, report.smem_bytes, len(lines), code]
            )
            if keep:
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{name}.{i}.{report.name}.sass").write_text(text)
        compiled[name] = kernels
    return compiled


def in_processes(
    tree: pathlib.Path, names: list[str], jobs: int, keep: pathlib.Path | None
) -> Kernels:
    """Compile the named calls in `jobs` processes."""

    def run(names: list[str]) -> Kernels:
        command = [sys.executable, __file__, "--compile", str(tree), "--calls", ",".join(names)]
        command += ["--keep", str(keep)] if keep else []
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        return json.loads(done.stdout.splitlines()[-1])

    chunks = [names[i::jobs] for i in range(min(jobs, len(names)))]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        return {name: kernels for chunk in pool.map(run, chunks) for name, kernels in chunk.items()}


def tree_hash(revision: str | None) -> str:
    """Return the hash of the package in a revision, or in the working tree for None."""
    if revision is not None:
        return git("rev-parse", f"{revision}:pallas_fa2")
    with tempfile.TemporaryDirectory() as directory:
        index = f"{directory}/index"
        for command in (["read-tree", "HEAD"], ["add", "pallas_fa2"]):
            git(*command, GIT_INDEX_FILE=index)
        tree = git("write-tree", GIT_INDEX_FILE=index)
    return git("rev-parse", f"{tree}:pallas_fa2")


def compiled_kernels(tree: str, names: list[str], jobs: int, keep: pathlib.Path | None) -> Kernels:
    """Return the kernels of the package with this hash, from the cache if it has been compiled before."""
    from importlib.metadata import version

    tools = [ROOT / "tools/sass_matrix.py", ROOT / "tests/support/compile_gate.py"]
    text = version("jax").encode() + b"".join(path.read_bytes() for path in tools)
    path = CACHE / f"{tree[:16]}-{hashlib.sha256(text).hexdigest()[:8]}.json"
    cached: Kernels = json.loads(path.read_text()) if path.exists() and not keep else {}
    if missing := [name for name in names if name not in cached]:
        with tempfile.TemporaryDirectory() as directory:
            package = pathlib.Path(directory, "pallas_fa2")
            package.mkdir()
            archive = subprocess.run(
                ["git", "archive", tree], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", package], input=archive.stdout, check=True)
            cached |= in_processes(pathlib.Path(directory), missing, jobs, keep)
        CACHE.mkdir(exist_ok=True)
        path.write_text(json.dumps(cached))
    return {name: cached[name] for name in names}


def differences(before: Kernels, after: Kernels) -> list[str]:
    """Return a line for each kernel whose machine code differs."""
    lines = []
    for name, old in before.items():
        new = after[name]
        if len(old) != len(new):
            lines.append(f"{name}: {len(old)} kernels before, {len(new)} after")
            continue
        for x, y in zip(old, new, strict=True):
            if x[1:] != y[1:]:
                properties = "registers", "bytes spilled", "bytes of shared memory", "instructions"
                values = zip(properties, x[1:-1], y[1:-1], strict=True)
                changes = [f"{n} {a} -> {b}" for n, a, b in values if a != b]
                lines.append(f"{name}, {x[0]}: {', '.join(changes) or 'instructions differ'}")
    return lines


def compare(
    before: str, after: str | None, names: list[str], jobs: int, keep: pathlib.Path | None
) -> list[str]:
    """Print and return the differences between two revisions; None is the working tree."""
    old, new = tree_hash(before), tree_hash(after)
    label = after or "working tree"
    if old == new:
        print(f"{before} and {label}: the package is the same")
        return []
    both = [
        compiled_kernels(tree, names, jobs, keep and keep / side)
        for tree, side in ((old, "before"), (new, "after"))
    ]
    lines = differences(*both)
    count = sum(map(len, both[0].values()))
    print(
        f"{before} and {label}: {len(lines) or 'none'} of {count} kernels differ",
        *lines,
        sep="\n  ",
        flush=True,
    )
    return lines


def is_neutral(commit: str) -> bool:
    return TRAILER in git("show", "-s", "--format=%B", commit).splitlines()


def package_commits(revisions: str) -> list[str]:
    """Return the commits of a branch that change the package, oldest first, with merges as single commits."""
    return git("rev-list", "--reverse", "--first-parent", revisions, "--", "pallas_fa2").split()


def neutral_commits(since: str) -> list[tuple[str, str]]:
    """Return the (parent, commit) pairs of the neutral commits after a revision."""
    return [(f"{c}~1", c) for c in package_commits(f"{since}..HEAD") if is_neutral(c)]


def last_neutral_commits() -> list[tuple[str, str]]:
    """Return the revisions before and after the latest neutral commits, if there are any."""
    commits = package_commits("HEAD")
    while commits and not is_neutral(commits[-1]):
        commits.pop()
    if not commits:
        return []
    last = commits[-1]
    while len(commits) > 1 and is_neutral(commits[-2]):
        commits.pop()
    return [(f"{commits[-1]}~1", last)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", nargs="?")
    parser.add_argument("after", nargs="?", help="the working tree by default")
    parser.add_argument("--neutral", metavar="REV", help=f"commits since REV with `{TRAILER}`")
    parser.add_argument("--last-neutral", action="store_true", help="the latest of these together")
    parser.add_argument("--small", action="store_true", help="the calls that CI compares")
    parser.add_argument("--calls", help="names of calls, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=pathlib.Path, help="a directory for the disassembly")
    parser.add_argument("--compile", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compile:
        names = options.calls.split(",")
        print(json.dumps(compile_calls(options.compile, names, options.keep)))
        return 0
    sys.path.insert(0, str(ROOT))
    from tools.sass_matrix import CALLS

    names = [name for name, call in CALLS.items() if call.small or not options.small]
    names = options.calls.split(",") if options.calls else names
    if unknown := set(names) - set(CALLS):
        parser.error(f"no such calls: {', '.join(sorted(unknown))}")
    if options.neutral:
        pairs = neutral_commits(options.neutral)
    elif options.last_neutral:
        pairs = last_neutral_commits()
    elif options.before:
        pairs = [(options.before, options.after)]
    else:
        parser.error("a revision, --neutral or --last-neutral")
    differ = [compare(*pair, names, options.jobs, options.keep) for pair in pairs]
    return int(any(differ))


if __name__ == "__main__":
    sys.exit(main())
