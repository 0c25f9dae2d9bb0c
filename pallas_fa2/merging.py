"""`merge`: attention over all keys from attention over parts of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Part = tuple[Float[Array, "*B T N Hv"], Float[Array, "*B N T"]]


def merge(*parts: Part) -> Part:
    """Combine the results of one query on disjoint sets of keys into that on all of them.

    The result weighs each output by its share of the sum of exponentials, in float32 (float64 for such inputs). A part
    whose lse is -inf (a query that attended to none of its keys) has no weight, whatever its output holds. It is
    differentiable in all outputs and logsumexps.

    Args:
      parts: pairs (out `[*B, T, N, Hv]`, lse `[*B, N, T]`) as `return_lse=True` gives them, of equal shapes and dtypes.
        Sinks may have been added to one of them only.

    Returns:
      (out, lse) of the same shapes and dtypes.

    Raises:
      TypeError, ValueError: there is no part, one is no pair, or their shapes or dtypes differ.

    Example:
      >>> import jax, pallas_fa2 as fa
      >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 128, 8, 64))
      >>> parts = [
      ...     fa.flash_attention(q, k[:, i : i + 64], v[:, i : i + 64], return_lse=True)
      ...     for i in (0, 64)
      ... ]
      >>> out, lse = fa.merge(*parts)  # that of all 128 keys
    """
    outs, lses = _checked(parts)
    top = functools.reduce(jnp.maximum, lses)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0.0, top))
    weights = [jnp.exp(lse - top) for lse in lses]
    total = functools.reduce(jnp.add, weights)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)

    def weighted(out: jax.Array, weight: jax.Array) -> jax.Array:
        share = jnp.moveaxis(weight / total, -1, -2)[..., None]
        # Where there is no weight the output may be anything, and its cotangent is 0.
        return share * jnp.where(share == 0, 0.0, out.astype(share.dtype))

    out = functools.reduce(jnp.add, map(weighted, outs, weights))
    return out.astype(outs[0].dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def _is_pair(part: Any) -> bool:
    """Return whether a part is a pair of arrays, and no list of parts."""
    is_pair = isinstance(part, tuple | list) and len(part) == 2
    return is_pair and not any(isinstance(x, tuple | list) for x in part)


def _checked(parts: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the outputs and logsumexps of the parts."""
    if not parts or not all(map(_is_pair, parts)):
        raise TypeError(
            f"merge must get one or more pairs (out, lse), but it gets {len(parts)} arguments of types "
            f"{[type(part).__name__ for part in parts]}; write merge((out1, lse1), (out2, lse2))"
        )
    outs, lses = ([jnp.asarray(x) for x in side] for side in zip(*parts, strict=True))
    for name, arrays in (("out", outs), ("lse", lses)):
        kinds = {(x.shape, x.dtype.name) for x in arrays}
        if len(kinds) > 1 or not jnp.issubdtype(arrays[0].dtype, jnp.floating):
            raise ValueError(
                f"merge: every {name} must be floats of one shape and dtype, but they are "
                f"{[f'{x.dtype}{list(x.shape)}' for x in arrays]}; use the same query in all parts"
            )
    *batch, tokens, heads, _ = outs[0].shape if outs[0].ndim > 2 else (0, 0, 0)
    if lses[0].shape != (*batch, heads, tokens):
        raise ValueError(
            f"merge: lse must have shape [*B, N, T] where out is [*B, T, N, Hv], but they have {lses[0].shape} and "
            f"{outs[0].shape}; pass what return_lse=True returns"
        )
    return outs, lses
