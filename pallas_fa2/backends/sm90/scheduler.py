"""Which tiles a CTA takes, one after another: dealt when a call is traced, or claimed as it becomes free.

Both are an entry for each tile, int32: its number and, under a mask, the counts of the blocks that it
visits (`block_mask.unpack_counts`). A number that is no tile's ends the work of a CTA.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, div, rem
from pallas_fa2.backends.sm90.primitives import thread_values
from pallas_fa2.backends.sm90.primitives.launch import build_kernel, isolate_from_fusion
from pallas_fa2.control_flow import when
from pallas_fa2.schedule.raster import list_schedule

# How many claims of a CTA are kept: by the fourth after it all warps have read one.
CLAIM_SLOTS = 8
# The warp, of the four that load, that claims; the first one issues copies.
SCHEDULER_WARP = 3


@dataclasses.dataclass(frozen=True)
class StaticTileScheduler:
    """A list of each CTA's tiles."""

    table: Any  # int32 [hands, 1 + most, 1 or 2]; what follows a CTA's last entry is no tile
    num_tiles: int  # of tiles
    worker_costs: list[float]  # of each CTA

    @classmethod
    def deal(
        cls,
        entries: np.ndarray,
        costs: Sequence[float] | np.ndarray,
        hands: int,
        together: int = 1,
    ) -> "StaticTileScheduler":
        """Of entries `[tiles, 1 or 2]` in order, so many `together` to the CTA that is free first."""
        dealt, loads = list_schedule(costs, hands)
        count, fields = entries.shape
        entries = entries.reshape(-1, together, fields)
        table = np.zeros((hands, 1 + together * max(map(len, dealt)), fields), np.int32)
        table[..., 0] = count
        for row, places in zip(table, dealt, strict=True):
            row[: together * len(places)] = entries[places].reshape(-1, fields)
        return cls(table, count, loads)

    @property
    def num_workers(self) -> int:
        return self.table.shape[0]

    def initial_work(self) -> list[Any]:
        return self.prefetch_next(I32(0), [])

    def prefetch_next(self, k: Any, before: list[Any]) -> list[Any]:
        """Begins to read the k-th entry, of those after the first with the one `before` at hand."""
        cta = lax.axis_index("cta")
        return [self.table[cta, k, i] for i in range(self.table.shape[2])]

    def resolve_next(self, k: Any, entry: list[Any]) -> list[Any]:
        """The k-th entry, of what `look` has seen."""
        return entry

    def prime(self) -> None:
        """By the warpgroup that loads, before the first tile."""

    def request_next(self, k: Any, in_time: Any) -> None:
        """By that warpgroup: the k-th tile, in time for its loads."""


@dataclasses.dataclass(frozen=True)
class DynamicTileScheduler:
    """One list of all tiles, and what CTAs have claimed of it: one, or so many `together`, whose entries follow
    each other as their numbers do.

    With `reserved`, each CTA has its first tile by its own number. (A CTA that begins when others are
    done has an early tile then, for which later ones must not wait.)
    """

    table: Any  # int32 [hands CLAIMS + 1 + tiles + 1, 2]: see `in_front`; entries; what is no tile
    num_workers: int
    static_first_tile: bool = True
    tiles_per_claim: int = 1

    @staticmethod
    def header_rows(hands: int) -> int:
        """How many rows come before the entries, all of them -1 at first: the last claims of each CTA,
        and how many claims there have been, less one."""
        return hands * CLAIM_SLOTS + 1

    @classmethod
    def build(
        cls,
        numbers: np.ndarray,
        counts: Any,
        hands: int,
        reserved: bool = True,
        together: int = 1,
    ) -> "DynamicTileScheduler":
        """Tiles in this order."""
        front = np.full((cls.header_rows(hands), 2), -1, np.int32)
        end = np.array([[len(numbers), 0]], np.int32)
        xp = np if isinstance(counts, np.ndarray) else jnp
        table = xp.concatenate([front, xp.stack([numbers, counts], -1), end])
        return cls(table, hands, reserved, together)

    @property
    def num_tiles(self) -> int:
        return self.table.shape[0] - self.header_rows(self.num_workers) - 1

    @property
    def _num_static_tiles(self) -> int:
        """How many of a CTA's tiles are no claims."""
        return 1 if self.static_first_tile else 0

    def _claims_before(self, k: Any) -> Any:
        """How many there are before the one that brings the k-th tile."""
        return div(k, self.tiles_per_claim) - self._num_static_tiles

    def _is_claimed(self, k: Any) -> Any:
        """Whether it is the first of those that belong together."""
        return rem(k, self.tiles_per_claim) == 0

    def _slot(self, k: Any) -> Any:
        return lax.axis_index("cta") * CLAIM_SLOTS + rem(self._claims_before(k), CLAIM_SLOTS)

    def _phase(self, k: Any) -> Any:
        """By its last bit a claim is told from the one that it replaces; other entries have none."""
        return jnp.where(self._is_claimed(k), div(self._claims_before(k), CLAIM_SLOTS), 0)

    def initial_work(self) -> list[Any]:
        if not self.static_first_tile:
            return self.resolve_next(I32(0), self.prefetch_next(I32(0), []))
        place = self.header_rows(self.num_workers) + lax.axis_index("cta") * self.tiles_per_claim
        return [self.table[place, i] for i in range(2)]

    def prefetch_next(self, k: Any, before: list[Any]) -> list[Any]:
        place = self._slot(k)
        if self.tiles_per_claim > 1:
            following = before[0] + I32(self.header_rows(self.num_workers) + 1)
            place = jnp.where(self._is_claimed(k), place, following)
        return list(_look(self.table.at[place]))  # pyright: ignore[reportCallIssue]

    def resolve_next(self, k: Any, entry: list[Any]) -> list[Any]:
        place = self.table.at[self._slot(k)]
        return list(_settle(place, *entry, self._phase(k)))  # pyright: ignore[reportCallIssue]

    def prime(self) -> None:
        if not self.static_first_tile:
            self._send_claim(I32(0))

    def request_next(self, k: Any, in_time: Any) -> None:
        when(in_time & self._is_claimed(k))(lambda: self._send_claim(k))

    def _send_claim(self, k: Any) -> None:
        entries = self.header_rows(self.num_workers)
        already, count = (
            1 + self._num_static_tiles * self.num_workers,
            self.num_tiles // self.tiles_per_claim,
        )
        refs = self.table.at[entries - 1], self.table.at[entries], self.table.at[self._slot(k)]
        numbers = I32(already), I32(count), self._phase(k), I32(self.tiles_per_claim)
        _claim_tile(*refs, *numbers)  # pyright: ignore[reportCallIssue]


def for_each_tile(
    tiles: StaticTileScheduler | DynamicTileScheduler,
    body: Callable,
    carry: Any,
    early: bool = False,
) -> tuple[Any, Any]:
    """How many tiles the CTA takes, and the carry after them.

    body(k, entry, carry, look) -> (carry, look()): it looks for the next entry where the answer need not
    be waited for, and where few registers are in use. With `early`, what is dealt is read before.
    """
    early = early and isinstance(tiles, StaticTileScheduler)

    def visit(state: tuple) -> tuple:
        k, entry, carry = state
        following = tiles.prefetch_next(k + 1, entry) if early else None
        look = (lambda: following) if early else (lambda: tiles.prefetch_next(k + 1, entry))
        carry, seen = body(k, entry, carry, look)
        return k + 1, tiles.resolve_next(k + 1, seen), carry

    state = I32(0), tiles.initial_work(), carry
    k, _, carry = lax.while_loop(lambda state: state[1][0] < tiles.num_tiles, visit, state)
    return k, carry


def launch_persistent(
    name: str,
    run: Callable,
    memory: Any,
    tiles: StaticTileScheduler | DynamicTileScheduler,
    inputs: Any,
    outputs: Any,
    warpgroups: int,
    cluster: Mapping[str, int] = types.MappingProxyType({}),
) -> Any:
    """`outputs` as they are after run(tiles, inputs, outputs, memory) in every warpgroup of every CTA."""
    table, claimed = jnp.asarray(tiles.table), isinstance(tiles, DynamicTileScheduler)
    read, read_tree = jax.tree.flatten(([] if claimed else [table], inputs))
    written, written_tree = jax.tree.flatten(([table] if claimed else [], outputs))

    def body(refs: tuple, memory: Any) -> None:
        dealt, inputs = jax.tree.unflatten(read_tree, refs[: len(read)])
        claims, outputs = jax.tree.unflatten(written_tree, refs[len(read) :])
        (table,) = *dealt, *claims
        run(dataclasses.replace(tiles, table=table), inputs, outputs, memory)

    kernel = build_kernel(name, body, memory, (), {"cta": tiles.num_workers}, warpgroups, cluster)

    @isolate_from_fusion
    def after(read: list, written: tuple) -> tuple:
        return pl.run_state(lambda refs: kernel(*read, *refs))(written)

    return jax.tree.unflatten(written_tree, after(read, tuple(written)))[1]


_ENTRY = (thread_values.SCALAR_I32, thread_values.SCALAR_I32)
_ROW = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT


@plgpu.inline_mgpu(arg_types=(_ROW, _ROW, _ROW, *[_SCALAR] * 4))
def _claim_tile(_: Any, last: Any, entries: Any, place: Any, *numbers: Any) -> None:
    """The first entry of those together at `last` + `already`, or the one after all; by one thread, for which
    nobody waits."""
    code = (
        "{ .reg .b64 e, a; "
        "@leader atom.relaxed.gpu.global.add.s32 v, [$1], 1; @leader add.s32 v, v, $4; "
        "@leader min.s32 v, v, $5; @leader mul.lo.s32 v, v, $7; @leader mad.wide.s32 a, v, 8, $2; "
        "@leader ld.global.b64 e, [a]; "
        # the round's last bit becomes the sign of the number, the lower half
        "@leader shl.b32 v, $6, 31; @leader cvt.u64.u32 a, v; @leader or.b64 e, e, a; "
        "@leader st.relaxed.gpu.global.b64 [$3], e; }"
    )
    refs = [thread_values.address(x) for x in (last, entries, place)]
    thread_values.on_warp(
        SCHEDULER_WARP, code, "l,l,l,r,r,r,r", *refs, *(x.registers[()] for x in numbers)
    )


@plgpu.inline_mgpu(arg_types=(_ROW,), return_type=_ENTRY)
def _look(_: Any, place: Any) -> Any:
    code = "{ .reg .b64 e; ld.relaxed.gpu.global.b64 e, [$2]; mov.b64 {$0, $1}, e; }"
    return _entry(code, "l", thread_values.address(place))


@plgpu.inline_mgpu(arg_types=(_ROW, _SCALAR, _SCALAR, _SCALAR), return_type=_ENTRY)
def _settle(_: Any, place: Any, *numbers: Any) -> Any:
    """Looks again until the claim is of this round."""
    code = (
        "{ .reg .pred p; .reg .b32 v; .reg .b64 e; "
        "look: shl.b32 v, $5, 31; xor.b32 v, v, $0; setp.ge.s32 p, v, 0; @p bra done; "
        "ld.relaxed.gpu.global.b64 e, [$2]; mov.b64 {$0, $1}, e; bra look; "
        "done: and.b32 $0, $0, 0x7fffffff; }"
    )
    return _entry(
        code, "l,0,1,r", thread_values.address(place), *(x.registers[()] for x in numbers)
    )


def _entry(code: str, constraints: str, *operands: Any) -> Any:
    return tuple(
        map(
            thread_values.splat,
            thread_values.asm_words(2, code, constraints, *operands, side_effects=True),
        )
    )
