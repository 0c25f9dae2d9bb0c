"""What the code of a kernel depends on beside the call: the package, the compilers, the device and JAX's options."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
from typing import Any

import jax

# Mosaic is part of jaxlib and the plugins; ptxas comes with nvcc, or with a CUDA toolkit (`_ptxas`). Distributions that
# are not installed are left out.
DISTRIBUTIONS = (
    *("jax", "jaxlib", "numpy", "ml_dtypes"),
    *("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    *("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc"),
)
# Options of JAX that change no program. All others are in the key, also those that JAX adds later.
WITHOUT_EFFECT = (
    *("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache"),
    *("jax_log", "jax_dump", "jax_explain", "jax_include", "jax_traceback", "jax_tracer_error", "jax_transfer_guard"),
    *("jax_default_device", "jax_platform", "jax_check", "jax_debug", "jax_cuda_visible_devices", "jax_num_cpu_devices"),
)  # fmt: skip
VARIABLES = ("XLA_FLAGS", "MOSAIC_GPU_", "CUDA_ROOT", "CUDA_HOME")
# Directories of CUDA: JAX sets the first one to CUDA_ROOT, or to nvcc's distribution.
CUDA_VARIABLES = ("MOSAIC_GPU_CUDA_ROOT", "CUDA_ROOT", "CUDA_HOME")
CUDA_FLAG = "--xla_gpu_cuda_data_dir="


def settings() -> tuple[tuple[str, str], ...]:
    """Return the options of JAX that hold here, by context managers too."""
    options = sorted(jax.config.values.items())
    return tuple((name, repr(x)) for name, x in options if not name.startswith(WITHOUT_EFFECT))


def describe(device: Any) -> str | None:
    """Return a text that differs wherever the package, a compiler, the kind of device or the environment does.

    It is None if the package's files are not those that were imported.
    """
    sources = installation()
    if sources is None:
        return None
    attributes = ("platform", "device_kind", "compute_capability", "core_count")
    variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    lines = (
        sources,
        f"{[getattr(device, name, None) for name in attributes]}",
        f"{getattr(device.client, 'platform_version', None)}",
        f"{sorted(variables.items())}",
        f"{_ptxas()}",
    )
    return "\n".join(lines)


def _ptxas() -> list[tuple[str, str]]:
    """Return the path of every ptxas that may be run, and what it says of its version.

    XLA runs the first that is new enough, in an order that differs among its versions. It looks in the directory of
    CUDA that JAX or a flag names, on PATH, and in /usr/local/cuda.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    cuda = [os.environ.get(name) for name in CUDA_VARIABLES]
    cuda += [x.removeprefix(CUDA_FLAG) for x in flags if x.startswith(CUDA_FLAG)]
    directories = [os.path.join(x, "bin") for x in (*cuda, "/usr/local/cuda") if x]
    directories += filter(None, os.environ.get("PATH", "").split(os.pathsep))
    versions = {}
    for path in (os.path.realpath(os.path.join(x, "ptxas")) for x in directories):
        try:
            status = os.stat(path)
        except OSError:
            continue
        versions[path] = _version(path, status.st_mtime_ns, status.st_size)
    return list(versions.items())


@functools.cache
def _version(path: str, *stamp: int) -> str:
    """Return what a compiler says of its version, or why it cannot. It is asked again if its file has another stamp."""
    try:
        # It answers in 10 ms.
        return subprocess.check_output(
            [path, "--version"], stderr=subprocess.DEVNULL, text=True, timeout=10
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return repr(error)


@functools.cache
def installation() -> str | None:
    """Return the digest of the package's sources, and the versions of what compiles them.

    It is None if the package's files are not those that were imported.
    """
    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        for text in (str(path.relative_to(_PACKAGE)).encode(), path.read_bytes()):
            sources.update(hashlib.sha256(text).digest())
    # A file that was edited after it was imported is not the code that runs; a zip file has no files.
    if not _AT_IMPORT or _stamps() != _AT_IMPORT:
        return None
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{sources.hexdigest()}\n{versions}"


def _stamps() -> dict[pathlib.Path, tuple[int, ...]]:
    stats = {path: path.stat() for path in _PACKAGE.rglob("*.py")}
    return {path: (x.st_mtime_ns, x.st_size, x.st_ino) for path, x in stats.items()}


_PACKAGE = pathlib.Path(__file__).parent.parent
_AT_IMPORT = _stamps()
