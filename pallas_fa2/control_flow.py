"""Branches inside kernels, in the form that takes Pallas the least time to lower.

`lax.cond` makes a number of its condition, and for each such conversion Mosaic (of jax 0.11 and 0.12) asks which
version of PTX there is: 6 ms, a fifth of what it took to lower a call with its gradients. A selection asks nothing.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax


def cond(condition: Any, true: Callable[[], Any], false: Callable[[], Any]) -> Any:
    """`lax.cond`. Pallas lowers `false` twice, to know what it returns: let it be the shorter one."""
    return lax.switch(jnp.where(condition, jnp.int32(1), jnp.int32(0)), [false, true])


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, of what is not known when traced."""
    return lambda run: cond(condition, run, lambda: None)
