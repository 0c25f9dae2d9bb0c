"""Compiles a call's mask, scores and dropout to functions on register tiles."""

import collections
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Literal

from pallas_fa2.backends.common import dropout
from pallas_fa2.backends.common.primitives.tile_ops import TARGET_OPS, TILE_OPS
from pallas_fa2.backends.common.tile_mods import TileDropout, TileMask, TileScore
from pallas_fa2.ir import coverage, legality
from pallas_fa2.ir.call_spec import CallSpec
from pallas_fa2.ir.tile_functions import ArgSource, TileFunction, combined_scores
from pallas_fa2.ir.trace import TracedFn

# The largest head dim beside which shared memory has room for pairwise inputs.
MAX_DIM_WITH_PAIRWISE = 128


def unsupported_reason(spec: CallSpec) -> str | None:
    """Return what of a mask or score the kernels do not support, or None."""
    for owner, code in _functions(spec):
        for _, aval in _inputs(code):
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
    reasons = (legality.unsupported_reason(code, *allowed) for code, *allowed in codes)
    return next(filter(None, reasons), None)


def _functions(spec: CallSpec) -> Iterator[tuple[str, TracedFn]]:
    """Yield the mask and the score functions."""
    if spec.has_general_mask:
        yield "masks", cast(TracedFn, spec.mask)
    for score in spec.scores:
        yield "scores", score


def _inputs(code: TracedFn) -> list[tuple[str, ShapedArray]]:
    """Return, for each array that a mask or score reads, its kind (a field of `arrays.AuxArrays`) and its type."""
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
    """Where the kernels find each argument of a call's functions."""

    q: ArgSource  # the positions of queries
    k: ArgSource
    mask: list[ArgSource]
    scores: list[ArgSource]  # those of all score functions, one after another


@functools.lru_cache(maxsize=512)
def argument_sources(spec: CallSpec) -> _Sources:
    counts = collections.Counter()

    def next_source(kind: str, dtype: Any) -> ArgSource:
        scalar = "real" if jnp.issubdtype(dtype, jnp.floating) else "integer"
        side = _SIDES.get(kind, scalar)
        counts[side] += 1
        return ArgSource(side, counts[side] - 1, dtype.name)

    int32 = jnp.dtype("int32")
    q, k = (
        next_source(f"{side}_tokens", int32)
        if spec.has_explicit_positions
        else ArgSource(side, None, "int32")
        for side in ("q", "k")
    )
    sources = {"masks": [], "scores": []}
    for owner, code in _functions(spec):
        sources[owner] += [next_source(kind, aval.dtype) for kind, aval in _inputs(code)]
    return _Sources(q, k, sources["masks"], sources["scores"])


def compile_mask(spec: CallSpec) -> TileMask | None:
    """Compile the mask of a call, if it has one that is not causal."""
    if not spec.has_general_mask:
        return None
    assert spec.mask is not None
    sources = argument_sources(spec)
    visible = TileFunction.compile(
        spec.mask.jaxpr, [sources.q, sources.k, *sources.mask], TARGET_OPS
    )
    return TileMask(visible, coverage.mask_covers_every_token(spec), TILE_OPS)


def compile_score(spec: CallSpec, needs_grad: tuple[bool, ...]) -> TileScore | None:
    """Compile the score functions of a call and their derivatives by the score and by the floating-point inputs that
    need gradients (none if `needs_grad` is empty)."""
    if not spec.scores:
        return None
    sources = argument_sources(spec)
    value, derivative = combined_scores(spec.scores)
    args = [ArgSource("score", None, "float32"), sources.q, sources.k, *sources.scores]
    by_score, *by_inputs = derivative.jaxpr.outvars
    needs_grad = needs_grad or (False,) * len(by_inputs)
    candidates = zip(by_inputs, float_sources(spec), needs_grad, strict=True)
    kept = [(v, s) for v, s, needed in candidates if needed and not _is_zero(v)]
    outvars = [by_score, *(v for v, _ in kept)]
    derivative = derivative.replace(jaxpr=derivative.jaxpr.replace(outvars=outvars))
    return TileScore(
        TileFunction.compile(value, args, TARGET_OPS),
        TileFunction.compile(derivative, args, TARGET_OPS),
        tuple(s for _, s in kept),
    )


def compile_dropout(spec: CallSpec) -> TileDropout | None:
    """Compile the dropout of a call, unless its rate is 0."""
    threshold = dropout.threshold(spec.dropout_rate)
    return TileDropout(threshold, argument_sources(spec).k, TILE_OPS) if threshold else None


def _is_zero(v: Any) -> bool:
    return isinstance(v, Literal) and v.val == 0


def storage_dtype(dtype: str) -> Any:
    """Return the dtype in which pairwise inputs are stored: booleans as 0 and 1 in 16 bits."""
    return jnp.dtype("bfloat16" if dtype == "bool" else dtype)


def pairwise_bytes(spec: CallSpec) -> int:
    """Return how many bytes of pairwise inputs the attention kernels load for each pair of tokens."""
    sources = argument_sources(spec)
    readers = sources.scores if needs_mask_bits(spec) else (*sources.mask, *sources.scores)
    return sum(storage_dtype(s.dtype).itemsize for s in readers if s.side == "pair")


def needs_mask_bits(spec: CallSpec) -> bool:
    """Return whether a mask that reads pairwise inputs is precomputed (`mask_bits`): heads share it, and its bits
    take no more memory than queries; or there is no room for such inputs beside the head dims. (Beside scores
    where there is room: not measured.)"""
    if not mask_reads_pairs(spec):
        return False
    if max(spec.head_dim, spec.value_dim) > MAX_DIM_WITH_PAIRWISE:
        return True
    shared = spec.q_heads > 1 and not spec.mask_varies_by_head and not spec.scores
    return shared and spec.kv_len // 8 <= 2 * spec.q_heads * spec.head_dim


@functools.lru_cache(maxsize=512)
def mask_reads_pairs(spec: CallSpec) -> bool:
    """Return whether the mask reads pairwise inputs."""
    mask = compile_mask(spec)
    return mask is not None and bool(mask.visible.pairwise_inputs)


def num_token_rows(spec: CallSpec, side: str) -> int:
    """Return how many per-token inputs queries or keys have."""
    sources = argument_sources(spec)
    args = (sources.q, sources.k, *sources.mask, *sources.scores)
    return sum(s.side == side and s.position is not None for s in args)


def float_sources(spec: CallSpec) -> list[ArgSource]:
    """Return the floating-point inputs of scores."""
    return [s for s in argument_sources(spec).scores if jnp.issubdtype(s.dtype, jnp.floating)]
