"""The benchmark of decode steps: what is measured is checked, and a rival that fails ends no run."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import decode, measure
from benchmarks.decode import Case

TINY = Case(2, 128, 4, 2, 16)


@pytest.fixture
def fake_times(monkeypatch):
    """Each launch has a kernel of 3 milliseconds behind one of 1."""
    monkeypatch.setattr(measure, "RESTS", 0)
    monkeypatch.setattr(
        decode, "kernel_times", lambda run, args, count: [[("plan", 1.0), ("decode", 3.0)]] * count
    )


def test_a_case_has_speeds_of_what_is_right(fake_times, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(decode, "CASES", {"tiny": TINY})
    wrong = decode.IMPLEMENTATIONS | {
        "xla": decode.Implementation(lambda q, k, v, lengths: jnp.zeros_like(q))
    }
    monkeypatch.setattr(decode, "IMPLEMENTATIONS", wrong)
    path = tmp_path / "tiny.json"
    decode.main(["--rivals", "xla,cudnn,triton", "--iterations", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["results"]["tiny"]["rows"]
    for name in decode.OURS:
        # K and V of 2 sequences of 128 tokens, 2 heads of 16 numbers, in 4 ms
        size = 1 if name in ("int8", "fp8") else 2
        assert rows[name]["gb_s"] == pytest.approx(size * 2e-9 * 2 * 128 * 2 * 16 / 4e-3, rel=1e-3)
        assert rows[name]["ms"] == 4.0 and rows[name]["others_ms"] == 1.0
        assert rows[name]["error"] < 0.01
    assert "wrong result" in rows["xla"]["refused"] and "gb_s" not in rows["xla"]
    assert "refused" in rows["cudnn"] and "refused" in rows["triton"]  # no GPU
    assert "tiny" in capsys.readouterr().out


def test_pages_hold_the_keys_of_the_cache():
    q, k, v, lengths = decode.inputs(TINY)
    _, pool, _, _, table = decode.paged(16, q, k, v, lengths)
    np.testing.assert_array_equal(pool[table].reshape(k.shape), k)
    assert sorted(np.asarray(table).ravel()) == list(range(16))


def test_a_cache_of_8_bits_is_checked_against_what_it_stands_for():
    args = decode.inputs(TINY)
    stored = decode.quantized(jnp.int8, *args)
    expected = decode.reference(jnp.float32, *stored)
    assert decode.error(decode.ours(*stored), expected) < 0.01
    assert 0.001 < decode.error(decode.reference(jnp.float32, *args), expected) < 0.03
    wrong = *stored[:-1], 1.5 * stored[-1]
    assert decode.error(decode.ours(*wrong), expected) > 0.1


def test_log_normal_lengths_reach_the_longest():
    lengths = Case(64, 8192, log_normal=True).lengths()
    assert lengths.max() == 8192 and lengths.min() >= 1 and len(set(lengths.tolist())) > 60
    assert Case(2, 100).lengths().tolist() == [100, 100]
    assert Case(1, 4096).gigabytes() == pytest.approx(0.0168, rel=1e-2)
