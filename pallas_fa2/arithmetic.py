"""Integer arithmetic on Python ints, NumPy arrays and traced int32 scalars."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2E = math.log2(math.e)

I32 = jnp.int32


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def div(a: Any, b: int) -> Any:
    """a // b for a >= 0: an int, a NumPy array or a traced scalar, where it is one instruction."""
    return lax.div(a, I32(b)) if isinstance(a, jax.Array) else a // b


def rem(a: Any, b: int) -> Any:
    return lax.rem(a, I32(b)) if isinstance(a, jax.Array) else a % b


def minimum(a: Any, b: int) -> Any:
    return jnp.minimum(a, b) if isinstance(a, jax.Array) else np.minimum(a, b)


def maximum(a: Any, b: int) -> Any:
    return jnp.maximum(a, b) if isinstance(a, jax.Array) else np.maximum(a, b)


def unravel(number: Any, shape: tuple[int, ...]) -> list[Any]:
    """Of the element with this number in an array of this shape, the place on each axis."""
    place = []
    for size in reversed(shape):
        number, at = div(number, size), rem(number, size)
        place.append(at)
    return place[::-1]
