"""Score functions on the Hopper kernels: values, and gradients of all that they read."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.sm90 import support
from tests.contract.rule import assert_as_dense, assert_within_rule
from tests.support import compile_gate, interpreter, masks
from tests.support.hopper import planned_for_h200, rounded_as_in_kernels
from tests.support.tiers import slow

B = 2


class Case(NamedTuple):
    make: Callable  # data -> score
    data: tuple[str, ...] = ()
    mask: Callable = lambda data: None  # data -> mask
    drops: float = 0.0
    places: tuple[int, int] | None = None  # strides of the positions of queries and keys


def learned_cap(d: dict) -> Any:
    """Reads data of every kind."""
    fn = fa.score_fn(
        lambda s, q, k, c: c.cap * jnp.tanh(s * (1 + c.scale.astype(s.dtype)) / c.cap) + q.a * k.b
    )
    tokens = {"q_tokens": {"a": d["a"]}, "k_tokens": {"b": d["b"]}}
    return fn(params={"cap": d["cap"]}, heads={"scale": d["scale"]}, **tokens)


def relative(d: dict) -> Any:
    fn = fa.score_fn(lambda s, q, k, c: s - c.scale.astype(s.dtype) * jnp.log1p(k.b * k.b))
    return fn(k_tokens={"b": d["b"]}, heads={"scale": d["scale"]}), fa.alibi(d["slope"])


def elementary(d: dict) -> Any:
    """The functions that the kernels form themselves; and pairs that a score hides."""

    def fn(s: Any, q: Any, k: Any) -> Any:
        angle = (q.index - k.index).astype(s.dtype) * 0.37
        s = (
            s
            + jnp.sin(angle) * jnp.cos(angle)
            + jax.nn.sigmoid(s)
            - jnp.expm1(-abs(s)) / (1 + s**2)
        )
        return jnp.where((k.index % 7 == 0) | (k.index < 70), -jnp.inf, s)

    return fa.score_fn(fn)


def far(d: dict) -> Any:
    """Hides near keys: those of the blocks that a mask cuts, of which the first queries have no others."""
    return fa.score_fn(lambda s, q, k: jnp.where(q.index - k.index < 80, -jnp.inf, s))


def infinite_in_the_padding(d: dict) -> Any:
    return fa.score_fn(lambda s, q, k: s / (k.b * k.b) + 1 / q.a)(
        q_tokens={"a": 2 + jnp.tanh(d["a"])}, k_tokens={"b": 2 + jnp.tanh(d["b"])}
    )


def scaled_by_pairs(d: dict) -> Any:
    """Floats of 16 bits, and integers."""
    fn = fa.score_fn(
        lambda s, q, k, c: s * (1 + 0.1 * c.narrow.astype(s.dtype)) + (c.n % 3).astype(s.dtype)
    )
    return fn(pairs={"narrow": d["narrow"], "n": d["number"]})


def biased_by_tokens(d: dict) -> Any:
    """Biases that vary with keys alone, with queries and heads, and with heads."""
    return tuple(fa.bias(d[name]) for name in ("of_keys", "of_queries", "of_heads"))


def documents(_: dict) -> Any:
    return fa.mask_fn(lambda q, k: q.index // 70 == k.index // 70)


def holes(d: dict) -> Any:
    return fa.Dense(d["number"] % 5 < 2)


def causal(_: dict) -> Any:
    return fa.Causal()


def causal_end(_: dict) -> Any:
    return masks.causal_end


ALL = "cap", "scale", "a", "b"
CASES = {
    "cap": Case(lambda d: fa.soft_cap(2.0)),
    "cap_causal": Case(lambda d: fa.soft_cap(2.0), mask=causal),
    "learned_cap": Case(learned_cap, ALL),
    "learned_cap_causal_end": Case(learned_cap, ALL, causal_end),
    "learned_cap_documents": Case(learned_cap, ALL, documents),
    "relative": Case(relative, ("scale", "b", "slope"), causal),
    "elementary": Case(elementary),
    "elementary_ahead": Case(
        elementary, mask=lambda _: fa.mask_fn(lambda q, k: k.index <= q.index + 90)
    ),
    "far_causal": Case(far, mask=causal),
    "far_documents": Case(
        far, mask=lambda d: fa.Causal() & (lambda q, k: q.index // 170 == k.index // 170)
    ),
    "biased": Case(lambda d: fa.bias(d["wide"]), ("wide",)),
    "biased_causal_end": Case(lambda d: fa.bias(d["wide"]), ("wide",), causal_end),
    "biased_in_16_bits": Case(lambda d: fa.bias(d["pairs_of_heads"]), ("pairs_of_heads",)),
    "biased_in_16_bits_causal": Case(
        lambda d: fa.bias(d["pairs_of_heads"]), ("pairs_of_heads",), causal
    ),
    "biased_and_capped_holes": Case(
        lambda d: (fa.bias(d["narrow"]), fa.soft_cap(3.0)), ("narrow", "number"), holes
    ),
    "biased_by_tokens": Case(biased_by_tokens, ("of_keys", "of_queries", "of_heads"), documents),
    "dropped": Case(lambda _: None, drops=0.25),
    "dropped_capped_causal_end": Case(lambda _: fa.soft_cap(2.0), mask=causal_end, drops=0.5),
    "dropped_at_places": Case(learned_cap, ALL, documents, drops=0.1, places=(5, 3)),
    "dropped_biased": Case(lambda d: fa.bias(d["narrow"]), ("narrow",), causal, drops=0.25),
    "scaled_by_pairs": Case(scaled_by_pairs, ("narrow", "number")),
    "infinite_in_the_padding": Case(infinite_in_the_padding, ("a", "b")),
}


def inputs(
    t: int, s: int, head_dim: int, heads: tuple[int, int]
) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 13)
    n, k = heads
    shapes = ((B, t, n), (B, s, k), (B, s, k), (B, t, n))
    arrays = [
        jax.random.normal(key, (*shape, head_dim), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    data = {
        "cap": jnp.float32(2.0),
        "scale": jnp.linspace(0.1, 0.5, n).astype(jnp.bfloat16),
        "slope": jnp.linspace(0.01, 0.2, n),
        "a": jax.random.normal(keys[4], (B, t)),
        "b": jax.random.normal(keys[5], (s,)),
        "wide": jax.random.normal(keys[6], (1, n, t, s)),
        "narrow": jax.random.normal(keys[7], (B, 1, t, s), jnp.bfloat16),
        "number": jax.random.randint(keys[8], (t, s), 0, 1000),
        "of_keys": jax.random.normal(keys[9], (B, 1, 1, s)),
        "of_queries": jax.random.normal(keys[10], (n, t, 1)),
        "of_heads": jax.random.normal(keys[11], (B, n, 1, 1), jnp.bfloat16),
        "pairs_of_heads": jax.random.normal(keys[12], (1, n, t, s), jnp.bfloat16),
    }
    return arrays, data


def compiled(fn: Callable, *args: Any) -> Any:
    return jax.jit(fn)(*args)


def check(
    name: str,
    t: int,
    s: int,
    head_dim: int,
    heads: tuple[int, int] = (4, 2),
    run: Callable = compiled,
    implementation: str = "hopper",
) -> None:
    """Errors are at most three times those of `blockwise` that rounds what every FlashAttention rounds.

    (Not those of dense attention: the gradients of data of a row sum the error of delta over all its keys.)
    """
    case = CASES[name]
    arrays, data = inputs(t, s, head_dim, heads)
    places = case.places and [
        jnp.arange(n, dtype=jnp.int32) * stride
        for n, stride in zip((t, s), case.places, strict=True)
    ]
    options = {"dropout_rate": case.drops, "dropout_rng": jax.random.key(1)}
    if places:
        options |= {"q_positions": places[0], "kv_positions": places[1]}
    integers = {field: x for field, x in data.items() if jnp.issubdtype(x.dtype, jnp.integer)}
    data = {field: data[field] for field in case.data if field not in integers}

    def attend(implementation: str) -> Callable:
        def of(q: Any, k: Any, v: Any, dout: Any, data: Any) -> Any:
            def forward(q: Any, k: Any, v: Any, data: Any) -> Any:
                data = data | integers
                return fa.flash_attention(
                    q, k, v, mask=case.mask(data), score=case.make(data), return_lse=True,
                    implementation=implementation, **options,
                )  # fmt: skip

            (out, lse), pull = jax.vjp(forward, q, k, v, data)
            dlse = jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0)
            return {"out": out, "lse": lse, "gradients": pull((dout, dlse))}

        return of

    def wide(x: Any) -> Any:
        return jax.tree.map(lambda y: y.astype(jnp.float32), x)

    got = run(attend(implementation), *arrays, data)
    with rounded_as_in_kernels():
        unfused = run(attend("blockwise"), *arrays, data)
    goal = run(attend("reference"), *wide(arrays), wide(data))
    for (path, x), y, z in zip(
        jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (unfused, goal)), strict=True
    ):
        assert x.shape == y.shape and x.dtype == y.dtype
        what = jax.tree_util.keystr(path)
        if "gradients" in what:  # sums of what has the errors of the inputs' dtype
            x, y = (found.astype(jnp.bfloat16) for found in (x, y))
        assert_within_rule(what, name, x, y, np.asarray(z, np.float64), factor=3)


# Every kernel once; the device runs all cases.
@pytest.mark.parametrize(
    "name, t, s, head_dim",
    [
        slow("learned_cap_causal_end", 150, 75, 64),
        slow("learned_cap_documents", 75, 75, 128),
        ("infinite_in_the_padding", 70, 101, 256),
        ("biased_and_capped_holes", 70, 139, 64),
        slow("biased_causal_end", 70, 75, 128),
        ("biased_in_16_bits", 70, 75, 64),
        slow("dropped_capped_causal_end", 70, 75, 128),
        ("dropped_at_places", 70, 75, 64),
        ("dropped", 70, 75, 256),
        ("elementary", 70, 75, 192),
    ],
)
def test_scores_interpreted(name: str, t: int, s: int, head_dim: int) -> None:
    with planned_for_h200(cores=2):  # a CTA takes two tiles or more
        check(name, t, s, head_dim, (2, 1), interpreter.run)


@pytest.mark.parametrize(
    "batch, limit, of",
    [(3, 2, jnp.bfloat16), slow(2, 1, jnp.bfloat16), slow(4, 3, jnp.float32)],
)
def test_the_gradient_of_a_bias_that_several_launches_share(
    batch: int, limit: int, of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch of few entries finds has another form."""
    monkeypatch.setattr(support, "batch_limit", lambda spec: limit)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (batch, 33, 2, 64), jnp.bfloat16) for key in keys[:3]]
    bias = jax.random.normal(keys[3], (1, 2, 33, 33), of)

    def slopes(implementation: str) -> Any:
        def loss(bias: Any, *arrays: Any) -> Any:
            out = fa.flash_attention(*arrays, score=fa.bias(bias), implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1))

    with planned_for_h200(cores=2):
        got = interpreter.run(slopes("hopper"), bias, *arrays)
    assert_as_dense(got, slopes("reference"), [bias, *arrays], run=interpreter.run)


@pytest.mark.parametrize("mapped", [None, slow(0)])
def test_the_gradient_of_a_bias_that_a_batch_shares_under_vmap(mapped: int | None) -> None:
    """There every entry has a copy of the bias, whose gradients are added up."""
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (2, 3, 33, 1, 64), jnp.bfloat16) for key in keys[:3]]
    bias = jax.random.normal(keys[3], (2, 1, 33, 33))
    bias = bias if mapped == 0 else bias[0]

    def slopes(implementation: str) -> Callable:
        def loss(bias: Any, *arrays: Any) -> Any:
            out = fa.flash_attention(*arrays, score=fa.bias(bias), implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.vmap(jax.grad(loss), (mapped, 0, 0, 0))

    with planned_for_h200():
        got = interpreter.run(slopes("hopper"), bias, *arrays)
    assert_as_dense(got, slopes("reference"), [bias, *arrays], run=interpreter.run)


@pytest.mark.slow
def test_the_thread_that_copies_stays_with_its_warp() -> None:
    """Where a sequence ends within 8 rows: ptxas had it meet the others behind the loop over keys."""
    arrays, data = inputs(261, 139, 128, (4, 2))

    def attend(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return fa.flash_attention(q, k, v, mask=fa.Window(60), score=fa.bias(bias))

    with planned_for_h200():
        reports = compile_gate.compile_for_h200(attend, *arrays[:3], data["narrow"])
    (report,) = (x for x in reports if x.name == "attention")
    compile_gate.assert_clean(dataclasses.replace(report, spill_stores=0, spill_loads=0))


ON_A_GPU = [
    *((name, 128) for name in CASES),
    *((name, head_dim) for name in ("cap_causal", "elementary") for head_dim in (64, 192, 256)),
    ("learned_cap", 64),
    ("learned_cap_documents", 256),
    *((name, 64) for name in ("biased_causal_end", "biased_and_capped_holes", "scaled_by_pairs")),
    ("biased", 80),
    *((name, head_dim) for name in ("dropped", "dropped_at_places") for head_dim in (64, 256)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, head_dim", ON_A_GPU)
def test_scores_on_a_gpu(name: str, head_dim: int) -> None:
    check(name, 261, 139, head_dim)
