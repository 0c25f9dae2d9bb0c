"""The check of the mma.sync kernels on a GPU of a kind that nobody has run them on."""

import json
import os
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from benchmarks import gpu_report
from pallas_fa2 import fallback
from pallas_fa2.backends import reference
from pallas_fa2.backends.common.decode import block_lists
from pallas_fa2.backends.sm80 import backend, configs, first_use
from pallas_fa2.backends.sm80.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.backends.sm80.first_use_cases import (
    DROPOUT,
    SEGMENTS,
    AttentionFamily,
    DecodeFamily,
    families_of,
)
from pallas_fa2.backends.sm80.forward.config import ForwardConfig
from pallas_fa2.compilation import environment, store
from pallas_fa2.device import device_of
from pallas_fa2.ir.call_spec import split_floats
from pallas_fa2.ir.equivalent_call import equivalent_arrays, equivalent_spec
from pallas_fa2.parse_cached import parse_cached
from pallas_fa2.parse_call import parse_call
from tests.support import gpus, interpreter
from tests.support.compilations import compilations
from tests.support.hopper import A100, planned_for
from tests.support.tiers import slow

KERNELS = backend.forward, backend.backward
DECODE = CACHED_FORWARD.configure, CACHED_FORWARD.forward
PLAIN_64 = AttentionFamily(64, 64, "bfloat16")


def spec_of(dtype: str = "bfloat16", dim: int = 64, length: int = 128, **options: Any) -> Any:
    x = jax.ShapeDtypeStruct((1, length, 2, dim), dtype)
    return parse_call(x, x, x, **{"is_causal": True, **options})[0]


class _Gpu:
    platform = "gpu"
    device_kind = A100.kind

    class client:
        platform_version = "CUDA 13"


class Checks:
    """What checks find: nothing, or what a family's text has in `wrong`. `run` has the families that were checked."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.wrong: dict[str, str] = {}

    def __call__(self, family: Any, kernels: Any, device: Any, gpu: Any) -> Any:
        self.run.append(str(family))
        return first_use.Verdict(self.wrong.get(str(family), ""))


def forget() -> None:
    """As in another process."""
    first_use._verdicts.cache_clear()
    first_use._verdict.cache_clear()


@pytest.fixture
def a100(monkeypatch: Any, tmp_path: pathlib.Path) -> Any:
    """A machine with an A100."""
    monkeypatch.setenv("PALLAS_FA2_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "local_devices", lambda: [_Gpu])
    monkeypatch.setattr(fallback, "_warned", set())
    forget()
    yield
    forget()


@pytest.fixture
def checks(a100: Any, monkeypatch: Any) -> Checks:
    """A machine with an A100, whose kernels are not run."""
    checks = Checks()
    monkeypatch.setattr(first_use, "check", checks)
    return checks


def test_a_family_is_checked_once_and_remembered(checks: Checks) -> None:
    for _ in range(2):
        assert first_use.failure(spec_of(), A100, KERNELS) is None
    assert checks.run == [str(PLAIN_64)]
    forget()
    assert first_use.failure(spec_of(), A100, KERNELS) is None
    assert checks.run == [str(PLAIN_64)]
    (key,) = json.loads(first_use.cache_file().read_text())
    assert all(x in key for x in (A100.kind, "8.0", "CUDA 13", jax.__version__, str(PLAIN_64)))
    assert first_use.failure(spec_of("float16"), A100, KERNELS) is None
    assert len(checks.run) == len(json.loads(first_use.cache_file().read_text())) == 2


def test_a_verdict_does_not_outlive_the_sources(checks: Checks, monkeypatch: Any) -> None:
    checks.wrong[str(PLAIN_64)] = "it was wrong"
    assert first_use.failure(spec_of(), A100, KERNELS) is not None
    checks.wrong.clear()
    forget()
    assert first_use.failure(spec_of(), A100, KERNELS) is not None
    forget()
    monkeypatch.setattr(environment, "installation", lambda: "mended")
    assert first_use.failure(spec_of(), A100, KERNELS) is None


def test_of_sources_that_nobody_knows_nothing_is_kept(checks: Checks, monkeypatch: Any) -> None:
    monkeypatch.setattr(environment, "installation", lambda: None)
    assert first_use.failure(spec_of(), A100, KERNELS) is None
    assert checks.run and not first_use.cache_file().exists()


@pytest.mark.parametrize(
    "error, lasts",
    [
        (jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_INVALID_VALUE"), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (TypeError("an option of JAX"), False),
    ],
    ids=repr,
)
def test_what_may_be_otherwise_next_time_is_not_kept(
    a100: Any, monkeypatch: Any, error: Exception, lasts: bool
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    check, here = first_use.check, jax.devices()[0]
    monkeypatch.setattr(first_use, "check", lambda *args: check(args[0], args[1], args[2], here))
    reason = first_use.failure(spec_of(), A100, (fails, fails))
    assert reason is not None and str(error) in reason
    assert first_use.cache_file().exists() == lasts


def test_a_wrong_family_is_not_used_and_the_others_are(checks: Checks) -> None:
    wrong = AttentionFamily(128, 128, "float32")
    checks.wrong[str(wrong)] = f"{wrong}: relative error 0.5 of dq"
    reason = first_use.failure(spec_of("float32", 128), A100, KERNELS)
    assert reason is not None
    assert "relative error 0.5 of dq" in reason and "report" in reason
    assert first_use.failure(spec_of("bfloat16", 128), A100, KERNELS) is None
    assert first_use.failure(spec_of("float32"), A100, KERNELS) is None


def test_autotune_tries_no_forward_that_is_wrong(checks: Checks) -> None:
    forwards = configs.candidates(spec_of(), A100)
    families = [families_of(spec_of(), A100, forward)[0] for forward in forwards]
    assert len(families) == 3 and families[0] == PLAIN_64
    checks.wrong[str(families[1])] = "relative error 0.5 of out"
    assert backend.candidates(spec_of(), A100) == [forwards[0], forwards[2]]


def fails(*_: Any) -> Any:
    raise jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_INVALID_VALUE: Failed to launch")


def test_kernels_that_do_not_launch_are_not_used_and_the_call_warns(
    a100: Any, monkeypatch: Any
) -> None:
    check, here = first_use.check, jax.devices()[0]
    monkeypatch.setattr(first_use, "check", lambda *args: check(args[0], args[1], args[2], here))
    monkeypatch.setattr(backend, "forward", fails)
    q, k, v = (jnp.asarray(x, "bfloat16") for x in np.random.randn(3, 1, 8, 2, 64))
    assert "Failed to launch" in str(fa.explain(q, k, v, device=A100))
    expected = fa.flash_attention(q, k, v, implementation="blockwise")
    with planned_for(A100):
        with pytest.warns(fa.FallbackWarning, match="blockwise.*Failed to launch.*report"):
            out = fa.flash_attention(q, k, v)
        with pytest.raises(ValueError, match="Failed to launch"):
            fa.flash_attention(q, k, v, implementation="ampere")
    np.testing.assert_array_equal(out, expected)


def test_what_ends_a_process_is_not_caught(monkeypatch: Any) -> None:
    def ends(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first_use.check(PLAIN_64, (ends, ends), A100, jax.devices()[0])


def test_what_has_been_run_and_what_is_elsewhere_is_not_checked(
    checks: Checks, monkeypatch: Any
) -> None:
    assert first_use.failure(spec_of(), A100._replace(capability="9.0"), KERNELS) is None
    monkeypatch.setattr(jax, "local_devices", list)
    assert first_use.failure(spec_of(), A100, KERNELS) is None
    assert checks.run == []


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_without_a_directory_of_its_own_the_file_is_in_the_users_cache(
    value: str | None, checks: Checks, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("PALLAS_FA2_CACHE")
    if value is not None:
        monkeypatch.setenv("PALLAS_FA2_CACHE", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert first_use.failure(spec_of(), A100, KERNELS) is None
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache" / "pallas_fa2" / "first_use.json").exists()


def test_the_store_writes_into_the_directory_that_the_check_has_made(
    checks: Checks, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PALLAS_FA2_CACHE", str(tmp_path / "kernels"))
    umask = os.umask(0o002)
    try:
        assert first_use.failure(spec_of(), A100, KERNELS) is None
    finally:
        os.umask(umask)
    assert first_use.cache_file().exists()
    assert store.write("key", store.Entry(b"", None, {}))


def test_a_directory_that_cannot_be_written_is_no_error(checks: Checks, monkeypatch: Any) -> None:
    monkeypatch.setenv("PALLAS_FA2_CACHE", "/proc/nothing")
    assert first_use.failure(spec_of(), A100, KERNELS) is None


# What long calls take that are not causal, at H = 64.
LONG = ForwardConfig(64, 64, q_in_registers=True, num_ctas=216)
IDS: Any = np.zeros((1, 128), np.int32)
SEEN = fa.Dense(np.ones((128, 128), bool))
SEED = jax.random.key(0)


@pytest.mark.parametrize(
    "options, dims, families",
    [
        ({}, (64, 64), [("no mods", False)]),
        ({"is_causal": False}, (256, 256), [("no mods", False)]),
        ({"length": 2048}, (64, 64), [("no mods", False)]),
        ({"length": 2048, "is_causal": False}, (64, 64), [("no mods", False, LONG)]),
        ({"length": 2048, "is_causal": False}, (128, 128), [("no mods", False)]),
        ({"deterministic_gradients": True}, (96, 96), [("no mods", True)]),
        ({"score": fa.alibi(2)}, (64, 64), [(SEGMENTS, False)]),
        ({"dropout_rate": 0.1, "dropout_rng": SEED}, (192, 192), [(DROPOUT, False)]),
        ({"mask": fa.Segments(IDS)}, (128, 128), [(SEGMENTS, False), (DROPOUT, False)]),
        # Masks that are never precomputed, and one that always is at large head dims.
        ({"mask": fa.Window(9, 0)}, (128, 128), [(SEGMENTS, False)]),
        ({"mask": fa.Segments(IDS), "score": fa.alibi(2)}, (64, 64), [(SEGMENTS, False)]),
        ({"mask": SEEN, "is_causal": False}, (64, 64), [(SEGMENTS, False), (DROPOUT, False)]),
        ({"mask": SEEN, "score": fa.alibi(2)}, (64, 64), [(SEGMENTS, False)]),
        ({"mask": SEEN}, (256, 256), [(DROPOUT, False)]),
    ],
    ids=str,
)
def test_a_call_asks_for_its_own_families(options: Any, dims: Any, families: list) -> None:
    found = families_of(spec_of("float16", dims[0] - 8, **options), A100)
    assert list(found) == [AttentionFamily(dims[0], dims[1], "float16", *x) for x in families]


@pytest.mark.parametrize(
    "heads, page_size, options, family",
    [
        ((4, 2), None, {}, DecodeFamily(128, 64, "bfloat16")),
        ((4, 2), 24, {}, DecodeFamily(128, 64, "bfloat16", 8, 8)),
        ((40, 2), 256, {}, DecodeFamily(128, 64, "bfloat16", 24, 64)),
        ((4, 2), None, {"score": fa.alibi(4)}, DecodeFamily(128, 64, "bfloat16", mods=True)),
    ],
    ids=str,
)
def test_a_call_on_a_cache_asks_for_its_own_family(
    heads: tuple, page_size: Any, options: Any, family: Any
) -> None:
    q = jax.ShapeDtypeStruct((2, 1, heads[0], 80), "bfloat16")
    rows = (2, 512) if page_size is None else (9, page_size)
    k: Any
    v: Any
    lengths: Any
    table: Any
    k, v = (jax.ShapeDtypeStruct((*rows, heads[1], x), "bfloat16") for x in (80, 64))
    lengths, table = (jax.ShapeDtypeStruct(x, "int32") for x in ((2,), (2, 3)))
    cache = fa.Cache(k, v, lengths) if page_size is None else fa.Pages(k, v, table, lengths)
    described: list = []
    jax.eval_shape(
        lambda q, cache: described.append(parse_cached(q, cache, **options)[0]), q, cache
    )
    assert families_of(described[0], A100) == (family,)


def defined(wrong: int | None, factor: float = 1.5) -> tuple:
    """The definition by JAX in place of the kernels, one of whose results is multiplied."""

    def scale(results: tuple) -> tuple:
        return tuple(
            x * jnp.asarray(factor, x.dtype) if i == wrong else x for i, x in enumerate(results)
        )

    def forward(spec: Any, _: Any, *arrays: Any) -> Any:
        out, lse = reference.forward(spec, None, *arrays)
        return scale((out,))[0], lse

    def backward(spec: Any, _: Any, q: Any, k: Any, v: Any, *saved: Any) -> Any:
        _, _, dout, _, operands, _ = saved

        def attend(q: Any, k: Any, v: Any, floats: Any) -> Any:
            return reference.forward(
                spec, None, q, k, v, operands._replace(scores=rebuild(floats))
            )[0]

        floats, rebuild = split_floats(operands.scores)
        *gradients, dscores = jax.vjp(attend, q, k, v, floats)[1](dout)
        _, *gradients = (
            scale((None, *gradients, *dscores)) if wrong else (None, *gradients, *dscores)
        )
        return *gradients[:3], tuple(gradients[3:])

    return forward, backward


def defined_step(factor: float) -> tuple:
    """The definition in place of the kernel that reads caches, with a result that is multiplied."""

    def forward(spec: Any, config: Any, *arrays: Any) -> Any:
        call = equivalent_arrays(spec, *arrays)
        out, lse = reference.forward(equivalent_spec(spec), None, *call)
        return out * jnp.asarray(factor, out.dtype), lse

    return CACHED_FORWARD.configure, forward


@pytest.mark.parametrize(
    "wrong, factor, found",
    [
        (None, 1.0, ""),
        (0, float("nan"), "relative error nan of out"),
        slow(1, 1.5, "relative error 0.5 of dq"),
        (3, 1.5, "relative error 0.5 of dv"),
        (4, 1.5, "relative error 0.5 of dscore"),
    ],
)
def test_the_check_compares_with_the_definition(wrong: Any, factor: float, found: str) -> None:
    family, here = AttentionFamily(64, 64, "bfloat16", SEGMENTS), jax.devices()[0]
    expected = found and f"{family}: {found}"
    assert first_use.check(family, defined(wrong, factor), A100, here) == (expected, True)


@pytest.mark.parametrize("factor, found", [(1.0, ""), (1.5, "relative error 0.5 of out")])
def test_the_check_of_decoding_compares_with_the_definition(factor: float, found: str) -> None:
    family = DecodeFamily(128, 128, "bfloat16", page_size=16)
    expected = found and f"{family}: {found}"
    assert first_use.check(family, defined_step(factor), A100, jax.devices()[0]) == (expected, True)


@pytest.mark.parametrize(
    "family",
    [
        AttentionFamily(64, 64, "bfloat16", SEGMENTS),
        AttentionFamily(64, 64, "float16", DROPOUT),
        DecodeFamily(64, 64, "float16", 8, 16, True),
    ],
    ids=str,
)
def test_a_check_compiles_one_program_beside_its_kernels(family: Any) -> None:
    """An operation on an array would be another one, and of a matrix product XLA would try many."""
    decodes = isinstance(family, DecodeFamily)
    definition = defined_step(1.0) if decodes else defined(None)
    jax.clear_caches()  # of operations on arrays of these shapes
    with compilations() as compiled:
        assert first_use.check(family, definition, A100, jax.devices()[0]).error == ""
    assert compiled == ["jit(run)"]
    with compilations() as compiled:
        case = family.case(DECODE if decodes else KERNELS, A100)
        program = jax.make_jaxpr(case.kernels)(*case.arrays)
    # A proof about the mask's code is for the host.
    assert set(compiled) <= {"jit(attends_to_itself)"}
    assert "dot_general" not in str(program)


# Each kind of kernel and each dtype; the others differ in their head dims.
INTERPRETED = (
    ("8.0", AttentionFamily(64, 64, "bfloat16", SEGMENTS)),
    ("8.0", DecodeFamily(64, 64, "float16", 24, 8, True)),
    slow("8.0", AttentionFamily(64, 64, "float16", DROPOUT, True)),
    slow("8.0", AttentionFamily(64, 64, "bfloat16", forward=LONG)),
    slow("8.6", AttentionFamily(128, 128, "float32")),
    slow("8.6", AttentionFamily(256, 256, "bfloat16", SEGMENTS)),
    slow("8.0", AttentionFamily(192, 128, "bfloat16", DROPOUT)),
    slow("8.0", AttentionFamily(96, 96, "float32", SEGMENTS, True)),
    slow("8.0", AttentionFamily(192, 192, "float32")),  # `blockwise` forms the gradients
    slow("8.0", DecodeFamily(256, 256, "bfloat16", 64, 16)),
)


@pytest.mark.parametrize("capability, family", INTERPRETED, ids=str)
def test_families_are_right_interpreted(capability: str, family: Any) -> None:
    kernels = DECODE if isinstance(family, DecodeFamily) else KERNELS
    case = family.case(kernels, gpus.device(capability))

    def run(function: Any, arrays: tuple) -> Any:
        return interpreter.run(function, *arrays)

    # Half of what is allowed on a GPU.
    assert first_use.compare(case, first_use.MAX_ERROR[family.dtype] / 2, run) == ""


@pytest.mark.parametrize(
    "family, kernels",
    [
        (PLAIN_64, ()),
        (AttentionFamily(64, 64, "bfloat16", SEGMENTS), ("list_blocks", "order_tiles")),
        (
            AttentionFamily(64, 64, "float16", DROPOUT, True),
            ("list_blocks", "order_tiles", "mask_bits", "attention_dq"),
        ),
    ],
    ids=str,
)
def test_a_case_runs_the_kernels_that_such_calls_have(family: Any, kernels: tuple) -> None:
    case = family.case(KERNELS, A100)
    program = str(jax.make_jaxpr(case.kernels)(*case.arrays))
    found = set(re.findall(r"name=(list_blocks|order_tiles|mask_bits|attention\w*)", program))
    assert found == {"attention", "attention_gradients", *kernels}


def test_a_case_of_decoding_under_a_mask_lists_blocks(monkeypatch: Any) -> None:
    listed: list = []
    lists_blocks = block_lists.lists_blocks
    monkeypatch.setattr(
        block_lists, "lists_blocks", lambda *args: listed.append(lists_blocks(*args)) or listed[-1]
    )
    case = DecodeFamily(64, 64, "bfloat16", mods=True).case(DECODE, A100)
    jax.eval_shape(case.kernels, *case.arrays)
    assert listed == [True]


def test_a_wrong_decode_kernel_leaves_the_others_in_use_and_the_call_warns(
    checks: Checks, monkeypatch: Any
) -> None:
    family = DecodeFamily(64, 64, "bfloat16")
    checks.wrong[str(family)] = f"{family}: relative error 0.5 of out"
    q = jax.ShapeDtypeStruct((2, 1, 4, 64), "bfloat16")
    keys: Any = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")
    lengths: Any = jax.ShapeDtypeStruct((2,), "int32")
    cache = fa.Cache(keys, keys, lengths)
    explanation = fa.explain(q, cache, device=A100)
    assert explanation.implementation == "ampere" and not explanation.plan.reads_cache
    assert "relative error 0.5 of out" in str(explanation)
    with (
        planned_for(A100),
        pytest.warns(
            fa.FallbackWarning, match="runs on ampere, slower: .*relative error 0.5.*report"
        ),
    ):
        jax.eval_shape(fa.cached_attention, q, cache)


@pytest.mark.gpu
@pytest.mark.parametrize("family", gpu_report.FAMILIES, ids=str)
def test_kernels_are_right_here(family: Any) -> None:
    kernels = DECODE if isinstance(family, DecodeFamily) else KERNELS
    (gpu, *_), device = jax.local_devices(), device_of(jnp.zeros(()))
    assert first_use.check(family, kernels, device, gpu) == ("", True)


@pytest.mark.gpu
def test_a_mistake_is_found_here() -> None:
    def forward(*args: Any) -> Any:
        out, lse = backend.forward(*args)
        return out * 1.0625, lse

    (gpu, *_), device = jax.local_devices(), device_of(jnp.zeros(()))
    found = first_use.check(PLAIN_64, (forward, backend.backward), device, gpu)
    error = re.search("relative error (.*) of out", found.error)
    # The kernel's own error and the rounding of the product are a few thousandths.
    assert error and float(error[1]) == pytest.approx(1 / 16, abs=0.005)
