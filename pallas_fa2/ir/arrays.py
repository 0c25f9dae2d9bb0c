"""Auxiliary arrays of masks and scores with the leading axes `[B, K, G, T, S]`.

Masks and scores are scalar functions of one query token and one key token. The arrays that they read have five
leading axes (batch, key head, query head within its group, query, key), each of its full size or 1, so that slicing
a tile, batching and the reduction of a gradient are the same for all of them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa2.ir.mesh import match_varying_axes
from pallas_fa2.ir.tokens import Arrays, Context, Token


def default_positions(length: int, axis: int) -> jax.Array:
    shape = [1] * NUM_LEADING_AXES
    shape[axis] = length
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


NUM_LEADING_AXES = 5  # B, K, G, T, S
Q_AXIS, K_AXIS = 3, 4


class CallShape(NamedTuple):
    """Sizes of one call: `batch` is the user's batch shape, `group` query heads share a key head."""

    batch: tuple[int, ...]
    q_len: int
    kv_len: int
    kv_heads: int
    group: int


def check_align(align: Any, dims: CallShape) -> Any:
    """The position of the first query among the keys: 0, or S - T where the last ones lie side by side."""
    if align not in ("start", "end"):
        raise ValueError(
            f"align must be 'start' or 'end', but it is {align!r}; 'end' puts the last query at the last key"
        )
    return dims.kv_len - dims.q_len if align == "end" else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AuxArrays:
    """Arrays of one mask or score, by how they vary.

    `q` and `k`: `[*B, T]` and `[*B, S]` (a last axis of 1 is shared by all tokens);
    `heads`: `[N, ...]`; `params`: any shape; `pairs`: broadcasts to `[*B, N, T, S]`; `entries`: `[*B]`. Of
    pairs, what varies over one side's tokens alone, and not over heads, is `of_q` or `of_k` once it is placed,
    and what varies over no tokens is in `heads`, as entries are.
    `shared` names the token data that were one array for queries and keys when they were placed.
    """

    q_tokens: Arrays = dataclasses.field(default_factory=dict)
    k_tokens: Arrays = dataclasses.field(default_factory=dict)
    per_head: Arrays = dataclasses.field(default_factory=dict)
    params: Arrays = dataclasses.field(default_factory=dict)
    pairwise: Arrays = dataclasses.field(default_factory=dict)
    per_batch: Arrays = dataclasses.field(default_factory=dict)
    pairwise_q: Arrays = dataclasses.field(default_factory=dict)
    pairwise_k: Arrays = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def views(self, q_index: Any, k_index: Any, dims: CallShape) -> tuple[Token, Token, Context]:
        """The scalar views that a mask or score function receives."""
        return (
            Token("q", q_index, dims.q_len, self.q_tokens),
            Token("k", k_index, dims.kv_len, self.k_tokens),
            Context(
                {
                    **self.per_head,
                    **self.params,
                    **self.pairwise,
                    **self.pairwise_q,
                    **self.pairwise_k,
                }
            ),
        )

    def _check_names(self, owner: str) -> None:
        for name in {"index", "length"} & {*self.q_tokens, *self.k_tokens}:
            raise ValueError(
                f"{owner}: token data may not be named {name!r}, which every token has already; "
                "rename it, or pass q_positions= and kv_positions= for other positions"
            )
        names = [*self.per_head, *self.params, *self.pairwise, *self.per_batch]
        for name in {n for n in names if names.count(n) > 1}:
            raise ValueError(
                f"{owner}: heads=, params=, pairs= and entries= share one context, but {name!r} is in "
                "two of them; rename one"
            )

    def to_leading_axes(
        self, owner: str, dims: CallShape, labels: Mapping[str, str] | None = None
    ) -> "AuxArrays":
        """The same arrays with the five leading axes; raises if a shape does not fit the call.

        `labels` are what messages call arrays that an argument of the call is.
        """
        self._check_names(owner)

        def each(arrays: Arrays, kind: str, put: Callable) -> dict[str, jax.Array]:
            label = (labels or {}).get
            named = {n: (label(n) or f"{owner}: {kind}[{n!r}]", x) for n, x in arrays.items()}
            return {n: put(name, as_array(name, x)) for n, (name, x) in named.items()}

        pairs = each(self.pairwise, "pairs", lambda n, x: _normalize_pairwise(n, x, dims))

        def of_kind(kind: str) -> dict[str, jax.Array]:
            return {n: x for n, x in pairs.items() if _pairwise_kind(x) == kind}

        return AuxArrays(
            q_tokens=each(
                self.q_tokens, "q_tokens", lambda n, x: normalize_tokens(n, x, dims, Q_AXIS)
            ),
            k_tokens=each(
                self.k_tokens, "k_tokens", lambda n, x: normalize_tokens(n, x, dims, K_AXIS)
            ),
            per_head=each(self.per_head, "heads", lambda n, x: _normalize_heads(n, x, dims))
            | each(self.per_batch, "entries", lambda n, x: _normalize_entries(n, x, dims))
            | of_kind("heads"),
            params=each(
                self.params, "params", lambda _, x: x.reshape((1,) * NUM_LEADING_AXES + x.shape)
            ),
            pairwise=of_kind("pairs"),
            pairwise_q=of_kind("of_q"),
            pairwise_k=of_kind("of_k"),
            shared=tuple(n for n, x in self.q_tokens.items() if self.k_tokens.get(n) is x),
        )


def as_array(name: str, x: Any, dtype: Any = None) -> jax.Array:
    """A JAX array; raises where JAX would cut upper bits off NumPy's integers without a word."""
    placed = jnp.asarray(x, dtype)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iu" and x.size:
        low, high, limits = int(x.min()), int(x.max()), jnp.iinfo(placed.dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{name} must hold integers that fit {limits.dtype}, but they are {low} to {high}; "
                "number them anew from 0"
            )
    return placed


def _merge_batch(name: str, x: jax.Array, dims: CallShape, rest: int, shape: str) -> jax.Array:
    """`[*batch, *rest]` with broadcasting batch axes -> `[B | 1, *rest]`."""
    have = x.shape[: x.ndim - rest]
    fits = len(have) <= len(dims.batch) and all(
        a in (1, b) for a, b in zip(have[::-1], dims.batch[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must have shape {shape} with batch axes that broadcast to {dims.batch}, but "
            f"it has shape {x.shape}; reshape it or drop its batch axes to share it"
        )
    tail = x.shape[x.ndim - rest :]
    if all(size == 1 for size in have):
        return x.reshape(1, *tail)
    return jnp.broadcast_to(x, dims.batch + tail).reshape(-1, *tail)


def normalize_tokens(name: str, x: jax.Array, dims: CallShape, axis: int) -> jax.Array:
    letter, size = ("T", dims.q_len) if axis == Q_AXIS else ("S", dims.kv_len)
    if x.ndim == 0 or x.shape[-1] not in (1, size):
        message = (
            f"{name} must have shape [*B, {letter}] with {letter} = {size} tokens (or 1, shared by "
            f"all), but it has shape {x.shape}"
        )
        if x.ndim and x.shape[-1] in dims[1:3]:
            message += (
                ", one for each token of the other side. Queries and keys are other tokens here: give each its "
                "own, as Segments(ids of the queries, kv_ids=ids of the keys), or q_tokens= and k_tokens= of "
                "mask_fn and score_fn (in decoding, of the new tokens and of the whole cache)"
            )
        heads = dims.kv_heads * dims.group if axis == Q_AXIS else dims.kv_heads
        message += _of_swapped_axes(x.ndim > 0 and x.shape[-1] == heads)
        raise ValueError(message)
    x = _merge_batch(name, x, dims, 1, f"[*B, {letter}]")
    shape = [x.shape[0], 1, 1, 1, 1]
    shape[axis] = x.shape[1]
    return x.reshape(shape)


def _normalize_heads(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    heads = dims.kv_heads * dims.group
    if x.ndim == 0 or x.shape[0] != heads:
        raise ValueError(
            f"{name} must have shape [N, ...] with N = {heads} query heads, but it has shape "
            f"{x.shape}; data shared by all heads belongs into params="
        )
    return x.reshape(1, dims.kv_heads, dims.group, 1, 1, *x.shape[1:])


def _normalize_entries(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    return _merge_batch(name, x, dims, 0, "[*B]").reshape((-1,) + (1,) * (NUM_LEADING_AXES - 1))


def _normalize_pairwise(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    heads = dims.kv_heads * dims.group
    shape = f"[*B, N | 1, T | 1, S | 1] with N = {heads}, T = {dims.q_len}, S = {dims.kv_len}"
    given = x.shape
    _check_leading_axes(name, given, dims)
    x = x.reshape((1,) * max(3 - x.ndim, 0) + x.shape)
    sizes = (heads, dims.q_len, dims.kv_len)
    if any(a not in (1, b) for a, b in zip(x.shape[-3:], sizes, strict=True)):
        raise ValueError(
            f"{name} must have shape {shape}, but it has shape {given}; transpose it, or insert "
            "axes of size 1 where it does not vary: of keys [B, S] it is array[:, None, None], of pairs "
            "[B, T, S] array[:, None]" + _of_swapped_axes(given[-2:] == (heads, dims.kv_heads))
        )
    x = _merge_batch(name, x, dims, 3, shape)
    split = (1, 1) if x.shape[1] == 1 else (dims.kv_heads, dims.group)
    return x.reshape(x.shape[0], *split, *x.shape[2:])


def _of_swapped_axes(fits: bool) -> str:
    hint = ". It would fit query and key of [*B, N, T, H]: their heads must be the axis before the last"
    return hint if fits else ""


def _check_leading_axes(name: str, shape: tuple[int, ...], dims: CallShape) -> None:
    """Refuses `[B, T, S]` and `[N, T, S]` where they could be either."""
    batch, heads = dims.batch, dims.kv_heads * dims.group
    leading = shape[:-2]
    if not batch or len(leading) != len(batch) or all(n == 1 for n in leading):
        return
    of_heads = leading[-1] == heads and leading[:-1] == batch[1:]
    if of_heads and leading == batch:
        raise ValueError(
            f"{name} must say which axis is heads' where both readings fit: of shape {shape} it could be "
            f"[*B, T, S] with batch axes {batch} or [N, T, S] with N = {heads}; write "
            "array[..., None, :, :] for the first, array[None] for the second"
        )


def _is_one(size: Any) -> bool:
    """Of a size that may be a symbol of `jax.export`, whose comparisons raise."""
    return isinstance(size, int) and size == 1


def _pairwise_kind(pairs: jax.Array) -> str:
    """What an array of pairs is, by the axes over which it varies."""
    *heads, queries, keys = [not _is_one(size) for size in pairs.shape[1:]]
    if not queries and not keys:
        return "heads"
    if any(heads) or (queries and keys):
        return "pairs"
    return "of_q" if queries else "of_k"


def vmap_over_leading_axes(fn: Callable, *args: Any) -> jax.Array:
    """Applies a scalar function over the five leading axes, broadcasting axes of size 1."""
    leaves, tree = jax.tree.flatten(match_varying_axes(args))

    def over(depth: int, leaves: list) -> jax.Array:
        if depth == NUM_LEADING_AXES:
            return fn(*jax.tree.unflatten(tree, leaves))
        axes = [None if x.shape[0] == 1 else 0 for x in leaves]
        leaves = [x if a == 0 else lax.squeeze(x, (0,)) for x, a in zip(leaves, axes, strict=True)]
        if all(a is None for a in axes):
            return over(depth + 1, leaves)[None]
        return jax.vmap(lambda *x: over(depth + 1, list(x)), in_axes=axes)(*leaves)

    return over(0, leaves)


def slice_tile(x: jax.Array, q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array:
    """The part of an array with the five leading axes that belongs to one tile."""
    for axis, start, size in ((Q_AXIS, q_start, q_size), (K_AXIS, k_start, k_size)):
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def add_to_tile(total: jax.Array, part: jax.Array, q_start: Any, k_start: Any) -> jax.Array:
    """Adds a tile's part to a whole: the transpose of `cut`."""
    start: list = [np.int32(0)] * total.ndim
    start[Q_AXIS] = q_start if total.shape[Q_AXIS] != 1 else start[0]
    start[K_AXIS] = k_start if total.shape[K_AXIS] != 1 else start[0]
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)
