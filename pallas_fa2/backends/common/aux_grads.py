"""Gradients of the arrays that scores read, while they are summed."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.tile_mods import TileScore
from pallas_fa2.ir import legality
from pallas_fa2.ir.tile_functions import PIECE_COLUMNS, ArgSource

# Batch entries that share a pairwise array whose gradients are stored, not added up in device memory:
# so many in 16 bits take no more of it than their sum in 32.
MAX_ENTRIES_STORED = 2


class AuxGrads(NamedTuple):
    """Gradients of the arrays that scores read, in float32, before those of what is shared are added up."""

    q: jax.Array  # [B, fields, T']
    k: jax.Array  # [B, fields, S']
    per_head: jax.Array  # [B, fields, N, 64]
    # Of each pairwise array, [B | 1, N | 1, T' / 16, S' / 64, 1024]: columns of a tile as they lie in
    # registers. In the inputs' dtype, as the operand of dQ and dK is, where nothing is added to it.
    pairwise: tuple[jax.Array, ...]

    @classmethod
    def axes(cls, score: TileScore | None) -> Any:
        """Return the axes of `zeros`, as `sharding.Axes` has them, without pairwise arrays."""
        if score is None or not score.diff_inputs:
            return None
        return cls("b..", "b..", "b.n.", ())  # pyright: ignore[reportArgumentType]

    @classmethod
    def zeros(
        cls, spec: KernelSpec, dtype: DTypeLike, lengths: tuple[int, int], aux: AuxInputs
    ) -> "AuxGrads | None":
        """Return the arrays that a kernel adds to, or None where nothing has a gradient."""
        score, batch, heads = spec.score, spec.batch, spec.q_heads
        if not score.diff_inputs:
            return None

        def pairwise(source: ArgSource) -> jax.Array:
            x = aux.pairwise[cast(int, source.position)]
            tiles = x.shape[2] // PIECE_COLUMNS, x.shape[3] // 64, PIECE_COLUMNS * 64
            narrow = source.dtype in legality.NARROW and dtype != jnp.float32
            if not narrow or x.shape[1] < heads or x.shape[0] * MAX_ENTRIES_STORED < batch:
                return jnp.zeros((*x.shape[:2], *tiles), jnp.float32)
            stored_everywhere = spec.mask is None and not spec.causal
            return (lax.empty if stored_everywhere else jnp.zeros)((batch, heads, *tiles), dtype)

        q, k, head = (len(score.diff_inputs_of(side)) for side in ("q", "k", "real"))
        shapes = (batch, q, lengths[0]), (batch, k, lengths[1]), (batch, head, heads, 64)
        # An empty array is no memory for a kernel.
        arrays = [jnp.zeros([max(n, 1) for n in shape], jnp.float32) for shape in shapes]
        return cls(*arrays, pairwise=tuple(map(pairwise, score.diff_inputs_of("pair"))))

    def pairwise_of(self, score: TileScore, source: ArgSource) -> Any:
        """Return the gradient of a pairwise array."""
        return self.pairwise[score.diff_inputs_of("pair").index(source)]

    def field_of(self, score: TileScore, source: ArgSource) -> tuple[Any, int]:
        """Return the array that holds the gradient of another input, and its field."""
        arrays = {"q": self.q, "k": self.k, "real": self.per_head}
        return arrays[source.side], score.diff_inputs_of(source.side).index(source)


def pairwise_from_fragments(pieces: jax.Array, entries: int, dtype: Any) -> jax.Array:
    """Return the gradient of a pairwise array, `[entries, N | 1, T', S']`, from the pieces of `AuxGrads`, by XLA.

    A piece is a tile of 64 keys and 16 queries as it lies in registers: of 16 bits as `register_io.store_fragments`
    stores it, of 32 as `accumulate.add_tile` adds it without vectors. Batch entries that share the array are summed in
    float32.
    """
    batch, heads, q_pieces, k_pieces, _ = pieces.shape
    was_added = pieces.dtype == jnp.float32
    if batch > entries:
        pieces = pieces.astype(jnp.float32).sum(0, keepdims=True)
    # From (eight, warp, group, thread, half, element), or where values were added one by one (eight, half, element,
    # warp, group, thread). Queries are eight, thread, element; keys are warp, half, group.
    sizes, order = (2, 4, 8, 4, 2, 2), (0, 3, 5, 1, 4, 2)
    if was_added:
        sizes, order = (2, 2, 2, 4, 8, 4), (0, 5, 2, 3, 1, 4)
    x = pieces.reshape(*pieces.shape[:4], *sizes)
    axes = [4 + axis for axis in order]
    x = x.transpose(0, 1, 2, *axes[:3], 3, *axes[3:])
    shape = pieces.shape[0], heads, q_pieces * PIECE_COLUMNS, k_pieces * 64
    return x.reshape(shape).astype(dtype)
