"""Offsets of the values that the threads of a warpgroup load from a pairwise array."""

import types

import numpy as np
import pytest

from pallas_fa2.backends.common.primitives import pairwise, thread_values


def swizzled_offsets(queries: int, keys: int, size: int) -> np.ndarray:
    """Return the offset of each element of `[queries, keys]` in shared memory, in bytes. Panels have 8 rows of
    128 bytes, in which bits 4 to 6 of an address are flipped where bits 7 to 9 are set (CUDA's 128-byte swizzle)."""
    q, k = np.mgrid[:queries, :keys]
    width = 128 // size
    panel = q // 8 * (keys // width) + k // width
    byte = panel * 1024 + q % 8 * 128 + k % width * size
    return byte ^ (byte >> 7 & 7) << 4


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Code for the device, executed here on integers."""
    thread = types.SimpleNamespace(number=0)
    operations = types.SimpleNamespace(
        andi=lambda x, y: x & y,
        xori=lambda x, y: x ^ y,
        addi=lambda x, y: x + y,
        muli=lambda x, y: x * y,
        shli=lambda x, y: x << y,
        shrui=lambda x, y: x >> y,
    )
    for module in (pairwise, thread_values):
        monkeypatch.setattr(module, "arith", operations)
        monkeypatch.setattr(module, "i32", lambda value: value)
    monkeypatch.setattr(thread_values, "thread_index", lambda: thread.number)
    return thread


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["straight", "transposed", "in_order"])
def test_every_thread_finds_its_values(kind: str, size: int, thread: types.SimpleNamespace) -> None:
    queries, keys = {"straight": (64, 128), "transposed": (16, 64), "in_order": (64, 64)}[kind]
    want = swizzled_offsets(queries, keys, size)
    if kind == "in_order":
        q, k = np.mgrid[:queries, :keys]
        want = q * 1000 * size + k * size
    tile = want.T if kind == "transposed" else want
    for thread.number in range(128):
        warp, group, column = thread.number // 32, thread.number // 4 % 8, thread.number % 4 * 2
        offset = {
            "straight": lambda: pairwise._straight_offsets(keys, size),
            "transposed": lambda: pairwise._transposed_offsets(keys, size),
            "in_order": lambda: pairwise._row_major_offsets(1000 * size, size, False),
        }[kind]()
        for half in (0, 8):
            for eight in range(0, tile.shape[1], 8):
                for e in range(2 if kind == "transposed" else 1):  # elsewhere two lie side by side
                    assert (
                        offset(half, eight + e)
                        == tile[16 * warp + group + half, eight + column + e]
                    )
