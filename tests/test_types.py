"""The types of results of calls: pyright checks this file (`make lint`), and pytest runs it."""

from typing import assert_type

import jax
import jax.numpy as jnp

import pallas_fa2 as fa

Pair = tuple[jax.Array, jax.Array]
Q = jnp.ones((1, 8, 2, 4))


def test_the_type_has_a_logsumexp_on_request() -> None:
    assert_type(fa.flash_attention(Q, Q, Q, mask=fa.Causal()), jax.Array)
    assert_type(fa.flash_attention(Q, Q, Q, is_causal=True, return_lse=True), Pair)
    assert_type(fa.dot_product_attention(Q, Q, Q, None, fa.Causal()), jax.Array)
    assert_type(fa.dot_product_attention(Q, Q, Q, return_residual=True), Pair)


def test_the_types_of_calls_on_caches() -> None:
    cache = fa.Cache(Q, Q, jnp.array([0]))
    assert_type(cache.append(Q[:, :1], Q[:, :1]), fa.Cache)
    assert_type(fa.cached_attention(Q, cache), jax.Array)
    assert_type(fa.cached_attention(Q, cache, return_lse=True), Pair)
    options: fa.CachedOptions = {"mask": None, "score": fa.soft_cap(1.0)}
    assert_type(fa.cached_attention(Q, cache, **options), jax.Array)
    assert_type(fa.merge((Q, jnp.zeros((1, 2, 8)))), Pair)
    assert_type(fa.explain(Q, cache), fa.CachedExplanation)
    assert_type(fa.explain(Q, Q, Q), fa.Explanation)


def optional_lse(lse: bool) -> None:
    assert_type(fa.flash_attention(Q, Q, Q, return_lse=lse), jax.Array | Pair)


def test_options_can_be_passed_on() -> None:
    options: fa.Options = {"mask": fa.Causal(), "dropout_rate": 0.0, "align": "end"}
    assert_type(fa.flash_attention(Q, Q, Q, **options), jax.Array)
    optional_lse(True)
