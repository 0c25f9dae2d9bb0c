"""Calls on a cache with each mask, score and layout, against dense attention on each sequence's keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.planning.cached_plan import make_cached_plan
from tests.support import cached, interpreter
from tests.support.hopper import H200, planned_for

LAYOUTS = {
    "one": lambda **options: cached.make(1, **options),
    "several": lambda **options: cached.make(7, **options),
    "paged": lambda **options: cached.make(3, paged=True, **options),
    "packed": lambda **options: cached.make(None, **options),
    "packed_paged": lambda **options: cached.make(None, paged=True, **options),
}
_RNG = np.random.default_rng(7)
BATCH = len(cached.LENGTHS)
SINKS = np.array([0.3, -1.0, 2.0, -np.inf], np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
PREFIX = np.array([2, 3, 4, 0])
IMAGE = _RNG.integers(0, 3, (BATCH, cached.CAPACITY))
KEY_BIAS = _RNG.standard_normal((BATCH, 1, 1, cached.CAPACITY)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Feature:
    """The options of a call, and the same for `cached.dense`."""

    options: Callable[[cached.Problem], dict[str, Any]]
    dense: Callable[[cached.Problem], dict[str, Any]]


def constant(options: dict, **dense: Any) -> Feature:
    return Feature(lambda problem: options, lambda problem: dense)


def query_data(problem: cached.Problem) -> np.ndarray:
    shape = (problem.tokens,) if problem.is_packed else (BATCH, problem.tokens)
    return np.arange(np.prod(shape)).reshape(shape) % 3


def _of_query(problem: cached.Problem, b: int, row: int) -> int:
    data = query_data(problem)
    return data[row] if problem.is_packed else data[b, row]


def _positions(problem: cached.Problem) -> np.ndarray:
    shape = (problem.tokens,) if problem.is_packed else (BATCH, problem.tokens)
    return (np.arange(np.prod(shape)) * 5 % 11).reshape(shape)


def pairs(problem: cached.Problem) -> np.ndarray:
    shape = problem.tokens, cached.CAPACITY
    return np.random.default_rng(1).standard_normal((BATCH, cached.HEADS, *shape)).astype("f")


@fa.mask_fn
def same_image(q: Any, k: Any) -> Any:
    return q.image == k.image


def alibi(s: np.ndarray, b: int, row: int, q: int, k: np.ndarray) -> np.ndarray:
    return s - SLOPES[:, None] * abs(q - k)


FEATURES = {
    "causal": constant({}),
    "no_mask": constant({"mask": None}, visible=lambda b, row, q, k: k >= 0),
    "window": constant(
        {"mask": fa.SlidingWindow(3)}, visible=lambda b, row, q, k: (k <= q) & (q - k < 3)
    ),
    "window_of_data": constant(
        {"mask": fa.Causal() & fa.Window(jnp.int32(4))},
        visible=lambda b, row, q, k: (k <= q) & (q - k <= 4),
    ),
    "prefix": constant(
        {"mask": fa.Prefix(PREFIX) | fa.Causal()},
        visible=lambda b, row, q, k: (k <= q) | (k < PREFIX[b]),
    ),
    "streaming": constant(
        {"mask": fa.Causal() & (fa.Prefix(2) | fa.Window(3))},
        visible=lambda b, row, q, k: (k <= q) & ((k < 2) | (q - k <= 3)),
    ),
    "nothing": constant(
        {"mask": lambda q, k: q.index < 0}, visible=lambda b, row, q, k: np.full(k.shape, q < 0)
    ),
    "token_data": Feature(
        lambda problem: {
            "mask": same_image(q_tokens={"image": query_data(problem)}, k_tokens={"image": IMAGE})
        },
        lambda problem: {"visible": lambda b, row, q, k: IMAGE[b, k] == _of_query(problem, b, row)},
    ),
    "soft_cap": constant(
        {"score": fa.soft_cap(0.7)}, score=lambda s, b, row, q, k: 0.7 * np.tanh(s / 0.7)
    ),
    "alibi": constant({"score": fa.alibi(SLOPES)}, score=alibi),
    "key_bias": constant(
        {"score": fa.bias(KEY_BIAS)}, score=lambda s, b, row, q, k: s + KEY_BIAS[b, 0, 0, k]
    ),
    "bias": Feature(
        lambda problem: {"score": fa.bias(pairs(problem))},
        lambda problem: {"score": lambda s, b, row, q, k: s + pairs(problem)[b, :, row, k].T},
    ),
    "scale": constant({"scale": 0.1}, scale=0.1),
    "sinks": constant({"sinks": SINKS}, sinks=SINKS),
    "positions": Feature(
        lambda problem: {"q_positions": _positions(problem), "score": fa.alibi(SLOPES)},
        lambda problem: {"positions": _positions(problem).ravel(), "score": alibi},
    ),
}


def spec_of(problem: cached.Problem, **options: Any) -> Any:
    return parse_cached(problem.query, problem.cache, queries=problem.queries, **options)


def check(
    problem: cached.Problem, implementation: str | None, feature: Feature, tolerance: float = 2e-6
) -> None:
    def run(query: Any, cache: Any, queries: Any) -> Any:
        return fa.cached_attention(
            query, cache, queries=queries, return_lse=True, implementation=implementation,
            **feature.options(problem),
        )  # fmt: skip

    out, lse = interpreter.run(run, problem.query, problem.cache, problem.queries)
    expected_out, expected_lse = cached.dense(problem, **feature.dense(problem))
    assert out.dtype == problem.query.dtype and lse.dtype == np.float32
    np.testing.assert_allclose(problem.flatten(out), expected_out, rtol=0, atol=tolerance)
    lse = problem.flatten(lse, heads_first=True)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=tolerance)


def on_the_kernel(layout: str, **options: Any) -> cached.Problem:
    return LAYOUTS[layout](dtype=jnp.bfloat16, dims=(64, 128), page=8, **options)


def check_on_the_kernel(problem: cached.Problem, feature: Feature, device: Any = H200) -> None:
    """Interpreted, with what it claims to support."""
    spec, _ = spec_of(problem, **feature.options(problem))
    plan = make_cached_plan(spec, device)
    assert plan.reads_cache and plan.implementation == ("hopper" if device.is_sm90 else "ampere")
    with planned_for(device._replace(num_sms=2)):
        check(problem, None, feature, tolerance=0.02)
