"""The benchmark of first calls without a GPU: what it calls, what its processes see, and what it says of them."""

import json
import os
import pathlib
import time

import jax
import numpy as np
import pytest

from benchmarks import first_call, first_call_cases
from benchmarks.first_call import Target
from benchmarks.first_call_cases import Sizes
from pallas_fa2.compilation import store

TINY = Sizes(
    length=32, heads=2, kv_heads=1, head_dim=8, layers=2, hidden=16, vocabulary=24,
    ours="reference", rival="xla",
)  # fmt: skip


def took(seconds, **others):
    return {
        "import": 1.0,
        "device": 0.5,
        "norms": [2.0, 3.0],
        "digest": "abc",
        "first": {"trace": 0.5, "total": seconds},
        "second": {"total": 0.25},
        **others,
    }


@pytest.mark.parametrize("case", ["forward", "backward", "documents", "scores"])
def test_a_case_is_timed_twice(case):
    found = first_call_cases.measure(case, TINY)
    for which in ("first", "second"):
        steps = dict(found[which])
        total = steps.pop("total")
        assert list(steps) == ["trace", "lower", "compile", "run"]
        assert 0 < total == pytest.approx(sum(steps.values()))
    assert np.isfinite(found["norms"]).all() and len(found["digest"]) == 12


@pytest.mark.parametrize(
    "case, results", [("forward", 1), ("backward", 4), ("documents", 4), ("scores", 5)]
)
def test_the_results_are_the_output_and_all_gradients(case, results):
    problem = first_call_cases.CASES[case](TINY)
    out, *gradients = shapes = jax.tree.leaves(jax.eval_shape(problem.function, *problem.arguments))
    assert len(shapes) == results
    floating = [x.shape for x in problem.arguments if x.dtype != np.int32]
    assert out.shape == (1, 32, 2, 8)
    assert [x.shape for x in gradients] == (floating[1:] if gradients else [])


def test_the_model_learns_the_same_with_either_attention():
    losses = []
    for case in ("llama", "llama_cudnn"):
        problem = first_call_cases.CASES[case](TINY)
        step = jax.jit(problem.function)
        with jax.numpy_dtype_promotion("standard"):  # jax.nn's own code needs it
            loss, weights = step(*problem.arguments)
        assert jax.tree.map(np.shape, weights) == jax.tree.map(np.shape, problem.arguments[0])
        for name, w in weights["layers"].items():
            before = problem.arguments[0]["layers"][name]
            assert len(w) == TINY.layers and not np.array_equal(w, before), name
        losses.append(float(loss))
        assert problem.compared((loss, weights)) is loss
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and 2 < losses[0] < 5


def test_processes_have_an_empty_store_then_a_full_one_and_the_rival_none(monkeypatch):
    seen = []

    def run(command, limit, cache):
        seen.append((command[-1], limit, cache, cache != "0" and os.path.exists(cache)))
        if cache != "0":
            os.makedirs(cache, exist_ok=True)
        return took(1.0)

    monkeypatch.setattr(first_call, "run", run)
    names = [name for name, _ in first_call.processes("llama", 7.0)]
    assert names == ["cold", "store_cold", "store_warm", "rival"]
    cache = seen[1][2]
    assert seen == [
        ("llama", 7.0, "0", False),
        ("llama", 7.0, cache, False),
        ("llama", 7.0, cache, True),
        ("llama_cudnn", 7.0, "0", False),
    ]
    assert len(list(first_call.processes("command", 7.0))) == 3 and seen[-1][0] == "pallas_fa2"


def test_a_process_has_no_cache_of_jax_and_the_store_that_it_is_given(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/the/user")
    monkeypatch.setenv(store.VARIABLE, "/of/the/user")
    program = """
        import json, os
        print("a warning")
        print(json.dumps({"cache": {k: v for k, v in os.environ.items() if "CACHE" in k}}))
    """
    found = first_call.run(["-c", "\n".join(map(str.strip, program.splitlines()))], 20.0, "/store")
    expected = {"JAX_ENABLE_COMPILATION_CACHE": "false", store.VARIABLE: "/store"}
    assert {k: found["cache"].get(k) for k in (*expected, "JAX_COMPILATION_CACHE_DIR")} == {
        **expected,
        "JAX_COMPILATION_CACHE_DIR": None,
    }
    assert found["process"] > 0


def test_a_process_that_fails_says_why():
    failed = first_call.run(["-c", "print('1 %'); raise ValueError('no GPU')"], 20.0, "0")
    assert failed == {"failed": "exit code 1; 1 %; ValueError: no GPU"}


def test_a_process_is_ended_at_the_limit_with_those_that_it_started(tmp_path):
    path = tmp_path / "started"
    program = f"""
import pathlib, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(path)!r}).write_text(str(process.pid))
time.sleep(60)
"""
    assert first_call.run(["-c", program], 2.0, "0") == {"failed": "it had not ended after 2 s"}
    status = pathlib.Path("/proc") / path.read_text() / "status"

    def has_ended() -> bool:
        # Whoever adopted it may not have noticed yet: a zombie has ended.
        try:
            return "State:\tZ" in status.read_text()
        except OSError:
            return True

    # Killed processes take a moment to end on busy cores.
    deadline = time.monotonic() + 10
    while not has_ended() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended()


def test_targets_are_compared_with_what_the_rival_does_not_take(monkeypatch):
    monkeypatch.setitem(first_call.TARGETS, "llama", Target(2.0, 0.25, 0.5))
    results = {
        "cold": took(9.0),
        "store_cold": took(9.0),
        "store_warm": took(7.5),
        "rival": took(7.0, second={"total": 0.0}),
    }
    assert first_call.summarize("llama", results) == [
        "llama     cold: 2.00 s beyond the rival's 7.00, target 2: met",
        "llama     store warm: 0.50 s beyond the rival's 7.00, target 0.25: MISSED",
        "llama     second program: 0.25 s beyond the rival's 0.00, target 0.5: met",
    ]
    del results["rival"], results["cold"]
    assert first_call.summarize("llama", results) == []
    assert first_call.summarize("forward", results) == [
        "forward   store warm: 7.50 s, target 0.3: MISSED"
    ]
    assert first_call.summarize("command", {"cold": {"process": 8.5}}) == [
        "command   cold: 8.50 s, target 8: MISSED"
    ]


@pytest.mark.parametrize(
    "norms, agrees", [([2.01, 3.0], True), ([2.0, 3.1], False), ([2.0, float("nan")], False)]
)
def test_processes_compute_the_same(norms, agrees):
    results = {
        "cold": took(1.0),
        "store_cold": {"failed": "?"},
        "store_warm": took(1.0, norms=norms),
    }
    expected = None if agrees else "norms differ: store_warm"
    assert first_call.disagreement(results) == expected
    if not np.isfinite(norms).all():
        results = {"cold": took(1.0, norms=norms)}
        assert first_call.disagreement(results) == "norms differ: cold"


def test_a_run_prints_and_writes_each_process(monkeypatch, tmp_path, capsys):
    path = tmp_path / "first-call.json"

    def run(command, limit, cache):
        if command[0] == "-c":
            setup = dict.fromkeys(("device", "driver", "jax", "jaxlib", "sources"), "H200")
            return {**setup, "process": 2.0}
        if command[-1] == "pallas_fa2":
            return {"process": 5.0} if cache == "0" else {"failed": "exit code 1"}
        return took(3.08171)

    monkeypatch.setattr(first_call, "run", run)
    options = ["--cases", "forward,command", "--json", str(path), "--commit", "c0ffee"]
    assert first_call.main(options) == 1  # the command failed
    printed = capsys.readouterr().out
    assert "forward   cold         3.08 s (trace 0.50); second program 0.25 s" in printed
    assert "command   cold         5.00 s\n" in printed and "store_cold exit code 1" in printed
    assert "forward   cold: 3.08 s, target 2: MISSED" in printed
    saved = json.loads(path.read_text())
    assert saved["commit"] == "c0ffee" and saved["setup"]["device"] == "H200"
    assert saved["seconds"]["forward"]["store_warm"]["first"]["total"] == 3.082
    assert list(saved["seconds"]["command"]) == ["cold", "store_cold", "store_warm"]


def test_unknown_cases_are_refused(capsys):
    with pytest.raises(SystemExit):
        first_call.parse(["--cases", "forward,cofee"])
    assert "cofee" in capsys.readouterr().err
