"""`python -m pallas_fa2 cache` shows, warms and clears the store."""

import contextlib
import pathlib
from collections.abc import Iterator
from unittest import mock

import jax
import pytest

from pallas_fa2 import cache_command
from pallas_fa2.compilation import launches, store
from tests.support import compile_gate
from tests.support.hopper import planned_for_h200
from tests.support.stores import another_process_removes
from tests.support.tiers import slow

SHAPES = ["--query", "1,64,4,64", "--key", "1,64,2,64"]


@pytest.fixture
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_store_it_says_how_to_have_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv(store.VARIABLE, raising=False)
    assert cache_command.run([]) == 1
    assert "set PALLAS_FA2_CACHE=1" in capsys.readouterr().out


def test_it_shows_and_clears(directory: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    store.write("key", store.Entry(b"", None, {}))
    assert cache_command.run([]) == cache_command.run(["show"]) == 0
    assert capsys.readouterr().out.count(f"{directory}: 1 entries, 0.0 MiB") == 2
    assert cache_command.run(["clear"]) == 0
    assert f"1 entries removed from {directory}" in capsys.readouterr().out
    assert store.files() == []


@pytest.mark.parametrize("command", ["show", "warm", "clear"])
def test_it_says_that_a_directory_is_not_used(
    command: str, directory: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    directory.write_text("a file")
    options = SHAPES if command == "warm" else []
    assert cache_command.run([command, *options]) == (command != "clear")
    said = f"{directory} is not used: it is not a directory\n"
    cleared = f"0 entries removed from {directory}\n"
    assert capsys.readouterr().out == (cleared if command == "clear" else said)


def test_it_shows_files_that_are_removed_meanwhile(
    directory: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write("key", store.Entry(b"", None, {}))
    another_process_removes(monkeypatch)
    assert cache_command.run([]) == 0
    assert f"{directory}: 1 entries" in capsys.readouterr().out


def test_warming_needs_a_gpu(directory: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
    assert cache_command.run(["warm", *SHAPES]) == 1
    assert "JAX runs on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("shape", ["1,64,4", "1,64,4,0", "1,64,4,x"])
def test_a_shape_has_four_sizes(
    shape: str, directory: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit):
        cache_command.run(["warm", "--query", shape, "--key", shape])
    assert "--query" in capsys.readouterr().err


@contextlib.contextmanager
def described_h200() -> Iterator[None]:
    """Kernels are compiled for a GPU that this machine need not have."""
    device = compile_gate.h200s(1)[0]
    jax.clear_caches()  # of programs that hold launches of another test
    with (
        planned_for_h200(),
        launches.compiled_for(device),
        jax.default_device(device),
        mock.patch.object(jax, "default_backend", return_value="gpu"),
        mock.patch.object(jax, "device_count", return_value=1),
        mock.patch.object(launches, "_programs", {}),
    ):
        yield


@pytest.mark.parametrize("options, entries", [(["--forward-only"], 1), slow([], 2)])
def test_warming_stores_the_kernels_of_a_call(
    options: list[str], entries: int, directory: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    with described_h200():
        assert cache_command.run(["warm", *SHAPES, "--causal", *options]) == 0
    printed = capsys.readouterr().out
    assert f"{entries} entries added to {directory}" in printed and "never stored" not in printed
    assert len(store.files()) == entries


def test_warming_stores_the_kernel_for_decoding_and_says_why_it_adds_nothing_again(
    directory: pathlib.Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["warm", "--query", "1,1,4,64", "--key", "1,4096,2,64", "--forward-only"]
    for entries in (1, 0):
        with described_h200():
            assert cache_command.run(command) == 0
        printed = capsys.readouterr().out
        assert f"{entries} entries added to {directory}" in printed
        said = "stored already" in printed and "merges its splits" in printed
        assert said == (not entries)
    assert len(store.files()) == 1
