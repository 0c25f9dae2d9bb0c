"""FlashAttention-2, Algorithm 2, by mma.sync: a CTA for each block of keys of a head.

The products are transposed, S^T = K Q^T and dP^T = V dO^T, so that P^T and dS^T leave registers as left operands of dV and
dK. dS goes through shared memory once, for dQ, which is added up in float32 in device memory. Heads of a group have dK and
dV of their own, which are added up afterwards: with all heads in one CTA, Q and dO of more heads than L2 holds are in use at
a time (a call with gradients took 1.19 of the time, llama8b_8k).

Beyond H = 128 (`split_columns`) the warpgroups divide the columns of dK, dV and dQ, each forms the scores of half of the
queries, and P goes through shared memory as dS does.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.aux_grads import AuxGrads
from pallas_fa2.backends.common.aux_inputs import AuxInputs
from pallas_fa2.backends.common.block_mask import BlockMask, reversed_block_id, unpack_counts
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.key_mods import KeyInputs, KeyMods
from pallas_fa2.backends.common.mask_bits import load_bits
from pallas_fa2.backends.common.primitives import (
    launch,
    layouts,
    register_io,
    swizzle,
    thread_values,
)
from pallas_fa2.backends.sm80.backward.config import BackwardConfig
from pallas_fa2.backends.sm80.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm80.primitives import accumulate, async_copy, mma
from pallas_fa2.control_flow import cond, when
from pallas_fa2.ir.tile_functions import AxisInputs


class SharedStorage(NamedTuple):
    """Shared memory of a CTA."""

    k: Any  # [block_kv, H]
    v: Any  # [block_kv, Hv]
    q: Any  # [stages, block_q, H]
    dout: Any  # [stages, block_q, Hv]
    ds: Any  # [block_kv, block_q]
    lse: Any  # [stages, block_q]
    delta: Any  # [stages, block_q]
    p: Any  # [block_kv, block_q] where columns are divided


class Inputs(NamedTuple):
    """Arrays in device memory that are read."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any  # -lse in base 2, float32 [B, N, T'], -inf in rows that do not exist or see nothing
    delta: Any  # -delta
    block_mask: BlockMask | None  # of each block of keys, under a mask
    aux: AuxInputs | None  # what masks, scores and dropout read
    mask_bits: Any  # of a mask that is precomputed


class Outputs(NamedTuple):
    """Arrays in device memory that are written or added to."""

    dq: Any  # float32 [B, N, blocks of 64 queries, warpgroups, a warpgroup's tile], added to
    dk: Any  # like k, or of each head of a group float32 [B, N, blocks of 64 keys, shares of columns, a share's tile]
    dv: Any
    aux_grads: AuxGrads | None


def gradients(
    spec: KernelSpec,
    config: BackwardConfig,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    block_mask: BlockMask | None = None,
    aux: AuxInputs | None = None,
    mask_bits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, AuxGrads | None]:
    """Return dq, dk and dv, like q `[B, T, N, H]`, k `[B, S, K, H]` and v `[B, S, K, Hv]`, and gradients of aux inputs.

    `lse` and `delta` are float32 `[B, N, T']`, T' a multiple of 64, both negated: -lse in base 2, -inf where a row does not
    exist, so that its probabilities are 0; and -rowsum(dO O). Under a mask, `block_mask` lists the blocks of queries of every
    block of keys; `aux` is what masks, scores and dropout read, and `mask_bits` are those of a mask that is precomputed.
    """
    schedule = BackwardSchedule(spec, config)
    sums = jnp.zeros(
        tiles_shape(spec, schedule.q_blocks, config.head_dim, config.warpgroups), jnp.float32
    )
    dk, dv = lax.empty(k.shape, k.dtype), lax.empty(v.shape, v.dtype)
    if spec.group > 1:
        blocks = schedule.kv_tiles * (config.block_kv // 64)
        dk, dv = (
            lax.empty(tiles_shape(spec, blocks, dim, config.column_shares), jnp.float32)
            for dim in (config.head_dim, config.value_dim)
        )
    aux_grads = None
    if aux is not None:
        aux = aux.with_index_row(*config.tile)
        if spec.score is not None:
            lengths = schedule.q_blocks * config.block_q, schedule.kv_tiles * config.block_kv
            aux_grads = AuxGrads.zeros(spec, q.dtype, lengths, aux)
    block_mask = jax.tree.map(jnp.asarray, block_mask)
    inputs = Inputs(q, k, v, dout, lse, delta, block_mask, aux, mask_bits)
    outputs = Outputs(sums, dk, dv, aux_grads)
    read, read_tree = jax.tree.flatten(inputs)
    written, written_tree = jax.tree.flatten(outputs)

    def run(refs: tuple, memory: SharedStorage) -> None:
        inputs = jax.tree.unflatten(read_tree, refs[: len(read)])
        outputs = jax.tree.unflatten(written_tree, refs[len(read) :])
        KeyBlock.start(schedule, inputs, outputs, memory).differentiate()

    grid, memory = {"cta": schedule.raster_order.count}, shared_storage(config, q.dtype)
    kernel = launch.build_kernel("attention_gradients", run, memory, (), grid, config.warpgroups)

    @launch.isolate_from_fusion
    def add_up(read: list, written: tuple) -> tuple:
        return pl.run_state(lambda refs: kernel(*read, *refs))(written)

    outputs = jax.tree.unflatten(written_tree, add_up(read, tuple(written)))
    dq, dk, dv, aux_grads = outputs
    dq = convert_tiles(dq, q, spec.scale, config.vector_atomics)
    if spec.group > 1:
        dk = convert_tiles(dk, k, spec.scale, vectors=True)
        dv = convert_tiles(dv, v, spec.dropout_scale, vectors=True)
    return dq, dk, dv, aux_grads


def tiles_shape(spec: KernelSpec, blocks: int, dim: int, shares: int) -> tuple[int, ...]:
    """Return the shape of float32 tiles of all heads, `[B, N, blocks of 64 rows, shares of columns, a share's tile]`."""
    return spec.batch, spec.q_heads, blocks, shares, 64 * dim // shares


def shared_storage(config: BackwardConfig, dtype: Any) -> SharedStorage:
    operand = functools.partial(swizzle.swizzled_smem, dtype=dtype)
    split = config.split_columns
    k_panel = config.panel(config.head_dim, shared=True)  # for dQ
    q_panel, v_panel = (config.panel(dim, split) for dim in (config.head_dim, config.value_dim))
    tile = operand(config.block_kv, config.block_q, panel=config.score_columns)
    rows = plgpu.SMEM((config.stages, config.block_q), jnp.float32)
    return SharedStorage(
        k=operand(config.block_kv, config.head_dim, panel=k_panel),
        v=operand(config.block_kv, config.value_dim, panel=v_panel),
        q=operand(config.stages, config.block_q, config.head_dim, panel=q_panel),
        dout=operand(config.stages, config.block_q, config.value_dim, panel=v_panel),
        ds=tile,
        lse=rows,
        delta=rows,
        p=tile if split else None,
    )


@dataclasses.dataclass(frozen=True)
class KeyBlock:
    """A block of keys of one head, and the blocks of queries of its group that see it."""

    schedule: BackwardSchedule
    inputs: Inputs
    outputs: Outputs
    memory: SharedStorage
    coordinates: tuple[Any, Any, Any]  # batch entry, head and block of keys
    first_block: Any  # of queries that see a key, without a general mask
    num_steps: Any
    num_full: Any  # under a general mask: the first of them
    warpgroup: Any

    @classmethod
    def start(
        cls, schedule: BackwardSchedule, inputs: Inputs, outputs: Outputs, memory: SharedStorage
    ) -> "KeyBlock":
        coordinates = schedule.coordinates(lax.axis_index("cta"))
        batch, head, tile = coordinates
        warpgroup = lax.axis_index("warpgroup") if schedule.config.warpgroups > 1 else I32(0)
        first_block, num_full = I32(0), I32(0)
        if inputs.block_mask is None:
            first_block = schedule.first_q_block(tile)
            num_steps = schedule.q_blocks - first_block
        else:
            counts = layouts.index_broadcast(inputs.block_mask.num_blocks, batch, head)[tile]
            num_steps, num_partial = unpack_counts(counts)
            num_full = num_steps - num_partial
        counts = first_block, num_steps, num_full, warpgroup
        return cls(schedule, inputs, outputs, memory, coordinates, *counts)

    @property
    def batch(self) -> Any:
        return self.coordinates[0]

    @property
    def head(self) -> Any:
        return self.coordinates[1]

    @property
    def kv_head(self) -> Any:
        return arithmetic.div(self.head, self.spec.group)

    @property
    def first_key(self) -> Any:
        return self.coordinates[2] * self.config.block_kv

    @property
    def spec(self) -> KernelSpec:
        return self.schedule.spec

    @property
    def config(self) -> BackwardConfig:
        return self.schedule.config

    def differentiate(self) -> None:
        """Compute dK and dV of the block, and add to dQ: Algorithm 2, lines 6-21."""
        first = self.load_q_block(I32(0))
        self.load_keys()
        self.load_block(I32(0), first)
        k_fragments, v_fragments = self.load_fragments()
        split = self.config.split_columns
        dims = (self.config.head_dim, self.config.value_dim)
        columns = (self.config.share(dim, 0).size if split else dim for dim in dims)
        tiles = range(self.config.key_tiles)
        dk, dv = (
            [thread_values.zero_accumulator((64, n)) for _ in tiles] for n in columns
        )  # line 7
        body = functools.partial(self.step, k_fragments, v_fragments)
        _, dk, dv = lax.fori_loop(I32(0), self.num_steps, body, (first, dk, dv))
        self.store(dk, dv)  # line 20

    def step(self, k_fragments: list, v_fragments: list, t: Any, carry: tuple) -> tuple:
        """Add what the t-th block of queries that is visited, i, gives: Algorithm 2, lines 9-18."""
        i, dk, dv = carry
        next_i = self.load_q_block(t + 1)
        q, dout, lse, delta = self.buffers(t)
        self.wait_for_copies()  # the block is there, and everyone has read the one before
        if self.config.stages > 1:
            self.load_block(t + 1, next_i)
        for columns in self.score_columns:
            mods = [self.mods(i, rows, columns, masked=False) for rows in self.score_rows]
            s = self.multiply_keys(self.memory.k, q.at[columns], k_fragments)  # line 11
            column_lse = layouts.load_row(1, lse.at[columns], jnp.float32)
            exponents = [m.exponents(x, column_lse) for m, x in zip(mods, s, strict=True)]
            exponents = self.mask(exponents, t, i, columns)
            p = [
                m.apply_dropout(m.probabilities(x)) for m, x in zip(mods, exponents, strict=True)
            ]  # line 12
            dp = self.multiply_keys(self.memory.v, dout.at[columns], v_fragments)  # line 14
            column_delta = layouts.load_row(1, delta.at[columns], jnp.float32)
            tiles = zip(mods, p, s, dp, strict=True)
            ds = [
                m.ds(p_, s_, dp_, column_delta).astype(q.dtype) for m, p_, s_, dp_ in tiles
            ]  # line 15
            p = [m.undropped(x).astype(q.dtype) for m, x in zip(mods, p, strict=True)]
            self.store_tiles(self.memory.ds, columns, ds)
            if self.config.split_columns:
                self.store_tiles(self.memory.p, columns, p)
            else:
                dv = mma.multiply_rows(dv, list(map(mma.as_left, p)), dout.at[columns])  # line 13
                dk = mma.multiply_rows(dk, list(map(mma.as_left, ds)), q.at[columns])  # line 18
        if self.config.split_columns:
            async_copy.sync_cta(self.config.warpgroups)
            own_dout = dout.at[:, self.share(self.config.value_dim)]
            dv = self.multiply_shared(dv, self.memory.p, own_dout)  # line 13
            own_q = q.at[:, self.share(self.config.head_dim)]
            dk = self.multiply_shared(dk, self.memory.ds, own_q)  # line 18
        async_copy.sync_cta(self.config.warpgroups)  # dS is there; Q and dO have been read
        if self.config.stages == 1:
            self.load_block(t + 1, next_i)
        self.add_dq(i)  # line 17
        return next_i, dk, dv

    def multiply_keys(self, keys: Any, queries: Any, fragments: list) -> list[jax.Array]:
        """Return keys @ queries^T of each of the warpgroup's tiles of keys: S^T or dP^T."""
        tiles = self.score_rows
        accs = [thread_values.zero_accumulator((64, queries.shape[0])) for _ in tiles]
        for i, columns in enumerate(mma.panel_slices(keys)):
            lefts = fragments[i] if fragments else self.left_fragments(keys, columns)
            right = mma.load_right(queries.at[:, columns], transposed=True)
            accs = [plgpu.mma(acc, left, right) for acc, left in zip(accs, lefts, strict=True)]
        return accs

    def multiply_shared(self, accs: list[jax.Array], left: Any, right: Any) -> list[jax.Array]:
        """Return acc + left @ right of each tile of keys, both in shared memory."""
        for panel in mma.panel_slices(left):
            accs = mma.multiply_rows(accs, self.left_fragments(left, panel), right.at[panel])
        return accs

    def left_fragments(self, keys: Any, columns: Any) -> list[jax.Array]:
        return [mma.load_left(keys.at[rows, columns]) for rows in self.score_rows]

    def load_fragments(self) -> tuple[list, list]:
        """Load the fragments of K and V that are kept in registers, of each panel of columns and tile of keys."""
        kept = self.config.k_in_registers, self.config.v_in_registers
        if any(kept):
            self.wait_for_copies()
        k, v = (
            [self.left_fragments(keys, x) for x in mma.panel_slices(keys)] if is_kept else []
            for keys, is_kept in zip((self.memory.k, self.memory.v), kept, strict=True)
        )
        return k, v

    def store_tiles(self, buffer: Any, columns: Any, tiles: list[jax.Array]) -> None:
        for rows, tile in zip(self.score_rows, tiles, strict=True):
            buffer.at[rows, columns][...] = tile

    def add_dq(self, i: Any) -> None:
        """Add dQ_i = dS K, of the warpgroup's columns, to device memory."""
        columns = self.share(self.config.head_dim)
        dq = thread_values.zero_accumulator((self.config.block_q, columns.size))
        for start in range(0, self.config.block_kv, mma.K_STEP):
            rows = pl.ds(start, mma.K_STEP)
            left = mma.load_left(self.memory.ds.at[rows], transposed=True)
            dq = plgpu.mma(dq, left, mma.load_right(self.memory.k.at[rows, columns]))
        target = self.outputs.dq.at[self.batch, self.head, i, self.warpgroup]
        accumulate.add_tile(target, dq, self.config.vector_atomics)

    def mask(self, exponents: list[jax.Array], t: Any, i: Any, columns: Any) -> list[jax.Array]:
        """Set to -inf where a query does not see a key, if the step is partial.

        Keys past the end are zeros: what they add to dQ is 0, and their dK and dV are not stored.
        """
        if self.spec.mask is not None:
            is_partial = t >= self.num_full
        elif self.spec.causal:
            is_partial = i < self.schedule.first_full_q_block(self.coordinates[2])
        else:
            return exponents

        def mask() -> list[jax.Array]:
            masked = []
            for n, (rows, exponent) in enumerate(zip(self.score_rows, exponents, strict=True)):
                bits = self.load_mask_bits(i, n, columns)
                mods = self.mods(i, rows, columns, masked=True)
                masked.append(mods.apply_mask(exponent, bits))
            return masked

        return cond(is_partial, mask, lambda: exponents)

    def load_mask_bits(self, i: Any, n: int, columns: Any) -> list[jax.Array]:
        """Load the bits of the n-th tile of keys, those of the first of these columns as the highest ones."""
        if not self.spec.uses_mask_bits:
            return []
        first = 0 if self.config.split_columns else self.warpgroup * self.config.key_tiles
        place = self.batch, self.coordinates[2], i, first + n
        bits = load_bits(self.inputs.mask_bits, *place)
        return [word << (columns.start // 2) for word in bits]

    def mods(self, i: Any, rows: Any, columns: Any, masked: bool) -> KeyMods:
        """Load what scores and dropout, and the mask if `masked`, read of a tile of keys."""
        head, aux = (self.batch, self.head), self.inputs.aux
        first_key = self.first_key + rows.start
        first_query = i * self.config.block_q + columns.start
        inputs = KeyInputs(AxisInputs(0), {})
        if aux is not None:
            inputs = KeyInputs.load(self.spec, aux, head, first_key, masked)
        place = head, first_key, first_query
        ragged = self.spec.kv_len % self.config.block_kv != 0
        return KeyMods(self.spec, aux, self.outputs.aux_grads, *place, inputs, masked, ragged)

    @property
    def score_rows(self) -> list[Any]:
        """Return the tiles of keys, within the block, whose scores the warpgroup forms."""
        first = 0 if self.config.split_columns else self.warpgroup * (64 * self.config.key_tiles)
        return [pl.ds(first + 64 * n, 64) for n in range(self.config.key_tiles)]

    @property
    def score_columns(self) -> list[Any]:
        """Return the queries, within a block, whose scores the warpgroup forms, so many at once."""
        size = self.config.score_columns
        if self.config.split_columns:
            return [pl.ds(self.warpgroup * size, size)]
        return layouts.slices(self.config.block_q, size)

    def share(self, dim: int) -> Any:
        return self.config.share(dim, self.warpgroup)

    def load_q_block(self, t: Any) -> Any:
        """Return the block of queries that is visited as the t-th; of the one after the last, whatever follows there."""
        if self.inputs.block_mask is None:
            return self.first_block + t
        indices = self.inputs.block_mask.block_indices
        listed = layouts.index_broadcast(indices, *self.coordinates)
        index = listed[jnp.minimum(t, indices.shape[-1] - 1)]
        return reversed_block_id(index, self.schedule.q_blocks)

    def buffers(self, t: Any) -> tuple[Any, ...]:
        stage = arithmetic.rem(t, self.config.stages) if self.config.stages > 1 else 0
        m = self.memory
        return tuple(x.at[stage] for x in (m.q, m.dout, m.lse, m.delta))

    def load_block(self, t: Any, i: Any) -> None:
        """Begin to copy block i of queries, the t-th, if there is one, and make a group of the copies so far."""
        first, size = i * self.config.block_q, self.config.block_q
        limit = None if self.spec.q_len % size == 0 else self.spec.q_len - first

        def load() -> None:
            q, dout, lse, delta = self.buffers(t)
            for array, buffer in ((self.inputs.q, q), (self.inputs.dout, dout)):
                rows = array.at[self.batch, pl.ds(first, size), self.head]
                async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)
            for array, buffer in ((self.inputs.lse, lse), (self.inputs.delta, delta)):
                values = array.at[self.batch, self.head, pl.ds(first, size)]
                async_copy.load_vector(values, buffer)

        when(t < self.num_steps)(load)
        async_copy.commit_group()

    def load_keys(self) -> None:
        size = self.config.block_kv
        limit = None if self.spec.kv_len % size == 0 else self.spec.kv_len - self.first_key
        for array, buffer in ((self.inputs.k, self.memory.k), (self.inputs.v, self.memory.v)):
            rows = array.at[self.batch, pl.ds(self.first_key, size), self.kv_head]
            async_copy.load_rows(rows, buffer, self.config.warpgroups, limit)

    def wait_for_copies(self) -> None:
        async_copy.wait_groups(0)
        async_copy.sync_cta(self.config.warpgroups)

    def store(self, dk: list[jax.Array], dv: list[jax.Array]) -> None:
        """Store dK and dV: through the buffers of K and V, or of a head of a group as they lie in registers."""
        if self.spec.group > 1:
            for target, tiles in ((self.outputs.dk, dk), (self.outputs.dv, dv)):
                for n, tile in enumerate(tiles):
                    self.store_share(target, n, tile)
            return
        async_copy.sync_cta(self.config.warpgroups)  # everyone has read K and V
        limit = self.spec.kv_len - self.first_key
        rows = pl.ds(self.first_key, self.config.block_kv)
        stores = (
            (self.memory.k, dk, self.spec.scale, self.outputs.dk),
            (self.memory.v, dv, self.spec.dropout_scale, self.outputs.dv),
        )
        for buffer, tiles, scale, _ in stores:
            columns = pl.ds(0, buffer.shape[1])
            if self.config.split_columns:
                columns = self.share(buffer.shape[1])
            self.store_tiles(buffer, columns, [(x * scale).astype(buffer.dtype) for x in tiles])
        async_copy.sync_cta(self.config.warpgroups)
        for buffer, _, _, target in stores:
            target = target.at[self.batch, rows, self.kv_head]
            async_copy.store_rows(buffer, target, self.config.warpgroups, limit)

    def store_share(self, target: Any, n: int, tile: jax.Array) -> None:
        """Store the n-th tile of keys of a head of a group."""
        first, share = self.coordinates[2] * (self.config.block_kv // 64), self.warpgroup
        if not self.config.split_columns:
            first, share = first + self.warpgroup * self.config.key_tiles, 0
        register_io.store_fragments(target.at[self.batch, self.head, first + n, share], tile)


def convert_tiles(tiles: jax.Array, like: jax.Array, scale: float, vectors: bool) -> jax.Array:
    """Return dQ, dK or dV like q, k or v `[B, T, K, H]` from float32 tiles, `[B, N, blocks, shares, a share's tile]`, of which
    those of a group's heads are added up."""
    batch, length, heads, _ = like.shape
    _, q_heads, blocks, shares, size = tiles.shape
    columns, group = size // 64, q_heads // heads

    def run(refs: tuple, memory: list[Any]) -> None:
        (tiles, target), (buffer,) = refs, memory
        entry, head, block = arithmetic.unravel(lax.axis_index("cta"), (batch, heads, blocks))
        share = lax.axis_index("warpgroup") if shares > 1 else I32(0)
        each = (tiles.at[entry, head * group + i, block, share] for i in range(group))
        loaded = (accumulate.load_tile(x, columns, vectors) for x in each)
        total = functools.reduce(jnp.add, loaded) * scale
        buffer.at[:, pl.ds(share * columns, columns)][...] = total.astype(like.dtype)
        async_copy.sync_cta(shares)
        rows = target.at[entry, pl.ds(block * 64, 64), head]
        async_copy.store_rows(buffer, rows, shares, length - block * 64)

    panel = 64 if columns % 64 == 0 else 32
    memory = [swizzle.swizzled_smem(64, shares * columns, dtype=like.dtype, panel=panel)]
    out_type = jax.ShapeDtypeStruct(like.shape, like.dtype)
    kernel = launch.build_kernel(
        "convert", run, memory, out_type, {"cta": batch * heads * blocks}, shares
    )
    return kernel(tiles)
