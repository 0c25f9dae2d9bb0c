"""What masks and scores read, as the Hopper kernels take it, and what comes back as its gradient.

Data that rides with the tokens lies in rows of 32 bits, one a token; what is shared by a head's tokens
are numbers.
"""

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Literal

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90 import tile_functions
from pallas_fa2.backends.sm90.tile_functions import (
    PIECE_COLUMNS,
    ArgSource,
    TileDropout,
    TileFunction,
    TileMask,
    TileScore,
)
from pallas_fa2.ir import coverage, legality
from pallas_fa2.ir.call_spec import CallSpec, Operands
from pallas_fa2.ir.trace import TracedFn

# Every tile's length divides it.
PAD_MULTIPLE = 128
# Batch entries that share an array of pairs whose gradients are stored, not added up in device memory:
# so many in 16 bits take no more of it than their sum in 32.
MAX_ENTRIES_STORED = 2
# The largest head dim beside which shared memory has room for data of pairs.
MAX_DIM_WITH_PAIRWISE = 128


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
    # The same, where booleans are what they are: read without TMA (`answers.ask`).
    pairwise_unpacked: tuple[jax.Array, ...] = ()

    @classmethod
    def axes(cls) -> Any:
        """As `partition.Axes` has them."""
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
        """As `partition.Axes` has them, without pairs, of what `start` gives."""
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


def unsupported_reason(spec: CallSpec) -> str | None:
    """What of a mask or score no kernel runs."""
    for owner, code in _functions(spec):
        for _, aval in _data(code):
            if aval.shape != ():
                return f"its {owner} read single numbers, not arrays of shape {aval.shape}"
            known = legality.DTYPES + (legality.NARROW if owner == "scores" else ())
            if aval.dtype.name not in known:
                return f"its {owner} read {', '.join(known)}, not {aval.dtype.name}"
    codes = []
    if spec.has_general_mask:
        assert spec.mask is not None
        codes.append((spec.mask.jaxpr, legality.MASK, "its masks"))
    if spec.scores:
        value, derivative = tile_functions.combined_scores(spec.scores)
        codes.append((value, legality.SCORE, "its scores"))
        codes.append((derivative, legality.GRADIENT, "gradients of its scores"))
    reasons = (legality.unsupported_reason(code, *language) for code, *language in codes)
    return next(filter(None, reasons), None)


def _functions(spec: CallSpec) -> Iterator[tuple[str, TracedFn]]:
    if spec.has_general_mask:
        yield "masks", cast(TracedFn, spec.mask)
    for score in spec.scores:
        yield "scores", score


def _data(code: TracedFn) -> list[tuple[str, ShapedArray]]:
    """Of each array that a mask or score reads: its kind (a field of `tokens.Data`), and what it holds."""
    _, structure = code.key
    args = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths, _ = jax.tree.flatten_with_path(args[-1])
    avals = cast(list[ShapedArray], code.jaxpr.in_avals)[-len(paths) :] if paths else []
    return [(path[-2].name, aval) for (path, _), aval in zip(paths, avals, strict=True)]


_SIDES: dict[str, Any] = {
    "q_tokens": "q",
    "pairwise_q": "q",
    "k_tokens": "k",
    "pairwise_k": "k",
    "pairwise": "pair",
}


class _Sources(NamedTuple):
    q: ArgSource  # of the tokens' positions
    k: ArgSource
    mask: list[ArgSource]
    scores: list[ArgSource]  # of all, one after another


@functools.lru_cache(maxsize=512)
def _sources(spec: CallSpec) -> _Sources:
    counts = collections.Counter()

    def next_of(kind: str, dtype: Any) -> ArgSource:
        number = "real" if jnp.issubdtype(dtype, jnp.floating) else "integer"
        side = _SIDES.get(kind, number)
        counts[side] += 1
        return ArgSource(side, counts[side] - 1, dtype.name)

    int32 = jnp.dtype("int32")
    q, k = (
        next_of(f"{side}_tokens", int32)
        if spec.has_explicit_positions
        else ArgSource(side, None, "int32")
        for side in ("q", "k")
    )
    found = {"masks": [], "scores": []}
    for owner, code in _functions(spec):
        found[owner] += [next_of(kind, aval.dtype) for kind, aval in _data(code)]
    return _Sources(q, k, found["masks"], found["scores"])


def compile_mask(spec: CallSpec) -> TileMask | None:
    if not spec.has_general_mask:
        return None
    assert spec.mask is not None
    sources = _sources(spec)
    visible = TileFunction.compile(spec.mask.jaxpr, [sources.q, sources.k, *sources.mask])
    return TileMask(visible, coverage.mask_covers_every_token(spec))


def compile_score(spec: CallSpec, wanted: tuple[bool, ...]) -> TileScore | None:
    """Of the floats that it reads, those are `wanted` whose gradient is."""
    if not spec.scores:
        return None
    sources = _sources(spec)
    value, derivative = tile_functions.combined_scores(spec.scores)
    args = [ArgSource("score", None, "float32"), sources.q, sources.k, *sources.scores]
    slope, *others = derivative.jaxpr.outvars
    each = zip(others, float_sources(spec), wanted or [False] * len(others), strict=True)
    kept = [(v, s) for v, s, asked_for in each if asked_for and not _is_zero(v)]
    outvars = [slope, *(v for v, _ in kept)]
    derivative = derivative.replace(jaxpr=derivative.jaxpr.replace(outvars=outvars))
    return TileScore(
        TileFunction.compile(value, args),
        TileFunction.compile(derivative, args),
        tuple(s for _, s in kept),
    )


def compile_dropout(spec: CallSpec) -> TileDropout | None:
    threshold = dropout.threshold(spec.dropout_rate)
    return TileDropout(threshold, _sources(spec).k) if threshold else None


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and v.val == 0


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


def storage_dtype(dtype: str) -> Any:
    """What pairs of this dtype are in memory: booleans as 0 and 1 in 16 bits."""
    return jnp.dtype("bfloat16" if dtype == "bool" else dtype)


def pairwise_bytes(spec: CallSpec) -> int:
    """Of all the data that a pair of tokens has, in a kernel of attention."""
    sources = _sources(spec)
    readers = sources.scores if needs_mask_bits(spec) else (*sources.mask, *sources.scores)
    return sum(storage_dtype(s.dtype).itemsize for s in readers if s.side == "pair")


def needs_mask_bits(spec: CallSpec) -> bool:
    """Whether a mask that reads data of pairs is asked before the attention (`answers`): heads share it, and its
    answers take no more memory than queries; or there is no room for such data beside the head dims. (Beside
    scores where there is room: not measured.)"""
    if not mask_reads_pairs(spec):
        return False
    if max(spec.head_dim, spec.value_dim) > MAX_DIM_WITH_PAIRWISE:
        return True
    shared = spec.q_heads > 1 and not spec.mask_varies_by_head and not spec.scores
    return shared and spec.kv_len // 8 <= 2 * spec.q_heads * spec.head_dim


@functools.lru_cache(maxsize=512)
def mask_reads_pairs(spec: CallSpec) -> bool:
    mask = compile_mask(spec)
    return mask is not None and bool(mask.visible.pairwise_inputs)


def num_token_rows(spec: CallSpec, side: str) -> int:
    """How many rows of data queries or keys have."""
    sources = _sources(spec)
    of_all = (sources.q, sources.k, *sources.mask, *sources.scores)
    return sum(s.side == side and s.position is not None for s in of_all)


def _whole_tiles(spec: CallSpec, x: jax.Array, dtype: Any) -> jax.Array:
    """`[B | 1, N | 1, T', S']`, whose lengths are multiples of every tile's."""
    heads = (1, 1) if x.shape[1:3] == (1, 1) else (spec.kv_heads, spec.group)
    x = jnp.broadcast_to(x, (x.shape[0], *heads, spec.q_len, spec.kv_len))
    x = x.reshape(x.shape[0], -1, *x.shape[3:]).astype(dtype)
    return jnp.pad(x, [(0, 0), (0, 0), *((0, -n % PAD_MULTIPLE) for n in x.shape[2:])])


def _bits(x: jax.Array) -> jax.Array:
    return x.astype(I32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, I32)


def float_sources(spec: CallSpec) -> list[ArgSource]:
    return [s for s in _sources(spec).scores if jnp.issubdtype(s.dtype, jnp.floating)]
