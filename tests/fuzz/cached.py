"""Random steps on caches: new tokens are appended, contiguous, paged or packed, and attend.

The truth is the dense definition of the call on contiguous keys: of packed queries the one in which each request has
all rows, of which its own count.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from pallas_fa2.backends.registry import FUSED
from tests.contract.rule import FACTOR, FLOOR
from tests.fuzz import dense, masks
from tests.fuzz import scores as score_functions
from tests.fuzz.check import SMALLEST, deviation, in_shard_map
from tests.fuzz.dense import Inputs
from tests.fuzz.shapes import Pick, Shape, shown


@dataclasses.dataclass(frozen=True, repr=False)
class Cached:
    """`lengths` are those of the sequences after the step, of which `new` tokens are new; a row has T = max(new) tokens
    and is padded on the left, unless queries are packed."""

    seed: int = 0
    lengths: tuple[int, ...] = (5,)
    new: tuple[int, ...] = (1,)
    capacity: int = 8
    page: int = 0  # 0: contiguous
    shared: bool = False  # the first two sequences have one first page
    packed: bool = False
    unused: int = 0  # rows of no request
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    quantized: str = ""  # the dtype of a cache of 8 bits
    mask: masks.Node | None = masks.Causal()  # noqa: RUF009
    scores: tuple[score_functions.Score, ...] = ()
    sinks: bool = False
    scale: float | None = None
    in_shard_map: bool = False

    def __repr__(self) -> str:
        return shown(self)

    @property
    def rows(self) -> int:
        return sum(self.new) + self.unused if self.packed else max(self.new)

    @property
    def shape(self) -> Shape:
        batch = (len(self.lengths),)
        return Shape(batch, self.rows, self.capacity, self.kv_heads * self.group)


def draw(pick: Pick, for_kernels: bool = False) -> Cached:
    if for_kernels and pick((True, True, False)):
        return _draw_for_kernels(pick)
    batch = pick((1, 2, 3, 5))
    page = pick((0, 0, 1, 4, 16))
    capacity = pick((1, 8, 33, 64)) if not page else page * pick((1, 2, 5))
    lengths = tuple(pick((0, 1, capacity, *range(capacity + 1))) for _ in range(batch))
    packed = pick((False, True))
    most = pick((1, 1, 3, capacity))
    new = tuple(min(n, pick((most, 1, 0))) for n in lengths)
    unused = pick((0, 1, 5)) if packed else 0
    if sum(new) + unused == 0:
        return draw(pick)
    return Cached(
        seed=pick(range(1000)),
        lengths=lengths,
        new=new,
        capacity=capacity,
        page=page,
        shared=pick((False, True)),
        packed=packed,
        unused=unused,
        kv_heads=pick((1, 2)),
        group=pick((1, 3, 4)),
        head_dim=pick((8, 16, 64)),
        value_dim=pick((8, 24, 64)),
        dtype=pick(("float32", "float32", "bfloat16")),
        quantized=pick(("", "", "float8_e4m3fn", "int8")),
        mask=pick((masks.Causal(), None, masks.draw(pick, 2), masks.draw(pick, 2))),
        scores=score_functions.draw(pick),
        sinks=pick((False, False, True)),
        scale=pick((None, None, 0.3)),
        in_shard_map=pick((False, False, True)),
    )


def _draw_for_kernels(pick: Pick) -> Cached:
    """What the kernels that read caches take, mostly: 16 bits or 8, and sequences of several blocks of keys."""
    page = pick((0, 0, 8, 16, 24, 64, 128))
    capacity = pick((40, 256, 1000)) if not page else page * pick((1, 5, 20))
    lengths = tuple(pick((0, 1, capacity, *range(capacity + 1))) for _ in range(pick((1, 2, 5))))
    group = pick((1, 3, 4, 8, 12, 71))
    packed = pick((False, True))
    most = pick((1, 1, 2, 30 if packed else 20, 300))  # prompts of hundreds are tiles on Hopper
    new = tuple(min(n, pick((most, 1, 0))) for n in lengths)
    unused = pick((0, 5)) if packed else 0
    window = masks.SlidingWindow(pick((20, 200)))
    if sum(new) + unused == 0:
        return _draw_for_kernels(pick)
    case = Cached(
        seed=pick(range(1000)),
        lengths=lengths,
        new=new,
        capacity=capacity,
        page=page,
        shared=pick((False, True)),
        packed=packed,
        unused=unused,
        kv_heads=pick((1, 2)),
        group=group,
        head_dim=pick((64, 128, 72, 192, 256)),
        value_dim=pick((64, 128, 40)),
        dtype=pick(("bfloat16", "bfloat16", "float16")),
        mask=pick((masks.Causal(), masks.Causal(), None, window, masks.draw(pick, 2))),
        scores=score_functions.draw(pick),
        sinks=pick((False, False, True)),
        scale=pick((None, None, 0.3)),
        quantized=pick(("", "", "", "float8_e4m3fn", "int8")),
        in_shard_map=pick((False, False, True)),
    )
    if not case.quantized or max(lengths) < 2 or pick((False, True)):
        return case
    # Prompts that are tiles on Hopper
    prompts = {"new": tuple(min(n, 300) for n in lengths), "packed": False, "unused": 0}
    alike = {"head_dim": 64, "value_dim": 64, "dtype": "bfloat16", "scores": ()}
    return dataclasses.replace(case, mask=pick((masks.Causal(), None, window)), **prompts, **alike)


def simpler(case: Cached) -> list[Cached]:
    """Cases with one thing less."""
    fixed = "seed", "lengths", "new", "capacity"
    changes: list[dict[str, Any]] = [
        {field.name: field.default} for field in dataclasses.fields(case) if field.name not in fixed
    ]
    changes += [{"mask": m} for m in ([] if case.mask is None else masks.parts(case.mask))]
    changes += [
        {name: tuple(x for i, x in enumerate(getattr(case, name)) if i != n) for name in fixed[1:3]}
        for n in range(len(case.lengths) if len(case.lengths) > 1 else 0)
    ]
    variants = [dataclasses.replace(case, **change) for change in changes]
    return [c for c in variants if repr(c) != repr(case) and c.rows > 0]


class _Step:
    """The arrays of a step, before and after it; what nobody may look at is NaN."""

    def __init__(self, case: Cached):
        self.rng = rng = np.random.default_rng(case.seed)
        self.case, (batch,) = case, case.shape.batch
        lengths, new = np.array(case.lengths), np.array(case.new)
        self.before = lengths - new
        self.slots = self._slots()
        num_pages = int(self.slots.max()) // max(case.page, 1) + 2
        pool = (num_pages, case.page) if case.page else (batch, case.capacity)
        self.exists = exists = np.arange(case.capacity) < lengths[:, None]
        is_old = np.arange(case.capacity) < self.before[:, None]
        self.full, self.cached, self.expected, self.new = [], [], [], []
        self.scales, self.expected_scales, self.ratios = [], [], []
        starts = np.concatenate([[0], np.cumsum(new)])
        for dim in (case.head_dim, case.value_dim):
            tail = (case.kv_heads, dim)
            slots = rng.standard_normal((pool[0] * pool[1], *tail)).astype(case.dtype)
            if case.quantized:
                # a token of a head is 0, and others are of any size
                size = np.exp2(rng.integers(-4, 4, slots.shape[:-1]))[..., None]
                slots = (slots.astype("f") * (size * (rng.random(size.shape) > 0.1))).astype(
                    case.dtype
                )
            full = np.where(exists[..., None, None], slots[self.slots], np.zeros((), case.dtype))
            rows = [full[b, lengths[b] - new[b] : lengths[b]] for b in range(batch)]
            if case.packed:
                packed = np.full((case.rows, *tail), np.nan, case.dtype)
                packed[: starts[-1]] = np.concatenate(rows)
                self.new.append(packed)
            else:
                padded = np.full((batch, case.rows, *tail), np.nan, case.dtype)
                for b, row in enumerate(rows):
                    padded[b, case.rows - new[b] :] = row
                self.new.append(padded)
            if case.quantized:
                tokens = slots.astype(np.float64)
                slots, scales = _rounded(slots, case.quantized)
                ratios = self._of_slots(tokens / scales.astype(np.float64)[..., None], exists)
                self.ratios.append(ratios.reshape(*pool, *tail))
                for states, kept in ((self.scales, is_old), (self.expected_scales, exists)):
                    state = self._of_slots(scales, kept).reshape(*pool, case.kv_heads)
                    states.append(np.moveaxis(state, 2, 1))
            for states, kept in ((self.cached, is_old), (self.expected, exists)):
                states.append(self._of_slots(slots, kept).reshape(*pool, *tail))
            if case.quantized:
                full = self.stand_for(self.expected[-1], self.expected_scales[-1])
            self.full.append(full)
        self.starts = starts.astype(np.int32)
        self.query = rng.standard_normal((*self.rows_shape, case.shape.q_heads, case.head_dim))
        self.query = self.query.astype(case.dtype)
        self.mask = {} if case.mask is None else case.mask.data(case.shape, rng)
        self.scores = tuple(score.data(case.shape, rng) for score in case.scores)
        sinks = rng.standard_normal(case.shape.q_heads).astype(np.float32)
        self.sinks = sinks if case.sinks else None

    @property
    def data(self) -> tuple:
        """Where requests begin, how many tokens they have, and what masks, scores and sinks read."""
        counts = np.array(self.case.new, np.int32)
        return self.starts, counts, self.mask, self.scores, self.sinks

    @property
    def rows_shape(self) -> tuple[int, ...]:
        case = self.case
        return (case.rows,) if case.packed else (len(case.lengths), case.rows)

    def _slots(self) -> np.ndarray:
        """The slot of each position of each sequence in the memory of the cache, `[B, S]`."""
        case, (batch,) = self.case, self.case.shape.batch
        if not case.page:
            return np.arange(batch * case.capacity).reshape(batch, case.capacity)
        width = case.capacity // case.page
        table = self.rng.permutation(batch * width + 2)[: batch * width].reshape(batch, width)
        # No sequence writes to a page that another has, and both have all of its tokens.
        if case.shared and batch > 1 and min(self.before[:2]) >= case.page:
            table[1, 0] = table[0, 0]
        self.table = table
        inside = np.arange(case.page)
        return (table[..., None] * case.page + inside).reshape(batch, case.capacity)

    def stand_for(self, numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """What the numbers of 8 bits of a cache stand for by position, `[B, S, K, H]`; 0 where nothing is."""
        x = numbers.astype(np.float64) * np.moveaxis(scales, 1, 2).astype(np.float64)[..., None]
        x = x.reshape(-1, *x.shape[2:])[self.slots]
        return np.where(self.exists[..., None, None], x, 0.0)

    def _of_slots(self, slots: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """Those of the positions that are kept, `[B, S]`, and NaN, or what there is for it, elsewhere."""
        state = np.full_like(slots, -128 if slots.dtype == np.int8 else np.nan)
        state[self.slots[kept]] = slots[self.slots[kept]]
        return state

    def cache(self) -> fa.Cache | fa.Pages:
        lengths = self.before.astype(np.int32)
        arrays = [jnp.asarray(x) for x in self.cached]
        scales = [jnp.asarray(x) for x in self.scales]
        if not self.case.page:
            return fa.Cache(*arrays, jnp.asarray(lengths), *scales)
        needed = (
            np.arange(self.table.shape[1]) * self.case.page < np.array(self.case.lengths)[:, None]
        )
        anything = self.rng.choice([-1, 10**6, -(2**31)], self.table.shape)
        table = np.where(needed, self.table, anything).astype(np.int32)
        return fa.Pages(*arrays, jnp.asarray(table), jnp.asarray(lengths), *scales)

    def positions(self) -> tuple[np.ndarray, np.ndarray]:
        """The position of each row of each sequence and whether it is its own, `[B, T]` both."""
        case, rows = self.case, np.arange(self.case.rows)[None]
        lengths = np.array(case.lengths)[:, None]
        if not case.packed:
            position = lengths - case.rows + rows
            return position, np.ones_like(position, bool)
        own = (rows >= self.starts[:-1, None]) & (rows < self.starts[1:, None])
        return lengths - self.starts[1:, None] + rows, own


def _rounded(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[..., H]` in 8 bits, and the scales that they were divided by: what `append` is to do."""
    largest, x = np.float32({"int8": 127, "float8_e4m3fn": 448}[dtype]), x.astype(np.float32)
    scale = np.maximum(np.abs(x).max(-1) / largest, np.float32(2.0**-126)).astype(jnp.bfloat16)
    x = np.clip(x / scale.astype(np.float32)[..., None], -largest, largest)
    return (np.round(x) if dtype == "int8" else x).astype(dtype), scale


def _are_as_near(x: np.ndarray, y: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Where 8-bit numbers are as far from what they stand for as others, but for what float32 or float16 loses."""
    lost = 2.0**-20 if x.dtype == np.int8 else 2.0**-10
    x, y = (abs(z.astype(np.float64) - ratio) for z in (x, y))
    return abs(x - y) <= lost * abs(ratio)


def _call(case: Cached, query: Any, new: Any, cache: Any, data: Any) -> tuple[Any, dict[str, Any]]:
    """The cache with new tokens, and the options of a call on it."""
    starts, counts, mask, scores, sinks = data
    queries = fa.Packed(starts) if case.packed else None
    cache = cache.append(*new, None if case.packed else counts, queries=queries)
    options: dict[str, Any] = {"queries": queries, "scale": case.scale, "sinks": sinks}
    token = masks.DESCRIBE.set(functools.partial(fa.explain, query, cache, **options))
    options["mask"] = None if case.mask is None else case.mask.ours(mask)
    pairs = zip(case.scores, scores, strict=True)
    options["score"] = tuple(score.ours(data) for score, data in pairs)
    masks.DESCRIBE.reset(token)
    return cache, options


def explain(case: Cached, device: Any) -> fa.CachedExplanation:
    """How the step would run on a device, of which none need be there."""
    step, found = _Step(case), []

    def describe(query: Any, new: Any, cache: Any, data: Any) -> None:
        cache, options = _call(case, query, new, cache, data)
        found.append(fa.explain(query, cache, device=device, **options))

    jax.eval_shape(describe, step.query, step.new, step.cache(), step.data)
    return found[0]


def check(case: Cached, implementation: str | None) -> str:
    """Raises AssertionError where the step differs from the dense definition; returns what ran it: on a GPU the
    implementation where it takes the call, and otherwise what is chosen."""
    step = _Step(case)
    cache, chosen = step.cache(), ""

    def run(query: Any, new: Any, cache: Any, data: Any) -> tuple:
        nonlocal chosen
        cache, options = _call(case, query, new, cache, data)
        explain = functools.partial(fa.explain, query, cache, **options)
        try:
            explanation = explain(implementation=implementation)
            options["implementation"] = implementation
        except ValueError:
            if implementation not in FUSED:
                raise
            explanation = explain()
        kernel = " by a kernel that reads them" if explanation.plan.reads_cache else ""
        chosen = f"{explanation.implementation}{kernel}"
        return *fa.cached_attention(query, cache, return_lse=True, **options), cache

    step_on_device = functools.partial(in_shard_map, run) if case.in_shard_map else run
    out, lse, after = jax.jit(step_on_device)(step.query, step.new, cache, step.data)
    names = ("k_scale", "v_scale") if case.quantized else ()
    for name, expected in zip(names, step.expected_scales, strict=True):
        _assert_same(f"cache.{name}", getattr(after, name), expected)
    for i, (name, expected) in enumerate(zip(("key", "value"), step.expected, strict=True)):
        found = np.asarray(getattr(after, name))
        if case.quantized:
            step.full[i] = step.stand_for(found, step.expected_scales[i])
            # XLA's quotient may be the next number of float32 (GPU) or rounded to float16 (CPU): of what is a tie, or
            # nearly, it then takes the other number.
            found = np.where(_are_as_near(found, expected, step.ratios[i]), expected, found)
        _assert_same(f"cache.{name}", found, expected)
    _assert_same("cache.lengths", after.lengths, np.array(case.lengths))
    position, own = step.positions()
    query = (
        step.query
        if not case.packed
        else np.broadcast_to(step.query, (len(own), *step.query.shape))
    )
    a = _inputs(step, query, position, own)
    scale = dense.default_scale(case.head_dim) if case.scale is None else case.scale
    goal, steps = dense.truth(a, case.shape, scale)
    noise, unfused = (
        dense.noise(a, case.shape, scale, goal, steps),
        dense.same_dtype(_as_multiplied(a), case.shape, scale),
    )

    def select(x: np.ndarray, empty: float) -> np.ndarray:
        """Each row of packed queries is its own request's; `x [B, T, N, ...]`."""
        if not case.packed:
            return x
        owned = own.reshape(*own.shape, *[1] * (x.ndim - 2))
        return np.where(
            own.any(0).reshape(-1, *[1] * (x.ndim - 2)), np.where(owned, x, 0).sum(0), empty
        )

    for name, x, empty in (("out", out, 0.0), ("lse", lse, -np.inf)):
        results = [np.asarray(getattr(y, name), np.float64) for y in (goal, unfused, noise)]
        if name == "lse":
            x, *results = (np.swapaxes(y, -1, -2) for y in (x, *results))
        # Rows of no request have no noise.
        expected, same, by_chance = map(select, results, (empty, empty, 0.0))
        size = np.abs(np.where(np.isinf(expected), 0, expected)).max(initial=0.0)
        # What 8 bits stand for is rounded to the dtype of queries, and lse is that of the rounded keys.
        is_exact = name == "lse" and not case.quantized
        twice = 0.0 if is_exact else FACTOR * deviation(same, expected)
        dtype = case.dtype if case.quantized else str(x.dtype)
        rounding = max(FLOOR[dtype] * size, SMALLEST[dtype])
        limit = max(twice, rounding, float(np.max(by_chance, initial=0.0)))
        off = deviation(x, expected)
        assert off <= limit, f"{name} by {chosen}: off by {off:.3g} where {limit:.3g} may be"
    return chosen


def _as_multiplied(a: Inputs) -> Inputs:
    """The inputs with keys and values in the dtype of queries."""
    return a._replace(k=a.k.astype(a.q.dtype), v=a.v.astype(a.q.dtype))


def _inputs(step: _Step, query: np.ndarray, position: np.ndarray, own: np.ndarray) -> Inputs:
    case, shape = step.case, step.case.shape
    i, j = position[:, None, :, None], np.arange(case.capacity)[None, None, None]
    visible = True if case.mask is None else case.mask.dense(shape, step.mask, i, j)
    exists = j < np.array(case.lengths).reshape(-1, 1, 1, 1)
    zeros = np.zeros((*query.shape[:3], case.value_dim))
    return Inputs(
        query,
        *step.full,
        zeros,
        np.moveaxis(zeros[..., 0], 1, 2),
        i,
        j,
        np.broadcast_to(visible & exists & own[:, None, :, None], shape.pairs),
        1.0,
        tuple(zip(case.scores, step.scores, strict=True)),
        step.sinks,
    )


def _assert_same(name: str, x: Any, expected: np.ndarray) -> None:
    x = np.asarray(x)
    same = np.array_equal(x.astype(np.float64), expected.astype(np.float64), equal_nan=True)
    assert same, f"{name} differs from what was appended"
