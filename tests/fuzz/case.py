"""A random call of attention. The repr of a `Case` is the line that makes it again."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tests.fuzz import masks
from tests.fuzz import scores as score_functions
from tests.fuzz.dense import Inputs, default_scale, dropout
from tests.fuzz.shapes import Pick, Shape, shown

MAPPED = 2  # entries of the axis that vmap or scan adds
WITH_AXES = ("vmap of grad", "grad of vmap", "scan")
TRANSFORMS = ("jit", "jit", "shard_map", *WITH_AXES, "checkpoint")


class Arguments(NamedTuple):
    """The arrays that a call differentiates (the first five) or reads, in the user's shapes."""

    q: Any
    k: Any
    v: Any
    scores: tuple
    sinks: Any  # or None
    positions: dict  # q or k
    mask: Any
    key: Any  # for dropout


class Cotangents(NamedTuple):
    out: Any
    lse: Any


@dataclasses.dataclass(frozen=True, repr=False)
class Case:
    seed: int = 0
    batch: tuple[int, ...] = ()
    q_len: int = 1
    kv_len: int = 1
    kv_heads: int = 1
    group: int = 1
    head_dim: int = 8
    value_dim: int = 8
    dtype: str = "float32"
    mask: masks.Node | None = None
    scores: tuple[score_functions.Score, ...] = ()
    sinks: str = ""  # their dtype, where there are any
    scale: float | None = None
    dropout: float = 0.0
    positions: str = ""  # sides that have them given: q, k, or Q, K for each batch entry its own
    align: str = "start"  # where the queries lie among the keys, if their positions are not given
    lse: bool = True  # asked for, with a cotangent of its own
    transform: str = "jit"  # or checkpoint, shard_map, scan, vmap of grad, grad of vmap
    axes: tuple[int | None, ...] = (0, 0, 0, 0)  # of q, k, v and all other data, where mapped
    layout: str = "plain"  # or swapped, sliced: how q, k and v lie in memory
    blocks: tuple[int, int] = (64, 64)  # of the blockwise implementation
    poison: float = float("nan")
    asks_first: bool = False  # of the mask, where Hopper runs it, however little that saves
    whole_heads: bool = False  # in the backward of Hopper where it can, however slow
    stores_first: bool = False  # likewise, the first of a row's dQ
    made: str = "fresh"  # or pickled, copied: masks and scores
    rise: float = 0.0  # the last key is 2^rise times as large as the first, and so are scores
    deterministic: bool = False  # gradients

    def __repr__(self) -> str:
        return shown(self)

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.q_len, self.kv_len, self.kv_heads * self.group)

    @property
    def mapped(self) -> bool:
        return self.transform in WITH_AXES

    @property
    def softmax_scale(self) -> float:
        return default_scale(self.head_dim) if self.scale is None else self.scale

    @property
    def mapped_axes(self) -> Arguments:
        """The axis of each argument that vmap or scan maps; all data share one, the key has none."""
        return Arguments(*self.axes, *[self.axes[3]] * 3, None)

    def entries(self) -> list[tuple[Arguments, Cotangents]]:
        """The arguments of every mapped call; what is not mapped is one array in all of them."""
        drawn = [self._draw(np.random.default_rng((self.seed, m))) for m in range(1 + self.mapped)]
        (first, _), *_ = drawn

        def entry(args: Arguments) -> Arguments:
            each = zip(self.mapped_axes, first, args, strict=True)
            return Arguments(*(one if axis is None else own for axis, one, own in each))

        return [(entry(args), cotangents) for args, cotangents in drawn]

    def _draw(self, rng: np.random.Generator) -> tuple[Arguments, Cotangents]:
        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal((*self.batch, *shape)).astype(self.dtype)

        shape = self.shape
        q = normal(self.q_len, shape.q_heads, self.head_dim)
        k = normal(self.kv_len, self.kv_heads, self.head_dim)
        k *= np.exp2(np.linspace(0.0, self.rise, self.kv_len)).astype(self.dtype)[:, None, None]
        v = normal(self.kv_len, self.kv_heads, self.value_dim)
        dout = normal(self.q_len, shape.q_heads, self.value_dim)
        dlse = rng.standard_normal((*self.batch, shape.q_heads, self.q_len))
        dlse = dlse.astype(np.float64 if self.dtype == "float64" else np.float32)
        sizes = {"q": self.q_len, "k": self.kv_len}
        positions = {}
        for side in self.positions:
            start = rng.integers(-5, 50, (*self.batch, 1) if side.isupper() else (1,))
            positions[side.lower()] = np.int32(rng.permutation(sizes[side.lower()]) + start)
        mask = {} if self.mask is None else self.mask.data(shape, rng)
        data = tuple(score.data(shape, rng) for score in self.scores)
        if self.dtype == "float64":  # scores are, too, and nothing is promoted
            data = tuple({n: np.float64(x) for n, x in d.items()} for d in data)
        sinks = self._draw_sinks(rng) if self.sinks else None
        key = np.array([self.seed, 12345], np.uint32)
        return Arguments(q, k, v, data, sinks, positions, mask, key), Cotangents(dout, dlse)

    def _draw_sinks(self, rng: np.random.Generator) -> np.ndarray:
        """Return sinks, of which some are minus infinity, which is none."""
        sinks = 2 * rng.standard_normal(self.shape.q_heads)
        return np.where(rng.random(sinks.shape) < 0.2, -np.inf, sinks).astype(self.sinks)

    def inputs(self, args: Arguments, cotangents: Cotangents) -> Inputs:
        """Return the inputs of the dense definition: batch axes are merged, the mask is an array."""
        shape = self.shape
        batch = shape.pairs[0]
        first = self.kv_len - self.q_len if self.align == "end" else 0
        places = {"q": np.arange(self.q_len) + first, "k": np.arange(self.kv_len)}
        places |= args.positions
        i, j = (shape.spread(side, places[side]).astype(np.int64) for side in "qk")
        visible = True if self.mask is None else self.mask.dense(shape, args.mask, i, j)
        merged = (x.reshape(batch, *x.shape[-3:]) for x in (*args[:3], cotangents.out))
        dlse = cotangents.lse.reshape(batch, shape.q_heads, self.q_len) * self.lse
        return Inputs(
            *merged,
            dlse,
            i,
            j,
            np.broadcast_to(visible, shape.pairs),
            dropout(self.dropout, args.key, shape, i, j),
            tuple(zip(self.scores, args.scores, strict=True)),
            args.sinks,
        )


LENGTHS = (1, 2, 3, 7, 16, 17, 31, 33, 64, 65, 100, 111, 129, 200, 257, 300)
DIMS = (8, 16, 24, 64, 40)
SINKS = ("", "", "", "float32", "bfloat16")
RISES = (0.0, 0.0, 0.0, 0.0, 4.0, 7.0)
PLAIN_MASKS = (None, masks.Causal())


def draw(pick: Pick, for_hopper: bool = False) -> Case:
    """A case from a sequence of choices, the simplest first. `pick` makes each of them."""
    if for_hopper and pick((True, True, False)):
        return _draw_for_hopper(pick)
    q_len, kv_len = pick(LENGTHS), pick(LENGTHS)
    kv_len = q_len if pick((False, False, True)) else kv_len
    # A bound on the pairs: the dense definition is to take milliseconds.
    few = q_len * kv_len > 20_000
    transform = pick(TRANSFORMS)
    scores = score_functions.draw(pick)
    positions = pick(("", "", "", "q", "k", "Q", "QK"))
    return Case(
        seed=pick(range(1000)),
        batch=pick(((), (1,), (2,)) if few else ((), (2,), (3,), (2, 2), (1, 3), (2, 1))),
        q_len=q_len,
        kv_len=kv_len,
        kv_heads=pick((1, 2)),
        group=pick((1, 2) if few else (1, 2, 3)),
        head_dim=pick(DIMS),
        value_dim=pick(DIMS),
        dtype=pick(("float32", "float32", "bfloat16", "float16", "float64")),
        mask=masks.draw(pick) if pick((False, True, True, True, True)) else None,
        scores=scores,
        scale=pick((None, None, None, 1.0, 0.3, -0.3, 0.0)),
        dropout=pick((0.0, 0.0, 0.0, 0.2, 0.9)),
        positions=positions,
        align="start" if "q" in positions.lower() else pick(("start", "start", "end")),
        **_surroundings(pick, transform),
        blocks=(pick((64, 32, 16, 8, 40)), pick((64, 32, 16, 8, 40))),
        sinks=pick(SINKS),
        rise=pick(RISES),
        deterministic=pick((False, False, True)),
    )


def _draw_for_hopper(pick: Pick) -> Case:
    """Return a case for the sm90 kernels, with few enough sizes that compiled kernels recur."""
    q_len, kv_len = pick(LENGTHS), pick(LENGTHS)
    transform = pick(TRANSFORMS)
    dim = pick((64, 128, 96, 256, 8, 80, 192))
    positions = pick(("",) * 8 + ("q", "k", "Q", "QK"))
    return Case(
        seed=pick(range(1000)),
        batch=pick(((), (2,), (2, 2))),
        q_len=q_len,
        kv_len=pick((q_len, kv_len)),
        kv_heads=pick((1, 2)),
        group=pick((1, 2, 3)),
        head_dim=dim,
        value_dim=pick((dim, 64, 128)),
        dtype=pick(("bfloat16", "float16", "float32")),
        mask=pick(PLAIN_MASKS) if pick((True, False)) else masks.draw(pick),
        scores=score_functions.draw(pick) if pick((False, False, True)) else (),
        scale=pick((None, None, 0.3, 1.0)),
        dropout=pick((0.0,) * 6 + (0.2, 0.9)),
        positions=positions,
        align="start" if "q" in positions.lower() else pick(("start", "end")),
        **_surroundings(pick, transform),
        sinks=pick(SINKS),
        asks_first=pick((False, True)),
        rise=pick(RISES),
        whole_heads=pick((False, True)),
        stores_first=pick((False, True)),
        deterministic=pick((False, False, True)),
    )


def _surroundings(pick: Pick, transform: str) -> dict[str, Any]:
    """How the call is transformed and how its inputs lie in memory."""
    axes = tuple(pick((0, 0, None, 1, -1)) for _ in range(3)) if transform in WITH_AXES else ()
    axes = (*axes, pick((0, None))) if axes else (0, 0, 0, 0)
    if transform == "scan":  # which takes the first axis alone
        axes = tuple(a if a is None else 0 for a in axes)
    return {
        "lse": pick((True, True, False)),
        "transform": transform,
        "axes": axes if any(a is not None for a in axes[:3]) else (0, *axes[1:]),
        "made": pick(("fresh", "fresh", "pickled", "copied")),
        "layout": pick(("plain", "plain", "swapped", "sliced")),
        "poison": pick((float("nan"), float("inf"), 1e30, float("-inf"))),
    }


def simpler(case: Case) -> list[Case]:
    """Cases with one thing less."""
    changes: list[dict[str, Any]] = []
    if case.align != "start":
        changes += [{"align": "start"}]
    if case.mask is not None:
        changes += [{"mask": m} for m in (None, *masks.parts(case.mask))]
    for n in range(len(case.scores)):
        changes.append({"scores": case.scores[:n] + case.scores[n + 1 :]})
    for field in dataclasses.fields(case):
        if field.name not in ("mask", "scores", "seed"):
            changes.append({field.name: field.default})
    for name in ("q_len", "kv_len"):
        n = getattr(case, name)
        changes += [{name: m} for m in (n // 2, n - 1) if m > 1]
    made = [dataclasses.replace(case, **change) for change in changes]
    return [c for c in made if repr(c) != repr(case)]
