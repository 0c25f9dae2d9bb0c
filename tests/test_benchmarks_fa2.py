"""FlashAttention-2 as a rival: in a process of its own, called as its authors intend, and timed by kernels."""

import importlib
import importlib.util
import subprocess
import sys
import types

import numpy as np
import pytest

from benchmarks import measure, remote, rivals
from benchmarks.rivals import Implementation
from benchmarks.shapes import AMPERE, Shape

START = subprocess.Popen
TINY = Shape(2, 24, 24, 2, 2, 16, True)


@pytest.fixture
def measured(monkeypatch):
    """Measure FlashAttention-2's stand-in on a CPU; its process has a mood."""
    monkeypatch.setattr(measure.time, "sleep", lambda _: None)

    def run(*mood, backward=True):
        command = sys.executable, "-m", "tests.support.numpy_worker", *mood
        monkeypatch.setattr(remote.subprocess, "Popen", lambda _, **pipes: START(command, **pipes))
        fa2 = Implementation(rivals.fa2, "torch", "torch", worker="benchmarks.torch_fa2")
        return measure.measure(TINY, {"fa2": fa2}, 3, backward)["rows"]["fa2"]

    return run


def test_a_process_is_checked_before_it_is_timed(measured):
    row = measured()
    assert row["forward"]["ms"] == 2.0 and row["both"]["ms"] == 4.0
    assert len(row["forward"]["error"]) == 1 and len(row["both"]["error"]) == 4
    assert all(0 < error < 0.01 for error in row["both"]["error"])
    assert set(measured(backward=False)) == {"forward"}


def test_a_process_that_is_wrong_or_ends_gets_no_speed(measured):
    assert measured("wrong")["forward"]["refused"] == "wrong result"
    assert measured("dies")["forward"] == {
        "refused": "RuntimeError: its process ended with exit code 3"
    }


def test_without_torch_the_rival_is_left_out(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rivals.importable(["ours", "fa2"])[1] == {
        "fa2": "ModuleNotFoundError: No module named 'torch'"
    }
    with pytest.raises(NotImplementedError, match="a process without JAX"):
        rivals.fa2(TINY, *[None] * 3)


class Tensor(np.ndarray):
    """What the code that calls PyTorch needs of its tensors."""

    def transpose(self, *axes):
        return self.swapaxes(*axes)

    def flatten(self, first, last):
        return self.reshape(-1, *self.shape[last + 1 :])


@pytest.fixture
def torch_fa2(monkeypatch):
    """The module with a PyTorch that returns q and records its calls in `calls`."""
    calls = []

    def record(name):
        def call(q, *args, **options):
            calls.append((name, q.shape, args, options))
            return (q, None) if name == "packed" else q

        return call

    class Kernel:
        def __enter__(self):
            calls.append("flash")

        def __exit__(self, *_):
            pass

    def module(name, **attributes):
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    aten = types.SimpleNamespace(_flash_attention_forward=record("packed"))
    module(
        "torch",
        int32="int32",
        tensor=lambda x, dtype, device: (x.tolist(), dtype, device),
        ops=types.SimpleNamespace(aten=aten),
    )
    functional = module("torch.nn.functional", scaled_dot_product_attention=record("sdpa"))
    module("torch.nn", functional=functional)
    backends = types.SimpleNamespace(FLASH_ATTENTION="flash")
    module("torch.nn.attention", SDPBackend=backends, sdpa_kernel=lambda _: Kernel())
    module("torch.profiler", ProfilerActivity=None, profile=None)
    monkeypatch.delitem(sys.modules, "benchmarks.torch_fa2", raising=False)
    loaded = importlib.import_module("benchmarks.torch_fa2")
    loaded.calls = calls
    yield loaded
    sys.modules.pop("benchmarks.torch_fa2")


def test_it_is_called_as_its_authors_intend(torch_fa2):
    q, k = (np.zeros((2, 24, heads, 16)).view(Tensor) for heads in (4, 2))
    shape = vars(Shape(2, 24, 24, 4, 2, 16, True))
    assert torch_fa2.attention_of(shape)(q, k, k).shape == q.shape
    flash, (name, q_shape, _, options) = torch_fa2.calls
    assert (flash, name, q_shape) == ("flash", "sdpa", (2, 4, 24, 16))
    assert options == {"is_causal": True, "enable_gqa": True}
    torch_fa2.calls.clear()
    packed = vars(Shape(1, 24, 24, 4, 4, 16, True, documents=(3, 21)))
    q = q[:1]
    assert torch_fa2.attention_of(packed)(q, q, q).shape == q.shape
    ((name, q_shape, (_, _, ends, *rest), _),) = torch_fa2.calls
    assert (name, q_shape, ends) == ("packed", (24, 4, 16), ([0, 3, 24], "int32", "cuda"))
    assert rest == [ends, 21, 21, 0.0, True, False]


@pytest.mark.parametrize(
    "shape, why",
    [
        (Shape(1, 8, 24, 2, 2, 16, True), "first key"),
        (Shape(1, 24, 24, 2, 2, 16, True, window=3), "no window"),
        (Shape(1, 24, 24, 2, 2, 16, True, soft_cap=3.0), "no soft_cap"),
        (Shape(1, 24, 24, 2, 2, 16, False, bias=True), "no bias"),
    ],
)
def test_what_it_does_not_support_is_an_error(torch_fa2, shape, why):
    with pytest.raises(NotImplementedError, match=why):
        torch_fa2.attention_of(vars(shape))


def event(name, start, us, device="CUDA"):
    span = types.SimpleNamespace(start=start, elapsed_us=lambda: us)
    return types.SimpleNamespace(
        name=name, time_range=span, device_type=types.SimpleNamespace(name=device)
    )


def test_times_are_those_of_kernels_run_by_run(torch_fa2):
    events = [
        event("cudaLaunchKernel", 0, 9.0, "CPU"),
        event("convert_dq", 4, 30.0),
        event("flash_bwd", 3, 500.0),
        event("Memset (Device)", 2, 7.0),
        event("flash_bwd", 5, 600.0),
        event("convert_dq", 8, 40.0),
    ]
    assert torch_fa2.times_by_run(events, 2) == pytest.approx([0.53, 0.64])
    with pytest.raises(RuntimeError, match="4 kernels were profiled in 3 runs"):
        torch_fa2.times_by_run(events, 3)
    with pytest.raises(RuntimeError, match="0 kernels"):
        torch_fa2.times_by_run([], 3)


def test_its_shapes_are_those_that_both_run():
    assert {shape.head_dim for shape in AMPERE.values()} == {64, 96, 128, 256}
    for shape in AMPERE.values():
        assert shape.q_len == shape.kv_len and shape.value_dim is None
        assert shape.window is None and shape.soft_cap is None and not shape.bias


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["vit_b16", "llama8b_8k", "docs16"])
def test_its_kernels_on_a_gpu(name):
    """They are right, and take as long by CUPTI as by CUDA's events around some runs, with what lies between kernels.

    The least of each is compared: other tests have the GPU as well.
    """
    implementations, missing = rivals.importable(["fa2"])
    if missing:
        pytest.skip(missing["fa2"])
    row = measure.measure(AMPERE[name], implementations, 10)["rows"]["fa2"]
    assert "tflops" in row["forward"] and "tflops" in row["both"], row
    with remote.Worker("benchmarks.torch_fa2", AMPERE[name]) as worker:
        worker.load(measure.inputs(AMPERE[name])[:4])
        for phase in ("forward", "both"):
            by_events, ms = worker.ask("event_time", phase, 20), min(worker.ask("times", phase, 20))
            assert 0.8 * by_events < ms < 1.05 * by_events, (phase, row, ms, by_events)
