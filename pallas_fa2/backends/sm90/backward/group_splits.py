"""How many tiles the query heads of a group are split into, and what becomes of their dK and dV.

Each query head of a group adds to dK and dV of one key head, in registers if one tile has them all. With few key heads
that would leave CTAs idle (docs/decisions/0035-gqa-group-splits.md).
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

# How much later than by an even division the last CTA may be done, before groups are split further. Other values were
# not measured: a split costs a second 16-bit array of dK and dV, and their sum.
MAX_IMBALANCE = 1.05


class Balanced(Protocol):
    """A schedule whose CTAs may have more or less to do."""

    @property
    def max_workers(self) -> int: ...

    def worker_costs(self, classes: Any) -> list[float]: ...


def first_balanced[S: Balanced](schedules: Sequence[S], classes: Any) -> S:
    """Return the first schedule that keeps all CTAs busy, as far as classes of tiles are known, or the last one."""
    balanced = (s for s in schedules[:-1] if imbalance(s, classes) <= MAX_IMBALANCE)
    return next(balanced, schedules[-1])


def imbalance(schedule: Balanced, classes: Any) -> float:
    """Return when the last CTA is done, relative to when all would be if they could share everything."""
    costs = schedule.worker_costs(classes)
    return max(costs) * schedule.max_workers / sum(costs)


def combine_splits(terms: list[jax.Array], kv_heads: int, group_splits: int) -> jax.Array:
    """Return dK or dV `[B, S, K, H]` from those of the splits `[B, S, K splits, H]`.

    A split stores a gradient as two terms in the input dtype, whose sum is as good as in float32.
    """
    if group_splits == 1:
        return terms[0]
    batch, length, _, dim = terms[0].shape
    total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in terms))
    total = total.reshape(batch, length, kv_heads, group_splits, dim).sum(3)
    return total.astype(terms[0].dtype)
