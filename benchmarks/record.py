"""The file of results: what was measured, with what, and when.

    {"setup": {device, driver, versions, ...}, "runs": [{date, commit, matmul, shapes}],
     "results": {shape name: {"shape", "allowed", "rows": {implementation: row}}}}

A file holds one setup; several runs may have filled it.
"""

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
    """All that figures of one file must share."""
    device = jax.devices()[0]
    versions = {  # ours need not be installed
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
    """A digest of the code that is measured and of the code that calls and checks it.

    The commit does not say it: a change of a page has another, an edited kernel has the same.
    """
    package = pathlib.Path(fa.__file__).parent
    digest = hashlib.sha256()
    for file in (
        *sorted(package.rglob("*.py")),
        *(pathlib.Path(__file__).with_name(name) for name in ("rivals.py", "measure.py")),
    ):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    """Of the checkout, with a mark if it has been edited since."""
    return _output("git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty")


def _output(*command: str) -> str:
    """What a command prints, in its first line."""
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
    """The record in `path`, if what it was measured with is what there is now."""
    record = load(path)
    for name, value in setup.items():
        if (other := record["setup"].get(name)) != value:
            raise ValueError(
                f"what --resume adds to must have the same `{name}` (={value!r}); {path} has "
                f"{other!r}: measure all shapes anew"
            )
    return record


def write(path: pathlib.Path, record: dict[str, Any]) -> None:
    """Replaces the file as a whole: a machine that is taken away leaves the last state."""
    text = json.dumps(record, indent=1)
    for innermost in (r"\[[^][{}]*\]", r"\{[^{}]*\}"):  # one line each
        text = re.sub(innermost, lambda found: " ".join(found[0].split()), text)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text + "\n")
    new.replace(path)
