"""Tile sizes of a Hopper forward kernel, and which blocks a CTA takes in which order."""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from pallas_fa2.kernels import mosaic, visits
from pallas_fa2.kernels.mosaic import Problem
from pallas_fa2.kernels.tiles import Claims, Dealt
from pallas_fa2.kernels.visits import Visits


@dataclasses.dataclass(frozen=True)
class Config:
    """Tile sizes and schedule of one forward kernel."""

    head_dim: int  # of queries and keys, up to 256; arrays may have less
    value_dim: int
    warpgroups: int  # that multiply; each owns 64 query rows
    block_kv: int
    stages: int
    registers: tuple[int, int]  # of a thread in a multiplying and in the loading warpgroup
    # Whether Q is read into registers once a tile: less shared memory traffic (16 of 80 KB a block at
    # H = 128) where there are 32 registers for it.
    q_in_registers: bool = False
    # Of queries in shared memory, at least: a kernel has two where there is room (`with_queries_ahead`), and the
    # next tile's come while this one's are read.
    q_buffers: int = 1
    # Keys whose values are multiplied at once, if not a whole block: a warp that issues products waits for
    # the tensor cores to take them, and with fewer at a time it begins sooner with its exponentials.
    values_at_once: int | None = None
    # Of the buffer through which the output leaves, and a repeated tile's keys and values come.
    out_columns: int = 128
    ctas: int = 132  # persistent, one a multiprocessor
    # Keys and values of the heads that run at the same time: about half of the 60 MB of L2.
    section_bytes: int = 32 << 20

    rows: ClassVar[int] = mosaic.ROWS_PER_WARPGROUP

    @property
    def shares(self) -> tuple[int, ...]:
        """Registers of a thread in each warpgroup, the loading one last."""
        multiplying, loading = self.registers
        return *[multiplying] * self.warpgroups, loading

    @property
    def block_q(self) -> int:
        return self.warpgroups * self.rows

    def room(self, key_rows: int) -> int:
        """Bytes of shared memory that are left by keys and values and so many rows of their data, queries,
        the output and barriers."""
        kv_bytes = self.stages * self.block_kv * (self.head_dim + self.value_dim) * 2
        q_bytes = self.q_buffers * self.head_dim * 2
        rows_bytes = self.block_q * (q_bytes + self.out_pieces[0].size * 2)
        data_bytes = self.stages * key_rows * self.block_kv * 4
        barriers = 512  # up to 60
        return mosaic.SHARED_MEMORY_BYTES - kv_bytes - rows_bytes - data_bytes - barriers

    def with_queries_ahead(self, key_rows: int) -> "Config":
        """With two buffers of queries where there is room beside so many rows of keys' data, if need be with half of
        the output's buffer."""
        if self.q_in_registers:
            return self
        ahead = (
            dataclasses.replace(self, q_buffers=2, out_columns=columns)
            for columns in (self.out_columns, self.out_columns // 2)
            if self.value_dim % min(self.value_dim, columns) == 0
        )
        return next((config for config in ahead if config.room(key_rows) >= 0), self)

    def pair_stages(self, pair_bytes: int, key_rows: int) -> int:
        """How many blocks' data of pairs fit there."""
        return min(2, self.room(key_rows) // (self.block_q * self.block_kv * pair_bytes))

    @property
    def tile(self) -> tuple[int, int]:
        return self.block_q, self.block_kv

    @property
    def repeat_kv(self) -> int:
        """Keys that come together when a tile is repeated: they have the rows of the output's buffer."""
        return math.gcd(self.block_kv, self.rows)

    @property
    def out_pieces(self) -> list[Any]:
        """Columns of the output that leave together."""
        return self._pieces(self.value_dim)

    @property
    def key_pieces(self) -> list[Any]:
        """Columns of the keys that come together when a tile is repeated."""
        return self._pieces(self.head_dim)

    @property
    def value_parts(self) -> list[Any]:
        """Keys of a block whose values are multiplied at once."""
        return mosaic.slices(self.block_kv, self.values_at_once or self.block_kv)

    def _pieces(self, dim: int) -> list[Any]:
        return mosaic.slices(dim, min(self.value_dim, self.out_columns))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which query tiles a CTA takes, and which key blocks a tile visits."""

    problem: Problem
    config: Config

    @property
    def listed(self) -> int:
        """Keys of an entry in lists."""
        return self.config.block_kv // self.problem.parts

    @property
    def q_tiles(self) -> int:
        return -(-self.problem.q_len // self.config.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.problem.kv_len // self.config.block_kv)

    @property
    def _section(self) -> int:
        p = self.problem
        kv_bytes = 2 * p.kv_len * (self.config.head_dim + self.config.value_dim)
        return mosaic.section_of(p.kv_heads, kv_bytes, self.config.section_bytes) * p.group

    @property
    def order(self) -> mosaic.Order:
        p = self.problem
        return mosaic.Order(p.batch, p.q_heads, self.q_tiles, self._section, p.causal)

    def tiles(self, seen: Visits | None) -> Dealt | Claims:
        """Which each CTA takes."""
        p = self.problem
        if seen is not None:
            # Elsewhere the 24 registers of the loader hold no claims beside what it knows of a tile.
            if self.config.head_dim == 128 and not p.pairs():
                return seen.claim(p.batch, p.q_heads, self.config.ctas)
            return seen.deal(p.batch, p.q_heads, self._section, self.config.ctas)
        numbers = np.arange(self.order.count, dtype=np.int32)
        _, _, tile = self.order.place(numbers)
        # A tile's beginning and end cost about as much as a block.
        costs, ctas = self.blocks(tile)[0] + 1.0, min(self.config.ctas, self.order.count)
        return Dealt.of(numbers[:, None], costs, ctas)

    def blocks(self, q_tile: Any) -> tuple[Any, Any]:
        """How many key blocks a tile visits, and how many of them, the last ones, are cut."""
        p, c = self.problem, self.config
        whole = p.kv_len // c.block_kv
        if p.offset is None:
            return 0 * q_tile + self.kv_blocks, 0 * q_tile + (self.kv_blocks - whole)
        first_row = q_tile * c.block_q
        end = first_row + (c.block_q + p.offset + c.block_kv - 1)
        visited = mosaic.minimum(mosaic.div(end, c.block_kv), self.kv_blocks)
        full = mosaic.minimum(mosaic.div(first_row + (p.offset + 1), c.block_kv), whole)
        return visited, visited - full


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block of query rows of one head."""

    schedule: Schedule
    number: Any
    counts: Any = None  # under a mask

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Batch entry, head and block of rows."""
        return self.schedule.order.place(self.number)

    @property
    def kv_head(self) -> Any:
        return mosaic.div(self.place[1], self.schedule.problem.group)

    @property
    def first_row(self) -> Any:
        return self.place[2] * self.schedule.config.block_q

    @property
    def visited(self) -> Any:
        """How many blocks of keys it sees."""
        return self._blocks[0]

    @property
    def full(self) -> Any:
        """How many of them it sees all of."""
        return self.visited - self.cut

    @property
    def backwards(self) -> bool:
        """Whether it visits the last block of keys first, and so those that are cut.

        The first blocks give the references of the softmax, and score functions mostly favour near keys:
        after the farthest ones, `alibi` would have exponentials overflow.
        """
        return self.schedule.problem.score is not None

    @property
    def phases(self) -> list[tuple[bool, Any]]:
        """Whether blocks pass through the mask, and where those end that do or do not."""
        if self.backwards:
            return [(True, self.cut), (False, self.visited)]
        return [(False, self.full), (True, self.visited)]

    def is_cut(self, t: Any) -> Any:
        """Whether the t-th block visited passes through the mask."""
        return t < self.cut if self.backwards else t >= self.full

    def place_of(self, t: Any) -> Any:
        """Among the blocks of the tile, full ones before those that are cut, the t-th that it visits."""
        return self.visited - 1 - t if self.backwards else t

    @property
    def _blocks(self) -> tuple[Any, Any]:
        if self.counts is None:
            return self.schedule.blocks(self.place[2])
        return visits.decode(self.counts)

    @property
    def cut(self) -> Any:
        """How many pass through the mask: those of which it sees a part. Backwards, a full one follows
        them, where rows that have seen no key yet find their reference."""
        visited, cut = self._blocks
        return jnp.where(cut > 0, jnp.minimum(cut + 1, visited), 0) if self.backwards else cut

    @property
    def first_cut_after(self) -> Any:
        """Of the blocks visited after the first, the first that is cut; if none is, one of them or the first."""
        first = jnp.int32(1) if self.backwards else jnp.maximum(self.full, 1)
        return jnp.minimum(first, self.visited - 1)

    @property
    def bare(self) -> Any:
        """How many blocks come without data: full ones, unless scores read some."""
        return 0 if self.schedule.problem.reads_block(masked=False) else self.full

    def has_data(self, t: Any) -> Any:
        """Whether data come with the t-th block visited."""
        return t < self.visited - self.bare if self.backwards else t >= self.bare

    def data_before(self, t: Any) -> Any:
        """With how many of the blocks visited before, data have come."""
        return t if self.backwards else t - self.bare

    def next_steps(self, before: tuple[Any, Any]) -> tuple[Any, Any]:
        """With which the next tile begins: of the rings, and of those of data."""
        step, data = before
        if self.schedule.problem.reads_block():
            data = data + self.visited - self.bare
        return step + self.visited, data

    def shifted(self, zero: Any) -> "Tile":
        counts = None if self.counts is None else self.counts + zero
        return dataclasses.replace(self, number=self.number + zero, counts=counts)
