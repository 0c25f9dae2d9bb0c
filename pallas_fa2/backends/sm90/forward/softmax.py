"""The online softmax of the forward, whose references lag behind the maxima.

Line 9 of Algorithm 1 subtracts from a row's scores their maximum so far. Any reference will do, as long as
exponentials neither overflow nor vanish. Ours is the maximum of the first key block; it rises when the row's sum
has grown a lot, which is seen from the sum. So exponentials begin as soon as the scores are there, and no block but
the first looks for a maximum (docs/decisions/0004-lagging-reference.md). Should scores rise within one block by
so much that float32 overflows, the tile is computed again with true maxima (`exact_retry`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import layouts, thread_values, votes
from pallas_fa2.backends.common.primitives.types import Scalar
from pallas_fa2.control_flow import cond
from pallas_fa2.ir.call_spec import MASKED_SCORE_THRESHOLD

# Below any score, but finite: a row that has seen no key yet gives P = 0 rather than NaN.
NO_MAXIMUM = -1e30

# References rise when one of a row's eight partial sums exceeds this: probabilities stay within float16
# (65504), and rows of 100,000 keys with like scores raise nothing.
RESCALE_ABOVE = 2.0**14

# Above this, a sum may have overflowed and a reciprocal may underflow: the row becomes NaN, and its
# tile is retried.
OVERFLOW_ABOVE = 2.0**120


def no_key_threshold(spec: KernelSpec) -> float:
    """Return the score in base 2 such that a row with lower ones alone sees none of their keys."""
    return NO_MAXIMUM if spec.score is None else MASKED_SCORE_THRESHOLD * LOG2E


class SoftmaxState(NamedTuple):
    """The statistics of 64 rows: what m and l are in Algorithm 1."""

    reference: jax.Array  # [64], subtracted from the scores in base 2
    row_sum: jax.Array  # [64, 8], of each thread's columns

    @classmethod
    def start(
        cls, spec: KernelSpec, s: jax.Array, scale: float, is_partial: Callable[[], Scalar]
    ) -> tuple[jax.Array, "SoftmaxState"]:
        """Return P of the first block, unnormalized, and its statistics. (Without a mask every row sees its first
        key.)"""
        reference = row_max(s) * scale
        if not spec.has_no_mods:
            # A row that sees no key yet finds its reference in a later partial block, but in no full one.
            missing = jnp.where(is_partial(), jnp.inf, no_key_threshold(spec))
            reference = jnp.where(reference < no_key_threshold(spec), missing, reference)
        p = exponentials(s, scale, reference)
        return p, cls(reference, layouts.fold_octets(jnp.add, p))

    def exponentiate(self, s: jax.Array, scale: float) -> tuple[jax.Array, "SoftmaxState"]:
        """Return P of some keys, unnormalized, and the state with its sums added (line 9)."""
        p = exponentials(s, scale, self.reference)
        row_sum = self.row_sum + layouts.fold_octets(jnp.add, p)
        thread_values.fence_before_wgmma_wait(row_sum)
        return p, self._replace(row_sum=row_sum)

    def init_missing_references(
        self, spec: KernelSpec, s: jax.Array, scale: float
    ) -> "SoftmaxState":
        """Give rows that see their first key in this block their reference."""
        if spec.has_no_mods:
            return self

        def init() -> jax.Array:
            # A row that has seen no key yet subtracts infinity: its exponentials are 0.
            maximum = row_max(s) * scale
            maximum = jnp.where(maximum < no_key_threshold(spec), jnp.inf, maximum)
            return jnp.where(self.reference == jnp.inf, maximum, self.reference)

        missing = votes.warp_any_gt(self.reference, -NO_MAXIMUM)
        return self._replace(reference=cond(missing, init, lambda: self.reference))

    def close_references(self, spec: KernelSpec) -> "SoftmaxState":
        """Give rows that have seen no key yet a finite reference, after the partial blocks.

        It is so low that P overflows, and the tile is retried, if a full block has scores for such a row after all (a
        score function may mask keys)."""
        reference = self.reference
        reference = jnp.where(reference == jnp.inf, no_key_threshold(spec), reference)
        return self._replace(reference=reference)

    def rescale(
        self, acc: jax.Array, p: list[jax.Array]
    ) -> tuple[jax.Array, "SoftmaxState", list[jax.Array]]:
        """Raise the references of a warp in which a sum has grown large, so that the largest P of each row is 1."""

        def rescale() -> tuple[jax.Array, SoftmaxState, list[jax.Array]]:
            maxima = (layouts.fold_octets(jnp.maximum, x) for x in p)
            maximum = functools.reduce(jnp.maximum, maxima)
            maximum = jnp.maximum(maximum.max(axis=1), 1.0)
            factor = jnp.where(maximum < OVERFLOW_ABOVE, 1 / maximum, jnp.nan)

            def scaled(x: jax.Array) -> jax.Array:
                return x * layouts.broadcast_rows(factor, x.shape)

            state = SoftmaxState(self.reference + jnp.log2(maximum), scaled(self.row_sum))
            return scaled(acc), state, list(map(scaled, p))

        grew = votes.warp_any_gt(self.row_sum, RESCALE_ABOVE)
        return cond(grew, rescale, lambda: (acc, self, p))

    def sum_rows(self, spec: KernelSpec, acc: jax.Array) -> jax.Array:
        """Return the row sums, `[64]` float32; infinite or NaN where the tile is to be retried."""
        total = self.row_sum
        if spec.guards_nonfinite:  # 0 times what is not finite is NaN, also for masked keys
            output = layouts.fold_octets(jnp.add, acc)
            total += output - output
        return total.sum(axis=1)


def row_max(s: jax.Array) -> jax.Array:
    """Return the maximum of each row."""
    return layouts.fold_octets(jnp.maximum, s).max(axis=1)


def exponentials(s: jax.Array, scale: float, reference: Any) -> jax.Array:
    """Return 2^(s scale - reference): one multiply-add a score."""
    return jnp.exp2(s * scale - layouts.broadcast_rows(reference, s.shape))
