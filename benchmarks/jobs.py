"""Several processes that compile at the same time, and take turns on the GPU."""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import measure


def each(
    function: Callable[[str], Any], names: list[str], processes: int, end: float | None = None
) -> Iterator[tuple[str, Any]]:
    """(name, function(name)) as they are done; none is begun after `end`, by `time.monotonic`.

    With more than one process, each call has a new one, and the function must be one that can be pickled.
    """
    if processes == 1:
        for name in names:
            if _in_time(end):
                yield name, function(name)
        return
    spawn = multiprocessing.get_context("spawn")
    turn = spawn.Lock()  # must outlive the pool
    with concurrent.futures.ProcessPoolExecutor(
        processes, spawn, _begin, (turn,), max_tasks_per_child=1
    ) as pool:
        futures = {pool.submit(_call, function, name, end): name for name in names}
        try:
            for future in concurrent.futures.as_completed(futures):
                found = future.result()
                if found is not None:
                    yield futures[future], found
        finally:
            pool.shutdown(cancel_futures=True)


def share_memory(processes: int) -> None:
    """Before JAX has looked for devices: each process takes what it needs of the GPU's."""
    if processes > 1:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _in_time(end: float | None) -> bool:
    return end is None or time.monotonic() < end


def _begin(turn: Any) -> None:
    measure.Turn.lock = turn
    # Autotuning would run on the GPU out of turn.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def _call(function: Callable[[str], Any], name: str, end: float | None) -> Any:
    return function(name) if _in_time(end) else None
