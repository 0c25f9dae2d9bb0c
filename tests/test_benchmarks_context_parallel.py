"""The benchmark of several GPUs, on virtual devices: every strategy computes what one device does, and has a speed."""

import json
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from benchmarks import context_parallel, context_parallel_page, jobs, packing
from benchmarks.context_parallel import Case, Division


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(context_parallel, "HEAD_DIM", 8)
    monkeypatch.setattr(context_parallel, "HEADS", 4)
    monkeypatch.setattr(context_parallel, "KEY_HEADS", 2)
    monkeypatch.setattr(context_parallel, "SECONDS", 0.0)
    return lambda *case: monkeypatch.setattr(context_parallel, "CASES", {"tiny": Case(*case)})


def measured(path, *arguments):
    context_parallel.main(["--cases", "tiny", "--json", str(path), *arguments])
    return json.loads(path.read_text())["results"]["tiny"]["rows"]


@pytest.mark.parametrize(
    ("mask", "layout", "strategies", "devices", "names"),
    [
        ("documents", "zigzag", "ring,jit", "2", ["ring 2", "jit 2"]),
        ("full", "contiguous", "all_gather,ulysses,heads", "2", ["all_gather 2", "ulysses 2", "heads 2"]),
        ("causal", "zigzag", "ring", "4", ["ring 4", "ring 2x2"]),
        ("documents", "balanced", "all_gather", "2", ["all_gather 2"]),
    ],
)  # fmt: skip
def test_each_strategy_has_a_speed(tiny, tmp_path, mask, layout, strategies, devices, names):
    tiny(mask, 32, layout)
    rows = measured(tmp_path / "tiny.json", "--strategies", strategies, "--devices", devices)
    assert list(rows) == ["one", *names]
    for name, row in rows.items():
        assert row["devices"] == (1 if name == "one" else int(devices))
        for phase, count in (("forward", 1), ("both", 4)):
            assert row[phase]["ms"] > 0, row
            if name != "one":
                assert len(row[phase]["difference"]) == count and row[phase]["efficiency"] > 0


def test_a_training_step_has_a_speed(tiny, tmp_path):
    tiny("causal", 32, "zigzag", 2)
    arguments = "--strategies", "ring,heads", "--devices", "4", "--trace", str(tmp_path / "traces")
    rows = measured(tmp_path / "tiny.json", *arguments)
    assert (tmp_path / "traces" / "tiny_ring_4" / "step").exists()
    assert list(rows) == ["one", "ring 4"]  # heads of a model would need its matrices divided
    step = rows["ring 4"]["step"]
    assert len(step["difference"]) == 7 and step["efficiency"] > 0  # the loss and six matrices


def test_rows_are_measured_in_the_order_of_their_weight():
    rows = [
        x.name for x in context_parallel.divisions(Case("causal", 32), ("ring", "heads"), [2, 8])
    ]
    assert rows == ["one", "ring 8", "heads 8", "ring 2", "heads 2", "ring 2x4", "ring 4x2"]


def test_tokens_do_not_depend_on_how_they_are_divided(tiny):
    tiny("documents", 32)
    case = context_parallel.CASES["tiny"]
    order = case.order(4)
    for x, y in zip(
        context_parallel.inputs(case, range(32)), context_parallel.inputs(case, order), strict=True
    ):
        assert (x[:, order] == y).all()
    values = context_parallel.inputs(Case("full", 4096), range(4096))[0]
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01


def test_more_elements_than_a_kernel_takes_are_computed_by_heads(monkeypatch):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 4, 8))
    expected = fa.flash_attention(q, k, v, is_causal=True)
    monkeypatch.setattr(context_parallel, "MOST_ELEMENTS", q.size - 1)
    calls = mock.Mock(wraps=fa.flash_attention)
    monkeypatch.setattr(fa, "flash_attention", calls)
    out = context_parallel.on_one_device(q, k, v, is_causal=True)
    assert calls.call_count == 2
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_a_wrong_result_has_no_speed(tiny, monkeypatch, tmp_path):
    tiny("causal", 32, "contiguous")
    monkeypatch.setattr(
        context_parallel, "options", lambda case, ids: {"is_causal": ids.shape[1] == 32}
    )
    # With all tokens the mask is causal, with those of one device it is not.
    forward = measured(tmp_path / "tiny.json", "--strategies", "ring", "--devices", "2")["ring 2"][
        "forward"
    ]
    assert "speedup" not in forward and forward["difference"][0] > 0.01


def test_a_row_that_fails_says_why_and_ends_no_other(tiny, tmp_path):
    tiny(
        "causal", 36
    )  # no zigzag order over eight devices, and two key heads are not divided over eight
    arguments = "--strategies", "ring,heads", "--devices", "2,8"
    rows = measured(tmp_path / "tiny.json", *arguments)
    assert "length must be a multiple" in rows["ring 8"]["both"]["refused"]
    assert "refused" in rows["heads 8"]["forward"] and "ms" in rows["heads 2"]["both"]


def test_nothing_is_measured_when_the_time_is_over(tiny):
    tiny("causal", 32)
    rows = {"tiny one": (context_parallel.CASES["tiny"], Division("one"))}
    assert context_parallel.measure_row("tiny one", rows, time.monotonic(), None) is None
    assert list(jobs.run_all(str.upper, ["a"], 1, time.monotonic())) == []


def test_a_table_has_a_line_for_each_number_of_gpus():
    def row(strategy, sequence, heads=1, **step):
        devices = sequence * heads
        return {
            "strategy": strategy,
            "sequence": sequence,
            "heads": heads,
            "devices": devices,
            "step": step,
        }

    rows = {
        "one": row("one", 1, ms=8.0),
        "ring 4": row("ring", 4, ms=2.0, efficiency=1.0),
        "ring 2x2": row("ring", 2, 2, ms=2.5, efficiency=0.8),
        "ulysses 4": row("ulysses", 4, refused="no heads"),
    }
    assert context_parallel_page.table({"model": {"rows": rows}})[2:] == [
        "| model | training step | 8.00 | 2 x 2 | 2.50 (0.800) | - |",
        "| model | training step | 8.00 | 4 | 2.00 (1.000) | - |",
    ]


def test_documents_are_ordered_so_that_devices_compute_equally_much():
    lengths = np.array([40, 3, 5, 30, 7, 11, 9, 15, 8])
    assert packing.pairs(lengths, 2).tolist() == [40 * 41 // 2 + 6 + 15 + 16 * 17 // 2, 624]
    order = packing.balanced_order(lengths, 2)
    documents = np.repeat(np.arange(9), lengths)[order]
    where = [np.flatnonzero(documents == d) for d in range(9)]
    assert all((np.diff(x) == 1).all() and (np.diff(order[x]) == 1).all() for x in where)
    work = packing.pairs(lengths[documents[np.flatnonzero(np.diff(documents, prepend=-1))]], 2)
    assert work.max() < 1.02 * work.mean() < packing.pairs(lengths, 2).max() / 1.05


def test_documents_are_counted_in_the_order_in_which_they_are_packed() -> None:
    case = Case("documents", 65_536, "balanced")
    order = case.order(2)
    before, ids = case.ids()[0, order], case.ids_at(order)[0]
    assert (np.diff(before) < 0).any() and (np.diff(ids) >= 0).all() and ids.max() == before.max()
    assert ((np.diff(before) != 0) == (np.diff(ids) != 0)).all()


def test_the_largest_and_the_smallest_word_are_finite_inputs() -> None:
    values = context_parallel.normal_from_bits(jnp.array([0, 2**32 - 1], jnp.uint32))
    assert np.isfinite(np.asarray(values, np.float32)).all() and values[0] == -values[1]
