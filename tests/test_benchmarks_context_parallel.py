"""The benchmark of several GPUs, on virtual devices: every strategy computes what one device does, and has a speed."""

import json

import jax
import pytest

from benchmarks import context_parallel
from benchmarks.context_parallel import Case


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(context_parallel, "HEAD_DIM", 8)
    monkeypatch.setattr(context_parallel, "HEADS", 4)
    monkeypatch.setattr(context_parallel, "KEY_HEADS", 2)
    monkeypatch.setattr(context_parallel, "SECONDS", 0.0)
    return lambda *case: monkeypatch.setattr(context_parallel, "CASES", {"tiny": Case(*case)})


@pytest.mark.parametrize(
    ("mask", "layout", "strategies"),
    [("documents", "zigzag", "ring,jit"), ("full", "contiguous", "all_gather,ulysses,heads")],
)
def test_each_strategy_has_a_speed(tiny, tmp_path, mask, layout, strategies):
    tiny(mask, 32, layout)
    path = tmp_path / "tiny.json"
    context_parallel.main(
        ["--cases", "tiny", "--strategies", strategies, "--devices", "2", "--json", str(path)]
    )
    rows = json.loads(path.read_text())["results"]["tiny"]["rows"]
    assert list(rows) == ["one", *strategies.split(",")]
    for name, row in rows.items():
        for phase, count in (("forward", 1), ("both", 4)):
            assert row[phase]["ms"] > 0, row
            if name != "one":
                assert len(row[phase]["difference"]) == count and row[phase]["efficiency"] > 0


def test_a_wrong_result_has_no_speed(tiny, monkeypatch):
    tiny("causal", 32, "contiguous")
    monkeypatch.setattr(
        context_parallel, "options", lambda case, ids: {"is_causal": ids.shape[1] == 32}
    )
    # With all tokens the mask is causal, with those of one device it is not.
    rows = context_parallel.measure_case("tiny", ("ring",), 2)["rows"]
    assert (
        "speedup" not in rows["ring"]["forward"] and rows["ring"]["forward"]["difference"][0] > 0.01
    )
    assert jax.device_count() >= 2
