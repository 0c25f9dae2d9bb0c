"""The examples run: training on our attention is training on Flax's, the gallery shows what is."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from examples import char_gpt, generate, long_context, mask_gallery, masks_and_scores
from examples.masks_and_scores import MASKS, SCORES
from pallas_fa2.backends.xla import blockwise
from pallas_fa2.parse_call import parse_call
from tests.support.hopper import H200
from tests.support.tiers import slow_but
from tests.support.tiles import N, assert_sound, exact, table

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


@pytest.mark.slow
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


def test_contexts_over_devices_are_learned_as_on_one(monkeypatch, capsys):
    """The only transfers are those of keys, values and their gradients, and the sums of parameters' gradients."""
    config = char_gpt.Config(1, 16, 2, 1, length=64, batch=2, steps=3, rate=1e-2)
    monkeypatch.setitem(long_context.PRESETS, "cpu", config)
    losses = [long_context.main(["--devices", count]) for count in ("1", "4")]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0]
    one, four = (x for x in capsys.readouterr().out.splitlines() if x.startswith("transfers"))
    assert one == "transfers {}" and set(re.findall(r"'(.*?)'", four)) == {
        "collective-permute",
        "all-reduce",
    }
    with pytest.raises(SystemExit, match="99 devices are needed"):
        long_context.main(["--devices", "99"])


TOKENS, HEADS = 128, N
# Where intervals see less than there is (routing: two kinds of data that follow each other; natten: rows
# of an image that are no multiple of a tile).
NOT_EXACT = {"routing", "natten"}


def dense(mask, tokens):
    """`[N, T, T]`, by running the mask's code on every pair."""
    x = jax.ShapeDtypeStruct((1, tokens, HEADS, 8), jnp.float32)
    spec, operands = parse_call(x, x, x, mask=mask)
    index = jnp.arange(tokens, dtype=jnp.int32)
    visible = spec.mask.on_leading_axes(
        index[None, None, None, :, None], index[None, None, None, None], operands.mask
    )
    return np.broadcast_to(visible, (1, HEADS, 1, tokens, tokens))[0, :, 0]


@pytest.mark.parametrize("name", [name for name in MASKS if name != "full"])
def test_tiles_of_the_gallery_equal_its_dense_masks(name):
    mask, sizes = MASKS[name](TOKENS, HEADS), (TOKENS, TOKENS, 8, 8)
    actual, want = table(mask, sizes), exact(dense(mask, TOKENS), sizes)
    assert_sound(actual, want)
    assert np.array_equal(actual, want) == (name not in NOT_EXACT)


def test_masks_and_scores_are_listed_with_what_they_save(capsys):
    masks_and_scores.main(TOKENS, HEADS)
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert {*MASKS, *SCORES} <= set(lines)
    assert "100.0%  Encoders." in lines["full"] and "ALiBi" in lines["alibi"]


def test_a_token_of_the_tree_attends_to_its_ancestors_and_itself():
    (visible,) = dense(masks_and_scores.tree(TOKENS, 1), TOKENS)[:1]
    assert visible[0].sum() == 1 and visible.sum(1).max() > 4
    for i in range(1, TOKENS):
        parent = np.flatnonzero(visible[i, :i])[-1]
        assert np.array_equal(visible[i], visible[parent] | (np.arange(TOKENS) == i))


@pytest.fixture
def qkv(monkeypatch):
    """Two query heads a key head, and four tiles."""
    monkeypatch.setattr(blockwise, "TILE_BYTES", 0)
    return [
        jax.random.normal(jax.random.key(i), (1, TOKENS, heads, 8))
        for i, heads in enumerate((HEADS, HEADS // 2, HEADS // 2))
    ]


@pytest.mark.parametrize("name", slow_but(lambda name: name == next(iter(SCORES)), SCORES))
def test_values_and_gradients_of_the_scores_of_the_gallery(name, qkv):
    q, k, v = qkv

    def loss(implementation):
        def loss_fn(score, q):
            out = fa.flash_attention(
                q, k, v, mask=fa.Causal(), score=score, implementation=implementation
            )
            return jnp.sum(jnp.sin(out)), out

        return jax.value_and_grad(loss_fn, (0, 1), has_aux=True)

    score = SCORES[name](TOKENS, HEADS)
    actual, want = loss("blockwise")(score, q), loss("reference")(score, q)
    chex.assert_trees_all_close(actual, want, rtol=1e-4, atol=1e-4)
    plain = fa.flash_attention(q, k, v, mask=fa.Causal(), implementation="reference")
    assert not np.allclose(want[0][1], plain, atol=1e-3), "the score does nothing"


def test_the_gallery_without_a_gpu(tmp_path, capsys):
    """The gallery plans for an H200, whose kernels support all masks."""
    assert len(MASKS) >= 12 and len(SCORES) >= 6
    out = tmp_path / "made by the example"
    mask_gallery.main(["--length", "1024", "--heads", "4", "--out", str(out)])
    text = capsys.readouterr().out
    assert "no times" in text and " ms" not in text
    lines = {line.split()[0]: line for line in text.splitlines() if line}
    assert {*MASKS, *SCORES} <= set(lines)
    assert "100.0%" in lines["full"] and "56.2%" in lines["causal"]  # 36 of 64 tiles
    assert "not on the Hopper kernels" not in text
    image = (out / "mask_gallery.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 20000


def test_the_gallery_prints_why_the_kernels_do_not_run(capsys):
    tiles = mask_gallery.Tiles(np.zeros((1, 1, 1, 2, 2)), "it is too blue")
    mask_gallery.show("mask", "", {"blue": tiles}, None)
    assert (
        "blue                  0.0%  not on the Hopper kernels: it is too blue"
        in capsys.readouterr().out
    )


def test_the_gallery_on_a_gpu(tmp_path, capsys, monkeypatch):
    """The fake clock shows 1 and 3 ms, and less for packed documents."""

    def clock(name, length, heads):
        assert (length, heads) == (256, 1)
        full = (1.0, 3.0)
        return mask_gallery.Timing((0.5, 2.0) if name == "packed_documents" else full, full)

    monkeypatch.setattr(mask_gallery, "measure", clock)
    monkeypatch.setattr(mask_gallery, "device_of", lambda array: H200)
    names = ["packed_documents", "padded", "token_bias"]
    mask_gallery.main([*names, "--length", "256", "--heads", "1", "--out", str(tmp_path)])
    lines = {x.split()[0]: x.split() for x in capsys.readouterr().out.splitlines() if x}
    # 3 of 4 tiles: 1.1 * 3 / 4 * 1 ms and 10 us
    packed = ["75.0%", "0.500", "0.835", "0.50", "0.50", "2.000", "2.485", "0.67", "0.67"]
    assert lines["packed_documents"][1:] == packed
    padded = ["1.000", "0.835", "1.00", "1.00", "3.000", "2.485", "1.00", "1.00"]
    assert lines["padded"][2:] == [*padded, "over", "its", "bound"]
    assert lines["token_bias"][2:] == ["1.000", "1.00", "3.000", "1.00"]
    assert not set(lines) & {"causal", "full", "alibi"}


def test_unknown_names_and_short_lengths_are_errors(capsys):
    with pytest.raises(SystemExit):
        mask_gallery.main(["casual"])
    assert "['casual'] not among ['full', 'causal'," in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mask_gallery.main(["--length", "100"])
    assert "--length 100 --heads 16, but at least 128" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full", "routing", "forgetting", "dense_bias"])
def test_the_gallery_compiles_before_it_locks_the_gpu(name, monkeypatch):
    """Forward, and with the gradients of what a score reads; in turns with full attention."""
    events = []

    class Lock:
        def __enter__(self):
            events.append("turn")

        def __exit__(self, *_):
            pass

    def burst(run, args, count):
        out = run(*args)
        events.append([x.shape for x in jax.tree.leaves(out)])
        return [float(len(events))] * count

    attend = fa.flash_attention
    monkeypatch.setattr(
        fa, "flash_attention", lambda *x, implementation, **options: attend(*x, **options)
    )
    monkeypatch.setattr(mask_gallery, "burst", burst)
    monkeypatch.setattr(mask_gallery.Gpu, "lock", Lock())
    assert mask_gallery.measure(name, 128, 2) == ((3.0, 7.0), (4.0, 8.0))
    q = (1, 128, 2, mask_gallery.HEAD_DIM)
    scores = {"forgetting": [(128,)], "dense_bias": [(128, 128)]}.get(name, [])
    assert events == ["turn", *[[q]] * 4, *[[q] * 4 + scores, [q] * 4] * 2]


SERVING = generate.Serving(3, 8, 8, requests=7, prompt=(1, 9), new=(1, 6), steps=3)


def test_served_text_is_that_of_dense_decoding(monkeypatch, capsys):
    """More requests than slots, prompts longer than what fits into a step, pages that are used again."""
    monkeypatch.setitem(char_gpt.PRESETS, "cpu", TINY)
    monkeypatch.setitem(generate.PRESETS, "cpu", SERVING)
    monkeypatch.setattr(generate, "PREFIX", "import os and more")
    requests = []
    make = generate.make_requests
    monkeypatch.setattr(generate, "make_requests", lambda *x: requests.extend(make(*x)) or requests)
    count = generate.main(["--seed", "1"])
    assert all(
        bytes(r.text).startswith(b"import os and mo") and r.read == r.end - 1 for r in requests
    )
    assert f"{count} characters are those of dense decoding" in capsys.readouterr().out

    config = dataclasses.replace(TINY, steps=SERVING.steps)
    params = char_gpt.train(config, "pallas_fa2", 1)[0]
    request = requests[0]
    request.text[-1] = (request.text[-1] + 1) % 128
    with pytest.raises(AssertionError, match="below that of dense"):
        generate.check_by_dense(config, params, [request], [request.end - 1])


def test_all_requests_run_one_program_and_write_in_place():
    config = dataclasses.replace(TINY, length=32)
    params = char_gpt.GPT(config, "pallas_fa2").init(
        jax.random.key(0), jnp.zeros((1, 32), jnp.int32)
    )
    server = generate.Server(config, params, SERVING, list(b"import os"))
    where = server.pools[0][0].unsafe_buffer_pointer()
    programs = generate.run_step._cache_size()
    for length in (9, 14, 20):
        server.start(generate.Request([65] * length, length + 3))
    done = [request for _ in range(9) for request in server.step()]
    assert len(done) == 3 and generate.run_step._cache_size() == programs
    assert server.pools[0][0].unsafe_buffer_pointer() == where
    assert sorted([*server.free, *server.shared]) == list(range(16))
