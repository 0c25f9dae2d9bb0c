"""The examples run, and training on our attention is training on Flax's."""

import jax
import numpy as np
import pytest

from examples import char_gpt

TINY = char_gpt.Config(2, 32, 4, 2, length=48, batch=8, steps=50, rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def promotion_as_users_have_it():
    """Optax relies on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Losses and held-out losses by kind of attention, and the folder of the curves."""
    out = tmp_path_factory.mktemp("out") / "made by the example"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(char_gpt.PRESETS, "cpu", TINY)
        results = {
            kind: char_gpt.main(["--attention", kind, "--seed", "3", "--out", str(out)])
            for kind in ("flax", "pallas_fa2")
        }
    return results, out


def test_flax_and_ours_train_alike(runs):
    results, _ = runs
    (flax, flax_held_out), (ours, our_held_out) = results["flax"], results["pallas_fa2"]
    assert len(flax) == len(ours) == 50
    np.testing.assert_allclose(ours, flax, atol=1e-3)
    assert list(our_held_out) == [5, 10, 15, 20, 25, 30, 35, 40, 45, 50]
    np.testing.assert_allclose(our_held_out[50], flax_held_out[50], atol=1e-3)


def test_training_lowers_the_loss_and_saves_its_curve(runs):
    results, out = runs
    losses, held_out = results["pallas_fa2"]
    assert losses[-1] < losses[0] - 1.0
    assert held_out[50] < held_out[5] - 0.1
    for kind in results:
        image = (out / f"char_gpt_cpu_{kind}.png").read_bytes()
        assert image.startswith(b"\x89PNG") and len(image) > 5000


def test_other_options(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(char_gpt.PRESETS, "cpu", TINY)
    losses, held_out = char_gpt.main(["--steps", "3", "--out", str(tmp_path)])
    assert len(losses) == 3 and max(held_out) == 3
    text = capsys.readouterr().out
    assert "implementation" in text and "\ndef " in text and "held-out loss" in text


def test_held_out_files_are_not_learned_from():
    text, held_out = char_gpt.read_text()
    assert text.max() < 128 and 0.03 < held_out.size / text.size < 0.3
    middle = held_out[held_out.size // 2 :][:200].tobytes()
    assert middle not in text.tobytes()
