"""Checks the kernels on a GPU of a kind on which nobody has run them, before a call first uses them there.

A small call of each family of kernels that a call runs is compared with the definition. The verdict is kept in a file,
for that GPU, the version of its driver, the sources of this package and what compiles them.
"""

import functools
import json
import logging
import os
import pathlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_fa2.backends.protocol import Defect
from pallas_fa2.backends.sm80.first_use_cases import Case, Family, families_of
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.compilation import environment, store
from pallas_fa2.device import Device
from pallas_fa2.ir.cached_spec import CachedSpec
from pallas_fa2.ir.call_spec import CallSpec

# Compute capabilities on which the tests of the kernels have run.
RUN_ON = ("9.0",)
# Relative error, in the 2-norm: what is computed from bfloat16 has 0.001 to 0.003 interpreted, from float16 0.0003 and
# from float32 4e-7. (Beside a definition in the same dtype, an H200 had 0.002 to 0.003.)
MAX_ERROR = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-5}
# An error of a compiler may print a module.
MAX_MESSAGE = 300

# A backend's forward and backward, or the `configure` and `forward` of a `CachedForward`.
type Kernels = tuple[Callable, Callable]


class Verdict(NamedTuple):
    """What is wrong with a family, or nothing, and whether another process would find the same: what results, a
    compiler and the driver say lasts, lack of memory and what Python raises, perhaps because of an option of JAX, may
    not."""

    error: str = ""
    lasts: bool = True


log = logging.getLogger("pallas_fa2")

_file_lock = threading.Lock()


def cache_file() -> pathlib.Path:
    """Return where verdicts are kept, with a store of compiled kernels and without one."""
    return store.cache_directory() / "first_use.json"


def failure(
    spec: CallSpec | CachedSpec,
    device: Device,
    kernels: Kernels,
    forward: ForwardConfig | None = None,
) -> Defect | None:
    """Return why the kernels of a call, with this forward or the one that it takes, must not be used on a device, or
    None: they are right, were run on such a GPU by others, or this process has none."""
    if device.capability in RUN_ON:
        return None
    gpus = [d for d in jax.local_devices() if d.platform == "gpu" and d.device_kind == device.kind]
    if not gpus:  # a program is compiled for a device that is elsewhere
        return None
    verdicts = _verdicts(families_of(spec, device, forward), kernels, device, gpus[0])
    found = "; ".join(filter(None, verdicts))
    if not found:
        return None
    return Defect(
        f"a check of ampere's kernels on this {device.kind} found an error ({found}; {cache_file()}): please report it, with what "
        "`python -m pallas_fa2` prints"
    )


@functools.lru_cache(maxsize=512)
def _verdicts(families: tuple[Family, ...], kernels: Kernels, device: Device, gpu: Any) -> tuple:
    # In threads of their own: a caller may be tracing, and kernels are compiled side by side.
    with ThreadPoolExecutor(len(families)) as pool:
        return tuple(pool.map(lambda family: _verdict(family, kernels, device, gpu), families))


@functools.lru_cache(maxsize=512)
def _verdict(family: Family, kernels: Kernels, device: Device, gpu: Any) -> str:
    """Return what is wrong with a family, or nothing, from the file if it is there."""
    installation = environment.installation()
    if installation is None:  # nobody knows the sources that are running
        return check(family, kernels, device, gpu).error
    versions = gpu.client.platform_version
    key = f"{device.kind}, {device.capability}, {versions}, {installation}, {family}"
    key = key.replace("\n", " ")
    known = _read().get(key)
    if known is not None:
        return known
    error, lasts = check(family, kernels, device, gpu)
    if lasts:
        _write(key, error)
    return error


def _read() -> dict[str, str]:
    try:
        return json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}


def _write(key: str, error: str) -> None:
    """Add a verdict to the file; without a file that can be written, it is found again in the next process."""
    file = cache_file()
    part = file.with_suffix(f".{os.getpid()}.part")
    with _file_lock:
        try:
            store.make_private(file.parent)
            part.write_text(json.dumps(_read() | {key: error}, indent=1))
            part.replace(file)  # in one step: other processes read it
        except OSError:
            pass


def check(family: Family, kernels: Kernels, device: Device, gpu: Any) -> Verdict:
    """Run a small call of a family on a GPU, and compare it with the definition.

    Kernels that cannot be lowered, compiled or launched there are wrong: the error that says so is not the caller's.
    """
    lasts = True
    try:
        with jax.default_device(gpu), jax.transfer_guard("allow"):
            found = compare(
                family.case(kernels, device),
                MAX_ERROR[family.dtype],
                lambda fn, arrays: jax.jit(fn)(*arrays),
            )
    except Exception as error:
        log.debug("the check of %s failed", family, exc_info=True)
        message = " ".join(str(error).split())
        found = f"{type(error).__name__}: {message[:MAX_MESSAGE]}"
        of_gpu = isinstance(error, jax.errors.JaxRuntimeError)
        lasts = of_gpu and "RESOURCE_EXHAUSTED" not in message
    return Verdict(f"{family}: {found}" if found else "", lasts)


def compare(case: Case, max_error: float, run: Callable) -> str:
    """Return what of a call's results by the kernels differs too much from those by the definition, or nothing.

    `run(function, arrays)` runs the kernels. Nothing else is compiled.
    """
    results = run(case.kernels, case.arrays)
    for name, y in case.expected.items():
        if name not in results:  # gradients that these kernels do not form
            continue
        x = np.asarray(results[name]).astype(np.float64)
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        if not error <= max_error:  # nor NaN
            return f"relative error {error:.2g} of {name}"
    return ""
