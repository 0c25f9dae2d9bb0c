"""Scores that become -inf: the code for the device, executed here by all threads of a warpgroup together, against
what the interpreter computes for its inline operations."""

import math
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.common.primitives import masking, thread_values
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT, ROW_LAYOUT
from tests.support.device_arith import ARITH
from tests.support.inline import INLINE

THREADS = np.arange(128)
FRAGMENT = 64


class Word(np.ndarray):
    """A register of 32 bits of each thread."""

    type = None


def word(value: Any) -> Word:
    return np.broadcast_to(np.uint32(value & 0xFFFFFFFF), 128).astype(np.int32).view(Word)


def asm(code: str, constraints: str, *operands: Any, **_: Any) -> Any:
    if code == "shl.b32 $0, -1, $1;":
        assert constraints == "=r,r"
        (count,) = (
            np.asarray(x).view(np.uint32) for x in operands
        )  # of 32 and more nothing is left
        left = np.where(
            count < 32, np.uint64(0xFFFFFFFF) << np.minimum(count, 32).astype(np.uint64), 0
        )
        return (left & 0xFFFFFFFF).astype(np.uint32).view(np.int32).view(Word)
    bit = re.fullmatch(r"@!\$2 or\.b32 \$0, \$0, (\d+);", code)
    assert bit is not None and constraints == "=r,0,b"
    bits, visible = operands
    return np.where(visible, bits, bits | word(int(bit[1]))).view(Word)


def position(shape: tuple[int, ...], at: tuple[int, ...], e: int) -> tuple:
    """Return the indices of each thread's value: two rows and, in each eight columns, two neighbors."""
    row = 16 * (THREADS // 32) + THREADS % 32 // 4 + 8 * sum(at[2:])
    return (row,) if len(shape) == 1 else (row, 8 * at[1] + 2 * (THREADS % 4) + e)


class Array:
    """An `mgpu.FragmentedArray` whose registers hold what each thread has in them."""

    def __init__(self, registers: Any):
        self.registers = registers

    @classmethod
    def of(cls, x: np.ndarray, layout: Any) -> "Array":
        if layout is thread_values.PER_THREAD:
            return cls(as_objects([[x.view(Word)]], (1,)))
        registers = np.empty(layout.to_mgpu().registers_shape(x.shape), object)
        for at in np.ndindex(registers.shape):
            pair = range(layout.to_mgpu().vector_length)
            registers[at] = [x[position(x.shape, at, e)].view(Word) for e in pair]
        return cls(registers)

    def read(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if shape == (128,):
            return np.asarray(self.registers[0][0])
        array = np.zeros(shape, dtype)
        for at, register in np.ndenumerate(self.registers):
            for e, values in enumerate(register):
                array[position(shape, at, e)] = values
        return array


def as_objects(values: list, shape: tuple[int, ...]) -> Any:
    array = np.empty(shape, object)
    array[:] = values
    return array


def each(tile: Array, function: Callable, order: Callable = lambda at: 0) -> Array:
    results = np.empty_like(tile.registers)
    for at, register in sorted(np.ndenumerate(tile.registers), key=lambda x: order(x[0])):
        results[at] = [function(x, at, e) for e, x in enumerate(register)]
    return Array(results)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def inline_op(name: str, *layouts: Any, result: Any, **params: Any) -> Callable:
        def decorate(code: Callable) -> Callable:
            def run(*arrays: np.ndarray) -> np.ndarray:
                made = code(None, *map(Array.of, arrays, layouts)).read(result.shape, result.dtype)
                np.testing.assert_array_equal(made, INLINE[name](*arrays, **params), name)
                return made

            return run

        return decorate

    for module in (masking, thread_values):
        monkeypatch.setattr(module, "arith", ARITH)
        monkeypatch.setattr(module, "i32", word)
    monkeypatch.setattr(masking, "inline_op", inline_op)
    monkeypatch.setattr(masking, "asm", asm)
    f32 = types.SimpleNamespace(get=lambda: None)
    monkeypatch.setattr(masking, "ir", types.SimpleNamespace(F32Type=f32))
    monkeypatch.setattr(thread_values, "map_elements", each)
    monkeypatch.setattr(thread_values, "elements", lambda register: register)
    monkeypatch.setattr(
        thread_values, "from_thread_values", lambda mine: Array(as_objects([[mine]], (1,)))
    )
    monkeypatch.setattr(thread_values, "thread_index", lambda: word(0) + THREADS.astype(np.int32))


def scores(columns: int) -> np.ndarray:
    return np.random.default_rng(columns).standard_normal((FRAGMENT, columns), np.float32)


def bounds(columns: int) -> list[np.ndarray]:
    """Return for each row a column, or one that does not exist: each of them in both halves of a warp's rows; and as
    far as positions go."""
    near = np.arange(-2, columns + 2, dtype=np.int32)
    each = np.resize(near, (-(-near.size // FRAGMENT), FRAGMENT))
    far = np.random.default_rng(0).choice([-(2**30), -200, columns + 200, 2**30], FRAGMENT)
    return [*each, *np.roll(each, 8, 1), far.astype(np.int32)]


def masked(s: np.ndarray, first: Any, last: Any) -> np.ndarray:
    column = np.arange(s.shape[1])
    return np.where((column < first[:, None]) | (column > last[:, None]), -math.inf, s)


COLUMNS = pytest.mark.parametrize("columns", [16, 64, 192])
LEAST, MOST = np.full(FRAGMENT, -(2**31)), np.full(FRAGMENT, 2**31)


@COLUMNS
def test_a_bound_of_each_row(columns: int) -> None:
    s = scores(columns)
    for bound in bounds(columns):
        np.testing.assert_array_equal(masking.mask_after(s, bound), masked(s, LEAST, bound))
        np.testing.assert_array_equal(masking.mask_before(s, bound), masked(s, bound, MOST))


@COLUMNS
def test_a_bit_of_each_column(columns: int) -> None:
    s = scores(columns)
    for bound in bounds(columns):
        other = np.random.default_rng(1).permutation(bound)
        np.testing.assert_array_equal(masking.mask_outside(s, bound), masked(s, bound, MOST))
        np.testing.assert_array_equal(masking.mask_outside(s, None, bound), masked(s, LEAST, bound))
        np.testing.assert_array_equal(
            masking.mask_outside(s, bound, other), masked(s, bound, other)
        )


@pytest.mark.parametrize("start, columns", [(0, 64), (0, 16), (24, 8), (32, 32), (48, 16)])
def test_a_bit_of_each_value(start: int, columns: int) -> None:
    """Bits of some columns of a fragment are where those of all columns are."""
    fragment = np.random.default_rng(0).random((FRAGMENT, FRAGMENT)) < 0.6
    some = slice(start, start + columns)
    s, words = scores(columns), masking.pack_bits(fragment)
    expected = np.where(fragment[:, some], s, -math.inf)
    np.testing.assert_array_equal(masking.apply_bits(s, [words], start), expected)
    part = masking.pack_bits(fragment[:, some], start)
    np.testing.assert_array_equal(masking.apply_bits(s, [part], start), expected)
    only = np.ones_like(fragment)
    only[:, some] = fragment[:, some]
    np.testing.assert_array_equal(part, masking.pack_bits(only))


def test_fragments_lie_side_by_side() -> None:
    visible = np.random.default_rng(1).random((FRAGMENT, 2 * FRAGMENT)) < 0.5
    words = [masking.pack_bits(x) for x in np.split(visible, 2, 1)]
    s = scores(2 * FRAGMENT)
    np.testing.assert_array_equal(masking.apply_bits(s, words), np.where(visible, s, -math.inf))


def test_values_are_where_the_tensor_cores_put_them() -> None:
    """By Mosaic's own numbers of threads and registers."""
    for layout, shape in ((ACC_LAYOUT, (FRAGMENT, 16)), (ROW_LAYOUT, (FRAGMENT,))):
        x = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
        array = Array.of(x, layout)
        assert array.registers.shape == layout.to_mgpu().registers_shape(shape)
        np.testing.assert_array_equal(array.read(shape, np.int32), x)
