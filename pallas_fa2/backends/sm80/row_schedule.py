"""Which blocks of keys a block of queries visits: in the forward, and where dQ has a kernel of its own."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.schedule import raster

# Of keys and values of the heads that run at the same time: a half of an A100's 40 MB of L2.
L2_BUDGET = 20 << 20


class RowConfig(Protocol):
    """A configuration of a kernel whose CTAs have `block_q` queries each and visit blocks of keys.

    An element of K or V is `terms` 16-bit numbers.
    """

    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def block_q(self) -> int: ...
    @property
    def block_kv(self) -> int: ...
    @property
    def terms(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class RowSchedule[C: RowConfig]:
    """The order of CTAs, and the blocks of keys that each visits."""

    spec: KernelSpec
    config: C

    @property
    def q_tiles(self) -> int:
        return -(-self.spec.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.spec.kv_len // self.config.block_kv)

    @property
    def raster_order(self) -> raster.RasterOrder:
        """Return the order of tiles: under a causal mask the longest first."""
        p = self.spec
        dims = self.config.head_dim + self.config.value_dim
        kv_bytes = 2 * self.config.terms * p.kv_len * dims
        group = raster.heads_per_l2_group(p.kv_heads, kv_bytes, L2_BUDGET) * p.group
        return raster.RasterOrder(p.batch, p.q_heads, self.q_tiles, group, p.causal)

    @property
    def has_partial_blocks(self) -> bool:
        p = self.spec
        return p.causal or p.mask is not None or p.kv_len % self.config.block_kv != 0

    def block_counts(self, q_tile: jax.Array) -> tuple[Any, Any]:
        """Return how many blocks of keys a tile visits, and how many of these, the first ones, are full."""
        p, block_kv = self.spec, self.config.block_kv
        whole = p.kv_len // block_kv
        if p.causal_offset is None:
            return I32(self.kv_blocks), I32(whole)
        first_row = q_tile * self.config.block_q
        end = first_row + (self.config.block_q + p.causal_offset + block_kv - 1)
        visited = jnp.minimum(arithmetic.div(end, block_kv), self.kv_blocks)
        full = jnp.minimum(arithmetic.div(first_row + (p.causal_offset + 1), block_kv), whole)
        return visited, full
