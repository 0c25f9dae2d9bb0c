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

NUM_LEADING_AXES = 5  # B, K, G, T, S
Q_AXIS, K_AXIS = 3, 4


class CallShape(NamedTuple):
    """The sizes of one call: `batch` is the user's batch shape, `group` query heads share a key head.

    Where sequences are divided over devices, `q_len` and `kv_len` are the tokens on each, `sequence_lengths` those of
    the sequences (T, S), and pairwise arrays hold the queries of one device and the keys of all.
    """

    batch: tuple[int, ...]
    q_len: int
    kv_len: int
    kv_heads: int
    group: int
    sequence_lengths: tuple[int, int] | None = None

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths of the whole sequences of queries and keys."""
        return self.sequence_lengths or (self.q_len, self.kv_len)


def default_positions(length: int, axis: int) -> jax.Array:
    """Return 0, 1, 2, ... along one of the five leading axes."""
    shape = [1] * NUM_LEADING_AXES
    shape[axis] = length
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def check_align(align: Any, dims: CallShape) -> Any:
    """Return the position of the first query among the keys: 0, or S - T if the last query is at the last key."""
    if align not in ("start", "end"):
        raise ValueError(
            f"align must be 'start' or 'end', but it is {align!r}; 'end' puts the last query at the last key"
        )
    q_len, kv_len = dims.lengths
    return kv_len - q_len if align == "end" else 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AuxArrays:
    """The arrays of one mask or score, by the axes over which they vary.

    The user's shapes are `[*B, T]` in `q_tokens` and `[*B, S]` in `k_tokens` (a last axis of 1 is shared by all
    tokens), `[N, ...]` in `per_head`, any shape in `params`, what broadcasts to `[*B, N, T, S]` in `pairwise`, and
    `[*B]` in `per_batch`. With the five leading axes, a pairwise array that varies over the tokens of one side alone,
    and not over heads, is in `pairwise_q` or `pairwise_k`, and one that varies over no tokens is in `per_head`, as
    those of `per_batch` are. `shared` names the token arrays that were one array for queries and keys.
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
        """Return the arguments of a mask or score function: the query, the key and the context."""
        q_len, kv_len = dims.lengths
        context = (self.per_head, self.params, self.pairwise, self.pairwise_q, self.pairwise_k)
        return (
            Token("q", q_index, q_len, self.q_tokens),
            Token("k", k_index, kv_len, self.k_tokens),
            Context({name: x for arrays in context for name, x in arrays.items()}),
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
        """Return the same arrays with the five leading axes; raise a ValueError if a shape does not fit the call.

        Messages use `labels` for arrays that are themselves an argument of the call.
        """
        self._check_names(owner)

        def normalize(arrays: Arrays, kind: str, fn: Callable, *axis: int) -> dict[str, jax.Array]:
            label = (labels or {}).get
            named = {n: (label(n) or f"{owner}: {kind}[{n!r}]", x) for n, x in arrays.items()}
            return {n: fn(name, as_array(name, x), dims, *axis) for n, (name, x) in named.items()}

        pairs = normalize(self.pairwise, "pairs", _normalize_pairwise)

        def select(kind: str) -> dict[str, jax.Array]:
            return {n: x for n, x in pairs.items() if _pairwise_kind(x) == kind}

        return AuxArrays(
            q_tokens=normalize(self.q_tokens, "q_tokens", normalize_tokens, Q_AXIS),
            k_tokens=normalize(self.k_tokens, "k_tokens", normalize_tokens, K_AXIS),
            per_head=normalize(self.per_head, "heads", _normalize_heads)
            | normalize(self.per_batch, "entries", _normalize_entries)
            | select("per_head"),
            params=normalize(self.params, "params", _normalize_params),
            pairwise=select("pairwise"),
            pairwise_q=select("pairwise_q"),
            pairwise_k=select("pairwise_k"),
            shared=tuple(n for n, x in self.q_tokens.items() if self.k_tokens.get(n) is x),
        )


def as_array(name: str, x: Any, dtype: Any = None) -> jax.Array:
    """Return a JAX array; raise a ValueError where JAX would silently truncate NumPy's integers."""
    array = jnp.asarray(x, dtype)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iu" and x.size:
        low, high, limits = int(x.min()), int(x.max()), jnp.iinfo(array.dtype)
        if low < limits.min or high > limits.max:
            raise ValueError(
                f"{name} must hold integers that fit {limits.dtype}, but they are {low} to {high}; "
                "renumber them from 0"
            )
    return array


def _merge_batch(name: str, x: jax.Array, dims: CallShape, rest: int, shape: str) -> jax.Array:
    """Reshape `[*batch, *rest]`, whose batch axes broadcast to the call's, to `[B | 1, *rest]`."""
    batch = x.shape[: x.ndim - rest]
    fits = len(batch) <= len(dims.batch) and all(
        a in (1, b) for a, b in zip(batch[::-1], dims.batch[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must have shape {shape} with batch axes that broadcast to {dims.batch}, but "
            f"it has shape {x.shape}; reshape it or drop its batch axes to share it"
        )
    tail = x.shape[x.ndim - rest :]
    if all(size == 1 for size in batch):
        return x.reshape(1, *tail)
    return jnp.broadcast_to(x, dims.batch + tail).reshape(-1, *tail)


def normalize_tokens(name: str, x: jax.Array, dims: CallShape, axis: int) -> jax.Array:
    """Reshape token data `[*B, T]` or `[*B, S]` to the five leading axes."""
    letter, size = ("T", dims.q_len) if axis == Q_AXIS else ("S", dims.kv_len)
    if x.ndim == 0 or x.shape[-1] not in (1, size):
        message = (
            f"{name} must have shape [*B, {letter}] with {letter} = {size} tokens (or 1, shared by "
            f"all), but it has shape {x.shape}"
        )
        if x.ndim and x.shape[-1] in dims[1:3]:
            message += (
                ", one for each token of the other side. Queries and keys are not the same tokens here: pass "
                "separate arrays, as Segments(ids of the queries, kv_ids=ids of the keys), or q_tokens= and k_tokens= of "
                "mask_fn and score_fn (in decoding, of the new tokens and of the whole cache)"
            )
        heads = dims.kv_heads * dims.group if axis == Q_AXIS else dims.kv_heads
        message += _hint_at_swapped_axes(x.ndim > 0 and x.shape[-1] == heads)
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


def _normalize_params(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    return x.reshape((1,) * NUM_LEADING_AXES + x.shape)


def _normalize_entries(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    return _merge_batch(name, x, dims, 0, "[*B]").reshape((-1,) + (1,) * (NUM_LEADING_AXES - 1))


def _normalize_pairwise(name: str, x: jax.Array, dims: CallShape) -> jax.Array:
    heads = dims.kv_heads * dims.group
    kv_len = dims.lengths[1]
    shape = f"[*B, N | 1, T | 1, S | 1] with N = {heads}, T = {dims.q_len}, S = {kv_len}"
    user_shape = x.shape
    _check_leading_axes(name, user_shape, dims)
    x = x.reshape((1,) * max(3 - x.ndim, 0) + x.shape)
    sizes = (heads, dims.q_len, kv_len)
    if any(a not in (1, b) for a, b in zip(x.shape[-3:], sizes, strict=True)):
        raise ValueError(
            f"{name} must have shape {shape}, but it has shape {user_shape}; transpose it, or insert "
            "axes of size 1 where it does not vary: for keys [B, S] it is array[:, None, None], for pairs "
            "[B, T, S] array[:, None]"
            + _hint_at_swapped_axes(user_shape[-2:] == (heads, dims.kv_heads))
        )
    x = _merge_batch(name, x, dims, 3, shape)
    split = (1, 1) if x.shape[1] == 1 else (dims.kv_heads, dims.group)
    return x.reshape(x.shape[0], *split, *x.shape[2:])


def _hint_at_swapped_axes(fits: bool) -> str:
    hint = ". It would fit query and key of [*B, N, T, H]: their heads must be the axis before the last"
    return hint if fits else ""


def _check_leading_axes(name: str, shape: tuple[int, ...], dims: CallShape) -> None:
    """Raise a ValueError for an array that could be `[B, T, S]` or `[N, T, S]`."""
    batch, heads = dims.batch, dims.kv_heads * dims.group
    leading = shape[:-2]
    if not batch or len(leading) != len(batch) or all(n == 1 for n in leading):
        return
    has_heads = leading[-1] == heads and leading[:-1] == batch[1:]
    if has_heads and leading == batch:
        raise ValueError(
            f"{name} must say which axis is heads' where both readings fit: with shape {shape} it could be "
            f"[*B, T, S] with batch axes {batch} or [N, T, S] with N = {heads}; write "
            "array[..., None, :, :] for the first, array[None] for the second"
        )


def _pairwise_kind(pairs: jax.Array) -> str:
    """Return the field of `AuxArrays` for a pairwise array, by the axes over which it varies."""
    # Comparisons of a symbol of `jax.export` raise.
    *heads, queries, keys = [not (isinstance(n, int) and n == 1) for n in pairs.shape[1:]]
    if not queries and not keys:
        return "per_head"
    if any(heads) or (queries and keys):
        return "pairwise"
    return "pairwise_q" if queries else "pairwise_k"


def vmap_over_leading_axes(fn: Callable, *args: Any) -> jax.Array:
    """Apply a scalar function over the five leading axes, broadcasting axes of size 1."""
    leaves, tree = jax.tree.flatten(match_varying_axes(args))

    def map_axes(depth: int, leaves: list) -> jax.Array:
        if depth == NUM_LEADING_AXES:
            return fn(*jax.tree.unflatten(tree, leaves))
        axes = [None if x.shape[0] == 1 else 0 for x in leaves]
        leaves = [x if a == 0 else lax.squeeze(x, (0,)) for x, a in zip(leaves, axes, strict=True)]
        if all(a is None for a in axes):
            return map_axes(depth + 1, leaves)[None]
        return jax.vmap(lambda *x: map_axes(depth + 1, list(x)), in_axes=axes)(*leaves)

    return map_axes(0, leaves)


def slice_tile(x: jax.Array, q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array:
    """Slice an array with the five leading axes to one tile."""
    for axis, start, size in ((Q_AXIS, q_start, q_size), (K_AXIS, k_start, k_size)):
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def add_to_tile(total: jax.Array, update: jax.Array, q_start: Any, k_start: Any) -> jax.Array:
    """Add an array of one tile to the array of all tiles: the transpose of `slice_tile`."""
    start: list = [np.int32(0)] * total.ndim
    for axis, first in ((Q_AXIS, q_start), (K_AXIS, k_start)):
        if total.shape[axis] != 1:
            start[axis] = jnp.asarray(first, jnp.int32)  # a Python number would be int64 under x64
    old = lax.dynamic_slice(total, start, update.shape)
    return lax.dynamic_update_slice(total, old + update, start)
