"""The sizes of a random call, and where data of each kind lies among its pairs of tokens."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Pick = Callable[[Sequence], Any]


class Shape(NamedTuple):
    batch: tuple[int, ...]
    q_len: int
    kv_len: int
    q_heads: int

    @property
    def pairs(self) -> tuple[int, int, int, int]:
        return math.prod(self.batch), self.q_heads, self.q_len, self.kv_len

    def of_pairs(self, axes: str) -> tuple[int, ...]:
        """`[*B, N, T, S]` with axes of size 1, and without a batch where `axes` has no b, unless it is needed to
        tell heads from batch entries."""
        sizes = zip("nts", (self.q_heads, self.q_len, self.kv_len), strict=True)
        either = (1,) if "n" in axes and self.batch == (self.q_heads,) else ()
        return (
            *(self.batch if "b" in axes else either),
            *(n if a in axes else 1 for a, n in sizes),
        )

    def spread(self, kind: str, x: Any) -> np.ndarray:
        """Data of one kind as `[B | 1, N | 1, T | 1, S | 1]`."""
        x = np.asarray(x)
        if kind == "params":
            return x.reshape(1, 1, 1, 1)
        if kind == "heads":
            return x.reshape(1, -1, 1, 1)
        rest = 3 if kind == "pairs" else 1
        tail = x.shape[x.ndim - rest :]
        x = np.broadcast_to(x, self.batch + tail).reshape(-1, *tail)
        if kind == "pairs":
            return x
        return x[:, None, :, None] if kind == "q" else x[:, None, None, :]

    def gather(self, kind: str, x: np.ndarray, like: np.ndarray, over: Callable) -> np.ndarray:
        """`x [B, N, T, S]` reduced by `over` to the shape of data of one kind: spread's adjoint."""
        x = np.broadcast_to(x, self.pairs)
        if kind == "params":
            return over(x)
        if kind == "heads":
            return over(x, (0, 2, 3))
        x = x.reshape(*self.batch, *self.pairs[1:])
        if kind != "pairs":
            x = over(x, (-3, -1) if kind == "q" else (-3, -2))
        x = over(x, tuple(range(x.ndim - like.ndim)))
        shared = tuple(i for i, n in enumerate(like.shape) if n == 1)
        return over(x, shared).reshape(like.shape)


def shown(case: Any) -> str:
    """A dataclass as the line that makes it again, without what is as by default."""
    fields = ((f, getattr(case, f.name)) for f in dataclasses.fields(case))
    fields_text = (f"{f.name}={_literal(x)}" for f, x in fields if repr(x) != repr(f.default))
    return f"{type(case).__name__}({', '.join(fields_text)})"


def _literal(x: Any) -> str:
    return f"float('{x}')" if isinstance(x, float) and not np.isfinite(x) else repr(x)
