"""Checks of the fields of masks: integers and arrays, static or run-time data.

Positions are int32, and so must be what they are compared with.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_fa2.pytree_fn import is_static, short_repr


def take_field(mask: Any, field: str) -> Any:
    """Return a field, a list as an array; raise a TypeError for a tuple."""
    value = getattr(mask, field)
    if isinstance(value, list):
        value = np.asarray(value)
    if isinstance(value, tuple):
        name, elements = type(mask).__name__, ", ".join(map(str, value))
        raise TypeError(
            f"{name}.{field} must be one number or array, but it is a tuple; write "
            f"{name}({elements}), or {name}(jnp.array({list(value)}))"
        )
    object.__setattr__(mask, field, value)
    return value


def check_range(mask: Any, field: str, least: int = -(2**31)) -> None:
    """Check that a known integer is in [least, 2^31); NumPy's integers are data, and larger ones are clipped."""
    n = take_field(mask, field)
    too_low = isinstance(n, int | np.integer) and n < least
    if too_low or (isinstance(n, int) and n >= 2**31):
        low = "-2^31" if least < -1 else least
        raise ValueError(
            f"{type(mask).__name__}.{field} must be an integer from {low} to 2^31 - 1, but it is "
            f"{n}; leave the mask out where it is not to limit anything"
        )


def check_integer(mask: Any, field: str, least: int = -(2**31), optional: bool = False) -> None:
    """Check that a field is an integer or an array, or None where it is optional."""
    n = getattr(mask, field)
    known = isinstance(n, int | list | tuple) or hasattr(n, "dtype") or (optional and n is None)
    if not known:
        raise TypeError(
            f"{type(mask).__name__}.{field} must be an integer or an array of integers, but it is {n!r}"
        )
    check_range(mask, field, least)


def take_integer(mask: Any, field: str, least: int = -(2**31), optional: bool = False) -> None:
    """Check the same, and make NumPy's integer a static one."""
    if isinstance(getattr(mask, field), np.integer):
        object.__setattr__(mask, field, int(getattr(mask, field)))
    check_integer(mask, field, least, optional)


def take_data(mask: Any, field: str) -> None:
    """Make a Python integer an int32 array, which is run-time data: no program is compiled for another one."""
    check_range(mask, field)
    value = getattr(mask, field)
    if isinstance(value, int) and not isinstance(value, bool):
        object.__setattr__(mask, field, np.asarray(value, np.int32))


def take_size(mask: Any, field: str, remedy: str, optional: bool = False) -> None:
    """Check that a field is a static integer of 1 or more, or None where it is optional."""
    take_integer(mask, field, 1, optional)
    if not is_static(size := getattr(mask, field)):
        raise TypeError(
            f"{type(mask).__name__}.{field} must be an integer, but it is {short_repr(size)}; {remedy}"
        )


def as_position(n: Any) -> Any:
    """Return integers as int32, clipped to its range: no position is beyond it."""
    n = n if hasattr(n, "dtype") else jnp.asarray(n)
    if n.dtype == jnp.int32 or not jnp.issubdtype(n.dtype, jnp.integer):
        return n
    limits = jnp.iinfo(jnp.int32)
    wide = n.dtype.itemsize > 4 or n.dtype == jnp.uint32
    xp = jnp if isinstance(n, jax.Array) else np  # NumPy alone keeps 64 bits
    return (xp.clip(n, None, limits.max) if wide else n).astype(jnp.int32)


def is_known(x: Any) -> bool:
    return not isinstance(x, Tracer)


def as_integers(name: str, x: Any) -> Any:
    """Return an int32 array, NumPy's where its values are known."""
    x = np.asarray(x) if not hasattr(x, "dtype") else x
    if not jnp.issubdtype(x.dtype, jnp.integer) and x.size:
        raise TypeError(f"{name} must be integers, but their dtype is {x.dtype}; cast them")
    return np.asarray(x, np.int32) if is_known(x) else x.astype(jnp.int32)
