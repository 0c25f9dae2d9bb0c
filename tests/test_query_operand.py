"""Queries as operands beside keys of 8 bits: what becomes of them, and the code that each thread runs, with NumPy."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.backends.sm90.decode import query_operand
from tests.support import inline
from tests.support.device_arith import ARITH

THREAD = np.arange(128, dtype=np.int32)
BASE, SCALES = 1 << 12, 1 << 10  # the addresses of the buffer and of the scales
LINE = 128  # bytes


def as_words(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def swizzled(rows: int, dim: int) -> np.ndarray:
    """The byte of each element of `[rows, dim]` of 16 bits as TMA stores them, in groups of 8 rows, panels and
    lines."""
    row, column = np.arange(rows)[:, None], np.arange(dim)[None]
    line = 8 * (row // 8 * (dim // 64) + column // 64) + row % 8
    return LINE * line + (2 * (column % 64) ^ row % 8 * 16)


class Threads:
    """Runs emitted code with an array that has a number for each thread in the place of a value in registers."""

    def __init__(self, q: np.ndarray):
        rows, dim = q.shape
        self.memory, self.places = np.zeros(BASE + 2 * q.size, np.uint8), swizzled(rows, dim)
        self.memory[(BASE + self.places)[..., None] + np.arange(2)] = q.view(np.uint8).reshape(
            rows, dim, 2
        )
        self.shape = rows // 8, dim // 64, 8, 64

    def run(self, dtype: Any, patch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
        def kind(x: Any) -> Any:
            return types.SimpleNamespace(get=x, get_signless=x)

        fakes = {
            "arith": ARITH,
            "ir": types.SimpleNamespace(
                MemRefType=lambda _: self, F32Type=kind(lambda: np.float32), IntegerType=kind(lambda _: np.int32)
            ),
            "i32": np.int32, "sum_i32": lambda *terms: sum(terms), "address": lambda base, bits: base,
            "thread_field": lambda first, n, weight: ((THREAD >> first) & ((1 << n) - 1)) * np.int32(weight),
            "asm_words": None, "_load_chunk": self.load, "_store_chunk": self.store,
            "_store_word": lambda at, word: self.store(at, [word]),
            "shuffle_xor": lambda x, step, _: x.reshape(4, 32)[:, np.arange(32) ^ step].reshape(-1),
            "_narrow": lambda low, high: as_words(np.stack([low, high], 1).astype(np.float16))[:, 0],
        }  # fmt: skip
        for name, fake in fakes.items():
            patch.setattr(query_operand, name, fake)
        patch.setitem(
            query_operand._WIDEN,
            "float16",
            lambda word: list(word[:, None].view(np.float16).astype("f").T),
        )
        patch.setattr(query_operand, "as_operand", lambda buffer: buffer)
        patch.setattr(
            query_operand,
            "inline_op",
            lambda *_, **__: lambda code: lambda *at: code(None, *map(Buffer, at)),
        )
        with np.errstate(over="ignore", invalid="ignore"):
            query_operand.order_queries(BASE, SCALES, dtype)  # pyright: ignore[reportArgumentType]
        found = self.memory[(BASE + self.places)[..., None] + np.arange(2)].view(np.float16)
        return found[..., 0], self.memory[SCALES:][: 4 * len(found)].view(np.float32)

    def load(self, at: np.ndarray) -> list[np.ndarray]:
        assert (at % 16 == 0).all()
        return list(self.memory[at[:, None] + np.arange(16)].view(np.int32).T)

    def store(self, at: np.ndarray, words: list[np.ndarray]) -> None:
        self.memory[at[:, None] + np.arange(4 * len(words))] = as_words(np.stack(words, 1)).view(
            np.uint8
        )


class Buffer(int):
    type = None


def queries(rows: int, dim: int, dtype: str) -> np.ndarray:
    """Rows of many sizes. The first three are to be overwritten; the fourth has no power of two that it wants."""
    sizes = (
        [0.0, 0, 0, -120, -100, -20, 9, 100]
        if dtype == "bfloat16"
        else [0.0, 0, 0, -14, -9, 3, 9, -11]
    )
    rng = np.random.default_rng(0)
    q = rng.standard_normal((rows, dim)) * np.exp2(np.resize(sizes, rows))[:, None]
    return q.astype(dtype)


@pytest.mark.parametrize("columns, dim", [(8, 64), (16, 128), (8, 192), (24, 256)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_threads_make_all_of_the_operand(
    columns: int, dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = queries(columns, dim, dtype)
    q[0], q[1, 3], q[2, 5] = 2.0**-133, np.nan, np.inf
    found = Threads(q).run(dtype, monkeypatch)
    with np.errstate(invalid="ignore"):
        expected = inline.order_queries(q)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_queries_are_operands_times_powers_of_two(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is not far below the largest of its row is exact, whatever its size."""
    q = queries(8, 64, dtype)
    q[2, 3] = q[2].astype("f").max() * 2**-20
    operand, scale = Threads(q).run(dtype, monkeypatch)
    assert operand.dtype == np.float16 and scale.dtype == np.float32
    largest = np.abs(operand.astype("f")).max(-1)
    is_large = np.abs(q.astype("f")).max(-1) >= 2.0**-112
    assert (largest[is_large] >= 2**14).all() and (largest < 2**15).all() and is_large.sum() >= 7
    whole = operand.astype(np.float64) * scale[:, None]
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    ordered_q = inline.LOADED["load_keys"](np.arange(64.0)[None]).astype(int)[0]
    np.testing.assert_array_equal(whole, q[:, ordered_q].astype(np.float64))


def test_queries_of_zeros_and_of_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    q = np.zeros((8, 64), jnp.bfloat16)
    q[1, 2], q[2, 3], q[3, 0] = np.nan, np.inf, 2.0**-133
    operand, scale = Threads(q).run("bfloat16", monkeypatch)
    np.testing.assert_array_equal(scale, 1)
    assert not operand[[0, 3, 4]].any()
    finite = np.isfinite(operand.astype("f")).sum(1)
    np.testing.assert_array_equal(finite, [64, 63, 63, 64, 64, 64, 64, 64])
