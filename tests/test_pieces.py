"""Pieces of 8 bits that become operands in 16: where threads store them, and the arithmetic of their instructions."""

import re
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_fa2.backends.sm90.primitives import pieces, widen
from tests.support.device_arith import THREAD, emit_in_numpy
from tests.support.ptx import Machine, halves_as

BASE = 1 << 12  # the address of the buffer


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize(
    "dim, width", [(64, 64), (96, 32), (128, 64), (192, 32), (256, 64), (64, 32)]
)
def test_pieces_are_stored_as_tma_stores_rows(
    dim: int, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of 8 rows, panels and swizzled lines; and eight neighbors, which hardware serves at a time, use all
    banks."""
    groups = rows // 8
    kind = types.SimpleNamespace(shape=(groups, dim // width, 8, width))
    memory = np.zeros(2 * rows * dim, np.uint8)

    def store(code: str, _: str, at: np.ndarray, *words: np.ndarray) -> None:
        offset = int(re.fullmatch(r"st\.shared\.v4\.b32 \[\$0 \+ (\d+)\], .*", code)[1])  # type: ignore
        places = at - BASE + offset
        banks = (places // 16 % 8).reshape(-1, 8)
        assert (np.sort(banks, 1) == np.arange(8)).all()
        memory[places[:, None] + np.arange(16)] = np.stack(words, -1).view(np.uint8)

    replace_emission(monkeypatch, width)
    fakes = {
        "ir": types.SimpleNamespace(MemRefType=lambda _: kind),
        "asm": store,
        "_MULTIPLY": {"pairs": lambda word, scale, prefix: [word[:, 0], word[:, 1]]},
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pieces, name, fake)
    tile = np.arange(rows * dim, dtype=np.uint16).reshape(rows, dim)
    buffer: Any = types.SimpleNamespace(shape=tile.shape, type=None)
    for target in pieces.destinations(buffer):
        row, piece = target.band.own_row_and_piece(THREAD)
        columns = target.band.start + 16 * piece[:, None] + np.arange(16)
        own = tile[target.row + row[:, None], columns].reshape(128, 4, 4)  # [thread, word, number]
        words: Any = [np.ascontiguousarray(own[:, i]).view(np.uint32) for i in range(4)]
        pieces.store_piece(buffer, target, "pairs", words, None)  # type: ignore[arg-type]
    lines = tile.reshape(groups, 8, -1, width).swapaxes(1, 2).reshape(-1).view(np.uint8)
    index = np.arange(lines.size)
    np.testing.assert_array_equal(memory[index ^ ((index >> 7) % (width // 8) << 4)], lines)


@pytest.mark.parametrize(
    "panel, size", [(32, 32), (32, 64), (32, 128), (64, 64), (64, 128), (64, 256)]
)
def test_a_threads_row_is_emitted_as_it_is_computed(
    panel: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_emission(monkeypatch, panel)
    band = pieces.Band(0, size, panel)
    row, piece = band.own_row_and_piece(THREAD)
    np.testing.assert_array_equal(pieces.own_row(band, 4), 4 * row)
    assert len(set(zip(row.tolist(), piece.tolist(), strict=True))) == 128
    assert row.max() == band.rows - 1


def replace_emission(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    swizzle_columns, address = (lambda buffer: width), (lambda buffer, bits: BASE)
    emit_in_numpy(monkeypatch, pieces, swizzle_columns=swizzle_columns, address=address)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_numbers_times_scales(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of 8 bits, with scales from the least to beyond the largest one."""

    def asm_words(count: int, code: str, _: str, *operands: Any, **options: Any) -> list:
        return Machine().run(code, count, *operands)

    def asm(code: str, _: str, *operands: Any, **options: Any) -> Any:
        return Machine().run(code, 1, *operands)[0]

    for module in (pieces, widen):
        monkeypatch.setattr(module, "asm_words", asm_words)
    monkeypatch.setattr(pieces, "asm", asm)
    kind = types.SimpleNamespace(get_signless=lambda bits: None)
    monkeypatch.setattr(pieces, "ir", types.SimpleNamespace(IntegerType=kind))
    scales = np.array([2.0**-126, 0.0071, 1, 3e34, 2.6e36, np.nan, np.inf]).astype(
        ml_dtypes.bfloat16
    )
    numbers = np.tile(np.arange(256, dtype=np.uint8), len(scales))
    of_word = np.repeat(scales, 64)
    twice = of_word.view(np.uint16).astype(np.uint32)
    twice = twice << 16 | twice
    prefix = np.full_like(twice, 0x43434343)
    multiply = pieces._MULTIPLY[dtype]
    with np.errstate(invalid="ignore", over="ignore"):
        pairs = multiply(numbers.view(np.uint32), twice, prefix)
        found = np.concatenate([halves_as(x, ml_dtypes.bfloat16) for x in pairs], 1).reshape(-1)
        wide = numbers.view(dtype).astype(np.float32) * np.repeat(of_word, 4).astype(np.float32)
        expected = wide.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
