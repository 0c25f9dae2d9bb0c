"""The errors that docs/benchmarks/numerics.md shows: of what, against what, and who is called wrong."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import numerics, record, rivals
from benchmarks.shapes import Shape

SHAPE = Shape(1, 48, 48, 4, 2, 16, True)
ARGS = numerics.inputs(SHAPE, "bfloat16", "normal")


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(numerics, "DTYPES", ("bfloat16",))
    monkeypatch.setattr(numerics, "HEAD_DIMS", (16,))
    monkeypatch.setattr(numerics, "INPUTS", ("outliers",))
    monkeypatch.setattr(numerics, "PAGE", tmp_path / "numerics.md")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(rivals, "IMPLEMENTATIONS", {"ours": rivals.IMPLEMENTATIONS["ours"]})


def test_outliers_are_one_in_a_thousand():
    shape = Shape(1, 512, 512, 4, 2, 64, True)
    q, _, _, dout = (np.asarray(x) for x in numerics.inputs(shape, "float32", "outliers"))
    assert 0.4e-3 < np.mean(abs(q) > 6) < 0.7e-3  # of N(0, 100), a bit more than half
    assert not np.any(abs(dout) > 6)


def test_dense_and_ours_are_close_to_the_expected():
    expected = numerics.expected_results(SHAPE, ARGS)
    assert all(x.dtype == np.float64 for x in expected.values())
    for attention in (numerics.dense, numerics.all_implementations()["blockwise"]):
        errors = numerics.row(attention, SHAPE, ARGS, expected)
        assert tuple(errors) == numerics.RESULTS
        assert errors["lse"] < 2e-3 and all(1e-4 < errors[n] < 1e-2 for n in ("out", "dq", "dv"))


def test_a_run_writes_results_and_the_page(small):
    assert numerics.main(["--length", "40", "--commit", "abc"]) == 0
    (file,) = record.RESULTS.glob("numerics-*.json")
    (result,) = record.load(file)["results"]
    assert set(result["rows"]) == {"dense", "hopper", "blockwise", "reference"}
    assert "compute capability 9.0" in result["rows"]["hopper"]["refused"]
    page = numerics.PAGE.read_text()
    assert "T = 40" in page and "commit abc" in page and "### bfloat16, outliers" in page
    assert f"| 16 | blockwise | {result['rows']['blockwise']['out']:.2g} |" in page
    assert "hopper |" not in page
    numerics.PAGE.unlink()
    assert numerics.main(["--page"]) == 0 and numerics.PAGE.read_text() == page


@pytest.mark.parametrize("factor", [1.05, jnp.nan])
def test_violations_are_printed(small, monkeypatch, capsys, factor):
    def wrong(shape, *qkv):
        out, lse = numerics.ours("blockwise", shape, *qkv)
        return (factor * out).astype(out.dtype), lse

    all_of_them = {"dense": numerics.dense, "blockwise": wrong}
    monkeypatch.setattr(numerics, "all_implementations", lambda: all_of_them)
    assert numerics.main(["--length", "40", "--commit", "abc"]) == 1
    assert "blockwise, bfloat16, H = 16, outliers: out" in capsys.readouterr().out
    assert "| 16 | blockwise | **" in numerics.PAGE.read_text()


def test_the_page_begins_with_conclusions():
    def rows(kind, hopper, fa3):
        both = {
            name: dict.fromkeys(numerics.RESULTS, e)
            for name, e in (("hopper", hopper), ("fa3", fa3))
        }
        return {
            "inputs": kind,
            "rows": {
                **both,
                "dense": dict.fromkeys(numerics.RESULTS, 4.0),
                "cudnn": {"refused": ""},
            },
        }

    results = [rows("normal", 1.0, 2.0), rows("normal", 1.0, 1.0), rows("outliers", 3.0, 2.0)]
    measured = {"setup": {"device": "Invented device"}, "results": results}
    text = numerics.conclusions(measured)
    assert text is not None and text.startswith("On the Invented device, ")
    assert "at most 1.00 of FlashAttention-3's for normal inputs and 1.50 of them" in text
    assert "at most 0.25 and 0.75 of those of dense attention" in text
    assert text.endswith("rule allows 2. The logsumexp is off by at most 3.")
    del results[2]["rows"]["hopper"]  # as where no GPU is
    assert numerics.conclusions(measured) is None
