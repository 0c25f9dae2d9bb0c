"""What the Hopper kernels need and Pallas cannot say, in inline PTX and MLIR.

None of it orders memory. The interpreter in the tests knows each inner function by its name.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa2.kernels import dropout, tma
from pallas_fa2.kernels.branches import cond
from pallas_fa2.kernels.dropout import RowKeys
from pallas_fa2.kernels.mosaic import COLUMNS, I32, ROWS, TILE, inline

# Of PTX's 16 named barriers, Mosaic has 0 and one for each of up to four warpgroups.
FIRST_TURN = 5
FIRST_QUESTION = 9
NEVER_USED = 15

EACH = plgpu.Layout.WG_STRIDED((tma.THREADS,), 1)  # a number for each thread of a warpgroup
NUMBERS = plgpu.ShapeDtypeStruct((tma.THREADS,), I32, EACH)


@dataclasses.dataclass(frozen=True)
class Turns:
    """Warpgroups take turns at the tensor cores: one multiplies while the others exponentiate.

    FlashAttention-3 (arXiv:2407.08608), section 3.1. Turns order no memory, only time: they use
    PTX's named barriers, which answer sooner than mbarriers, and mean nothing to the interpreter.
    """

    me: Any
    count: int

    def open(self) -> None:
        """The last warpgroup opens the first one's turn."""
        cond(self.me == self.count - 1, self.give, lambda: None)

    def take(self) -> None:
        _turn_sync(FIRST_TURN + self.me)  # pyright: ignore[reportCallIssue]

    def give(self) -> None:
        _turn_arrive(FIRST_TURN + lax.rem(self.me + 1, I32(self.count)))  # pyright: ignore[reportCallIssue]

    def close(self) -> None:
        """The first warpgroup takes the turn that the last one has given."""
        cond(self.me == 0, self.take, lambda: None)


def _turn(operation: str, barrier: Any) -> None:
    """One warpgroup arrives at a named barrier and another waits: 256 threads."""
    void, code = ir.Type.parse("!llvm.void"), f"bar.{operation} $0, 256;"
    llvm.inline_asm(void, [barrier.registers[()]], code, "r", has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
def _turn_sync(_: Any, barrier: Any) -> None:
    _turn("sync", barrier)


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))
def _turn_arrive(_: Any, barrier: Any) -> None:
    _turn("arrive", barrier)


def any_above(tile: jax.Array, limit: float) -> jax.Array:
    """Whether a warp's own 16 rows of `[64, 8]`, or of `[64]`, exceed the limit anywhere.

    Each warp gets its own answer, so a branch on it must not synchronize.
    """

    def found(_: Any, tile: Any) -> Any:
        bound = arith.constant(ir.F32Type.get(), limit)
        above = [arith.cmpf(arith.CmpFPredicate.OGT, x, bound) for x in scalars(tile)]
        vote = "vote.sync.any.pred p, p, -1;"
        return splat(_ask(above, vote, []))

    layout = TILE if tile.ndim == 2 else ROWS
    return inline(f"any_above {limit}", found, NUMBER, layout)(tile) != 0


NUMBER = plgpu.ShapeDtypeStruct((), I32, plgpu.Layout.WG_SPLAT(shape=()))


def any_from_two(tile: jax.Array) -> jax.Array:
    """Whether |x| >= 2, or NaN, anywhere in a warp's own 16 rows: bit 30 is set then, and half an
    instruction a value finds out. Each warp gets its own answer."""
    return _any_from_two(tile) != 0  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(TILE,), return_type=NUMBER)
def _any_from_two(_: Any, tile: Any) -> Any:
    word = ir.IntegerType.get_signless(32)
    bits = functools.reduce(arith.ori, [arith.bitcast(word, x) for x in scalars(tile)])
    exponent = arith.andi(bits, i32(1 << 30))
    above = arith.cmpi(arith.CmpIPredicate.ne, exponent, i32(0))
    return splat(_ask([above], "vote.sync.any.pred p, p, -1;", []))


def any_infinite(rows: jax.Array, warpgroup: Any) -> jax.Array:
    """1 if a value is infinite or NaN in any row of a warpgroup, else 0; all of it must ask."""
    return _any_infinite(rows, FIRST_QUESTION + warpgroup)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(ROWS, plgpu.Layout.WG_SPLAT), return_type=NUMBER)
def _any_infinite(_: Any, rows: Any, barrier: Any) -> Any:
    infinity = arith.constant(ir.F32Type.get(), math.inf)
    not_below = arith.CmpFPredicate.UGE  # holds for NaN
    found = [arith.cmpf(not_below, x, infinity) for x in scalars(rows)]
    together = "barrier.cta.red.or.pred p, $2, 128, p;"
    answer = _ask(found, together, [barrier.registers[()]])
    # This shuffle changes nothing, but ptxas learns that a branch on the answer is uniform; it would
    # otherwise serialize every WGMMA in the branch (C7520).
    code = "shfl.sync.idx.b32 $0, $1, 0, 31, -1;"
    return splat(llvm.inline_asm(answer.type, [answer], code, "=r,r", has_side_effects=True))


def _ask(mine: list[Any], question: str, operands: list[Any]) -> Any:
    """1 if `question`, PTX on the predicate p, answers yes; p is whether any of `mine` holds."""
    word = ir.IntegerType.get_signless(32)
    any_of_mine = arith.extui(word, functools.reduce(arith.ori, mine))
    code = f"{{ .reg .pred p; setp.ne.s32 p, $1, 0; {question} selp.s32 $0, 1, 0, p; }}"
    constraints = ",".join(["=r", "r", *["r"] * len(operands)])
    return llvm.inline_asm(word, [any_of_mine, *operands], code, constraints, has_side_effects=True)


def thread_number() -> Any:
    """The thread's number in its CTA. It is read once, outside all loops, as that takes 350 clocks;
    but what follows from it is computed where it is used, and holds no registers elsewhere."""
    thread = mgpu.utils.thread_idx()
    return llvm.inline_asm(thread.type, [thread], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)


def first_column() -> Any:
    """Of a thread's own columns of a tile, of which it has two in each eight."""
    return arith.shli(arith.andi(thread_number(), i32(3)), i32(1))


def splat(answer: Any) -> Any:
    return mgpu.FragmentedArray.splat(answer, shape=(), is_signed=True)


def scalars(array: Any) -> list[Any]:
    """A thread's own values of an array."""
    return [x for register in array.registers.flat for x in elements(register)]


def elements(register: Any) -> list[Any]:
    count = ir.VectorType(register.type).shape[0]
    return [llvm.extractelement(register, i32(e)) for e in range(count)]


def words(
    count: int, code: str, constraints: str, *operands: Any, side_effects: bool = False
) -> list[Any]:
    """The registers $0, $1, ... of `code`, so many; operands follow."""
    word = ir.IntegerType.get_signless(32)
    all_words = ir.Type.parse(f"!llvm.struct<({', '.join(['i32'] * count)})>")
    constraints = ",".join(["=r"] * count + [constraints])
    found = llvm.inline_asm(all_words, operands, code, constraints, has_side_effects=side_effects)
    return [llvm.extractvalue(word, found, [i]) for i in range(count)]


def i32(value: int) -> Any:
    return arith.constant(ir.IntegerType.get_signless(32), value)


def own(numbers: Any) -> Any:
    """A thread's own of `EACH`."""
    (found,) = scalars(numbers)
    return found


def of_each(mine: Any) -> Any:
    layout = EACH.to_mgpu()
    register = llvm.mlir_undef(layout.registers_element_type(mine.type))
    registers = np.array([llvm.insertelement(register, mine, i32(0))], object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)


def each(tile: Any, function: Callable, order: Callable = lambda at: 0) -> Any:
    """function(a thread's value, the place of its register, its place there) of each, in the order of these
    places or of order(place)."""
    results = np.empty_like(tile.registers)
    for at, register in sorted(np.ndenumerate(tile.registers), key=lambda x: order(x[0])):
        for e, x in enumerate(elements(register)):
            register = llvm.insertelement(register, function(x, at, e), i32(e))
        results[at] = register
    return mgpu.FragmentedArray(_registers=results, _layout=tile.layout, _is_signed=tile.is_signed)


def zeros(shape: tuple[int, int]) -> jax.Array:
    """For an accumulator to start from. LLVM would keep one zero for all that a loop starts, in the
    first register of one of them: ptxas then moves the others around it, and spills."""

    def zeros(_: Any) -> Any:
        f32 = ir.F32Type.get()
        zero = llvm.inline_asm(f32, [], "mov.f32 $0, 0f00000000;", "=f", has_side_effects=True)
        return mgpu.FragmentedArray.splat(zero, shape, mgpu.WGMMA_LAYOUT)

    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, TILE)
    return inline(f"zeros {shape[0]} {shape[1]}", zeros, result)()


def reciprocal(tile: jax.Array) -> jax.Array:
    """1 / x, off by one unit in the last place and flushing denormal numbers."""

    def one(x: Any, *_: Any) -> Any:
        return llvm.inline_asm(x.type, [x], "rcp.approx.ftz.f32 $0, $1;", "=f,f")

    result = plgpu.ShapeDtypeStruct(tile.shape, jnp.float32, TILE)
    return inline("reciprocal", lambda _, tile: each(tile, one), result, TILE)(tile)


def unfused(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """An int32 that varies over these axes of a tile, which ptxas takes for no maximum or minimum: it would
    lose a minus (`tokens.negative`). It does not look behind a permutation that leaves all bytes in place."""

    def one(x: Any, *_: Any) -> Any:
        return llvm.inline_asm(x.type, [x], "prmt.b32 $0, $1, 0, 0x3210;", "=r,r")

    def all_of(_: Any, array: Any) -> Any:
        return each(array, one) if axes else splat(one(array.registers[()]))

    layout = {(): plgpu.Layout.WG_SPLAT(shape=()), (0,): ROWS, (1,): COLUMNS, (0, 1): TILE}[axes]
    result = plgpu.ShapeDtypeStruct(x.shape, I32, layout)
    return inline("unfused", all_of, result, layout if axes else plgpu.Layout.WG_SPLAT)(x)


@dataclasses.dataclass(frozen=True)
class Mail:
    """Tiles that the other CTA of a cluster copies here from its shared memory.

    Pallas stores to another CTA from registers, and arrives there with a fence for which the warps wait
    2000 clocks under load; a bulk copy (PTX ISA, cp.async.bulk) needs none.
    """

    tiles: Any  # [stages, rows, columns]
    arrived: Any  # [stages, 2] uint32, an mbarrier each
    dtype: Any

    def _stage(self, step: Any) -> Any:
        return lax.rem(step, I32(self.tiles.shape[0]))

    def open(self) -> None:
        """Before the other CTA is told that this one is there; by one warpgroup."""
        _open_mail(self.arrived, I32(self.tiles.shape[0]))  # pyright: ignore[reportCallIssue]

    def expect(self, step: Any) -> None:
        """By one warpgroup, once the stage is free."""
        size = math.prod(self.tiles.shape[1:]) * jnp.dtype(self.dtype).itemsize
        _expect_mail(self.arrived.at[self._stage(step)], I32(size))  # pyright: ignore[reportCallIssue]

    def send(self, step: Any, tile: Any, cta: Any) -> None:
        """To the same place in another CTA, whose stage is free; `tile` has been committed."""
        stage = self._stage(step)
        operand = tma.as_operand(tile)
        send = plgpu.inline_mgpu(arg_types=(operand, operand, plgpu.RefType(), _NUMBER))(_send_mail)
        send(tile, self.tiles.at[stage], self.arrived.at[stage], cta)  # pyright: ignore[reportCallIssue]

    def wait(self, step: Any) -> Any:
        stage = self._stage(step)
        turn = lax.rem(lax.div(step, I32(self.tiles.shape[0])), I32(2))
        _wait_for_mail(self.arrived.at[stage], turn)  # pyright: ignore[reportCallIssue]
        return self.tiles.at[stage]


_NUMBER = plgpu.Layout.WG_SPLAT


def address(ref: Any, bits: int = 64) -> Any:
    """Of device memory; of shared memory in 32 bits."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def _shared_address(ref: Any) -> Any:
    return address(ref, 32)


def by_warp(number: int, code: str, constraints: str, *operands: Any) -> None:
    """By one warp of a warpgroup: `code` uses the operands from $1 on, the registers v and p, and
    `leader`, which is true in one thread."""
    thread = arith.andi(thread_number(), i32(127))
    code = (
        "{ .reg .pred p, leader; .reg .b32 v; shr.b32 v, $0, 5; "
        f"setp.ne.b32 p, v, {number}; setp.eq.b32 leader, $0, {32 * number}; "
        f"@p bra done; {code} done: }}"
    )
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [thread, *operands], code, f"r,{constraints}", has_side_effects=True)


def tell_by_warps(word: Any, amount: int, condition: Any = None) -> None:
    """Each warp adds to a word of device memory, after what all its lanes have stored or added; if there is a
    condition, where it is not 0."""
    operands = [address(word), arith.andi(thread_number(), i32(31))]
    skip = ""
    if condition is not None:
        operands.append(condition)
        skip = "setp.eq.s32 p, $2, 0; @p bra done; "
    code = (
        f"{{ .reg .pred p; {skip}setp.eq.b32 p, $1, 0; bar.warp.sync -1; "
        f"@p red.release.gpu.global.add.s32 [$0], {amount}; done: }}"
    )
    constraints = ",".join(["l"] + ["r"] * (len(operands) - 1))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, code, constraints, has_side_effects=True)


def by_one_thread(code: str, *operands: Any) -> None:
    """Of a warpgroup: `code` has the predicate p, which is true in one thread, and uses the operands from $1 on,
    and the registers a and b."""
    thread = arith.andi(thread_number(), i32(127))
    code = f"{{ .reg .pred p; .reg .b32 a, b; setp.eq.s32 p, $0, 0; {code} }}"
    constraints = ",".join(["r"] * (1 + len(operands)))
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, [thread, *operands], code, constraints, has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _open_mail(_: Any, arrived: Any, stages: Any) -> None:
    shape = ir.MemRefType(arrived.type).shape
    each = " ".join(f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * i}], 1;" for i in range(shape[0]))
    by_one_thread(f"{each} fence.mbarrier_init.release.cluster;", _shared_address(arrived))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _expect_mail(_: Any, arrived: Any, size: Any) -> None:
    code = "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;"
    by_one_thread(code, _shared_address(arrived), size.registers[()])


def _send_mail(_: Any, source: Any, target: Any, arrived: Any, cta: Any) -> None:
    shape = ir.MemRefType(source.type)
    size = math.prod(shape.shape) * mgpu.utils.bytewidth(shape.element_type)
    to, complete = "shared::cluster.shared::cta", "mbarrier::complete_tx::bytes"
    code = (
        "mapa.shared::cluster.u32 a, $2, $4; mapa.shared::cluster.u32 b, $3, $4; "
        f"@p cp.async.bulk.{to}.{complete} [a], [$1], {size}, [b];"
    )
    addresses = [_shared_address(x) for x in (source, target, arrived)]
    by_one_thread(code, *addresses, cta.registers[()])


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NUMBER))
def _wait_for_mail(_: Any, arrived: Any, turn: Any) -> None:
    code = (
        "{ .reg .pred p; wait: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; "
        "@p bra done; bra wait; done: }"
    )
    operands = [_shared_address(arrived), turn.registers[()]]
    void = ir.Type.parse("!llvm.void")
    llvm.inline_asm(void, operands, code, "r,r", has_side_effects=True)


def negate_dropped(
    p: jax.Array, keys: RowKeys, columns: jax.Array, key_axis: int, threshold: int, shared: bool
) -> jax.Array:
    """-p where the bits of a pair (`dropout.bits`) are below the threshold.

    `keys` are int32 vectors over the tile's queries, `columns` one over its keys, on `key_axis`: their
    positions. If words are `shared`, these are 16 in a row or more, and start at a multiple of 16.
    """

    def negate(_: Any, p: Any, first: Any, second: Any, columns: Any) -> Any:
        first, second, columns = map(scalars, (first, second, columns))

        @functools.cache
        def word(query: int, key: int) -> Any:
            x = arith.xori(first[query], arith.andi(columns[key], i32(~dropout.SHARED)))
            x = arith.muli(_shifted(x, 16), i32(dropout.FIRST))
            x = arith.addi(x, second[query])
            x = arith.muli(_shifted(x, 15), i32(dropout.SECOND - 2**32))
            return _shifted(x, 16)

        def negated(x: Any, at: tuple[int, ...], e: int) -> Any:
            mine = sum(at[2:]), 2 * at[1] + e  # the row and the column, of the thread's own
            query, key = mine[1 - key_axis], mine[key_axis]
            if shared:
                # with the key eight before: the thread's row before, or the column two before
                lower = key & ~(1 + key_axis)
                bits, shift = word(query, lower), i32(16 if lower != key else 0)
            else:
                half = arith.andi(columns[key], i32(dropout.SHARED))
                bits, shift = word(query, key), arith.shli(half, i32(1))
            bits = arith.andi(arith.shrui(bits, shift), i32(0xFFFF))
            keep = arith.cmpi(arith.CmpIPredicate.uge, bits, i32(threshold))
            return arith.select(keep, x, arith.negf(x))

        return each(p, negated)

    name = f"negate_dropped {key_axis} {threshold} {int(shared)}"
    vectors = ((ROWS, COLUMNS)[axis] for axis in (1 - key_axis, 1 - key_axis, key_axis))
    result = plgpu.ShapeDtypeStruct(p.shape, jnp.float32, TILE)
    return inline(name, negate, result, TILE, *vectors)(p, *keys, columns)


def _shifted(x: Any, bits: int) -> Any:
    return arith.xori(x, arith.shrui(x, i32(bits)))


def column_numbers(count: int, start: Any) -> jax.Array:
    """start, start + 1, ..., one a column.

    They are computed where this is called: LLVM would keep those of Pallas's iota in registers, all of
    them, as they are the same in every tile but for the start.
    """

    def numbers_of(_: Any, start: Any) -> Any:
        first = arith.addi(start.registers[()], first_column())
        layout = COLUMNS.to_mgpu()
        numbers = np.empty(layout.registers_shape((count,)), object)
        for i, at in enumerate(np.ndindex(*numbers.shape)):  # 8 columns each
            pair = llvm.mlir_undef(ir.VectorType.get((2,), first.type))
            for e in range(2):
                number = arith.addi(first, i32(8 * i + e))
                pair = llvm.insertelement(pair, number, i32(e))
            numbers[at] = pair
        return mgpu.FragmentedArray(_registers=numbers, _layout=layout, _is_signed=True)

    result = plgpu.ShapeDtypeStruct((count,), I32, COLUMNS)
    return inline(f"column_numbers {count}", numbers_of, result, plgpu.Layout.WG_SPLAT)(start)


def pin(positive: jax.Array) -> None:
    """A place that ptxas moves no wait for WGMMA across, once `positive` (a tile) is known.

    It would otherwise wait for a product before the exponentials that should run beside it.
    """
    _pin(positive)  # pyright: ignore[reportCallIssue]


@plgpu.inline_mgpu(arg_types=(TILE,))
def _pin(_: Any, positive: Any) -> None:
    total = functools.reduce(arith.addf, scalars(positive))
    # A barrier that nobody ever arrives at, and ptxas cannot know.
    arrive = f"{{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p bar.arrive {NEVER_USED}, 128; }}"
    llvm.inline_asm(ir.Type.parse("!llvm.void"), [total], arrive, "f", has_side_effects=True)
