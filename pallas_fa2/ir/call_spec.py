"""`CallSpec`, the frozen, hashable and printable description of one call, and its `Operands`."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa2.ir.arrays import slice_tile
from pallas_fa2.ir.trace import TracedFn


def split_floats(data: tuple) -> tuple[list, Any]:
    """Return the floating-point leaves of a pytree, and a function that returns the pytree with new ones."""
    leaves, tree = jax.tree.flatten(data)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]

    def rebuild(floats: list) -> tuple:
        it = iter(floats)
        merged = [next(it) if f else x for x, f in zip(leaves, is_float, strict=True)]
        return jax.tree.unflatten(tree, merged)

    return [x for x, f in zip(leaves, is_float, strict=True) if f], rebuild


# A row whose scores are all at or below this, by score functions, attends to no key, as if they were -inf. Additive
# masks use -1e9 or -1e10 for this, where adjacent values of float32 are 64 or 1024 apart.
MASKED_SCORE_THRESHOLD = -(2.0**26)


class Operands(NamedTuple):
    """The arrays of a call beside query, key and value, each with the leading axes `[B, K, G, T, S]`."""

    mask: Any = None
    scores: tuple = ()
    q_index: jax.Array | None = None
    k_index: jax.Array | None = None
    seed: jax.Array | None = None  # uint32[2], for dropout
    # int32, the indices of heads among those of all batch entries, for dropout, where they are not 0, 1, 2, ...
    head_index: jax.Array | None = None

    def slice_tile(self, q_start: Any, q_size: int, k_start: Any, k_size: int) -> "Operands":
        """Slice all arrays to a tile of queries and keys."""
        arrays = self._replace(seed=None)
        tile = jax.tree.map(lambda x: slice_tile(x, q_start, q_size, k_start, k_size), arrays)
        return tile._replace(seed=self.seed)


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """One call, with its batch axes merged.

    `causal` is set if the mask is exactly causal over the positions 0, 1, 2, ...: a kernel then need not evaluate
    `mask`.
    """

    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    scale: float
    mask: TracedFn | None = None
    mask_varies_by_head: bool = False
    scores: tuple[TracedFn, ...] = ()
    causal: Literal["start", "end"] | None = None
    has_explicit_positions: bool = False  # positions are arrays in the operands
    dropout_rate: float = 0.0
    deterministic: bool = False  # gradients are bitwise the same in every run
    first_position: int = 0  # the position of query 0 if positions are not explicit, for dropout
    # The `CheckedCall` that this describes, without arrays: the masks and scores of which `mask` and `scores` are the
    # code, so that a part of the call can be traced. A spec is equal to another whatever they are.
    source: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def codes(self) -> tuple[TracedFn, ...]:
        """The code of the mask, if there is one, and of the scores."""
        return *(() if self.mask is None else (self.mask,)), *self.scores

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def has_known_lengths(self) -> bool:
        """Whether T and S are integers, not symbols of `jax.export`."""
        return isinstance(self.q_len, int) and isinstance(self.kv_len, int)

    @property
    def has_general_mask(self) -> bool:
        """Whether there is a mask that is not known to be causal."""
        return self.mask is not None and self.causal is None

    @property
    def is_plain(self) -> bool:
        """Whether there is no mask but a causal one, no score function and no dropout."""
        return not (self.has_general_mask or self.scores or self.dropout_rate)

    @property
    def has_only_mask(self) -> bool:
        """Whether there is a mask that is not causal, and no score function or dropout."""
        return self.has_general_mask and not (self.scores or self.dropout_rate)

    @property
    def accumulator(self) -> np.dtype:
        """The dtype of scores, softmax statistics and accumulators: float32, or float64 for float64."""
        return accumulator_dtype(self.dtype)

    @property
    def text(self) -> str:
        """A text that differs wherever the call does, with the code of masks and scores, the same in every process."""
        described = dataclasses.replace(self, mask=None, scores=())
        return repr((described, [f and f.key for f in (self.mask, *self.scores)]))

    def __str__(self) -> str:
        fields = [
            (
                f"{self.dtype.name} [B {self.batch}, T {self.q_len}, S {self.kv_len}, "
                f"N {self.q_heads}, K {self.kv_heads}, H {self.head_dim}, Hv {self.value_dim}]"
            ),
            f"scale {self.scale:g}",
        ]
        if self.mask is not None:
            fields.append(f"mask {self.mask}")
        if self.scores:
            fields.append("score " + ", ".join(map(str, self.scores)))
        if self.dropout_rate:
            fields.append(f"dropout {self.dropout_rate:g}")
        if self.deterministic:
            fields.append("deterministic")
        return ", ".join(fields)


def accumulator_dtype(dtype: np.dtype) -> np.dtype:
    return np.promote_types(dtype, np.float32) if dtype.kind == "f" else np.dtype(np.float32)


def reads_query_positions(spec: CallSpec) -> bool:
    """Return whether the code of the mask or of a score reads `q.index`."""
    # The arguments of a mask's code are (q.index, k.index, data), of a score's (s, q.index, k.index, data).
    codes = [(spec.mask, 0), *((score, 1) for score in spec.scores)]
    return any(code is not None and reads_argument(code, argument) for code, argument in codes)


def reads_argument(code: TracedFn, argument: int) -> bool:
    """Return whether traced code reads one of its arguments."""
    jaxpr = code.jaxpr.jaxpr
    variables = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
    return any(v is jaxpr.invars[argument] for v in variables)
