"""Gradients of the arrays that scores read, while they are summed."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90.aux_inputs import AuxInputs
from pallas_fa2.backends.sm90.tile_functions import PIECE_COLUMNS, ArgSource, TileScore
from pallas_fa2.ir import legality

# Batch entries that share an array of pairs whose gradients are stored, not added up in device memory:
# so many in 16 bits take no more of it than their sum in 32.
MAX_ENTRIES_STORED = 2


class AuxGrads(NamedTuple):
    """Gradients of the data that scores read, in float32, before what is shared is added up."""

    q: jax.Array  # [B, fields, T']
    k: jax.Array  # [B, fields, S']
    per_head: jax.Array  # [B, fields, N, 64]
    # Of each array of pairs, [B | 1, N | 1, T' / 16, S' / 64, 1024]: a piece of a tile as it lies in
    # registers. In the inputs' dtype, as the operand of dQ and dK is, where nothing is added to it.
    pairwise: tuple[jax.Array, ...]

    @classmethod
    def axes(cls, score: TileScore | None) -> Any:
        """As `sharding.Axes` has them, without pairs, of what `start` gives."""
        if score is None or not score.diff_inputs:
            return None
        return cls("b..", "b..", "b.n.", ())  # pyright: ignore[reportArgumentType]

    @classmethod
    def zeros(
        cls, problem: KernelSpec, dtype: Any, lengths: tuple[int, int], data: AuxInputs
    ) -> "AuxGrads | None":
        """None where nothing has a gradient."""
        score, batch, heads = problem.score, problem.batch, problem.q_heads
        if not score.diff_inputs:
            return None

        def of_pairs(source: ArgSource) -> jax.Array:
            x = data.pairwise[cast(int, source.position)]
            pieces = x.shape[2] // PIECE_COLUMNS, x.shape[3] // 64, PIECE_COLUMNS * 64
            narrow = source.dtype in legality.NARROW
            if not narrow or x.shape[1] < heads or x.shape[0] * MAX_ENTRIES_STORED < batch:
                return jnp.zeros((*x.shape[:2], *pieces), jnp.float32)
            everywhere = problem.mask is None and not problem.causal
            return (lax.empty if everywhere else jnp.zeros)((batch, heads, *pieces), dtype)

        q, k, numbers = (len(score.diff_inputs_of(side)) for side in ("q", "k", "real"))
        shapes = (batch, q, lengths[0]), (batch, k, lengths[1]), (batch, numbers, heads, 64)
        # An empty array is no memory for a kernel.
        arrays = [jnp.zeros([max(n, 1) for n in shape], jnp.float32) for shape in shapes]
        return cls(*arrays, pairwise=tuple(map(of_pairs, score.diff_inputs_of("pair"))))

    def pairwise_of(self, score: TileScore, source: ArgSource) -> Any:
        return self.pairwise[score.diff_inputs_of("pair").index(source)]

    def field_of(self, score: TileScore, source: ArgSource) -> tuple[Any, int]:
        """The array, and the field."""
        arrays = {"q": self.q, "k": self.k, "real": self.per_head}
        return arrays[source.side], score.diff_inputs_of(source.side).index(source)
