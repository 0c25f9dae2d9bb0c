"""The Hopper kernels as an implementation: what they refuse, and the arrays in their form."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pallas_fa2 import bounds, diagonal
from pallas_fa2.kernels import (
    answers,
    hopper_backward,
    hopper_forward,
    partition,
    passes,
    tma,
    token_data,
    visits,
)
from pallas_fa2.kernels.backward_schedule import Schedule
from pallas_fa2.kernels.mosaic import LOG2E, Problem, round_up
from pallas_fa2.kernels.partition import Axes
from pallas_fa2.kernels.tile import split_floats
from pallas_fa2.kernels.tile_code import TileDropout, TileMask, TileScore
from pallas_fa2.kernels.token_data import Sums, TokenData
from pallas_fa2.spec import Device, KernelDescription, Operands, Spec
from pallas_fa2.tokens import Q_AXIS

# Of queries and keys, and of values: what the kernels are made for. Of smaller ones, TMA fills the missing
# columns with zeros.
KERNEL_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
LARGEST_DIM = KERNEL_DIMS[-1][0]
# TMA coordinates are 32-bit, and no launch on larger arrays has been tested.
MAX_ELEMENTS = 2**31 - 1
# Nor with more heads, batch entries times key heads, or blocks of 64 tokens.
MAX_COUNT = 65_535
# Of data of one side's tokens: in every kernel shared memory has room for so many beside the rest.
MOST_ROWS = 12


def refuses(spec: Spec, device: Device) -> str | None:
    if not device.hopper:
        return f"it needs a Hopper GPU (compute capability 9.0), and this is {device.kind}"
    if not isinstance(spec.batch, int):
        return f"its arrays have sizes that are known, and here the batch is {spec.batch}"
    if spec.dtype.name not in ("bfloat16", "float16"):
        return f"its inputs are bfloat16 or float16, not {spec.dtype.name}"
    for name, dim in (("H", spec.head_dim), ("Hv", spec.value_dim)):
        if dim > LARGEST_DIM or dim % 8:
            return f"head dims are multiples of 8 up to {LARGEST_DIM}, but {name} is {dim}"
    if reason := token_data.refuses(spec) or _refuses_data(spec):
        return reason
    if spec.masked and _listed_blocks(spec) > visits.MOST:
        return f"its masks list {visits.MOST} blocks at most, and here are {_listed_blocks(spec)}"
    if spec.scale <= 0:
        return f"the scale must be positive, but it is {spec.scale:g}"
    if (elements := _entry_elements(spec)) > MAX_ELEMENTS:
        return f"a batch entry has fewer than 2^31 elements, and here are {elements}"
    if spec.q_heads > MAX_COUNT:
        return f"it has {MAX_COUNT} heads at most, and here are {spec.q_heads}"
    if (length := max(spec.q_len, spec.kv_len)) > 64 * MAX_COUNT:
        return f"its sequences have {64 * MAX_COUNT} tokens at most, and here are {length}"
    return None


def _refuses_data(spec: Spec) -> str | None:
    for side, name in (("q", "queries"), ("k", "keys")):
        if (rows := token_data.token_rows(spec, side)) > MOST_ROWS:
            what = "masks, scores and dropout"
            return f"its {what} read {MOST_ROWS} arrays of {name} at most, and here are {rows}"
    size, dims = token_data.pair_bytes(spec), kernel_dims(spec.head_dim, spec.value_dim)
    if (dim := max(spec.head_dim, spec.value_dim)) > (most := token_data.WIDEST_WITH_PAIRS):
        if size:
            return f"with scores of data of pairs, head dims are at most {most}, and here is {dim}"
        if token_data.is_asked(spec) and spec.mask_by_head:
            what = "a mask of data of pairs that differs between heads"
            return f"with {what} head dims are at most {most}, and here is {dim}"
    rows = token_data.token_rows(spec, "q") + (2 if spec.dropout_rate else 0)
    if size and hopper_backward.Config(*dims).pair_stages(size, rows) < 1:
        return f"its data of pairs of tokens are too many for shared memory ({size} bytes a pair)"
    return None


def _listed_blocks(spec: Spec) -> int:
    """The most that a tile of a kernel may visit: 64 keys each, or 64 queries of each head of a group."""
    return max(-(-spec.kv_len // 64), spec.group * -(-spec.q_len // 64))


def kernel_dims(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Those of the smallest kernels that take these, of panels that TMA is not slow with."""
    dims = head_dim, value_dim

    def take(sizes: tuple[int, int]) -> bool:
        return all(
            n >= dim and not tma.cut_narrow(n, dim) for n, dim in zip(sizes, dims, strict=True)
        )

    return next(filter(take, KERNEL_DIMS))


def _entry_elements(spec: Spec) -> int:
    """The size of the largest array that the kernels see, for one batch entry."""
    head_dim, _ = kernel_dims(spec.head_dim, spec.value_dim)
    return max(spec.q_len * spec.q_heads, spec.kv_len * spec.kv_heads) * head_dim


def batch_limit(spec: Spec) -> int:
    """How many batch entries one launch takes."""
    return max(1, min(MAX_COUNT // spec.kv_heads, MAX_ELEMENTS // max(_entry_elements(spec), 1)))


@dataclasses.dataclass(frozen=True)
class Trim:
    """The rows and keys that take part: a causal mask leaves some without a partner.

    Keys that no query sees are cut off the end; queries that see no key off the start.
    """

    first_query: int
    q_len: int
    kv_len: int
    offset: int | None

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """`[B, T, ...]` -> the queries that take part."""
        return jax.lax.slice_in_dim(x, self.first_query, self.first_query + self.q_len, axis=axis)

    def keys(self, x: jax.Array) -> jax.Array:
        return x[:, : self.kv_len]

    def spec(self, spec: Spec) -> Spec:
        return dataclasses.replace(spec, q_len=self.q_len, kv_len=self.kv_len)

    def operands(self, operands: Operands) -> Operands:
        return operands.cut(self.first_query, self.q_len, 0, self.kv_len)

    def restore_queries(self, x: jax.Array, fill: float = 0.0, axis: int = 1) -> jax.Array:
        """The whole length again, with `fill` for queries that take no part."""
        x = jax.lax.slice_in_dim(x, 0, self.q_len, axis=axis)
        pad = [(0, 0)] * x.ndim
        pad[axis] = (self.first_query, 0)
        return jnp.pad(x, pad, constant_values=fill)

    def restore_data(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """The gradient of data of scores, `[B, K, G, T, S, ...]`: 0 for what takes no part."""
        missing = [whole - size for whole, size in zip(like.shape, x.shape, strict=True)]
        first = [min(self.first_query, n) if i == Q_AXIS else 0 for i, n in enumerate(missing)]
        return jnp.pad(x, [(a, n - a) for a, n in zip(first, missing, strict=True)])

    def restore_keys(self, x: jax.Array, kv_len: int) -> jax.Array:
        x = x[:, : self.kv_len]
        return jnp.pad(x, ((0, 0), (0, kv_len - self.kv_len), (0, 0), (0, 0)))


def trim(spec: Spec) -> Trim:
    if spec.causal is None:
        return Trim(0, spec.q_len, spec.kv_len, None)
    if spec.causal == "start":
        return Trim(0, spec.q_len, min(spec.kv_len, spec.q_len), 0)
    first = max(spec.q_len - spec.kv_len, 0)
    return Trim(first, spec.q_len - first, spec.kv_len, max(spec.kv_len - spec.q_len, 0))


class Survey(NamedTuple):
    """What a kernel of attention finds of a mask."""

    problem: Problem
    data: TokenData | None  # without the mask's, if it has been asked
    classes: Any = None  # of tiles, [B | 1, N | 1, T tiles, S tiles]
    seen: Any = None  # `visits.Visits` of queries
    answers: jax.Array | None = None  # of a mask that has been asked (`answers`)


class Extras(NamedTuple):
    """What a call has beside q, k and v: a mask that is not causal, score functions, and dropout."""

    spec: Spec  # of the rows and keys that take part
    part: Trim
    mask: TileMask | None
    score: TileScore | None
    dropout: TileDropout | None
    classes: np.ndarray | None  # of tiles, [B | 1, N | 1, T tiles, S tiles], if known when traced
    traced: "Traced"
    parts: int = 1  # that a block of keys has where the mask is asked: classes are those of parts

    @classmethod
    def of(
        cls,
        spec: Spec,
        part: Trim,
        operands: Operands,
        block_q: int,
        block_kv: int,
        wanted: tuple[bool, ...] = (),
        may_have_parts: bool = False,
    ) -> "Extras":
        """Of a call that has tiles of so many queries and keys. Where its mask will be asked, blocks of keys
        `may_have_parts`, of 64 keys each, if tiles visit fewer of them so.
        """
        mask, score = token_data.describe_mask(spec), token_data.describe_score(spec, wanted)
        functions = mask, score, token_data.describe_dropout(spec)
        spec = part.spec(spec)
        data = None
        if functions != (None, None, None):
            data = token_data.pack(spec, operands, part.first_query)
        extras = cls(spec, part, *functions, None, Traced(data, None))
        if mask is None or (token_data.is_asked(spec) and bounds.is_traced(operands)):
            return extras
        classes = extras._classify(operands, block_q, block_kv)
        parts = block_kv // answers.SQUARE
        if may_have_parts and parts > 1 and extras._asks_alone(classes, (block_q, block_kv)):
            of_parts = extras._classify(operands, block_q, answers.SQUARE)
            of_parts = visits.in_whole_blocks(of_parts, parts)
            if visits.are_fewer(of_parts, classes, parts):
                classes, extras = of_parts, extras._replace(parts=parts)
        if isinstance(classes, np.ndarray):
            return extras._replace(classes=classes)
        return extras._replace(traced=Traced(data, classes))

    def _classify(self, operands: Operands, block_q: int, block_kv: int) -> Any:
        spec = self.spec
        classes = bounds.classify_each(spec, operands, block_q, block_kv)
        classes = classes.reshape(classes.shape[0], -1, *classes.shape[3:])
        if spec.kv_len % block_kv:
            classes = visits.cut_last(classes)
        if isinstance(classes, np.ndarray):
            return classes
        return jnp.broadcast_to(classes, (spec.batch, *classes.shape[1:]))

    def _asks_alone(self, classes: Any, tile: tuple[int, int]) -> bool:
        """Whether the forward, in a launch of all heads, asks the mask, and has no other use for the numbers of
        keys."""
        spec = self.spec
        problem = self.problem(spec.batch, spec.q_heads, spec.kv_heads)
        others = self.score is not None or self.dropout is not None
        return not others and self.asks(problem, classes, tile, q_axis=0)

    def problem(self, batch: int, q_heads: int, kv_heads: int) -> Problem:
        """Of a launch, of some batch entries and heads."""
        spec, part = self.spec, self.part
        return Problem(
            batch=batch,
            q_len=part.q_len,
            kv_len=part.kv_len,
            q_heads=q_heads,
            kv_heads=kv_heads,
            scale=spec.scale,
            offset=part.offset,
            mask=self.mask,
            score=self.score,
            dropout=self.dropout,
            first_query=part.first_query,
        )

    def axes(self, arguments: tuple, results: tuple) -> Axes | None:
        """Of a kernel's call, whose last argument is `traced`; None where it stays whole.

        So it does where gradients of data of pairs are formed, in another way for each number of entries.
        """
        if self.score is not None and self.score.floats_of("pair"):
            return None
        return Axes((*arguments, self.traced.axes), results)

    def classes_of(self, traced: "Traced") -> Any:
        return traced.classes if self.classes is None else self.classes

    def asks(self, problem: Problem, classes: Any, tile: tuple[int, int], q_axis: int) -> bool:
        """Whether the mask is asked before the attention."""
        if problem.mask.visible.pairs:
            return token_data.is_asked(self.spec)
        return answers.are_worth_it(problem, self.spec.head_dim, classes, tile, q_axis)

    def survey(
        self, problem: Problem, traced: "Traced", tile: tuple[int, int], q_axis: int
    ) -> Survey:
        """Of tiles of so many queries and keys. A CTA of attention has those of `q_axis`.

        Where the classes of tiles are not known, the mask is asked about all of them.
        """
        if problem.mask is None:
            return Survey(problem, traced.data)
        classes, found = self.classes_of(traced), None
        seen: Any = None
        assert traced.data is not None
        if classes is None:
            found, classes = answers.ask_all(problem, traced.data, tile, q_axis)
            classes = visits.cut_last(classes) if problem.kv_len % tile[1] else classes
        whole = visits.joined(classes, self.parts)
        asks = found is None and self.asks(problem, whole, tile, q_axis)
        if asks:
            problem = dataclasses.replace(problem, parts=self.parts)
        else:  # with the heads of one device, it may not be worth it
            classes = whole
        if q_axis == 0:
            seen = visits.Visits.of(classes, problem.parts)
        elif asks:
            seen = visits.Visits.of(visits.from_last(classes.swapaxes(2, 3)))
        if asks:
            found = answers.ask(problem, traced.data, seen, tile, q_axis)
        if found is None:
            return Survey(problem, traced.data, classes, seen)
        data = None if self.score is None and self.dropout is None else traced.data
        return Survey(dataclasses.replace(problem, asked=True), data, classes, seen, found)


class Traced(NamedTuple):
    """Arrays with all batch entries, or with those of a launch."""

    data: TokenData | None
    classes: jax.Array | None
    in_doubt: jax.Array | None = None  # int32 [B]: whether tokens may take part in nothing

    @property
    def axes(self) -> "Traced":
        """As `partition.Axes` has them."""
        data: Any = None if self.data is None else TokenData.axes()
        classes: Any = None if self.classes is None else "bn.."
        in_doubt: Any = None if self.in_doubt is None else "b"
        return Traced(data, classes, in_doubt)


def over_batch(kernel: Callable, limit: int, axes: Axes | None = None) -> Callable:
    """A kernel for any batch, the first axis of every array, and under vmap, which adds to it.

    A launch takes up to `limit` batch entries. An array that they share has a first axis of 1, and so may its
    gradient have. With `axes`, each device takes a part.
    """

    def launches(*args: Any) -> Any:
        batch = jax.tree.leaves(args)[0].shape[0]
        if batch <= limit:
            return kernel(*args)

        def launch(part: slice) -> Any:
            return kernel(*jax.tree.map(lambda x: x if len(x) == 1 else x[part], args))

        def join(*x: jax.Array) -> jax.Array:
            if sum(map(len, x)) == batch:
                return jnp.concatenate(x)
            totals = [y.sum(0, dtype=jnp.float32, keepdims=True) for y in x]
            return functools.reduce(jnp.add, totals)

        parts = [slice(i, i + limit) for i in range(0, batch, limit)]
        return jax.tree.map(join, *map(launch, parts))

    call = custom_vmap(launches if axes is None else partition.by_device(launches, axes))

    @call.def_vmap
    def _(size: int, batched: Any, *args: Any) -> Any:
        batched = tuple(batched)
        entries = jax.tree.leaves(jax.tree.map(lambda x, mapped: x.shape[mapped], args, batched))
        batch = entries[0]

        def join(x: jax.Array, mapped: bool) -> jax.Array:
            x = x if mapped else x[None]
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
            return x.reshape(size * batch, *x.shape[2:])

        def singly(*args: Any) -> Any:
            return launches(*jax.tree.map(lambda x, mapped: x[0] if mapped else x, args, batched))

        def add_up(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
            if x.shape[1] == like.shape[0]:
                return x
            return x.sum(1, dtype=jnp.float32, keepdims=True).astype(like.dtype)

        out = call(*jax.tree.map(join, args, batched))
        out = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), out)
        if min(entries) < batch:
            # Of what a batch shares each entry has a copy here, and a gradient.
            out = jax.tree.map(add_up, out, jax.eval_shape(singly, *args))
        return out, jax.tree.map(lambda _: True, out)

    return call


def _backward_schedule(
    extras: Extras, problem: Problem, config: hopper_backward.Config, traced: Traced, classes: Any
) -> Schedule:
    """The schedule of the backward of a problem whose mask has been surveyed."""
    possible = functools.partial(bounds.possible, extras.spec, *config.tile)
    # Whole heads visit blocks that nobody sees.
    answered = not problem.asked or extras.classes_of(traced) is None
    return hopper_backward.schedule_of(problem, config, classes, possible, answered)


def describe(
    spec: Spec,
    forward: hopper_forward.Config,
    backward: hopper_backward.Config,
    operands: Operands,
) -> KernelDescription:
    """Describes the forward and the backward of a call, of which nothing runs."""
    trimmed = trim(spec)
    schedules = []

    def plan_backward(operands: Operands) -> None:
        extras = Extras.of(spec, trimmed, trimmed.operands(operands), *backward.tile)
        problem = extras.problem(spec.batch, spec.q_heads, spec.kv_heads)
        problem, _, classes, *_ = extras.survey(problem, extras.traced, backward.tile, q_axis=1)
        schedules.append(_backward_schedule(extras, problem, backward, extras.traced, classes))

    jax.eval_shape(plan_backward, operands)
    (schedule,) = schedules
    q_stages, do_stages = backward.stages
    tiles = "tiles from lists of those that are seen" if spec.masked else "tiles in order"
    pairs = ", in pairs" if backward.paired else ""
    return KernelDescription(
        forward.tile,
        f"{forward.block_q} queries x {forward.block_kv} keys, {forward.stages} stages, {forward.warpgroups} "
        f"warpgroups multiply, {forward.ctas} persistent CTAs, {tiles}",
        f"{backward.block_kv} keys x {backward.block_q} queries, {q_stages} stages of Q, {do_stages} of dO, "
        f"{backward.ctas} persistent CTAs{pairs}, {tiles}; {schedule.DQ_ACCUMULATION}",
        schedule.workspace_bytes,
    )


@jax.custom_jvp
def _first_order(arrays: tuple) -> tuple:
    return arrays


@_first_order.defjvp
def _(*_: Any) -> Any:
    raise NotImplementedError(
        "the gradients of the hopper kernels cannot be differentiated again; ask for "
        "implementation='blockwise' where second derivatives are needed"
    )


def forward(
    spec: Spec,
    config: hopper_forward.Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    operands: Operands,
) -> tuple[jax.Array, jax.Array]:
    """`out [B, T, N, Hv]` and natural `lse [B, N, T]`."""
    part = trim(spec)
    extras = Extras.of(spec, part, part.operands(operands), *config.tile, may_have_parts=True)

    def kernel(q: jax.Array, k: jax.Array, v: jax.Array, traced: Traced) -> tuple:
        problem = extras.problem(q.shape[0], q.shape[2], k.shape[2])
        problem, data, _, seen, found = extras.survey(problem, traced, config.tile, q_axis=0)
        return hopper_forward.attention(problem, config, q, k, v, seen, data, found)

    axes = extras.axes(("b.n.", "b.k.", "b.k."), ("b.n.", "bn."))
    out, lse = over_batch(kernel, batch_limit(spec), axes)(
        part.queries(q), part.keys(k), part.keys(v), extras.traced
    )
    return part.restore_queries(out), part.restore_queries(lse, -jnp.inf, axis=2)


def backward(
    spec: Spec,
    config: hopper_backward.Config,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    operands: Operands,
    wanted: tuple[bool, ...],
) -> tuple[jax.Array, jax.Array, jax.Array, tuple]:
    """Gradients of q, k, v and of the data of scores; 0 for those that are not wanted."""
    part = trim(spec)
    part_operands = part.operands(operands)
    extras = Extras.of(spec, part, part_operands, *config.tile, wanted)
    if extras.problem(spec.batch, spec.q_heads, spec.kv_heads).tames:
        in_doubt = diagonal.some_see_not_themselves(extras.spec, part_operands)
        extras = extras._replace(traced=extras.traced._replace(in_doubt=in_doubt))
    q, k, v, out, lse, dout, dlse = _first_order((q, k, v, out, lse, dout, dlse))

    def kernel(*args: Any) -> tuple:
        q, k, v, out, dout, lse, dlse, traced = args
        problem = extras.problem(q.shape[0], q.shape[2], k.shape[2])
        factors = passes.Factors(q, k, v, dout)
        problem, data, classes, _, found = extras.survey(problem, traced, config.tile, q_axis=1)
        schedule = _backward_schedule(extras, problem, config, traced, classes)
        factors, delta, zeros = passes.prepare(
            problem, config, factors, out, lse, schedule.NEEDS_ZEROS, traced.in_doubt
        )
        delta = delta if dlse is None else delta + dlse
        return hopper_backward.gradients(schedule, factors, lse, delta, zeros, classes, data, found)

    def rows(x: jax.Array, fill: float) -> jax.Array:
        extra = round_up(part.q_len, config.block_q) - part.q_len
        return jnp.pad(part.queries(x, 2), ((0, 0), (0, 0), (0, extra)), constant_values=fill)

    arguments = ("b.n.", "b.k.", "b.k.", "b.n.", "b.n.", "bn.", None if dlse is None else "bn.")
    axes = extras.axes(arguments, ("b.n.", "b.k.", "b.k.", Sums.axes(extras.score)))
    dq, dk, dv, sums = over_batch(kernel, batch_limit(spec), axes)(
        part.queries(q),
        part.keys(k),
        part.keys(v),
        part.queries(out),
        part.queries(dout),
        rows(jnp.where(lse == -jnp.inf, -jnp.inf, lse * -LOG2E), -jnp.inf),
        None if dlse is None else rows(dlse, 0.0),
        extras.traced,
    )
    dq = part.restore_queries(dq)
    dk = part.restore_keys(dk, spec.kv_len)
    dv = part.restore_keys(dv, spec.kv_len)
    floats, part_floats = (split_floats(x.scores)[0] for x in (operands, part_operands))
    dscores = token_data.gradients(extras.spec, extras.score, sums, part_floats)
    dscores = [part.restore_data(dx, x) for dx, x in zip(dscores, floats, strict=True)]
    return dq, dk, dv, tuple(dscores)
