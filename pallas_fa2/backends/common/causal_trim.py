"""Removes the rows and keys that have no partner under a causal mask."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_fa2.ir.arrays import Q_AXIS
from pallas_fa2.ir.call_spec import CallSpec, Operands


@dataclasses.dataclass(frozen=True)
class CausalTrim:
    """The rows and keys that take part: a causal mask leaves some without a partner.

    Keys that no query sees are cut off the end; queries that see no key off the start.
    """

    first_query: int
    q_len: int
    kv_len: int
    offset: int | None

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """`[B, T, ...]` -> the queries that take part."""
        return jax.lax.slice_in_dim(x, self.first_query, self.first_query + self.q_len, axis=axis)

    def keys(self, x: jax.Array) -> jax.Array:
        return x[:, : self.kv_len]

    def spec(self, spec: CallSpec) -> CallSpec:
        return dataclasses.replace(spec, q_len=self.q_len, kv_len=self.kv_len)

    def operands(self, operands: Operands) -> Operands:
        return operands.slice_tile(self.first_query, self.q_len, 0, self.kv_len)

    def untrim_queries(self, x: jax.Array, fill: float = 0.0, axis: int = 1) -> jax.Array:
        """The whole length again, with `fill` for queries that take no part."""
        x = jax.lax.slice_in_dim(x, 0, self.q_len, axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (self.first_query, 0)
        return jnp.pad(x, pad, constant_values=fill)

    def untrim_aux(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient of data of scores, `[B, K, G, T, S, ...]`: 0 for what takes no part."""
        missing = [whole - size for whole, size in zip(like.shape, x.shape, strict=True)]
        first = [min(self.first_query, n) if i == Q_AXIS else 0 for i, n in enumerate(missing)]
        return jnp.pad(x, [(a, n - a) for a, n in zip(first, missing, strict=True)])

    def untrim_keys(self, x: jax.Array, kv_len: int) -> jax.Array:
        x = x[:, : self.kv_len]
        return jnp.pad(x, ((0, 0), (0, kv_len - self.kv_len), (0, 0), (0, 0)))


def causal_trim(spec: CallSpec) -> CausalTrim:
    if spec.causal is None:
        return CausalTrim(0, spec.q_len, spec.kv_len, None)
    if spec.causal == "start":
        return CausalTrim(0, spec.q_len, min(spec.kv_len, spec.q_len), 0)
    first = max(spec.q_len - spec.kv_len, 0)
    return CausalTrim(first, spec.q_len - first, spec.kv_len, max(spec.kv_len - spec.q_len, 0))
