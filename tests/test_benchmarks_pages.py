"""The generated pages of docs/benchmarks: they are what the committed results make."""

import pytest

from benchmarks import numerics, pages, record
from benchmarks.shapes import SHAPES
from tests.test_benchmarks import cell, result
from tests.test_benchmarks_report import results_of

PAGE = pages.Page("Speed of nothing", "nothing.json", ("",), ("nothing-forward", "nothing-both"))
RESULTS = results_of(
    d128_s1024_c=result(SHAPES["d128_s1024_c"], ours=400.0, fa3=500.0, cudnn=None, mask_fn=None),
    d128_s8192_c=result(SHAPES["d128_s8192_c"], ours=600.0, fa3=480.0, cudnn=None, mask_fn=None),
)


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "FOLDER", tmp_path / "docs")
    monkeypatch.setattr(pages, "PAGES", {"nothing.md": PAGE})
    monkeypatch.setattr(pages, "OTHERS", (numerics,))
    monkeypatch.setattr(numerics, "PAGE", tmp_path / "docs" / "numerics.md")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    measured = {**RESULTS, "setup": RESULTS["setup"] | {"implementations": {"ours": "0.1.0"}}}
    record.write(tmp_path / "nothing.json", measured)
    return tmp_path / "docs"


def test_the_committed_pages_follow_from_the_committed_results():
    if not record.RESULTS.exists():
        pytest.skip("a source distribution has no results")
    for path, content in pages.generate().items():
        assert path.read_text() == content, (
            f"{path.name}: python -m benchmarks.pages writes it anew"
        )


def test_a_page_has_the_means_the_figures_and_a_table(small):
    text = pages.text(PAGE)
    assert text.startswith("# Speed of nothing\n") and "[nothing.json]" in text
    assert "- Invented device, driver 1.0, ours 0.1.0\n- 2000-01-01, commit abc" in text
    assert "geometric mean 1.000 over 2 shapes" in text and "least 0.800 (d128_s1024_c)" in text
    assert "![Forward](../figures/nothing-forward.svg)" in text
    # Without the columns of implementations that have no speed.
    assert "| shape | ours | fa3 | ours / best rival |" in text
    assert "| d128_s8192_c | 600 | 480 | 1.25 |" in text
    assert "- cudnn, forward: NotImplementedError: no (d128_s1024_c, d128_s8192_c)" in text
    assert "- mask_fn" not in text  # which is ours once more
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= 100


def test_a_page_of_several_groups_has_a_section_for_each(small):
    page = pages.Page(
        "Speed of a", "a.json", ("", " of short sequences"), ours="ampere", rival="fa2"
    )
    names = ("d128_s1024_c", "vit_b16", "docs16")
    results = {n: result(SHAPES[n], ampere=400.0, fa2=320.0) for n in names}
    measured = results_of(**results)
    measured["setup"]["implementations"] = {"ampere": "0.1.0", "fa2": "2.11.0"}
    record.write(small.parent / "a.json", measured)
    text = pages.text(page)
    assert "| vit_b16 | 400 | 320 | 1.25 |" in text and "docs16" not in text
    assert "## Forward, TFLOP/s" in text and "## Forward of short sequences, TFLOP/s" in text
    assert "| over fa2's | mean | least | most |" in text


def test_a_page_may_have_milliseconds(small):
    rows = {"ours": {"forward": cell(2.0, 0.15)}, "fa3": {"forward": cell(1.0, 0.1)}}
    measured = pages.table({"window128": {"rows": rows}}, "forward", pages.time)
    assert measured.splitlines()[2:] == ["| window128 | 0.075 | 0.100 | 2.00 |"]


def test_errors_are_ratios_to_a_rival():
    def row(*error):
        return {"both": {"tflops": 1.0, "error": list(error)}}

    results = {
        "a": {"rows": {"ours": row(2.0, 1.0, 1.0, 1.0), "fa3": row(1.0, 1.0, 1.0, 4.0)}},
        "b": {"rows": {"ours": row(1.0, 1.0, 1.0, 1.0), "fa3": row(1.0, 1.0, 1.0, 1.0)}},
        "c": {"rows": {"ours": row(9.0, 9.0, 9.0, 9.0)}},
    }
    header, _, out, *_, dv = pages.errors(results)
    assert header == "| over fa3's | mean | least | most |"
    assert out == "| out | 1.500 | 1.000 | 2.000 |" and dv == "| dv | 0.625 | 0.250 | 1.000 |"
    assert pages.errors({"c": results["c"]}) == []


def test_the_command_writes_what_differs_and_checks(small, capsys):
    assert pages.main(["--check"]) and not small.exists()
    assert not pages.main([]) and capsys.readouterr().out.count("written: ") == 2
    assert (small / "nothing.md").read_text() == pages.text(PAGE)
    assert not pages.main(["--check"]) and capsys.readouterr().out == "\n"
    (small / "nothing.md").write_text("edited by hand")
    assert pages.main(["--check"]) and capsys.readouterr().out == "differs: nothing.md\n"
