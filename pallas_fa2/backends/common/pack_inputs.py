"""Packs what a call's masks, scores and dropout read for kernels with tiles of 64 rows in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.aux_inputs import PAD_MULTIPLE, AuxInputs, HeadScalars
from pallas_fa2.backends.common.compile_mods import argument_sources, storage_dtype
from pallas_fa2.ir import legality
from pallas_fa2.ir.call_spec import CallSpec, Operands


def pack(spec: CallSpec, operands: Operands, first_query: int) -> AuxInputs:
    """Return the inputs of a call whose first query has this index."""
    sides = ("q", "k", "pair", "unpacked", "integer", "real")
    packed: dict[str, list] = {side: [] for side in sides}
    sources = argument_sources(spec)
    given = [(sources.q, operands.q_index), (sources.k, operands.k_index)]
    if spec.has_general_mask:
        given += zip(sources.mask, jax.tree.leaves(operands.mask), strict=True)
    given += zip(sources.scores, jax.tree.leaves(operands.scores), strict=True)
    for source, leaf in given:
        if source.position is None:
            continue
        assert leaf is not None
        if source.side == "pair":
            for side, dtype in (
                ("pair", storage_dtype(leaf.dtype.name)),
                ("unpacked", leaf.dtype),
            ):
                packed[side].append(_pad_to_tiles(spec, leaf, dtype))
            continue
        if source.dtype in legality.NARROW:
            leaf = leaf.astype(jnp.float32)
        packed[source.side].append(leaf if source.side == "real" else _bits(leaf))
    batch, heads = spec.batch, (spec.kv_heads, spec.group)

    def rows(side: str, length: int) -> jax.Array:
        shape = (batch, 1, length)
        arrays = [jnp.broadcast_to(x.reshape(x.shape[0], 1, -1), shape) for x in packed[side]]
        return jnp.concatenate([jnp.zeros((batch, 0, length), I32), *arrays], 1)

    def head_fields(side: str) -> jax.Array | None:
        arrays = [jnp.broadcast_to(x[..., 0, 0], (batch, *heads)) for x in packed[side]]
        return jnp.stack([x.reshape(batch, -1) for x in arrays], 2) if arrays else None

    head_scalars = HeadScalars(head_fields("integer"), head_fields("real"))
    pairwise = tuple(packed["pair"]), tuple(packed["unpacked"])
    keys = _row_keys(spec, operands, first_query) if spec.dropout_rate else None
    return AuxInputs(rows("q", spec.q_len), rows("k", spec.kv_len), head_scalars, keys, *pairwise)


def _row_keys(spec: CallSpec, operands: Operands, first_query: int) -> jax.Array:
    q_index = operands.q_index
    if q_index is None:
        q_index = (first_query + jnp.arange(spec.q_len, dtype=I32)).reshape(1, 1, 1, -1, 1)
    words = jnp.stack(dropout.query_row_keys(spec, operands, q_index), 3)  # [B, K, G, 2, T, 1]
    return lax.bitcast_convert_type(words, I32).reshape(spec.batch, spec.q_heads, 2, spec.q_len)


def _pad_to_tiles(spec: CallSpec, x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return a pairwise array as `[B | 1, N | 1, T', S']`, whose lengths are multiples of every tile's."""
    heads = (1, 1) if x.shape[1:3] == (1, 1) else (spec.kv_heads, spec.group)
    x = jnp.broadcast_to(x, (x.shape[0], *heads, spec.q_len, spec.kv_len))
    x = x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype)
    return jnp.pad(x, [(0, 0), (0, 0), *((0, -n % PAD_MULTIPLE) for n in x.shape[2:])])


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(I32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, I32)
