"""Bits of booleans in device memory, which the threads of a warpgroup load and exchange."""

from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.common.primitives import packed_bools, thread_values
from tests.support.device_arith import ARITH


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for the device, executed here by all threads of a warpgroup together."""
    number = np.arange(128, dtype=np.uint32)

    def shuffled(mode: str, word: Any, lane: Any, within: int) -> Any:
        own = number % 32
        source = own ^ lane if mode == "bfly" else own // within * within + lane % within
        return word[number // 32 * 32 + source]

    def bits(ref: np.ndarray, row: Any, first: Any) -> Any:
        columns = first[:, None] + np.arange(16)
        return (ref[row[:, None], columns] << np.arange(16)).sum(1).astype(np.uint32)

    for module in (packed_bools, thread_values):
        monkeypatch.setattr(module, "arith", ARITH)
        monkeypatch.setattr(module, "i32", lambda value: np.uint32(value & 0xFFFFFFFF))
    monkeypatch.setattr(thread_values, "thread_index", lambda: number)
    monkeypatch.setattr(packed_bools, "_shuffled", shuffled)
    monkeypatch.setattr(packed_bools, "_bits", bits)


@pytest.mark.parametrize("kind", ["straight", "transposed"])
def test_every_thread_finds_its_booleans(kind: str, threads: None) -> None:
    fragment = np.random.default_rng(0).integers(0, 2, (64, 64), np.uint32)
    code = {"straight": packed_bools._straight_bits, "transposed": packed_bools._transposed_bits}[
        kind
    ]
    words = code(fragment)
    tile = fragment if kind == "straight" else fragment.T
    thread = np.arange(128)
    rows = 16 * (thread // 32) + thread // 4 % 8
    for column, half in np.ndindex(64, 2):
        bit = words[column // 16] >> np.uint32(16 * half + column % 16) & np.uint32(1)
        np.testing.assert_array_equal(bit, tile[rows + 8 * half, column])
