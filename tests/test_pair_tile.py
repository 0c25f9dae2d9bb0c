"""Where the threads of a warpgroup find their values of an array of pairs."""

import types

import numpy as np
import pytest

from pallas_fa2.kernels import pair_tile


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
    monkeypatch.setattr(pair_tile, "arith", operations)
    monkeypatch.setattr(pair_tile, "i32", lambda value: value)
    monkeypatch.setattr(pair_tile.ptx, "thread_number", lambda: thread.number)
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
            "straight": lambda: pair_tile._straight(keys, size),
            "transposed": lambda: pair_tile._transposed(keys, size),
            "in_order": lambda: pair_tile._in_order(1000 * size, size, False),
        }[kind]()
        for half in (0, 8):
            for eight in range(0, tile.shape[1], 8):
                for e in range(2 if kind == "transposed" else 1):  # elsewhere two lie side by side
                    found = place(half, eight + e)
                    assert found == tile[16 * warp + group + half, eight + column + e]
