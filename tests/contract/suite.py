"""The contract: one check, run by every implementation on every case that it supports."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from tests.contract import dense
from tests.contract.cases import Case
from tests.contract.dense import Truth
from tests.contract.rule import assert_within_rule
from tests.support.hopper import asking_first


def value_and_gradients(
    case: Case,
    implementation: str,
    gradients: bool = True,
    on_cache: bool = False,
    deterministic: bool = False,
    quantized: str | None = None,
) -> Callable:
    """(q, k, v, dout, dlse) -> out, lse, dq, dk, dv; or out and lse alone. `on_cache`: by a cache that is full, or one
    of 8 bits to which k and v are appended."""
    mask = case.mask(case)[0] if case.mask else None
    score = case.score(case)[0] if case.score else None

    options: dict[str, Any] = {"mask": mask, "score": score, "scale": case.scale}
    options |= {"return_lse": True, "implementation": implementation}

    def attend(q: Any, k: Any, v: Any) -> tuple:
        if on_cache:
            cache = fa.Cache(k, v, jnp.full(case.batch, case.kv_len))
            if quantized is not None:
                cache = in_8_bits(case, k, v, quantized)
            # Without them the queries are the last tokens, as they are here if they are as many as keys.
            given = {} if case.q_len == case.kv_len else {"q_positions": jnp.arange(case.q_len)}
            return fa.cached_attention(q, cache, **given, **options)
        return fa.flash_attention(q, k, v, deterministic_gradients=deterministic, **options)

    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any) -> tuple:
        if not gradients:
            return attend(q, k, v)
        (out, lse), pull = jax.vjp(attend, q, k, v)
        return (out, lse, *pull((dout, jnp.where(jnp.isfinite(lse), dlse, 0))))

    return asking_first()(run) if case.asks_first else run


def in_8_bits(case: Case, k: Any, v: Any, quantized: str) -> fa.Cache:
    """The cache that k and v are appended to."""
    dims = {"head_dim": k.shape[-1], "value_dim": v.shape[-1]}
    cache = fa.Cache.zeros(case.batch, case.kv_len, kv_heads=case.kv_heads, dtype=quantized, **dims)
    return cache.append(k, v)


def expected(case: Case, inputs: list) -> tuple[Truth, Truth]:
    """The truth, and dense attention in the inputs' dtype."""
    mask = case.mask(case)[1] if case.mask else None
    score = case.score(case)[1] if case.score else None
    options = {"mask": mask, "score": score, "scale": case.scale}
    return dense.truth(*inputs, **options), dense.same_dtype(*inputs, **options)


def poison(case: Case, inputs: list, value: float) -> list:
    """Puts `value` where it must not matter: keys that no query sees, queries that see no key."""
    if case.mask is None:
        return inputs
    q, k, v, dout, dlse = (np.array(x) for x in inputs)
    visible = case.mask(case)[1]
    dead_keys = ~visible.any((1, 2))  # [B, S]
    dead_queries = ~visible.any(-1)  # [B, N, T]
    by_row = np.moveaxis(dead_queries, 1, 2)  # [B, T, N]
    k[dead_keys], v[dead_keys] = value, value
    q[by_row], dout[by_row], dlse[dead_queries] = value, value, value
    return [q, k, v, dout, dlse]


def poison_neighbors(inputs: list) -> list:
    """NaN in all batch entries but the first: an entry's rows follow those of the entry before."""
    entry = np.arange(len(inputs[0]))
    return [
        np.where(entry.reshape(-1, *[1] * (x.ndim - 1)) == 0, x, x.dtype.type(np.nan))
        for x in inputs
    ]


def arrangements(case: Case, inputs: list, interpreted: bool) -> list[tuple[str, list, slice]]:
    """Return the inputs of a case, and the batch entries that are compared with the expected."""
    clean, dead = ("", inputs, slice(None)), poison(case, inputs, float("nan"))
    poisoned = [(", poisoned with NaN", dead, slice(None))] if case.mask is not None else []
    if not interpreted:
        beside = [(", beside NaN", poison_neighbors(inputs), slice(1))] if case.batch > 1 else []
        return [clean, *poisoned, *beside]
    # Interpreting takes long: one run has all the NaN, and those that it lacks are in another.
    if case.batch > 1:
        return [clean, (", beside NaN", poison_neighbors(dead), slice(1))]
    return poisoned or [clean]


def check(
    case: Case,
    *implementations: str,
    jit: Callable = jax.jit,
    gradients: bool = True,
    on_cache: bool = False,
    deterministic: bool = False,
    quantized: str | None = None,
) -> None:
    """Values and gradients of each, on clean inputs and with NaN where nobody may look.

    `jit` is that of JAX or of the interpreter; `on_cache` calls `cached_attention`, on a cache of 8 bits if
    `quantized`, without gradients: the truth is then that of the keys and values that it stands for. If
    `deterministic`, gradients are summed in one order.
    """
    inputs = case.inputs()
    if quantized is None:
        goal, unfused = expected(case, inputs)
    else:
        q, k, v, *rest = inputs
        appended = jit(lambda k, v: in_8_bits(case, k, v, quantized))(k, v)
        # as the product of two arrays, in float64
        k, v = (
            np.asarray(x, np.float64) * np.moveaxis(np.asarray(scale, np.float64), 1, 2)[..., None]
            for x, scale in ((appended.key, appended.k_scale), (appended.value, appended.v_scale))
        )
        goal, _ = expected(case, [q, k, v, *rest])
        k, v = (x.astype(case.dtype) for x in (k, v))
        _, unfused = expected(case, [q, k, v, *rest])
    for implementation in implementations:
        interpreted = implementation == "hopper" and jit is not jax.jit
        runs = arrangements(case, inputs, interpreted)
        call = jit(
            value_and_gradients(case, implementation, gradients, on_cache, deterministic, quantized)
        )
        for where, arrays, entries in runs:
            results = zip(Truth._fields, call(*arrays), unfused, goal, strict=gradients)
            for name, *of in results:
                what = f"{implementation} {case}{where}"
                if quantized is not None and name == "lse":
                    # that of keys which were rounded to the dtype of queries
                    name, of[0] = "lse of rounded keys", np.asarray(of[0]).astype(case.dtype)
                assert_within_rule(name, what, *(x[entries] for x in of))
