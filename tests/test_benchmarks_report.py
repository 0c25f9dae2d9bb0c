"""The report of a benchmark's results: ratios, means, tables and figures."""

import pytest

from benchmarks import plot, record, report
from benchmarks.shapes import SHAPES, SHORT
from tests.test_benchmarks import TINY, cell, result, row


def results_of(**results):
    setup = {"device": "Invented device", "driver": "1.0"}
    runs = [{"date": "2000-01-01", "commit": "abc", "matmul": 800.0, "shapes": list(results)}]
    return {"setup": setup, "runs": runs, "results": results}


SYNTHETIC = results_of(
    d128_s1024_c=result(SHAPES["d128_s1024_c"], ours=400.0, fa3=500.0, cudnn=200.0),
    d128_s8192_c=result(SHAPES["d128_s8192_c"], ours=600.0, fa3=None, cudnn=480.0),
    d128_q2048_k8192_f=result(SHAPES["d128_q2048_k8192_f"], ours=500.0, fa3=500.0, cudnn=100.0),
    d128_s512_c=result(SHAPES["d128_s512_c"], ours=None, fa3=500.0, cudnn=100.0),
)


def test_ratios_are_to_the_best_rival():
    rows = [result["rows"] for result in SYNTHETIC["results"].values()]
    assert [report.ratio(r, "forward") for r in rows] == [0.8, 1.25, 1.0, None]
    assert report.ratio({"ours": row(1.0)}, "forward") is None
    # Of our kernels the first that has a speed counts, and no one is a rival of another.
    kernels = {"ours": row(3.0), "ampere": row(2.0), "array": row(5.0), "fa2": row(1.0)}
    assert report.ratio(kernels, "forward") == 3.0
    refused = {"forward": {"refused": "not on this GPU"}}
    assert report.ratio(kernels | {"ours": refused}, "forward") == 2.0


def test_the_backward_is_the_difference():
    drawn = report.tflops({"forward": cell(2 / 3, 2.0), "both": cell(7 / 10, 7.0)}, "backward")
    assert drawn == pytest.approx(5.0 / 7)  # two operations in 3 s, seven in 10: five in 7
    assert report.tflops({"forward": cell(1.0)}, "backward") is None


def test_means_and_smallest_ratio():
    text = report.summary(SYNTHETIC["results"], "both")
    assert "geometric mean 1.000 over 3 shapes" in text
    assert "0.800 over the 1 up to 2048 tokens" in text  # 2048 queries with 8192 keys are not short
    assert "least 0.800 (d128_s1024_c)" in text and "1 without a ratio" in text
    assert "no shape" in report.summary({"x": result(TINY, ours=1.0)}, "forward")


def test_the_report_lists_missing_speeds_and_errors(tmp_path, capsys):
    record.write(tmp_path / "x.json", SYNTHETIC)
    report.main([str(tmp_path / "x.json")])
    text = capsys.readouterr().out
    assert "Invented device" in text and "2000-01-01, abc: 4 shapes" in text
    assert "| shape | ours | fa3 | cudnn | ours / best rival |" in text
    assert "| d128_s8192_c | 600 | - | 480 | 1.25 |" in text
    assert "- fa3, forward: NotImplementedError: no (d128_s8192_c)" in text
    assert "over the allowed: ours 0.50, fa3 0.50, cudnn 0.50" in text
    for title in report.PHASES.values():
        assert f"\n{title}, TFLOP/s" in text


def test_short_sequences_are_summarized_separately():
    """They are not in the mean of the shapes of the papers."""
    results = {"vit_l16": result(SHORT["vit_l16"], ours=200.0, fa3=100.0)}
    both = report.groups(SYNTHETIC["results"] | results)
    assert both[" of short sequences"] == results and both[""] == SYNTHETIC["results"]


def test_figures_have_a_panel_for_each_head_dim_and_mask(tmp_path, capsys):
    names = ("ours", "fa3", "cudnn", "tokamax", "jla", "xla")
    results = {
        name: result(shape, **{n: 100.0 + i + shape.q_len / 100 for i, n in enumerate(names)})
        for name, shape in SHAPES.items()
    }
    record.write(tmp_path / "some-gpu.json", results_of(**results))
    out = tmp_path / "figures"
    plot.main([str(tmp_path / "some-gpu.json"), "--out", str(out)])
    assert sorted(p.name for p in out.iterdir()) == ["some-gpu-both.svg", "some-gpu-forward.svg"]
    once = {p.name: p.read_bytes() for p in out.iterdir()}
    plot.main([str(tmp_path / "some-gpu.json"), "--out", str(out)])
    assert {p.name: p.read_bytes() for p in out.iterdir()} == once
    for data in once.values():
        text = data.decode()
        for head_dim in (64, 128, 256):
            assert f"causal, head dim {head_dim}<" in text and f"full, head dim {head_dim}<" in text
        for label in ("pallas_fa2", "FlashAttention-3", "XLA", "512", "16k", "Invented device"):
            assert f"{label}" in text
        assert "dc:date" not in text


def test_shapes_without_a_speed_are_not_drawn():
    drawn = plot.curves(SYNTHETIC["results"], "forward")
    assert drawn == {
        (True, 128): {
            "ours": [(1024, 400.0), (8192, 600.0)],
            "fa3": [(512, 500.0), (1024, 500.0)],
            "cudnn": [(512, 100.0), (1024, 200.0), (8192, 480.0)],
        }
    }
    assert len(plot.draw(SYNTHETIC, "forward").axes) == 1
    with pytest.raises(ValueError, match="no shape"):
        plot.draw(results_of(tiny=result(TINY, ours=1.0)), "forward")


def test_speed_ups_are_drawn_over_gpus(tmp_path):
    def row(strategy, devices, heads=1, **phases):
        return {"strategy": strategy, "devices": devices, "heads": heads, **phases}

    rows = {
        "one": row("one", 1, forward={"ms": 4.0}),
        "ring 4": row("ring", 4, forward={"ms": 1.25, "speedup": 3.2}),
        "ring 2": row("ring", 2, forward={"ms": 2.0, "speedup": 2.0}),
        "ring 2x2": row("ring", 4, heads=2, forward={"ms": 1.25, "speedup": 3.2}),
        "ulysses 2": row("ulysses", 2, forward={"refused": "no"}),
    }
    results = {"causal_1k": {"rows": rows}}
    expected = {"ring": [(1, 1.0), (4, 3.2), (2, 2.0)]}
    assert plot.speedups(results) == {("causal_1k", "forward"): expected}
    record.write(tmp_path / "some-gpu-x4.json", {"setup": {"device": "GPU"}, "results": results})
    plot.main([str(tmp_path / "some-gpu-x4.json"), "--out", str(tmp_path)])
    assert "Speed-up over one GPU" in (tmp_path / "some-gpu-x4-speedup.svg").read_text()
