"""What a device does in the steps of a ring: which keys it sends on, and which blocks it computes."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa2.distributed.collectives import TOKENS, AxisName
from pallas_fa2.distributed.ring_schedule import BlockCall, Step, select_operands
from pallas_fa2.ir.arrays import AuxArrays
from pallas_fa2.ir.block_classes import EMPTY, block_classes_all_heads
from pallas_fa2.ir.call_spec import Operands
from pallas_fa2.ir.mesh import match_varying_axes


class Turn(NamedTuple):
    """A step and what is sent in it: equal for steps that one loop can run.

    Keys are sent `stride` devices on, to where the next step reads them (0 in the last step). In the backward the sums
    dK and dV of the steps before come from `arrival` devices before; it is None where there are none.
    """

    step: Step
    stride: int
    arrival: int | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Turn) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple:
        return self.step.calls, self.step.shift == 0, *self[1:]


def make_turns(steps: tuple[Step, ...]) -> list[Turn]:
    """Return each step with how far keys are sent in it, and from where the sums of the steps before come."""
    shifts = [step.shift for step in steps]
    strides = [b - a for a, b in itertools.pairwise(shifts)]
    # The first sums that travel are those of the first step with another device's keys.
    arrivals = [
        stride if before > 0 else None for before, stride in zip(shifts[:-1], strides, strict=True)
    ]
    rows = zip(steps, [*strides, 0], [None, *arrivals], strict=True) if steps else ()
    return [Turn(*row) for row in rows]


def repeat(turns: list[Turn], visit: Callable, carry: Any) -> Any:
    """Run `visit(turn, carry, shift)` for equal turns: one after another, by a loop if there are several."""
    if len(turns) == 1:
        return visit(turns[0], carry, turns[0].step.shift)
    shifts = jnp.asarray([turn.step.shift for turn in turns], jnp.int32)
    return lax.scan(lambda carry, x: (visit(turns[0], carry, x), None), carry, shifts)[0]


def send_first(sent: Any, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
    """Have what computes with a step's keys and values wait for all that is sent in it; return the three.

    A CTA of attention takes a whole SM, and so do those of a transfer, which wait for their peer. Started at the same
    time, a transfer that is first takes SMs from a kernel whose CTAs expect one each, which then takes twice as long;
    one that is second waits for the kernel, and its peer with it (docs/decisions/0079-ring-transfers.md).
    """
    return lax.optimization_barrier((sent, k, v))


def end_step(results: Any) -> Any:
    """Have what follows a step wait for all of these: what its kernels computed, and what was sent before.

    Without this XLA may send blocks early, of which a device then holds more than two.
    """
    return lax.optimization_barrier(results)


class Block(NamedTuple):
    """A `BlockCall` on this device: its first query and key among those that the device has, and its operands.

    `first_key` is its first key among those of all devices, and `condition` says whether it runs (None: it does).
    """

    call: BlockCall
    q_start: Any
    k_start: Any
    first_key: Any
    operands: Operands
    condition: jax.Array | None

    def queries(self, x: jax.Array, axis: int = TOKENS) -> jax.Array:
        return _slice(x, self.q_start, self.call.spec.q_len, axis)

    def keys(self, x: jax.Array, axis: int = TOKENS) -> jax.Array:
        return _slice(x, self.k_start, self.call.spec.kv_len, axis)

    def slice_qkv(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        return self.queries(q), self.keys(k), self.keys(v)

    def replace_queries(self, x: jax.Array, rows: jax.Array, axis: int = TOKENS) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, rows, self.q_start, axis % x.ndim)

    def replace_keys(self, x: jax.Array, rows: jax.Array, axis: int = TOKENS) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(x, rows, self.k_start, axis % x.ndim)

    def run(self, compute: Callable[[], Any], otherwise: Callable[[Any], Any], like: Any) -> Any:
        """Return `compute()`, or where the call does not run `otherwise` of its shapes; both vary over mesh axes as
        `like`."""
        if self.condition is None:
            return compute()
        shapes = jax.eval_shape(compute)
        return lax.cond(
            self.condition,
            lambda: match_varying_axes(compute(), like),
            lambda: match_varying_axes(otherwise(shapes), like),
        )


def _slice(x: jax.Array, start: Any, size: int, axis: int) -> jax.Array:
    return x if size == x.shape[axis] else lax.dynamic_slice_in_dim(x, start, size, axis % x.ndim)


def blocks_of(
    axis_name: AxisName, step: Step, shift_by: Any, operands: Operands, kv_len: int
) -> Iterator[Block]:
    """Yield the blocks of a step on this device, which has the `kv_len` keys of the device `shift_by` before."""
    device, size = lax.axis_index(axis_name), lax.axis_size(axis_name)
    wrapped = device < shift_by
    source = (device - shift_by) % size

    def start(starts: tuple[int, int]) -> Any:
        return starts[0] if starts[0] == starts[1] else jnp.where(wrapped, starts[1], starts[0])

    for call in step.calls:
        q_start, k_start = start(call.q_start), start(call.k_start)
        first_key = source * kv_len + k_start
        spec = call.spec
        inputs = select_operands(
            operands,
            call.conjuncts,
            spec.has_explicit_positions,
            (q_start, spec.q_len),
            (first_key, spec.kv_len),
        )
        conditions = {"always": [], "wrapped": [wrapped], "unwrapped": [~wrapped]}[call.runs]
        conditions = [*conditions, *_has_pairs(call, inputs)]
        condition = None
        for x in conditions:
            condition = x if condition is None else condition & x
        yield Block(call, q_start, k_start, first_key, inputs, condition)


def _has_pairs(call: BlockCall, operands: Operands) -> list[jax.Array]:
    """Return one condition, whether the mask's data let some query of a block attend to some key, or none where data
    cannot tell."""
    nodes = jax.tree.leaves(operands.mask, is_leaf=lambda node: isinstance(node, AuxArrays))
    if call.spec.mask is None or any(node.pairwise for node in nodes):
        return []  # of pairwise arrays the kernels read each block, and no more than that
    classes = block_classes_all_heads(call.spec, operands, call.spec.q_len, call.spec.kv_len)
    return [classes[0, 0] != EMPTY] if isinstance(classes, jax.Array) else []
