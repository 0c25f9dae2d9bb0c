"""Integer arithmetic on Python ints, NumPy arrays and traced int32 scalars."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

type Scalar = int | jax.Array  # an int32 that is known when traced, or not
type IntOrArray = Any  # an int, a NumPy array of integers, or a traced int32

LOG2E = math.log2(math.e)

I32 = jnp.int32


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is n or more."""
    return -(-n // multiple) * multiple


def div(a: IntOrArray, b: int) -> IntOrArray:
    """Return a // b for a >= 0, without the instructions that round negative quotients down."""
    return lax.div(a, I32(b)) if isinstance(a, jax.Array) else a // b


def rem(a: IntOrArray, b: int) -> IntOrArray:
    """Return a % b for a >= 0."""
    return lax.rem(a, I32(b)) if isinstance(a, jax.Array) else a % b


def minimum(a: IntOrArray, b: int) -> IntOrArray:
    """Return the lesser one, on the host if `a` is not traced."""
    return jnp.minimum(a, b) if isinstance(a, jax.Array) else np.minimum(a, b)


def maximum(a: IntOrArray, b: int) -> IntOrArray:
    """Return the greater one, on the host if `a` is not traced."""
    return jnp.maximum(a, b) if isinstance(a, jax.Array) else np.maximum(a, b)


def unravel(index: IntOrArray, shape: tuple[int, ...]) -> list[IntOrArray]:
    """Return the coordinates of an element, by its index in an array of this shape in row-major order."""
    coordinates = []
    for size in reversed(shape):
        index, coordinate = div(index, size), rem(index, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def array_namespace(x: Any) -> Any:
    """Return the module of an array's functions: NumPy, or jax.numpy."""
    return np if isinstance(x, np.ndarray) else jnp
