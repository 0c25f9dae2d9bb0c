"""Tokens, the data that rides with them, and scalar functions of a pair of tokens.

Masks and scores are written as scalar functions of one query token and one key token. Three things
evaluate them: a dense tile (`lift`), a kernel, and interval arithmetic (`bounds.py`). What they
share is one layout: every array has five leading axes `[B, K, G, T, S]` (batch, key head, query
head within its group, query, key), each of its full size or 1, so that slicing a tile, batching and
the reduction of a gradient are the same for all of them.
"""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

LEADING = 5  # B, K, G, T, S
Q_AXIS, K_AXIS = 3, 4

Arrays = Mapping[str, Any]


class Dims(NamedTuple):
    """Sizes of one call: `batch` is the user's batch shape, `group` query heads share a key head."""

    batch: tuple[int, ...]
    q_len: int
    kv_len: int
    kv_heads: int
    group: int


def check_align(align: Any, dims: Dims) -> Any:
    """The position of the first query among the keys: 0, or S - T where the last ones lie side by side."""
    if align not in ("start", "end"):
        raise ValueError(
            f"align must be 'start' or 'end', but it is {align!r}; 'end' puts the last query at the last key"
        )
    return dims.kv_len - dims.q_len if align == "end" else 0


class TokenMisuse(TypeError):
    """A token was used as if it were its position."""


class Token:
    """What a mask or score function sees of one token: `index`, `length` and its declared fields."""

    def __init__(self, side: str, index: Any, length: int, fields: Arrays):
        self.index = index  # global position, int32
        self.length = length  # tokens on this side, a Python integer
        self._side = side
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            known = ", ".join(["index", "length", *self._fields])
            raise AttributeError(
                f"{self._side}.{name}: no such token data (it has {known}); declare it with "
                f"tokens={{'{name}': array}} where the mask or score is made"
            )
        return self._fields[name]

    def _is_no_number(self, *_: Any) -> Any:
        raise TokenMisuse(
            f"{self._side} is a token, which has no value of its own; write {self._side}.index for its "
            "position, as in q.index >= k.index"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = _is_no_number  # pyright: ignore
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = (
        _is_no_number
    )
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _is_no_number
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = _is_no_number
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __abs__ = __neg__ = __pos__ = (
        _is_no_number
    )
    __int__ = __float__ = __index__ = __len__ = __iter__ = __array__ = _is_no_number
    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Context:
    """The data of a mask or score that does not belong to one token: heads, params and pairs."""

    def __init__(self, fields: Arrays):
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._fields:
            known = ", ".join(self._fields) or "nothing"
            raise AttributeError(
                f"c.{name}: no such data (there is {known}); declare it with heads=, params= or "
                "pairs= where the mask or score is made"
            )
        return self._fields[name]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Data:
    """Arrays of one mask or score, by how they vary.

    `q` and `k`: `[*B, T]` and `[*B, S]` (a last axis of 1 is shared by all tokens);
    `heads`: `[N, ...]`; `params`: any shape; `pairs`: broadcasts to `[*B, N, T, S]`; `entries`: `[*B]`. Of
    pairs, what varies over one side's tokens alone, and not over heads, is `of_q` or `of_k` once it is placed,
    and what varies over no tokens is in `heads`, as entries are.
    `shared` names the token data that were one array for queries and keys when they were placed.
    """

    q: Arrays = dataclasses.field(default_factory=dict)
    k: Arrays = dataclasses.field(default_factory=dict)
    heads: Arrays = dataclasses.field(default_factory=dict)
    params: Arrays = dataclasses.field(default_factory=dict)
    pairs: Arrays = dataclasses.field(default_factory=dict)
    entries: Arrays = dataclasses.field(default_factory=dict)
    of_q: Arrays = dataclasses.field(default_factory=dict)
    of_k: Arrays = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def views(self, q_index: Any, k_index: Any, dims: Dims) -> tuple[Token, Token, Context]:
        """The scalar views that a mask or score function receives."""
        return (
            Token("q", q_index, dims.q_len, self.q),
            Token("k", k_index, dims.kv_len, self.k),
            Context({**self.heads, **self.params, **self.pairs, **self.of_q, **self.of_k}),
        )

    def _check_names(self, owner: str) -> None:
        for name in {"index", "length"} & {*self.q, *self.k}:
            raise ValueError(
                f"{owner}: token data may not be named {name!r}, which every token has already; "
                "rename it, or pass q_positions= and kv_positions= for other positions"
            )
        names = [*self.heads, *self.params, *self.pairs, *self.entries]
        for name in {n for n in names if names.count(n) > 1}:
            raise ValueError(
                f"{owner}: heads=, params=, pairs= and entries= share one context, but {name!r} is in "
                "two of them; rename one"
            )

    def place(self, owner: str, dims: Dims, labels: Mapping[str, str] | None = None) -> "Data":
        """The same arrays with the five leading axes; raises if a shape does not fit the call.

        `labels` are what messages call arrays that an argument of the call is.
        """
        self._check_names(owner)

        def each(arrays: Arrays, kind: str, put: Callable) -> dict[str, jax.Array]:
            label = (labels or {}).get
            named = {n: (label(n) or f"{owner}: {kind}[{n!r}]", x) for n, x in arrays.items()}
            return {n: put(name, as_array(name, x)) for n, (name, x) in named.items()}

        pairs = each(self.pairs, "pairs", lambda n, x: _place_pairs(n, x, dims))

        def of_kind(kind: str) -> dict[str, jax.Array]:
            return {n: x for n, x in pairs.items() if _kind_of(x) == kind}

        return Data(
            q=each(self.q, "q_tokens", lambda n, x: place_tokens(n, x, dims, Q_AXIS)),
            k=each(self.k, "k_tokens", lambda n, x: place_tokens(n, x, dims, K_AXIS)),
            heads=each(self.heads, "heads", lambda n, x: _place_heads(n, x, dims))
            | each(self.entries, "entries", lambda n, x: _place_entries(n, x, dims))
            | of_kind("heads"),
            params=each(self.params, "params", lambda _, x: x.reshape((1,) * LEADING + x.shape)),
            pairs=of_kind("pairs"),
            of_q=of_kind("of_q"),
            of_k=of_kind("of_k"),
            shared=tuple(n for n, x in self.q.items() if self.k.get(n) is x),
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


def _merge_batch(name: str, x: jax.Array, dims: Dims, rest: int, shape: str) -> jax.Array:
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


def place_tokens(name: str, x: jax.Array, dims: Dims, axis: int) -> jax.Array:
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


def _place_heads(name: str, x: jax.Array, dims: Dims) -> jax.Array:
    heads = dims.kv_heads * dims.group
    if x.ndim == 0 or x.shape[0] != heads:
        raise ValueError(
            f"{name} must have shape [N, ...] with N = {heads} query heads, but it has shape "
            f"{x.shape}; data shared by all heads belongs into params="
        )
    return x.reshape(1, dims.kv_heads, dims.group, 1, 1, *x.shape[1:])


def _place_entries(name: str, x: jax.Array, dims: Dims) -> jax.Array:
    return _merge_batch(name, x, dims, 0, "[*B]").reshape((-1,) + (1,) * (LEADING - 1))


def _place_pairs(name: str, x: jax.Array, dims: Dims) -> jax.Array:
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


def _check_leading_axes(name: str, shape: tuple[int, ...], dims: Dims) -> None:
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


def _kind_of(pairs: jax.Array) -> str:
    """What an array of pairs is, by the axes over which it varies."""
    *heads, queries, keys = [not _is_one(size) for size in pairs.shape[1:]]
    if not queries and not keys:
        return "heads"
    if any(heads) or (queries and keys):
        return "pairs"
    return "of_q" if queries else "of_k"


@dataclasses.dataclass(frozen=True, eq=False)
class Pointwise:
    """A traced scalar function. Equal if its jaxpr is, so a fresh lambda does not recompile."""

    name: str
    jaxpr: ClosedJaxpr
    key: tuple
    fn: Callable

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pointwise) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> jax.Array:
        """On scalars."""
        if self.jaxpr.out_avals[0].dtype == jnp.bool_:  # pyright: ignore[reportAttributeAccessIssue]
            return _seen(self.jaxpr, jax.tree.leaves(args))
        if any(map(_varying, jax.tree.leaves(args))):
            # Constants of the jaxpr vary over no mesh axis, and would not go with what does.
            return self.fn(*args)
        return jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves(args))[0]

    def on_tile(self, *args: Any) -> jax.Array:
        """On arrays with the five leading axes, which broadcast against each other."""
        return lift(self, *args)


def off_mesh() -> AbstractContextManager:
    """Around what is the same on a mesh, also inside `shard_map`, as without one."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def traced(fn: Callable, *scalars: Any) -> ClosedJaxpr:
    with off_mesh():
        return jax.make_jaxpr(fn)(*scalars)


def trace(name: str, fn: Callable, *args: Any) -> Pointwise:
    """Traces `fn` on the element types of `args` (arrays with the five leading axes)."""
    scalars = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[LEADING:], x.dtype), args)
    jaxpr = traced(fn, *scalars)
    for const in _captured(jaxpr):
        raise ValueError(
            f"{name} captures an array of shape {jnp.shape(const)}; a mask or score function may "
            "capture Python numbers only. Pass the array as tokens=, heads=, params= or pairs= and "
            "read it from q, k or c"
        )
    key = _key(jaxpr)
    if "custom_jvp_call" in key[0]:
        key = *key, _key(_derivative(fn, scalars))
    return Pointwise(name, jaxpr, (key, jax.tree.structure(args)), fn)


def _key(jaxpr: ClosedJaxpr) -> tuple:
    """The text of a jaxpr, and what stands there by its address: functions that are called back, for example."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(jaxpr)), *_known_by_address(jaxpr.jaxpr)


def _known_by_address(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _known_by_address(getattr(inner, "jaxpr", inner))
                # What a custom rule for jvp computes is told by the derivative.
                elif eqn.primitive.name != "custom_jvp_call" and " at 0x" in str(inner):
                    yield inner if isinstance(inner, Hashable) else object()


def _derivative(fn: Callable, scalars: Any) -> ClosedJaxpr:
    leaves, tree = jax.tree.flatten(scalars)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(others: list, *floats: Any) -> Any:
        merged = list(others)
        for i, x in zip(at, floats, strict=True):
            merged[i] = x
        return fn(*jax.tree.unflatten(tree, merged))

    def tangent(others: list, floats: list) -> Any:
        return jax.jvp(lambda *x: of_floats(others, *x), floats, floats)

    return traced(tangent, leaves, [leaves[i] for i in at])


def _captured(jaxpr: ClosedJaxpr) -> list:
    """Arrays that a traced function captured, itself or in a function that it calls."""
    inner = (p for e in jaxpr.jaxpr.eqns for p in e.params.values() if isinstance(p, ClosedJaxpr))
    return [*jaxpr.consts, *(const for p in inner for const in _captured(p))]


# Equations that do no more than call their jaxpr. (A loop has one too.)
CALLS = {"pjit", "jit", "closed_call", "custom_jvp_call", "remat2", "checkpoint"}


def called(eqn: Any) -> tuple[Any, Any] | None:
    """The jaxpr that an equation calls, and its constants."""
    if eqn.primitive.name not in CALLS:
        return None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())


def follow(jaxpr: Any, consts: Any, args: list, constant: Callable, apply: Callable) -> list:
    """Runs a jaxpr on what stands for its values: constant(array), and apply(eqn, ins) of an equation."""
    env: dict[Any, Any] = {}

    def read(v: Any) -> Any:
        aval = v.aval
        return constant(np.asarray(v.val, aval.dtype)) if isinstance(v, Literal) else env[v]

    env.update(zip(jaxpr.constvars, map(constant, consts), strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        env.update(zip(eqn.outvars, apply(eqn, ins), strict=True))
    return [read(v) for v in jaxpr.outvars]


def negative(x: jax.Array) -> jax.Array:
    """-x. Of integers it is a product with what XLA does not know to be -1: up to 13.3 ptxas computes
    max(max(a, -b), c) on Hopper by one VIMNMX3, without the minus
    (https://github.com/pytorch/pytorch/issues/190973)."""
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return -x
    return x * lax.optimization_barrier(jnp.asarray(-1, x.dtype))


def magnitude(x: jax.Array) -> jax.Array:
    """|x|, which XLA writes as max(x, -x): with `negative`."""
    return jnp.maximum(x, negative(x))


def _seen(code: ClosedJaxpr, args: list) -> jax.Array:
    """A mask's code, with `negative` and `magnitude` for those of integers."""
    rules = {"neg": negative, "abs": magnitude}

    def apply(eqn: Any, ins: list) -> list:
        if (inner := called(eqn)) is not None:
            return follow(*inner, ins, constant, apply)
        rule = rules.get(eqn.primitive.name)
        if rule is not None and jnp.issubdtype(ins[0].dtype, jnp.signedinteger):
            return [rule(*ins)]
        with eqn.ctx.manager:
            found = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        return found if eqn.primitive.multiple_results else [found]

    def constant(x: Any) -> jax.Array:
        return alike(jnp.asarray(x), args)

    (seen,) = follow(code.jaxpr, code.consts, args, constant, apply)
    return seen


def _varying(x: Any) -> frozenset:
    """The mesh axes over which an array inside `shard_map` varies."""
    return jax.typeof(x).manual_axis_type.varying


def alike(tree: Any, like: Any = ()) -> Any:
    """Inside `shard_map`, arrays that all vary over the same axes of the mesh, as primitives want.

    An array that varies over fewer is the same on some devices; its gradient is summed over them.
    """
    axes = frozenset().union(*map(_varying, jax.tree.leaves((tree, like))))

    def vary(x: Any) -> Any:
        missing = tuple(sorted(axes - _varying(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def lift(fn: Callable, *args: Any) -> jax.Array:
    """Applies a scalar function over the five leading axes, broadcasting axes of size 1."""
    leaves, tree = jax.tree.flatten(alike(args))

    def over(depth: int, leaves: list) -> jax.Array:
        if depth == LEADING:
            return fn(*jax.tree.unflatten(tree, leaves))
        axes = [None if x.shape[0] == 1 else 0 for x in leaves]
        leaves = [x if a == 0 else lax.squeeze(x, (0,)) for x, a in zip(leaves, axes, strict=True)]
        if all(a is None for a in axes):
            return over(depth + 1, leaves)[None]
        return jax.vmap(lambda *x: over(depth + 1, list(x)), in_axes=axes)(*leaves)

    return over(0, leaves)


def cut(x: jax.Array, q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array:
    """The part of an array with the five leading axes that belongs to one tile."""
    for axis, start, size in ((Q_AXIS, q_start, q_size), (K_AXIS, k_start, k_size)):
        if x.shape[axis] != 1:
            x = lax.dynamic_slice_in_dim(x, start, size, axis)
    return x


def cut_into(total: jax.Array, part: jax.Array, q_start: Any, k_start: Any) -> jax.Array:
    """Adds a tile's part to a whole: the transpose of `cut`."""
    start: list = [np.int32(0)] * total.ndim
    start[Q_AXIS] = q_start if total.shape[Q_AXIS] != 1 else start[0]
    start[K_AXIS] = k_start if total.shape[K_AXIS] != 1 else start[0]
    old = lax.dynamic_slice(total, start, part.shape)
    return lax.dynamic_update_slice(total, old + part, start)
