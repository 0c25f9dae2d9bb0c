"""Score functions on the Hopper kernels: values, and gradients of all that they read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from tests.contract.rule import assert_within_rule
from tests.support import interpreter
from tests.support.hopper import planned_for_h200

B, N, K = 2, 4, 2


class Case(NamedTuple):
    make: Callable  # data -> score
    data: tuple[str, ...] = ()
    mask: Any = None


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


def infinite_in_the_padding(d: dict) -> Any:
    return fa.score_fn(lambda s, q, k: s / (k.b * k.b) + 1 / q.a)(
        q_tokens={"a": 2 + jnp.tanh(d["a"])}, k_tokens={"b": 2 + jnp.tanh(d["b"])}
    )


def documents(q: Any, k: Any) -> Any:
    return q.index // 70 == k.index // 70


ALL = "cap", "scale", "a", "b"
CASES = {
    "cap": Case(lambda d: fa.soft_cap(2.0)),
    "cap_causal": Case(lambda d: fa.soft_cap(2.0), mask=fa.Causal()),
    "learned_cap": Case(learned_cap, ALL),
    "learned_cap_causal_end": Case(learned_cap, ALL, fa.Causal(align="end")),
    "learned_cap_documents": Case(learned_cap, ALL, fa.mask_fn(documents)),
    "relative": Case(relative, ("scale", "b", "slope"), fa.Causal()),
    "elementary": Case(elementary),
    "elementary_documents": Case(elementary, mask=fa.mask_fn(lambda q, k: k.index <= q.index + 90)),
    "infinite_in_the_padding": Case(infinite_in_the_padding, ("a", "b")),
}


def inputs(t: int, s: int, head_dim: int) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = ((B, t, N), (B, s, K), (B, s, K), (B, t, N))
    arrays = [
        jax.random.normal(key, (*shape, head_dim), jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=False)
    ]
    data = {
        "cap": jnp.float32(2.0),
        "scale": jnp.linspace(0.1, 0.5, N).astype(jnp.bfloat16),
        "slope": jnp.linspace(0.01, 0.2, N),
        "a": jax.random.normal(keys[4], (B, t)),
        "b": jax.random.normal(keys[5], (s,)),
    }
    return arrays, data


def check(name: str, t: int, s: int, head_dim: int, run: Callable = lambda fn, *x: jax.jit(fn)(*x)):
    """Errors are at most twice those of `blockwise` in bfloat16.

    (Not those of dense attention: delta comes from the rounded output, in every FlashAttention, and the
    gradients of data of a row sum that error over all its keys.)
    """
    case = CASES[name]
    arrays, data = inputs(t, s, head_dim)
    data = {field: data[field] for field in case.data}

    def attend(implementation: str) -> Callable:
        def of(q: Any, k: Any, v: Any, dout: Any, data: Any) -> Any:
            def forward(q: Any, k: Any, v: Any, data: Any) -> Any:
                return fa.flash_attention(
                    q, k, v, mask=case.mask, score=case.make(data), return_lse=True,
                    implementation=implementation,
                )  # fmt: skip

            (out, lse), pull = jax.vjp(forward, q, k, v, data)
            dlse = jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0)
            return {"out": out, "lse": lse, "gradients": pull((dout, dlse))}

        return of

    def wide(x: Any) -> Any:
        return jax.tree.map(lambda y: y.astype(jnp.float32), x)

    got = run(attend("hopper"), *arrays, data)
    unfused = jax.jit(attend("blockwise"))(*arrays, data)
    goal = jax.jit(attend("reference"))(*wide(arrays), wide(data))
    for (path, x), y, z in zip(
        jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (unfused, goal)), strict=True
    ):
        assert x.shape == y.shape and x.dtype == y.dtype
        what = jax.tree_util.keystr(path)
        if "gradients" in what:  # sums of what has the errors of the inputs' dtype
            x = x.astype(jnp.bfloat16)
        assert_within_rule(what, name, x, y, np.asarray(z, np.float64))


# Every kernel once; the device runs all cases.
@pytest.mark.parametrize(
    "name, t, s, head_dim",
    [
        ("learned_cap_causal_end", 150, 75, 64),
        ("learned_cap_documents", 75, 75, 128),
        ("infinite_in_the_padding", 70, 101, 256),
    ],
)
def test_scores_interpreted(name: str, t: int, s: int, head_dim: int) -> None:
    with planned_for_h200(cores=3):
        check(name, t, s, head_dim, interpreter.run)


ON_A_GPU = [
    *((name, 128) for name in CASES),
    *((name, head_dim) for name in ("cap_causal", "elementary") for head_dim in (64, 256)),
    ("learned_cap", 64),
    ("learned_cap_documents", 256),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, head_dim", ON_A_GPU)
def test_scores_on_a_gpu(name: str, head_dim: int) -> None:
    check(name, 261, 139, head_dim)
