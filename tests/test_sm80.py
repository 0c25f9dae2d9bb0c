"""The mma.sync kernels, interpreted: values, and the order of their accesses to memory."""

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import copy_groups
from pallas_fa2.backends.common.split_float32 import split_for_gradients
from pallas_fa2.backends.sm80.backward.config import BackwardConfig, DqConfig
from pallas_fa2.backends.sm80.backward.dq_kernel import query_gradients
from pallas_fa2.backends.sm80.backward.kernel import gradients
from pallas_fa2.backends.sm80.backward.memory import Inputs
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.backends.sm80.forward.kernel import attention
from pallas_fa2.backends.sm80.primitives import async_copy, mma
from tests.contract import suite
from tests.contract.cases import GENERAL, MASKED, PLAIN, Case
from tests.support import gpus, interpreter
from tests.support.hopper import A100, planned_for, runs_on_ampere
from tests.support.shared import RaceDetected
from tests.support.tiers import slow_but

LOG2E = float(np.log2(np.e))


def _arrays(spec: KernelSpec, dims: tuple[int, int], dtype: Any = jnp.bfloat16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    (dim, value_dim), shapes = dims, []
    for length, heads, size in (
        (spec.q_len, spec.q_heads, dim),
        (spec.kv_len, spec.kv_heads, dim),
        (spec.kv_len, spec.kv_heads, value_dim),
        (spec.q_len, spec.q_heads, value_dim),
    ):
        shapes.append((spec.batch, length, heads, size))
    return [np.asarray(jnp.asarray(rng.standard_normal(s), dtype)) for s in shapes]


def _dense(spec: KernelSpec, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    k, v = (jnp.repeat(x, spec.group, 2) for x in (k, v))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * spec.scale
    if spec.causal_offset is not None:
        shape = spec.q_len, spec.kv_len
        seen = np.arange(shape[1])[None] <= np.arange(shape[0])[:, None] + spec.causal_offset
        s = jnp.where(seen[None, None], s, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v), jax.nn.logsumexp(s, -1)


FORWARDS = {
    "4_warps": (ForwardConfig(64, 64), KernelSpec(1, 200, 330, 2, 1, 0.125, 130), (64, 64)),
    "8_warps": (
        ForwardConfig(64, 64, warpgroups=2, row_tiles=1, q_in_registers=True),
        KernelSpec(1, 130, 70, 1, 1, 0.125, None),
        (56, 64),
    ),
    "2_stages": (
        ForwardConfig(96, 64, row_tiles=1, stages=2),
        KernelSpec(1, 100, 200, 1, 1, 0.125, None),
        (80, 64),
    ),
    "float32": (
        ForwardConfig(64, 64, row_tiles=1, terms=2),
        KernelSpec(1, 100, 130, 2, 1, 0.125, 30),
        (64, 56),
    ),
    "float32_8_warps": (
        ForwardConfig(128, 96, warpgroups=2, row_tiles=1, q_in_registers=True, terms=2),
        KernelSpec(1, 130, 70, 1, 1, 0.1, None),
        (120, 96),
    ),
    "float32_32_keys": (
        ForwardConfig(256, 256, row_tiles=1, block_kv=32, terms=2),
        KernelSpec(1, 70, 70, 1, 1, 0.0625, 0),
        (256, 256),
    ),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward(name: str) -> None:
    config, spec, dims = FORWARDS[name]
    q, k, v, _ = _arrays(spec, dims, jnp.float32 if config.is_split else jnp.bfloat16)
    out, lse = interpreter.run(functools.partial(attention, spec, config), q, k, v)
    expected, expected_lse = _dense(spec, *(x.astype("float32") for x in (q, k, v)))
    assert out.dtype == q.dtype
    np.testing.assert_allclose(
        out.astype("float32"), expected, atol=4e-6 if config.is_split else 1e-2
    )
    np.testing.assert_allclose(lse, expected_lse, atol=4e-6 if config.is_split else 1e-5)


@pytest.mark.parametrize("product", [(0, 1), (1, 0)], ids=["high_low", "low_high"])
def test_a_split_operand_without_one_of_its_products_is_inexact(
    product: tuple[int, int], monkeypatch: Any
) -> None:
    add_products = mma.add_products

    def without_it(sums: Any, lefts: Any, rights: Any) -> Any:
        sums[1] = add_products([sums[1]], [[x[product[0]]] for x in lefts], [rights[product[1]]])[0]
        return [add_products(sums[:1], [x[:1] for x in lefts], rights[:1])[0], sums[1]]

    monkeypatch.setattr(mma, "add_products", without_it)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        test_forward("float32")


def test_sizes_that_float16_does_not_have() -> None:
    """Tokens of float32 inputs may differ by any power of two, visible or not: each has one of its own."""
    config, spec, dims = FORWARDS["float32"]
    q, k, v, _ = (np.array(x) for x in _arrays(spec, dims, jnp.float32))
    sizes = np.random.default_rng(1).integers(-40, 40, v.shape[:3])
    v *= np.exp2(sizes)[..., None].astype("float32")
    q, k = q * np.float32(1e-12), k * np.float32(1e12)
    q[:, 7], k[:, 5], v[:, 6] = q[:, 7] * np.float32(1e-20), k[:, 5] * np.float32(1e-20), 0
    hidden = 100  # from the first 70 queries
    k[:, hidden:], v[:, hidden:], k[:, 120:], v[:, 125:] = 1e30, 1e30, np.nan, np.inf
    out, lse = interpreter.run(functools.partial(attention, spec, config), q, k, v)
    exact = (np.asarray(x, np.float64) for x in (q[:, :70], k[:, :hidden], v[:, :hidden]))
    with jax.enable_x64(True):
        dense = _dense(dataclasses.replace(spec, q_len=70, kv_len=hidden), *exact)
        expected, expected_lse = map(np.asarray, dense)
    size = np.abs(expected).max(3, keepdims=True)
    np.testing.assert_allclose(out[:, :70] / size, expected / size, atol=4e-6)
    np.testing.assert_allclose(lse[..., :70], expected_lse, atol=2e-6, rtol=3e-7)
    assert np.isnan(out[:, 90:]).all() and np.isnan(lse[..., 90:]).all()


BACKWARDS = {
    "float32": (
        BackwardConfig(64, 64, warpgroups=1, score_queries=32, terms=2),
        KernelSpec(1, 100, 150, 2, 1, 0.125, 50),
        (64, 56),
    ),
    "float32_8_warps": (
        BackwardConfig(64, 64, stages=2, vector_atomics=True, terms=2),
        KernelSpec(1, 70, 130, 1, 1, 0.125, None),
        (64, 64),
    ),
    "float32_divides_columns": (
        BackwardConfig(128, 128, divides_columns=True, terms=2),
        KernelSpec(1, 130, 70, 1, 1, 0.1, 0),
        (128, 104),
    ),
    "float32_dq_apart": (
        BackwardConfig(
            96, 64, warpgroups=1, terms=2, dq=DqConfig(96, 64, row_tiles=2, score_keys=32, terms=2)
        ),
        KernelSpec(1, 100, 70, 1, 1, 0.125, 0),
        (88, 64),
    ),
    "float32_all_apart": (
        BackwardConfig(
            128,
            128,
            warpgroups=1,
            score_queries=16,
            apart=True,
            terms=2,
            dq=DqConfig(128, 128, score_keys=16, dout_in_registers=True, terms=2),
        ),
        KernelSpec(1, 70, 70, 1, 1, 0.1, None),
        (128, 104),
    ),
    "1_stage": (BackwardConfig(64, 64), KernelSpec(1, 100, 150, 2, 1, 0.125, 50), (64, 56)),
    "2_stages": (
        BackwardConfig(64, 64, stages=2, vector_atomics=True),
        KernelSpec(1, 200, 130, 1, 1, 0.125, None),
        (64, 64),
    ),
    "4_warps": (
        BackwardConfig(96, 96, warpgroups=1),
        KernelSpec(1, 70, 130, 1, 1, 0.125, None),
        (80, 96),
    ),
    "32_keys_a_warp": (
        BackwardConfig(64, 64, warpgroups=1, key_tiles=2, score_queries=32),
        KernelSpec(1, 100, 200, 1, 1, 0.125, 100),
        (64, 64),
    ),
    "divides_columns": (
        BackwardConfig(256, 128, divides_columns=True),
        KernelSpec(1, 130, 100, 1, 1, 0.0625, 0),
        (256, 128),
    ),
    "dq_apart": (
        BackwardConfig(64, 64, dq=DqConfig(64, 64, row_tiles=2)),
        KernelSpec(1, 200, 130, 2, 2, 0.125, 0),
        (64, 56),
    ),
    "dq_apart_2_stages": (
        BackwardConfig(
            96, 64, warpgroups=1, stages=2, dq=DqConfig(96, 64, 2, score_keys=32, stages=2)
        ),
        KernelSpec(1, 100, 150, 1, 1, 0.125, None),
        (80, 64),
    ),
    "all_apart": (
        BackwardConfig(
            192,
            128,
            warpgroups=1,
            score_queries=16,
            apart=True,
            dq=DqConfig(192, 128, score_keys=16, dout_in_registers=True),
        ),
        KernelSpec(1, 100, 130, 1, 1, 0.0625, 40),
        (192, 104),
    ),
    "dq_apart_divides_columns": (
        BackwardConfig(128, 128, divides_columns=True, stages=2, dq=DqConfig(128, 128)),
        KernelSpec(1, 130, 70, 1, 1, 0.0625, None),
        (128, 128),
    ),
}


def _run_backward(
    config: BackwardConfig, spec: KernelSpec, arrays: tuple[np.ndarray, ...]
) -> tuple[tuple, tuple]:
    """Return dq, dk and dv, interpreted; and those in float64, with the largest sum of absolute terms of each row,
    `[B, T, N]`."""
    with jax.enable_x64(True):
        q, k, v, dout = (jnp.asarray(x, jnp.float64) for x in arrays)
        (out, lse), pull = jax.vjp(functools.partial(_dense, spec), q, k, v)
        expected = tuple(map(np.asarray, pull((dout, jnp.zeros_like(lse)))))
        out, lse, dout = (np.asarray(x) for x in (out, lse, dout))
    extra = ((0, 0), (0, 0), (0, -spec.q_len % config.rows_multiple))
    rows = np.einsum("bthd,bthd->bht", dout, out)
    delta = np.pad(-rows, extra).astype("float32")
    padded = np.pad(-lse * np.log2(np.e), extra, constant_values=-np.inf).astype("float32")

    def compute(q: Any, k: Any, v: Any, dout: Any, *rows: Any) -> tuple:
        inputs, like = Inputs(q, k, v, dout, *rows), (q, k, v)
        if config.is_split:
            dims = config.head_dim, config.value_dim
            *terms, scales = split_for_gradients(q, k, v, dout, dims, config.multiples)
            inputs = Inputs(*terms, *rows, scales=scales)
        dq, dk, dv, _ = gradients(spec, config, inputs, like)
        if config.dq is not None:
            dq = query_gradients(spec, config.dq, inputs, q)
        return dq, dk, dv

    found = interpreter.run(compute, *arrays, padded, delta)
    return found, (expected, _sizes_of_terms(spec, arrays, lse))


def _sizes_of_terms(spec: KernelSpec, arrays: tuple[np.ndarray, ...], lse: np.ndarray) -> tuple:
    """Return the sums of the absolute terms of each row of dq, dk and dv, of their largest columns."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    k, v = (np.repeat(x, spec.group, 2) for x in (k, v))
    s = np.einsum("bthd,bshd->bhts", q, k) * spec.scale
    if spec.causal_offset is not None:
        i, j = np.arange(spec.q_len)[:, None], np.arange(spec.kv_len)
        s = np.where(j <= i + spec.causal_offset, s, -np.inf)
    p = np.exp(s - lse[..., None])
    dp = np.einsum("bthd,bshd->bhts", abs(dout), abs(v))
    ds = p * (dp + (p * dp).sum(-1, keepdims=True)) * spec.scale
    dq = np.einsum("bhts,bshd->bthd", ds, abs(k))
    dk, dv = np.einsum("bhts,bthd->bshd", ds, abs(q)), np.einsum("bhts,bthd->bshd", p, abs(dout))
    dk, dv = (x.reshape(*x.shape[:2], spec.kv_heads, spec.group, -1).sum(3) for x in (dk, dv))
    return tuple(x.max(3) for x in (dq, dk, dv))


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward(name: str) -> None:
    config, spec, dims = BACKWARDS[name]
    arrays = _arrays(spec, dims, jnp.float32 if config.is_split else jnp.bfloat16)
    found, (expected, _) = _run_backward(config, spec, tuple(arrays))
    for actual, gradient in zip(found, expected, strict=True):
        atol = 4e-6 * abs(gradient).max() if config.is_split else 3e-2
        np.testing.assert_allclose(actual.astype("float32"), gradient, atol=atol)


def _run(kind: str, name: str) -> None:
    test_forward(name) if kind == "forward" else test_backward(name)


# (kernel, case, how many meetings and waits its program has)
MEETINGS = [
    ("forward", "4_warps", 3, 2),
    ("forward", "2_stages", 3, 2),
    ("forward", "float32", 2, 2),
    ("backward", "1_stage", 5, 1),
    ("backward", "dq_apart", 6, 2),
    ("backward", "dq_apart_2_stages", 6, 2),
    ("backward", "all_apart", 13, 5),
    ("backward", "float32", 2, 1),
    ("backward", "float32_divides_columns", 3, 1),
]


@pytest.mark.parametrize(
    "kernel, case, meeting",
    [(kernel, case, i) for kernel, case, count, _ in MEETINGS for i in range(count)],
)
def test_each_meeting_is_missed(kernel: str, case: str, meeting: int, monkeypatch: Any) -> None:
    """Without one of the meetings of a CTA's threads, accesses are not ordered, in a CTA of one warpgroup as well."""
    sync, calls = async_copy.sync_cta, itertools.count()
    monkeypatch.setattr(
        async_copy, "sync_cta", lambda n: None if next(calls) == meeting else sync(n)
    )
    with pytest.raises(RaceDetected):
        _run(kernel, case)
    assert next(calls) > meeting


@pytest.mark.parametrize(
    "kernel, case, wait",
    [(kernel, case, i) for kernel, case, _, count in MEETINGS for i in range(count)],
)
def test_each_wait_is_missed(kernel: str, case: str, wait: int, monkeypatch: Any) -> None:
    """With one wait for one group of copies less, what they bring is read before it is there."""
    original, calls = copy_groups.wait_groups, itertools.count()
    monkeypatch.setattr(copy_groups, "wait_groups", lambda n: original(n + (next(calls) == wait)))
    with pytest.raises(RaceDetected):
        _run(kernel, case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_pairwise_arrays(dtype: str) -> None:
    """Those in 32 bits are added up in device memory, those in 16 are stored for each head."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 70, 2, 64)), jnp.bfloat16) for _ in range(3))
    bias = jnp.asarray(rng.standard_normal((1, 2, 70, 70)), dtype)

    def gradient(bias: jax.Array, implementation: str) -> jax.Array:
        def total(bias: jax.Array) -> jax.Array:
            score = fa.bias(bias)
            out = fa.flash_attention(q, k, v, score=score, implementation=implementation)
            return (out.astype("float32") @ jnp.arange(64.0)).sum()

        return jax.grad(total)(bias)

    with planned_for(A100):
        found = interpreter.jit(functools.partial(gradient, implementation="ampere"))(bias)
    expected = gradient(bias, "reference").astype("float32")
    np.testing.assert_allclose(found.astype("float32"), expected, atol=0.02 * abs(expected).max())


# One for each branch of the kernels, head dims included; the others take a second each.
QUICK = re.compile(
    r"full_111|causal_(1|more_keys|end_more_queries)|h(96|128|192|256)(_causal.*)?|grouped|hv_.*|packed_h136"
    r"|window_h96|documents_h64|holes_h.*|capped_h.*|additive_causal_h64|biased.*|dropout.*|rising_7_h64"
    r"|float32.*|(window|lengths|holes)_33x90|window_90x33"
)
CASES = [
    case
    for case in PLAIN + MASKED + GENERAL
    if runs_on_ampere(case) and max(case.q_len, case.kv_len) < 700
]


@pytest.mark.parametrize(
    "case", slow_but(lambda case: bool(QUICK.fullmatch(case.name)), CASES), ids=str
)
def test_contract_interpreted(case: Case) -> None:
    with planned_for(A100):
        suite.check(case, "ampere", jit=interpreter.jit)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_of_queries_that_see_nothing(dtype: str) -> None:
    """Keys past the end, which no mask hides, do not see them either: dQ is 0."""
    (case,) = (case for case in CASES if case.name == "window_90x33")
    with planned_for(A100):
        suite.check(
            dataclasses.replace(case, dtype=jnp.dtype(dtype)), "ampere", jit=interpreter.jit
        )


@pytest.mark.parametrize("name", ["float32", "float32_divides_columns", "float32_dq_apart"])
def test_gradients_of_sizes_that_float16_does_not_have(name: str) -> None:
    """Tokens of q, k, v and dO may differ by any power of two: each row of dQ, dK and dV is as exact as its own
    terms."""
    config, spec, dims = BACKWARDS[name]
    q, k, v, dout = (np.array(x) for x in _arrays(spec, dims, jnp.float32))
    rng = np.random.default_rng(3)
    # dO and q of a query, k and v of a key: scores stay of the size of 1
    dout *= np.exp2(rng.integers(-30, 30, dout.shape[:3]))[..., None].astype("float32")
    q, k = q * np.float32(1e-12), k * np.float32(1e12)
    v *= np.float32(1e-9)
    found, truth = _run_backward(config, spec, (q, k, v, dout))
    for x, expected, size in zip(found, *truth, strict=True):
        assert np.isfinite(x).all()
        error = np.abs(x - expected).max(3) / np.maximum(size, 1e-300)
        assert error.max() < 4e-6, error.max()


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_under_dropout(deterministic: bool) -> None:
    """The kernel of dQ drops what the others drop."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 100, 2, 64)), jnp.bfloat16) for _ in range(3))
    options = {"is_causal": True, "dropout_rate": 0.3, "dropout_rng": jax.random.key(5)}
    options["deterministic_gradients"] = deterministic

    def run(*qkv: jax.Array, implementation: str) -> tuple:
        def total(*qkv: jax.Array) -> jax.Array:
            out = fa.flash_attention(*qkv, implementation=implementation, **options)
            return (out.astype("float32") @ jnp.cos(jnp.arange(64.0))).sum()

        return jax.grad(total, (0, 1, 2))(*qkv)

    with planned_for(A100):
        found = interpreter.jit(functools.partial(run, implementation="ampere"))(q, k, v)
    expected = run(q, k, v, implementation="reference")
    for x, y in zip(found, expected, strict=True):
        y = y.astype("float32")
        np.testing.assert_allclose(x.astype("float32"), y, atol=0.02 * abs(y).max())


@pytest.mark.parametrize("name", ["h256_causal", "h192", "holes_h256", "hv_larger"])
def test_contract_with_100_kb_of_shared_memory_interpreted(name: str) -> None:
    """dQ, dK and dV have a kernel each beyond (192, 128)."""
    (case,) = (case for case in CASES if case.name == name)
    with planned_for(gpus.device("8.9")):
        suite.check(case, "ampere", jit=interpreter.jit)


# One for each kind of mods and each configuration of the kernel of dQ.
QUICK_DETERMINISTIC = re.compile(
    r"causal_more_keys|h(96|128|256)|grouped|window_h96|documents_h64|holes_h64|capped_h64"
)


@pytest.mark.parametrize(
    "case", slow_but(lambda case: bool(QUICK_DETERMINISTIC.fullmatch(case.name)), CASES), ids=str
)
def test_contract_of_deterministic_gradients_interpreted(case: Case) -> None:
    with planned_for(A100):
        suite.check(case, "ampere", jit=interpreter.jit, deterministic=True)
