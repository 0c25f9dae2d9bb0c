"""What compiles again and what does not: code is known by its jaxpr, data by shape and dtype."""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import pytest

import pallas_fa2 as fa
from pallas_fa2.autodiff import attention
from pallas_fa2.backends.sm90 import backend
from tests.support.compilations import compilations
from tests.support.hopper import planned_for_h200
from tests.support.masks import causal_end
from tests.support.program_keys import CALLS, program_keys

B, T, N, K, H = 2, 40, 4, 2, 64


def qkv() -> list[jax.Array]:
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H))
    return [
        jax.random.normal(
            jax.random.key(i), s, jnp.bfloat16
        )  # float32 would take the kernels of `ampere`
        for i, s in enumerate(shapes)
    ]


def data(seed: int) -> dict[str, jax.Array]:
    """All that a call may read at run time."""
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "ids": jnp.sort(jax.random.randint(keys[0], (B, T), 0, 4)),
        "lengths": jax.random.randint(keys[1], (B,), 1, T),
        "window": jnp.int32(5 + seed),
        "positions": jnp.arange(T) + seed,
        "slope": jax.random.normal(keys[2], (N,)),
        "cap": 1 + jax.random.uniform(keys[3]),
    }


def differentiate(implementation: str, q: Any, k: Any, v: Any, data: Any, reach: int = 1) -> Any:
    """Gradients of q and of what the scores read, under functions that are new in each call."""
    reaches = fa.mask_fn(lambda q, k: q.index >= k.index - reach)
    mask = reaches & fa.Segments(data["ids"]) & fa.Lengths(kv=data["lengths"])
    capped = fa.score_fn(lambda s, q, k, c: c.cap * jnp.tanh(s / c.cap))

    def loss(q: Any, slope: Any, cap: Any) -> Any:
        out = fa.flash_attention(
            q, k, v,
            mask=mask & fa.Window(data["window"]),
            score=(capped(params={"cap": cap}), fa.alibi(slope)),
            q_positions=data["positions"],
            kv_positions=data["positions"],
            implementation=implementation,  # type: ignore[arg-type]
        )  # fmt: skip
        return out.astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))(q, data["slope"], data["cap"])


def test_fresh_functions_and_new_data_compile_nothing() -> None:
    arrays, several = qkv(), [data(seed) for seed in range(3)]
    with compilations() as seen:
        first = differentiate("blockwise", *arrays, several[0])
        assert seen, "the listener hears nothing"
        seen.clear()
        others = [differentiate("blockwise", *arrays, x) for x in several[1:]]
        assert not seen
    for other in others:
        assert not jnp.array_equal(first[0], other[0])


def test_fresh_functions_and_new_data_build_no_kernel_again() -> None:
    arrays = qkv()

    def trace(seed: int, reach: int = 1) -> None:
        jax.eval_shape(lambda *x: differentiate("hopper", *x, reach=reach), *arrays, data(seed))

    forward, backward = backend.attention, backend.gradients
    with (
        planned_for_h200(),
        mock.patch.object(backend, "attention", wraps=forward) as forwards,
        mock.patch.object(backend, "gradients", wraps=backward) as backwards,
    ):
        trace(0)
        built = forwards.call_count, backwards.call_count
        assert min(built) >= 1
        trace(1)
        trace(2)
        assert (forwards.call_count, backwards.call_count) == built
        trace(0, reach=2)
        assert forwards.call_count > built[0] and backwards.call_count > built[1]


def test_a_call_with_its_gradient_traces_each_kernel_once() -> None:
    def loss(q: Any, k: Any, v: Any) -> jax.Array:
        out = fa.flash_attention(q, k, v, mask=fa.Window(9, 3), implementation="hopper")
        return out.astype(jnp.float32).sum()

    forward, backward = backend.attention, backend.gradients
    with (
        planned_for_h200(),
        mock.patch.object(backend, "attention", wraps=forward) as forwards,
        mock.patch.object(backend, "gradients", wraps=backward) as backwards,
    ):
        jax.jit(jax.value_and_grad(loss)).trace(*qkv())
    assert (forwards.call_count, backwards.call_count) == (1, 1)


@fa.mask_fn
def image_text(q: Any, k: Any) -> Any:
    return (q.index >= k.index) | (q.image == k.image)


@fa.score_fn
def tempered(s: Any, q: Any, k: Any, c: Any) -> Any:
    return s * c.temperature


@pytest.mark.parametrize("implementation", ["blockwise", "hopper"])
def test_masks_and_scores_are_arguments_of_one_trace(implementation: str) -> None:
    """A user's jitted step takes the objects themselves."""
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(q: Any, k: Any, v: Any, mask: Any, score: Any, positions: Any) -> Any:
        def loss(q: Any, score: Any) -> Any:
            out = fa.flash_attention(
                q, k, v, mask=mask, score=score, q_positions=positions,
                kv_positions=positions, implementation=implementation,  # type: ignore[arg-type]
            )  # fmt: skip
            return out.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(q, score)

    def arguments(seed: int) -> tuple:
        x = data(seed)
        mask = image_text(tokens={"image": x["ids"]}) & fa.Window(x["window"], 0)
        mask = (
            mask & fa.Segments(x["ids"]) & (fa.Lengths(kv=x["lengths"]) | fa.Prefix(x["lengths"]))
        )
        score = (tempered(heads={"temperature": x["slope"]}), fa.alibi(x["slope"]))
        return (*qkv(), mask, score, x["positions"])

    with planned_for_h200():
        for seed in range(3):
            if implementation == "hopper":
                step.trace(*arguments(seed))
            else:
                step(*arguments(seed))


def test_what_is_decided_at_trace_time_takes_one_program_each() -> None:
    """Whether tokens take part, and the classes of tiles; operation by operation it took a second."""
    mask = causal_end & fa.mask_fn(lambda q, k: (q.index - k.index) % 5 <= 3)
    attend = functools.partial(fa.flash_attention, mask=mask, implementation="hopper")
    q = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    with planned_for_h200(), compilations() as seen:
        jax.eval_shape(attend, q, q, q)
    assert len(seen) == 2


def test_a_program_is_the_same_whatever_was_lowered_before() -> None:
    """JAX's persistent cache would not find it again, and Mosaic compile its kernels again."""
    full = CALLS["full"]
    first, other = program_keys(full), program_keys(full, length=128)
    assert len(first[0]) > 1 and set(first[0]).isdisjoint(other[0]) and first[1] != other[1]
    assert program_keys(full) == first


def test_a_program_is_the_same_in_every_directory_and_order(tmp_path: pathlib.Path) -> None:
    """A forward is also the same kernel alone and beside its backward, and in a scope of the user's."""
    root = pathlib.Path(__file__).parent.parent
    for package in ("pallas_fa2", "tests"):
        (tmp_path / package).symlink_to(root / package)

    def keys_in(directory: pathlib.Path, *names: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.support.program_keys", *names]
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(directory)}
        done = subprocess.run(
            command, cwd=directory, env=variables, check=True, capture_output=True, timeout=300
        )
        keys = json.loads(done.stdout)
        assert keys.pop("package") == str(directory / "pallas_fa2")
        return keys

    first = keys_in(root, "forward", "both")
    others = keys_in(tmp_path, "full", "scoped", "both", "forward")
    assert {name: others[name] for name in first} == first
    assert first["forward"][0] == first["both"][0][:1]
    assert others["scoped"][0] == first["both"][0]
    assert set(others["full"][0]).isdisjoint(first["forward"][0])


ZEROS = jnp.zeros(T, jnp.int32)
equal_a = fa.mask_fn(lambda q, k: q.a == k.a)


@pytest.mark.parametrize(
    "make",
    [
        fa.Causal,
        lambda: fa.Causal() & ~fa.Window(3) | fa.Chunked(2),
        lambda: fa.Segments(ZEROS),
        lambda: fa.Causal() & equal_a(tokens={"a": ZEROS}),
        lambda: fa.soft_cap(3.0),
    ],
)
def test_masks_and_scores_of_the_same_code_and_arrays_are_equal(make: Callable) -> None:
    assert make() == make() and hash(make()) == hash(make())
    assert make() != causal_end


def test_other_numbers_and_arrays_make_other_masks() -> None:
    assert fa.Window(3) != fa.Window(4)
    assert fa.Segments(ZEROS) != fa.Segments(ZEROS + 0) != "Segments"
    assert fa.mask_fn(lambda q, k: q.index > k.index) != fa.mask_fn(lambda q, k: q.index > k.index)


def test_a_mask_may_be_a_static_argument() -> None:
    @functools.partial(jax.jit, static_argnames="mask")
    @chex.assert_max_traces(n=1)
    def run(q: Any, mask: Any) -> Any:
        return fa.flash_attention(q, q, q, mask=mask)

    q = jnp.ones((1, T, 1, 16))
    run(q, mask=fa.Causal() & fa.Window(3))
    run(q, mask=fa.Causal() & fa.Window(3))


def test_a_fresh_function_does_not_compile_again() -> None:
    q = jnp.ones((1, 8, 1, 8))

    def call(cap: float, shift: int) -> int:
        fa.flash_attention(
            q, q, q,
            mask=lambda q, k: q.index + shift >= k.index,
            score=(lambda s, q, k: s * cap, fa.soft_cap(cap)),
        )  # fmt: skip
        return attention._cache_size()

    first = call(2.0, 1)
    assert call(2.0, 1) == first
    assert call(2.0, 2) == first + 1
    assert call(3.0, 1) == first + 2
