"""Processes that compile at the same time and use the GPU one at a time."""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import measure


def run_all(
    function: Callable[[str], Any], names: list[str], processes: int, end: float | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (name, function(name)) as the calls finish, if it is not None; none starts after `end`, a `time.monotonic`.

    With more than one process, each call has a process of its own, and the function must be picklable.
    """
    if processes == 1:
        for name in names:
            result = _call(function, name, end)
            if result is not None:
                yield name, result
        return
    spawn = multiprocessing.get_context("spawn")
    gpu_lock = spawn.Lock()  # must outlive the pool
    with concurrent.futures.ProcessPoolExecutor(
        processes, spawn, _initialize, (gpu_lock,), max_tasks_per_child=1
    ) as pool:
        futures = {pool.submit(_call, function, name, end): name for name in names}
        try:
            for future in concurrent.futures.as_completed(futures):
                result = future.result()
                if result is not None:
                    yield futures[future], result
        finally:
            pool.shutdown(cancel_futures=True)


def share_memory() -> None:
    """Make each process allocate GPU memory on demand; call it before JAX initializes its devices."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def is_over(end: float | None) -> bool:
    """Return whether it is later than `end`, a `time.monotonic`, which is the same in all processes."""
    return end is not None and time.monotonic() >= end


def _initialize(gpu_lock: Any) -> None:
    measure.Gpu.lock = gpu_lock
    # Autotuning would run on the GPU without the lock.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def _call(function: Callable[[str], Any], name: str, end: float | None) -> Any:
    return None if is_over(end) else function(name)
