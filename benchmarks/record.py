"""The file of results: what was measured, by which versions, and when.

    {"setup": {device, driver, versions, ...}, "runs": [{date, commit, matmul, shapes}],
     "results": {shape name: {"shape", "allowed", "rows": {implementation: row}}}}

A file holds one setup; several runs may have filled it.
"""

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import jax

import pallas_fa2 as fa
from benchmarks import rivals

RESULTS = pathlib.Path(__file__).parent / "results"


def setup(implementations: Mapping[str, rivals.Implementation], iterations: int) -> dict[str, Any]:
    """Return the device and the versions, which all results of one file must share."""
    device = jax.devices()[0]
    versions = {  # this package need not be installed
        n: fa.__version__ if i.module == "pallas_fa2" else rivals.version(i)
        for n, i in implementations.items()
    }
    return {
        "device": device.device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "sources": sources(),
        "iterations": iterations,
        "implementations": versions,
    }


def sources() -> str:
    """Return a digest of the code that is measured and of the code that calls and checks it.

    The commit does not identify it: a new commit may change a page alone, and an edited kernel may not be committed.
    """
    package = pathlib.Path(fa.__file__).parent
    digest = hashlib.sha256()
    for file in (
        *sorted(package.rglob("*.py")),
        *(
            pathlib.Path(__file__).with_name(f"{name}.py")
            for name in ("rivals", "measure", "torch_fa2")
        ),
    ):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Return the commit of the checkout, marked "dirty" if files have been edited since."""
    return _output("git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty")


def stamp(commit_name: str | None) -> dict[str, str]:
    """Return today's date, and the name of the commit, that of the checkout if it is not given."""
    return {"date": datetime.date.today().isoformat(), "commit": commit_name or commit()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json and --commit, by which a benchmark's file of results is made where there is no checkout."""
    parser.add_argument("--json", type=pathlib.Path, help="the file of results")
    parser.add_argument("--commit", help="the name of the commit, where there is no git checkout")


def rounded(x: float) -> float:
    """Return a number with four digits."""
    return float(f"{x:.4g}")


def _output(*command: str) -> str:
    """Return the first line of a command's output."""
    try:
        out = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except OSError:  # no such program
        out = ""
    return next(iter(out.splitlines()), "unknown").strip()


def default_path(device: str) -> pathlib.Path:
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return RESULTS / f"{slug}.json"


def load(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def resume(path: pathlib.Path, setup: dict[str, Any]) -> dict[str, Any]:
    """Load the record in `path`; raise a ValueError if it was measured on another device or by other versions."""
    record = load(path)
    for name, value in setup.items():
        if (recorded := record["setup"].get(name)) != value:
            raise ValueError(
                f"the file of --resume must have the same `{name}` (={value!r}), but {path} has "
                f"{recorded!r}: measure all shapes again"
            )
    return record


def write(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Replace the file atomically: if the machine goes away, the last state remains."""
    text = json.dumps(record, indent=1)
    for innermost in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):  # one line each
        text = re.sub(innermost, lambda match: " ".join(match[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n")
    new.replace(path)
