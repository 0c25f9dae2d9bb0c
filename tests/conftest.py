"""The setup of every test: strict dtypes and ranks, a described H200 on machines without a GPU."""

import gc
import os
import pathlib
import sys
from collections.abc import Iterator

import jax
import pytest

from tests.support import numpy_threads

# A plugin may have imported NumPy before this, but not in xdist's workers, which start with this environment.
numpy_threads.use_one()
# On a machine with a GPU the platform is JAX's own choice.
if {"gpu", "-mgpu", "gpus", "-mgpus"} & set(sys.argv):
    os.environ["PALLAS_FA2_ON_GPU"] = "1"  # xdist's workers see the environment, not the arguments
if "PALLAS_FA2_ON_GPU" not in os.environ:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Eight devices for the tests of sharding. Most of a test's time is compilation: without LLVM's
    # optimizations it is half, and of what is left XLA's older emitters of fusions take two thirds.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
        " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    )
else:
    # The dense truth need not be fast, and choosing its kernels means to compile many.
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`-m gpu` selects the tests on a GPU, `-m gpus` those on two; else they are deselected, not skipped."""
    if "gpu" in (config.option.markexpr or ""):
        return
    left = [i for i in items if i.get_closest_marker("gpu") or i.get_closest_marker("gpus")]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tracing makes more objects than Python expects, which looked at all that JAX keeps again and again for cycles
    among them: a sixth of the time."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


# Linux lets a process have 65,530 mappings of memory (vm.max_map_count). A compiled program has about six, JAX keeps
# those of functions that live on, and where there are no more LLVM crashes: it did, after some 1,700 tests.
MOST_MAPPINGS = 30_000
MAPPINGS = pathlib.Path("/proc/self/maps")


@pytest.fixture(autouse=True)
def _no_more_programs_than_memory_maps() -> Iterator[None]:
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
