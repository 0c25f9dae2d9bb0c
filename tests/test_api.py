"""The public functions: jax.nn as the judge of the drop-in, shapes and numbers of the rest."""

import functools
import inspect
import logging
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2 import api
from pallas_fa2.device import Device

B, T, S, N, K, H = 2, 13, 10, 4, 2, 16
H200 = Device("gpu", "NVIDIA H200", "9.0", 132)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QKV = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)
ONE = tuple(x[0] for x in QKV)


def close(actual, want):
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    chex.assert_trees_all_close(actual, want, rtol=1e-5, atol=3e-6)


def judge(*args, **options):
    """`jax.nn.dot_product_attention`, which is not written for strict dtypes and ranks."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(*args, **options)


def compare(qkv=QKV, bias=None, mask=None, **options):
    """Outputs and gradients, of the bias too, beside those of jax.nn."""

    def run(attention):
        def loss(qkv, bias):
            out = attention(*qkv, bias, mask, **options)
            return jnp.sum(jnp.sin(2.0 * out)), out

        argnums = 0 if bias is None else (0, 1)
        gradients, out = jax.jit(jax.grad(loss, argnums, has_aux=True))(qkv, bias)
        return out, gradients

    close(run(fa.dot_product_attention), run(judge))


def random_mask(*shape, seed=4):
    """A random mask in which every query sees the first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 0] = True
    return mask


LENGTHS = {"query_seq_lengths": np.array([13, 5], np.int32),
           "key_value_seq_lengths": np.array([4, 10], np.int32)}  # fmt: skip
WINDOW = (7, 1)  # every query sees a key, though T > S

OPTIONS = {
    "window": {"local_window_size": WINDOW},
    "symmetric window, scale": {"local_window_size": 5, "scale": 0.3},
    "query lengths": {"query_seq_lengths": LENGTHS["query_seq_lengths"]},
    "lengths, causal": {**LENGTHS, "is_causal": True},
    "all": {
        "bias": normal(B, N, T, S, seed=5),
        "mask": random_mask(B, N, T, S),
        "scale": 0.2,
        "is_causal": True,
        "local_window_size": (20, 3),
        **LENGTHS,
    },
    "xla, causal": {"implementation": "xla", "is_causal": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_mean_what_they_mean_in_jax_nn(name):
    compare(**OPTIONS[name])


@pytest.mark.parametrize("shape", [(B, 1, 1, S), (S,)], ids=str)
def test_a_bias_broadcasts_and_gets_a_gradient_of_its_shape(shape):
    compare(bias=normal(*shape, seed=5))


@pytest.mark.parametrize("shape", [(1, N, 1, S), (T, S), (S,)], ids=str)
def test_a_mask_broadcasts(shape):
    mask = random_mask(*shape)
    close(fa.dot_product_attention(*QKV, mask=mask), judge(*QKV, mask=mask))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": normal(N, T, S, seed=5), "mask": random_mask(N, T, S), "is_causal": True},
        {"bias": normal(1, N, T, S, seed=5), "mask": random_mask(1, 1, T, S)},
        {"key_value_seq_lengths": np.array([4], np.int32)},
    ],
    ids=["of three axes", "of four axes", "lengths"],
)
def test_inputs_without_a_batch_axis(options):
    compare(ONE, **options)


def test_causal_is_aligned_to_the_top_left_with_fewer_queries_too():
    compare((QKV[0][:, :6], *QKV[1:]), is_causal=True)


@pytest.mark.parametrize(
    "qkv, dtype", [(QKV, jnp.float32), (ONE, jnp.bfloat16)], ids=["batch, f32", "no batch, bf16"]
)
def test_the_residual_is_the_logsumexp_in_the_layout_and_dtype_of_jax_nn(qkv, dtype):
    qkv = [jnp.asarray(x, dtype) for x in qkv]
    options = {"is_causal": True, "return_residual": True}
    want = judge(*qkv, **options)
    actual = fa.dot_product_attention(*qkv, **options)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, want)
    tolerance = {"rtol": 1e-5, "atol": 3e-6} if dtype == jnp.float32 else {"atol": 0.05}
    chex.assert_trees_all_close(actual, want, **tolerance)


def test_lengths_may_be_python_lists_as_in_jax_nn():
    options = {name: lengths.tolist() for name, lengths in LENGTHS.items()}
    close(fa.dot_product_attention(*QKV, **options), judge(*QKV, **options))


def test_the_signature_begins_as_that_of_jax_nn():
    reference = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(fa.dot_product_attention).parameters
    for name, parameter in reference.items():
        assert ours[name].kind == parameter.kind
        assert ours[name].default == parameter.default
    assert list(ours)[: len(reference)] == list(reference)


def test_a_query_without_keys_gets_zero_and_in_jax_nn_the_mean():
    mask = random_mask(T, S)
    mask[3] = False
    mean = np.repeat(QKV[2].mean(1), N // K, 1)
    np.testing.assert_allclose(judge(*QKV, mask=mask)[:, 3], mean, rtol=1e-5, atol=3e-6)

    def attend(qkv):
        return fa.dot_product_attention(*qkv, mask=mask, return_residual=True)

    out, residual = attend(QKV)
    assert np.all(out[:, 3] == 0) and np.all(residual[:, 3] == -np.inf)
    (dq, _, _) = jax.grad(lambda qkv: jnp.sum(attend(qkv)[0]))(QKV)
    assert np.all(dq[:, 3] == 0) and np.all(np.isfinite(dq))


def test_queries_beyond_their_length_get_zero():
    out, residual = fa.dot_product_attention(*QKV, **LENGTHS, return_residual=True)
    assert np.all(out[1, 5:] == 0) and np.all(residual[1, 5:] == -np.inf)


def test_the_residual_is_differentiable_unlike_that_of_jax_nn():
    def ours(query):
        return jnp.sum(fa.dot_product_attention(query, *QKV[1:], return_residual=True)[1])

    def dense(query):
        key = jnp.repeat(QKV[1], N // K, 2)
        s = jnp.einsum("btnh,bsnh->bnts", query, key, precision="highest") / math.sqrt(H)
        return jnp.sum(jax.nn.logsumexp(s, -1))

    def reference(query):
        return jnp.sum(judge(query, *QKV[1:], return_residual=True)[1])

    close(jax.grad(ours)(QKV[0]), jax.grad(dense)(QKV[0]))
    assert np.all(jax.grad(reference)(QKV[0]) == 0)


def test_our_options_join_those_of_jax_nn():
    """A mask object, a score behind the bias, and another head dim of the values."""
    value = normal(B, S, K, 8, seed=6)
    bias, ids = normal(1, N, T, S, seed=5), np.arange(T, dtype=np.int32) // 4
    actual = fa.dot_product_attention(
        *QKV[:2], value, bias, fa.Segments(ids, ids[:S]) | fa.Prefix(1), is_causal=True,
        score=fa.soft_cap(0.5), implementation="blockwise",
    )  # fmt: skip
    key, value = (jnp.repeat(x, N // K, 2) for x in (QKV[1], value))
    s = jnp.einsum("btnh,bsnh->bnts", QKV[0], key, precision="highest") / math.sqrt(H)
    visible = (ids[:, None] == ids[None, :S]) | (np.arange(S) == 0)
    s = jnp.where(
        (visible & np.tri(T, S, dtype=bool))[None, None], 0.5 * jnp.tanh((s + bias) / 0.5), -jnp.inf
    )
    close(actual, jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), value, precision="highest"))


def test_sinks_and_reproducible_gradients_in_the_drop_in():
    sinks = normal(N, seed=7)
    actual = fa.dot_product_attention(
        *QKV, is_causal=True, sinks=sinks, deterministic_gradients=True
    )
    close(actual, fa.flash_attention(*QKV, mask=fa.Causal(), sinks=sinks))
    with pytest.raises(TypeError, match="deterministic_gradients must be a Python bool"):
        fa.dot_product_attention(*QKV, deterministic_gradients="yes")  # pyright: ignore[reportArgumentType]


def test_a_window_of_numpy_integers():
    actual = fa.dot_product_attention(*QKV, local_window_size=np.int64(3))  # pyright: ignore[reportArgumentType]
    close(actual, fa.dot_product_attention(*QKV, local_window_size=3))


def test_numpy_float64_inputs_become_float32():
    wide = [x.astype(np.float64) for x in QKV]
    actual = fa.flash_attention(*wide, score=fa.soft_cap(2.0))
    close(actual, fa.flash_attention(*QKV, score=fa.soft_cap(2.0)))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"implementation": "cudnn"}, r"but it is 'cudnn'; for cuDNN call jax\.nn"),
        ({"implementation": "triton"}, r"implementation must be one of .* but it is 'triton'"),
        ({"query_seq_lengths": np.ones(3, np.int32)}, r"query_seq_lengths must be int32 of shape"),
        (
            {"key_value_seq_lengths": np.ones(B, np.int16)},
            r"key_value_seq_lengths must be int32 of",
        ),
    ],
)
def test_invalid_options_of_the_drop_in_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        fa.dot_product_attention(*QKV, **options)


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


def shapes(length, batch=2, heads=4, dim=64, dtype=jnp.bfloat16):
    return (jax.ShapeDtypeStruct((batch, length, heads, dim), dtype),) * 3


def test_explain_counts_tiles_work_and_memory():
    inputs = shapes(2048)
    explanation = fa.explain(*inputs, mask=fa.Causal(), device=H200)
    block_q, block_kv = explanation.tiles
    rows = np.arange(0, 2048, block_q)[:, None] + block_q - 1
    share = np.mean(rows >= np.arange(0, 2048, block_kv)[None])
    assert explanation.implementation == "hopper"
    assert explanation.share == pytest.approx(share)
    assert explanation.flops == pytest.approx(4 * 2 * 4 * 2048**2 * 64 * share)
    out_and_lse = jax.eval_shape(lambda *x: fa.flash_attention(*x, return_lse=True), *inputs)
    assert explanation.bytes == sum(x.size * x.dtype.itemsize for x in (*inputs, *out_and_lse))


@pytest.mark.parametrize(
    "mask, share",
    [(None, 1), (fa.Lengths(kv=0), 0), (fa.Lengths(kv=1024), 0.5)],
    ids=["none", "no keys", "half of the keys"],
)
def test_explain_returns_the_fraction_of_tiles(mask, share):
    explanation = fa.explain(*shapes(2048), mask=mask)
    assert explanation.share == share
    assert f"{share:.1%} of the tiles" in str(explanation)


def test_explain_counts_queries_and_keys_of_different_lengths():
    qkv = tuple(
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 7, 4, 16), (3, 9, 2, 16), (3, 9, 2, 8))
    )
    explanation = fa.explain(*qkv)
    out, lse = 3 * 7 * 4 * 8, 3 * 7 * 4
    assert explanation.bytes == 4 * (sum(x.size for x in qkv) + out + lse)
    assert explanation.flops == 2 * 3 * 4 * 7 * 9 * (16 + 8)


@pytest.mark.parametrize(
    "options, dq",
    [
        ({}, "atomic additions in any order"),
        ({"deterministic_gradients": True}, "additions in one order"),
        ({"mask": fa.Window(64)}, "stored by the first tile"),
    ],
    ids=["plain", "deterministic", "window"],
)
def test_explain_describes_the_kernels(options, dq):
    explanation = fa.explain(*shapes(4096, dim=128), device=H200, **options)
    assert (
        "2 stages, 2 warpgroups" in explanation.forward
        and "132 persistent CTAs" in explanation.forward
    )
    assert "128 keys x 64 queries" in explanation.backward and dq in explanation.backward
    assert explanation.forward in str(explanation) and explanation.backward in str(explanation)
    # float32 dQ, and of each query delta and lse
    assert explanation.workspace_bytes == pytest.approx(4 * 2 * 4 * 4096 * (128 + 2), rel=0.01)


@pytest.mark.parametrize(
    "implementation, size",
    [("reference", 3 * 300**2), ("blockwise", 300 * (64 + 1) + 4 * 304**2)],
)
def test_explain_counts_the_workspace_of_xla(implementation, size):
    explanation = fa.explain(*shapes(300), implementation=implementation)
    assert "XLA's operations" in explanation.forward
    assert explanation.workspace_bytes == 4 * 2 * 4 * size


def test_explain_has_no_fraction_for_traced_data():
    random_mask = []

    @jax.jit
    def traced(lengths):
        random_mask.append(fa.explain(*shapes(2048), mask=fa.Causal() & fa.Lengths(kv=lengths)))
        return lengths

    traced(jnp.array([5, 9], jnp.int32))
    assert random_mask[0].share is None and random_mask[0].flops is None
    assert "depends on run-time data" in str(random_mask[0])
    known = fa.explain(*shapes(2048), mask=fa.Lengths(kv=jnp.array([5, 9], jnp.int32)))
    assert known.share == pytest.approx(known.tiles[1] / 2048)


def test_explain_takes_shapes_of_data():
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    bias = jax.ShapeDtypeStruct((2, 4, 64, 64), jnp.float32)
    explanation = fa.explain(*shapes(64), mask=fa.Lengths(kv=lengths), score=fa.bias(bias))
    assert explanation.share is None
    assert fa.explain(*shapes(64), score=fa.bias(bias)).share == 1
    by_hand = fa.explain(*shapes(64), mask=lambda q, k: q.index >= k.index, score=fa.bias(bias))
    assert by_hand.share is not None  # a function is no array
    key = jax.eval_shape(lambda: jax.random.key(0))
    places = jax.ShapeDtypeStruct((2, 64), jnp.int32)
    options = {"q_positions": places, "kv_positions": places, "dropout_rng": key}
    assert fa.explain(*shapes(64), mask=fa.Causal(), dropout_rate=0.5, **options).share is None


def test_explain_takes_the_arguments_of_flash_attention():
    with pytest.raises(TypeError, match=r"\['causal'\] are none of them; those are \['query'"):
        fa.explain(*shapes(64), causal=True)


def test_explain_names_the_backend_and_why_no_faster_one_runs():
    call = {"mask": fa.Window(9), "score": lambda s, q, k: jnp.floor(s), "device": H200}
    lines = str(fa.explain(*shapes(2048), **call)).splitlines()
    assert lines[0].startswith("bfloat16 [B 2, T 2048, S 2048, N 4, K 4, H 64, Hv 64], scale 0.125")
    assert "mask Window(left=9, right=9)" in lines[0]
    assert lines[1] == "implementation  blockwise on NVIDIA H200"
    for line, name in zip(lines[2:4], ("hopper", "ampere"), strict=True):
        assert line == f"  not {name}: its scores compute no floor of float32[]"
    names = [line.split("  ")[0] for line in lines[4:]]
    assert names == ["forward", "backward", "computed", "work", "memory"]


def test_explain_names_the_backend_of_score_gradients():
    options = {"deterministic_gradients": True, "score": fa.alibi(4)}
    explanation = fa.explain(*shapes(2048), device=H200, **options)
    assert explanation.backward.endswith(
        "one order; blockwise where gradients of score data are asked for"
    )
    asked = fa.explain(*shapes(2048), device=H200, implementation="blockwise", **options)
    assert asked.backward.endswith("sums in one order")


def test_explain_describes_the_kernels_of_float32():
    x = jax.ShapeDtypeStruct((2, 2048, 4, 64), jnp.float32)
    explanation = fa.explain(x, x, x, device=H200)
    assert explanation.implementation == "ampere"
    for text in (explanation.forward, explanation.backward):
        assert text.endswith("float32 as two float16 numbers, three products")
    # float32 dQ, terms of q, k, v and dout, and of each query delta, lse and two powers of two
    assert explanation.workspace_bytes == 4 * 2 * 4 * 2048 * (64 + 4 * 64 + 4)


def test_explain_names_the_backend_of_gradients_of_float32():
    x = jax.ShapeDtypeStruct((2, 2048, 4, 256), jnp.float32)
    explanation = fa.explain(x, x, x, device=H200)
    assert explanation.implementation == "ampere"
    assert explanation.backward.startswith("blockwise: XLA's operations")
    blockwise = fa.explain(x, x, x, device=H200, implementation="blockwise")
    assert explanation.workspace_bytes == blockwise.workspace_bytes


def test_a_warning_says_that_float32_is_faster_than_float64(monkeypatch):
    monkeypatch.setattr(api, "_warned", set())
    monkeypatch.setattr(api, "device_of", lambda array: H200)
    with jax.enable_x64(True):
        x = jnp.ones((1, 8, 2, 8), jnp.float64)
        with pytest.warns(fa.FallbackWarning, match="not float64.*cast.*dtype=jnp.float32"):
            fa.flash_attention(x, x, x)


def test_explain_respects_the_requested_implementation():
    explanation = fa.explain(*QKV, implementation="reference")
    assert (explanation.implementation, explanation.tiles, explanation.share) == (
        "reference",
        (T, S),
        1,
    )
    with pytest.raises(ValueError, match="implementation 'hopper' does not support this call"):
        fa.explain(*QKV, implementation="hopper", device=Device())


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


def test_explain_computes_nothing(monkeypatch):
    monkeypatch.setattr("pallas_fa2.api.attention", None)
    assert fa.explain(*QKV, mask=fa.Causal(), return_lse=True).implementation == "blockwise"


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
    monkeypatch.setattr(api, "_warned", set())
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
    monkeypatch.setattr(api, "_warned", set())
    for _ in range(2):
        with pytest.raises(fa.FallbackWarning):
            fa.flash_attention(x, x, x)


@pytest.mark.parametrize("attend", [fa.flash_attention, fa.dot_product_attention])
def test_a_warning_points_to_the_call(monkeypatch, attend):
    monkeypatch.setattr(api, "_warned", set())
    monkeypatch.setattr(api, "device_of", lambda array: H200)
    x = jnp.ones((1, 8, 2, 6))
    with pytest.warns(fa.FallbackWarning) as caught:
        attend(x, x, x)
    assert caught[0].filename == __file__


def test_dir_lists_only_public_names():
    assert set(dir(fa)) == {*fa.__all__, "__version__"}
    assert all(hasattr(fa, name) for name in dir(fa))


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
