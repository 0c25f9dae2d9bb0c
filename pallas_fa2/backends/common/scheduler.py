"""The tiles that a persistent CTA takes, one after another: dealt when a call is traced, or claimed as it becomes free.

Both have an entry for each tile, int32: its id and, under a mask, the counts of the blocks that it
visits (`block_mask.unpack_counts`). An id that is no tile's ends the work of a CTA.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.arithmetic import I32, array_namespace, div, rem
from pallas_fa2.backends.common.inline import asm_words, inline_op
from pallas_fa2.backends.common.primitives import thread_values
from pallas_fa2.backends.common.primitives.launch import run_in_place
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar, Scratch
from pallas_fa2.control_flow import when
from pallas_fa2.schedule.raster import list_schedule

type Entry = list[Any]  # a tile's id, and under a mask its counts

# How many claims of a CTA are kept: by the fourth after it all warps have read one.
CLAIM_SLOTS = 8
# The warp, of the four that load, that claims; the first one issues copies.
SCHEDULER_WARP = 3


@dataclasses.dataclass(frozen=True)
class StaticTileScheduler:
    """A list of tiles for each CTA."""

    table: (
        Ref | np.ndarray
    )  # int32 [CTAs, 1 + most, 1 or 2]; what follows a CTA's last entry is no tile
    num_tiles: int
    worker_costs: list[float]  # of each CTA

    @classmethod
    def deal(
        cls,
        entries: np.ndarray,
        costs: Sequence[float] | np.ndarray,
        num_workers: int,
        together: int = 1,
    ) -> "StaticTileScheduler":
        """Deal entries `[tiles, 1 or 2]` in order, so many `together` to the CTA that is free first."""
        dealt, loads = list_schedule(costs, num_workers)
        count, fields = entries.shape
        entries = entries.reshape(-1, together, fields)
        table = np.zeros((num_workers, 1 + together * max(map(len, dealt)), fields), np.int32)
        table[..., 0] = count
        for row, indices in zip(table, dealt, strict=True):
            row[: together * len(indices)] = entries[indices].reshape(-1, fields)
        return cls(table, count, loads)

    @property
    def num_workers(self) -> int:
        """Return the number of CTAs."""
        return self.table.shape[0]

    def initial_work(self) -> Entry:
        """Return a CTA's first entry."""
        return self.prefetch_next(I32(0), [])

    def prefetch_next(self, k: Scalar, previous: Entry) -> Entry:
        """Begin to read a CTA's k-th entry, with the one before it at hand, if there is one."""
        cta = lax.axis_index("cta")
        return [self.table[cta, k, i] for i in range(self.table.shape[2])]

    def resolve_next(self, k: Scalar, entry: Entry) -> Entry:
        """Return the k-th entry, from what `prefetch_next` has read."""
        return entry

    def prime(self) -> None:
        """Request the first tile, by the warpgroup that loads."""

    def request_next(self, k: Scalar, in_time: bool | jax.Array) -> None:
        """Request the k-th tile, by the warpgroup that loads, if now is in time for its loads."""


@dataclasses.dataclass(frozen=True)
class DynamicTileScheduler:
    """One list of all tiles, and what CTAs have claimed of it: one, or `tiles_per_claim`, whose entries follow
    each other as their ids do.

    With `static_first_tile`, each CTA has its first tile by its own index. (A CTA that begins when others are
    done has an early tile then, for which later ones must not wait.)
    """

    table: Any  # int32 [header rows + tiles + 1, 2]: `header_rows`, entries, what is no tile
    num_workers: int
    static_first_tile: bool = True
    tiles_per_claim: int = 1

    @staticmethod
    def header_rows(num_workers: int) -> int:
        """Return how many rows come before the entries, all of them -1 at first: the last claims of each CTA,
        and how many claims there have been, less one."""
        return num_workers * CLAIM_SLOTS + 1

    @classmethod
    def build(
        cls,
        tile_ids: np.ndarray,
        counts: Any,
        num_workers: int,
        static_first_tile: bool = True,
        together: int = 1,
    ) -> "DynamicTileScheduler":
        """List tiles in this order."""
        table = tile_table(tile_ids, counts, cls.header_rows(num_workers))
        return cls(table, num_workers, static_first_tile, together)

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles."""
        return self.table.shape[0] - self.header_rows(self.num_workers) - 1

    @property
    def _num_static_tiles(self) -> int:
        """Return how many of a CTA's claims are known when traced."""
        return 1 if self.static_first_tile else 0

    def _claims_before(self, k: Scalar) -> Scalar:
        """Return how many claims come before the one of the k-th tile."""
        return div(k, self.tiles_per_claim) - self._num_static_tiles

    def _begins_claim(self, k: Scalar) -> jax.Array:
        """Return whether the k-th tile is the first of a claim."""
        return rem(k, self.tiles_per_claim) == 0

    def _slot(self, k: Scalar) -> Scalar:
        """Return the row of the table for the claim of the k-th tile."""
        return lax.axis_index("cta") * CLAIM_SLOTS + rem(self._claims_before(k), CLAIM_SLOTS)

    def _phase(self, k: Scalar) -> jax.Array:
        """Return a number whose last bit tells a claim from the one that it replaces; other entries have none."""
        return jnp.where(self._begins_claim(k), div(self._claims_before(k), CLAIM_SLOTS), 0)

    def initial_work(self) -> Entry:
        """Return a CTA's first entry."""
        if not self.static_first_tile:
            return self.resolve_next(I32(0), self.prefetch_next(I32(0), []))
        row = self.header_rows(self.num_workers) + lax.axis_index("cta") * self.tiles_per_claim
        return [self.table[row, i] for i in range(2)]

    def prefetch_next(self, k: Scalar, previous: Entry) -> Entry:
        """Begin to read a CTA's k-th entry, which may not be claimed yet, with the one before it at hand."""
        row = self._slot(k)
        if self.tiles_per_claim > 1:
            following = previous[0] + I32(self.header_rows(self.num_workers) + 1)
            row = jnp.where(self._begins_claim(k), row, following)
        return list(_prefetch_entry(self.table.at[row]))

    def resolve_next(self, k: Scalar, entry: Entry) -> Entry:
        """Return the k-th entry, once it is claimed."""
        return list(_resolve_entry(self.table.at[self._slot(k)], *entry, self._phase(k)))

    def prime(self) -> None:
        """Request the first tile, by the warpgroup that loads."""
        if not self.static_first_tile:
            self._send_claim(I32(0))

    def request_next(self, k: Scalar, in_time: bool | jax.Array) -> None:
        """Request the k-th tile, by the warpgroup that loads, if now is in time for its loads."""
        when(in_time & self._begins_claim(k))(lambda: self._send_claim(k))

    def _send_claim(self, k: Scalar) -> None:
        entries = self.header_rows(self.num_workers)
        first_claim = 1 + self._num_static_tiles * self.num_workers
        refs = self.table.at[entries - 1], self.table.at[entries], self.table.at[self._slot(k)]
        num_claims, phase = I32(self.num_tiles // self.tiles_per_claim), self._phase(k)
        _claim_tile(*refs, I32(first_claim), num_claims, phase, I32(self.tiles_per_claim))


def tile_table(tile_ids: Any, counts: Any, header_rows: int) -> Any:
    """Return int32 `[header_rows + n + 1, 2]`: rows of -1, the ids and counts of n tiles, and (n, 0), which is no
    tile's."""
    header = np.full((header_rows, 2), -1, np.int32)
    end = np.array([[len(tile_ids), 0]], np.int32)
    xp = array_namespace(counts)
    return xp.concatenate([header, xp.stack([tile_ids, counts], -1), end])


def for_each_tile(
    tiles: StaticTileScheduler | DynamicTileScheduler,
    body: Callable,
    carry: Any,
    early: bool = False,
) -> tuple[jax.Array, Any]:
    """Run the body for each tile of a CTA, and return how many these are, and the carry after them.

    body(k, entry, carry, prefetch) -> (carry, prefetch()): it reads the next entry where nobody need wait for it, and
    where few registers are in use. With `early`, what is dealt is read before.
    """
    early = early and isinstance(tiles, StaticTileScheduler)

    def visit(state: tuple) -> tuple:
        k, entry, carry = state
        following = tiles.prefetch_next(k + 1, entry) if early else None
        prefetch = (lambda: following) if early else (lambda: tiles.prefetch_next(k + 1, entry))
        carry, prefetched = body(k, entry, carry, prefetch)
        return k + 1, tiles.resolve_next(k + 1, prefetched), carry

    state = I32(0), tiles.initial_work(), carry
    k, _, carry = lax.while_loop(lambda state: state[1][0] < tiles.num_tiles, visit, state)
    return k, carry


def launch_persistent(
    name: str,
    run: Callable,
    memory: Scratch,
    tiles: StaticTileScheduler | DynamicTileScheduler,
    inputs: Any,
    outputs: Any,
    warpgroups: int,
    cluster: Mapping[str, int] = types.MappingProxyType({}),
) -> Any:
    """Return `outputs` as they are after run(tiles, inputs, outputs, memory) in every warpgroup of every CTA."""
    table, dynamic = jnp.asarray(tiles.table), isinstance(tiles, DynamicTileScheduler)
    inputs = [] if dynamic else [table], inputs
    outputs = [table] if dynamic else [], outputs

    def body(inputs: tuple, outputs: tuple, memory: Any) -> None:
        (static_table, inputs), (dynamic_table, outputs) = inputs, outputs
        (table,) = *static_table, *dynamic_table
        run(dataclasses.replace(tiles, table=table), inputs, outputs, memory)

    grid = {"cta": tiles.num_workers}
    return run_in_place(name, body, memory, inputs, outputs, grid, warpgroups, cluster)[1]


_ENTRY = thread_values.SCALAR_I32, thread_values.SCALAR_I32
_ROW, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@inline_op("claim_tile", _ROW, _ROW, _ROW, *[_SCALAR] * 4)
def _claim_tile(_, last_claim: Ref, entries: Ref, slot: Ref, *scalars: Registers) -> None:
    """Copy to a slot the first entry of the next claim, or the one after all; by one thread, for which nobody waits.

    `scalars` are the first claim of all, how many there are, the phase of this one, and the tiles of a claim.
    """
    code = (
        "{ .reg .b64 e, a; "
        "@leader atom.relaxed.gpu.global.add.s32 v, [$1], 1; @leader add.s32 v, v, $4; "
        "@leader min.s32 v, v, $5; @leader mul.lo.s32 v, v, $7; @leader mad.wide.s32 a, v, 8, $2; "
        "@leader ld.global.b64 e, [a]; "
        # the phase's last bit becomes the sign of the id, the lower half
        "@leader shl.b32 v, $6, 31; @leader cvt.u64.u32 a, v; @leader or.b64 e, e, a; "
        "@leader st.relaxed.gpu.global.b64 [$3], e; }"
    )
    refs = [thread_values.address(x) for x in (last_claim, entries, slot)]
    values = (x.registers[()] for x in scalars)
    thread_values.on_warp(SCHEDULER_WARP, code, "l,l,l,r,r,r,r", *refs, *values)


@inline_op("prefetch_entry", _ROW, result=_ENTRY)
def _prefetch_entry(_, row: Ref) -> tuple[Registers, ...]:
    code = "{ .reg .b64 e; ld.relaxed.gpu.global.b64 e, [$2]; mov.b64 {$0, $1}, e; }"
    return _entry(code, "l", thread_values.address(row))


@inline_op("resolve_entry", _ROW, _SCALAR, _SCALAR, _SCALAR, result=_ENTRY)
def _resolve_entry(_, row: Ref, *entry_and_phase: Registers) -> tuple[Registers, ...]:
    """Read the entry again until its claim is of this phase."""
    code = (
        "{ .reg .pred p; .reg .b32 v; .reg .b64 e; "
        "look: shl.b32 v, $5, 31; xor.b32 v, v, $0; setp.ge.s32 p, v, 0; @p bra done; "
        "ld.relaxed.gpu.global.b64 e, [$2]; mov.b64 {$0, $1}, e; bra look; "
        "done: and.b32 $0, $0, 0x7fffffff; }"
    )
    scalars = (x.registers[()] for x in entry_and_phase)
    return _entry(code, "l,0,1,r", thread_values.address(row), *scalars)


def _entry(code: str, constraints: str, *operands: MlirValue) -> tuple[Registers, ...]:
    words = asm_words(2, code, constraints, *operands, side_effects=True)
    return tuple(map(thread_values.splat, words))
