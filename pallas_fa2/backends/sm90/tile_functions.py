"""A mask's and a score's code, on tiles of scores in registers."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_fa2.arithmetic import LOG2E
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.dropout import RowKeys
from pallas_fa2.backends.sm90.primitives import dropout_bits, layouts, masking, thread_values, votes
from pallas_fa2.backends.sm90.primitives.layouts import broadcast_columns
from pallas_fa2.ir import evaluate as ir_evaluate
from pallas_fa2.ir import legality
from pallas_fa2.ir.evaluate import dce
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.tile_values import TargetOps, TileValue, broadcast_to_tile
from pallas_fa2.ir.trace import TracedFn, make_jaxpr_off_mesh

TARGET_OPS = TargetOps(
    thread_values.reciprocal,
    layouts.broadcast_axis,
    votes.warp_any_abs_ge_2,
    thread_values.defeat_minmax_fusion,
    layouts.materialize_int,
)
# Code in branches is not shared by a score and its slope.
BRANCHLESS_OPS = TARGET_OPS._replace(any_abs_ge_2=None)
# Columns of scores that pass through a function together.
PIECE_COLUMNS = 16
PIECE_SHAPE = 64, PIECE_COLUMNS  # rows and columns of a part of a tile
# Instructions of one by a constant: the upper half of a product, a shift, a sign, and for the rest another product.
DIV_COST = 4


class ArgSource(NamedTuple):
    """Where an argument of the code comes from: the score, a row of q's or k's data, an array of pairs,
    or a number."""

    side: Literal["score", "q", "k", "pair", "integer", "real"]
    position: int | None  # among those of its side; None is the score, or the token's index
    dtype: str


@dataclasses.dataclass(frozen=True)
class AxisInputs:
    """The tokens along one axis of a tile: their indices, and their data."""

    axis: int
    index: jax.Array | None = None  # unless the code reads none
    arrays: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})

    @classmethod
    def load(
        cls,
        axis: int,
        index: jax.Array | None,
        data: Any,
        sources: Iterable[ArgSource],
        first: int = 1,
    ) -> "AxisInputs":
        """`data` is `[first + rows, tokens]`, of 32 bits each."""

        def row(source: ArgSource) -> jax.Array:
            assert source.position is not None
            bits = data.at[first + source.position]
            if source.dtype == "bool":
                return layouts.load_row(axis, bits, jnp.int32) != 0
            narrow = source.dtype in legality.NARROW
            return layouts.load_row(axis, bits, "float32" if narrow else source.dtype)

        return cls(axis, index, {s: row(s) for s in sources})


class TileInputs(NamedTuple):
    """The two sides of a tile, what is there for each pair, and what all tokens of a head share."""

    q: AxisInputs
    k: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    pairwise: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})


NO_SCORE = TileValue(None)


@dataclasses.dataclass(frozen=True)
class TileFunction:
    """A jaxpr, and where its arguments come from."""

    code: ClosedJaxpr
    sources: tuple[ArgSource, ...]

    @classmethod
    def compile(cls, code: ClosedJaxpr, sources: Sequence[ArgSource]) -> "TileFunction":
        """Of the arguments, those that it reads."""
        code, read = dce(code)
        return cls(code, tuple(itertools.compress(sources, read)))

    def token_inputs(self, side: str) -> list[ArgSource]:
        """What it reads of q's or k's tokens, but for their index."""
        return [s for s in self.sources if s.side == side and s.position is not None]

    @property
    def pairwise_inputs(self) -> list[ArgSource]:
        return [s for s in self.sources if s.side == "pair"]

    @property
    def head_inputs(self) -> list[ArgSource]:
        return [s for s in self.sources if s.side in ("integer", "real")]

    def op_cost(self, columns: Literal["q", "k"]) -> float:
        """About how many a thread has for each pair of a tile, whose columns are of this side.

        Of 64 by 64 pairs it has two rows and 16 columns: what depends on columns alone counts half.
        """
        count = 0.0

        def apply(eqn: Any, ins: list) -> list:
            nonlocal count
            if (inner := inner_jaxpr(eqn)) is not None:
                return interpret_jaxpr(*inner, ins, lambda _: None, apply)
            if eqn.primitive.name not in ("broadcast_in_dim", "layout_cast", "squeeze"):
                each = DIV_COST if eqn.primitive.name in ("div", "rem") else 1
                count += each * {PIECE_SHAPE: 1.0, PIECE_SHAPE[1:]: 0.5}.get(
                    eqn.outvars[0].aval.shape, 0.0
                )
            return [None] * len(eqn.outvars)

        code = self._trace(
            lambda pair: [x.array for x in self.evaluate(pair, PIECE_SHAPE)], columns
        )
        code, read = dce(code)
        interpret_jaxpr(code.jaxpr, code.consts, [None] * sum(read), lambda _: None, apply)
        return count

    def is_key_interval(self) -> bool:
        """Whether the keys that a query sees, by this mask, follow each other."""
        found = []
        self._trace(lambda pair: found.append(self.key_bounds(pair) is not None), "k")
        return found[0]

    def key_bounds(self, pair: TileInputs) -> dict[str, jax.Array] | None:
        """The index of the first key that each query sees, by this mask, and of the last one: "low", "high"
        or both. None if no comparisons with a key's index say what a query sees."""
        (visible,) = self.evaluate(pair, PIECE_SHAPE)
        limits = visible.bounds
        if not limits or any(x.column.array is not pair.k.index for x in limits):
            return None
        return {x.kind: broadcast_to_tile(x.bound, (0,), PIECE_SHAPE, TARGET_OPS) for x in limits}

    def _trace(
        self, function: Callable[[TileInputs], Any], columns: Literal["q", "k"]
    ) -> ClosedJaxpr:
        """Of some tile's data."""
        sides = ("k", "q") if columns == "q" else ("q", "k")

        def of_data(indices: list, rows: list, numbers: list) -> Any:
            sources = [
                dict(zip(self.token_inputs(x), y, strict=True))
                for x, y in zip(sides, rows, strict=True)
            ]
            found = {sides[i]: AxisInputs(i, indices[i], sources[i]) for i in (0, 1)}
            numbers_of = dict(zip(self.head_inputs, numbers, strict=True))
            pairs = {s: jnp.zeros(PIECE_SHAPE, s.dtype) for s in self.pairwise_inputs}
            return function(TileInputs(found["q"], found["k"], numbers_of, pairs))

        return jax.make_jaxpr(of_data)(
            [jax.ShapeDtypeStruct((n,), jnp.int32) for n in PIECE_SHAPE],
            [
                [jax.ShapeDtypeStruct((n,), s.dtype) for s in self.token_inputs(side)]
                for n, side in zip(PIECE_SHAPE, sides, strict=True)
            ],
            [jax.ShapeDtypeStruct((), s.dtype) for s in self.head_inputs],
        )

    def reads_index(self, side: str) -> bool:
        return any(s.side == side and s.position is None for s in self.sources)

    def evaluate(
        self,
        pair: TileInputs,
        shape: tuple[int, ...],
        score: TileValue = NO_SCORE,
        functions: TargetOps = BRANCHLESS_OPS,
    ) -> list[TileValue]:
        sides = {"q": pair.q, "k": pair.k}

        def value(source: ArgSource) -> TileValue:
            if source.side == "score":
                return score
            if source.position is None:
                side = sides[source.side]
                return TileValue.of_index(side.index, side.axis)
            if source.side == "pair":
                return TileValue(pair.pairwise[source], (0, 1))
            if source.side not in sides:
                return TileValue(pair.head_scalars[source])
            side = sides[source.side]
            return TileValue(side.arrays[source], (side.axis,))

        args = [value(s) for s in self.sources]
        return ir_evaluate.evaluate(self.code, args, shape, functions)


@dataclasses.dataclass(frozen=True)
class TileMask:
    """Which pairs of tokens see each other."""

    visible: TileFunction
    # Whether it is known that every query sees a key and every key is seen. Where it is not, what
    # nobody sees may be NaN.
    covers_every_token: bool

    @functools.cached_property
    def is_key_interval(self) -> bool:
        """Whether it is known that the keys which a query sees follow each other."""
        return self.visible.is_key_interval()

    def apply_interval(
        self, s: jax.Array, pair: TileInputs, first_key: Any, k_end: int | None = None
    ) -> jax.Array:
        """As `hide`, where queries see a range, of a tile whose columns are keys."""
        found = self.visible.key_bounds(pair)
        assert found is not None
        low, high = found.get("low"), found.get("high")
        if k_end is not None:
            high = k_end - 1 if high is None else jnp.minimum(high, k_end - 1)

        def within(bound: Any) -> Any:
            if bound is None:
                return None
            bound = jnp.broadcast_to(bound - first_key, s.shape[:1])
            return plgpu.layout_cast(bound, layouts.ROW_LAYOUT)

        return masking.mask_outside(s, within(low), within(high))

    def apply(self, s: jax.Array, pair_at: Callable, k_end: int | None = None) -> jax.Array:
        """-inf where a pair is not seen, or a key is the `k_end`-th or a later one."""

        def some(piece: jax.Array, pair: TileInputs) -> jax.Array:
            return jnp.where(self._evaluate(piece.shape, pair, k_end), piece, -jnp.inf)

        return by_columns(some, s, pair_at)

    def pack_bits(self, pair_at: Callable, k_end: int | None = None) -> jax.Array:
        """`masking.pack_bits` of what `hide` hides of a square of 64 rows and columns."""

        def some(start: int) -> jax.Array:
            seen = self._evaluate(PIECE_SHAPE, pair_at(pl.ds(start, PIECE_COLUMNS)), k_end)
            return masking.pack_bits(seen, start)

        return functools.reduce(jnp.bitwise_or, map(some, range(0, PIECE_SHAPE[0], PIECE_COLUMNS)))

    def _evaluate(self, shape: tuple[int, ...], pair: TileInputs, k_end: int | None) -> jax.Array:
        (seen,) = self.visible.evaluate(pair, shape)
        seen = broadcast_to_tile(seen, (0, 1), shape, TARGET_OPS)
        if k_end is None:
            return seen
        return seen & broadcast_columns(cast(Any, pair.k.index) < k_end, shape)


def by_columns(some: Callable, s: jax.Array, pair_at: Callable) -> jax.Array:
    """some(columns of a tile, their `Pair`) for a few columns after another.

    `pair_at` gives the pair of some columns.
    """

    def of(start: int) -> jax.Array:
        pair = pair_at(pl.ds(start, PIECE_COLUMNS))
        # only when these scores are there: it would hold registers before
        piece = s[:, start : start + PIECE_COLUMNS]
        piece, *index = lax.optimization_barrier((piece, pair.q.index, pair.k.index))
        q, k = (
            dataclasses.replace(side, index=i)
            for side, i in zip((pair.q, pair.k), index, strict=True)
        )
        return lax.optimization_barrier(some(piece, pair._replace(q=q, k=k)))

    return jnp.concatenate([of(start) for start in range(0, s.shape[1], PIECE_COLUMNS)], 1)


@dataclasses.dataclass(frozen=True)
class TileScore:
    """What becomes of a scaled score, and the derivative of that."""

    value: TileFunction
    # (d value / d score, and by each of the `floats`)
    derivative: TileFunction
    diff_inputs: tuple[ArgSource, ...]  # the data that have a gradient

    def apply(self, s: jax.Array, scale: float, pair_at: Callable) -> tuple[jax.Array, float]:
        """To scores that are not scaled yet; the result, times the positive factor, is in base 2."""
        factors = []

        def some(piece: jax.Array, pair: TileInputs) -> jax.Array:
            (value,) = self.value.evaluate(
                pair, piece.shape, TileValue(piece, (0, 1), scale), TARGET_OPS
            )
            factors.append(value.factor if value.factor > 0 else 1.0)
            value = value._replace(factor=value.factor / factors[-1])
            return broadcast_to_tile(value, (0, 1), piece.shape, TARGET_OPS)

        if self.value.token_inputs("k") or self.value.pairwise_inputs:
            found = by_columns(some, s, pair_at)
        else:
            found = some(s, pair_at(pl.ds(0, s.shape[1])))
        return found, factors[0] * LOG2E

    def diff_inputs_of(self, side: str) -> list[ArgSource]:
        return [source for source in self.diff_inputs if source.side == side]

    def evaluate(self, s: jax.Array, scale: float, pair: TileInputs) -> jax.Array:
        """Of scores that are not scaled yet; the result is in base 2."""
        (value,) = self.value.evaluate(pair, s.shape, TileValue(s, (0, 1), scale))
        value = value._replace(factor=value.factor * LOG2E)
        return broadcast_to_tile(value, (0, 1), s.shape, TARGET_OPS)

    def derivatives(
        self, s: jax.Array, scale: float, pair: TileInputs
    ) -> tuple[TileValue, dict[ArgSource, TileValue]]:
        """Of the value, by the scaled score and by the data that have a gradient."""
        found = self.derivative.evaluate(pair, s.shape, TileValue(s, (0, 1), scale))
        return found[0], dict(zip(self.diff_inputs, found[1:], strict=True))


@dataclasses.dataclass(frozen=True)
class TileDropout:
    """Which probabilities of a tile are dropped."""

    threshold: int  # see `dropout`
    key_positions: ArgSource  # of the keys' positions

    @property
    def explicit_positions(self) -> bool:
        """Whether a user gave these positions, of which nothing is then known."""
        return self.key_positions.position is not None

    @property
    def scale(self) -> float:
        """What makes up for it."""
        return dropout.scale(self.threshold)

    def mark_dropped(
        self, p: jax.Array, keys: RowKeys, columns: jax.Array, key_axis: int
    ) -> jax.Array:
        """-p where it is dropped. `columns` are positions of the tokens on `key_axis`."""
        return dropout_bits.negate_dropped(
            p, keys, columns, key_axis, self.threshold, not self.explicit_positions
        )


@functools.lru_cache(maxsize=512)
def combined_scores(scores: tuple[TracedFn, ...]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """All scores as one function of (score, q's index, k's index, the data of each), and its derivative
    by the score and by the data that are floats."""
    avals = [cast(list[ShapedArray], s.jaxpr.in_avals) for s in scores]
    args = [*avals[0][:3], *(x for of_one in avals for x in of_one[3:])]

    def value(s: Any, q_index: Any, k_index: Any, *data: Any) -> Any:
        rest = list(data)
        for score, of_one in zip(scores, avals, strict=True):
            own, rest = rest[: len(of_one) - 3], rest[len(of_one) - 3 :]
            (s,) = jaxpr_as_fun(score.jaxpr)(s, q_index, k_index, *own)
        return s

    floats = [i for i, x in enumerate(args) if i == 0 or jnp.issubdtype(x.dtype, jnp.floating)]

    def derivative(*all_args: Any) -> Any:
        def of(*given: Any) -> Any:
            merged = list(all_args)
            for i, x in zip(floats, given, strict=True):
                merged[i] = x
            return value(*merged)

        out, pull = jax.vjp(of, *(all_args[i] for i in floats))
        return pull(jnp.ones((), out.dtype))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    return make_jaxpr_off_mesh(value, *shapes), make_jaxpr_off_mesh(derivative, *shapes)
