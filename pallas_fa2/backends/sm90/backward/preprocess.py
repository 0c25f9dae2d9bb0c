"""The pass before the backward: delta, zeros for dQ, and operands that are finite, as fast as memory is.

XLA takes 1.4 times as long (docs/decisions/0024-pre-and-postprocess.md).
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2 import arithmetic
from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.kernel_spec import KernelSpec
from pallas_fa2.backends.common.primitives import launch, layouts, register_io
from pallas_fa2.backends.common.primitives.layouts import ACC_LAYOUT
from pallas_fa2.backends.common.primitives.types import Barrier, Ref, Scalar
from pallas_fa2.backends.sm90.backward.config import DQ_TILE, BackwardConfig
from pallas_fa2.backends.sm90.backward.schedule import BackwardSchedule
from pallas_fa2.backends.sm90.nonfinite import ArrayToSanitize, SanitizePass, any_row_nonfinite
from pallas_fa2.backends.sm90.primitives import pipeline
from pallas_fa2.control_flow import cond, when


class BackwardOperands(NamedTuple):
    """The operands of the backward's products, arrays or each a `SanitizedArray`."""

    q: Any  # [B, T, N, H]
    k: Any  # [B, S, K, H]
    v: Any  # [B, S, K, Hv]
    dout: Any  # [B, T, N, Hv]


class _GuardInputs(NamedTuple):
    """Arrays in device memory that the pass reads only where tokens may take part in nothing."""

    q: Ref
    k: Ref
    v: Ref
    lse: Ref
    may_have_unattended: Ref  # int32 [B]: whether some token of an entry may take part in nothing


class _Inputs(NamedTuple):
    """Arrays in device memory that the pass reads."""

    out: Ref
    dout: Ref
    guard: _GuardInputs | None = None


class _Outputs(NamedTuple):
    """Arrays in device memory that the pass writes."""

    delta: Ref
    dq: Ref | None
    sanitized_rows: list[Ref]  # those of `SanitizePass`, of q and dout
    sanitized_keys: list[Ref]  # of k and v


class _SharedStorage(NamedTuple):
    """Shared memory and barriers of a CTA."""

    out: Ref
    dout: Ref  # or v
    arrived: Barrier
    operand: Ref | None = None  # q or k
    operand_arrived: Barrier | None = None


class _Cta(NamedTuple):
    """The arrays and the shared memory of a CTA."""

    inputs: _Inputs
    outputs: _Outputs
    memory: _SharedStorage


@dataclasses.dataclass(frozen=True)
class _Preprocess:
    """The kernel of the pass: a CTA for each query block, and with a guard one for each block of keys as well."""

    schedule: BackwardSchedule
    rows: SanitizePass  # of q and dout
    keys: SanitizePass  # of k and v
    with_zeros: bool

    @property
    def guards(self) -> bool:
        return self.schedule.spec.guards_nonfinite

    def run(self, cta: _Cta) -> None:
        index, num_q_blocks = lax.axis_index("cta"), self.schedule.num_q_blocks
        q_block = compute_q_block(self.schedule)
        if not self.guards:
            self.preprocess_rows(cta, q_block)
            return

        @when(index < num_q_blocks)
        def _() -> None:
            self.sanitize_rows(cta, q_block, self.preprocess_rows(cta, q_block))

        @when(index >= num_q_blocks)
        def _() -> None:
            self.sanitize_keys(cta, index - num_q_blocks)

    def preprocess_rows(self, cta: _Cta, q_block: Scalar) -> list[jax.Array]:
        """Store -delta of a query block, and zeros of its dQ. With a guard, return vectors of 64 rows: NaN where delta
        or lse is not finite, else 0."""
        (inputs, outputs, memory), schedule = cta, self.schedule
        batch, head, first = schedule.locate_q_block(q_block)
        for array, tile in ((inputs.out, memory.out), (inputs.dout, memory.dout)):
            self.rows.rows_of(array, q_block, tile).load(tile, memory.arrived, I32(0))
        if outputs.dq is not None:
            self.zero_dq(outputs.dq, q_block)
        plgpu.barrier_wait(memory.arrived.at[0])
        nonfiniteness = []
        for fragment in self.rows.fragments:
            delta = layouts.sum_rows(
                jnp.multiply, memory.out.at[fragment], memory.dout.at[fragment]
            )
            rows = batch, head, pl.ds(first + fragment.start, fragment.size)
            outputs.delta.at[rows][...] = -delta
            if inputs.guard is not None:
                lse = layouts.load_row(0, inputs.guard.lse.at[rows], jnp.float32)
                nonfiniteness.append((delta - delta) + (lse - lse))
        return nonfiniteness

    def zero_dq(self, dq: Ref, q_block: Scalar) -> None:
        """Store zeros to dQ of a query block: line 3 of Algorithm 2."""
        config = self.schedule.config
        for index in range(config.num_dq_tiles):
            tile = config.dq_tile(index)
            zeros = layouts.splat_constant(0.0, (DQ_TILE, tile.num_columns), ACC_LAYOUT)
            register_io.store_fragments(dq.at[q_block, config.dq_range(tile)], zeros)

    def sanitize_rows(self, cta: _Cta, q_block: Scalar, nonfiniteness: list[jax.Array]) -> None:
        """Sanitize q and dout of a query block where they may be needed, and record whether they are not finite."""
        (inputs, outputs, memory), rows = cta, self.rows
        assert inputs.guard is not None and memory.operand_arrived is not None
        q, tile, arrived = inputs.guard.q, memory.operand, memory.operand_arrived
        buffers = tile, memory.dout

        def search() -> jax.Array:
            rows.rows_of(q, q_block, tile).load(tile, arrived, I32(0))
            plgpu.barrier_wait(arrived.at[0])
            in_buffers = rows.find(buffers)
            nonfinite = any_row_nonfinite(in_buffers)
            when(nonfinite != 0)(
                lambda: rows.write(outputs.sanitized_rows, q_block, buffers, in_buffers)
            )
            return nonfinite

        batch, _, _ = self.schedule.locate_q_block(q_block)
        needed = inputs.guard.may_have_unattended[batch] != 0
        if self.schedule.spec.score is None:
            needed &= any_row_nonfinite(nonfiniteness) != 0
        nonfinite = cond(needed, search, lambda: I32(0))
        rows.record(outputs.sanitized_rows, q_block, nonfinite)

    def sanitize_keys(self, cta: _Cta, kv_block: Scalar) -> None:
        """Sanitize k and v of a block of keys, and record whether k is not finite."""
        (inputs, outputs, memory), keys = cta, self.keys
        assert inputs.guard is not None
        arrays, buffers = (inputs.guard.k, inputs.guard.v), (memory.operand, memory.dout)
        batch, _, _ = arithmetic.unravel(kv_block, keys.grid)

        def search() -> None:
            keys.sanitize_with_first(
                arrays, outputs.sanitized_keys, kv_block, buffers, memory.operand_arrived
            )

        cond(
            inputs.guard.may_have_unattended[batch] != 0,
            search,
            lambda: keys.record(outputs.sanitized_keys, kv_block, I32(0)),
        )


def backward_preprocess(
    spec: KernelSpec,
    config: BackwardConfig,
    operands: BackwardOperands,
    out: jax.Array,
    lse: jax.Array,
    with_zeros: bool = True,
    may_have_unattended: jax.Array | None = None,
) -> tuple[BackwardOperands, jax.Array, jax.Array | None]:
    """Return the operands; -delta = -rowsum(dO ∘ O), float32 `[B, N, T']`, line 4; and zeros to which dQ is added.

    `out` is like dout; lse is `[B, N, T']`. T' is a multiple of `block_q`, and 0 stands there for rows that
    do not exist. If by the mask's code tokens may take part in nothing, `may_have_unattended`, int32 `[B]`, is 0 in
    entries whose data say that all take part.

    P and dS are 0 where a mask hides a pair, and multiply k, q and dout. Where tokens may take part in nothing,
    these become finite. Of a key that was not, v is NaN instead, and with it dS of a pair that is seen; of a
    row, lse or delta is, and q is read only where one of them is. (Under a score function, everywhere: lse
    may be finite although q is not.)
    """
    schedule, (q, k, v, dout) = BackwardSchedule(spec, config), operands
    head_dim, value_dim, guards = config.head_dim, config.value_dim, spec.guards_nonfinite
    sanitized_q, sanitized_dout = (
        ArrayToSanitize(q, head_dim, 0.0),
        ArrayToSanitize(dout, value_dim, 0.0),
    )
    sanitized_k, sanitized_v = (
        ArrayToSanitize(k, head_dim, 0.0),
        ArrayToSanitize(v, value_dim, math.nan),
    )
    rows = SanitizePass((sanitized_q, sanitized_dout), config.block_q)
    keys = SanitizePass((sanitized_k, sanitized_v), config.block_q, config.block_kv)
    kernel = _Preprocess(schedule, rows, keys, with_zeros)
    guard = _GuardInputs(q, k, v, lse, may_have_unattended) if guards else None
    delta_shape = spec.batch, spec.q_heads, schedule.q_blocks * config.block_q
    outputs = _Outputs(
        jax.ShapeDtypeStruct(delta_shape, jnp.float32),
        jax.ShapeDtypeStruct(schedule.dq_shape, jnp.float32) if with_zeros else None,
        rows.outputs if guards else [],
        keys.outputs if guards else [],
    )
    tile, dout_tile = (sanitized_dout.buffer(config.block_q) for _ in range(2))
    memory = _SharedStorage(tile, dout_tile, pipeline.barriers(1, 2))
    if guards:
        operand = sanitized_q.buffer(config.block_q)
        memory = memory._replace(operand=operand, operand_arrived=pipeline.barriers(1))
    outputs = _launch(kernel, _Inputs(out, dout, guard), outputs, memory)
    if guards:
        q, dout = rows.sanitized_arrays(outputs.sanitized_rows)
        k, v = keys.sanitized_arrays(outputs.sanitized_keys)
    return BackwardOperands(q, k, v, dout), outputs.delta, outputs.dq


def _launch(
    kernel: _Preprocess, inputs: _Inputs, outputs: _Outputs, memory: _SharedStorage
) -> _Outputs:
    """Return the outputs, given their shapes."""
    tree, (shapes, outputs_tree) = jax.tree.structure((inputs, outputs)), jax.tree.flatten(outputs)

    def run(refs: tuple[Ref, ...], memory: _SharedStorage) -> None:
        inputs, outputs = jax.tree.unflatten(tree, refs)
        kernel.run(_Cta(inputs, outputs, memory))

    num_kv_blocks = math.prod(kernel.keys.grid) if kernel.guards else 0
    grid = {"cta": kernel.schedule.num_q_blocks + num_kv_blocks}
    launched = launch.build_kernel("prepare_gradients", run, memory, shapes, grid, 1)
    return jax.tree.unflatten(outputs_tree, launched(*jax.tree.leaves(inputs)))


def compute_q_block(schedule: BackwardSchedule) -> Scalar:
    """Compute a CTA's query block, the last first: L2 holds what the kernel before has written last, and the one
    after begins with the first."""
    return schedule.num_q_blocks - 1 - lax.axis_index("cta")
