"""Accesses of interpreted threads to memory, with what race detection is told of them."""

from typing import Any

import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from tests.support.shared import Thread, the_memory


def read_from_device(thread: Thread, source: tuple, source_info: Any) -> np.ndarray:
    """Return an array in device memory, of which a thread reads some elements."""
    memory, (key, access) = the_memory(), source
    found, _, _ = memory.get_buffer_content(key, access, thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).async_smem_clock
        gpu_callbacks.get_races().check_read(thread, clock, key, access, source_info)
    return found


def write(thread: Thread, target: tuple, value: np.ndarray, source_info: Any) -> None:
    """Store what a thread writes."""
    memory = the_memory()
    _, _, clock = memory.store_buffer_content(*target, value, thread)
    if clock is not None:
        generic = memory.clock_of_access(thread, target[0], clock).generic_clock
        gpu_callbacks.get_races().check_write(thread, generic, *target, source_info)
