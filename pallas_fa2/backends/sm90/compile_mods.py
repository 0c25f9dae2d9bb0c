"""A call's mask, scores and dropout as functions on register tiles, and what they read."""

import collections
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Literal

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.tile_mods import TileDropout, TileMask, TileScore
from pallas_fa2.backends.sm90.primitives.tile_ops import TARGET_OPS, TILE_OPS
from pallas_fa2.ir import coverage, legality
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.ir.tile_functions import ArgSource, TileFunction, combined_scores
from pallas_fa2.ir.trace import TracedFn

# The largest head dim beside which shared memory has room for data of pairs.
MAX_DIM_WITH_PAIRWISE = 128


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
        value, derivative = combined_scores(spec.scores)
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
    """Of each array that a mask or score reads: its kind (a field of `arrays.AuxArrays`), and what it holds."""
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
    visible = TileFunction.compile(
        spec.mask.jaxpr, [sources.q, sources.k, *sources.mask], TARGET_OPS
    )
    return TileMask(visible, coverage.mask_covers_every_token(spec), TILE_OPS)


def compile_score(spec: CallSpec, wanted: tuple[bool, ...]) -> TileScore | None:
    """Of the floats that it reads, those are `wanted` whose gradient is."""
    if not spec.scores:
        return None
    sources = _sources(spec)
    value, derivative = combined_scores(spec.scores)
    args = [ArgSource("score", None, "float32"), sources.q, sources.k, *sources.scores]
    slope, *others = derivative.jaxpr.outvars
    each = zip(others, float_sources(spec), wanted or [False] * len(others), strict=True)
    kept = [(v, s) for v, s, asked_for in each if asked_for and not _is_zero(v)]
    outvars = [slope, *(v for v, _ in kept)]
    derivative = derivative.replace(jaxpr=derivative.jaxpr.replace(outvars=outvars))
    return TileScore(
        TileFunction.compile(value, args, TARGET_OPS),
        TileFunction.compile(derivative, args, TARGET_OPS),
        tuple(s for _, s in kept),
    )


def compile_dropout(spec: CallSpec) -> TileDropout | None:
    threshold = dropout.threshold(spec.dropout_rate)
    return TileDropout(threshold, _sources(spec).k, TILE_OPS) if threshold else None


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and v.val == 0


def storage_dtype(dtype: str) -> Any:
    """What pairs of this dtype are in memory: booleans as 0 and 1 in 16 bits."""
    return jnp.dtype("bfloat16" if dtype == "bool" else dtype)


def pairwise_bytes(spec: CallSpec) -> int:
    """Of all the data that a pair of tokens has, in a kernel of attention."""
    sources = _sources(spec)
    readers = sources.scores if needs_mask_bits(spec) else (*sources.mask, *sources.scores)
    return sum(storage_dtype(s.dtype).itemsize for s in readers if s.side == "pair")


def needs_mask_bits(spec: CallSpec) -> bool:
    """Whether a mask that reads data of pairs is asked before the attention (`mask_bits`): heads share it, and its
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


def float_sources(spec: CallSpec) -> list[ArgSource]:
    return [s for s in _sources(spec).scores if jnp.issubdtype(s.dtype, jnp.floating)]
