"""Queries and keys that have no partner under a causal mask are trimmed before the kernels."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_fa2.ir.arrays import Q_AXIS
from pallas_fa2.ir.call_spec import CallSpec, Operands


@dataclasses.dataclass(frozen=True)
class CausalTrim:
    """The ranges of queries and keys that a causal mask leaves a partner.

    Keys that no query sees are trimmed at the end, queries that see no key at the start.
    """

    first_query: int
    q_len: int
    kv_len: int
    offset: (
        int | None
    )  # query i of those that remain sees keys up to i + offset; None without a causal mask

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Return the queries that remain, of `[B, T, ...]` or with T at another axis."""
        return jax.lax.slice_in_dim(x, self.first_query, self.first_query + self.q_len, axis=axis)

    def keys(self, x: jax.Array) -> jax.Array:
        """Return the keys that remain, of `[B, S, ...]`."""
        return x[:, : self.kv_len]

    def spec(self, spec: CallSpec) -> CallSpec:
        """Return the call with the lengths that remain."""
        return dataclasses.replace(spec, q_len=self.q_len, kv_len=self.kv_len)

    def operands(self, operands: Operands) -> Operands:
        """Return what masks and scores read of the tokens that remain."""
        return operands.slice_tile(self.first_query, self.q_len, 0, self.kv_len)

    def untrim_queries(self, x: jax.Array, fill: float = 0.0, axis: int = 1) -> jax.Array:
        """Pad to the whole length again, with `fill` for queries that were trimmed."""
        x = jax.lax.slice_in_dim(x, 0, self.q_len, axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (self.first_query, 0)
        return jnp.pad(x, pad, constant_values=fill)

    def untrim_aux(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Pad the gradient of an input of scores, `[B, K, G, T, S, ...]`, to the shape of `like`, with zeros."""
        missing = [whole - size for whole, size in zip(like.shape, x.shape, strict=True)]
        first = [min(self.first_query, n) if i == Q_AXIS else 0 for i, n in enumerate(missing)]
        return jnp.pad(x, [(a, n - a) for a, n in zip(first, missing, strict=True)])

    def untrim_keys(self, x: jax.Array, kv_len: int) -> jax.Array:
        """Pad `[B, S', ...]` to so many keys, with zeros."""
        x = x[:, : self.kv_len]
        return jnp.pad(x, ((0, 0), (0, kv_len - self.kv_len), (0, 0), (0, 0)))


def causal_trim(spec: CallSpec) -> CausalTrim:
    """Return what is left of a call's queries and keys."""
    if spec.causal is None:
        return CausalTrim(0, spec.q_len, spec.kv_len, None)
    if spec.causal == "start":
        return CausalTrim(0, spec.q_len, min(spec.kv_len, spec.q_len), 0)
    first = max(spec.q_len - spec.kv_len, 0)
    return CausalTrim(first, spec.q_len - first, spec.kv_len, max(spec.kv_len - spec.q_len, 0))
