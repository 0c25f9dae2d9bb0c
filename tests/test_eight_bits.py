"""Operands of 8 bits, as far as no kernel is needed: the orders of columns and rows, and what each thread has."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.sm90.decode import eight_bits, scales
from tests.support import inline
from tests.support.device_arith import THREAD, emit_in_numpy


def test_orders_are_permutations_within_sixteen() -> None:
    """That of the output undoes that of V."""
    index = np.arange(128)
    columns = inline.LOADED["load_keys"](np.tile(index, (64, 1)))[0]
    rows = inline.LOADED["load_values"](np.tile(index, (64, 1)))
    for order in (columns, rows[:, 0]):
        np.testing.assert_array_equal(order // 16, index // 16)
        np.testing.assert_array_equal(np.sort(order), index)
    np.testing.assert_array_equal(inline.INLINE["order_output"](rows)[:, 0], index)
    assert rows[[0, 8, 1], 0].tolist() == [0, 1, 2] and columns[[0, 1, 2, 8]].tolist() == [
        0,
        1,
        4,
        2,
    ]


# The code that is emitted, with a number for each thread in the place of a value in registers.

BASE = 1 << 12  # the address of the buffer


@pytest.fixture
def values_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    emit_in_numpy(monkeypatch, eight_bits, scales, address=lambda buffer, bits: BASE)


def in_shared_memory(tile: np.ndarray) -> np.ndarray:
    """The bytes of a tile as TMA stores them, in groups of 8 rows, panels and swizzled lines."""
    width = eight_bits.panel_width(tile.shape[1])
    lines = tile.reshape(8, 8, -1, width).swapaxes(1, 2).reshape(-1)
    memory, index = np.zeros(BASE + lines.size, np.uint8), np.arange(lines.size)
    memory[BASE + (index ^ ((index >> 7) % (width // 16) << 4))] = lines
    return memory


def ldmatrix(memory: np.ndarray, at: np.ndarray, transposed: str) -> list[np.ndarray]:
    """Bytes `[4]` of each thread and matrix: threads give the addresses of 8 rows of each (PTX ISA, ldmatrix)."""
    rows = memory[at.reshape(4, 4, 8)[..., None] + np.arange(16)].view(np.uint16)
    pairs = rows.swapaxes(2, 3) if transposed else rows  # [warp, matrix, row, column]
    threads = np.ascontiguousarray(pairs.reshape(4, 4, 8, 4, 2)).view(np.uint8)
    return list(threads.swapaxes(0, 1).reshape(4, 128, 4))


@pytest.mark.usefixtures("values_of_threads")
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["load_keys", "load_values"])
def test_fragments_are_those_of_wgmma(name: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (64, dim)).astype(np.uint8)
    memory, width = in_shared_memory(tile), eight_bits.panel_width(dim)

    def load(_: str, buffer: Any, shape: tuple[int, int], emit: Callable) -> np.ndarray:
        words = np.empty((shape[0] // 64, shape[1] // 8, 2), object)
        lines = object.__new__(eight_bits._Lines)
        vars(lines).update(buffer=buffer, panels=dim // width, width=width)
        emit(lines, words)
        # [tile, eight, half, warp, group, lane of four, element]
        values = np.stack(list(words.reshape(-1))).reshape(*words.shape, 4, 8, 4, 2)
        return values.transpose(0, 3, 2, 4, 1, 5, 6).reshape(shape)

    monkeypatch.setattr(eight_bits, "_load_operand", load)
    monkeypatch.setattr(eight_bits, "_ldmatrix", lambda at, kind: ldmatrix(memory, at, kind))
    to_pairs = lambda word, order=(0, 1, 2, 3): [word[:, order[:2]], word[:, order[2:]]]
    monkeypatch.setattr(eight_bits, "widen", lambda dtype: to_pairs)
    buffer: Any = types.SimpleNamespace(shape=tile.shape, dtype=tile.dtype)
    found = getattr(eight_bits, name)(buffer)
    np.testing.assert_array_equal(found, inline.LOADED[name](tile))


@pytest.mark.usefixtures("values_of_threads")
def test_rows_of_the_output_are_exchanged_within_a_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = np.random.default_rng(0).standard_normal((128, 16)).astype("f")
    by_thread = tile.reshape(2, 4, 2, 8, 2, 4, 2).transpose(0, 4, 2, 6, 1, 3, 5)
    registers = np.empty((2, 2, 2), object)
    for at in np.ndindex(2, 2, 2):
        registers[at] = list(by_thread[at].reshape(2, 128))
    made: list = []

    def decorate(*_: Any, **__: Any) -> Callable:
        return lambda code: lambda acc: code(None, acc)

    def shuffle(value: np.ndarray, lane: np.ndarray) -> np.ndarray:
        return value.reshape(4, 32)[THREAD // 32, lane]

    fakes = {"inline_op": decorate, "_shuffle": shuffle, "elements": lambda x: x, "vector": list}
    fakes["mgpu"] = types.SimpleNamespace(FragmentedArray=lambda **fields: made.append(fields))
    for name, fake in fakes.items():
        monkeypatch.setattr(eight_bits, name, fake)
    acc: Any = types.SimpleNamespace(
        registers=registers, shape=tile.shape, layout=None, dtype=np.float32
    )
    eight_bits.order_output(acc)
    found = np.stack([np.stack(x) for x in made[0]["_registers"].reshape(-1)])
    found = found.reshape(2, 2, 2, 2, 4, 8, 4).transpose(0, 4, 2, 5, 1, 6, 3).reshape(tile.shape)
    np.testing.assert_array_equal(found, inline.INLINE["order_output"](tile))


@pytest.mark.usefixtures("values_of_threads")
@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_addresses_of_scales(copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = copies, copies, 64 // copies
    kind = types.SimpleNamespace(
        shape=shape, get_strides_and_offset=lambda: ([64, 64 // copies, 1], 0)
    )
    monkeypatch.setattr(scales, "ir", types.SimpleNamespace(MemRefType=lambda _: kind))
    buffer: Any = types.SimpleNamespace(type=None)
    at = scales._scale_address(buffer, np.arange(64))
    numbers = np.arange(64 * copies).reshape(shape)
    np.testing.assert_array_equal((at - BASE) // 2, inline.LOADED["load_scales"](numbers))
