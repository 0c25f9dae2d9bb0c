"""The configurations that `autotune` has chosen, and a JSON file of them."""

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

# The key is the name of the backend and `tuning_key`.
CONFIGS: dict[tuple[str, str], Any] = {}

FORMAT = 1  # the version of the file format


@functools.lru_cache(maxsize=512)
def tuning_key(spec: CallSpec, device: Device) -> str:
    """Return a key that calls share if one measurement of the forward holds for them, the same in every process.

    It does not depend on the order in which the backward sums.
    """
    described = dataclasses.replace(spec, deterministic=False, mask=None, scores=())
    functions = [f and f.key for f in (spec.mask, *spec.scores)]
    text = repr((described, functions, device))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(backend: str, spec: CallSpec, device: Device) -> Any:
    """Return the configuration that was chosen for a call, or None."""
    return CONFIGS.get((backend, tuning_key(spec, device))) if CONFIGS else None


def store(backend: str, spec: CallSpec, device: Device, config: Any) -> None:
    CONFIGS[backend, tuning_key(spec, device)] = config


def save_autotuned(path: str | os.PathLike) -> None:
    """Write the configurations that `autotune` has chosen or that were loaded in this process to a JSON file."""
    configs = [
        {"backend": backend, "call": key, "config": dataclasses.asdict(config)}
        for (backend, key), config in CONFIGS.items()
    ]
    text = json.dumps({"format": FORMAT, "configs": configs}, indent=1)
    pathlib.Path(path).write_text(text + "\n")


def load_autotuned(path: str | os.PathLike) -> int:
    """Read a file of `save_autotuned`; the calls for which its configurations were measured will use them.

    Returns:
      The number of configurations.

    Raises:
      ValueError: the file is not one of `save_autotuned`, or one of another version of this package.
    """
    try:
        read = json.loads(pathlib.Path(path).read_text())
        if read["format"] != FORMAT:
            raise ValueError(f"its format is {read['format']}, and here it is {FORMAT}")
        configs = {(x["backend"], x["call"]): _config(x) for x in read["configs"]}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{os.fspath(path)} must be a file of save_autotuned of this version, but it is not ({error}); measure "
            "again by autotune"
        ) from error
    CONFIGS.update(configs)
    return len(configs)


def _config(entry: dict[str, Any]) -> Any:
    kind = BACKENDS[entry["backend"]].config_type
    if kind is None:
        raise ValueError(f"{entry['backend']} has no candidates")
    # JSON has lists for tuples.
    fields = {n: tuple(x) if isinstance(x, list) else x for n, x in entry["config"].items()}
    return kind(**fields)
