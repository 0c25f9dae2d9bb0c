"""Branches inside kernels, and values that a compiler shall not keep.

`lax.cond` makes a number of its condition, and for each such conversion Mosaic (of jax 0.11 and 0.12) asks which
version of PTX there is: 6 ms, a fifth of what it took to lower a call with its gradients. A selection asks nothing.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def cond(condition: Any, true: Callable[[], Any], false: Callable[[], Any]) -> Any:
    """Run `true` or `false`, as `lax.cond`. Pallas lowers `false` twice, to know what it returns: let it be the shorter
    one."""
    return lax.switch(jnp.where(condition, jnp.int32(1), jnp.int32(0)), [false, true])


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """Return a decorator that runs a function if the condition, which is traced, holds: `pl.when`."""
    return lambda run: cond(condition, run, lambda: None)


def rematerialize[T](x: T) -> T:
    """Return x in a form that LLVM knows nothing of, so that what follows from it is computed where it is used.

    Addresses, descriptors and indices that are the same in every step of a loop, or in several branches, would be
    computed before it and hold registers through it; ptxas then spills (docs/decisions/0064-register-rules.md). Behind
    `lax.optimization_barrier` they are computed anew each time: a few integer instructions. x may be a pytree; as
    nothing is moved across the barrier, its arrays are also there together.
    """
    return lax.optimization_barrier(x)


def as_carry[T](loaded: T) -> T:
    """Return integers that a kernel has loaded as a loop may carry them.

    Inside `shard_map` arrays vary over mesh axes, and to JAX so does what is loaded of them, but nothing that is
    computed in a kernel. Loops carry one kind: here all is computed, by an addition of which no machine code is left.
    """
    return jax.tree.map(lambda x: x + jnp.int32(0), loaded)
