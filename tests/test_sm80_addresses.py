"""Where the inline PTX of the mma.sync kernels reads and writes, executed here by all threads of a CTA together.

The interpreter knows these operations by what they mean (`tests/support/bulk.py`), so that no other test without a GPU
sees an address.
"""

import itertools
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pallas_fa2.backends.common.primitives import accumulate, gather_scatter, register_io
from pallas_fa2.backends.sm80.primitives import async_copy
from tests.support.device_arith import ARITH

ROWS = re.compile(
    r"(@\$(?P<predicate>\d) )?cp\.async\.cg\.shared\.global\.L2::128B "
    r"\[\$0 \+ (?P<smem>\d+)\], \[\$1 \+ (?P<gmem>\d+)\], 16(?P<size>, \$2)?;"
)
ZEROED = re.compile(
    r"\{ \.reg \.pred p; setp\.eq\.s32 p, \$1, 0; "
    r"@p st\.shared\.v4\.b32 \[\$0 \+ (\d+)\], \{\$2, \$2, \$2, \$2\}; \}"
)
SCATTERED = (
    "{ .reg .pred p; .reg .b32 i; .reg .b64 a; or.b32 i, $2, $3; setp.ge.s32 p, i, 0; add.s32 i, $2, $3; "
    "mad.wide.u32 a, i, 2, $0; @p st.global.b16 [a], $1; }"
)
STORED = re.compile(
    r"\{ \.reg \.b32 a, b, c, d; ld\.shared\.v4\.b32 \{a, b, c, d\}, \[\$0 \+ (\d+)\]; "
    r"@\$2 st\.global\.v4\.b32 \[\$1 \+ (\d+)\], \{a, b, c, d\}; \}"
)
VECTOR = re.compile(
    r"\{ \.reg \.pred p; setp\.lt\.s32 p, \$2, (\d+); @p cp\.async\.cg\.shared\.global \[\$0\], \[\$1\], 16; \}"
)
VALUE = re.compile(
    r"\{ \.reg \.pred p; setp\.eq\.s32 p, \$3, 0; setp\.lt\.and\.s32 p, \$2, \$4, p; "
    r"@p st\.global\.f32 \[\$0 \+ (\d+)\], \$1; \}"
)
ADDED = re.compile(r"red\.relaxed\.gpu\.global\.add\.f32 \[\$0 \+ (\d+)\], \$1;")
LOADED = re.compile(r"ld\.global\.nc\.f32 \$0, \[\$1 \+ (\d+)\];")
CHUNK = np.arange(16)


def chunks_at(starts: list[np.ndarray], match: re.Match) -> list[np.ndarray]:
    """Return the bytes of each thread's chunks in shared and in device memory."""
    offsets = int(match[1]), int(match[2])
    return [x[:, None] + n + CHUNK for x, n in zip(starts, offsets, strict=True)]


class Memory:
    """Bytes of shared and of device memory, and how often each was written."""

    def __init__(self, smem: int, gmem: int):
        self.smem, self.gmem = np.zeros(smem, np.uint8), np.zeros(gmem, np.uint8)
        self.smem_writes, self.gmem_writes = (np.zeros(n, int) for n in (smem, gmem))

    def write(self, kind: str, address: np.ndarray, values: np.ndarray) -> None:
        memory, writes = getattr(self, kind), getattr(self, f"{kind}_writes")
        assert address.min(initial=0) >= 0
        memory[address] = values
        np.add.at(writes, address, 1)

    def asm(self, code: str, _: str, *operands: Any, **options: Any) -> Any:
        """Execute an instruction by all threads; operands are a value for each thread, or one for all."""
        at = [np.atleast_1d(x) for x in operands]
        if match := ROWS.fullmatch(code):
            offsets = int(match["smem"]), int(match["gmem"])
            smem, gmem = (x[:, None] + n + CHUNK for x, n in zip(at[:2], offsets, strict=True))
            exists = np.broadcast_to((at[2] == 16 if match["size"] else np.True_), len(smem))
            chunks = np.zeros(smem.shape, np.uint8)
            copies = np.ones(len(smem), bool)
            if match["predicate"]:
                copies = at[int(match["predicate"])]
            chunks[exists & copies] = self.gmem[gmem[exists & copies]]
            self.write("smem", smem[copies], chunks[copies])
        elif match := ZEROED.fullmatch(code):
            smem = (at[0] + int(match[1]))[at[1] == 0][:, None] + CHUNK
            self.write("smem", smem, np.uint8(0))
        elif code == SCATTERED:
            _, values, row, column = np.broadcast_arrays(*at)
            stores = (row >= 0) & (column >= 0)
            index = 2 * (row + column)[stores]
            words = values[stores].astype(np.uint16)[:, None].view(np.uint8)
            self.write("gmem", index[:, None] + np.arange(2), words)
        elif match := STORED.fullmatch(code):
            smem, gmem = chunks_at(at[:2], match)
            self.write("gmem", gmem[at[2]], self.smem[smem[at[2]]])
        elif match := VECTOR.fullmatch(code):
            smem, gmem = (x[at[2] < int(match[1])][:, None] + CHUNK for x in at[:2])
            self.write("smem", smem, self.gmem[gmem])
        elif match := VALUE.fullmatch(code):
            address, values, row, lane, limit = np.broadcast_arrays(*at)
            stores = (lane == 0) & (row < limit)
            where = (address + int(match[1]))[stores][:, None] + np.arange(4)
            self.write("gmem", where, values[stores].astype("f4")[:, None].view(np.uint8))
        elif match := ADDED.fullmatch(code):
            np.add.at(self.gmem.view("f4"), (at[0] + int(match[1])) // 4, at[1])
        elif match := LOADED.fullmatch(code):
            return self.gmem.view("f4")[(at[0] + int(match[1])) // 4]
        else:
            raise AssertionError(code)


class Ref:
    """A memref of 16-bit elements, or of 32-bit ones, at an address."""

    def __init__(self, shape: tuple[int, ...], stride: int = 0):
        self.shape, self.element_type, self.stride, self.type = shape, None, stride, self

    def get_strides_and_offset(self) -> tuple:
        return ((self.stride, 1) if len(self.shape) > 1 else (self.stride or 1,)), 0


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A function (memory, threads, code, *arguments) that has all threads execute what the code emits."""

    def inline_op(*_: Any, **__: Any) -> Callable:
        return lambda code: lambda *arguments: code(None, *map(operand, arguments))

    def operand(x: Any) -> Any:
        if isinstance(x, Ref | list):
            return x
        return types.SimpleNamespace(registers={(): np.int32(x)})

    ir = types.SimpleNamespace(
        MemRefType=lambda kind: kind,
        IntegerType=types.SimpleNamespace(get_signless=lambda bits: bits),
        F32Type=types.SimpleNamespace(get=lambda: None),
    )
    utils = types.SimpleNamespace(bitwidth=lambda _: 16)
    common = {
        "arith": ARITH,
        "ir": ir,
        "i32": np.int32,
        "inline_op": inline_op,
        "address": lambda *_: 0,
        "scalars": lambda values: values,
        "elements": lambda register: register,
        "llvm": types.SimpleNamespace(bitcast=lambda kind, value: value),
    }
    modules = async_copy, accumulate, gather_scatter, register_io
    for module in modules:
        for name, stand_in in common.items():
            monkeypatch.setattr(module, name, stand_in, raising=False)
    monkeypatch.setattr(async_copy, "mgpu", types.SimpleNamespace(utils=utils))
    sizes = {"SWIZZLE_BYTES": 128, "SWIZZLE_ROWS": 8}
    swizzle = types.SimpleNamespace(as_operand=lambda buffer: None, **sizes)
    monkeypatch.setattr(async_copy, "swizzle", swizzle)

    def execute(memory: Memory, threads: int, code: Callable, *arguments: Any) -> Any:
        index = np.arange(threads, dtype=np.int32)
        stand_ins = {
            "thread_index": lambda: index,
            "warpgroup_thread_index": lambda: index % 128,
            "asm": memory.asm,
        }
        for module, (name, stand_in) in itertools.product(modules, stand_ins.items()):
            monkeypatch.setattr(module, name, stand_in, raising=False)
        return code(*arguments)

    return execute


def swizzled(row: Any, column: Any, columns: int, width: int) -> Any:
    """Return the byte of an element in tiles of 8 rows and `width` columns, after CUTLASS's Swizzle<3, 4, 3> for rows
    of 128 bytes, or <2, 4, 3> for those of 64: bits 4 to 6 (5) of the byte's address are changed by bits 7 to 9 (8)."""
    tile = row // 8 * (columns // width) + column // width
    byte = 2 * (8 * width * tile + width * (row % 8) + column % width)
    return byte ^ ((byte >> 7 & (7 if width == 64 else 3)) << 4)


# (rows, columns, width of a panel, columns of the array)
SHORT = [(8, 64, 64, 64), (8, 128, 64, 80), (16, 256, 64, 256), (24, 128, 32, 96)]
BUFFERS = [
    (64, 64, 64, 64),
    (128, 64, 64, 56),
    (64, 96, 32, 80),
    (128, 128, 64, 104),
    (64, 128, 32, 128),
    (64, 192, 64, 136),
    (64, 256, 64, 256),
]
COPIES = pytest.mark.parametrize("rows, columns, width, dim", BUFFERS)
WARPGROUPS = pytest.mark.parametrize("warpgroups", [1, 2])
HEADS = 3  # a row of a head is followed by those of others


def array_of(rows: int, dim: int) -> np.ndarray:
    return np.random.default_rng(dim).integers(1, 2**16, (rows, HEADS, dim), dtype=np.uint16)


def buffer_of(rows: int, columns: int, width: int) -> Ref:
    return Ref((rows // 8, columns // width, 8, width))


@pytest.mark.parametrize("rows, columns, width, dim", [*BUFFERS, *SHORT])
@WARPGROUPS
@pytest.mark.parametrize("missing", [None, 0, 5, 27])
def test_rows_are_copied_to_where_ldmatrix_expects_them(
    run: Callable, rows: int, columns: int, width: int, dim: int, warpgroups: int, missing: Any
) -> None:
    """What does not exist becomes zeros; each byte is written once."""
    limit, array = max(0, rows - (missing or 0)), array_of(rows, dim)
    memory = Memory(2 * rows * columns, array.nbytes)
    memory.gmem[:] = array.reshape(-1).view(np.uint8)
    memory.gmem[2 * limit * HEADS * dim :] = 0xFF  # belongs to another array
    source, buffer = Ref((rows, dim), HEADS * dim), buffer_of(rows, columns, width)
    bound = None if missing is None else limit
    run(memory, 128 * warpgroups, async_copy.load_rows, source, buffer, warpgroups, bound)
    expected = np.zeros((rows, columns), np.uint16)
    expected[:limit, :dim] = array[:limit, 0]
    row, column = np.indices((rows, columns))
    at = swizzled(row, column, columns, width) // 2
    np.testing.assert_array_equal(memory.smem.view(np.uint16)[at], expected)
    assert (memory.smem_writes == 1).all()


@COPIES
@WARPGROUPS
@pytest.mark.parametrize("missing", [0, 27])
def test_rows_are_stored_from_where_they_are(
    run: Callable, rows: int, columns: int, width: int, dim: int, warpgroups: int, missing: int
) -> None:
    limit, tile = rows - missing, array_of(rows, columns)[:, 0]
    memory = Memory(tile.nbytes, 2 * rows * HEADS * dim)
    row, column = np.indices(tile.shape)
    memory.smem.view(np.uint16)[swizzled(row, column, columns, width) // 2] = tile
    target, buffer = Ref((rows, dim), HEADS * dim), buffer_of(rows, columns, width)
    run(memory, 128 * warpgroups, async_copy.store_rows, buffer, target, warpgroups, limit)
    stored = memory.gmem.view(np.uint16).reshape(rows, HEADS, dim)
    np.testing.assert_array_equal(stored[:limit, 0], tile[:limit, :dim])
    assert memory.gmem_writes.sum() == 2 * limit * dim and memory.gmem_writes.max() == 1


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_rows_that_are_not_kept_become_zeros(
    run: Callable, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = array_of(64, columns)[:, 0]
    memory = Memory(tile.nbytes, 0)
    row, column = np.indices(tile.shape)
    at = swizzled(row, column, columns, 64) // 2
    memory.smem.view(np.uint16)[at] = tile
    kept = np.random.default_rng(0).random(64) < 0.5
    thread = np.arange(128)
    own = thread // 32 * 16 + thread % 32 // 4
    fields = [np.where(kept[own + half], 1, 0) for half in (0, 8)]
    monkeypatch.setattr(async_copy, "jnp", types.SimpleNamespace(where=lambda kept, *_: kept))
    run(memory, 128, async_copy.zero_rows, buffer_of(64, columns, 64), fields)
    left = memory.smem.view(np.uint16)[at]
    np.testing.assert_array_equal(left, np.where(kept[:, None], tile, 0))
    assert memory.smem_writes.max() == 1


@pytest.mark.parametrize("columns", [8, 24])
def test_elements_of_a_tile_are_scattered(run: Callable, columns: int) -> None:
    """To an array whose rows are the tile's columns; a row and a column do not exist."""
    tile = array_of(64, columns)[:, 0]
    row_index, column_index = np.arange(64), np.arange(columns) * 64
    row_index[60], column_index[3] = -1, -1
    thread = np.arange(128)
    row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
    layout = 1, columns // 8, 1, 1, 2, 1  # of registers, as `plgpu.Layout.WGMMA` has them
    registers = np.empty(layout, object)
    for at in np.ndindex(*layout):
        pair = (column + 8 * at[1] + e for e in range(2))
        registers[at] = [tile[row + 8 * at[4], x] for x in pair]
    rows = [row_index[row + half] for half in (0, 8)]
    columns_of = [column_index[column + 8 * i + e] for i in range(columns // 8) for e in range(2)]
    memory = Memory(0, tile.nbytes)
    scatter = gather_scatter.scatter_outer.__wrapped__
    target, tiles = Ref((columns, 64)), types.SimpleNamespace(registers=registers)
    run(memory, 128, scatter, None, target, tiles, rows, columns_of)
    expected = tile.copy().T
    expected[:, 60], expected[3] = 0, 0
    np.testing.assert_array_equal(memory.gmem.view(np.uint16).reshape(columns, 64), expected)


@pytest.mark.parametrize("count", [64, 128])
def test_a_vector_is_copied(run: Callable, count: int) -> None:
    memory = Memory(4 * count, 4 * count + 64)
    memory.gmem.view("f4")[:] = np.arange(count + 16) + 1
    run(memory, 128, async_copy.load_vector.__wrapped__, None, Ref((count,)), Ref((count,)))
    np.testing.assert_array_equal(memory.smem.view("f4"), np.arange(count) + 1)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("limit", [64, 37, -3])
def test_a_value_of_each_row_is_stored_once(run: Callable, limit: int, stride: int) -> None:
    """A thread has rows r and r + 8 of a warp's 16, as three neighbors have."""
    thread = np.arange(128)
    row = thread // 32 * 16 + thread % 32 // 4
    memory, bound = Memory(0, 256 * stride), types.SimpleNamespace(registers={(): np.int32(limit)})
    values = [row + 1.0, row + 9.0]
    store = register_io._store_row_values.__wrapped__
    run(memory, 128, store, None, values, Ref((64,), stride), bound)
    exists, first = np.arange(64) < limit, np.arange(64 * stride) % stride == 0
    stored = np.repeat(np.where(exists, np.arange(64) + 1, 0), stride) * first
    np.testing.assert_array_equal(memory.gmem.view("f4"), stored)
    np.testing.assert_array_equal(
        memory.gmem_writes, np.repeat(np.repeat(exists, stride) & first, 4)
    )


def test_tiles_that_are_added_up_are_loaded_in_the_order_of_registers(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = 32
    values = np.arange(64.0 * columns).reshape(-1, 128)  # of each register and thread
    memory = Memory(0, 4 * values.size)
    for _ in range(2):
        run(memory, 128, accumulate._add_words.__wrapped__, None, Ref(()), list(values))
    monkeypatch.setattr(accumulate, "vector", np.stack)
    stand_in = types.SimpleNamespace(FragmentedArray=lambda **fields: fields["_registers"])
    monkeypatch.setattr(accumulate, "mgpu", stand_in)
    registers = run(memory, 128, accumulate._load_words, Ref(()), columns)
    np.testing.assert_array_equal(np.concatenate(list(registers.flat)), 2 * values)
