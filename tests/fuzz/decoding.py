"""Random decoding: a layer with a cache, fed a sequence in pieces, against the same layer on all of it.

That one is held against the dense definition by the calls that it makes (`case.Case`).
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_fa2 as fa
from tests.fuzz import masks
from tests.fuzz import scores as score_functions
from tests.fuzz.shapes import Pick, Shape, shown

# Float32 rounding of products in another order, of the largest number.
TOLERANCE = 2e-5
# Unoptimized: nearly all of the time goes into compiling.
QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True, repr=False)
class Decoding:
    """`layer` is ours of linen or nnx, or `changed`: Flax's own with our `attention_fn`."""

    seed: int = 0
    layer: str = "linen"  # or nnx, changed linen, changed nnx
    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    pieces: tuple[int, ...] = (1, 1)  # tokens of each step
    mask: masks.Node | None = None
    scores: tuple[score_functions.Score, ...] = ()
    implementation: str | None = None

    def __repr__(self) -> str:
        return shown(self)

    @property
    def length(self) -> int:
        return sum(self.pieces)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def draw(pick: Pick) -> Decoding:
    layer = pick(("linen", "linen", "nnx", "changed linen", "changed nnx"))
    ours = "changed" not in layer
    kv_heads, group = pick((1, 2)), pick((1, 2)) if ours else 1
    rest = tuple(1 for _ in range(pick((1, 2, 5))))
    prompt = (pick((1, 5, 16, 33)),) if layer == "linen" else ()  # others take a token at a time
    more = (pick((2, 7)), 1) if layer == "linen" and pick((False, True)) else ()
    return Decoding(
        seed=pick(range(1000)),
        layer=layer,
        batch=pick((1, 2)),
        kv_heads=kv_heads,
        group=group,
        head_dim=pick((8, 16)),
        pieces=(*prompt, *rest, *more),
        mask=_draw_mask(pick, 2) if ours and pick((False, True, True)) else None,
        scores=_draw_scores(pick, layer),
        implementation=pick((None, "reference")),
    )


def _draw_mask(pick: Pick, depth: int) -> masks.Node:
    mask = masks.draw(pick, depth)
    # What documents with equal lengths of both sides mean is not what a piece of them would.
    return masks.Prefix(3) if "Documents" in repr(mask) else mask


def _draw_scores(pick: Pick, layer: str) -> tuple[score_functions.Score, ...]:
    scores = score_functions.draw(pick)
    if layer == "linen":
        return scores
    if "changed" in layer:  # Flax tells scores no positions
        return tuple(s for s in scores if isinstance(s, score_functions.SoftCap))
    fixed = score_functions.SoftCap, score_functions.Alibi, score_functions.Relative
    return tuple(
        s for s in scores if isinstance(s, fixed)
    )  # an attention_fn has the same at each step


def simpler(case: Decoding) -> list[Decoding]:
    """Cases with one thing less."""
    changes: list[dict[str, Any]] = [
        {field.name: field.default}
        for field in dataclasses.fields(case)
        if field.name not in ("seed", "layer")
    ]
    changes += [{"mask": m} for m in ([] if case.mask is None else masks.parts(case.mask))]
    variants = [dataclasses.replace(case, **change) for change in changes]
    return [c for c in variants if repr(c) != repr(case)]


def check(case: Decoding) -> None:
    """Raises AssertionError where a piece differs from its rows of the whole."""
    rng = np.random.default_rng(case.seed)
    shape = Shape((case.batch,), case.length, case.length, case.heads)
    data = {} if case.mask is None else case.mask.data(shape, rng)
    data_of_scores = tuple(score.data(shape, rng) for score in case.scores)
    x = rng.standard_normal((case.batch, case.length, 12)).astype(np.float32)

    def mask(start: int, end: int) -> Any:
        return None if case.mask is None else case.mask.ours(case.mask.slice_data(data, start, end))

    def score(start: int, end: int) -> tuple:
        pairs = zip(case.scores, data_of_scores, strict=True)
        return tuple(s.ours(s.slice_data(d, start, end)) for s, d in pairs)

    run = _linen if "linen" in case.layer else _nnx
    whole, steps = run(case, x, mask, score)
    largest = max(1.0, float(np.abs(whole).max()))
    start = 0
    for size, actual in zip(case.pieces, steps, strict=True):
        off = float(np.abs(actual - whole[:, start : start + size]).max())
        assert off <= TOLERANCE * largest, (  # NaN is not
            f"tokens {start} to {start + size} of the {case.layer} layer: off by {off:.3g}"
        )
        start += size


def _linen(case: Decoding, x: np.ndarray, mask: Any, score: Any) -> tuple[np.ndarray, list]:
    options = {"num_heads": case.heads, "qkv_features": case.heads * case.head_dim}
    if case.layer == "linen":
        make_layer = functools.partial(
            fa.linen.MultiHeadAttention,
            num_kv_heads=case.kv_heads,
            causal=True,
            implementation=case.implementation,
            **options,
        )
        whole = make_layer()
        whole_mask = mask(0, case.length)
    else:
        attend = functools.partial(
            fa.linen.attention_fn, score=score(0, 1), implementation=case.implementation
        )
        make_layer = functools.partial(
            nn.MultiHeadDotProductAttention, attention_fn=attend, **options
        )
        whole, whole_mask = make_layer(), fa.Causal()
    by_call = {"score": score(0, case.length)} if case.layer == "linen" else {}
    init = jax.jit(whole.init, compiler_options=QUICKLY)
    params = init(jax.random.key(case.seed), x)
    out = jax.jit(functools.partial(whole.apply, **by_call), compiler_options=QUICKLY)(
        params, x, mask=whole_mask
    )
    decode = make_layer(decode=True)
    state = decode.init(jax.random.key(0), x)["cache"]

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def step(state: Any, x: Any, mask: Any, score: Any) -> Any:
        score_options = {"score": score} if case.layer == "linen" else {}
        return decode.apply(
            {**params, "cache": state}, x, mask=mask, mutable=["cache"], **score_options
        )

    results, start = [], 0
    for size in case.pieces:
        end = start + size
        score_options = score(start, end) if case.layer == "linen" else ()
        piece, changed = step(state, x[:, start:end], mask(start, end), score_options)
        state, start = changed["cache"], end
        results.append(np.asarray(piece))
    return np.asarray(out), results


def _nnx(case: Decoding, x: np.ndarray, mask: Any, score: Any) -> tuple[np.ndarray, list]:
    attend = functools.partial(
        fa.nnx.attention_fn, score=score(0, 1), implementation=case.implementation
    )
    options: dict[str, Any] = {
        "num_heads": case.heads,
        "in_features": x.shape[-1],
        "qkv_features": case.heads * case.head_dim,
        "attention_fn": attend,
    }
    layer: Any = nnx.MultiHeadAttention
    if case.layer == "nnx":
        layer = fa.nnx.MultiHeadAttention
        options |= {"num_kv_heads": case.kv_heads}
    whole = mask(0, case.length)
    whole = fa.Causal() if whole is None else whole & fa.Causal()
    out = layer(decode=False, rngs=nnx.Rngs(case.seed), **options)(jnp.asarray(x), mask=whole)
    decode = layer(decode=True, rngs=nnx.Rngs(case.seed), **options)
    decode.init_cache(x.shape)
    step = nnx.jit(lambda decode, x, mask: decode(x, mask=mask))
    tokens = range(case.length)
    results = [np.asarray(step(decode, x[:, i : i + 1], mask(i, i + 1))) for i in tokens]
    return np.asarray(out), results
