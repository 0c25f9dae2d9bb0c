"""Masks, scores and dropout on tiles of scores in registers, by the operations of a GPU."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.control_flow import rematerialize
from pallas_fa2.ir import legality
from pallas_fa2.ir.tile_functions import (
    PIECE_COLUMNS,
    PIECE_SHAPE,
    ArgSource,
    AxisInputs,
    TileFunction,
    TileInputs,
)
from pallas_fa2.ir.tile_values import TargetOps, TileValue, broadcast_to_tile

type InputsAt = Callable[[pl.Slice], TileInputs]  # the inputs of some columns of a tile


class TileOps(NamedTuple):
    """A GPU's operations on tiles of scores in registers. Vectors are in the layouts that belong to a tile's."""

    values: TargetOps  # by which code is evaluated
    load_vector: Callable  # (axis, row of 32 bits in memory, dtype) -> vector along the axis
    broadcast_to_rows: (
        Callable  # (scalar or vector along axis 0, number of rows) -> vector along axis 0
    )
    mask_outside: Callable  # (s, first columns | None, last columns | None) -> s, with -inf outside
    pack_bits: Callable  # (visible, first column) -> words of bits, as the mask bits have them
    negate_dropped: (
        Callable  # (p, keys, columns, key axis, threshold, whether words are shared) -> p or -p
    )


def load_axis_inputs(
    ops: TileOps,
    axis: int,
    index: jax.Array | None,
    rows: Any,
    sources: Iterable[ArgSource],
    first: int = 1,
) -> AxisInputs:
    """Load what code reads of the tokens along an axis from `[first + rows, tokens]`, of 32 bits each."""

    def load(source: ArgSource) -> jax.Array:
        assert source.position is not None
        bits = rows.at[first + source.position]
        if source.dtype == "bool":
            return ops.load_vector(axis, bits, jnp.int32) != 0
        narrow = source.dtype in legality.NARROW
        return ops.load_vector(axis, bits, "float32" if narrow else source.dtype)

    return AxisInputs(axis, index, {s: load(s) for s in sources})


@dataclasses.dataclass(frozen=True)
class TileMask:
    """A mask on a tile of scores: which pairs of tokens are visible."""

    visible: TileFunction
    # Whether it is known that every query attends to a key, and every key is attended to. Where it is not, what
    # nobody attends to may be NaN.
    covers_every_token: bool
    ops: TileOps

    @functools.cached_property
    def is_key_interval(self) -> bool:
        """Return whether it is known that the keys which a query attends to are contiguous."""
        return self.visible.is_key_interval()

    def apply_interval(
        self, s: jax.Array, inputs: TileInputs, first_key: Any, k_end: int | None = None
    ) -> jax.Array:
        """Return what `apply` returns, of a tile whose columns are keys, where the keys of a query are contiguous."""
        bounds = self.visible.key_bounds(inputs)
        assert bounds is not None
        low, high = bounds.get("low"), bounds.get("high")
        if k_end is not None:
            high = k_end - 1 if high is None else jnp.minimum(high, k_end - 1)

        def column(bound: Any) -> jax.Array | None:
            if bound is None:
                return None
            return self.ops.broadcast_to_rows(bound - first_key, s.shape[0])

        return self.ops.mask_outside(s, column(low), column(high))

    def apply(self, s: jax.Array, inputs_at: InputsAt, k_end: int | None = None) -> jax.Array:
        """Return the scores, -inf where a pair is not visible, or a key is the `k_end`-th or a later one."""

        def mask(piece: jax.Array, inputs: TileInputs) -> jax.Array:
            return jnp.where(self._evaluate(piece.shape, inputs, k_end), piece, -jnp.inf)

        return by_columns(mask, s, inputs_at)

    def pack_bits(self, inputs_at: InputsAt, k_end: int | None = None) -> jax.Array:
        """Return the mask bits of a fragment of 64 rows and columns: a bit for each pair that `apply` hides."""

        def pack(start: int) -> jax.Array:
            visible = self._evaluate(PIECE_SHAPE, inputs_at(pl.ds(start, PIECE_COLUMNS)), k_end)
            return self.ops.pack_bits(visible, start)

        return functools.reduce(jnp.bitwise_or, map(pack, range(0, PIECE_SHAPE[0], PIECE_COLUMNS)))

    def _evaluate(self, shape: tuple[int, ...], inputs: TileInputs, k_end: int | None) -> jax.Array:
        (value,) = self.visible.evaluate(inputs, shape)
        visible = broadcast_to_tile(value, (0, 1), shape, self.ops.values)
        if k_end is None:
            return visible
        exists = cast(Any, inputs.k.index) < k_end
        return visible & self.ops.values.broadcast(exists, 1, shape)


def by_columns(
    function: Callable[[jax.Array, TileInputs], jax.Array], s: jax.Array, inputs_at: InputsAt
) -> jax.Array:
    """Return function(columns of a tile, their inputs), of a few columns after another."""

    def of_columns(start: int) -> jax.Array:
        inputs = inputs_at(pl.ds(start, PIECE_COLUMNS))
        # only when these scores are there: it would hold registers before
        piece = s[:, start : start + PIECE_COLUMNS]
        piece, q_index, k_index = rematerialize((piece, inputs.q.index, inputs.k.index))
        q = dataclasses.replace(inputs.q, index=q_index)
        k = dataclasses.replace(inputs.k, index=k_index)
        return rematerialize(function(piece, inputs._replace(q=q, k=k)))

    return jnp.concatenate([of_columns(start) for start in range(0, s.shape[1], PIECE_COLUMNS)], 1)


@dataclasses.dataclass(frozen=True)
class TileScore:
    """Score functions on a tile: what becomes of scaled scores, and the derivative of that."""

    value: TileFunction
    # (d value / d score, and by each of `diff_inputs`)
    derivative: TileFunction
    diff_inputs: tuple[ArgSource, ...]  # the inputs that have a gradient

    def apply(self, s: jax.Array, scale: float, inputs_at: InputsAt) -> tuple[jax.Array, float]:
        """Return the values of scores that are not scaled yet, and a positive factor: their product is in base 2."""
        factors = []

        def evaluate(piece: jax.Array, inputs: TileInputs) -> jax.Array:
            score = TileValue(piece, (0, 1), scale)
            (value,) = self.value.evaluate(inputs, piece.shape, score, may_branch=True)
            factors.append(value.factor if value.factor > 0 else 1.0)
            value = value._replace(factor=value.factor / factors[-1])
            return broadcast_to_tile(value, (0, 1), piece.shape, self.value.ops)

        if self.value.token_inputs("k") or self.value.pairwise_inputs:
            values = by_columns(evaluate, s, inputs_at)
        else:
            values = evaluate(s, inputs_at(pl.ds(0, s.shape[1])))
        return values, factors[0] * LOG2E

    def diff_inputs_of(self, side: str) -> list[ArgSource]:
        """Return the inputs of this side that have a gradient."""
        return [source for source in self.diff_inputs if source.side == side]

    def evaluate(self, s: jax.Array, scale: float, inputs: TileInputs) -> jax.Array:
        """Return the values, in base 2, of scores that are not scaled yet."""
        (value,) = self.value.evaluate(inputs, s.shape, TileValue(s, (0, 1), scale))
        value = value._replace(factor=value.factor * LOG2E)
        return broadcast_to_tile(value, (0, 1), s.shape, self.value.ops)

    def derivatives(
        self, s: jax.Array, scale: float, inputs: TileInputs
    ) -> tuple[TileValue, dict[ArgSource, TileValue]]:
        """Return the derivative of the values by the scaled scores, and by each input that has a gradient."""
        score = TileValue(s, (0, 1), scale)
        by_score, *by_inputs = self.derivative.evaluate(inputs, s.shape, score)
        return by_score, dict(zip(self.diff_inputs, by_inputs, strict=True))


@dataclasses.dataclass(frozen=True)
class TileDropout:
    """Dropout of the probabilities of a tile."""

    threshold: int  # see `dropout`
    key_positions: ArgSource
    ops: TileOps

    @property
    def explicit_positions(self) -> bool:
        """Return whether a user gave the keys' positions, of which nothing is then known."""
        return self.key_positions.position is not None

    @property
    def scale(self) -> float:
        """Return the factor of probabilities that are kept."""
        return dropout.scale(self.threshold)

    def mark_dropped(
        self, p: jax.Array, keys: RowKeys, columns: jax.Array, key_axis: int
    ) -> jax.Array:
        """Return -p where it is dropped. `columns` are positions of the tokens on `key_axis`."""
        shared = not self.explicit_positions
        return self.ops.negate_dropped(p, keys, columns, key_axis, self.threshold, shared)
