"""What the Hopper kernels share: layouts, shared memory, rings of buffers, roles, the order of tiles.

Memory is ordered by mbarriers alone, through the functions below, so that JAX's interpreter can run
every kernel and look for races. What Pallas cannot say stands in `ptx`.
"""

import dataclasses
import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.kernels import tma
from pallas_fa2.kernels.module_name import fix_module_name

TILE = plgpu.Layout.WGMMA  # a (64, n) accumulator over the 128 threads of a warpgroup
ROWS = TILE.reduce(1)  # one value a row
COLUMNS = TILE.reduce(0)  # one value a column

ROWS_PER_WARPGROUP = 64  # the M of every WGMMA instruction
SHARED_MEMORY_BYTES = 232_448  # of one CTA on sm_90
REGISTERS = 512  # of a multiprocessor, for one thread of each warpgroup
LOG2E = math.log2(math.e)

I32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel must know of a call; one kernel is compiled for each.

    A query row sees the keys that `mask` lets it see, or those up to its own index + `offset`, or all of
    them if both are None. Without a mask every row sees a key: rows and keys that take part in nothing
    are cut off before. `q_len` and `kv_len` are the lengths of the arrays.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    scale: float
    offset: int | None
    mask: Any = None  # tile_code.TileMask
    asked: bool = False  # its answers are in memory (`answers`)
    # How many a block of keys has that are listed each for itself: see `visits.Visits`.
    parts: int = 1
    score: Any = None  # tile_code.TileScore
    dropout: Any = None  # tile_code.TileDropout
    first_query: int = 0  # the index of the first row

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        return self.offset is not None

    @property
    def plain(self) -> bool:
        """No mask but a causal one, and no score function."""
        return self.mask is None and self.score is None

    @property
    def tames(self) -> bool:
        """Whether tokens that take part in nothing may be among those that do: they may hold NaN (`tamed`)."""
        return self.mask is not None and not self.mask.all_take_part

    @property
    def kept_scale(self) -> float:
        """Of probabilities that dropout has left."""
        return 1.0 if self.dropout is None else self.dropout.scale

    @property
    def asks(self) -> bool:
        """Whether the kernel runs a mask's code."""
        return self.mask is not None and not self.asked

    def _functions(self, masked: bool) -> list[Any]:
        functions = [] if self.score is None else [self.score.value]
        return [*functions, self.mask.visible] if masked and self.asks else functions

    def rows(self, side: str, masked: bool) -> set[Any]:
        """What masks and scores read of q's or k's tokens, but for their index; and dropout of k's."""
        found = {source for f in self._functions(masked) for source in f.rows(side)}
        if side == "k" and self.dropout is not None and self.dropout.given:
            found.add(self.dropout.key)
        return found

    def pairs(self, masked: bool = True) -> list[Any]:
        """What they read of pairs of tokens."""
        found = {source for f in self._functions(masked) for source in f.pairs}
        return sorted(found, key=operator.attrgetter("place"))

    def numbers(self, masked: bool) -> set[Any]:
        """What they read of what a head's tokens share."""
        return {source for f in self._functions(masked) for source in f.numbers}

    def reads_index(self, side: str, masked: bool) -> bool:
        if side == "k" and self.dropout is not None and not self.dropout.given:
            return True
        return any(f.reads_index(side) for f in self._functions(masked))

    def reads_keys(self, masked: bool = True) -> bool:
        """Whether the forward reads data of keys: for a mask, mostly their index as well."""
        indexed = masked and self.asks and not self.mask.sees_a_range
        return indexed or bool(self.rows("k", masked))

    def reads_block(self, masked: bool = True) -> bool:
        """Whether the forward reads data that come with a block of keys."""
        return self.reads_keys(masked) or bool(self.pairs(masked))


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def div(a: Any, b: int) -> Any:
    """a // b for a >= 0: an int, a NumPy array or a traced scalar, where it is one instruction."""
    return lax.div(a, I32(b)) if isinstance(a, jax.Array) else a // b


def rem(a: Any, b: int) -> Any:
    return lax.rem(a, I32(b)) if isinstance(a, jax.Array) else a % b


def minimum(a: Any, b: int) -> Any:
    return jnp.minimum(a, b) if isinstance(a, jax.Array) else np.minimum(a, b)


def maximum(a: Any, b: int) -> Any:
    return jnp.maximum(a, b) if isinstance(a, jax.Array) else np.maximum(a, b)


def operand(*shape: int, dtype: Any, panel: int | None = None) -> Any:
    """Shared memory that TMA fills and WGMMA reads, in panels of so many columns: the operands of a product
    have the same. The widest if None."""
    width = panel or tma.panel_width(shape[-1], shape[-1], dtype)
    assert width is not None, shape
    return plgpu.SMEM(shape, dtype, transforms=tma.tiles(width, dtype))


def accumulator(rows: int, columns: int) -> Any:
    """Registers for a warpgroup's products, to allocate with `run_scoped`."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def barriers(count: int, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def index(shape: tuple[int, ...], axis: int, start: Any) -> jax.Array:
    """Row or column numbers of a tile, as a vector: a whole tile of them would hold 64 registers."""
    layout = ROWS if axis == 0 else COLUMNS
    return plgpu.broadcasted_iota(I32, (shape[axis],), 0, layout=layout) + start


def load_row(axis: int, row: Any, dtype: Any) -> jax.Array:
    """One number for each row of a tile, or for each column, from 32 bits each."""
    bits = plgpu.load(row, layout=(ROWS, COLUMNS)[axis], optimized=False)
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value a row, broadcast over the columns of a tile."""
    return over(x, 0, shape)


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return over(x, 1, shape)


def over(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [axis]), TILE)


def selectable(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An integer over these axes of a tile, in registers of its own where it is one number.

    Where a truth that varies selects one number, Mosaic (jax 0.11.2) takes the result for unsigned, as truths
    are: -5 would compare as a large number.
    """
    layouts = {(0,): ROWS, (1,): COLUMNS, (0, 1): TILE}
    return plgpu.layout_cast(x, layouts[axes]) if axes else x


def inline(name: str, code: Callable, result: Any, *arg_types: Any) -> Callable:
    """An operation that Mosaic's own code writes; the interpreter in the tests knows it by its name."""
    code.__name__ = name
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=result)(code)


def shared_at(array: Any, batch: Any, head: Any, *rest: Any) -> Any:
    """Of an array that all batch entries or heads share, or not."""
    return array.at[(batch if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0, *rest)]


def constant(value: float, shape: tuple[int, ...], layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory that one producer fills, by TMA or itself, and consumers read.

    Every slot starts free: consumers release each once before the loop (`open`), and the producer
    waits for the last releases after it (`drain`), so that no barrier is left half-way.
    """

    buffers: tuple[Any, ...]  # [stages, ...] each; filled and released together
    full: Any  # completed by TMA, one arrival a buffer, or by `publish`
    free: Any  # completed by the consumers
    first_full: Any = 0  # where this ring's barriers begin in `full`
    first_free: Any = 0

    @property
    def stages(self) -> int:
        return self.buffers[0].shape[0]

    def slot(self, step: Any) -> Any:
        return lax.rem(jnp.asarray(step, I32), I32(self.stages))

    def full_at(self, step: Any) -> Any:
        return self.full.at[self.first_full + self.slot(step)]

    def open(self) -> None:
        for s in range(self.stages):
            plgpu.barrier_arrive(self.free.at[self.first_free + s])

    def drain(self) -> None:
        for s in range(self.stages):
            plgpu.barrier_wait(self.free.at[self.first_free + s])

    def acquire(self, step: Any) -> tuple[Any, ...]:
        """The buffers of a step, once they may be written."""
        plgpu.barrier_wait(self.free.at[self.first_free + self.slot(step)])
        return self.at(step)

    def publish(self, step: Any) -> None:
        """What a warpgroup (not TMA) has written may be read."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full_at(step))

    def fill(self, step: Any, *sources: Any) -> None:
        self.acquire(step)
        s = self.slot(step)
        for source, buffer in zip(sources, self.buffers, strict=True):
            full = self.first_full + s
            if isinstance(source, tma.Rows | tma.Together):
                source.load(buffer.at[s], self.full, full)
            else:
                plgpu.copy_gmem_to_smem(source, buffer.at[s], self.full.at[full])

    def at(self, step: Any) -> tuple[Any, ...]:
        # LLVM would keep descriptors of the one slot in registers, through all loops.
        s = self.slot(step) if self.stages > 1 else lax.optimization_barrier(I32(0))
        return tuple(buffer.at[s] for buffer in self.buffers)

    def wait(self, step: Any) -> tuple[Any, ...]:
        """The buffers of a step, once they have landed."""
        plgpu.barrier_wait(self.full_at(step))
        return self.at(step)

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.first_free + self.slot(step)])


def set_registers(shares: Sequence[int], me: int) -> None:
    """Of a thread in warpgroup `me`. They share what they begin with; one that asked for more would
    wait forever."""
    equal = REGISTERS // len(shares) // 8 * 8
    assert sum(shares) <= equal * len(shares), shares
    plgpu.set_max_registers(shares[me], action="increase" if shares[me] > equal else "decrease")


def meet(barrier: Any) -> None:
    """The warpgroups that share the barrier wait for each other."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def assign_roles(warpgroup: Any, *roles: Callable[[], None]) -> None:
    """Warpgroup i runs roles[i]; neighbours with the same role share its code.

    One switch, not an if after another: a warpgroup's registers then hold nothing for the others. The
    last role, which only loads, is the first branch, as Pallas lowers that twice (see `branches`).
    """
    *others, last = (i for i, role in enumerate(roles) if i == 0 or role is not roles[i - 1])
    if not others:
        return roles[last]()
    branch = I32(1)
    for first in others[1:]:
        branch += jnp.where(warpgroup >= first, I32(1), I32(0))
    branch = jnp.where(warpgroup >= last, I32(0), branch)
    lax.switch(branch, [roles[last], *(roles[i] for i in others)])


def leave_together(done: list[Any], branch: int) -> None:
    """The end of a kernel: a warpgroup must not exit while another still issues WGMMA.

    (An illegal instruction otherwise.) Each branch of the code waits on a barrier of its own: the
    phase of a shared one would hold a register through the loops of all of them.
    """
    # Addresses are computed here: they would hold registers too.
    own = [barrier.at[lax.optimization_barrier(I32(0))] for barrier in done]
    for barrier in own:
        plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(own[branch])


@dataclasses.dataclass(frozen=True)
class Order:
    """The order in which persistent CTAs take tiles, as a number for each (batch, head, tile).

    Full attention goes head by head. Causal attention goes tile by tile, the longest first, over a
    section of heads whose data share the L2: short tiles at the end fill the gaps that long ones
    leave.
    """

    batch: int
    heads: int
    tiles: int
    section: int  # heads that run together, a divisor of their number
    longest_first: bool  # whether the last tile of a head is the longest

    @property
    def count(self) -> int:
        return self.batch * self.heads * self.tiles

    def place(self, number: Any) -> tuple[Any, Any, Any]:
        """(batch entry, head, tile) of a number: an int, a NumPy array or a traced scalar."""
        if not self.longest_first:
            head, tile = div(number, self.tiles), rem(number, self.tiles)
        else:
            per_section = self.section * self.tiles
            section, rest = div(number, per_section), rem(number, per_section)
            tile = self.tiles - 1 - div(rest, self.section)
            head = section * self.section + rem(rest, self.section)
        return div(head, self.heads), rem(head, self.heads), tile


def slices(length: int, size: int) -> list[Any]:
    """So many at a time."""
    return [pl.ds(start, size) for start in range(0, length, size)]


def columns_of(tile: jax.Array, columns: Any) -> jax.Array:
    return tile[:, columns.start : columns.start + columns.size]


def by_eights(combine: Callable, tile: jax.Array) -> jax.Array:
    """A tile's groups of eight columns combined: `[64, 8]`, of which each thread holds two columns.

    No thread needs another's values for it, unlike a reduction to one value a row.
    """
    parts = [tile[:, i : i + 8] for i in range(0, tile.shape[1], 8)]
    return functools.reduce(combine, parts)


def sum_rows(term: Callable, *tiles: Any) -> jax.Array:
    """Of 64 rows in shared memory, sums of term(*elements) in float32."""

    def of_panel(*panels: Any) -> jax.Array:
        loaded = (plgpu.load(x, layout=TILE).astype(jnp.float32) for x in panels)
        return by_eights(jnp.add, term(*loaded))

    total = functools.reduce(jnp.add, map(of_panel, *map(tma.panels, tiles)))
    return plgpu.layout_cast(jnp.sum(total, 1), ROWS)


def unravel(number: Any, shape: tuple[int, ...]) -> list[Any]:
    """Of the element with this number in an array of this shape, the place on each axis."""
    place = []
    for size in reversed(shape):
        number, at = div(number, size), rem(number, size)
        place.append(at)
    return place[::-1]


def section_of(heads: int, bytes_per_head: int, budget: int) -> int:
    """The most heads, dividing their number, whose data fit into the L2 budget together."""
    fit = max(1, budget // max(bytes_per_head, 1))
    return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= fit)


def apart(kernel: Callable) -> Callable:
    """The kernel, on arrays that have memory of their own.

    XLA would fuse it with slices around it, as in a scan, and has it read and write in the middle of
    larger arrays. Mosaic wants arrays aligned to 256 bytes, and what a kernel adds to (`pl.run_state`) is
    no longer what it was before.
    """
    barrier = lax.optimization_barrier
    return lambda *arrays: barrier(kernel(*barrier(arrays)))


def launch(
    name: str,
    run: Callable,
    memory: Any,
    out_type: Any,
    grid: dict[str, int],
    warpgroups: int,
    cluster: Mapping[str, int] = types.MappingProxyType({}),
) -> Callable[..., Any]:
    """A kernel: run(arrays in device memory, memory) in every warpgroup of every CTA. Without
    `out_type` it writes to references, and what makes these is to be `apart`.

    Profiles show its name. `memory` is a pytree of what a CTA allocates; `grid` counts clusters.
    """
    flat, tree = jax.tree.flatten(memory)

    def body(*refs: Any) -> None:
        fix_module_name()
        arrays = len(refs) - len(flat)
        run(refs[:arrays], jax.tree.unflatten(tree, refs[arrays:]))

    body.__name__ = name
    params = plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        # The kernels name their layouts. Pallas's default infers them, for longer than all else takes.
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=flat,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=params,
    )
    writes_references = not jax.tree.leaves(out_type)
    return kernel if writes_references else apart(kernel)
