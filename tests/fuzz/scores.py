"""Score functions of random calls: each is one of the library's or a user's, and its derivatives.

`dense` gives, in NumPy, the new scores, their derivative by the old ones, and by each of the data.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

import pallas_fa2 as fa
from tests.fuzz import masks
from tests.fuzz.masks import of_queries
from tests.fuzz.shapes import Pick, Shape


class Score:
    kinds: dict[str, str] = {}  # noqa: RUF012

    def data(self, shape: Shape, rng: np.random.Generator) -> dict:
        return {}

    def slice_data(self, data: dict, start: int, end: int) -> dict:
        """The data where queries are the tokens from `start` to `end` alone, and keys are all."""
        cuts = {
            "q": lambda x: x[..., start:end],
            "pairs": lambda x: of_queries(x, start, end),
        }
        return {n: cuts.get(self.kinds[n], lambda x: x)(x) for n, x in data.items()}

    def ours(self, data: dict) -> Any:
        raise NotImplementedError

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        raise NotImplementedError


def learned_cap(s: Any, q: Any, k: Any, c: Any) -> Any:
    return c.cap * jnp.tanh(s / c.cap)


def tempered(s: Any, q: Any, k: Any, c: Any) -> Any:
    return (s + c.shift) / (q.heat * k.gain)


def half_if(near: Any, s: Any, q: Any, k: Any) -> Any:
    return jnp.where(near(q, k), s * 0.5, s)


def halved_after(s: Any, q: Any, k: Any) -> Any:
    return jnp.where(k.index > q.index, s * 0.5, s)


@dataclasses.dataclass(frozen=True)
class SoftCap(Score):
    cap: float = 2.0

    def ours(self, data: dict) -> Any:
        return fa.soft_cap(self.cap)

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        t = np.tanh(s / self.cap)
        return self.cap * t, 1 - t**2, {}


@dataclasses.dataclass(frozen=True)
class LearnedCap(Score):
    kinds = {"cap": "params"}  # noqa: RUF012

    def data(self, shape: Shape, rng: np.random.Generator) -> dict:
        return {"cap": np.float32(1 + rng.random())}

    def ours(self, data: dict) -> Any:
        return fa.score_fn(learned_cap)(params=data)

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        cap = data["cap"]
        t = np.tanh(s / cap)
        return cap * t, 1 - t**2, {"cap": t - s / cap * (1 - t**2)}


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    dtype: str = "float32"
    kinds = {"slope": "heads"}  # noqa: RUF012

    def data(self, shape: Shape, rng: np.random.Generator) -> dict:
        return {"slope": (rng.random(shape.q_heads) / 10).astype(self.dtype)}

    def ours(self, data: dict) -> Any:
        return fa.alibi(data["slope"])

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        distance = np.abs(i - j)
        return s - data["slope"] * distance, np.ones_like(s), {"slope": -distance}


@dataclasses.dataclass(frozen=True)
class Bias(Score):
    axes: str = "bnts"
    dtype: str = "float32"
    kinds = {"bias": "pairs"}  # noqa: RUF012

    def data(self, shape: Shape, rng: np.random.Generator) -> dict:
        return {"bias": rng.standard_normal(shape.of_pairs(self.axes)).astype(self.dtype)}

    def ours(self, data: dict) -> Any:
        return fa.bias(data["bias"])

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        return s + data["bias"], np.ones_like(s), {"bias": np.ones_like(s)}


@dataclasses.dataclass(frozen=True)
class Temper(Score):
    """A division by data of the tokens: where padding would be 0, this would not be finite."""

    kinds = {"heat": "q", "gain": "k", "shift": "params"}  # noqa: RUF012

    def data(self, shape: Shape, rng: np.random.Generator) -> dict:
        return {
            "heat": (0.5 + rng.random((*shape.batch, shape.q_len))).astype(np.float32),
            "gain": (0.5 + rng.random(shape.kv_len)).astype(np.float32),
            "shift": np.float32(rng.standard_normal()),
        }

    def ours(self, data: dict) -> Any:
        return fa.score_fn(tempered)(
            q_tokens={"heat": data["heat"]},
            k_tokens={"gain": data["gain"]},
            params={"shift": data["shift"]},
        )

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        by = 1 / (data["heat"] * data["gain"])
        new = (s + data["shift"]) * by
        return new, by, {"heat": -new / data["heat"], "gain": -new / data["gain"], "shift": by}


@dataclasses.dataclass(frozen=True)
class Relative(Score):
    """Later keys count by half: reads positions alone."""

    def ours(self, data: dict) -> Any:
        return fa.score_fn(halved_after)

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        factor = np.where(j > i, 0.5, 1.0).astype(s.dtype)
        return s * factor, factor, {}


@dataclasses.dataclass(frozen=True)
class Reads(Score):
    """A user's function that has been called before what it reads was changed: later keys count less."""

    where: str = "global"
    limit: int = 3

    def ours(self, data: dict) -> Any:
        def before(near: Any) -> None:
            masks.DESCRIBE.get()(score=functools.partial(half_if, near))

        return fa.score_fn(
            functools.partial(half_if, masks.changed(self.where, self.limit, before))
        )

    def dense(self, s: Any, i: Any, j: Any, data: dict) -> tuple[Any, Any, dict]:
        factor = np.where(abs(i - j) <= self.limit, 0.5, 1.0).astype(s.dtype)
        return s * factor, factor, {}


def draw(pick: Pick) -> tuple[Score, ...]:
    def one() -> Score:
        kind = pick((SoftCap, LearnedCap, Alibi, Bias, Temper, Relative, Reads))
        if kind is Alibi:
            return Alibi(pick(("float32", "bfloat16")))
        if kind is Bias:
            axes = pick(("bnts", "ts", "bts", "nts", "ns", "bt", ""))
            return Bias(axes, pick(("float32", "bfloat16")))
        if kind is Reads:
            where = tuple(x for x in masks.READ_FROM if x != "default")  # takes c
            return Reads(pick(where), pick((3, 0, 20)))
        return kind()

    return tuple(one() for _ in range(pick((0, 0, 0, 1, 1, 2))))
