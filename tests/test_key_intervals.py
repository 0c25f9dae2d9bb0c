"""Masks by which the keys that a query sees follow each other: two numbers a query, in the forward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import compile_mods
from pallas_fa2.parse_call import parse_call
from tests.contract.rule import assert_within_rule
from tests.support import compile_gate, interpreter
from tests.support.hopper import planned_for_h200
from tests.support.masks import causal_end
from tests.support.tiers import slow_but

B, T, S, N = 2, 200, 300, 2


def reach(n: int) -> fa.Mask:
    return fa.mask_fn(lambda q, k, c: q.index - k.index <= c.n)(params={"n": jnp.int32(n)})


def by_head(n: Any) -> fa.Mask:
    fn = fa.mask_fn(lambda q, k, c: abs(q.index - k.index) <= c.n)
    return fn(heads={"n": jnp.asarray(n, jnp.int32)})


def chosen(wanted: Any) -> fa.Mask:
    """Causal, but for some queries, which see all keys."""
    fn = fa.mask_fn(lambda q, k: q.wanted | (q.index >= k.index))
    return fn(q_tokens={"wanted": wanted})


RANGES: dict[str, Callable[[], fa.Mask]] = {
    "window": lambda: fa.Causal() & fa.Window(30),
    "both_sides": lambda: fa.Window(3, 70),
    "aligned_at_the_end": lambda: causal_end & fa.Window(100, 7),
    "lengths": lambda: fa.Causal() & fa.Lengths(jnp.array([0, 190]), jnp.array([250, 3])),
    "no_key": lambda: fa.Lengths(kv=jnp.array([0, 300])),
    "prefix": lambda: fa.Causal() | fa.Prefix(jnp.array([150, 0])),
    "far": lambda: fa.Causal() & reach(2**31 - 1),
    "none_is_so_far": lambda: fa.Causal() & reach(-(2**31)),
    "by_head": lambda: by_head([5, 140]) & fa.Causal(),
    "documents": lambda: fa.Documents(np.arange(T) // 50 * 50, np.arange(T) // 50 * 50 + 50),
    "causal_documents": lambda: fa.Causal() & fa.Documents(np.arange(T) // 70 * 70, longest=70),
    "chosen": lambda: chosen(np.arange(T) % 7 == 0),
    "from_the_key": lambda: fa.mask_fn(lambda q, k: k.index - 9 <= q.index),
}
OTHERS: dict[str, Callable[[], fa.Mask]] = {
    "chunked": lambda: fa.Chunked(64),
    "segments": lambda: fa.Causal() & fa.Segments(np.arange(T) // 50, np.arange(S) // 50),
    "two_ranges": lambda: fa.Causal() & (fa.Window(20) | fa.Prefix(4)),
    "data_of_keys": lambda: (fa.mask_fn(lambda q, k: q.index < k.end))(
        k_tokens={"end": np.arange(S)}
    ),
    "not_a_range": lambda: ~(fa.Causal() & fa.Window(30)),
}


def arrays(head_dim: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, N, head_dim), (B, S, 1, head_dim), (B, S, 1, head_dim)
    return [jax.random.normal(*x, jnp.bfloat16) for x in zip(keys, shapes, strict=True)]


def attend(mask: fa.Mask, implementation: str | None, q: Any, k: Any, v: Any) -> tuple:
    return fa.flash_attention(q, k, v, mask=mask, return_lse=True, implementation=implementation)


def check(mask: fa.Mask, results: tuple, args: list[jax.Array]) -> None:
    wide = [x.astype(jnp.float32) for x in args]
    expected, unfused = attend(mask, "reference", *wide), attend(mask, "reference", *args)
    for name, *values in zip(("out", "lse"), results, unfused, expected, strict=True):
        assert_within_rule(name, str(mask), *map(np.asarray, values))


@pytest.mark.parametrize("name", [*RANGES, *OTHERS])
def test_key_intervals_are_recognized(name: str) -> None:
    q, k, v = arrays(64)
    spec, _ = parse_call(q, k, v, mask=(RANGES | OTHERS)[name]())
    described = compile_mods.compile_mask(spec)
    assert described is not None and described.is_key_interval == (name in RANGES)


@pytest.mark.parametrize("name", slow_but(lambda name: name in list(RANGES)[:4], RANGES))
def test_key_intervals_interpreted(name: str) -> None:
    args, mask = arrays(64), RANGES[name]()
    with planned_for_h200(cores=3):
        check(mask, interpreter.run(lambda *x: attend(mask, "hopper", *x), *args), args)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", RANGES)
def test_key_intervals_on_a_gpu(name: str, head_dim: int) -> None:
    args, mask = arrays(head_dim), RANGES[name]()
    check(mask, jax.jit(lambda *x: attend(mask, "hopper", *x))(*args), args)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_column_is_compared(head_dim: int) -> None:
    """Predicates are made of seven bits at a time; another mask takes 64 comparisons and more a block."""

    def compiled(mask: fa.Mask) -> compile_gate.KernelReport:
        spec = jax.ShapeDtypeStruct((1, 4096, 2, head_dim), jnp.bfloat16)
        with planned_for_h200():
            reports = compile_gate.compile_for_h200(
                lambda q, k, v: attend(mask, "hopper", q, k, v), spec, spec, spec
            )
        (report,) = (x for x in reports if x.name == "attention")
        return report

    window = fa.Causal() & fa.Window(300)
    results, different = compiled(window), compiled(window & ~fa.Window(0))
    assert results.count("ISETP") + 2 * 64 < different.count("ISETP")
    compile_gate.assert_clean(results)
