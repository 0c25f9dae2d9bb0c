"""What each device computes in each step of ring attention, planned when a call is traced.

In step s device i has the keys of device i - s, around the ring of n devices: those of a device before it in the
sequence if i >= s, otherwise, where the step wraps around, those of one behind it. So there are two kinds of devices in
each step, and the distance between queries and keys is the same on all devices of a kind (contiguous layout), or has
bounds (zigzag). By these, a mask that reads differences of positions is decided here for many blocks, so that kernels
do not evaluate it: a causal mask is FULL behind and EMPTY ahead, a window is EMPTY beyond its reach.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from pallas_fa2.distributed.zigzag import Layout, chunk_starts
from pallas_fa2.ir.affine import causal_offset
from pallas_fa2.ir.block_classes import EMPTY, FULL, PARTIAL
from pallas_fa2.ir.call_spec import CallSpec, Operands, accumulator_dtype
from pallas_fa2.ir.trace import TracedFn
from pallas_fa2.ir.translation import (
    classes_at_distances,
    is_translation_invariant,
    reads_positions,
)
from pallas_fa2.masks import Mask
from pallas_fa2.masks.base import And
from pallas_fa2.parse_call import CheckedCall
from pallas_fa2.planning.plan import Plan
from pallas_fa2.trace_mods import trace_mod

Runs = Literal["always", "unwrapped", "wrapped"]
UNWRAPPED, WRAPPED = 0, 1  # the kinds of devices in a step


class BlockCall(NamedTuple):
    """One call of a backend in a step: of some of a device's queries, on some of the keys that it has.

    `conjuncts` numbers the parts of the mask that are evaluated. `q_start` and `k_start` are the first query and the
    first key, where the step does not wrap around and where it does; `runs` says on which devices it runs.
    """

    spec: CallSpec
    plan: Plan
    conjuncts: tuple[int, ...]
    q_start: tuple[int, int]
    k_start: tuple[int, int]
    runs: Runs


class Step(NamedTuple):
    """The calls of a step, on keys that come from the device that is `shift` before."""

    shift: int
    calls: tuple[BlockCall, ...]


class _Block(NamedTuple):
    """What devices of one kind compute: a block of queries and keys, and how its code gets positions.

    `positions` is None where no code reads any, the position of the first query where the first key has 0, or "data".
    """

    q_start: int
    k_start: int
    q_len: int
    kv_len: int
    conjuncts: tuple[int, ...]
    positions: int | Literal["data"] | None

    @property
    def program(self) -> tuple:
        """What is equal for blocks that one call can compute."""
        return self[2:]


def split_conjuncts(mask: Mask | None, data: Any) -> tuple[tuple[Mask, ...], tuple]:
    """Return the masks that `&` joins, and the data of each."""
    if mask is None:
        return (), ()
    if not isinstance(mask, And):
        return (mask,), (data,)
    left, right = (split_conjuncts(*x) for x in zip((mask.left, mask.right), data, strict=True))
    return left[0] + right[0], left[1] + right[1]


def select_operands(
    operands: Operands,
    conjuncts: tuple[int, ...],
    explicit_positions: bool,
    queries: tuple[Any, int],
    keys: tuple[Any, int],
) -> Operands:
    """Return what a block reads: some conjuncts' data of queries and keys, each given by its start and length."""
    data = [operands.mask[c] for c in conjuncts]
    mask = functools.reduce(lambda a, b: (a, b), data) if data else None
    operands = operands._replace(mask=mask)
    if not explicit_positions:
        operands = operands._replace(q_index=None, k_index=None)
    return operands.slice_tile(*queries, *keys)


@dataclasses.dataclass(frozen=True)
class RingSchedule:
    """Plans the steps of a call whose arrays are those of one of several devices.

    `operands` are what masks and scores read of the queries of one device and the keys of all; the data of the mask are
    a tuple with those of each conjunct.
    """

    call: CheckedCall
    operands: Operands
    shards: int
    layout: Layout
    has_default_positions: bool  # those of the layout, not the user's
    plan: Callable[[CallSpec], Plan]

    def steps(self) -> tuple[Step, ...]:
        """Return the steps in which some device computes something."""
        steps = (Step(shift, tuple(self._calls(shift))) for shift in range(self.shards))
        return tuple(step for step in steps if step.calls)

    @property
    def chunks(self) -> int:
        """How many chunks of contiguous tokens a device has."""
        return 2 if self.layout == "zigzag" else 1

    @functools.cached_property
    def conjuncts(self) -> tuple[Mask, ...]:
        return split_conjuncts(self.call.mask, self.call.operands.mask)[0]

    @functools.cached_property
    def mask_codes(self) -> tuple[TracedFn, ...]:
        pairs = zip(self.conjuncts, self.operands.mask, strict=True)
        return tuple(trace_mod(mask, data, self.call.dims, 0) for mask, data in pairs)

    @functools.cached_property
    def score_codes(self) -> tuple[TracedFn, ...]:
        pairs = zip(self.call.scores, self.operands.scores, strict=True)
        dtype = accumulator_dtype(self.call.dtype)
        return tuple(trace_mod(score, data, self.call.dims, 0, dtype) for score, data in pairs)

    @functools.cached_property
    def scores_read_positions(self) -> bool:
        """Whether scores, or the random bits of dropout, depend on positions."""
        return bool(self.call.dropout_rate) or any(map(reads_positions, self.score_codes))

    @functools.cached_property
    def distances(self) -> tuple[np.ndarray, np.ndarray]:
        """The bounds of the distance from a block's first key to its first query: `[shift, kind, q chunk, k chunk]`."""
        dims, n = self.call.dims, self.shards
        queries = chunk_starts(self.layout, dims.q_len, n) + int(self.call.first_position)
        keys = chunk_starts(self.layout, dims.kv_len, n)
        between = queries[:, None, :, None] - keys[None, :, None, :]
        shape = n, 2, self.chunks, self.chunks
        lowest, highest = np.full(shape, 2**31 - 1), np.full(shape, -(2**31))
        for shift in range(n):
            for device in range(n):
                at = shift, WRAPPED if device < shift else UNWRAPPED
                distance = between[device, (device - shift) % n]
                lowest[at] = np.minimum(lowest[at], distance)
                highest[at] = np.maximum(highest[at], distance)
        lowest[0, WRAPPED] = highest[0, WRAPPED] = 0  # there is no such device
        return lowest, highest

    @functools.cached_property
    def classes(self) -> np.ndarray:
        """The class of each block under each conjunct alone: `[conjunct, shift, kind, q chunk, k chunk]`."""
        dims, chunks = self.call.dims, self.chunks
        unknown = np.full((self.shards, 2, chunks, chunks), PARTIAL)

        def classify(code: TracedFn) -> np.ndarray:
            if not (self.has_default_positions and reads_positions(code)):
                return unknown
            if not is_translation_invariant(code):
                return unknown
            return classes_at_distances(
                code, *self.distances, dims.q_len // chunks, dims.kv_len // chunks
            )

        # there may be no conjunct, and `np.stack` needs an array
        return np.stack([unknown, *map(classify, self.mask_codes)])[1:]

    def _calls(self, shift: int) -> list[BlockCall]:
        """Return the calls of a step.

        Where both kinds of devices have a block of the same program, one call computes both.
        """
        blocks, wrapped = self._blocks(shift, UNWRAPPED), self._blocks(shift, WRAPPED)
        if shift == 0:
            return [self._call(block, block, "always") for block in blocks]
        calls = []
        for block in blocks:
            match = next((other for other in wrapped if other.program == block.program), None)
            if match is not None:
                wrapped.remove(match)
            calls.append(self._call(block, match or block, "always" if match else "unwrapped"))
        return calls + [self._call(block, block, "wrapped") for block in wrapped]

    def _blocks(self, shift: int, kind: int) -> list[_Block]:
        """Return the blocks that one kind of devices computes in a step.

        They are of a chunk of queries and a chunk of keys each, or one is of all tokens: where positions are data, and
        where all chunks run the same code, which needs no positions or the order of the tokens alone.
        """
        dims, chunks, classes = self.call.dims, self.chunks, self.classes[:, shift, kind]
        visible = np.argwhere(np.all(classes != EMPTY, 0)).tolist()
        if not visible:
            return []
        evaluated = tuple(c for c, table in enumerate(classes) if not np.all(table == FULL))

        def block_of_all(positions: int | Literal["data"] | None) -> list[_Block]:
            return [_Block(0, 0, dims.q_len, dims.kv_len, evaluated, positions)]

        if chunks > 1 and shift == 0 and self._order_alone_matters(evaluated):
            return block_of_all(0)
        q_len, kv_len = dims.q_len // chunks, dims.kv_len // chunks
        blocks = []
        for q, k in visible:
            conjuncts = tuple(c for c in evaluated if classes[c, q, k] != FULL)
            positions = self._positions(conjuncts, *(x[shift, kind, q, k] for x in self.distances))
            blocks.append(_Block(q * q_len, k * kv_len, q_len, kv_len, conjuncts, positions))
        if any(block.positions == "data" for block in blocks):
            return block_of_all("data")
        are_alike = all(x.positions is None and x.conjuncts == evaluated for x in blocks)
        return block_of_all(None) if are_alike and len(blocks) == chunks**2 else blocks

    def _order_alone_matters(self, conjuncts: tuple[int, ...]) -> bool:
        """Return whether code only compares positions of a device's own tokens, whose order is that of its arrays."""
        codes = [self.mask_codes[c] for c in conjuncts]
        return (
            self.has_default_positions
            and self.call.dims.q_len == self.call.dims.kv_len
            and not self.scores_read_positions
            and all(causal_offset(code) == 0 or not reads_positions(code) for code in codes)
        )

    def _positions(self, conjuncts: tuple[int, ...], lowest: Any, highest: Any) -> Any:
        """Return how a block's code gets positions (see `_Block`)."""
        codes = *(self.mask_codes[c] for c in conjuncts), *self.score_codes
        if not self.call.dropout_rate and not any(map(reads_positions, codes)):
            return None
        is_known = self.has_default_positions and lowest == highest and not self.call.dropout_rate
        # Scores that read positions do so in every step, and at each distance they would be another program.
        is_program_shared = lowest == 0 or not self.scores_read_positions
        if is_known and is_program_shared and all(map(is_translation_invariant, codes)):
            return int(lowest)
        return "data"

    def _call(self, block: _Block, wrapped: _Block, runs: Runs) -> BlockCall:
        """Return the call of a block, which on devices where the step wraps around is another one of the same
        program."""
        explicit = block.positions == "data"
        inputs = jax.eval_shape(
            lambda operands: select_operands(
                operands, block.conjuncts, explicit, (0, block.q_len), (0, block.kv_len)
            ),
            self.operands,
        )
        masks = [self.conjuncts[c] for c in block.conjuncts]
        spec = self.call._replace(
            dims=self.call.dims._replace(q_len=block.q_len, kv_len=block.kv_len),
            mask=functools.reduce(And, masks) if masks else None,
            first_position=block.positions if isinstance(block.positions, int) else 0,
            operands=inputs,
        ).spec()
        starts = (block.q_start, wrapped.q_start), (block.k_start, wrapped.k_start)
        return BlockCall(spec, self.plan(spec), block.conjuncts, *starts, runs)
