"""dQ whose first tile is stored and whose others are added: no kernel writes zeros before.

Where few tiles visit a row of dQ (a query block), as under a short window, writing zeros takes as long as dQ does
(docs/decisions/0029-dq-first-store.md). For each step a CTA takes a ticket of its row. The holder of a row's first
ticket stores, and signals when it is done; the others add, and wait for the first one if need be. There is no deadlock:
each CTA takes tickets in the order of its steps, so the holder of the earliest first ticket that anyone waits for waits
for nobody.

A ticket comes from device memory, which takes most of a step. So it is taken when a step begins, shared with the other
warpgroup when dS of the step is, and resolved with its dQ, in the next step.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from pallas_fa2.arithmetic import I32
from pallas_fa2.backends.common.inline import asm, inline_op
from pallas_fa2.backends.common.primitives import register_io, thread_values
from pallas_fa2.backends.common.primitives.types import MlirValue, Ref, Registers, Scalar, Scratch
from pallas_fa2.backends.sm90.backward.cta import Cta, WarpgroupIndex
from pallas_fa2.backends.sm90.backward.dq.strategy import DqConsumer, DqRequest, DqStrategy
from pallas_fa2.backends.sm90.backward.kv_tile import Step
from pallas_fa2.backends.sm90.backward.postprocess import convert_dq
from pallas_fa2.backends.sm90.nonfinite import SanitizedArray
from pallas_fa2.ir.block_classes import EMPTY

# The word of a row counts its tickets below this bit, and from it on the warps that have stored their share.
STORED_BIT = 16
ALL_STORED = 8 << STORED_BIT
# Steps whose tickets are kept: one warpgroup takes the next when the other has yet to use the last one.
SLOTS = 4
# How many tiles may visit a row, on average: the holder of the first ticket waits until all can see what it has stored,
# for half a step. Where classes depend on data, visits that are possible overstate those that happen, so one more is
# allowed; not at H = 64, where that takes 1.006 of the time.
MAX_VISITS, MAX_POSSIBLE_VISITS = 4, 5


class FirstStoreDq(DqStrategy):
    """The strategy in which the holder of a row's first ticket stores, and the others add in any order."""

    summary = "float32 dQ, stored by the first tile of a row, then atomic additions in any order"
    needs_zeros = False

    @classmethod
    def suits(cls, request: DqRequest) -> bool:
        """Return whether few tiles visit each row: by their classes, or if only the device knows these, by which are
        possible."""
        spec, config, classes = request.spec, request.config, request.classes
        unsupported = config.two_cta or config.deterministic or spec.mask is None
        if unsupported or spec.pairwise_inputs():
            return False
        if config.first_store is not None:
            return config.first_store
        known = isinstance(classes, np.ndarray)
        if not known:
            assert request.possible_classes is not None
            classes = request.possible_classes()
        visits = np.sum(classes != EMPTY, -1).mean()
        exact = known or config.head_dim == 64
        return bool(visits <= (MAX_VISITS if exact else MAX_POSSIBLE_VISITS))

    @property
    def smem(self) -> Scratch:
        return plgpu.SMEM((SLOTS,), jnp.int32)

    def consumer(self, cta: Cta, warpgroup: WarpgroupIndex) -> DqConsumer:
        return FirstStoreConsumer(cta, warpgroup)

    def allocate(
        self, q: jax.Array | SanitizedArray, zeros: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return dQ, and the word of each row."""
        shape = self.schedule.dq_shape
        return lax.empty(shape, jnp.float32), jnp.zeros(shape[:1], I32)

    def finish(
        self, dq: jax.Array, workspace: jax.Array | None, q: jax.Array | SanitizedArray
    ) -> jax.Array:
        return convert_dq(self.schedule, dq, q, visits=workspace)


class FirstStoreConsumer(DqConsumer):
    """A consumer that stores or adds its tiles of dQ by tickets, which the first warpgroup takes for both."""

    @property
    def tickets(self) -> "DqTickets":
        return DqTickets(self.cta.outputs.dq_workspace, self.cta.memory.dq)

    def init(self) -> None:
        if self.warpgroup == 0:
            self.tickets.init()

    def begin(self, step: Step) -> jax.Array | None:
        return self.tickets.take(step.dq_block) if self.warpgroup == 0 else None

    def publish(self, t: Scalar, begun: jax.Array | None) -> None:
        if begun is not None:
            self.tickets.share(t, begun)

    def add(self, t: Scalar, destination: Scalar, dq: Callable[[], jax.Array]) -> None:
        value, tile = dq(), self.compute_tile()
        is_first = self.tickets.resolve(t, destination)
        register_io.put_fragments(self.compute_target(destination, tile), value, is_first)
        self.tickets.signal(destination, is_first)


class DqTickets(NamedTuple):
    """The tickets of a CTA's steps."""

    words: Ref  # int32 [query blocks + 1], zeros at first
    slots: Ref  # int32 [SLOTS], in shared memory

    def init(self) -> None:
        """Share a ticket for the step before the first one, whose dQ is added to nothing. By the first warpgroup."""
        self.share(I32(-1), I32(ALL_STORED))

    def take(self, row: Scalar) -> jax.Array:
        """Return the next ticket of a row, 0 if it is the first. By the first warpgroup."""
        return _take(self.words.at[row])

    def share(self, t: Scalar, ticket: Scalar) -> None:
        """Store the ticket of step t. By the first warpgroup, before it arrives with its dS of the step."""
        _share(self._slot(t), ticket)

    def resolve(self, t: Scalar, row: Scalar) -> jax.Array:
        """Return 1 if step t has its row's first ticket; else 0, once the holder of that one has stored."""
        return _resolve(self.words.at[row], self._slot(t))

    def signal(self, row: Scalar, is_first: jax.Array) -> None:
        """Tell the others that this warpgroup has stored, if its ticket was the first."""
        _signal(self.words.at[row], is_first)

    def _slot(self, t: Scalar) -> Ref:
        return self.slots.at[t + I32(SLOTS) & I32(SLOTS - 1)]


_REF, _SCALAR = plgpu.RefType(), plgpu.Layout.WG_SPLAT


@inline_op("take_dq_ticket", _REF, result=thread_values.SCALAR_I32)
def _take(_, word: Ref) -> Registers:
    """Emit the addition of 1 by one thread, which need not wait for what it returns."""
    thread = thread_values.warpgroup_thread_index()
    code = "setp.eq.s32 p, $1, 0; @p atom.relaxed.gpu.global.add.s32 $0, [$2], 1;"
    return thread_values.splat(_word(code, "r,l", thread, thread_values.address(word)))


@inline_op("share_dq_ticket", _REF, _SCALAR)
def _share(_, slot: Ref, ticket: Registers) -> None:
    thread_values.elect_one(
        "@p st.shared.b32 [$1], $2;", thread_values.address(slot, 32), ticket.registers[()]
    )


@inline_op("resolve_dq_ticket", _REF, _REF, result=thread_values.SCALAR_I32)
def _resolve(_, word: Ref, slot: Ref) -> Registers:
    """Emit a loop that reads the word until all warps of the first ticket have stored.

    What is stored is in L2 when its count is, and what is added after that goes there: the count need not be acquired,
    for which L1 would be emptied at every step.
    """
    code = (
        ".reg .b32 v; ld.shared.b32 v, [$2]; setp.eq.s32 p, v, 0; selp.b32 $0, 1, 0, p; @p bra done; "
        f"poll: setp.ge.s32 p, v, {ALL_STORED}; @p bra done; "
        "ld.relaxed.gpu.global.b32 v, [$1]; bra poll; done:"
    )
    return thread_values.splat(
        _word(code, "l,r", thread_values.address(word), thread_values.address(slot, 32))
    )


@inline_op("signal_dq_stored", _REF, _SCALAR)
def _signal(_, word: Ref, is_first: Registers) -> None:
    thread_values.warp_release_add(word, 1 << STORED_BIT, is_first.registers[()])


def _word(code: str, constraints: str, *operands: MlirValue) -> MlirValue:
    """Emit code with a predicate p, and return $0."""
    word, code = ir.IntegerType.get_signless(32), f"{{ .reg .pred p; {code} }}"
    return asm(code, f"=&r,{constraints}", *operands, result=word)
