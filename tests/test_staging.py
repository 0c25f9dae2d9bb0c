"""PTX of copies of 8 bits to shared memory, run in NumPy: what threads store is what they copied."""

import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_fa2.backends.common.primitives import copy_groups
from pallas_fa2.backends.sm90.forward import eight_bit_rows, staging
from pallas_fa2.backends.sm90.forward.eight_bit_rows import _Piece
from pallas_fa2.backends.sm90.primitives import pieces
from tests.support.device_arith import emit_in_numpy
from tests.support.ptx import Machine

THREAD = np.arange(128, dtype=np.uint32)
ROWS, DIM = 32, 128  # of a subtile, of which a block has two
ADDRESSES = {"array": 0, "scales": 1 << 16, "stages": 1 << 17, "shared scales": 1 << 18}


class Ref:
    """Memory of a `Machine` from a place on, whose parts along axes have so many bytes."""

    def __init__(self, place: int, *part_bytes: int, shape: Any = None):
        self.place, self.part_bytes, self.shape, self.type = place, part_bytes, shape, None

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index: int) -> "Ref":
        return Ref(self.place + index * self.part_bytes[0], *self.part_bytes[1:])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Have inline code run here, by which barriers of a warpgroup are counted."""
    machine: Any = Machine(1 << 19)
    machine.meetings = 0

    def asm(code: str, _: str, *operands: Any, **__: Any) -> Any:
        machine.run(code, 0, *map(of_threads, operands))

    def asm_words(count: int, code: str, _: str, *operands: Any, **__: Any) -> Any:
        return machine.run(code, count, *map(of_threads, operands))

    def meet() -> None:
        machine.meetings += 1

    fakes = {
        "asm": asm,
        "asm_words": asm_words,
        "address": lambda ref, bits=64: ref.place,
        "as_operand": lambda ref: None,
        "from_thread_values": lambda x: x,
        "inline_op": lambda *_, **__: lambda code: lambda *args: code(None, *args),
        "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(warpgroup_barrier=meet)),
        "swizzle_columns": lambda buffer: 64,
        "thread_value": lambda x: x,
    }
    emit_in_numpy(monkeypatch, eight_bit_rows, staging, pieces, copy_groups, **fakes)
    return machine


def of_threads(x: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, np.int64).astype(np.uint32), (128,))


def commit_group() -> None:
    vars(copy_groups.commit_group)["__wrapped__"](None)


def test_threads_store_what_they_have_copied(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two subtiles of a block, whose last rows do not exist and have NaN for scales."""
    rng, exist = np.random.default_rng(0), 2 * ROWS - 5
    array = rng.integers(1, 256, (2 * ROWS, DIM)).astype(np.uint8)
    scales = rng.uniform(0.1, 1, 128).astype(ml_dtypes.bfloat16)
    scales[exist:] = np.nan
    machine.memory[: array.size] = array.reshape(-1)
    machine.memory[ADDRESSES["scales"] :][:256] = scales.view(np.uint8)
    bits = scales.view(np.uint16).astype(np.uint32) * 0x10001
    bits[exist:] = array[exist:] = 0
    buffer: Any = types.SimpleNamespace(shape=(ROWS, DIM))
    targets = list(pieces.destinations(buffer))
    stages: Any = Ref(ADDRESSES["stages"], len(targets) * pieces.BYTES, pieces.BYTES)
    own: Any = staging.Staging(stages, Ref(ADDRESSES["shared scales"]))  # type: ignore[arg-type]
    for subtile in range(2):
        for i, (band, row) in enumerate(targets):
            own_row, own_piece = band.own_row_and_piece(THREAD)
            first = (own_row + subtile * ROWS) * (DIM // 16) + own_piece
            end: Any = types.SimpleNamespace(
                registers={(): of_threads(exist - subtile * ROWS - row)}
            )
            piece = _Piece(first, row * DIM, own_row, end)  # type: ignore[arg-type]
            target, source = own.stage(subtile).at[i], Ref(ADDRESSES["array"])
            eight_bit_rows._copy_piece(target, source, piece)  # type: ignore[arg-type]
        commit_group()
    load_scale, share = (
        vars(op)["__wrapped__"] for op in (eight_bit_rows._load_scale, staging._share_scales)
    )
    end = types.SimpleNamespace(registers={(): of_threads(exist)})
    share(None, own.scales, load_scale(None, Ref(ADDRESSES["scales"]), THREAD, THREAD, end))
    assert machine.meetings == 1
    stored: list[tuple] = []
    monkeypatch.setattr(staging, "store_piece", lambda *args: stored.append(args))
    for subtile in range(2):
        copy_groups.wait_groups(1 - subtile)
        stored.clear()
        own.store(subtile, buffer, "int8")
        for (_, target, _, words, scale), expected in zip(stored, targets, strict=True):
            assert target == expected
            own_row, own_piece = target.band.own_row_and_piece(THREAD)
            rows = subtile * ROWS + target.row + own_row
            columns = 16 * own_piece[:, None] + np.arange(16)
            np.testing.assert_array_equal(
                np.stack(words, -1).view(np.uint8), array[rows[:, None], columns]
            )
            np.testing.assert_array_equal(scale, bits[rows])


def test_copies_are_there_when_the_thread_has_waited(machine: Any) -> None:
    """The first of two groups lands at a wait for all but one."""
    machine.memory[:16] = 7
    end: Any = types.SimpleNamespace(registers={(): of_threads(1)})
    for subtile in range(2):
        piece: Any = _Piece(0 * THREAD, 0, 0 * THREAD, end)  # type: ignore[arg-type]
        target: Any = Ref(ADDRESSES["stages"] + subtile * pieces.BYTES)
        eight_bit_rows._copy_piece(target, Ref(0), piece)  # type: ignore[arg-type]
        commit_group()
    stages = machine.memory[ADDRESSES["stages"] :][: 2 * pieces.BYTES].reshape(2, -1)
    assert not stages.any()
    copy_groups.wait_groups(1)
    assert (stages[0] == 7).all() and not stages[1].any()
    copy_groups.wait_groups(0)
    assert (stages == 7).all()
