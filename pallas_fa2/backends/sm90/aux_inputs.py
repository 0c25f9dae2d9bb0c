"""What masks and scores read, as the Hopper kernels take it, and what comes back as its gradient.

Data that rides with the tokens lies in rows of 32 bits, one a token; what is shared by a head's tokens
are numbers.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.sm90.compile_mods import _sources, storage_dtype
from pallas_fa2.backends.sm90.tile_functions import ArgSource
from pallas_fa2.ir import legality
from pallas_fa2.ir.call_spec import CallSpec, Operands

# Every tile's length divides it.
PAD_MULTIPLE = 128


class HeadScalars(NamedTuple):
    """What all tokens of a head share, `[B, N, numbers]`, if there is any."""

    integers: jax.Array | None  # int32
    floats: jax.Array | None  # float32

    def load(
        self, batch: Any, head: Any, sources: Iterable[ArgSource]
    ) -> dict[ArgSource, jax.Array]:
        def number(source: ArgSource) -> jax.Array:
            array = self.floats if source.side == "real" else self.integers
            assert array is not None and source.position is not None
            found = array[batch, head, source.position]
            if source.side == "real":
                return found
            return found != 0 if source.dtype == "bool" else found.astype(source.dtype)

        return {source: number(source) for source in sources}


class AuxInputs(NamedTuple):
    """The arrays, with all batch entries. Rows are int32 whatever they stand for."""

    q: jax.Array  # [B, rows, T]
    k: jax.Array  # [B, rows, S]
    head_scalars: "HeadScalars"
    row_keys: jax.Array | None  # int32 [B, N, 2, T], for dropout
    pairwise: tuple[jax.Array, ...]  # [B | 1, N | 1, T', S'] each, T' and S' whole tiles
    # The same, where booleans are what they are: read without TMA (`mask_bits.compute_bits`).
    pairwise_unpacked: tuple[jax.Array, ...] = ()

    @classmethod
    def axes(cls) -> Any:
        """As `sharding.Axes` has them."""
        return cls("b..", "b..", "bn.", "bn..", "bn..", "bn..")  # pyright: ignore[reportArgumentType]

    def with_index_row(self, block_q: int, block_kv: int) -> "AuxInputs":
        """With the tokens' places as the first row; up to whole tiles, where all other data are 0."""
        found = self.padded(block_q, block_kv)
        q, k = (
            jnp.concatenate([_places(x), x], 1) if given.shape[1] else x
            for given, x in ((self.q, found.q), (self.k, found.k))
        )
        row_keys = None if self.row_keys is None else _pad_last(self.row_keys, block_q)
        return found._replace(q=q, k=k, row_keys=row_keys)

    def padded(self, block_q: int, block_kv: int) -> "AuxInputs":
        """Up to whole tiles, without the tokens' places: what is one row is not copied. (Places stand for no
        rows, as an empty array is no memory for a kernel.)"""
        q, k = (
            x if x.shape[1] else _places(x)
            for x in (_pad_last(self.q, block_q), _pad_last(self.k, block_kv))
        )
        return self._replace(q=q, k=k, row_keys=None, pairwise_unpacked=())


def _places(x: jax.Array) -> Any:
    """`[B, 1, tokens]`"""
    return np.zeros((x.shape[0], 1, 1), np.int32) + np.arange(x.shape[2], dtype=np.int32)


def _pad_last(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % multiple)])


def pack(spec: CallSpec, operands: Operands, first_query: int) -> AuxInputs:
    sides = ("q", "k", "pair", "plain", "integer", "real")
    found: dict[str, list] = {side: [] for side in sides}
    sources = _sources(spec)
    given = [(sources.q, operands.q_index), (sources.k, operands.k_index)]
    if spec.has_general_mask:
        given += zip(sources.mask, jax.tree.leaves(operands.mask), strict=True)
    given += zip(sources.scores, jax.tree.leaves(operands.scores), strict=True)
    for source, leaf in given:
        if source.position is None:
            continue
        assert leaf is not None
        if source.side == "pair":
            for kind, dtype in (("pair", storage_dtype(leaf.dtype.name)), ("plain", leaf.dtype)):
                found[kind].append(_whole_tiles(spec, leaf, dtype))
            continue
        if source.dtype in legality.NARROW:
            leaf = leaf.astype(jnp.float32)
        found[source.side].append(leaf if source.side == "real" else _bits(leaf))
    batch, heads = spec.batch, (spec.kv_heads, spec.group)

    def rows(side: str, length: int) -> jax.Array:
        shape = (batch, 1, length)
        arrays = [jnp.broadcast_to(x.reshape(x.shape[0], 1, -1), shape) for x in found[side]]
        return jnp.concatenate([jnp.zeros((batch, 0, length), I32), *arrays], 1)

    def each_head(side: str) -> jax.Array | None:
        arrays = [jnp.broadcast_to(x[..., 0, 0], (batch, *heads)) for x in found[side]]
        return jnp.stack([x.reshape(batch, -1) for x in arrays], 2) if arrays else None

    numbers = HeadScalars(each_head("integer"), each_head("real"))
    pairs = tuple(found["pair"]), tuple(found["plain"])
    keys = _row_keys(spec, operands, first_query) if spec.dropout_rate else None
    return AuxInputs(rows("q", spec.q_len), rows("k", spec.kv_len), numbers, keys, *pairs)


def _row_keys(spec: CallSpec, operands: Operands, first_query: int) -> jax.Array:
    q_index = operands.q_index
    if q_index is None:
        q_index = (first_query + jnp.arange(spec.q_len, dtype=I32)).reshape(1, 1, 1, -1, 1)
    words = jnp.stack(dropout.query_row_keys(spec, operands.seed, q_index), 3)  # [B, K, G, 2, T, 1]
    return lax.bitcast_convert_type(words, I32).reshape(spec.batch, spec.q_heads, 2, spec.q_len)


def _whole_tiles(spec: CallSpec, x: jax.Array, dtype: Any) -> jax.Array:
    """`[B | 1, N | 1, T', S']`, whose lengths are multiples of every tile's."""
    heads = (1, 1) if x.shape[1:3] == (1, 1) else (spec.kv_heads, spec.group)
    x = jnp.broadcast_to(x, (x.shape[0], *heads, spec.q_len, spec.kv_len))
    x = x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype)
    return jnp.pad(x, [(0, 0), (0, 0), *((0, -n % PAD_MULTIPLE) for n in x.shape[2:])])


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(I32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, I32)
