"""Where the threads of a warpgroup find their values of an array of pairs."""

import types
from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.sm90.primitives import pairwise, thread_values
from tests.support.device_arith import ARITH


def lie(queries: int, keys: int, size: int) -> np.ndarray:
    """`[queries, keys]`: where each lies in shared memory, in bytes. Panels of 8 rows of 128 bytes, in
    which bits 4 to 6 of an address are turned over where bits 7 to 9 are set (CUDA's 128-byte swizzle)."""
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
    monkeypatch.setattr(pairwise, "arith", operations)
    monkeypatch.setattr(pairwise, "i32", lambda value: value)
    monkeypatch.setattr(thread_values, "thread_index", lambda: thread.number)
    return thread


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["straight", "transposed", "in_order"])
def test_every_thread_finds_its_values(kind: str, size: int, thread: types.SimpleNamespace) -> None:
    queries, keys = {"straight": (64, 128), "transposed": (16, 64), "in_order": (64, 64)}[kind]
    want = lie(queries, keys, size)
    if kind == "in_order":
        q, k = np.mgrid[:queries, :keys]
        want = q * 1000 * size + k * size
    tile = want.T if kind == "transposed" else want
    for thread.number in range(128):
        warp, group, column = thread.number // 32, thread.number // 4 % 8, thread.number % 4 * 2
        place = {
            "straight": lambda: pairwise._straight_offsets(keys, size),
            "transposed": lambda: pairwise._transposed_offsets(keys, size),
            "in_order": lambda: pairwise._row_major_offsets(1000 * size, size, False),
        }[kind]()
        for half in (0, 8):
            for eight in range(0, tile.shape[1], 8):
                for e in range(2 if kind == "transposed" else 1):  # elsewhere two lie side by side
                    found = place(half, eight + e)
                    assert found == tile[16 * warp + group + half, eight + column + e]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for the device, executed here by all threads of a warpgroup together."""
    number = np.arange(128, dtype=np.uint32)

    def shuffled(mode: str, word: Any, lane: Any, within: int) -> Any:
        mine = number % 32
        other = mine ^ lane if mode == "bfly" else mine // within * within + lane % within
        return word[number // 32 * 32 + other]

    def bits(ref: np.ndarray, row: Any, first: Any) -> Any:
        columns = first[:, None] + np.arange(16)
        return (ref[row[:, None], columns] << np.arange(16)).sum(1).astype(np.uint32)

    monkeypatch.setattr(pairwise, "arith", ARITH)
    monkeypatch.setattr(pairwise, "i32", lambda value: np.uint32(value & 0xFFFFFFFF))
    monkeypatch.setattr(thread_values, "thread_index", lambda: number)
    monkeypatch.setattr(pairwise, "_shuffled", shuffled)
    monkeypatch.setattr(pairwise, "_bits", bits)


@pytest.mark.parametrize("kind", ["straight", "transposed"])
def test_every_thread_finds_its_booleans(kind: str, threads: None) -> None:
    square = np.random.default_rng(0).integers(0, 2, (64, 64), np.uint32)
    code = {"straight": pairwise._straight_bits, "transposed": pairwise._transposed_bits}[kind]
    words = code(square)
    tile = square if kind == "straight" else square.T
    thread = np.arange(128)
    rows = 16 * (thread // 32) + thread // 4 % 8
    for column, half in np.ndindex(64, 2):
        found = words[column // 16] >> np.uint32(16 * half + column % 16) & np.uint32(1)
        np.testing.assert_array_equal(found, tile[rows + 8 * half, column])
