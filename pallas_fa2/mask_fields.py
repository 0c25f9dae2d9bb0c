"""Checks of the fields of masks: integers and arrays, static or run-time data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_fa2.pytree_fn import is_static, short_repr


def take_field(mask: Any, field: str) -> Any:
    """A field; lists are arrays."""
    value = getattr(mask, field)
    if isinstance(value, list):
        value = np.asarray(value)
    if isinstance(value, tuple):
        name, numbers = type(mask).__name__, ", ".join(map(str, value))
        raise TypeError(
            f"{name}.{field} must be one number or array, but it is a tuple; write "
            f"{name}({numbers}), or {name}(jnp.array({list(value)}))"
        )
    object.__setattr__(mask, field, value)
    return value


def check_number(mask: Any, field: str, least: int = -(2**31)) -> None:
    """Positions are int32, and so must be what they are compared with; NumPy's numbers are data, and cut to that."""
    n = take_field(mask, field)
    too_low = isinstance(n, int | np.integer) and n < least
    if too_low or (isinstance(n, int) and n >= 2**31):
        low = "-2^31" if least < -1 else least
        raise ValueError(
            f"{type(mask).__name__}.{field} must be an integer from {low} to 2^31 - 1, but it is "
            f"{n}; leave the mask out where it is not to limit anything"
        )


def check_integer(mask: Any, field: str, least: int = -(2**31), optional: bool = False) -> None:
    """An integer or an array; None where it is optional."""
    n = getattr(mask, field)
    known = isinstance(n, int | list | tuple) or hasattr(n, "dtype") or (optional and n is None)
    if not known:
        raise TypeError(
            f"{type(mask).__name__}.{field} must be an integer or an array of integers, but it is {n!r}"
        )
    check_number(mask, field, least)


def take_integer(mask: Any, field: str, least: int = -(2**31), optional: bool = False) -> None:
    """A static integer (NumPy's too), or an array; None where it is optional."""
    if isinstance(getattr(mask, field), np.integer):
        object.__setattr__(mask, field, int(getattr(mask, field)))
    check_integer(mask, field, least, optional)


def take_data(mask: Any, field: str) -> None:
    """A number that is data: a Python integer is an array too, by which nothing is compiled anew."""
    check_number(mask, field)
    value = getattr(mask, field)
    if isinstance(value, int) and not isinstance(value, bool):
        object.__setattr__(mask, field, np.asarray(value, np.int32))


def take_size(mask: Any, field: str, cure: str, optional: bool = False) -> None:
    """A static integer."""
    take_integer(mask, field, 1, optional)
    if not is_static(size := getattr(mask, field)):
        raise TypeError(
            f"{type(mask).__name__}.{field} must be an integer, but it is {short_repr(size)}; {cure}"
        )


def as_position(n: Any) -> Any:
    """Integers as int32, to be compared with positions; no position is beyond its limits."""
    n = n if hasattr(n, "dtype") else jnp.asarray(n)
    if n.dtype == jnp.int32 or not jnp.issubdtype(n.dtype, jnp.integer):
        return n
    limits = jnp.iinfo(jnp.int32)
    wide = n.dtype.itemsize > 4 or n.dtype == jnp.uint32
    xp = jnp if isinstance(n, jax.Array) else np  # which alone keeps 64 bits
    return (xp.clip(n, None, limits.max) if wide else n).astype(jnp.int32)


def is_known(x: Any) -> bool:
    return not isinstance(x, Tracer)


def as_integers(name: str, x: Any) -> Any:
    """An int32 array, NumPy's where its numbers are known."""
    x = np.asarray(x) if not hasattr(x, "dtype") else x
    if not jnp.issubdtype(x.dtype, jnp.integer) and x.size:
        raise TypeError(f"{name} must be integers, but their dtype is {x.dtype}; cast them")
    return np.asarray(x, np.int32) if is_known(x) else x.astype(jnp.int32)
