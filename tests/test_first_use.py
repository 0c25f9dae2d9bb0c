"""The check of the mma.sync kernels on a GPU of a kind that nobody has run them on."""

import json
import os
import pathlib
from typing import Any

import jax
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends import reference
from pallas_fa2.backends.sm80 import backend, first_use
from pallas_fa2.backends.sm80.decode.cached_forward import CACHED_FORWARD
from pallas_fa2.compilation import store
from pallas_fa2.device import Device, device_of
from pallas_fa2.ir.equivalent_call import equivalent_arrays, equivalent_spec

A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108)
KERNELS = backend.forward, backend.backward


class _Gpu:
    platform = "gpu"
    device_kind = A100.kind

    class client:
        platform_version = "CUDA 13"


@pytest.fixture
def checks(monkeypatch: Any, tmp_path: pathlib.Path) -> list:
    """A machine with an A100 whose checks find what the list begins with; the devices that were checked are appended."""
    found: list = [""]
    monkeypatch.setenv("PALLAS_FA2_CACHE", str(tmp_path))
    monkeypatch.setattr(jax, "local_devices", lambda: [_Gpu])

    def check(kernels: Any, device: Device, gpu: Any) -> str:
        found.append(device)
        return found[0]

    monkeypatch.setattr(first_use, "check", check)
    first_use._remembered.cache_clear()
    yield found
    first_use._remembered.cache_clear()


def test_a_kind_is_checked_once_and_remembered(checks: list) -> None:
    for _ in range(2):
        assert first_use.failure(KERNELS, A100) is None
    assert checks[1:] == [A100]
    first_use._remembered.cache_clear()  # as in another process
    assert first_use.failure(KERNELS, A100) is None
    assert checks[1:] == [A100]
    (key,) = json.loads(first_use.cache_file().read_text())
    assert all(x in key for x in (A100.kind, "8.0", "CUDA 13", jax.__version__))


def test_wrong_kernels_are_not_used_and_it_says_so(checks: list) -> None:
    checks[0] = "dq at H = 64: relative error 0.5"
    reason = first_use.failure(KERNELS, A100)
    assert reason is not None
    assert "dq at H = 64: relative error 0.5" in reason
    assert "report" in reason


def test_what_has_been_run_and_what_is_elsewhere_is_not_checked(
    checks: list, monkeypatch: Any
) -> None:
    assert first_use.failure(KERNELS, A100._replace(capability="9.0")) is None
    monkeypatch.setattr(jax, "local_devices", list)
    assert first_use.failure(KERNELS, A100) is None
    assert checks[1:] == []


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_without_a_directory_of_its_own_the_file_is_in_the_users_cache(
    value: str | None, checks: list, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    monkeypatch.delenv("PALLAS_FA2_CACHE")
    if value is not None:
        monkeypatch.setenv("PALLAS_FA2_CACHE", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert first_use.failure(KERNELS, A100) is None
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]
    assert (tmp_path / "cache" / "pallas_fa2" / "first_use.json").exists()


def test_the_store_writes_into_the_directory_that_the_check_has_made(
    checks: list, monkeypatch: Any, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PALLAS_FA2_CACHE", str(tmp_path / "kernels"))
    umask = os.umask(0o002)
    try:
        assert first_use.failure(KERNELS, A100) is None
    finally:
        os.umask(umask)
    assert first_use.cache_file().exists()
    assert store.write("key", store.Entry(b"", None, {}))


def test_a_directory_that_cannot_be_written_is_no_error(checks: list, monkeypatch: Any) -> None:
    monkeypatch.setenv("PALLAS_FA2_CACHE", "/proc/nothing")
    assert first_use.failure(KERNELS, A100) is None


@pytest.mark.parametrize(
    "factor, wrong",
    [
        (1.0, ""),
        (1.5, "out at H = 64 in bfloat16: relative error 0.5"),
        (float("nan"), "out at H = 64 in bfloat16: relative error nan"),
    ],
)
def test_the_check_compares_with_the_definition(
    factor: float, wrong: str, monkeypatch: Any
) -> None:
    """With the definition in place of the kernels, whose output has a mistake."""

    def forward(spec: Any, _: Any, *arrays: Any) -> Any:
        out, lse = reference.forward(spec, None, *arrays)
        return out * factor, lse

    def backward(spec: Any, _: Any, q: Any, k: Any, v: Any, *saved: Any) -> Any:
        _, _, dout, _, operands, _ = saved

        def attend(q: Any, k: Any, v: Any) -> Any:
            return reference.forward(spec, None, q, k, v, operands)[0]

        return (*jax.vjp(attend, q, k, v)[1](dout), ())

    monkeypatch.setattr(first_use, "FAMILIES", ((64, "bfloat16"),))
    here = jax.local_devices()[0]
    assert first_use.check((forward, backward), A100, here) == wrong


@pytest.mark.parametrize(
    "factor, wrong",
    [(1.0, ""), (1.5, "a decode step at H = 128 and pages of 16: relative error 0.5")],
)
def test_the_check_of_decoding_compares_with_the_definition(
    factor: float, wrong: str, monkeypatch: Any
) -> None:
    """With a definition of its own in place of the kernel."""

    def forward(spec: Any, config: Any, *arrays: Any) -> Any:
        call = equivalent_arrays(spec, *arrays)
        out, lse = reference.forward(equivalent_spec(spec), None, *call)
        return out * factor, lse

    monkeypatch.setattr(first_use, "DECODE_FAMILIES", ((128, 16),))
    here, kernels = jax.local_devices()[0], (CACHED_FORWARD.configure, forward)
    assert first_use.check_decode(kernels, A100, here) == wrong


def test_a_wrong_decode_kernel_leaves_the_others_in_use(checks: list, monkeypatch: Any) -> None:
    monkeypatch.setattr(first_use, "check_decode", lambda *_: "a decode step: relative error 0.5")
    q = jax.ShapeDtypeStruct((2, 1, 4, 64), "bfloat16")
    keys = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")
    cache = fa.Cache(keys, keys, jax.ShapeDtypeStruct((2,), "int32"))
    explanation = fa.explain(q, cache, device=A100)
    assert explanation.implementation == "ampere" and not explanation.plan.reads_cache
    assert "a decode step: relative error 0.5" in str(explanation)
    keys = json.loads(first_use.cache_file().read_text())
    assert sorted(key.endswith(", decode") for key in keys) == [False, True]


@pytest.mark.gpu
def test_kernels_are_right_here() -> None:
    (gpu, *_) = jax.local_devices()
    device, decode = (
        device_of(jax.numpy.zeros(())),
        (CACHED_FORWARD.configure, CACHED_FORWARD.forward),
    )
    assert first_use.check(KERNELS, device, gpu) == ""
    assert first_use.check_decode(decode, device, gpu) == ""


@pytest.mark.gpu
def test_a_mistake_is_found_here() -> None:
    def forward(*args: Any) -> Any:
        out, lse = backend.forward(*args)
        return out * 1.05, lse

    (gpu, *_) = jax.local_devices()
    found = first_use.check((forward, backend.backward), device_of(jax.numpy.zeros(())), gpu)
    assert "out at H = 64 in bfloat16: relative error" in found
