"""A Hopper backward that adds dQ in one order: who may add when, and the tiles in that order.

A tile adds to a row of dQ (a block of queries) when every tile of later keys that visits the row has.
Tiles visit rows from the first to the last, and start from the last keys: under a causal mask a tile
begins at its diagonal, so that the tile before it in this order is some steps ahead wherever they meet,
and nobody waits. For other masks the order is as good as any.

CTAs take tiles in one global order, each the next one when it is free, and a tile waits for earlier ones
alone: so the earliest that is not done can always go on, whatever the number of CTAs, and however few of
them a GPU has room for at a time.

A turn is passed on through device memory, which takes about as long as a step. So no warpgroup that
multiplies takes part: of the one that loads, a warp looks whether a step may add, and another tells the
next tile that it has. Those who add see barriers in shared memory alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import inline_op
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.sm90 import tile_order_kernel
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.backward.memory import TURN_BARRIERS, SharedStorage
from pallas_fa2.backends.sm90.backward.producer import Producer
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule, KvTile, Step
from pallas_fa2.backends.sm90.primitives import layouts, thread_values
from pallas_fa2.backends.sm90.primitives.named_barriers import NamedBarrier
from pallas_fa2.backends.sm90.scheduler import DynamicTileScheduler
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.schedule import raster

# An entry of a list: whether the block is seen in full, how many tiles add to its row before, which
# block it is, and whether it is visited at all.
ORDINAL_BIT, BLOCK_BIT, EMPTY_BIT = 1, 15, 30
MOST_TILES = 1 << (BLOCK_BIT - ORDINAL_BIT)
# The entry of a run: how many blocks that the mask cuts, and how many full ones after them.
FULL_BIT = 16


class OrderedBlockMask(NamedTuple):
    """The blocks that each tile visits, from the first to the last, in runs of cut and then full ones.

    A tile that sees nothing visits the last block nevertheless, as one that is cut: as in the lists by
    which a mask is asked.
    """

    num_blocks: Any  # int32 [B | 1, heads | 1, tiles]: blocks
    block_indices: Any  # int32 [B | 1, heads | 1, tiles, blocks]
    run_lengths: Any  # int32, of the same shape: from a place in the list on, a run

    @classmethod
    def of(cls, classes: Any) -> "OrderedBlockMask":
        """From the classes of tiles, `[B | 1, heads | 1, tiles, blocks]`."""
        xp, blocks = tile_order_kernel.array_namespace(classes), classes.shape[-1]
        block = np.arange(blocks, dtype=np.int32).reshape(1, 1, 1, -1)
        nothing = xp.all(classes == EMPTY, -1, keepdims=True) & (block == blocks - 1)
        classes = xp.where(nothing, np.int32(PARTIAL), classes)
        there = (classes != EMPTY).astype(np.int32)
        later = xp.flip(xp.cumsum(xp.flip(there, -2), -2, dtype=np.int32), -2) - there
        entries = (1 - there) << np.int32(EMPTY_BIT) | block << np.int32(BLOCK_BIT)
        entries |= later << np.int32(ORDINAL_BIT) | (classes == FULL).astype(np.int32)
        lists = xp.sort(entries, -1)
        listed = lists < np.int32(1 << EMPTY_BIT)
        full = listed & (lists & 1 == 1)
        cut = listed & ~full
        cut_end = _next(~cut, xp)
        full_end = xp.take_along_axis(_next(~full, xp), xp.minimum(cut_end, blocks - 1), -1)
        full_end = xp.where(cut_end < blocks, full_end, blocks)
        runs = (full_end - cut_end) << np.int32(FULL_BIT) | (cut_end - block)
        return cls(xp.sum(listed, -1, dtype=np.int32), lists, runs)


def _next(x: Any, xp: Any) -> Any:
    """From each place on, the first where x holds, or one after the last."""
    size = x.shape[-1]
    places = xp.where(x, np.arange(size, dtype=np.int32).reshape(1, 1, 1, -1), np.int32(size))
    if xp is np:
        return np.flip(np.minimum.accumulate(np.flip(places, -1), -1), -1)
    return lax.cummin(places, places.ndim - 1, reverse=True)


class DeterministicSchedule(BackwardSchedule):
    """Tiles are numbered in the order in which they are taken: all heads of a section, from the last
    keys to the first."""

    ARRAYS = "block_indices", "run_lengths"
    DQ_ACCUMULATION = "float32 dQ, additions in one order"

    @classmethod
    def choose(cls, problem: KernelSpec, config: BackwardConfig, classes: Any = None) -> Self:
        """Under a mask with a tile for each head of a group, as the longest may come last."""
        if problem.mask is not None:
            return cls(problem, config, problem.group)
        return super().choose(problem, config)

    @property
    def order(self) -> raster.RasterOrder:
        # from the last tile of a head to the first, whichever is the longest
        return dataclasses.replace(super().order, longest_first=True)

    @property
    def turns_shape(self) -> tuple[int, ...]:
        """Of the blocks of queries; in pairs of CTAs of the parts of each."""
        rows, _ = self.dq_shape
        return (rows, self.config.num_dq_parts) if self.config.two_cta else (rows,)

    def coordinates(self, number: Any) -> tuple[Any, Any, Any]:
        return self.order.coordinates(number)

    def block_mask(self, classes: Any) -> OrderedBlockMask:  # pyright: ignore[reportIncompatibleMethodOverride]
        return OrderedBlockMask.of(self.classes_by_kv_tile(classes))

    def tile_scheduler(self, seen: Any) -> DynamicTileScheduler:
        """With how many blocks each visits under a mask."""
        numbers = np.arange(self.order.count, dtype=np.int32)
        counts = 0 * numbers
        if seen is not None:
            shape = self.order.batch, self.order.heads, self.kv_tiles
            counts = tile_order_kernel.array_namespace(seen.num_blocks).broadcast_to(
                seen.num_blocks, shape
            )
            counts = counts[self.coordinates(numbers)]
        return DynamicTileScheduler.build(
            numbers, counts, self.num_workers, static_first_tile=False
        )

    def tile(self, k: Any, first_step: Any, entry: list[Any], **arrays: Any) -> "DeterministicTile":
        return DeterministicTile(self, k, first_step, *self.known(entry), **arrays)

    def block(self, listed: Any) -> Any:
        return listed >> I32(BLOCK_BIT) & I32((1 << (EMPTY_BIT - BLOCK_BIT)) - 1)

    def dq_rank(self, step: Step) -> Any:
        """How many tiles add to the step's row of dQ before."""
        tile = step.tile
        if tile.block_indices is not None:
            return tile.kv_list(step.global_step) >> I32(ORDINAL_BIT) & I32(MOST_TILES - 1)
        first_query = arithmetic.rem(step.dq_block, self.q_blocks) * self.config.block_q
        return self.last_kv_tile(first_query) - tile.coordinates[2]


@dataclasses.dataclass(frozen=True)
class DeterministicTile(KvTile):
    run_lengths: Any = None

    @property
    def next_step(self) -> Any:
        return super().next_step if self.counts is None else self.first_step + self.counts

    def each_step(self, body: Any, carry: Any = None, apart: bool = False) -> Any:
        if self.block_indices is None or not apart:
            return super().each_step(body, carry)

        def hidden(step: Step, carry: Any) -> Any:
            """LLVM would keep what follows from the number in registers, of both loops in both."""
            names = "tile_id", "counts", "first_step", "k"
            values = lax.optimization_barrier([getattr(self, name) for name in names])
            tile = dataclasses.replace(self, **dict(zip(names, values, strict=True)))
            return body(step._replace(tile=tile), carry)

        def run(state: tuple) -> tuple:
            t, *carried = state
            counts = layouts.index_broadcast(self.run_lengths, *self.coordinates)[
                t - self.first_step
            ]
            first_full = t + (counts & I32((1 << FULL_BIT) - 1))
            end = first_full + (counts >> I32(FULL_BIT))
            found = self.loop(hidden, t, first_full, True, tuple(carried))
            return end, *self.loop(hidden, first_full, end, False, found)

        state = self.first_step, self.first_row, carry
        return lax.while_loop(lambda state: state[0] < self.next_step, run, state)[2]


@dataclasses.dataclass(frozen=True)
class DqSemaphore:
    """The barriers by which the warpgroups of a CTA take their turns."""

    full: Any
    first: int

    @classmethod
    def of(cls, memory: SharedStorage) -> "DqSemaphore":
        return cls(memory.full, memory.full.shape[0] - TURN_BARRIERS)

    def granted(self, t: Any) -> Any:
        """Completed when a step's dQ may be added, by two arrivals of the loader."""
        return self.full.at[self.first + (t & I32(1))]

    def added(self, t: Any) -> Any:
        """Completed when it has been."""
        return self.full.at[self.first + 2 + (t & I32(1))]

    def prime(self) -> None:
        """By those who add: as if there were a step before the one before the first."""
        plgpu.barrier_arrive(self.added(I32(0)))

    def acquire(self, t: Any) -> None:
        plgpu.barrier_wait(self.granted(t))

    def release(self, t: Any) -> None:
        plgpu.barrier_arrive(self.added(t))


class DeterministicProducer(Producer):
    """Looks one step behind its loads whether dQ may be added, and two behind tells that it has been.

    Its warps do not wait for each other: while one looks and another's addition becomes visible, the first
    loads. But those who add wait for an arrival of all four, which follows their waits for the next step's
    buffers; so none of them is ever two phases of a barrier behind, and takes one for the other.
    """

    def start(self, row: Any) -> tuple[Any, Any, Any]:
        return row, I32(0), row

    def visit(self, tile: KvTile, dq_row: Any, look: Callable) -> Any:
        def load(step: Step, before: tuple) -> tuple:
            self.load(step)
            self.pass_turns(step.global_step, *before)
            if (
                self.memory.pairwise
            ):  # several pieces a step: the bound above does not hold for theirs
                _meet_warps()  # pyright: ignore[reportCallIssue]
            return step.dq_block, self.schedule.dq_rank(step), before[0]  # pyright: ignore[reportAttributeAccessIssue]

        return tile.each_step(load, dq_row), look()

    def pass_turns(self, t: Any, row: Any, ordinal: Any, row_before: Any) -> None:
        """Of the step before t, and of the one before that."""
        turns = DqSemaphore.of(self.memory)
        wait_dq_turn(self.outputs.turns, row, ordinal)
        for _ in range(2):
            plgpu.barrier_arrive(turns.granted(t - 1))
        self.tell(t - 2, row_before)

    def tell(self, t: Any, row: Any) -> None:
        plgpu.barrier_wait(DqSemaphore.of(self.memory).added(t))
        end_dq_turn(self.outputs.turns, row)

    def close(self, steps: Any, tiles: Any, dq_row: Any) -> None:
        self.pass_turns(steps, *dq_row)
        self.tell(steps - 1, dq_row[0])
        super().close(steps, tiles, dq_row)


WARPS = 4
# Which warp of the four; the first one issues copies, and the last claims tiles.
POLL_WARP, SIGNAL_WARP = 1, 2


def wait_dq_turn(turns: Any, row: Any, ordinal: Any) -> None:
    """One warp waits until so many tiles have added to a row; to the others it is nothing."""
    _await_turn(turns.at[row], ordinal)  # pyright: ignore[reportCallIssue]


def end_dq_turn(turns: Any, row: Any) -> None:
    """One warp tells that a tile has added to a row: its CTA's additions come before.

    What orders them is the release of the one and the acquire of the other, through the barriers that
    either has passed.
    """
    _end_turn(turns.at[row])  # pyright: ignore[reportCallIssue]


def take_dq_turn(turn: Any, ordinal: Any) -> None:
    """Each warp of a warpgroup waits until so many tiles have added what it will add to."""
    _take_turn(turn, ordinal * WARPS)  # pyright: ignore[reportCallIssue]


def give_dq_turn(turn: Any) -> None:
    """Each warp tells that it has added."""
    _give_turn(turn)  # pyright: ignore[reportCallIssue]


@inline_op("sync_producer_warps")
def _meet_warps(_: Any) -> None:
    """The warps of the warpgroup that loads wait for each other."""
    void, code = ir.Type.parse("!llvm.void"), f"bar.sync {NamedBarrier.TURN}, 128;"
    llvm.inline_asm(void, [], code, "", has_side_effects=True)


@inline_op("wait_dq_turn", plgpu.RefType(), plgpu.Layout.WG_SPLAT)
def _await_turn(_: Any, turn: Any, ordinal: Any) -> None:
    code = "look: ld.acquire.gpu.global.b32 v, [$1]; setp.lt.s32 p, v, $2; @p bra look;"
    thread_values.on_warp(
        POLL_WARP, code, "l,r", thread_values.address(turn), ordinal.registers[()]
    )


@inline_op("end_dq_turn", plgpu.RefType())
def _end_turn(_: Any, turn: Any) -> None:
    code = "@leader red.release.gpu.global.add.s32 [$1], 1;"
    thread_values.on_warp(SIGNAL_WARP, code, "l", thread_values.address(turn))


@inline_op("take_dq_turn", plgpu.RefType(), plgpu.Layout.WG_SPLAT)
def _take_turn(_: Any, turn: Any, ordinal: Any) -> None:
    code = (
        "{ .reg .pred p; .reg .b32 v; look: ld.acquire.gpu.global.b32 v, [$0]; "
        "setp.lt.s32 p, v, $1; @p bra look; }"
    )
    operands = [thread_values.address(turn), ordinal.registers[()]]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, code, "l,r", has_side_effects=True)


@inline_op("give_dq_turn", plgpu.RefType())
def _give_turn(_: Any, turn: Any) -> None:
    thread_values.warp_release_add(turn, 1)
