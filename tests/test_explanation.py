"""explain: what it says of a call, of which nothing runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.device import Device, device_of

B, T, S, N, K, H = 2, 13, 10, 4, 2, 16
H200 = Device("gpu", "NVIDIA H200", "9.0", 132)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


QKV = normal(B, T, N, H), normal(B, S, K, H, seed=1), normal(B, S, K, H, seed=2)


def random_mask(*shape, seed=4):
    """A random mask in which every query sees the first key."""
    mask = np.random.default_rng(seed).random(shape) < 0.5
    mask[..., 0] = True
    return mask


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


@pytest.mark.parametrize(
    "device, implementation",
    [
        *((capability, "ampere") for capability in ("8.0", "8.6", "8.9", "10.0", "12.0")),
        *(("9.0", "hopper"), (H200, "hopper"), (Device(), "blockwise")),
    ],
    ids=str,
)
def test_explain_answers_for_any_device(device, implementation):
    assert fa.explain(*shapes(256), device=device).implementation == implementation


def test_explain_takes_a_device_of_jax():
    (device, *_) = jax.devices()
    cache = jax.eval_shape(lambda: fa.Cache.zeros(2, 64, kv_heads=4, head_dim=64))
    for explanation in (
        fa.explain(*shapes(256), device=device),
        fa.explain(shapes(1)[0], cache, device=device),
    ):
        assert explanation.device == device_of(None)


@pytest.mark.parametrize(
    "device, error, message",
    [
        ("cuda", TypeError, r"device must be a jax.Device.*, one of '8.0', .*, but it is 'cuda'"),
        ("gpu", TypeError, "leave it out for the device of query"),
        (H200._replace(capability="90"), ValueError, "such as '9.0', but it is '90'"),
        (H200._replace(platform="cuda"), ValueError, "must be 'gpu'.*but it is 'cuda'; write Dev"),
    ],
    ids=str,
)
def test_explain_names_what_is_wrong_with_a_device(device, error, message):
    cache = jax.eval_shape(lambda: fa.Cache.zeros(2, 64, kv_heads=4, head_dim=64))
    with pytest.raises(error, match=message):
        fa.explain(*shapes(256), device=device)
    with pytest.raises(error, match=message):
        fa.explain(shapes(1)[0], cache, device=device)


def test_explain_respects_the_requested_implementation():
    explanation = fa.explain(*QKV, implementation="reference")
    assert (explanation.implementation, explanation.tiles, explanation.share) == (
        "reference",
        (T, S),
        1,
    )
    with pytest.raises(ValueError, match="implementation 'hopper' does not support this call"):
        fa.explain(*QKV, implementation="hopper", device=Device())


def test_explain_computes_nothing(monkeypatch):
    monkeypatch.setattr("pallas_fa2.api.attention", None)
    assert fa.explain(*QKV, mask=fa.Causal(), return_lse=True).implementation == "blockwise"


@pytest.mark.parametrize("implementation", [None, "hopper", "ampere"])
def test_explain_of_an_empty_batch_says_that_nothing_runs(implementation):
    ids = jnp.zeros((0, 64), jnp.int32)
    options = {"device": H200, "implementation": implementation}
    cache = jax.eval_shape(lambda: fa.Cache.zeros(0, 64, kv_heads=4, head_dim=64))
    explanation = fa.explain(*shapes(64, batch=0), mask=fa.Segments(ids), **options)
    of_cache = fa.explain(shapes(1, batch=0)[0], cache, **options)
    for text in (explanation.forward, explanation.backward, of_cache.forward):
        assert "nothing runs" in text
    assert explanation.flops == 0 and "unknown" not in str(explanation)
