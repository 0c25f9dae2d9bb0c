"""How an operation of the interpreter is called, and finds what it works on."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from tests.support import shared


def the_memory() -> shared.Memory:
    memory = gpu_callbacks._get_shared_memory()
    assert isinstance(memory, shared.Memory), "install() was called while a kernel was running"
    return memory


def locate(ref: tuple[np.ndarray, Any]) -> tuple[shared.Key, interpret_utils.Access]:
    key_as_array, transforms = ref
    key = shared.Key.from_array(key_as_array)
    indexing = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, the_memory().access(key, indexing)


def inline_code(operation: Callable) -> Callable:
    """operation(thread, operands) -> results, as a callback that hands its token on. References come with
    their transforms (`locate`)."""

    @gpu_callbacks.fail_on_exception
    def call(token: Any, thread: Any, *operands: Any, **static: Any) -> tuple:
        return token, *(operation(thread, *operands, **static) or ())

    return call


def row_of(place: tuple) -> int:
    row = place[1].range[0]
    return row.start if isinstance(row, slice) else int(row)
