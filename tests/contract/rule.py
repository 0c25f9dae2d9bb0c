"""FlashAttention's own rule: an error may be twice that of dense attention in the same dtype."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FACTOR = 2.0
# Relative rounding of each dtype, for values that dense attention happens to hit exactly.
FLOOR = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 4e-6, "float64": 1e-14}


def error(x: Any, expected: np.ndarray) -> float:
    """Largest deviation, relative to the largest expected value; infinities must agree."""
    x = np.asarray(x, np.float64)
    infinite = np.isinf(expected)
    if not np.array_equal(infinite, np.isinf(x)) or not np.array_equal(
        x[infinite], expected[infinite]
    ):
        return float("inf")
    if expected.size == 0 or infinite.all():
        return 0.0
    diff = np.abs(x[~infinite] - expected[~infinite]).max()
    return float(diff / max(np.abs(expected[~infinite]).max(), 1e-30))


def assert_within_rule(
    name: str, what: str, x: Any, unfused: Any, expected: np.ndarray, factor: float = FACTOR
) -> None:
    """`x` against the truth, allowed `factor` times the error of dense attention in the inputs' dtype.

    lse is a float32 sum of products that float32 holds: it gets the floor of float32 alone.
    """
    dtype = str(np.asarray(x).dtype)
    actual = error(x, expected)
    allowed = 0.0 if name == "lse" else error(unfused, expected)
    limit = max(factor * allowed, FLOOR[dtype])
    assert np.isfinite(limit), f"{name} of {what}: dense attention misses an infinity or a NaN"
    assert actual <= limit, (
        f"{name} of {what}: error {actual:.3g} > max({factor} * {allowed:.3g}, {FLOOR[dtype]})"
    )


def _compiled(fn: Callable, *args: Any) -> Any:
    return jax.jit(fn)(*args)


def assert_as_dense(
    actual: Any, dense: Callable, args: Any, run: Callable = _compiled, factor: float = 3
) -> None:
    """Results and gradients, of any tree, against those of dense attention: of float32 the truth, in the inputs'
    dtype the error that is allowed, times `factor`. Sums in float32 have the errors of the inputs' dtype."""

    def wide(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x

    truth, unfused = run(dense, *jax.tree.map(wide, args)), run(dense, *args)
    floats = (x.dtype for x in jax.tree.leaves(args) if jnp.issubdtype(x.dtype, jnp.floating))
    rounded = min(floats, key=lambda dtype: dtype.itemsize)
    leaves = map(jax.tree.leaves, (unfused, truth))
    for (path, x), *others in zip(jax.tree.leaves_with_path(actual), *leaves, strict=True):
        y, z = others
        assert x.shape == y.shape and x.dtype == y.dtype
        x, y = (jnp.asarray(array).astype(rounded) for array in (x, y))
        name, expected = jax.tree_util.keystr(path), np.asarray(z, np.float64)
        assert_within_rule(name, "the call", x, y, expected, factor)
