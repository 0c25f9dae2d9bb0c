"""The code of masks and scores as functions on tiles in registers, and their inputs."""

import dataclasses
import functools
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from pallas_fa2.ir import evaluate as ir_evaluate
from pallas_fa2.ir.evaluate import dce
from pallas_fa2.ir.interpret import inner_jaxpr, interpret_jaxpr
from pallas_fa2.ir.tile_values import TargetOps, TileValue, broadcast_to_tile
from pallas_fa2.ir.trace import TracedFn, make_jaxpr_off_mesh

type Side = Literal["q", "k"]

# Columns of scores that pass through a function together, of 64 rows.
PIECE_COLUMNS = 16
PIECE_SHAPE = 64, PIECE_COLUMNS
# Instructions of a division by a constant: the upper half of a product, a shift, a sign, and for the rest another
# product.
DIV_COST = 4


class ArgSource(NamedTuple):
    """Where an argument of the code comes from: the score, a row of q's or k's inputs, a pairwise array,
    or a scalar of the head."""

    side: Literal["score", "q", "k", "pair", "integer", "real"]
    position: int | None  # among those of its side; None is the score, or the token's index
    dtype: str


@dataclasses.dataclass(frozen=True)
class AxisInputs:
    """The tokens along one axis of a tile: their indices, and what the code reads of them."""

    axis: int
    index: jax.Array | None = None  # unless the code reads none
    arrays: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})


class TileInputs(NamedTuple):
    """What the code reads of a tile: of its two axes, of its pairs of tokens, and of its head, or of the heads of its
    queries along their axis."""

    q: AxisInputs
    k: AxisInputs
    head_scalars: Mapping[ArgSource, jax.Array]
    pairwise: Mapping[ArgSource, jax.Array] = types.MappingProxyType({})

    def value(self, source: ArgSource) -> TileValue:
        """Return an argument of the code, other than the score."""
        if source.side == "pair":
            return TileValue(self.pairwise[source], (0, 1))
        if source.side in ("integer", "real"):
            value = self.head_scalars[source]
            return TileValue(value, (self.q.axis,) if value.ndim else ())
        inputs = self.q if source.side == "q" else self.k
        if source.position is None:
            return TileValue.of_index(inputs.index, inputs.axis)
        return TileValue(inputs.arrays[source], (inputs.axis,))


NO_SCORE = TileValue(None)


@dataclasses.dataclass(frozen=True)
class TileFunction:
    """A jaxpr, the sources of its arguments, and the operations of the target that runs it."""

    code: ClosedJaxpr
    sources: tuple[ArgSource, ...]
    ops: TargetOps

    @classmethod
    def compile(
        cls, code: ClosedJaxpr, sources: Sequence[ArgSource], ops: TargetOps
    ) -> "TileFunction":
        """Make a function of the arguments that the code reads."""
        code, read = dce(code)
        return cls(code, tuple(itertools.compress(sources, read)), ops)

    def token_inputs(self, side: str) -> list[ArgSource]:
        """Return what it reads of q's or k's tokens, but for their index."""
        return [s for s in self.sources if s.side == side and s.position is not None]

    @property
    def pairwise_inputs(self) -> list[ArgSource]:
        """Return what it reads of pairwise arrays."""
        return [s for s in self.sources if s.side == "pair"]

    @property
    def head_inputs(self) -> list[ArgSource]:
        """Return what it reads that all tokens of a head share."""
        return [s for s in self.sources if s.side in ("integer", "real")]

    def reads_index(self, side: str) -> bool:
        """Return whether it reads the indices of q's or k's tokens."""
        return any(s.side == side and s.position is None for s in self.sources)

    def evaluate(
        self,
        inputs: TileInputs,
        shape: tuple[int, ...],
        score: TileValue = NO_SCORE,
        may_branch: bool = False,
    ) -> list[TileValue]:
        """Return the results on a tile of this shape. Code in branches is not shared by a score and its derivative."""
        ops = self.ops if may_branch else self.ops._replace(any_abs_ge_2=None)
        args = [score if s.side == "score" else inputs.value(s) for s in self.sources]
        return ir_evaluate.evaluate(self.code, args, shape, ops)

    def op_cost(self, columns: Side) -> float:
        """Return about how many instructions a thread has for each pair of a tile, whose columns are of this side.

        Of 64 by 64 pairs it has two rows and 16 columns: what depends on columns alone counts half.
        """
        count = 0.0

        def apply(eqn: Any, ins: list) -> list:
            nonlocal count
            if (inner := inner_jaxpr(eqn)) is not None:
                return interpret_jaxpr(*inner, ins, lambda _: None, apply)
            if eqn.primitive.name not in ("broadcast_in_dim", "layout_cast", "squeeze"):
                cost = DIV_COST if eqn.primitive.name in ("div", "rem") else 1
                shape = eqn.outvars[0].aval.shape
                count += cost * {PIECE_SHAPE: 1.0, PIECE_SHAPE[1:]: 0.5}.get(shape, 0.0)
            return [None] * len(eqn.outvars)

        code = self._trace(lambda x: [y.array for y in self.evaluate(x, PIECE_SHAPE)], columns)
        code, read = dce(code)
        interpret_jaxpr(code.jaxpr, code.consts, [None] * sum(read), lambda _: None, apply)
        return count

    def is_key_interval(self) -> bool:
        """Return whether the keys that a query attends to, by this mask, are contiguous."""
        results = []
        self._trace(lambda inputs: results.append(self.key_bounds(inputs) is not None), "k")
        return results[0]

    def key_bounds(self, inputs: TileInputs) -> dict[str, jax.Array] | None:
        """Return the index of the first key that each query attends to, by this mask, and of the last one: "low",
        "high" or both. None if comparisons with a key's index alone do not say what it attends to."""
        (visible,) = self.evaluate(inputs, PIECE_SHAPE)
        limits = visible.bounds
        if not limits or any(x.column.array is not inputs.k.index for x in limits):
            return None
        return {x.kind: broadcast_to_tile(x.bound, (0,), PIECE_SHAPE, self.ops) for x in limits}

    def _trace(self, function: Callable[[TileInputs], Any], columns: Side) -> ClosedJaxpr:
        """Trace a function of the inputs of some tile."""
        sides = ("k", "q") if columns == "q" else ("q", "k")

        def of_arrays(indices: list, arrays: list, scalars: list) -> Any:
            by_source = [
                dict(zip(self.token_inputs(side), x, strict=True))
                for side, x in zip(sides, arrays, strict=True)
            ]
            axes = {sides[i]: AxisInputs(i, indices[i], by_source[i]) for i in (0, 1)}
            head_scalars = dict(zip(self.head_inputs, scalars, strict=True))
            pairwise = {s: jnp.zeros(PIECE_SHAPE, s.dtype) for s in self.pairwise_inputs}
            return function(TileInputs(axes["q"], axes["k"], head_scalars, pairwise))

        return jax.make_jaxpr(of_arrays)(
            [jax.ShapeDtypeStruct((n,), jnp.int32) for n in PIECE_SHAPE],
            [
                [jax.ShapeDtypeStruct((n,), s.dtype) for s in self.token_inputs(side)]
                for n, side in zip(PIECE_SHAPE, sides, strict=True)
            ],
            [jax.ShapeDtypeStruct((), s.dtype) for s in self.head_inputs],
        )


@functools.lru_cache(maxsize=512)
def combined_scores(scores: tuple[TracedFn, ...]) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """Return all scores as one function of (score, q's index, k's index, the inputs of each), and its derivative
    by the score and by the inputs that are floats."""
    avals = [cast(list[ShapedArray], s.jaxpr.in_avals) for s in scores]
    args = [*avals[0][:3], *(x for each in avals for x in each[3:])]

    def value(s: Any, q_index: Any, k_index: Any, *inputs: Any) -> Any:
        rest = list(inputs)
        for score, each in zip(scores, avals, strict=True):
            own, rest = rest[: len(each) - 3], rest[len(each) - 3 :]
            (s,) = jaxpr_as_fun(score.jaxpr)(s, q_index, k_index, *own)
        return s

    floats = [i for i, x in enumerate(args) if i == 0 or jnp.issubdtype(x.dtype, jnp.floating)]

    def derivative(*all_args: Any) -> Any:
        def of_floats(*given: Any) -> Any:
            merged = list(all_args)
            for i, x in zip(floats, given, strict=True):
                merged[i] = x
            return value(*merged)

        out, pull = jax.vjp(of_floats, *(all_args[i] for i in floats))
        return pull(jnp.ones((), out.dtype))

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    return make_jaxpr_off_mesh(value, *shapes), make_jaxpr_off_mesh(derivative, *shapes)
