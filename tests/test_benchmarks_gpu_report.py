"""The report of a GPU that a user sends, without one."""

import importlib
import sys

import jax
import pytest

from benchmarks import gpu_report, jobs, measure, record, rivals, run
from benchmarks.shapes import REPORT, Shape
from pallas_fa2.backends.sm80 import first_use
from pallas_fa2.backends.sm80.first_use_cases import AttentionFamily, DecodeFamily
from pallas_fa2.device import Device
from tests.test_benchmarks import result

RTX_3090 = Device("gpu", "NVIDIA GeForce RTX 3090", "8.6", 82)


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An RTX 3090 whose kernels are right, and a clock that needs none; a test may set another capability."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_report, "device_of", lambda _: RTX_3090)
    monkeypatch.setattr(first_use, "check", lambda *_: first_use.Verdict())
    monkeypatch.setattr(measure, "matmul", lambda n: 60.0)

    def fake(shape, implementations, iterations, backward):
        names = dict.fromkeys(implementations, 40.0)
        return result(shape, **{**names, "ampere": 50.0})

    monkeypatch.setattr(measure, "measure", fake)

    def run_here(function, names, processes, end):
        return ((name, function(name)) for name in names)

    monkeypatch.setattr(jobs, "run_all", run_here)
    return tmp_path


def test_a_report_is_a_file_of_results_that_describes_the_gpu(gpu, capsys, monkeypatch):
    monkeypatch.setattr(
        record, "setup", lambda *_: {"device": RTX_3090.kind, "jax": jax.__version__}
    )
    run.main(["--report"])
    path = gpu / "pallas_fa2-nvidia-geforce-rtx-3090.json"
    saved = record.load(path)
    assert saved["gpu"]["capability"] == "8.6" and saved["gpu"]["multiprocessors"] == 82
    assert saved["gpu"]["first_use"] == dict.fromkeys(map(str, gpu_report.FAMILIES), "right")
    assert set(saved["results"]) == set(REPORT) and saved["setup"]["jax"] == jax.__version__
    out = capsys.readouterr().out
    assert "| d128_s4096_c |" in out and f"Please send us {path}" in out
    assert "ours" not in saved["results"]["d128_s4096_c"]["rows"]  # these are for Hopper
    assert "1.25" in out  # ampere over the best rival


def test_a_report_says_of_each_family_what_is_wrong(monkeypatch):
    """Of one the kernel does not compile, of another the output is wrong."""
    families = first, second, *_ = gpu_report.FAMILIES

    def compare(case, *_):
        if case == first:
            raise RuntimeError("ptxas failed")
        return "relative error 0.5 of dq" if case == second else ""

    for family in (AttentionFamily, DecodeFamily):
        monkeypatch.setattr(family, "case", lambda self, *_: self)
    monkeypatch.setattr(first_use, "compare", compare)
    report = gpu_report.first_use_by_family(RTX_3090)
    assert list(report) == [str(family) for family in families]
    assert report.pop(str(first)) == f"{first}: RuntimeError: ptxas failed"
    assert report.pop(str(second)) == f"{second}: relative error 0.5 of dq"
    assert set(report.values()) == {"right"}


def test_the_description_is_there_before_the_first_shape(gpu, monkeypatch):
    def ends(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "measure", ends)
    with pytest.raises(KeyboardInterrupt):
        run.main(["--report", "--json", str(gpu / "x.json")])
    assert record.load(gpu / "x.json")["gpu"]["capability"] == "8.6"


def test_kernels_of_hopper_are_measured_there_alone():
    assert gpu_report.kernels(RTX_3090) == ("ampere",)
    assert gpu_report.kernels(RTX_3090._replace(capability="9.0")) == ("ours", "ampere")


@pytest.mark.parametrize("device", [Device(), RTX_3090._replace(kind="Tesla T4", capability="7.5")])
def test_other_devices_are_refused(device, monkeypatch):
    monkeypatch.setattr(gpu_report, "device_of", lambda _: device)
    message = (
        rf"8.0 or more, and JAX's first device is {device.kind}.*pip install '\.\[cuda13\]' tqdm"
    )
    with pytest.raises(SystemExit, match=message):
        run.main(["--report"])


def test_without_tqdm_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.delitem(sys.modules, "benchmarks.run")
    with pytest.raises(ImportError, match=r"pip install '\.\[cuda13\]' tqdm, in the checkout"):
        importlib.import_module("benchmarks.run")


def test_a_report_has_a_dozen_shapes_that_small_gpus_hold():
    assert len(REPORT) == 12
    for shape in REPORT.values():
        assert isinstance(shape, Shape) and shape.batch * shape.q_len <= 16384
        assert shape.q_heads * shape.head_dim <= 4096


def test_the_option_for_ampere_takes_its_shapes_and_its_rival():
    args = run.parse(["--ampere"])
    assert run.contestants(args) == ("ampere", "fa2") and "vit_b16" in args.shapes
    args = run.parse(["--ampere", "--rivals", "fa2,cudnn"])
    assert run.contestants(args) == ("ampere", "fa2", "cudnn")
    assert run.contestants(run.parse([])) == tuple(rivals.IMPLEMENTATIONS)
