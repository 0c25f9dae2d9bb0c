"""What masks and scores read, as kernels take it.

Arrays of tokens lie in rows of 32 bits, one a token; what all tokens of a head share are scalars.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.ir.tile_functions import ArgSource

# The lengths of pairwise arrays are multiples of it: every tile's length divides it.
PAD_MULTIPLE = 128


class HeadScalars(NamedTuple):
    """What all tokens of a head share, `[B, N, fields]`, if there is any."""

    integers: jax.Array | None  # int32
    floats: jax.Array | None  # float32

    @property
    def batch(self) -> int:
        """The batch entries, 1 if there are no fields."""
        return max((x.shape[0] for x in self if x is not None), default=1)

    def load(
        self, batch: Any, head: Any, sources: Iterable[ArgSource]
    ) -> dict[ArgSource, jax.Array]:
        """Load those of one head."""

        def scalar(source: ArgSource) -> jax.Array:
            array = self.floats if source.side == "real" else self.integers
            assert array is not None and source.position is not None
            value = array[batch, head, source.position]
            if source.side == "real":
                return value
            return value != 0 if source.dtype == "bool" else value.astype(source.dtype)

        return {source: scalar(source) for source in sources}


class AuxInputs(NamedTuple):
    """The arrays, with all batch entries. Rows are int32 whatever their bits stand for."""

    q: jax.Array  # [B, rows, T]
    k: jax.Array  # [B, rows, S]
    head_scalars: HeadScalars
    row_keys: jax.Array | None  # int32 [B, N, 2, T], for dropout
    pairwise: tuple[jax.Array, ...]  # [B | 1, N | 1, T', S'] each, T' and S' whole tiles
    # The same, where booleans are what they are: read without TMA (`mask_bits.compute_bits`).
    pairwise_unpacked: tuple[jax.Array, ...] = ()

    @classmethod
    def axes(cls) -> Any:
        """Return the axes of all arrays, as `sharding.Axes` has them."""
        return cls("b..", "b..", "bn.", "bn..", "bn..", "bn..")  # pyright: ignore[reportArgumentType]

    def with_index_row(self, block_q: int, block_kv: int) -> "AuxInputs":
        """Add the tokens' indices as the first row, and pad to whole tiles, with zeros for all else."""
        padded = self.padded(block_q, block_kv)
        q, k = (
            jnp.concatenate([_indices(x), x], 1) if given.shape[1] else x
            for given, x in ((self.q, padded.q), (self.k, padded.k))
        )
        row_keys = None if self.row_keys is None else _pad_last(self.row_keys, block_q)
        return padded._replace(q=q, k=k, row_keys=row_keys)

    def padded(self, block_q: int, block_kv: int) -> "AuxInputs":
        """Pad to whole tiles, without the tokens' indices: one row is not copied so. (Indices stand for no
        rows, as an empty array is no memory for a kernel.)"""
        q, k = (
            x if x.shape[1] else _indices(x)
            for x in (_pad_last(self.q, block_q), _pad_last(self.k, block_kv))
        )
        return self._replace(q=q, k=k, row_keys=None, pairwise_unpacked=())


def _indices(x: jax.Array) -> Any:
    """Return the indices of the tokens of an array, `[B, 1, tokens]`."""
    return np.zeros((x.shape[0], 1, 1), np.int32) + np.arange(x.shape[2], dtype=np.int32)


def _pad_last(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])
