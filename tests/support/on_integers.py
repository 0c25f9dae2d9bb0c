"""Inline code for the device, executed here on integers."""

import types
from typing import Any

import pytest


def executed_here(monkeypatch: pytest.MonkeyPatch, module: Any) -> types.SimpleNamespace:
    """The thread whose `number` a module's inline code then reads."""
    thread = types.SimpleNamespace(number=0)
    operations = types.SimpleNamespace(
        andi=lambda x, y: x & y,
        xori=lambda x, y: x ^ y,
        addi=lambda x, y: x + y,
        muli=lambda x, y: x * y,
        shli=lambda x, y: x << y,
        shrui=lambda x, y: x >> y,
    )
    monkeypatch.setattr(module, "arith", operations)
    monkeypatch.setattr(module, "i32", lambda value: value)
    reads = module if hasattr(module, "thread_number") else module.ptx
    monkeypatch.setattr(reads, "thread_number", lambda: thread.number)
    return thread
