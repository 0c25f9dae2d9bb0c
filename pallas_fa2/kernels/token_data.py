"""A mask's code and the data that it reads, as the Hopper kernels take them.

Data that rides with the tokens lies in rows of 32 bits, one a token; what is shared by a head's tokens
are numbers.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import diagonal
from pallas_fa2.kernels import pointwise
from pallas_fa2.kernels.mosaic import COLUMNS, I32, ROWS, over_columns
from pallas_fa2.kernels.pointwise import Value
from pallas_fa2.spec import Operands, Spec
from pallas_fa2.tokens import Pointwise

# Columns of scores that pass through a mask together.
COLUMNS_AT_ONCE = 16


class Source(NamedTuple):
    """Where an argument of the code comes from: a row of q's or k's data, or a number."""

    side: Literal["q", "k", "integer", "real"]
    place: int | None  # among those of its side; None is the token's index
    dtype: str


@dataclasses.dataclass(frozen=True)
class TileMask:
    """Static: the code, and where its arguments come from."""

    code: Pointwise
    sources: tuple[Source, ...]
    # Whether it is known that every query sees a key and every key is seen. Where it is not, what
    # nobody sees may be NaN.
    all_take_part: bool

    def on_tile(self, q: "Side", k: "Side", numbers: Any, shape: tuple[int, int]) -> jax.Array:
        """True where the mask lets a pair of tokens see each other."""
        sides = {"q": q, "k": k}

        def value(source: Source) -> Value:
            if source.place is None:
                side = sides[source.side]
                return Value(side.index, (side.axis,))
            if source.side == "real":
                return Value(numbers.reals[source.place + 1])
            if source.side == "integer":
                number = numbers.integers[source.place + 1]
                return Value(number != 0 if source.dtype == "bool" else number.astype(source.dtype))
            side = sides[source.side]
            return Value(_from_bits(side.rows[source.place], source.dtype), (side.axis,))

        out = pointwise.evaluate(self.code, [value(s) for s in self.sources], shape)
        return pointwise.spread(out, (0, 1), shape)

    def hide(self, s: jax.Array, sides: Any, numbers: Any, k_end: int | None = None) -> jax.Array:
        """-inf where a pair is not seen, or a key is the `k_end`-th or a later one.

        `sides` gives q and k for some columns of the tile.
        """

        def some(start: int) -> jax.Array:
            q, k = sides(pl.ds(start, COLUMNS_AT_ONCE))
            # only when these scores are there: it would hold registers before
            piece = s[:, start : start + COLUMNS_AT_ONCE]
            piece, *index = lax.optimization_barrier((piece, q.index, k.index))
            q, k = (
                dataclasses.replace(side, index=i) for side, i in zip((q, k), index, strict=True)
            )
            keep = self.on_tile(q, k, numbers, piece.shape)
            if k_end is not None:
                keep &= over_columns(k.index < k_end, piece.shape)
            return lax.optimization_barrier(jnp.where(keep, piece, -jnp.inf))

        starts = range(0, s.shape[1], COLUMNS_AT_ONCE)
        return jnp.concatenate([some(start) for start in starts], 1)


@dataclasses.dataclass(frozen=True)
class Side:
    """The tokens along one axis of a tile: their indices, and their data, one row a field."""

    axis: int
    index: jax.Array
    rows: list[jax.Array]


def load_row(axis: int, row: Any) -> jax.Array:
    """One number for each row of a tile, or for each column."""
    return plgpu.load(row, layout=ROWS if axis == 0 else COLUMNS, optimized=False)


def load_rows(axis: int, data: Any) -> list[jax.Array]:
    """All but the first, from `[1 + rows, tokens]`."""
    return [load_row(axis, data.at[i]) for i in range(1, data.shape[0])]


class Numbers(NamedTuple):
    """What all tokens of a head share, of each the first means nothing."""

    integers: jax.Array  # int32 [B, N, 1 + numbers]
    reals: jax.Array  # float32

    def at(self, batch: Any, head: Any) -> "Numbers":
        integers, reals = (x.at[batch, head] for x in self)
        return Numbers(cast(Any, integers), cast(Any, reals))


class TokenData(NamedTuple):
    """The arrays, with all batch entries. Rows are int32 whatever they stand for."""

    q: jax.Array  # [B, rows, T]
    k: jax.Array  # [B, rows, S]
    numbers: "Numbers"

    def with_places(self, block_q: int, block_kv: int) -> "TokenData":
        """With the tokens' places as the first row; up to whole tiles, where all other data are 0."""

        def widen(x: jax.Array, block: int) -> jax.Array:
            batch, _, length = x.shape
            x = jnp.pad(x, ((0, 0), (0, 0), (0, -length % block)))
            place = lax.broadcasted_iota(I32, (batch, 1, x.shape[2]), 2)
            return jnp.concatenate([place, x], 1)

        return TokenData(widen(self.q, block_q), widen(self.k, block_kv), self.numbers)


def refuses(spec: Spec) -> str | None:
    """What of a mask no kernel runs."""
    assert spec.mask is not None
    for aval, kind in zip(_avals(spec), _kinds(spec), strict=True):
        if kind == "pairs":
            return "its masks read no data of pairs of tokens"
        if aval.shape != ():
            return f"its masks read single numbers, not arrays of shape {aval.shape}"
        if aval.dtype.name not in pointwise.DTYPES:
            return f"its masks read {', '.join(pointwise.DTYPES)}, not {aval.dtype.name}"
    return pointwise.refuses(spec.mask.jaxpr.jaxpr)


def _avals(spec: Spec) -> list[ShapedArray]:
    assert spec.mask is not None
    return cast(list[ShapedArray], spec.mask.jaxpr.in_avals)


def _kinds(spec: Spec) -> list[str]:
    """Of each argument of the mask's code: q, k, heads, params or pairs."""
    assert spec.mask is not None
    _, structure = spec.mask.key
    leaves = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths, _ = jax.tree.flatten_with_path(leaves[2:])
    return ["q", "k", *(path[-2].name for path, _ in paths)]


def describe(spec: Spec) -> TileMask:
    assert spec.mask is not None
    sources = []
    for i, (kind, aval) in enumerate(zip(_kinds(spec), _avals(spec), strict=True)):
        number = "real" if aval.dtype == jnp.float32 else "integer"
        side = kind if kind in ("q", "k") else number
        before = sum(s.side == side and s.place is not None for s in sources)
        counted = i < 2 and not spec.positions
        sources.append(Source(side, None if counted else before, aval.dtype.name))
    return TileMask(spec.mask, tuple(sources), diagonal.every_token_sees_itself(spec))


def pack(spec: Spec, operands: Operands) -> TokenData:
    found: dict[str, list] = {"q": [], "k": [], "integer": [], "real": []}
    leaves = [operands.q_index, operands.k_index, *jax.tree.leaves(operands.mask)]
    for source, leaf in zip(describe(spec).sources, leaves, strict=True):
        if source.place is not None:
            found[source.side].append(leaf if source.side == "real" else _bits(leaf))
    batch, heads = spec.batch, (spec.kv_heads, spec.group)

    def rows(side: str, length: int) -> jax.Array:
        shape = (batch, 1, length)
        arrays = [jnp.broadcast_to(x.reshape(x.shape[0], 1, -1), shape) for x in found[side]]
        return jnp.concatenate([jnp.zeros((batch, 0, length), I32), *arrays], 1)

    def each_head(side: str, dtype: Any) -> jax.Array:
        arrays = [jnp.broadcast_to(x[..., 0, 0], (batch, *heads)) for x in found[side]]
        shape = (batch, spec.q_heads, 1)
        return jnp.concatenate([jnp.zeros(shape, dtype), *(x.reshape(shape) for x in arrays)], 2)

    numbers = Numbers(each_head("integer", I32), each_head("real", jnp.float32))
    return TokenData(rows("q", spec.q_len), rows("k", spec.kv_len), numbers)


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(I32) if x.dtype == jnp.bool_ else _as(x, jnp.int32)


def _as(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _from_bits(x: jax.Array, dtype: str) -> jax.Array:
    return _as(x, I32) != np.int32(0) if dtype == "bool" else _as(x, jnp.dtype(dtype))
