"""What the Hopper kernels share: layouts, shared memory, rings of buffers, turns.

The kernels synchronize by mbarriers alone, through the classes below, so that JAX's interpreter can
run every one of them and look for races.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA  # a (64, n) accumulator over the 128 threads of a warpgroup
ROWS = TILE.reduce(1)  # one value a row
COLUMNS = TILE.reduce(0)  # one value a column

ROWS_PER_WARPGROUP = 64  # the M of every WGMMA instruction
SWIZZLE_BYTES = 128
SHARED_MEMORY_BYTES = 232_448  # of one CTA on sm_90
LOG2E = math.log2(math.e)

I32 = jnp.int32


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel must know of a call; one kernel is compiled for each.

    A query row sees the keys up to its own index + `offset`, or all of them if `offset` is None.
    Every row sees a key: rows and keys that take part in nothing are cut off before.
    `q_len` and `kv_len` are the true lengths, the arrays are padded to multiples of 8.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    scale: float
    offset: int | None

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def causal(self) -> bool:
        return self.offset is not None


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def operand(*shape: int, dtype: Any) -> Any:
    """Shared memory that TMA fills and WGMMA reads: 8 x 128-byte tiles, swizzled over 128 bytes."""
    columns = SWIZZLE_BYTES // jnp.dtype(dtype).itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def accumulator(rows: int, columns: int) -> Any:
    """Registers for a warpgroup's products, to allocate with `run_scoped`."""
    return plgpu.ACC((rows, columns), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]


def barriers(count: int, arrivals: int = 1) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def index(shape: tuple[int, int], axis: int, start: Any) -> jax.Array:
    """Row or column numbers of a tile, as a vector: a whole tile of them would hold 64 registers."""
    layout = ROWS if axis == 0 else COLUMNS
    return plgpu.broadcasted_iota(I32, (shape[axis],), 0, layout=layout) + start


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A value a row, broadcast over the columns of a tile."""
    return lax.broadcast_in_dim(x, shape, [0])


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


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
    first_full: int = 0  # where this ring's barriers begin in `full`

    @property
    def stages(self) -> int:
        return self.buffers[0].shape[0]

    def slot(self, step: Any) -> Any:
        return lax.rem(jnp.asarray(step, I32), I32(self.stages))

    def open(self) -> None:
        for s in range(self.stages):
            plgpu.barrier_arrive(self.free.at[s])

    def drain(self) -> None:
        for s in range(self.stages):
            plgpu.barrier_wait(self.free.at[s])

    def acquire(self, step: Any) -> tuple[Any, ...]:
        """The buffers of a step, once they may be written."""
        plgpu.barrier_wait(self.free.at[self.slot(step)])
        return self.at(step)

    def publish(self, step: Any) -> None:
        """What a warpgroup (not TMA) has written may be read."""
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.full.at[self.first_full + self.slot(step)])

    def fill(self, step: Any, *sources: Any) -> None:
        self.acquire(step)
        s = self.slot(step)
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[s], self.full.at[self.first_full + s])

    def at(self, step: Any) -> tuple[Any, ...]:
        s = self.slot(step)
        return tuple(buffer.at[s] for buffer in self.buffers)

    def wait(self, step: Any) -> tuple[Any, ...]:
        """The buffers of a step, once they have landed."""
        plgpu.barrier_wait(self.full.at[self.first_full + self.slot(step)])
        return self.at(step)

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(step)])


@dataclasses.dataclass(frozen=True)
class Turns:
    """Warpgroups take turns at the tensor cores: one multiplies while the others exponentiate.

    FlashAttention-3 (arXiv:2407.08608), section 3.1.
    """

    bar: Any  # one barrier a warpgroup
    me: Any
    count: int

    def open(self) -> None:
        """The last warpgroup opens the first one's turn."""
        jax.lax.cond(self.me == self.count - 1, self.give, lambda: None)

    def take(self) -> None:
        plgpu.barrier_wait(self.bar.at[self.me])

    def give(self) -> None:
        plgpu.barrier_arrive(self.bar.at[lax.rem(self.me + 1, I32(self.count))])

    def close(self) -> None:
        """The first warpgroup takes the turn that the last one has given."""
        jax.lax.cond(self.me == 0, self.take, lambda: None)


def meet(barrier: Any) -> None:
    """The warpgroups that share the barrier wait for each other."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def assign_roles(warpgroup: Any, *roles: Any) -> None:
    """Warpgroup i runs roles[i]; neighbours with the same role share its code.

    An if/else, not an if after another: a warpgroup's registers then hold nothing for the others.
    """
    shared = 1
    while shared < len(roles) and roles[shared] is roles[0]:
        shared += 1
    if shared == len(roles):
        return roles[0]()
    rest = functools.partial(assign_roles, warpgroup - shared, *roles[shared:])
    lax.cond(warpgroup < shared, roles[0], rest)


def leave_together(done: list[Any], branch: int) -> None:
    """The end of a kernel: a warpgroup must not exit while another still issues WGMMA.

    (An illegal instruction otherwise.) Each branch of the code waits on a barrier of its own: the
    phase of a shared one would hold a register through the loops of all of them.
    """
    for barrier in done:
        plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(done[branch])


@dataclasses.dataclass(frozen=True)
class Grid:
    """The order of CTAs over batch entries, heads and tiles: the last axis runs fastest.

    Full attention goes head by head. Causal attention goes tile by tile, the longest first, over a
    section of heads whose data share the L2: short tiles at the end fill the gaps that long ones
    leave. Three axes and no flat number, because a division holds registers through all of a kernel.
    """

    batch: int
    heads: int
    tiles: int
    section: int | None  # heads that run together; None for full attention

    names = ("slow", "middle", "fast")

    @property
    def shape(self) -> tuple[int, int, int]:
        if self.section is None:
            return self.batch, self.heads, self.tiles
        return self.batch * (self.heads // self.section), self.tiles, self.section

    def place(self) -> tuple[Any, Any, Any]:
        """(batch entry, head, tile) of this CTA; tile 0 is the first to run."""
        slow, middle, fast = (lax.axis_index(name) for name in self.names)
        if self.section is None:
            return slow, middle, fast
        sections = self.heads // self.section
        if sections == 1:
            return slow, fast, middle
        batch, section = lax.div(slow, I32(sections)), lax.rem(slow, I32(sections))
        return batch, section * self.section + fast, middle


def section_of(heads: int, bytes_per_head: int, budget: int) -> int:
    """The most heads, dividing their number, whose data fit into the L2 budget together."""
    fit = max(1, budget // max(bytes_per_head, 1))
    return max(d for d in range(1, heads + 1) if heads % d == 0 and d <= fit)


COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
