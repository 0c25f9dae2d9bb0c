"""Files of the store are whole, of this version and the user's own, or they do not exist; a disk never fails a call."""

import errno
import io
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
from typing import Any
from unittest import mock

import pytest

from pallas_fa2.compilation import store
from pallas_fa2.compilation.store import Entry
from tests.support.stores import another_process_removes

ENTRY = Entry(b"program" * 100, ("out", "lse"), {b"hash": (b"executable", None, None)})


@pytest.fixture(autouse=True)
def directory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    path = tmp_path / "cache"
    monkeypatch.setenv(store.VARIABLE, str(path))
    monkeypatch.setattr(store, "_warned", set())
    return path


def the_file() -> pathlib.Path:
    (path,) = store.files()
    return path


def test_an_entry_is_read_as_it_was_written(directory: pathlib.Path) -> None:
    assert store.read("key") is None
    assert store.write("key", ENTRY)
    assert store.read("key") == ENTRY
    assert store.read("another") is None
    assert directory.stat().st_mode & 0o777 == 0o700
    assert the_file().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("value", ["", "0", None])
def test_without_the_variable_there_is_no_store(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(store.VARIABLE)
    if value is not None:
        monkeypatch.setenv(store.VARIABLE, value)
    assert store.directory() is None and store.files() == [] and store.clear() == 0
    assert not store.write("key", ENTRY) and store.read("key") is None


def test_the_default_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.VARIABLE, "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert store.directory() == pathlib.Path("/var/caches/pallas_fa2")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.directory() == pathlib.Path.home() / ".cache" / "pallas_fa2"


def cut(length: int) -> Any:
    return lambda data: data[:length]


def flipped(position: int) -> Any:
    def flip(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[position] ^= 1
        return bytes(changed)

    return flip


DAMAGES = {
    "empty": cut(0),
    "cut in the header": cut(10),
    "cut in the digest": cut(len(store.MAGIC) + 5),
    "cut in the body": cut(-1),
    "longer": lambda data: data + b"\0",
    "a bit of the digest": flipped(len(store.MAGIC)),
    "a bit of the body": flipped(-1),
    "foreign": lambda data: b"#!/bin/sh\n" + data,
    "another format": lambda data: data.replace(b"launch 1", b"launch 2", 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_replaced(damage: str) -> None:
    store.write("key", ENTRY)
    file = the_file()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    with mock.patch.object(store.pickle, "loads") as loads:
        assert store.read("key") is None
    assert not loads.called
    assert store.write("key", ENTRY) and store.read("key") == ENTRY


def test_a_file_under_the_name_of_another_key_is_ignored() -> None:
    store.write("key", ENTRY)
    file = the_file()
    store.write("another", ENTRY._replace(program=b"of another call"))
    (other,) = set(store.files()) - {file}
    other.rename(file)
    assert store.read("key") is None


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_others_can_write_to_is_not_read(what: str, directory: pathlib.Path) -> None:
    store.write("key", ENTRY)
    (directory if what == "directory" else the_file()).chmod(0o777)
    with mock.patch.object(store.pickle, "loads") as loads:
        assert store.read("key") is None
    assert not loads.called
    if what == "directory":
        assert not store.write("another", ENTRY)


def test_what_another_user_owns_is_not_read() -> None:
    store.write("key", ENTRY)
    with mock.patch.object(store.os, "getuid", return_value=os.getuid() + 1):
        assert store.read("key") is None


@pytest.mark.parametrize("failing", ["tempfile.mkstemp", "os.replace", "pathlib.Path.mkdir"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_no_error(
    failing: str, number: int, directory: pathlib.Path
) -> None:
    store.write("key", ENTRY)
    with mock.patch(failing, side_effect=OSError(number, os.strerror(number))):
        assert not store.write("another", ENTRY)
    assert store.read("key") == ENTRY and store.read("another") is None
    assert not list(directory.glob("*.part"))


def test_a_full_disk_in_the_middle_of_a_file_leaves_nothing(directory: pathlib.Path) -> None:
    class Full(io.FileIO):
        def write(self, _: Any) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(store.os, "fdopen", Full):
        assert not store.write("key", ENTRY)
    assert store.read("key") is None and list(directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_no_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "file" / "cache"))
    assert not store.write("key", ENTRY) and store.read("key") is None and store.files() == []


def make_file(path: pathlib.Path) -> str:
    path.write_text("")
    return "it is not a directory"


def make_open_to_all(path: pathlib.Path) -> str:
    path.mkdir()
    path.chmod(0o777)
    return "others own it or can write to it (owner "


def make_inside_a_file(path: pathlib.Path) -> str:
    path.parent.rmdir()
    path.parent.write_text("")
    return "it cannot be read: Not a directory"


@pytest.mark.parametrize("make", [make_file, make_open_to_all, make_inside_a_file])
def test_the_log_says_once_that_a_directory_is_not_used(
    make: Any, directory: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    reason = make(directory)
    assert (store.obstacle(directory) or "").startswith(reason)
    for _ in range(2):
        assert store.read("key") is None and not store.write("key", ENTRY)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{directory} is not used as the store of kernels: {reason}" in record.getMessage()


def test_a_directory_that_does_not_exist_must_be_one_that_can_be_made(
    directory: pathlib.Path,
) -> None:
    below = directory / "a" / "b"
    assert store.obstacle(directory) is None and store.obstacle(below) is None
    with mock.patch.object(store.os, "access", return_value=False):
        expected = f"it cannot be made in {directory.parent}, which you cannot write to"
        assert store.obstacle(below) == expected


def test_the_log_says_once_that_a_disk_takes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("tempfile.mkstemp", side_effect=full):
        assert not store.write("key", ENTRY) and not store.write("another", ENTRY)
    (record,) = caplog.records
    assert "nothing can be written: No space left on device" in record.getMessage()


def test_the_least_recently_used_files_are_removed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for age, key in enumerate("abc"):
        store.write(key, ENTRY)
        (new,) = set(store.files()) - {path for path, _ in sizes}
        os.utime(new, (1000 + age, 1000 + age))
        sizes.append((new, new.stat().st_size))
    store.read("a")
    monkeypatch.setattr(store, "MAX_BYTES", sum(size for _, size in sizes))
    store.write("d", ENTRY)
    assert [store.read(key) is not None for key in "abcd"] == [True, False, True, True]


def test_files_may_be_removed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    another_process_removes(monkeypatch)
    assert store.write("key", ENTRY)
    assert store.sizes() == {}
    assert store.write("key", ENTRY)


def test_clear_removes_entries_and_leftovers_alone(directory: pathlib.Path) -> None:
    store.write("key", ENTRY)
    (directory / "interrupted.part").write_bytes(b"")
    (directory / "notes.txt").write_text("of the user")
    assert store.clear() == 1
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]


def test_two_processes_write_and_read_one_entry(directory: pathlib.Path) -> None:
    """A reader finds no entry or a whole one, of either process."""
    program = f"""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("store", {store.__file__!r})
        store = importlib.util.module_from_spec(spec)
        sys.modules["store"] = store
        spec.loader.exec_module(store)
        for i in range(300):
            assert store.write("key", store.Entry(b"theirs" * (1 + i % 7), None, {{}}))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    # A module of its own pickles to another class of `Entry`; only the fields are stored.
    other = subprocess.Popen(command, env={**os.environ, store.VARIABLE: str(directory)})
    found = set()
    threads = [
        threading.Thread(target=lambda: [store.write("key", ENTRY) for _ in range(100)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    while other.poll() is None or any(thread.is_alive() for thread in threads):
        entry = store.read("key")
        if entry is not None:
            assert entry == ENTRY or set(entry.program.split(b"theirs")) == {b""}
            found.add(entry == ENTRY)
    assert other.returncode == 0 and found and not list(directory.glob("*.part"))
