"""The configurations that `autotune` has found, and a JSON file of them."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from typing import Any

from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.device import Device
from pallas_fa2.ir.call_spec import CallSpec

# By backend and `tuning_key`.
CONFIGS: dict[tuple[str, str], Any] = {}

FORMAT = 1  # of the file


@functools.lru_cache(maxsize=512)
def tuning_key(spec: CallSpec, device: Device) -> str:
    """A key of the calls that one measured forward serves, the same in every process.

    The order in which the backward sums makes no difference to it.
    """
    described = dataclasses.replace(spec, deterministic=False, mask=None, scores=())
    functions = [f and f.key for f in (spec.mask, *spec.scores)]
    text = repr((described, functions, device))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(backend: str, spec: CallSpec, device: Device) -> Any:
    """The configuration that was found for a call, or None."""
    return CONFIGS.get((backend, tuning_key(spec, device))) if CONFIGS else None


def store(backend: str, spec: CallSpec, device: Device, config: Any) -> None:
    CONFIGS[backend, tuning_key(spec, device)] = config


def save_autotuned(path: str | os.PathLike) -> None:
    """Writes all that `autotune` has found in this process, or loaded, to a JSON file."""
    found = [
        {"backend": backend, "call": key, "config": dataclasses.asdict(config)}
        for (backend, key), config in CONFIGS.items()
    ]
    text = json.dumps({"format": FORMAT, "configs": found}, indent=1)
    pathlib.Path(path).write_text(text + "\n")


def load_autotuned(path: str | os.PathLike) -> int:
    """Reads a file of `save_autotuned`; its configurations serve the calls for which they were measured.

    Returns:
      How many there are.

    Raises:
      ValueError: the file is not one of `save_autotuned`, or of another version of this package.
    """
    try:
        read = json.loads(pathlib.Path(path).read_text())
        if read["format"] != FORMAT:
            raise ValueError(f"its format is {read['format']}, and here it is {FORMAT}")
        found = {(x["backend"], x["call"]): _config(x) for x in read["configs"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)} must be a file of save_autotuned of this version, but it is not ({error}); measure "
            "anew by autotune"
        ) from error
    CONFIGS.update(found)
    return len(found)


def _config(entry: dict[str, Any]) -> Any:
    kind = BACKENDS[entry["backend"]].config_type
    if kind is None:
        raise ValueError(f"{entry['backend']} has no candidates")
    # JSON has lists for tuples.
    fields = {n: tuple(x) if isinstance(x, list) else x for n, x in entry["config"].items()}
    return kind(**fields)
