"""Masks and scores in the benchmark: each implementation is asked for the same, and checked."""

import dataclasses
import functools
import math
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from benchmarks import measure, pages, plot, record, report, rivals, run
from benchmarks.rivals import Implementation
from benchmarks.shapes import MASKS, SHAPES, SWEEP, Shape
from tests.support.hopper import planned_for_h200
from tests.support.tiers import slow_but
from tests.test_benchmarks import result, row_of
from tests.test_benchmarks_report import results_of

TINY = Shape(1, 24, 24, 4, 2, 16, True)
WINDOW = dataclasses.replace(TINY, window=5)
DOCUMENTS = dataclasses.replace(TINY, documents=(3, 1, 13, 7))
CAPPED = dataclasses.replace(TINY, soft_cap=2.0)
BIASED = Shape(2, 24, 24, 4, 2, 16, False, bias=True)
EACH = {"window": WINDOW, "documents": DOCUMENTS, "soft_cap": CAPPED, "bias": BIASED}


@pytest.mark.parametrize("shape", [WINDOW, DOCUMENTS, dataclasses.replace(TINY, window=100)])
def test_flops_count_the_pairs_that_attend(shape):
    """Causal pairs are an area: half a pair less for each query on the diagonal."""
    ids = np.repeat(range(len(shape.documents)), shape.documents) if shape.documents else [0] * 24
    window = 24 if shape.window is None else shape.window
    visible = sum(ids[i] == ids[j] and i - window <= j <= i for i in range(24) for j in range(24))
    assert shape.forward_flops == 4 * 4 * 16 * (visible - 24 / 2)


def test_the_named_cases():
    assert set(MASKS) <= set(SHAPES) and {s.head_dim for s in MASKS.values()} == {128}
    packed = {name: shape for name, shape in MASKS.items() if shape.documents}
    assert [shape.q_len for shape in packed.values()] == [16384, 65536, 16384, 32768]
    for shape in packed.values():
        assert shape.batch == 1 and sum(shape.documents) == shape.q_len == shape.kv_len
    assert len(packed["docs16"].documents) == 16 and len(packed["docs32"].documents) == 32
    short = packed["docs_short"].documents
    assert len(short) > 100 and max(short) <= 512 and min(short) >= 1
    assert short == MASKS["docs_short"].documents and short[:3] == (438, 332, 270)
    assert {s.window for s in MASKS.values()} == {None, 128, 1024}
    assert {s.soft_cap for s in MASKS.values()} == {None, 30.0, 50.0}
    assert MASKS["bias"].bias and not MASKS["bias"].causal


class Called(Exception):
    pass


@pytest.fixture
def calls(monkeypatch):
    """Rivals that are not here: what they are called with, without q, k and v."""
    visible = {}

    def fake(path, *attributes):
        def attention(name):
            def call(q, k, v, *args, **options):
                visible[name] = (args, options)
                raise Called

            return call

        module = types.SimpleNamespace(**{name: attention(name) for name in attributes})
        monkeypatch.setitem(sys.modules, path, module)
        return module

    fake("dew_flash_attn", "flash_mha", "flash_mha_varlen")
    fake("tokamax", "dot_product_attention")
    attention = fake("jla.ops.mosaic_gpu.attention", "flash_attention")
    package = types.SimpleNamespace(attention=attention)
    for name in ("jla", "jla.ops", "jla.ops.mosaic_gpu"):
        monkeypatch.setitem(sys.modules, name, package)
    return visible


def call(name, shape):
    q, k, v, _, *data = measure.inputs(shape)
    with pytest.raises(Called):
        rivals.IMPLEMENTATIONS[name].attention(shape, q, k, v, *data)


def test_each_rival_is_called_as_its_authors_intend(calls):
    mosaic = {"is_causal": True, "implementation": "mosaic"}
    for shape, name, function, expected in (
        (WINDOW, "fa3", "flash_mha", {"is_causal": True, "window_size": (5, 0)}),
        (CAPPED, "fa3", "flash_mha", {"is_causal": True, "softcap": 2.0}),
        (WINDOW, "jla", "flash_attention", {"backward": "fused", "sliding_window": 6}),
        (WINDOW, "tokamax", "dot_product_attention", {**mosaic, "local_window_size": (5, 0)}),
        (CAPPED, "tokamax", "dot_product_attention", {**mosaic, "logits_soft_cap": 2.0}),
    ):
        call(name, shape)
        assert calls[function] == ((), expected)
    call("fa3", DOCUMENTS)
    (ends, longest), options = calls["flash_mha_varlen"]
    assert ends.tolist() == [0, 3, 4, 17, 24] and ends.dtype == jnp.int32 and longest == 13
    assert options == {"is_causal": True}
    call("jla", DOCUMENTS)
    ids = calls["flash_attention"][1]["segment_ids"]
    assert ids.shape == (1, 24) and np.unique(ids, return_counts=True)[1].tolist() == [3, 1, 13, 7]
    call("tokamax", DOCUMENTS)
    mask = calls["dot_product_attention"][1]["mask"]
    assert mask.shape == (1, 1, 24, 24) and mask.sum() == 9 + 1 + 169 + 49
    call("tokamax", BIASED)
    assert calls["dot_product_attention"][1]["bias"].shape == (1, 4, 24, 24)


@pytest.mark.parametrize(
    "name, feature", [("fa3", "bias"), ("jla", "soft_cap"), ("cudnn", "soft_cap"), ("xla", "soft_cap")]
)  # fmt: skip
def test_features_without_an_argument_of_a_rival_are_errors(calls, name, feature):
    shape = dataclasses.replace(EACH[feature], causal=True)
    q, k, v, _, *data = measure.inputs(shape)
    with pytest.raises(NotImplementedError, match=f"it has no {feature}"):
        rivals.IMPLEMENTATIONS[name].attention(shape, q, k, v, *data)


def test_dense_masks_have_a_limit():
    data = jax.ShapeDtypeStruct((1, 65536), jnp.int32)
    with pytest.raises(NotImplementedError, match=r"a dense mask of 4 GB \(limit 2\)"):
        rivals.pairwise_arrays(MASKS["docs32"], data)


@pytest.fixture
def cpu(monkeypatch):
    """Implementations that a CPU runs, and a clock that needs no GPU."""
    attend = fa.flash_attention

    def anywhere(*args, implementation=None, **options):
        at = "blockwise" if implementation == "hopper" else implementation
        return attend(*args, implementation=at, **options)

    monkeypatch.setattr(fa, "flash_attention", anywhere)
    monkeypatch.setattr(measure, "total_times", lambda fn, args, n: n * [2.0])
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):  # as jax.nn needs
        yield {name: rivals.IMPLEMENTATIONS[name] for name in ("ours", *report.VARIANTS, "xla")}


@pytest.mark.parametrize("name", slow_but(lambda name: name == "window", EACH))
def test_all_compute_the_same(cpu, name):
    """Ours ready-made, as a function, as segments and as an array, and XLA's, within the rule; nothing else is
    refused."""
    measured = measure.measure(EACH[name], cpu, 1)
    assert Shape(**measured["shape"]) == EACH[name]
    assert len(measured["allowed"]) == (5 if name == "bias" else 4)
    documents = None if EACH[name].documents else "NotImplementedError: it is for documents"
    refused = {who: row["forward"].get("refused") for who, row in measured["rows"].items()}
    assert refused == {
        "ours": None,
        "mask_fn": "NotImplementedError: there is no mask" if name == "bias" else None,
        "segments": documents,
        "array": documents,
        "xla": "NotImplementedError: it has no soft_cap" if name == "soft_cap" else None,
    }
    for who, row in measured["rows"].items():
        if refused[who] is None:
            assert "tflops" in row["forward"] and "tflops" in row["both"]
            assert len(row["both"]["error"]) == len(measured["allowed"])


@pytest.mark.parametrize("name", EACH)
def test_another_mask_or_score_gets_no_speed(cpu, name):
    """The truth has it."""
    shape = EACH[name]
    without = dataclasses.replace(shape, window=None, documents=(), soft_cap=None, bias=False)

    def attention(q, k, v, *data):
        return rivals.xla(without, q, k, v) + (0 * data[0].sum() if shape.bias else 0)

    measured = row_of(attention, measure.compile_problem(shape, False)(), 1, False)
    assert measured["forward"]["refused"] == "wrong result"


def test_a_wrong_gradient_of_the_bias_gets_no_speed(cpu):
    def attention(q, k, v, bias):
        halved = 0.5 * bias + jax.lax.stop_gradient(0.5 * bias)
        return rivals.ours(BIASED, q, k, v, halved)

    measured = row_of(attention, measure.compile_problem(BIASED)(), 1, True)
    assert "tflops" in measured["forward"] and measured["both"]["refused"] == "wrong result"
    assert measured["both"]["error"][4] == pytest.approx(0.5, abs=0.01)


def test_blockwise_is_the_expected_result_where_dense_scores_do_not_fit(monkeypatch):
    expected = measure.compile_problem(DOCUMENTS)()
    monkeypatch.setattr(measure, "score_limit", lambda: 0.0)
    attend, used = fa.flash_attention, []

    def watched(*args, implementation, **options):
        used.append(implementation)
        return attend(*args, implementation=implementation, **options)

    monkeypatch.setattr(fa, "flash_attention", watched)
    measured = measure.compile_problem(DOCUMENTS)()
    assert set(used) == {"blockwise"}
    assert all(e < 1e-5 for e in measure.relative_errors(measured.expected, expected.expected))


def test_unsupported_calls_of_ours_are_reported(monkeypatch):
    shape = dataclasses.replace(BIASED, head_dim=256)
    problem = measure.compile_problem(shape, False)()
    with planned_for_h200():
        measured = row_of(functools.partial(rivals.ours, shape), problem, 1, False)
    assert "with scores of data of pairs, head dims are at most" in measured["forward"]["refused"]
    text = report.report(results_of(bias={"shape": dataclasses.asdict(shape), "allowed": problem.allowed,
                                  "rows": {"ours": measured}}))  # fmt: skip
    assert "- ours, forward: ValueError: implementation 'hopper' does not" in text


def test_masks_are_chosen_by_a_flag(monkeypatch, tmp_path):
    measured = []

    def fake(shape, *_):
        measured.append(shape)
        return result(shape, ours=1.0)

    ours = {"ours": Implementation(rivals.ours, "pallas_fa2", "jax")}
    monkeypatch.setattr(rivals, "IMPLEMENTATIONS", ours)
    monkeypatch.setattr(measure, "matmul", lambda n: 800.0)
    monkeypatch.setattr(measure, "measure", fake)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    run.main(["--masks"])
    assert measured == list(MASKS.values()) and not list(tmp_path.iterdir())
    run.main(["--shapes", "docs16,bias", "--json", str(tmp_path / "some.json")])
    saved = record.load(tmp_path / "some.json")["results"]
    assert {n: Shape(**r["shape"]) for n, r in saved.items()} == {
        n: MASKS[n] for n in ("docs16", "bias")
    }


def test_the_report_has_masks_separately_and_ours_is_no_rival():
    rows = {"ours": 400.0, "mask_fn": 380.0, "fa3": 500.0}
    record_ = results_of(
        d128_s8192_c=result(MASKS["d128_s8192_c"], **{**rows, "mask_fn": 400.0}),
        window128=result(MASKS["window128"], **rows),
        docs16=result(MASKS["docs16"], **{**rows, "mask_fn": 410.0, "fa3": 320.0}),
    )
    results = record_["results"]
    assert [report.ratio(r["rows"], "forward") for r in results.values()] == [0.8, 0.8, 1.25]
    text = report.report(record_)
    assert "\nforward, TFLOP/s: geometric mean 0.800 over 1 shapes" in text
    assert "\nforward with masks and scores, TFLOP/s: geometric mean 1.000 over 2 shapes" in text
    mean = math.prod([1, 400 / 380, 400 / 410]) ** (1 / 3)
    assert f"built-in mask, time: geometric mean {mean:.3f} over 3 shapes, most 1.053" in text
    assert report.cost_of_functions(results_of(x=result(TINY, ours=1.0))["results"], "both") is None
    curves = plot.curves(results, "forward")
    assert curves == {(True, 128): {"ours": [(8192, 400.0)], "fa3": [(8192, 500.0)]}}


OF_SHAPES = {page.results for page in pages.PAGES.values()}
SPEEDS = sorted(p for p in record.RESULTS.glob("*.json") if p.name in OF_SHAPES)


@pytest.mark.parametrize("path", SPEEDS, ids=lambda p: p.stem)
def test_committed_results_can_be_read(path):
    saved = record.load(path)
    assert all(Shape(**r["shape"]) == SHAPES[name] for name, r in saved["results"].items())
    assert "geometric mean" in report.report(saved)
    assert saved["results"].keys().isdisjoint(SWEEP) != bool(
        plot.curves(saved["results"], "forward")
    )
