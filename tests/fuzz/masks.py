"""Masks of random calls: each node is one mask of the library and, in NumPy, what it means.

A node is a frozen dataclass whose repr makes it again. `data` draws its arrays, `ours` is the mask
of the library, `dense` the boolean array `[B, N, T, S]`, written without it.
"""

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from types import FunctionType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from tests.fuzz.shapes import Pick, Shape


def of_queries(x: np.ndarray, start: int, end: int) -> np.ndarray:
    """Data of pairs, `[.., T | 1, S | 1]`, of some queries."""
    return x if x.shape[-2] == 1 else x[..., start:end, :]


class Node:
    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        return {}

    def ours(self, data: Any) -> Any:
        raise NotImplementedError

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        """The data where queries are the tokens from `start` to `end` alone, and keys are all."""
        return data

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        """`i [B|1, 1, T, 1]` and `j [B|1, 1, 1, S]` are the positions."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Causal(Node):
    def ours(self, data: Any) -> Any:
        return fa.Causal()

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return j <= i


@dataclasses.dataclass(frozen=True)
class Window(Node):
    left: int | None
    right: int | None = None  # -1 and None: without an end
    static: bool = True

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        if self.static:
            return {}
        sides = {"left": self.left, "right": self.right}
        return {n: np.int32(x + rng.integers(3)) for n, x in sides.items() if x is not None}

    def ours(self, data: Any) -> Any:
        return fa.Window(data.get("left", self.left), data.get("right", self.right))

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        left, right = data.get("left", self.left), data.get("right", self.right)
        visible = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
        visible &= True if left in (None, -1) else j >= i - left
        return visible & (True if right in (None, -1) else j <= i + right)


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Node):
    size: int

    def ours(self, data: Any) -> Any:
        return fa.SlidingWindow(self.size)

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return (j <= i) & (i - j < self.size)


@dataclasses.dataclass(frozen=True)
class Segments(Node):
    ids: int  # how many
    batched: bool = True

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        lead = shape.batch if self.batched else ()
        ids = np.sort(rng.integers(0, self.ids, (*lead, shape.q_len), np.int32), -1)
        if shape.q_len == shape.kv_len:
            return {"q": ids}
        return {"q": ids, "k": rng.integers(0, self.ids, (*lead, shape.kv_len), np.int32)}

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        return {"q": data["q"][..., start:end], "k": data.get("k", data["q"])}

    def ours(self, data: Any) -> Any:
        return fa.Segments(data["q"], data.get("k"))

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return shape.spread("q", data["q"]) == shape.spread("k", data.get("k", data["q"]))


@dataclasses.dataclass(frozen=True)
class Documents(Node):
    """Also such whose starts and ends mean nothing."""

    length: int  # about
    ends: bool = False
    longest: int | None = None

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        size = (*shape.batch, shape.q_len)
        starts = np.sort(rng.integers(-3, max(shape.kv_len, 1), size, np.int32), -1)
        starts = starts // self.length * self.length
        return {"start": starts} | ({"end": starts + np.int32(self.length)} if self.ends else {})

    def ours(self, data: Any) -> Any:
        return fa.Documents(data["start"], data.get("end"), self.longest)

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        same = shape.q_len == shape.kv_len
        start = shape.spread("q", data["start"])
        visible = j >= (np.minimum(start, i) if same else start)
        if self.longest is not None and same:
            visible = visible & (abs(i - j) < self.longest)
        if "end" not in data:
            return visible
        last = shape.spread("q", data["end"]) - 1
        return visible & (j <= (np.maximum(last, i) if same else last))


EACH = -1  # a length for each batch entry, as an array


@dataclasses.dataclass(frozen=True)
class Lengths(Node):
    q: int | None = None
    k: int | None = EACH

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        sizes = {"q": shape.q_len, "k": shape.kv_len}
        drawn = {n: rng.integers(0, size + 1, shape.batch, np.int32) for n, size in sizes.items()}
        return {n: x for n, x in drawn.items() if getattr(self, n) == EACH}

    def ours(self, data: Any) -> Any:
        return fa.Lengths(data.get("q", self.q), data.get("k", self.k))

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        visible = np.ones((1, 1, 1, 1), bool)
        for side, index in (("q", i), ("k", j)):
            n = getattr(self, side)
            if side in data:
                n = shape.spread(side, data[side][..., None])
            visible = visible if n is None else visible & (index < n)
        return visible


@dataclasses.dataclass(frozen=True)
class Prefix(Node):
    length: int = EACH

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        if self.length != EACH:
            return {}
        return {"n": rng.integers(0, shape.kv_len + 1, shape.batch, np.int32)}

    def ours(self, data: Any) -> Any:
        return fa.Prefix(data.get("n", self.length))

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        n = shape.spread("k", data["n"][..., None]) if data else self.length
        return j < n


@dataclasses.dataclass(frozen=True)
class Chunked(Node):
    size: int

    def ours(self, data: Any) -> Any:
        return fa.Chunked(self.size)

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return np.floor_divide(i, self.size) == np.floor_divide(j, self.size)


@dataclasses.dataclass(frozen=True)
class Dense(Node):
    axes: str = "bnts"  # those that it has; the others have size 1
    share: float = 0.5  # of pairs that see each other

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        return {"array": rng.random(shape.of_pairs(self.axes)) < self.share}

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        return {"array": of_queries(data["array"], start, end)}

    def ours(self, data: Any) -> Any:
        return fa.Dense(data["array"])

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return shape.spread("pairs", data["array"])


# Functions of two tokens in Python's operators alone: they run on scalars as on NumPy's arrays.
def dilated(q: Any, k: Any) -> Any:
    return (abs(q.index - k.index) % 3 == 0) | (k.index < 2)


def image(q: Any, k: Any) -> Any:
    return (q.index >= k.index) | ((q.image == k.image) & (q.image >= 0))


def reach(q: Any, k: Any, c: Any) -> Any:
    return (q.index - k.index <= c.reach) & (k.index - q.index < 2 * c.reach - 3)


def stripes(q: Any, k: Any, c: Any) -> Any:
    return (k.index // 4 + c.shift) % 2 == (q.index // 8) % 2


def warm(q: Any, k: Any, c: Any) -> Any:
    return (q.x * 2.0 > k.x - c.z) ^ (k.index % 5 == 1)


def waits(q: Any, k: Any, c: Any) -> Any:
    truth = k.index % 3 == 0
    wait = (jnp if isinstance(truth, jax.Array) else np).where(truth, c.wait, -5)
    return q.index - k.index >= wait


def allowed(q: Any, k: Any, c: Any) -> Any:
    return c.allowed & (q.index != k.index)


FUNCTIONS: dict[str, tuple[Callable, Callable]] = {
    "dilated": (dilated, lambda s, r: {}),
    "image": (
        image,
        lambda s, r: {
            "q_tokens": {"image": r.integers(-1, 3, (*s.batch, s.q_len), np.int32)},
            "k_tokens": {"image": r.integers(-1, 3, (*s.batch, s.kv_len), np.int32)},
        },
    ),
    "reach": (reach, lambda s, r: {"heads": {"reach": r.integers(0, 20, s.q_heads, np.int32)}}),
    "stripes": (stripes, lambda s, r: {"params": {"shift": np.int32(r.integers(4))}}),
    "waits": (waits, lambda s, r: {"params": {"wait": np.int32(r.integers(-40, 40))}}),
    "warm": (
        warm,
        lambda s, r: {
            "q_tokens": {"x": r.standard_normal(s.q_len).astype(np.float32)},
            "k_tokens": {"x": r.standard_normal((*s.batch, s.kv_len)).astype(np.float32)},
            "params": {"z": np.float32(r.standard_normal())},
        },
    ),
    "allowed": (allowed, lambda s, r: {"pairs": {"allowed": r.random(s.of_pairs("bts")) < 0.6}}),
}
KINDS = {"q_tokens": "q", "k_tokens": "k", "heads": "heads", "params": "params", "pairs": "pairs"}


@dataclasses.dataclass(frozen=True)
class Function(Node):
    name: str

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        return FUNCTIONS[self.name][1](shape, rng)

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        cuts = {
            "q_tokens": lambda x: x[..., start:end],
            "pairs": lambda x: of_queries(x, start, end),
        }
        return {
            kind: {n: cuts.get(kind, lambda x: x)(x) for n, x in arrays.items()}
            for kind, arrays in data.items()
        }

    def ours(self, data: Any) -> Any:
        return fa.mask_fn(FUNCTIONS[self.name][0])(**data)

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        views = {"q": {"index": i}, "k": {"index": j}, "c": {}}
        for kind, arrays in data.items():
            view = views.get(kind[0] if "tokens" in kind else "c", views["c"])
            view.update({n: shape.spread(KINDS[kind], x) for n, x in arrays.items()})
        q, k, c = (SimpleNamespace(**view) for view in views.values())
        fn = FUNCTIONS[self.name][0]
        return fn(q, k, c) if fn.__code__.co_argcount == 3 else fn(q, k)


# What a mask of `Reads` says where its number is a global, a cell, a default, or of an object.
def near_global(q: Any, k: Any) -> Any:
    return abs(q.index - k.index) <= LIMIT  # noqa: F821, of `changed`'s globals


def near_default(q: Any, k: Any, c: Any, limit: int = 0) -> Any:
    return abs(q.index - k.index) <= limit


def near_called(q: Any, k: Any) -> Any:
    return near_global(q, k)


class Near:
    limit = 0

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __call__(self, q: Any, k: Any) -> Any:
        return abs(q.index - k.index) <= self.limit

    def method(self, q: Any, k: Any) -> Any:
        return self(q, k)


def _in_cell(limit: int) -> Callable:
    def near(q: Any, k: Any) -> Any:
        return abs(q.index - k.index) <= limit

    return near


def _by(where: str, thing: Near) -> Any:
    def by_item(q: Any, k: Any) -> Any:
        return abs(q.index - k.index) <= thing["limit"]

    def by_attribute(q: Any, k: Any) -> Any:
        return abs(q.index - k.index) <= by_attribute.limit  # pyright: ignore

    return by_item if where == "item" else by_attribute


def changed(where: str, limit: int, before: Callable) -> Callable:
    """A function that reads `limit`, after `before(fn)` has seen it read another number."""
    other = limit + 1
    if where in ("global", "called"):
        names: dict[str, Any] = {"LIMIT": other}
        names["near_global"] = FunctionType(near_global.__code__, names)
        fn = FunctionType((near_global if where == "global" else near_called).__code__, names)
        before(fn)
        names["LIMIT"] = limit
    elif where == "cell":
        fn = _in_cell(other)
        before(fn)
        fn.__closure__[0].cell_contents = limit
    elif where == "default":
        fn = FunctionType(near_default.__code__, {}, argdefs=(other,))
        before(fn)
        fn.__defaults__ = (limit,)
    elif where in ("item", "attribute"):
        thing = Near()
        fn = _by(where, thing)
        holder = fn if where == "attribute" else thing
        holder.limit = other
        before(fn)
        holder.limit = limit
    else:
        thing = Near()
        thing.limit = other
        fn = thing if where == "object" else thing.method
        before(fn)
        thing.limit = limit
    return fn


# Describes a call with these options: the one that is about to be made, as another would be traced anew.
DESCRIBE: ContextVar[Callable] = ContextVar("DESCRIBE", default=lambda **options: None)
READ_FROM = "global", "called", "cell", "default", "object", "method", "item", "attribute"


@dataclasses.dataclass(frozen=True)
class Reads(Node):
    """A user's function that has been called before what it reads was changed."""

    where: str = "global"
    limit: int = 3

    def ours(self, data: Any) -> Any:
        def before(fn: Any) -> None:
            DESCRIBE.get()(mask=fn)

        return fa.mask_fn(changed(self.where, self.limit, before))

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return abs(i - j) <= self.limit


@dataclasses.dataclass(frozen=True)
class And(Node):
    left: Node
    right: Node

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        return self.left.data(shape, rng), self.right.data(shape, rng)

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        return self.left.slice_data(data[0], start, end), self.right.slice_data(data[1], start, end)

    def ours(self, data: Any) -> Any:
        return self.left.ours(data[0]) & self.right.ours(data[1])

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return self.left.dense(shape, data[0], i, j) & self.right.dense(shape, data[1], i, j)


@dataclasses.dataclass(frozen=True)
class Or(And):
    def ours(self, data: Any) -> Any:
        return self.left.ours(data[0]) | self.right.ours(data[1])

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return self.left.dense(shape, data[0], i, j) | self.right.dense(shape, data[1], i, j)


@dataclasses.dataclass(frozen=True)
class Not(Node):
    mask: Node

    def data(self, shape: Shape, rng: np.random.Generator) -> Any:
        return self.mask.data(shape, rng)

    def slice_data(self, data: Any, start: int, end: int) -> Any:
        return self.mask.slice_data(data, start, end)

    def ours(self, data: Any) -> Any:
        return ~self.mask.ours(data)

    def dense(self, shape: Shape, data: Any, i: Any, j: Any) -> Any:
        return ~self.mask.dense(shape, data, i, j)


def _leaf(pick: Pick) -> Node:
    kind = pick(
        (
            Causal,
            Window,
            SlidingWindow,
            Segments,
            Documents,
            Lengths,
            Prefix,
            Chunked,
            Dense,
            Function,
            Reads,
        )
    )
    if kind is Reads:
        return Reads(pick(READ_FROM), pick((3, 0, 20)))
    if kind is Causal:
        return Causal()
    if kind is SlidingWindow:
        return SlidingWindow(pick((1, 2, 20, 2**31 - 1)))
    if kind is Window:
        return Window(pick((0, 1, 3, 20, 2**31 - 1, -1)), pick((None, 0, 5, -1)))
    if kind is Segments:
        return Segments(pick((2, 4, 1)), pick((True, False)))
    if kind is Documents:
        return Documents(pick((5, 1, 40)), pick((False, True)), pick((None, 7)))
    if kind is Lengths:
        return Lengths(pick((None, EACH, 20)), pick((EACH, 10, None)))
    if kind is Prefix:
        return Prefix(pick((EACH, 0, 3)))
    if kind is Chunked:
        return Chunked(pick((1, 7, 16)))
    if kind is Dense:
        return Dense(pick(("bnts", "ts", "bts", "nts", "ns", "bt", "b")), pick((0.5, 0.05, 0.95)))
    return Function(pick(tuple(FUNCTIONS)))


def draw(pick: Pick, depth: int = 3) -> Node:
    join = pick((None, And, Or, Not)) if depth else None
    if join is None:
        leaf = _leaf(pick)
        if isinstance(leaf, Window) and leaf.left < 100:
            return dataclasses.replace(leaf, static=pick((True, False)))
        return leaf
    if join is Not:
        return Not(draw(pick, depth - 1))
    return join(draw(pick, depth - 1), draw(pick, depth - 1))


def parts(mask: Node) -> list[Node]:
    """The masks that a mask is made of."""
    return [x for x in vars(mask).values() if isinstance(x, Node)]
