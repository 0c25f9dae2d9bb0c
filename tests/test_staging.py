"""PTX of copies of 8 bits to shared memory, run in NumPy: what threads store is what they copied."""

import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_fa2.backends.sm90.forward import eight_bit_rows, staging
from pallas_fa2.backends.sm90.forward.eight_bit_rows import _Piece
from pallas_fa2.backends.sm90.primitives import pieces
from tests.support.device_arith import ARITH
from tests.support.ptx import Machine

THREAD = np.arange(128, dtype=np.uint32)
ROWS, DIM = 32, 128  # of a part, of which a block has two
PLACES = {"array": 0, "scales": 1 << 16, "rooms": 1 << 17, "shared scales": 1 << 18}


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
        "arith": ARITH,
        "asm": asm,
        "asm_words": asm_words,
        "address": lambda ref, bits=64: ref.place,
        "as_operand": lambda ref: None,
        "from_thread_values": lambda x: x,
        "i32": lambda x: x,
        "inline_op": lambda *_, **__: lambda code: lambda *args: code(None, *args),
        "mgpu": types.SimpleNamespace(utils=types.SimpleNamespace(warpgroup_barrier=meet)),
        "sum_i32": lambda *terms: sum(terms),
        "swizzle_columns": lambda buffer: 64,
        "thread_field": lambda first, n, by: ((THREAD >> first) & ((1 << n) - 1)) * by,
        "thread_value": lambda x: x,
    }
    for module in (eight_bit_rows, staging, pieces):
        for name, fake in fakes.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, fake)
    return machine


def of_threads(x: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(x, np.int64).astype(np.uint32), (128,))


def test_threads_store_what_they_have_copied(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts of a block, whose last rows do not exist and have NaN for scales."""
    rng, exist = np.random.default_rng(0), 2 * ROWS - 5
    array = rng.integers(1, 256, (2 * ROWS, DIM)).astype(np.uint8)
    scales = rng.uniform(0.1, 1, 128).astype(ml_dtypes.bfloat16)
    scales[exist:] = np.nan
    machine.memory[: array.size] = array.reshape(-1)
    machine.memory[PLACES["scales"] :][:256] = scales.view(np.uint8)
    bits = scales.view(np.uint16).astype(np.uint32) * 0x10001
    bits[exist:] = array[exist:] = 0
    buffer: Any = types.SimpleNamespace(shape=(ROWS, DIM))
    places = list(pieces.places_in(buffer))
    room_bytes = len(places) * pieces.BYTES
    own: Any = staging.Staging(
        Ref(PLACES["rooms"], room_bytes, pieces.BYTES), Ref(PLACES["shared scales"])
    )  # type: ignore[arg-type]
    for part in range(2):
        for i, (band, row) in enumerate(places):
            own_row, own_piece = band.own_row_and_piece(THREAD)
            first = (own_row + part * ROWS) * (DIM // 16) + own_piece
            end = of_threads(exist - part * ROWS - row)
            piece: Any = _Piece(
                first, row * DIM, own_row, types.SimpleNamespace(registers={(): end})
            )  # type: ignore[arg-type]
            is_last = i + 1 == len(places)
            eight_bit_rows._stage_piece(own.room(part).at[i], Ref(PLACES["array"]), piece, is_last)  # type: ignore[arg-type]
    load_scale, share = (
        vars(op)["__wrapped__"] for op in (eight_bit_rows._load_scale, staging._share_scales)
    )
    end = types.SimpleNamespace(registers={(): of_threads(exist)})
    share(None, own.scales, load_scale(None, Ref(PLACES["scales"]), THREAD, THREAD, end))
    assert machine.meetings == 1
    stored: list[tuple] = []
    monkeypatch.setattr(staging, "store_piece", lambda *args: stored.append(args))
    for part in range(2):
        own.wait(1 - part)
        stored.clear()
        own.store(part, buffer, "int8")
        for (_, place, _, words, scale), expected in zip(stored, places, strict=True):
            assert place == expected
            own_row, own_piece = place.band.own_row_and_piece(THREAD)
            rows = part * ROWS + place.row + own_row
            columns = 16 * own_piece[:, None] + np.arange(16)
            np.testing.assert_array_equal(
                np.stack(words, -1).view(np.uint8), array[rows[:, None], columns]
            )
            np.testing.assert_array_equal(scale, bits[rows])


def test_copies_are_there_when_the_thread_has_waited(machine: Any) -> None:
    """The first of two groups lands at a wait for all but one."""
    machine.memory[:16] = 7
    where: Any = types.SimpleNamespace(registers={(): of_threads(1)})
    for part, is_last in ((0, True), (1, True)):
        piece: Any = _Piece(0 * THREAD, 0, 0 * THREAD, where)  # type: ignore[arg-type]
        room: Any = Ref(PLACES["rooms"] + part * pieces.BYTES)
        eight_bit_rows._stage_piece(room, Ref(0), piece, is_last)  # type: ignore[arg-type]
    own: Any = staging.Staging(None, None)  # type: ignore[arg-type]
    rooms = machine.memory[PLACES["rooms"] :][: 2 * pieces.BYTES].reshape(2, -1)
    assert not rooms.any()
    own.wait(1)
    assert (rooms[0] == 7).all() and not rooms[1].any()
    own.wait(0)
    assert (rooms == 7).all()
