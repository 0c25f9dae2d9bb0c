"""Operations that Mosaic's own code writes."""

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def inline_op(name: str, code: Callable, result: Any, *arg_types: Any) -> Callable:
    """An operation that Mosaic's own code writes; the interpreter in the tests knows it by its name."""
    code.__name__ = name
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(code)
