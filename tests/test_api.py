"""The public functions: shapes and numbers of their arguments and results, warnings and log lines."""

import functools
import itertools
import logging
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import api, fallback
from tests.support.hopper import A100, H200, planned_for

B, T, S, N, K, H = 2, 13, 10, 4, 2, 16
NEW_LENGTH = itertools.count(20)  # JAX traces derivatives once for each


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QKV = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)


def close(actual, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    chex.assert_trees_all_close(actual, want, rtol=1e-5, atol=3e-6)


def expected(query, key, value):
    """Causal attention of `[T, N, H]`, and its logsumexp."""
    key, value = (np.repeat(x, N // K, 1) for x in (key, value))
    s = np.einsum("tnh,snh->nts", query, key) / math.sqrt(H)
    s = np.where(np.tri(*s.shape[1:], dtype=bool), s, -np.inf)
    lse = np.log(np.sum(np.exp(s), -1))
    return np.einsum("nts,snh->tnh", np.exp(s - lse[..., None]), value), lse


@pytest.mark.parametrize("batch", [(), (2,), (2, 1), (2, 1, 3)], ids=str)
def test_any_number_of_batch_axes(batch):
    qkv = (
        normal(*batch, T, N, H),
        normal(*batch, S, K, H, seed=1),
        normal(*batch, S, K, H, seed=2),
    )
    out, lse = fa.flash_attention(*qkv, mask=fa.Causal(), return_lse=True)
    chex.assert_shape([out, lse], [(*batch, T, N, H), (*batch, N, T)])
    for entry in np.ndindex(*batch):
        want = expected(*(x[entry] for x in qkv))
        chex.assert_trees_all_close((out[entry], lse[entry]), want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("batch", [(0,), (3, 0)], ids=str)
@pytest.mark.parametrize("with_mask", [False, True])
def test_an_empty_batch(batch, with_mask):
    qkv = tuple(jnp.zeros((*batch, n, heads, H)) for n, heads in ((T, N), (S, K), (S, K)))
    mask = fa.Lengths(kv=jnp.zeros(batch, jnp.int32)) if with_mask else None
    out, lse = fa.flash_attention(*qkv, mask=mask, return_lse=True)
    chex.assert_shape([out, lse], [(*batch, T, N, H), (*batch, N, T)])
    gradients = jax.grad(lambda qkv: jnp.sum(fa.flash_attention(*qkv, mask=mask)))(qkv)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradients, qkv)
    assert fa.explain(*qkv, mask=mask).spec.batch == 0


def test_numpy_inputs_give_jax_outputs():
    out, lse = fa.flash_attention(*QKV, mask=fa.Causal(), return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    close((out, lse), fa.flash_attention(*map(jnp.asarray, QKV), mask=fa.Causal(), return_lse=True))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_of_the_outputs(dtype):
    qkv = (jax.ShapeDtypeStruct(x.shape, dtype) for x in QKV)
    out, lse = jax.eval_shape(lambda *qkv: fa.flash_attention(*qkv, return_lse=True), *qkv)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)


def test_lse_is_returned_only_on_request():
    out = jax.eval_shape(fa.flash_attention, *QKV)
    assert out.shape == (B, T, N, H)


def test_a_warning_says_that_float32_is_faster_than_float64(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(api, "device_of", lambda array: H200)
    with jax.enable_x64(True):
        x = jnp.ones((1, 8, 2, 8), jnp.float64)
        with pytest.warns(fa.FallbackWarning, match="not float64.*cast.*dtype=jnp.float32"):
            fa.flash_attention(x, x, x)


def test_a_log_line_for_each_kind_of_call(caplog):
    """When it is traced; nothing is shown unless it is asked for."""

    @jax.jit
    def layers(q, k, v):
        for _ in range(3):
            q = fa.flash_attention(q, k, v, scale=0.7)
        return q + fa.flash_attention(q, k, v, scale=0.7, implementation="reference")

    assert not logging.getLogger("pallas_fa2").isEnabledFor(logging.INFO)
    with caplog.at_level(logging.INFO, "pallas_fa2"):
        for _ in range(2):
            layers(*QKV)
    explanation = fa.explain(*QKV, scale=0.7)
    reasons = "; ".join(f"not {name}: {reason}" for name, reason in explanation.plan.rejected)
    assert [record.getMessage() for record in caplog.records] == [
        f"blockwise runs {explanation.spec}; {reasons}",
        f"reference runs {explanation.spec}",
    ]


SCALES = {
    "python": lambda: 0.3,
    "float32 array": lambda: jnp.float32(0.3),
    "float64 scalar": lambda: np.float64(0.3),
    "array of no axes": lambda: np.asarray(0.3, np.float32),
    "a product": lambda: 0.9 / jnp.sqrt(jnp.float32(9)),
}


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("kind", SCALES)
def test_a_scale_of_any_kind(kind, implementation):
    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))
    run = functools.partial(fa.dot_product_attention, implementation=implementation)
    expected = jax.nn.dot_product_attention(x, x, x, scale=0.3)
    np.testing.assert_allclose(run(x, x, x, scale=SCALES[kind]()), expected, rtol=2e-5, atol=2e-5)
    inside = jax.jit(lambda x: run(x, x, x, scale=SCALES[kind]()))
    np.testing.assert_allclose(inside(x), expected, rtol=2e-5, atol=2e-5)
    traced = jax.jit(lambda x, scale: run(x, x, x, scale=scale))
    np.testing.assert_allclose(traced(x, SCALES[kind]()), expected, rtol=2e-5, atol=2e-5)


def test_a_traced_scale_has_a_gradient():
    x = jax.random.normal(jax.random.key(0), (1, 9, 2, 8))

    def loss(attention, x, scale):
        return jnp.sum(attention(x, x, x, scale=scale) ** 2)

    actual, expected = (
        jax.grad(functools.partial(loss, f), (0, 1))(x, 0.3)
        for f in (fa.dot_product_attention, jax.nn.dot_product_attention)
    )
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_three_axes_broadcast_as_in_jax_nn():
    q = jax.random.normal(jax.random.key(0), (3, 8, 3, 8))
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (3, 8, 8)).at[..., 0].set(True)
    out = fa.dot_product_attention(q, q, q, mask=mask)
    np.testing.assert_allclose(out, fa.dot_product_attention(q, q, q, mask=mask[None]))
    with pytest.raises(ValueError, match="mask must say which axis"):
        fa.flash_attention(q, q, q, mask=mask)
    with pytest.raises(ValueError, match="bias must say which axis"):
        fa.flash_attention(q, q, q, score=fa.bias(jnp.ones((3, 8, 8))))


def test_a_gpu_without_a_fused_kernel_warns_once_for_each_reason(monkeypatch):
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(api, "device_of", lambda array: H200)
    x = jnp.ones((1, 8, 2, 264))
    with pytest.warns(fa.FallbackWarning, match="up to 256, but H is 264"):
        fa.flash_attention(x, x, x)
    fa.flash_attention(x, x, x)  # warnings are errors here
    fa.flash_attention(x, x, x, implementation="blockwise")
    y = jnp.ones((1, 8, 2, 6), jnp.bfloat16)
    with pytest.warns(fa.FallbackWarning, match="multiples of 8"):
        fa.flash_attention(y, y, y)
    with pytest.raises(ValueError, match="'fused' does not support this call: its inputs are"):
        fa.flash_attention(x, x, x, implementation="fused")
    monkeypatch.setattr(fallback, "_warned", set())
    for _ in range(2):
        with pytest.raises(fa.FallbackWarning):
            fa.flash_attention(x, x, x)


# The gradients that blockwise computes of calls whose forward is a fused kernel's: the device, dtype and head dim,
# options, the reason, and whether those of the slopes are needed for it.
SLOW_GRADIENTS = {
    "float32": (A100, jnp.float32, 192, {}, "no kernel of its backward for float32", False),
    "ordered": (
        *(H200, jnp.bfloat16, 64, {"deterministic_gradients": True}),
        *("kernels sum those of score data in any order", True),
    ),
}


@pytest.fixture(params=SLOW_GRADIENTS)
def slow_gradients(request, monkeypatch):
    """A device, whether slopes' gradients are slow alone, the reason, arguments, and a function of them and options."""
    device, dtype, dim, fixed, reason, of_slopes = SLOW_GRADIENTS[request.param]
    monkeypatch.setattr(fallback, "_warned", set())
    x = jax.ShapeDtypeStruct((1, next(NEW_LENGTH), 2, dim), dtype)
    slopes = (jax.ShapeDtypeStruct((2,), jnp.float32),) * of_slopes

    def loss(q, k, v, *slopes, **options):
        score = fa.alibi(*slopes) if slopes else None
        out = fa.flash_attention(q, k, v, score=score, **fixed, **options)
        return out.astype(jnp.float32).sum()

    return device, of_slopes, reason, (x, x, x, *slopes), loss


def grad_traced(device, loss, arguments, argnums, **options):
    with planned_for(device):
        jax.eval_shape(jax.grad(functools.partial(loss, **options), argnums), *arguments)


def test_gradients_without_a_fused_kernel_warn_once(slow_gradients):
    device, of_slopes, reason, arguments, loss = slow_gradients
    last = len(arguments) - 1
    with planned_for(device):
        jax.eval_shape(loss, *arguments)  # warnings are errors here
        jax.eval_shape(jax.jit(loss), *arguments)
    if of_slopes:
        grad_traced(device, loss, arguments, (0, 1, 2))
    for name in ("blockwise", "reference"):
        grad_traced(device, loss, arguments, last, implementation=name)
    with pytest.warns(
        fa.FallbackWarning, match=f"gradients of this call, .*blockwise.*{reason}"
    ) as caught:
        grad_traced(device, loss, arguments, last)
    assert [warning.filename for warning in caught] == [__file__]
    grad_traced(device, jax.jit(loss), arguments, last)


def test_gradients_without_a_fused_kernel_are_an_error_if_one_is_asked_for(slow_gradients):
    device, of_slopes, reason, arguments, loss = slow_gradients
    last = len(arguments) - 1
    with planned_for(device):
        jax.eval_shape(functools.partial(loss, implementation="fused"), *arguments)
    if of_slopes:
        grad_traced(device, loss, arguments, (0, 1, 2), implementation="fused")
    message = f"'fused' does not support the gradients of this call: .*{reason}.* To have them, "
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            grad_traced(device, loss, arguments, last, implementation="fused")
    name = "hopper" if of_slopes else "ampere"
    with pytest.warns(fa.FallbackWarning, match="which run on blockwise, slower"):
        grad_traced(device, loss, arguments, last, implementation=name)


@pytest.mark.parametrize("attend", [fa.flash_attention, fa.dot_product_attention])
def test_a_warning_points_to_the_call(monkeypatch, attend):
    monkeypatch.setattr(fallback, "_warned", set())
    monkeypatch.setattr(api, "device_of", lambda array: H200)
    x = jnp.ones((1, 8, 2, 6))
    with pytest.warns(fa.FallbackWarning) as caught:
        attend(x, x, x)
    assert caught[0].filename == __file__


def test_dir_lists_only_public_names():
    assert set(dir(fa)) == {*fa.__all__, "__version__"}
    assert all(hasattr(fa, name) for name in dir(fa))
    for module in (fa.linen, fa.nnx):
        assert dir(module) == ["MultiHeadAttention", "attention_fn"]


@pytest.mark.parametrize("kind", ["mask", "score", "numpy", "drop-in"])
def test_xla_does_not_fold_constant_data(kind: str):
    """A program that closes over a mask of 1024 x 1024 compiled in 30 s, 6 times as long as one that it is given."""
    q = jnp.ones((1, 16, 2, 8))
    dense, bias = jnp.tri(16, dtype=bool), jnp.ones((2, 16, 16))
    calls = {
        "mask": lambda q: fa.flash_attention(q, q, q, mask=dense),
        "score": lambda q: fa.flash_attention(q, q, q, score=fa.bias(bias)),
        "numpy": lambda q: fa.flash_attention(q, q, q, mask=np.tri(16, dtype=bool)),
        "drop-in": lambda q: fa.dot_product_attention(q, q, q, mask=dense),
    }
    text = jax.jit(calls[kind]).lower(q).as_text()
    assert text.count("stablehlo.optimization_barrier") == 1
    assert (
        "optimization_barrier"
        not in jax.jit(lambda q, m: fa.flash_attention(q, q, q, mask=m)).lower(q, dense).as_text()
    )
