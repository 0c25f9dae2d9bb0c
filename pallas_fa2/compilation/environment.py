"""What the code of a kernel depends on beside the call: the package, the compilers, the device and JAX's options."""

import functools
import hashlib
import importlib.metadata
import os
import pathlib
from typing import Any

import jax

# Mosaic is part of jaxlib and the plugins; ptxas comes with nvcc. Distributions that are not installed are left out.
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


def settings() -> tuple[tuple[str, str], ...]:
    """Return the options of JAX that hold here, by context managers too."""
    options = sorted(jax.config.values.items())
    return tuple((name, repr(x)) for name, x in options if not name.startswith(WITHOUT_EFFECT))


def describe(device: Any) -> str | None:
    """Return a text that differs wherever the package, a compiler, the kind of device or the environment does.

    It is None if the package's files are not those that were imported.
    """
    installation = _installation()
    if installation is None:
        return None
    attributes = ("platform", "device_kind", "compute_capability", "core_count")
    variables = {k: v for k, v in os.environ.items() if k.startswith(VARIABLES)}
    lines = (
        installation,
        f"{[getattr(device, name, None) for name in attributes]}",
        f"{getattr(device.client, 'platform_version', None)}",
        f"{sorted(variables.items())}",
    )
    return "\n".join(lines)


@functools.cache
def _installation() -> str | None:
    """Return the digest of the package's sources, and the versions of what compiles them."""
    sources = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        for part in (str(path.relative_to(_PACKAGE)).encode(), path.read_bytes()):
            sources.update(hashlib.sha256(part).digest())
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
