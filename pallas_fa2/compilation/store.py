"""Files of compiled launches, checked when they are read; nothing that is wrong with a file or a disk is an error.

The directory is that of the environment variable `PALLAS_FA2_CACHE`, or the user's cache directory if that is `1`.
Without the variable, or if it is `0`, there is no store. Reading a file loads code, as with JAX's own cache, so only
files of the user are read, from a directory into which nobody else can write.
"""

import hashlib
import logging
import os
import pathlib
import pickle
import stat
import tempfile
import zlib
from typing import Any, NamedTuple

VARIABLE = "PALLAS_FA2_CACHE"
SUFFIX = ".launch"
# Changed when `Entry` or the layout of a file changes: another version of the package ignores the file.
MAGIC = b"pallas_fa2 launch 1\n"
DIGEST_BYTES = hashlib.sha256().digest_size
# About 2000 launches of 0.5 MB: a causal forward with its backward has two.
MAX_BYTES = 2**30

log = logging.getLogger("pallas_fa2")


class Entry(NamedTuple):
    """A compiled launch.

    `program` is what `jax.export` serializes, `out_tree` the structure of its results, and `kernels` has for the hash
    of each kernel what `serialize_executable.serialize` returns for the small program that calls it.
    """

    program: bytes
    out_tree: Any
    kernels: dict[bytes, tuple]


def directory() -> pathlib.Path | None:
    """Return the directory of the store, which need not exist, or None if there is no store."""
    return None if os.environ.get(VARIABLE, "") in ("", "0") else cache_directory()


def cache_directory() -> pathlib.Path:
    """Return the directory that the variable names; if it is `0`, `1` or unset, that of the package in the user's
    cache."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        return pathlib.Path(value).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return pathlib.Path(home).expanduser() / "pallas_fa2"


def make_private(path: pathlib.Path) -> None:
    """Make a directory into which nobody else can write, whatever the umask is, unless it exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def obstacle(path: pathlib.Path) -> str | None:
    """Return why a directory cannot be the store, or None if it can. If it does not exist, it must be possible to make
    it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        parent = next(x for x in path.absolute().parents if x.exists())
        writable = os.access(parent, os.W_OK | os.X_OK)
        return None if writable else f"it cannot be made in {parent}, which you cannot write to"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if not _is_private(path):
        mode = stat.S_IMODE(status.st_mode)
        return f"others own it or can write to it (owner {status.st_uid}, mode {mode:o}): chmod 700, or name another"
    return None


# What was logged of directories.
_warned: set[tuple[pathlib.Path, str]] = set()


def _warn_once(path: pathlib.Path, reason: str) -> None:
    if (path, reason) not in _warned:
        _warned.add((path, reason))
        log.warning("%s is not used as the store of kernels: %s", path, reason)


def _is_usable(path: pathlib.Path) -> bool:
    reason = obstacle(path)
    if reason is not None:
        _warn_once(path, reason)
    return reason is None


def read(key: str) -> Entry | None:
    """Return the entry of a key, or None if there is none, or a damaged one."""
    path = _path(key)
    if path is None:
        return None
    try:
        if not _is_usable(path.parent):
            return None
        if not _is_private(path):
            log.warning("%s is not read, because others can write to it", path)
            return None
        data = path.read_bytes()
        digest, body = data[len(MAGIC) :][:DIGEST_BYTES], data[len(MAGIC) + DIGEST_BYTES :]
        if not data.startswith(MAGIC) or hashlib.sha256(body).digest() != digest:
            log.warning("%s is damaged and will be replaced", path)
            return None
        stored_key, *fields = pickle.loads(zlib.decompress(body))
        # Two keys of one hash are as good as impossible, a file that somebody renamed is not.
        if stored_key != key:
            return None
        os.utime(path)  # the least recently used files are removed first
        return Entry(*fields)
    except FileNotFoundError:
        return None
    except Exception:
        log.debug("%s cannot be read", path, exc_info=True)
        return None


def write(key: str, entry: Entry) -> bool:
    """Write an entry in one step, and remove old ones beyond `MAX_BYTES`; return whether it was written."""
    path = _path(key)
    if path is None:
        return False
    try:
        if not _is_usable(path.parent):
            return False
        make_private(path.parent)
        body = zlib.compress(pickle.dumps((key, *entry)))
        data = MAGIC + hashlib.sha256(body).digest() + body
        # A file of its own, readable by the user alone: another process may write the same entry.
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _remove_oldest(path.parent)
        return True
    except OSError as error:
        _warn_once(path.parent, f"nothing can be written: {error.strerror}")
        return False
    except Exception:
        log.debug("%s cannot be written", path, exc_info=True)
        return False


def files() -> list[pathlib.Path]:
    """Return the files of the store, the least recently used first."""
    return list(sizes())


def sizes() -> dict[pathlib.Path, int]:
    """Return the bytes of each file of the store, the least recently used first."""
    path = directory()
    return {} if path is None or not path.is_dir() else _sizes_by_age(path)


def clear() -> int:
    """Remove all entries and what interrupted writes left; return the number of entries."""
    path = directory()
    removed = files()
    leftovers = [] if path is None else path.glob("*.part")
    for file in (*removed, *leftovers):
        file.unlink(missing_ok=True)
    return len(removed)


def _path(key: str) -> pathlib.Path | None:
    path = directory()
    return path and path / (hashlib.sha256(key.encode()).hexdigest() + SUFFIX)


def _is_private(path: pathlib.Path) -> bool:
    """Return whether it is the user's, and nobody else can write to it."""
    status = path.stat()
    writable_by_others = stat.S_IWGRP | stat.S_IWOTH
    return status.st_uid == os.getuid() and not status.st_mode & writable_by_others


def _sizes_by_age(path: pathlib.Path) -> dict[pathlib.Path, int]:
    status = {}
    for file in path.glob(f"*{SUFFIX}"):
        try:
            status[file] = file.stat()
        except FileNotFoundError:  # another process has just removed it
            continue
    return {file: status[file].st_size for file in sorted(status, key=lambda x: status[x].st_mtime)}


def _remove_oldest(path: pathlib.Path) -> None:
    removable = _sizes_by_age(path)
    excess = sum(removable.values()) - MAX_BYTES
    for file, size in removable.items():
        if excess <= 0:
            return
        file.unlink(missing_ok=True)
        excess -= size
