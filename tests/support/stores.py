"""A store of kernels that another process changes."""

import os
import pathlib
from typing import Any

import pytest

from pallas_fa2.compilation import store


def another_process_removes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove each file of an entry as soon as its size has been read, from now on."""
    stat = pathlib.Path.stat

    def stat_and_remove(path: pathlib.Path, **options: Any) -> os.stat_result:
        status = stat(path, **options)
        if path.suffix == store.SUFFIX:
            path.unlink()
        return status

    monkeypatch.setattr(pathlib.Path, "stat", stat_and_remove)
