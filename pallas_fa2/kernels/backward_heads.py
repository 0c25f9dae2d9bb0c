"""A Hopper backward whose CTAs take whole heads, for short sequences: dQ needs no passes before and after.

A CTA takes all blocks of keys of a head, from the first to the last. So the same thread always adds up the same
numbers of dQ: the first visit to a block of queries replaces what lies there, and the last one stores dQ. No other
kernel writes zeros, none waits for what is complete, the order of additions is the same in every run, and what is
added up lies in L2, in an array that CTAs use again for each head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.kernels import mosaic
from pallas_fa2.kernels.backward_schedule import Config, Schedule, Step
from pallas_fa2.kernels.mosaic import I32, Problem
from pallas_fa2.kernels.tiles import Dealt

# Of 60 MB of L2: Q, dO and float32 dQ of the heads that run at the same time. From there on each step waits for
# L2 or for device memory (docs/performance.md, "Short sequences").
MOST_BYTES = 50 << 20
# How much later the last CTA may be done than with tiles dealt one by one, full and causal: less than what is
# saved otherwise.
LATER = 1.05, 1.15


class Visit(NamedTuple):
    """Of a block of queries by a block of keys."""

    row: Any  # of all blocks of queries
    first: Any  # whether no other comes before, or after
    last: Any

    @classmethod
    def none(cls) -> "Visit":
        """One before all others leaves what the first one replaces."""
        return cls(I32(0), jnp.bool_(True), jnp.bool_(False))

    @property
    def encoded(self) -> Any:
        """As one number, which loops carry."""
        flags = self.last.astype(I32) << I32(1) | self.first.astype(I32)
        return self.row << I32(2) | flags

    @classmethod
    def decode(cls, number: Any) -> "Visit":
        return cls(number >> I32(2), number & I32(1) != 0, number & I32(2) != 0)


class HeadSchedule(Schedule):
    """Tiles are numbered head by head, from the first keys to the last; a head is one of keys, or a part of its
    group of queries' heads."""

    @classmethod
    def suits(cls, problem: Problem, config: Config) -> bool:
        """Whether L2 has room for whole heads, and they keep CTAs busy."""
        if config.paired or problem.mask is not None:
            return False
        heads = cls.of(problem, config)
        if heads.kv_tiles == 1:
            return True
        if heads.bytes_in_l2 > MOST_BYTES:
            return False
        tiles = Schedule.of(problem, config)
        return max(heads.tiles(None).loads) <= LATER[problem.causal] * max(tiles.loads)

    @property
    def bytes_in_l2(self) -> float:
        """On the average: under a causal mask, the first queries are done before the last."""
        config, tiles = self.config, self.kv_tiles
        row_bytes = 2 * (config.head_dim + config.value_dim) + 4 * config.head_dim
        part = (tiles + 1) / (2 * tiles) if self.problem.causal else 1.0
        return self.hands * self.rows_of_head * config.block_q * row_bytes * part

    @property
    def hands(self) -> int:
        return min(self.config.ctas, self.order.batch * self.order.heads)

    @property
    def order(self) -> mosaic.Order:
        return dataclasses.replace(super().order, longest_first=False)

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        return self.order.place(number)

    def tiles(self, seen: Any) -> Dealt:
        order = self.order
        numbers = np.arange(order.count, dtype=np.int32)
        cost = float(np.sum(self.steps(np.arange(order.tiles)) + 0.5))
        heads = order.batch * order.heads
        return Dealt.of(numbers[:, None], [cost] * heads, self.hands, together=order.tiles)

    @property
    def rows_of_head(self) -> int:
        """Blocks of queries that a head's keys meet."""
        return self.group * self.q_blocks

    @property
    def partial_shape(self) -> tuple[int, int]:
        """Of what CTAs add up, of a head each."""
        return self.hands * self.rows_of_head, self.dq_shape[1]

    def partial_row(self, row: Any) -> Any:
        # computed anew each time: it would hold registers
        cta = lax.optimization_barrier(lax.axis_index("cta"))
        return cta * self.rows_of_head + mosaic.rem(row, self.rows_of_head)

    def visit(self, step: Step) -> Visit:
        last, tile, problem = self.kv_tiles - 1, step.tile.place[2], self.problem
        if problem.offset is not None:
            # the last tile whose first key the block's last query sees
            query = step.first_query + self.config.block_q
            last_seen = mosaic.div(query + (problem.offset - 1), self.config.block_kv)
            last = mosaic.minimum(last_seen, last)
        return Visit(step.row, tile == 0, tile == last)

    def queries(self, row: Any) -> tuple[Any, Any, Any]:
        """Batch entry, head and first query of a block."""
        shape = self.problem.batch, self.problem.q_heads, self.q_blocks
        batch, head, block = mosaic.unravel(row, shape)
        return batch, head, block * self.config.block_q
